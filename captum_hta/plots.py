"""Figures: heatmaps of single examples, and the figures of a study."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator
from numpy.typing import NDArray

ATTENTION, PREVIOUS, INPUT = "#4c72b0", "#55a868", "#c44e52"
STYLE = {
    "font.size": 9,
    "font.family": ["DejaVu Sans"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "figure.dpi": 120,
}
LEAST_SIDE = 2.0
"""Inches of a heatmap's side that its title fits on."""
MOST_SIDE = 9.3
"""Inches of a heatmap's side; of longer texts some tokens go without a label."""
MOST_INCHES = 95.0
"""Inches of the heatmaps of a column together."""
MAPS = {
    "attention": "attention",
    "previous_layer": "previous-layer contribution",
    "input": "input contribution",
}


def heatmaps(maps: dict[str, NDArray[np.float64]], tokens: Sequence[str], rows: Sequence[str]) -> Figure:
    """Attention and contributions side by side.

    Args:
        maps: For each of :data:`MAPS` an array ``[row, query, key]``.
        tokens: Labels of queries and keys.
        rows: Titles of the rows, such as ``"layer 3, head 5"``.

    Returns:
        A figure with one row of panels for each of ``rows``, on one colour scale a row.
    """
    cell = _cell(len(tokens), len(rows))
    side = cell * len(tokens)
    with mpl.rc_context(STYLE):
        figure = Figure(
            figsize=(len(maps) * (side + 1.3) + 0.8, len(rows) * (side + 1.25) + 0.3),
            layout="constrained",
        )
        axes = figure.subplots(len(rows), len(maps), squeeze=False)
        for row, title in enumerate(rows):
            top = max(1e-9, *(float(values[row].max()) for values in maps.values()))
            for column, (name, values) in enumerate(maps.items()):
                _heatmap(axes[row, column], values[row], tokens, cell, top)
                axes[row, column].set_title(f"{title}\n{MAPS[name]}")
            axes[row, 0].set_ylabel("query (target token)")
        for axis in axes[-1]:
            axis.set_xlabel("key (source token)")
    return figure


def _cell(tokens: int, rows: int) -> float:
    """Inches of a cell: large for short texts, and for long ones such that a viewer opens the picture."""
    readable = float(np.clip(4.2 / tokens, 0.155, 0.3))
    return min(max(readable, LEAST_SIDE / tokens), MOST_SIDE / tokens, MOST_INCHES / (rows * tokens))


def _heatmap(axis: Axes, values: NDArray[np.float64], tokens: Sequence[str], cell: float, top: float) -> None:
    """One panel, in the colours of its row: equal ones are equal numbers. Small ones are spread."""
    image = axis.imshow(values, cmap="magma_r", norm=PowerNorm(0.5, vmin=0, vmax=top))
    step = max(1, round(0.155 / cell))
    text = {"fontsize": min(9.0, 52 * cell * step), "parse_math": False}
    axis.set_xticks(range(0, len(tokens), step), tokens[::step], rotation=90, **text)
    axis.set_yticks(range(0, len(tokens), step), tokens[::step], **text)
    axis.tick_params(length=2)
    axis.spines[:].set_visible(False)
    bar = axis.figure.colorbar(image, cax=axis.inset_axes((1.03, 0, 0.045, 1)))
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)


# --- figures of a study ----------------------------------------------------------------------------


def correlation_figure(correlations: pd.DataFrame, source: str) -> Figure:
    """Figures 1 and 6: the correlation of attention with a contribution, one point a head."""
    table = correlations[correlations["source"] == source]
    layers = sorted(table["layer"].unique())
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(6.4, 0.55 * len(layers) + 3), 3.4), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for axis, measure in zip(axes, ("pearson", "spearman"), strict=True):
            groups = [table.loc[table["layer"] == layer, measure].dropna() for layer in layers]
            _boxes(axis, groups, layers, PREVIOUS if source == "previous_layer" else INPUT)
            axis.set_title(f"{measure.capitalize()} correlation")
            axis.set_xlabel("layer")
        lowest = table[["pearson", "spearman"]].min().min()
        axes[0].set_ylim(min(0.0, lowest - 0.05) if np.isfinite(lowest) else 0.0, 1.02)
        axes[0].set_ylabel(f"attention and {MAPS[source]}")
    return figure


def _boxes(axis: Axes, groups: Sequence[pd.Series], layers: Sequence[int], colour: str) -> None:
    axis.boxplot(
        [group.to_numpy() for group in groups],
        tick_labels=[str(layer) for layer in layers],
        showfliers=False,
        widths=0.6,
        medianprops={"color": "black"},
        boxprops={"color": "0.6"},
        whiskerprops={"color": "0.6"},
        capprops={"color": "0.6"},
    )
    for position, group in enumerate(groups, 1):
        spread = np.linspace(-0.22, 0.22, len(group)) if len(group) > 1 else np.zeros(len(group))
        axis.scatter(position + spread, group, s=9, color=colour, alpha=0.8, linewidths=0, zorder=3)
    axis.grid(axis="y", color="0.92")
    axis.set_axisbelow(True)


def histogram_figure(positions: pd.DataFrame, quantity: str, reach: int = 16) -> Figure:
    """Figures 2 and 3: mean value over relative position, for every head of every layer."""
    table = positions[(positions["quantity"] == quantity) & (positions["offset"].abs() <= reach)]
    reach = max(1, int(table["offset"].abs().max()))
    layers, heads = sorted(table["layer"].unique()), sorted(table["head"].unique())
    colour = ATTENTION if quantity == "attention" else INPUT
    with mpl.rc_context(STYLE):
        size = (max(3.6, 0.85 * len(heads) + 1), 0.75 * len(layers) + 1.1)  # on which the label fits
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(layers), len(heads), squeeze=False, sharex=True)
        for (layer, head), group in table.groupby(["layer", "head"]):
            axis = axes[layers.index(layer), heads.index(head)]
            edges = np.append(group["offset"] - 0.5, group["offset"].max() + 0.5)
            axis.stairs(group["value"], edges, fill=True, color=colour)
            axis.set_xlim(-reach - 0.5, reach + 0.5)
            axis.axvline(0, color="0.3", linewidth=0.5)
            axis.set_ylim(0)
            axis.set_yticks([])
            axis.set_xticks([-reach, 0, reach])
            axis.tick_params(labelsize=6, length=2)
        for row, layer in enumerate(layers):
            axes[row, 0].set_ylabel(f"layer {layer}", fontsize=7)
        for column, head in enumerate(heads):
            axes[0, column].set_title(f"head {head}", fontsize=7)
        figure.supxlabel(
            "position of the key relative to the query\n(each panel on its own scale)", fontsize=9
        )
    return figure


def centre_figure(centres: pd.DataFrame, quantities: Sequence[str]) -> Figure:
    """Figures 4 and 5: the centre of mass per layer, mean over heads, with every head as a point."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        axis = figure.subplots()
        for quantity, shift in zip(quantities, np.linspace(-0.08, 0.08, len(quantities)), strict=True):
            table = centres[centres["quantity"] == quantity]
            colour = ATTENTION if quantity == "attention" else INPUT
            mean = table.groupby("layer")["centre_of_mass"].mean()
            axis.scatter(
                table["layer"] + (shift if len(quantities) > 1 else 0),
                table["centre_of_mass"],
                s=8,
                color=colour,
                alpha=0.5,
                linewidths=0,
            )
            axis.plot(mean.index, mean, marker="o", color=colour, label=MAPS[quantity])
        axis.axhline(0, color="0.6", linewidth=0.8)
        layers = sorted(centres["layer"].unique())
        axis.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
        axis.xaxis.set_major_locator(FixedLocator(layers, nbins=16))
        axis.set_xlabel("layer")
        axis.set_ylabel("centre of mass of the histogram\n(relative position)")
        axis.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(quantities))
    return figure


# --- figures of comparisons ------------------------------------------------------------------------


def agreement_figure(matrix: pd.DataFrame) -> Figure:
    """Spearman's correlation of every method with every other, the mean over rows."""
    names = list(matrix.columns)
    side = 0.52 * len(names) + 1.2
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(side + 2.2, side + 1.6), layout="constrained")
        axis = figure.subplots()
        axis.imshow(matrix, cmap="magma_r", vmin=0, vmax=1)
        for row, column in np.ndindex(matrix.shape):
            value = matrix.iat[row, column]
            shade = "white" if value > 0.55 else "black"
            text = f"{value:.2f}" if np.isfinite(value) else "-"
            axis.text(column, row, text, ha="center", va="center", color=shade, fontsize=8)
        axis.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
        axis.set_yticks(range(len(names)), names)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        axis.set_title("Spearman correlation of rows, mean over queries, heads and layers")
    return figure


def faithfulness_figure(table: pd.DataFrame) -> Figure:
    """For each intervention, how well methods rank what heads do: a line a method over the layers.

    Args:
        table: With columns ``intervention``, ``method``, ``layer``, ``spearman``, ``low`` and ``high``.
    """
    interventions, methods = list(dict.fromkeys(table["intervention"])), list(dict.fromkeys(table["method"]))
    layers = sorted(table["layer"].unique())
    columns = min(3, len(interventions))
    rows = -(-len(interventions) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.3 * columns + 2.2, 2.7 * rows + 0.4), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for axis, name in zip(axes.flat, interventions, strict=False):
            _lines(axis, table[table["intervention"] == name], methods)
            axis.set_title(name)
            axis.xaxis.set_major_locator(FixedLocator(layers, nbins=16))
        for axis in list(axes.flat)[len(interventions) :]:
            axis.set_axis_off()
        for axis in axes[-1]:
            axis.set_xlabel("layer")
        for axis in axes[:, 0]:
            axis.set_ylabel("Spearman correlation")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def _lines(axis: Axes, table: pd.DataFrame, methods: Sequence[str]) -> None:
    """A line a method with its confidence band; contributions stand out."""
    colours = mpl.colormaps["tab20"](np.arange(len(methods)) % 20)
    for method, colour in zip(methods, colours, strict=True):
        one = table[table["method"] == method].sort_values("layer")
        own = method.startswith("HTA")
        axis.plot(one["layer"], one["spearman"], color=colour, linewidth=2.4 if own else 1.2, label=method)
        axis.fill_between(one["layer"], one["low"], one["high"], color=colour, alpha=0.15, linewidth=0)
    axis.grid(axis="y", color="0.92")
    axis.set_axisbelow(True)
