"""``captum-hta study``."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from captum_hta import __version__, corpus, report, study
from captum_hta.cli.options import (
    Adapter,
    Data,
    Debug,
    Device,
    Exact,
    Layers,
    Limit,
    ModelName,
    Norm,
    Part,
    Seed,
    Strict,
    TimesInputs,
    Tolerance,
    Truncation,
    UserError,
    announce,
    check_folder,
    counted,
    load,
    named_layers,
    out,
    plain,
    print_error,
    probes_or_exact,
    progress,
    read_corpus,
    rounded,
)
from captum_hta.contributions import encoded, missing_tokens
from captum_hta.model import Model
from captum_hta.shards import Shards


def run_study(
    data: Data = None,
    output: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")] = Path("hta-study"),
    limit: Limit = None,
    strict: Strict = False,
    layers: Layers = None,
    model: ModelName = None,
    part: Part = None,
    adapter: Adapter = None,
    truncation: Truncation = False,
    device: Device = None,
    seed: Seed = 0,
    norm: Norm = "frobenius",
    probes: Annotated[
        int | None,
        typer.Option(
            help=f"Probes of each token for the input contribution. Default: {study.DEFAULT_PROBES}.",
            min=1,
        ),
    ] = None,
    tolerance: Tolerance = None,
    exact: Exact = False,
    multiply_by_inputs: TimesInputs = False,
    debug: Debug = False,
) -> None:
    """Study a model on a corpus: attention against what the heads really take in.

    Writes tables (CSV), figures (PNG), a record of the run (run.json) and report.html, after "Telling
    BERT's Full Story" (Pascual et al. 2021) and section 5 of "On Identifiability in Transformers" (Brunner
    et al. 2020). Bad lines are reported and skipped. What is done is kept in the folder: a study that was
    stopped goes on when the same command is given again.

    Example: captum-hta study pairs.jsonl --limit 50 --out results
    """
    arguments = {
        "data": str(data or "the shipped pairs"), "limit": limit, "layers": layers or "all", "norm": norm,
        "probes": probes_or_exact(probes, tolerance, exact, norm, study.DEFAULT_PROBES),
        "tolerance": tolerance, "exact": exact,
        "multiply_by_inputs": multiply_by_inputs, "seed": seed, "device": device,
        "part": part, "adapter": adapter, "truncation": truncation,
    }  # fmt: skip
    started = time.perf_counter()
    check_folder(output)
    loaded = load(model, device, adapter, part)
    if loaded.reader.medium != "text":
        raise UserError(
            f"{loaded.name} reads {loaded.reader.reads}; a study is of texts: name a model that reads them"
        )
    chosen = named_layers(layers, loaded)
    texts, bad = read_corpus(data or corpus.shipped_pairs(), loaded, limit, strict, truncation)
    encodings = [encoded(loaded, text, number, truncation) for number, text in enumerate(texts)]
    cut = sum(missing_tokens(loaded, *pair) > 0 for pair in zip(texts, encodings, strict=True))
    asked = {"layers": chosen, "norm": norm, "n_probes": arguments["probes"]}
    announce(loaded, [len(encoding) for encoding in encodings], asked, tolerance)
    setting = study.Setting(
        chosen, norm, multiply_by_inputs, arguments["probes"], tolerance, seed, truncation
    )
    digest = hashlib.blake2b(repr(texts).encode(), digest_size=16).hexdigest()
    facts = arguments | {"model": loaded.fingerprint, "texts": digest, "version": __version__}
    shards = Shards(output / "parts", {name: facts[name] for name in facts if name not in ("data", "device")})
    with progress(len(texts)) as advance:
        found = study.run(loaded, texts, setting, lambda done: advance(done * len(texts)), shards)
    record = {
        "model": loaded.name,
        "arguments": arguments,
        "seed": seed,
        "counts": {
            "examples": len(texts), "bad_lines": len(bad), "cut": cut, "tokens": sum(found.tokens),
            "seconds": round(time.perf_counter() - started, 1),
        },
        "bad_lines": [str(line) for line in bad],
    }  # fmt: skip
    report.write(output, found, record)
    _print_study(found, loaded, output, bad, cut)


def _print_study(found: study.Study, model: Model, output: Path, bad: list[corpus.BadLine], cut: int) -> None:
    summary = found.layer_summary()
    table = Table(
        title=f"{plain(model.name)}: medians over heads, correlation with attention", title_justify="left"
    )
    names = {
        "layer": "layer",
        "pearson_previous_layer_median": "previous layer, Pearson",
        "spearman_previous_layer_median": "Spearman",
        "pearson_input_median": "input, Pearson",
        "spearman_input_median": "Spearman",
    }
    for name in names.values():
        table.add_column(name, justify="right")
    for _, row in summary.iterrows():
        values = [rounded(row[name], ".2f") for name in list(names)[1:]]
        table.add_row(f"{row['layer']:.0f}", *values)
    out.print(table)
    shares = found.findings()
    out.print(
        f"Previous layer: {rounded(shares['share_of_heads_pearson_over_0.85'], '.0%')} of heads over Pearson "
        f"0.85, {rounded(shares['share_of_heads_spearman_over_0.95'], '.0%')} over Spearman 0.95.",
        highlight=False,
    )
    for source, errors in found.probe_errors().items():
        print_error(source, errors["mean"], errors["largest"])
    if bad:
        out.print(f"{counted(len(bad), 'bad line')} skipped.", highlight=False)
    if cut:
        out.print(
            f"{counted(cut, 'text')} cut, since {model.name} reads {model.max_length}.", highlight=False
        )
    out.print(f"Report: {output / 'report.html'}", highlight=False, markup=False, soft_wrap=True)
