"""The output folder of a study: tables, figures, the run's record, and a page that shows them."""

from __future__ import annotations

import base64
import io
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from captum_hta import plots
from captum_hta.study import Study, finite

PACKAGES = ("captum-hta", "torch", "transformers", "captum", "transformer-lens", "numpy", "scipy")
PAPER = "Pascual et al. 2021"
UNDEFINED = "The texts are too short, or attention too even, for a correlation in every layer."


@dataclass(frozen=True)
class Shown:
    """A figure with what to say about it."""

    file: str
    title: str
    sentence: str
    figure: Figure


def write(folder: Path, study: Study, record: dict[str, Any]) -> list[Path]:
    """Write the tables, the figures, ``run.json`` and ``report.html`` of a study.

    Args:
        folder: Made if it is missing.
        study: A study of at least one example.
        record: Model, arguments and counts of the run; findings and versions are added.

    Returns:
        The files.

    Raises:
        OSError: If the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        "correlations.csv": study.correlations(),
        "relative_positions.csv": study.relative_positions(),
        "centres_of_mass.csv": study.centres_of_mass(),
        "layers.csv": study.layer_summary(),
    }
    if study.mixing is not None:
        tables["mixing.csv"] = study.mixing.table()
    shown = figures(study)
    record = record | {
        "findings": {name: finite(value) for name, value in study.findings().items()},
        "standard_errors": _finite_errors(study),
        "ways": study.plans,
        "versions": versions(),
    }
    files = []
    for name, table in tables.items():
        table.to_csv(folder / name, index=False)
        files.append(folder / name)
    images = {}
    for item in shown:
        images[item.file] = png(item.figure)
        (folder / item.file).write_bytes(images[item.file])
        files.append(folder / item.file)
    page = _page(study, shown, images, record)
    for name, text in {
        "run.json": json.dumps(record, indent=2) + "\n",
        "report.html": page,
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
        files.append(folder / name)
    return files


def _finite_errors(study: Study) -> dict[str, dict[str, float | None]]:
    errors = study.probe_errors()
    return {
        source: {name: finite(value) for name, value in found.items()} for source, found in errors.items()
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def png(figure: Figure) -> bytes:
    """A figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def figures(study: Study) -> list[Shown]:
    """The figures after the paper's Figures 1 to 6, with a sentence each."""
    correlations, positions = study.correlations(), study.relative_positions()
    centres = study.centres_of_mass()
    return [
        Shown(
            "figure1_attention_and_previous_layer.png",
            "Attention and previous-layer contribution",
            _sentence_1(study),
            plots.correlation_figure(correlations, "previous_layer"),
        ),
        Shown(
            "figure2_attention_positions.png",
            "Where attention lies",
            "Mean attention at each position relative to the query, for every head: what looks like a "
            "head's habit, such as the previous or the next token, is read off here.",
            plots.histogram_figure(positions, "attention"),
        ),
        Shown(
            "figure3_input_positions.png",
            "Where the input that a head takes in lies",
            "The same for the input contribution. Since hidden tokens are mixtures of input tokens, what "
            "a head takes in can lie elsewhere than what it attends to.",
            plots.histogram_figure(positions, "input"),
        ),
        Shown(
            "figure4_attention_centre.png",
            "Centre of mass of attention",
            "Centre of mass of the histograms of Figure 2 per layer (line: mean over heads; points: heads). "
            "Below zero a head looks back, above zero ahead. Each position counts by its mean attention, as "
            "in the paper, however seldom texts are long enough for it: so this is not the mean distance "
            "that attention spans.",
            plots.centre_figure(centres, ["attention"]),
        ),
        Shown(
            "figure5_centres.png",
            "Centre of mass of attention and of input contribution",
            _sentence_5(study.layer_summary()),
            plots.centre_figure(centres, ["attention", "input"]),
        ),
        Shown(
            "figure6_attention_and_input.png",
            "Attention and input contribution",
            _sentence_6(study.layer_summary()),
            plots.correlation_figure(correlations, "input"),
        ),
        *([] if study.mixing is None else _of_hidden_tokens(study.mixing.table())),
    ]


def _of_hidden_tokens(mixing: pd.DataFrame) -> list[Shown]:
    """After section 5 of Brunner et al. 2020."""
    first, last = mixing.iloc[0], mixing.iloc[-1]
    return [
        Shown(
            "figure7_own_share.png",
            "How much hidden tokens keep of themselves",
            "Contributions to the hidden embedding after each block (Brunner et al. 2020, section 5). The "
            f"median share of a token's own input goes from {first['own_median']:.2f} to "
            f"{last['own_median']:.2f}; it is the largest share for {first['own_is_largest']:.0%} of the "
            f"tokens at first, for {last['own_is_largest']:.0%} at last.",
            plots.own_share_figure(mixing),
        ),
        Shown(
            "figure8_neighbours.png",
            "From how far hidden tokens take the rest",
            "What the two tokens at each distance give together, mean over tokens that have such neighbours: "
            "near ones first in early layers, less so later, where context is more widely spread.",
            plots.neighbours_figure(mixing),
        ),
    ]


def _sentence_1(study: Study) -> str:
    found = study.findings()
    pearson = found["share_of_heads_pearson_over_0.85"]
    spearman = found["share_of_heads_spearman_over_0.95"]
    if np.isnan(pearson) or np.isnan(spearman):
        return UNDEFINED
    return (
        f"Within its own block a head takes in roughly what it attends to: {pearson:.0%} of the heads "
        f"have a Pearson correlation above 0.85 ({PAPER}, BERT: 90%), and {spearman:.0%} a Spearman "
        "correlation above 0.95 (75%)."
    )


def _sentence_5(layers: pd.DataFrame) -> str:
    attention, inputs = layers["centre_of_mass_attention"], layers["centre_of_mass_input"]
    return (
        f"Over the layers the centre of the histograms of attention lies between {attention.min():+.2f} and "
        f"{attention.max():+.2f}, that of the input contribution between {inputs.min():+.2f} and "
        f"{inputs.max():+.2f} (in relative positions, each weighed alike)."
    )


def _sentence_6(layers: pd.DataFrame) -> str:
    pearson, spearman = layers["pearson_input_median"], layers["spearman_input_median"]
    if pearson.isna().any() or spearman.isna().any():
        return UNDEFINED
    lowest = layers.loc[pearson.idxmin(), "layer"]
    return (
        "How far attention tells what a head takes in of the input tokens: over the layers, the median "
        f"Pearson correlation over heads goes from {pearson.iloc[0]:.2f} to {pearson.iloc[-1]:.2f}, with "
        f"its lowest, {pearson.min():.2f}, in layer {lowest:.0f}; the median Spearman correlation goes "
        f"from {spearman.iloc[0]:.2f} to {spearman.iloc[-1]:.2f}."
    )


def _plain(value: Any) -> Any:
    """A value of the record as a reader would write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else value


def _error_sentences(study: Study) -> list[str]:
    sentences = []
    for source, errors in study.probe_errors().items():
        name = plots.MAPS[source].capitalize() + "s"
        if np.isfinite(errors["largest"]):
            how = f"with a standard error of {errors['mean']:.4f} on average and of at most "
            sentences.append(f"{name} are estimates, {how}{errors['largest']:.4f}.")
        else:
            sentences.append(f"{name} are estimates from a single probe, whose error is not known.")
    return sentences or ["All contributions are exact."]


def _cell(value: float) -> str:
    if np.isnan(value):
        return "-"
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.3f}"


def _page(study: Study, shown: Sequence[Shown], images: dict[str, bytes], record: dict[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("captum_hta", ""), autoescape=True, trim_blocks=True
    )
    environment.filters["plain"] = _plain
    layers = study.layer_summary().round(3)
    return environment.get_template("report.html.jinja").render(
        shown=shown,
        images={name: base64.b64encode(image).decode() for name, image in images.items()},
        record=record,
        columns=[column.replace("_", " ") for column in layers.columns],
        rows=[[_cell(value) for value in row] for row in layers.itertuples(index=False)],
        errors=_error_sentences(study),
        tokens=sum(study.tokens),
    )
