"""How much of what heads look at, and of what they take in, is a text's first token."""

from __future__ import annotations

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from captum_hta.report.over_layers import course, draw_grid, draw_layer_axis, width
from captum_hta.report.page import CaptionedFigure, Section, Table
from captum_hta.study.run import Study
from captum_hta.study.sinks import MEASURES, Sinks
from captum_hta.views.style import ATTENTION, INPUT, PREVIOUS, STYLE

NAMES = {
    "attention": "attention",
    "previous_layer": "previous-layer contribution",
    "input": "input contribution",
}
COLOURS = {"attention": ATTENTION, "previous_layer": PREVIOUS, "input": INPUT}

# --- section ---------------------------------------------------------------------------------------


def sinks(study: Study) -> Section | None:
    """The section; ``None`` if sinks were not measured."""
    analysis = study.find(Sinks)
    if analysis is None:
        return None
    table = analysis.table()
    return Section(
        "The first token",
        "Decoders attend to the first token where there is nothing to look for (Xiao et al. 2024). Its share "
        "of attention, and of what heads take in, over all later queries.",
        [
            CaptionedFigure(
                "figure12_sinks.png",
                "Share of the first token in attention and in contributions",
                _caption(table),
                sinks_figure(table),
                _alt(table),
            )
        ],
        [
            Table.of(
                table,
                "Share of the first token by head",
                "Mean over all queries except the first ± its standard error by text.",
                {"layer": "layer", "head": "head", **NAMES, "texts": "texts"},
                folded=True,
            )
        ],
    )


# --- caption and alternative text ------------------------------------------------------------------


def _caption(table: pd.DataFrame) -> str:
    means = table[list(MEASURES)].mean()
    sink = table["attention"] > 0.5
    heads = "1 head attends" if sink.sum() == 1 else f"{sink.sum()} of {len(table)} heads attend"
    found = f"{heads} to the first token with more than half of the attention"
    if sink.any():
        taken = table.loc[sink, list(MEASURES)].mean()
        found += (
            f"; there it has {taken['attention']:.0%} of the attention, {taken['previous_layer']:.0%} of the "
            f"previous-layer contribution and {taken['input']:.0%} of the input contribution"
        )
    return (
        "Left: mean over heads, with the quartiles of heads. Right: each head's two contributions over its "
        f"attention; on the line they are equal. Over all heads, the first token has "
        f"{means['attention']:.0%} of the attention, {means['previous_layer']:.0%} of the previous-layer "
        f"contribution and {means['input']:.0%} of the input contribution. {found}."
    )


def _alt(table: pd.DataFrame) -> str:
    means = table.groupby("layer")[list(MEASURES)].mean()
    courses = "; ".join(f"in {NAMES[measure]} it {course(means[measure])}" for measure in MEASURES)
    return (
        "Two panels. Left, three lines over the layers: the first token's share, mean over heads; "
        f"{courses}. Right, two dots for each head: its previous-layer and its input contribution from the "
        "first token over its attention to it."
    )


# --- figure ----------------------------------------------------------------------------------------


def sinks_figure(table: pd.DataFrame) -> Figure:
    """The first token's share over the layers, and head by head.

    Args:
        table: As :meth:`captum_hta.study.sinks.Sinks.table` returns.
    """
    layers = sorted(table["layer"].unique())
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width(layers) + 1, 3.6), layout="constrained")
        over_layers, heads = figure.subplots(1, 2, width_ratios=[3, 2])
        for measure in MEASURES:
            _draw_over_layers(over_layers, table, measure)
        draw_layer_axis(over_layers, layers)
        over_layers.set_ylabel("share of the first token")
        heads.axline((0, 0), slope=1, color="0.6", linewidth=0.8)
        for measure in MEASURES[1:]:
            heads.scatter(
                table["attention"], table[measure], s=10, color=COLOURS[measure], alpha=0.6, linewidths=0
            )
        heads.set_xlim(0, 1)
        heads.set_xlabel("share of attention, each head")
        heads.set_ylabel("share of contribution")
        for axis in (over_layers, heads):
            axis.set_ylim(0, 1)
            draw_grid(axis)
        figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def _draw_over_layers(axis: Axes, table: pd.DataFrame, measure: str) -> None:
    shares = table.groupby("layer")[measure]
    mean, colour = shares.mean(), COLOURS[measure]
    axis.fill_between(
        mean.index, shares.quantile(0.25), shares.quantile(0.75), color=colour, alpha=0.15, linewidth=0
    )
    axis.plot(mean.index, mean, color=colour, marker="o", markersize=3, label=NAMES[measure])
