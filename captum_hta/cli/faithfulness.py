"""``captum-hta faithfulness``: which method predicts how heads react when a source token changes."""

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

FILES = ("faithfulness.csv", "layers.csv", "faithfulness.png", "run.json")


def faithfulness(
    data: Data = None,
    output: OutputFolder = Path("hta-faithfulness"),
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
    """Measure which method predicts how heads react when a source token changes.

    Changes each token of each text in turn (by noise, or to the mean vector, zero, the mask token or another
    word), measures how far the output of every head moves, and compares the ranks. Writes tables by layer
    and head and by layer (CSV), a figure (PNG) and a record of the run (run.json).

    Example: captum-hta faithfulness pairs.jsonl --limit 20
    """
    options = EvaluationOptions(
        data, limit, strict, layers, model, part, adapter, device, seed, probes, exact
    )
    run = Evaluation.prepared(options, output, FILES)
    from captum_hta.evaluation.faithfulness import faithfulness as measured
    from captum_hta.report.methods import faithfulness_figure

    methods = run.methods(with_logits=False)
    with progress(len(run.texts)) as advance:
        found = measured(run.model, run.texts, methods, None, run.layers, seed, advance)
    _print_summary(found.summary(), run.model.name)
    by_layer = found.by_layer()
    run.write(
        {"faithfulness.csv": found.table(), "layers.csv": by_layer},
        {"faithfulness.png": faithfulness_figure(by_layer)},
    )


def _print_summary(summary: pd.DataFrame, name: str) -> None:
    correlations = table(f"{name}: how well methods rank the effects of changed tokens")
    correlations.add_column("method", no_wrap=True)
    spearman = summary.pivot_table("spearman", "method", "intervention", sort=False, dropna=False)
    for intervention in spearman.columns:
        correlations.add_column(str(intervention), justify="right")
    for method, values in spearman.iterrows():
        add_row(correlations, str(method), *(rounded(value, ".2f") for value in values))
    show(correlations)
    widest = (summary["high"] - summary["low"]).max() / 2
    say(
        "Spearman correlation with how far each head moves, mean over queries, heads, layers and texts. 95% "
        f"intervals by the bootstrap over texts are within ± {rounded(widest, '.2f')}; layers.csv has each.",
        "dim",
    )
