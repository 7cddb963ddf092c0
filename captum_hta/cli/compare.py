"""``captum-hta compare``: how far other methods agree with contributions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from captum_hta.cli.console import add_row, progress, rounded, say, show, table
from captum_hta.cli.evaluation import DEFAULT_PROBES, Evaluation, EvaluationOptions
from captum_hta.cli.options import (
    Adapter,
    Data,
    Debug,
    Device,
    Exact,
    Layers,
    Limit,
    ModelName,
    OutputFolder,
    Part,
    Seed,
    Strict,
    probes_option,
)

if TYPE_CHECKING:
    import pandas as pd

FILES = ("agreement.csv", "matrix.csv", "matrix.png", "run.json")
COLUMNS = {
    "method": "method",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "kendall": "Kendall",
    "top_overlap": "top 3 shared",
    "jensen_shannon": "JS distance",
}


def compare(
    data: Data = None,
    output: OutputFolder = Path("hta-compare"),
    limit: Limit = None,
    strict: Strict = False,
    layers: Layers = None,
    model: ModelName = None,
    part: Part = None,
    adapter: Adapter = None,
    device: Device = None,
    seed: Seed = 0,
    probes: Annotated[int | None, probes_option(DEFAULT_PROBES)] = None,
    exact: Exact = False,
    debug: Debug = False,
) -> None:
    """Compare contributions with attention and the methods that people use in its place.

    Compares each method's rows with the input contribution, and all methods with each other. Writes a table
    by layer and head (CSV), the matrix of methods (CSV and PNG) and a record of the run (run.json).

    Example: captum-hta compare pairs.jsonl --limit 20
    """
    options = EvaluationOptions(
        data, limit, strict, layers, model, part, adapter, device, seed, probes, exact
    )
    run = Evaluation.prepared(options, output, FILES)
    from captum_hta.evaluation.comparison import compare_methods
    from captum_hta.report.methods import agreement_figure

    methods = run.methods(with_logits=True)
    with progress(len(run.texts)) as advance:
        found, ranks = compare_methods(methods, run.model, run.texts, run.layers, advance)
    _print_summary(found.summary(), run.model.name)
    matrix = ranks.table()
    run.write(
        {"agreement.csv": found.table(), "matrix.csv": matrix.reset_index(names="method")},
        {"matrix.png": agreement_figure(matrix)},
    )


def _print_summary(summary: pd.DataFrame, name: str) -> None:
    agreement = table(f"{name}: agreement with the input contribution")
    for column, title in COLUMNS.items():
        is_name = column == "method"
        agreement.add_column(title, justify="left" if is_name else "right", no_wrap=is_name)
    for row in summary.to_dict("records"):
        add_row(agreement, row["method"], *(rounded(row[column], ".2f") for column in list(COLUMNS)[1:]))
    show(agreement)
    say(
        "Means over the rows of all heads of the layers. A method without heads is compared with each head.",
        "dim",
    )
