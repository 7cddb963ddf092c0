"""Figures of a study."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from captum_hta.study.mixing import by_distance
from captum_hta.study.patterns import PatternExamples
from captum_hta.views.heatmaps import heatmaps
from captum_hta.views.names import QUANTITY_NAMES
from captum_hta.views.style import ATTENTION, INPUT, PREVIOUS, STYLE

LEARNT = {"none": "no map", "linear": "linear map", "mlp": "MLP"}
"""What figures call maps of hidden tokens."""


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
        axes[0].set_ylabel(f"attention and {QUANTITY_NAMES[source]}")
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
            axis.plot(mean.index, mean, marker="o", color=colour, label=QUANTITY_NAMES[quantity])
        _label_centres(axis, centres)
        axis.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(quantities))
    return figure


def centres_together_figure(centres: pd.DataFrame, quantity: str) -> Figure:
    """Figure 4 with several studies: the centre of mass per layer, mean over heads, a line for each label.

    Args:
        centres: As :meth:`captum_hta.study.run.Study.centres_of_mass` gives, with a column ``label``.
        quantity: ``"attention"`` or ``"input"``.
    """
    table = centres[centres["quantity"] == quantity]
    labels = list(dict.fromkeys(table["label"]))
    shades = mpl.colormaps["viridis"](np.linspace(0, 0.85, max(1, len(labels))))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axis = figure.subplots()
        for label, shade, marker in zip(labels, shades, itertools.cycle("osD^v"), strict=False):
            mean = table[table["label"] == label].groupby("layer")["centre_of_mass"].mean()
            axis.plot(mean.index, mean, marker=marker, markersize=4, color=shade, label=label)
        _label_centres(axis, table)
        axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _label_centres(axis: Axes, centres: pd.DataFrame) -> None:
    """The axes of centres of mass over layers, with a line at the query."""
    axis.axhline(0, color="0.6", linewidth=0.8)
    layers = sorted(centres["layer"].unique())
    axis.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
    axis.xaxis.set_major_locator(FixedLocator(layers, nbins=16))
    axis.set_xlabel("layer")
    axis.set_ylabel("centre of mass of the histogram\n(relative position)")


def own_share_figure(mixing: pd.DataFrame) -> Figure:
    """Brunner et al. 2020, section 5: the share of a token's own input in its hidden embeddings, median and
    quartiles, and how often it is the largest.
    """
    layers = sorted(mixing["layer"])
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(6.4, 0.4 * len(layers) + 3), 3.2), layout="constrained")
        share, largest = figure.subplots(1, 2)
        share.fill_between(
            mixing["layer"], mixing["own_lower_quartile"], mixing["own_upper_quartile"],
            color=INPUT, alpha=0.25, linewidth=0, label="quartiles",
        )  # fmt: skip
        share.plot(mixing["layer"], mixing["own_median"], color=INPUT, marker="o", label="median")
        share.set_title("share of the own input")
        share.legend(frameon=False)
        largest.plot(mixing["layer"], mixing["own_is_largest"], color=INPUT, marker="o")
        largest.set_title("own input is the largest")
        for axis in (share, largest):
            axis.set_ylim(0, 1.02)
            axis.set_xlabel("layer")
            axis.grid(axis="y", color="0.92")
            axis.set_axisbelow(True)
            axis.xaxis.set_major_locator(FixedLocator(layers, nbins=12))
    return figure


def identifiability_figure(table: pd.DataFrame) -> Figure:
    """Brunner et al. 2020, section 4: the share of hidden tokens that tell their input token, by what is
    applied to them before, with standard errors; dashed, what chance would give.
    """
    layers = sorted(table["layer"].unique())
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(6.4, 0.4 * len(layers) + 3), 3.2), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for axis, (distance, rows) in zip(axes, table.groupby("distance"), strict=True):
            for name, colour in zip(LEARNT, (ATTENTION, PREVIOUS, INPUT), strict=True):
                one = rows[(rows["map"] == name) & rows["identified"].notna()]
                if len(one):
                    _with_error(axis, one, colour)
            axis.axhline(rows["chance"].iloc[0], color="0.6", linewidth=0.8, linestyle="--")
            axis.set_title(f"{distance} distance".capitalize())
            axis.set_ylim(0, 1.02)
            axis.set_xlabel("layer")
            axis.grid(axis="y", color="0.92")
            axis.set_axisbelow(True)
            axis.xaxis.set_major_locator(FixedLocator(layers, nbins=12))
        axes[0].set_ylabel("identified tokens")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def _with_error(axis: Axes, rows: pd.DataFrame, colour: str) -> None:
    """The line of one map, in a band of its standard error."""
    low, high = (rows["identified"] + side * rows["identified_error"] for side in (-1, 1))
    label = LEARNT[rows["map"].iloc[0]]
    axis.plot(rows["layer"], rows["identified"], color=colour, marker="o", markersize=3, label=label)
    axis.fill_between(rows["layer"], low, high, color=colour, alpha=0.25, linewidth=0)


def neighbours_figure(mixing: pd.DataFrame) -> Figure:
    """Brunner et al. 2020, section 5: what the tokens at each distance give to a hidden token together."""
    layers = sorted(mixing["layer"])
    given = by_distance(mixing).dropna(axis=1, how="all")
    shades = mpl.colormaps["viridis"](np.linspace(0, 0.9, max(1, given.shape[1])))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(6.4, 0.4 * len(layers) + 3), 3.4), layout="constrained")
        axis = figure.subplots()
        for (distance, values), shade in zip(given.items(), shades, strict=False):
            axis.plot(
                mixing["layer"], values, color=shade, marker="o", markersize=3,
                label=distance,
            )  # fmt: skip
        axis.set_ylim(0)
        axis.set_xlabel("layer")
        axis.set_ylabel("contribution of both\ntokens at a distance")
        axis.grid(axis="y", color="0.92")
        axis.set_axisbelow(True)
        axis.xaxis.set_major_locator(FixedLocator(layers, nbins=16))
        if given.shape[1]:
            figure.legend(title="distance", loc="outside right center", frameon=False)
    return figure


def pattern_figure(examples: PatternExamples) -> Figure:
    """Pascual et al. 2021, Figure 7: for each pattern a head whose attention is of it, in one text, and
    beside it what the head takes in.
    """
    return heatmaps(examples.maps, examples.tokens, examples.titles)


def effective_figure(table: pd.DataFrame, d_head: int) -> Figure:
    """Brunner et al. 2020, Figure 1 (a): the correlation of attention with effective attention by the length
    of texts, a line a layer with its standard error.

    Args:
        table: As :meth:`captum_hta.study.effective.EffectiveAgreement.table` gives.
        d_head: Width of a head's output, up to which all of the attention has an effect.
    """
    layers = sorted(table["layer"].unique())
    shades = mpl.colormaps["viridis"](np.linspace(0, 0.9, max(1, len(layers))))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.8, 3.6), layout="constrained")
        axis = figure.subplots()
        lines = []
        for layer, shade in zip(layers, shades, strict=True):
            one = table[table["layer"] == layer].sort_values("shortest")
            middle = (one["shortest"] + one["longest"]) / 2
            lines.append(
                axis.errorbar(
                    middle, one["correlation"], one["correlation_error"], color=shade, marker="o",
                    markersize=3, elinewidth=0.8, label=layer,
                )
            )  # fmt: skip
        width = axis.axvline(d_head + 0.5, color="0.4", linestyle="--", label=f"width of a head, {d_head}")
        axis.set_xlabel("tokens of the text")
        axis.set_ylabel("Pearson correlation of attention\nand effective attention")
        axis.grid(axis="y", color="0.92")
        axis.set_axisbelow(True)
        axis.legend(handles=[width], frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1))
        columns = 1 + (len(layers) - 1) // 12
        figure.legend(handles=lines, loc="outside right center", frameon=False, title="layer", ncols=columns)
    return figure
