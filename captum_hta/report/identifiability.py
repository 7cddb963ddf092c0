"""How well tokens are identified from their hidden tokens, after section 4 of Brunner et al. 2020."""

from __future__ import annotations

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from captum_hta.report.over_layers import course, draw_grid, draw_layer_axis, width
from captum_hta.report.page import ERROR, CaptionedFigure, Section, Table
from captum_hta.study.identifiability import DISTANCES, MAPS, Identifiability
from captum_hta.study.run import Study
from captum_hta.views.style import ATTENTION, INPUT, PREVIOUS, STYLE

MAP_NAMES = {"none": "no map", "linear": "linear map", "mlp": "MLP"}
COLOURS = dict(zip(MAPS, (ATTENTION, PREVIOUS, INPUT), strict=True))
CASES = [(name, distance) for name in MAPS for distance in DISTANCES]

# --- section ---------------------------------------------------------------------------------------


def identified_tokens(study: Study) -> Section | None:
    """The section; ``None`` if texts do not attend to themselves."""
    analysis = study.find(Identifiability)
    if analysis is None:
        return None
    table = analysis.table()
    return Section(
        "Identifiability of hidden tokens",
        "A token is identified if the input embedding nearest to its hidden embedding, among those of its "
        "own text, is its own (Brunner et al. 2020, section 4): directly, after a linear map, and after a "
        f"small multilayer perceptron (MLP), both trained on other texts. {_split(analysis)}.",
        [
            CaptionedFigure(
                "figure10_identifiability.png",
                "Identified tokens",
                "Shares of the tokens of the test texts, with a band of one standard error; dashed: the "
                f"share expected by chance, {table['chance'].iloc[0]:.1%}.",
                identifiability_figure(table),
                _alt(table),
            )
        ],
        [_table(table)],
    )


def _split(analysis: Identifiability) -> str:
    """Which texts were used for what."""
    training, validation, test = analysis.sentences
    if analysis.note:
        return analysis.note.capitalize()
    return f"{training} texts are for training, {validation} for validation and {test} for the test"


def _table(table: pd.DataFrame) -> Table:
    wide = table.pivot(index="layer", columns=["map", "distance"])
    flat = pd.DataFrame(
        {
            f"{name} {distance}{end}": wide[f"identified{end}", name, distance]
            for name, distance in CASES
            for end in ("", ERROR)
        }
    ).reset_index()
    return Table.of(
        flat,
        "Identified tokens by layer",
        "Shares between 0 and 1 ± their standard errors by text, for each map and each distance by which the "
        "nearest embedding is found.",
        {"layer": "layer"}
        | {f"{name} {distance}": f"{MAP_NAMES[name]}, {distance}" for name, distance in CASES},
    )


def _alt(table: pd.DataFrame) -> str:
    known = table.dropna(subset="identified").set_index("layer")
    lines = "; ".join(
        f"{name} and {distance} distance: it {course(rows['identified'])}"
        for (name, distance), rows in known.groupby(["map", "distance"], sort=False)
    )
    return (
        "A panel for each distance with a line over the layers for each map: the share of hidden tokens "
        f"to which their own input embedding is the nearest. With map {lines}."
    )


# --- figure ----------------------------------------------------------------------------------------


def identifiability_figure(table: pd.DataFrame) -> Figure:
    """The share of identified tokens by map, with standard errors; dashed, the share expected by chance.

    Args:
        table: As :meth:`captum_hta.study.identifiability.Identifiability.table` returns.
    """
    layers = sorted(table["layer"].unique())
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width(layers), 3.2), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for axis, (distance, rows) in zip(axes, table.groupby("distance"), strict=True):
            for name in MAPS:
                _draw_line(axis, rows[(rows["map"] == name) & rows["identified"].notna()], name)
            axis.axhline(rows["chance"].iloc[0], color="0.6", linewidth=0.8, linestyle="--")
            axis.set_title(f"{distance} distance".capitalize())
            axis.set_ylim(0, 1.02)
            draw_grid(axis)
            draw_layer_axis(axis, layers, ticks=12)
        axes[0].set_ylabel("identified tokens")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def _draw_line(axis: Axes, rows: pd.DataFrame, name: str) -> None:
    """The line of one map, with a band of one standard error."""
    if rows.empty:
        return
    low, high = (rows["identified"] + side * rows["identified_error"] for side in (-1, 1))
    layers, colour = rows["layer"], COLOURS[name]
    axis.plot(layers, rows["identified"], label=MAP_NAMES[name], color=colour, marker="o", markersize=3)
    axis.fill_between(layers, low, high, color=colour, alpha=0.25, linewidth=0)
