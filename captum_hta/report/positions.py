"""Where attention and contributions lie: Figures 2 to 5 of Pascual et al. 2021."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from captum_hta.report.labelled_study import LabelledStudy, stacked
from captum_hta.report.over_layers import course, draw_layer_axis, draw_legend
from captum_hta.report.page import CaptionedFigure, Section
from captum_hta.study.positions import QUANTITIES, RelativePositions
from captum_hta.study.run import Study
from captum_hta.views.names import QUANTITY_NAMES
from captum_hta.views.style import ATTENTION, INPUT, STYLE, shades

REACH = 16
"""Largest distance from the query that histograms show."""
NEAR = {0: "the token itself", -1: "the token before", 1: "the token after"}
COLOURS = {"attention": ATTENTION, "input": INPUT}

# --- sections --------------------------------------------------------------------------------------


def relative_positions(study: Study) -> Section:
    """The section with Figures 2 to 5."""
    analysis = study[RelativePositions]
    figures = _histograms(analysis.table()) + _centres(analysis.centres_of_mass(), analysis.by_layer())
    return Section(
        "Where attention and contributions lie",
        "Positions are relative to the query: -1 is the token before it.",
        figures,
    )


def _histograms(positions: pd.DataFrame) -> list[CaptionedFigure]:
    """Figures 2 and 3."""
    return [
        CaptionedFigure(
            "figure2_attention_positions.png",
            "Where attention lies",
            "Mean attention at each position relative to the query, for every head. It shows, for "
            "example, whether a head attends to the previous or to the next token.",
            histogram_figure(positions, "attention", REACH),
            _histogram_alt(positions, "attention"),
        ),
        CaptionedFigure(
            "figure3_input_positions.png",
            "Where input contributions lie",
            "The same for the input contribution. Hidden tokens are mixtures of input tokens, so a head "
            "can take input from other positions than those that it attends to.",
            histogram_figure(positions, "input", REACH),
            _histogram_alt(positions, "input"),
        ),
    ]


def _centres(centres: pd.DataFrame, layers: pd.DataFrame) -> list[CaptionedFigure]:
    """Figures 4 and 5."""
    return [
        CaptionedFigure(
            "figure4_attention_centre.png",
            "Centre of mass of attention",
            "Centre of mass of the histograms of Figure 2 by layer (line: mean over heads; points: "
            "heads). Below zero a head looks back, above zero ahead. As in the paper, each position has "
            "the weight of its mean attention, even if few texts are long enough to have that position, "
            "so this is not the mean distance that attention spans.",
            centre_figure(centres, ["attention"]),
            _centre_alt(centres, ["attention"]),
        ),
        CaptionedFigure(
            "figure5_centres.png",
            "Centre of mass of attention and of input contribution",
            _centre_caption(layers),
            centre_figure(centres, QUANTITIES),
            _centre_alt(centres, QUANTITIES),
        ),
    ]


def centres_of_studies(studies: Sequence[LabelledStudy]) -> Section:
    """The section that compares the centres of mass of several studies."""
    centres = stacked(studies, "centres_of_mass")
    return Section(
        "Centre of mass",
        "After Figure 4 of Pascual et al. 2021: the mean over heads of the centre of mass of the histogram "
        "over relative positions. Below zero heads look back, above zero ahead. Tokens are in logical order, "
        "also in texts that are written from right to left.",
        [
            CaptionedFigure(
                f"centre_of_{quantity}.png",
                f"Centre of mass of {QUANTITY_NAMES[quantity]}",
                "A line for each study, over its layers.",
                centres_of_studies_figure(centres, quantity),
                _centres_of_studies_alt(centres, quantity),
            )
            for quantity in QUANTITIES
        ],
    )


# --- captions and alternative text -----------------------------------------------------------------


def _centre_caption(layers: pd.DataFrame) -> str:
    attention, inputs = layers["centre_of_mass_attention"], layers["centre_of_mass_input"]
    if len(layers) == 1:
        return (
            f"The centre of mass of attention is at {attention.item():+.2f}, that of the input contribution "
            f"at {inputs.item():+.2f} (in relative positions, weighted as in Figure 4)."
        )
    return (
        f"Over the layers, the centre of mass of attention lies between {attention.min():+.2f} and "
        f"{attention.max():+.2f}, that of the input contribution between {inputs.min():+.2f} and "
        f"{inputs.max():+.2f} (in relative positions, weighted as in Figure 4)."
    )


def _histogram_alt(table: pd.DataFrame, quantity: str) -> str:
    table = table[(table["quantity"] == quantity) & (table["offset"].abs() <= REACH)]
    highest = table.loc[table.groupby(["layer", "head"])["value"].idxmax(), "offset"]
    near = ", ".join(f"{words} in {(highest == offset).sum()}" for offset, words in NEAR.items())
    return (
        f"A grid of small histograms, {table['layer'].nunique()} layers by {table['head'].nunique()} heads: "
        f"mean {QUANTITY_NAMES[quantity]} by position of the key relative to the query. The highest bar is "
        f"at {near} and elsewhere in {(~highest.isin(list(NEAR))).sum()} of {len(highest)}."
    )


def _centre_alt(table: pd.DataFrame, quantities: Sequence[str]) -> str:
    sentences = ["A line of mean centres of mass over the layers, and a point for each head."]
    for quantity in quantities:
        heads = table[table["quantity"] == quantity].set_index("layer")["centre_of_mass"]
        sentences.append(
            f"That of {QUANTITY_NAMES[quantity]} {course(heads.groupby('layer').mean())}; that of single "
            f"heads lies between {heads.min():.2f} and {heads.max():.2f}."
        )
    return " ".join(sentences)


def _centres_of_studies_alt(table: pd.DataFrame, quantity: str) -> str:
    groups = table[table["quantity"] == quantity].groupby("label", sort=False)
    lines = [
        f"for {label} it {course(heads.groupby('layer')['centre_of_mass'].mean())}" for label, heads in groups
    ]
    return (
        f"A line over the layers for each of {len(lines)} studies, the mean centre of mass of "
        f"{QUANTITY_NAMES[quantity]}: {'; '.join(lines)}."
    )


# --- figures ---------------------------------------------------------------------------------------


def histogram_figure(positions: pd.DataFrame, quantity: str, reach: int = REACH) -> Figure:
    """Figures 2 and 3: the mean value at each relative position, for every head of every layer.

    Args:
        positions: As :meth:`captum_hta.study.positions.RelativePositions.table` returns.
        quantity: ``"attention"`` or ``"input"``.
        reach: Largest distance from the query.
    """
    table = positions[(positions["quantity"] == quantity) & (positions["offset"].abs() <= reach)]
    layers, heads = sorted(table["layer"].unique()), sorted(table["head"].unique())
    with mpl.rc_context(STYLE):
        size = (max(3.6, 0.85 * len(heads) + 1), 0.75 * len(layers) + 1.1)  # the label needs 3.6 inches
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(layers), len(heads), squeeze=False, sharex=True)
        for row, layer in enumerate(layers):
            for column, head in enumerate(heads):
                own = table[(table["layer"] == layer) & (table["head"] == head)]
                _draw_histogram(axes[row, column], own, COLOURS[quantity])
            axes[row, 0].set_ylabel(f"layer {layer}", fontsize=7)
        for column, head in enumerate(heads):
            axes[0, column].set_title(f"head {head}", fontsize=7)
        figure.supxlabel(
            "position of the key relative to the query\n(each panel on its own scale)", fontsize=9
        )
    return figure


def _draw_histogram(axis: Axes, table: pd.DataFrame, colour: str) -> None:
    reach = max(1, int(table["offset"].abs().max()))
    edges = np.append(table["offset"] - 0.5, table["offset"].max() + 0.5)
    axis.stairs(table["value"], edges, fill=True, color=colour)
    axis.set_xlim(-reach - 0.5, reach + 0.5)
    axis.axvline(0, color="0.3", linewidth=0.5)
    axis.set_ylim(0)
    axis.set_yticks([])
    axis.set_xticks([-reach, 0, reach])
    axis.tick_params(labelsize=6, length=2)


def centre_figure(centres: pd.DataFrame, quantities: Sequence[str]) -> Figure:
    """Figures 4 and 5: the centre of mass by layer, mean over heads, with a point for every head.

    Args:
        centres: As :meth:`captum_hta.study.positions.RelativePositions.centres_of_mass` returns.
        quantities: ``"attention"``, ``"input"`` or both.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        axis = figure.subplots()
        for quantity, shift in zip(quantities, np.linspace(-0.08, 0.08, len(quantities)), strict=True):
            table = centres[centres["quantity"] == quantity]
            mean = table.groupby("layer")["centre_of_mass"].mean()
            places = table["layer"] + (shift if len(quantities) > 1 else 0)
            colour, label = COLOURS[quantity], QUANTITY_NAMES[quantity]
            axis.scatter(places, table["centre_of_mass"], s=8, color=colour, alpha=0.5, linewidths=0)
            axis.plot(mean.index, mean, marker="o", color=colour, label=label)
        _draw_centre_axes(axis, centres)
        axis.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(quantities))
    return figure


def centres_of_studies_figure(centres: pd.DataFrame, quantity: str) -> Figure:
    """Figure 4 for several studies: the centre of mass by layer, mean over heads, a line for each study.

    Args:
        centres: As :meth:`captum_hta.study.positions.RelativePositions.centres_of_mass` returns, with a
            column ``label``.
        quantity: ``"attention"`` or ``"input"``.
    """
    table = centres[centres["quantity"] == quantity]
    labels = list(dict.fromkeys(table["label"]))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axis = figure.subplots()
        lines = []
        for label, shade, marker in zip(labels, shades(len(labels)), itertools.cycle("osD^v"), strict=False):
            mean = table[table["label"] == label].groupby("layer")["centre_of_mass"].mean()
            lines += axis.plot(mean.index, mean, marker=marker, markersize=4, color=shade)
        _draw_centre_axes(axis, table)
        draw_legend(axis, lines, labels)
    return figure


def _draw_centre_axes(axis: Axes, centres: pd.DataFrame) -> None:
    """The axes of centres of mass over layers, with a line at the query."""
    axis.axhline(0, color="0.6", linewidth=0.8)
    layers = sorted(centres["layer"].unique())
    axis.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
    draw_layer_axis(axis, layers)
    axis.set_ylabel("centre of mass of the histogram\n(relative position)")
