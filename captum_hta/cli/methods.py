"""``captum-hta compare`` and ``captum-hta faithfulness``: contributions beside other methods."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.table import Table

from captum_hta.cli.options import (
    Adapter,
    Data,
    Debug,
    Device,
    Exact,
    Layers,
    Limit,
    ModelName,
    Part,
    Reading,
    Seed,
    Strict,
    UserError,
    check_folder,
    counted,
    load,
    named_layers,
    out,
    plain,
    probes_or_exact,
    progress,
    read_corpus,
    rounded,
)
from captum_hta.evaluation.comparison import Method, compare_methods, methods_for
from captum_hta.evaluation.faithfulness import faithfulness as measure
from captum_hta.model.protocol import Model
from captum_hta.report import one_study as report
from captum_hta.report.methods import agreement_figure, faithfulness_figure
from captum_hta.study import corpus

DEFAULT_PROBES = 12
SHOWN = {
    "method": "method",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "kendall": "Kendall",
    "top_overlap": "top 3 shared",
    "jensen_shannon": "JS distance",
}
Probes = Annotated[
    int | None,
    typer.Option(help=f"Probes of each token for the input contribution. Default: {DEFAULT_PROBES}.", min=1),
]


def compare(
    data: Data = None,
    output: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")] = Path(
        "hta-compare"
    ),
    limit: Limit = None,
    strict: Strict = False,
    layers: Layers = None,
    model: ModelName = None,
    part: Part = None,
    adapter: Adapter = None,
    device: Device = None,
    seed: Seed = 0,
    probes: Probes = None,
    exact: Exact = False,
    debug: Debug = False,
) -> None:
    """Compare contributions with attention and the methods that people use in its place.

    Holds each method's rows against the input contribution, and all methods against each other. Writes a
    table for each layer and head (CSV), the matrix of methods (CSV and PNG) and a record of the run
    (run.json).

    Example: captum-hta compare pairs.jsonl --limit 20
    """
    run = _Run(data, output, limit, strict, layers, model, part, adapter, device, seed, probes, exact)
    methods = run.methods(with_logits=True)
    with progress(len(run.texts)) as advance:
        found = compare_methods(methods, run.model, run.texts, run.layers, advance)
    table = Table(
        title=f"{plain(run.model.name)}: agreement with the input contribution", title_justify="left"
    )
    for name in SHOWN.values():
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=name == "method")
    for _, row in found.summary().iterrows():
        table.add_row(plain(row["method"]), *(rounded(row[name], ".2f") for name in list(SHOWN)[1:]))
    out.print(table)
    out.print(
        "Means over the rows of all layers and heads. A method without heads is held against each of them.",
        style="dim",
    )
    matrix = found.matrix()
    run.write(
        {"agreement.csv": found.table(), "matrix.csv": matrix.reset_index(names="method")},
        {"matrix.png": agreement_figure(matrix)},
    )


def faithfulness(
    data: Data = None,
    output: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")] = Path(
        "hta-faithfulness"
    ),
    limit: Limit = None,
    strict: Strict = False,
    layers: Layers = None,
    model: ModelName = None,
    part: Part = None,
    adapter: Adapter = None,
    device: Device = None,
    seed: Seed = 0,
    probes: Probes = None,
    exact: Exact = False,
    debug: Debug = False,
) -> None:
    """Ask which method tells what heads really do when a source token changes.

    Changes each token of each text in turn (by noise, by the mean vector, zero, the mask token, another
    word), measures how far the output of every head moves, and ranks. Writes tables for each layer and head
    and for each layer (CSV), a figure (PNG) and a record of the run (run.json).

    Example: captum-hta faithfulness pairs.jsonl --limit 20
    """
    run = _Run(data, output, limit, strict, layers, model, part, adapter, device, seed, probes, exact)
    methods = run.methods(with_logits=False)
    with progress(len(run.texts)) as advance:
        found = measure(run.model, run.texts, methods, None, run.layers, seed, advance)
    _print_summary(found.summary(), run.model)
    by_layer = found.by_layer()
    run.write(
        {"faithfulness.csv": found.table(), "layers.csv": by_layer},
        {"faithfulness.png": faithfulness_figure(by_layer)},
    )


def _print_summary(summary: pd.DataFrame, model: Model) -> None:
    interventions = list(dict.fromkeys(summary["intervention"]))
    table = Table(title=f"{plain(model.name)}: how well methods rank what heads do", title_justify="left")
    table.add_column("method", no_wrap=True)
    for name in interventions:
        table.add_column(name, justify="right")
    for method, rows in summary.groupby("method", sort=False):
        by_name = rows.set_index("intervention")
        table.add_row(
            plain(method), *(rounded(by_name.loc[name, "spearman"], ".2f") for name in interventions)
        )
    out.print(table)
    widest = (summary["high"] - summary["low"]).max() / 2
    out.print(
        "Spearman correlation with how far each head moves, mean over queries, heads, layers and texts. 95% "
        f"intervals by the bootstrap over texts are within ± {rounded(widest, '.2f')}; layers.csv has each.",
        style="dim",
    )


class _Run:
    """What both commands read, do and write."""

    def __init__(
        self, data: Path | None, output: Path, limit: int | None, strict: bool, layers: str | None,
        model: str | None, part: str | None, adapter: str | None, device: str | None, seed: int,
        probes: int | None, exact: bool,
    ) -> None:  # fmt: skip
        self.started = time.perf_counter()
        self.probes = probes_or_exact(probes, None, exact, "frobenius", DEFAULT_PROBES)
        self.output, self.seed = output, seed
        check_folder(output)
        self.model = load(model, device, adapter, part)
        self.layers = named_layers(layers, self.model)
        if self.model.reader.medium != "text" or self.model.key_layers is not None:
            raise UserError(
                f"{self.model.name}: methods are compared on texts and their self-attention, so name a model "
                "that reads texts, and as --part encoder or decoder"
            )
        found = read_corpus(data or corpus.shipped_pairs(), self.model, Reading(limit=limit, strict=strict))
        self.texts, self.bad = found.texts, found.bad
        self.arguments = {
            "data": str(data or "the shipped pairs"), "limit": limit, "layers": layers or "all", "part": part,
            "adapter": adapter, "device": device, "seed": seed, "probes": self.probes,
        }  # fmt: skip

    def methods(self, with_logits: bool) -> list[Method]:
        """The methods that the model allows; says why others are left out."""
        methods, refused = methods_for(self.model, self.texts[0], self.probes, self.seed, with_logits)
        self.refused = refused
        reasons: dict[str, list[str]] = {}
        for name, reason in refused.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            out.print(f"Without {', '.join(names)}: {reason}.", style="dim", highlight=False, soft_wrap=True)
        return methods

    def write(self, tables: dict[str, pd.DataFrame], figures: dict[str, Any]) -> None:
        """Write the folder."""
        for name, table in tables.items():
            table.to_csv(self.output / name, index=False)
        for name, figure in figures.items():
            (self.output / name).write_bytes(report.png(figure))
        record = {
            "model": self.model.name,
            "arguments": self.arguments,
            "left_out": self.refused,
            "counts": {
                "examples": len(self.texts), "bad_lines": len(self.bad),
                "seconds": round(time.perf_counter() - self.started, 1),
            },
            "bad_lines": [str(line) for line in self.bad],
            "versions": report.versions(),
        }  # fmt: skip
        (self.output / "run.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if self.bad:
            out.print(f"{counted(len(self.bad), 'bad line')} skipped.", highlight=False)
        out.print(f"Results: {self.output}", highlight=False, markup=False, soft_wrap=True)
