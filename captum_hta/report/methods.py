"""Figures of methods that are compared with each other, and with what interventions show."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from captum_hta.views.style import HEAT, STYLE


def agreement_figure(matrix: pd.DataFrame) -> Figure:
    """Spearman's correlation of every method with every other, the mean over rows."""
    names = list(matrix.columns)
    side = 0.42 * len(names) + 1.2
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(side + 2.2, side + 1.6), layout="constrained")
        axis = figure.subplots()
        axis.imshow(matrix, cmap=HEAT, vmin=0, vmax=1)
        for (row, column), value in np.ndenumerate(matrix.to_numpy(dtype=np.float64)):
            shade = "white" if value > 0.45 else "black"
            text = f"{value:.2f}" if np.isfinite(value) else "-"
            axis.text(column, row, text, ha="center", va="center", color=shade, fontsize=8)
        axis.set_xticks(range(len(names)), names, rotation=90)
        axis.set_yticks(range(len(names)), names)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        axis.set_title("Spearman correlation")
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
        lowest = table["spearman"].min()
        axes[0, 0].set_ylim(min(0.0, lowest - 0.05) if np.isfinite(lowest) else 0.0, 1.02)
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def _lines(axis: Axes, table: pd.DataFrame, methods: Sequence[str]) -> None:
    """A line a method with its confidence band; contributions stand out."""
    colours = mpl.colormaps["tab20"](np.arange(len(methods)) % 20)
    for method, colour in zip(methods, colours, strict=True):
        one = table[table["method"] == method].sort_values("layer")
        own = method.startswith("HTA")
        width = 2.4 if own else 1.2
        axis.plot(
            one["layer"],
            one["spearman"],
            color=colour,
            linewidth=width,
            marker="o",
            markersize=3,
            label=method,
        )
        if len(one) == 1:
            axis.vlines(one["layer"], one["low"], one["high"], color=colour, linewidth=1)
        axis.fill_between(one["layer"], one["low"], one["high"], color=colour, alpha=0.15, linewidth=0)
    axis.grid(axis="y", color="0.92")
    axis.set_axisbelow(True)
