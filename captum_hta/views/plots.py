"""Figures: heatmaps of single examples, and the figures of a study."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator
from numpy.typing import NDArray

from captum_hta.study.mixing import by_distance
from captum_hta.study.patterns import PatternExamples

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
IMAGE_SIDE = 2.6
"""Inches of an image's longer side."""
VEIL = ListedColormap(np.column_stack([mpl.colormaps["magma"].colors[::-1], np.linspace(0.1, 0.9, 256)]))
"""The colours of heatmaps, through which an image is seen where values are small."""
LUMINANCE = np.array([0.299, 0.587, 0.114])
"""Weights of red, green and blue in grey (ITU-R BT.601)."""
MAPS = {
    "attention": "attention",
    "previous_layer": "previous-layer contribution",
    "input": "input contribution",
}
LEARNT = {"none": "no map", "linear": "linear map", "mlp": "MLP"}
"""What figures call maps of hidden tokens."""


def undrawable(labels: Iterable[str]) -> list[int]:
    """The numbers of labels with characters that the font of figures lacks."""
    known = get_font(findfont(STYLE["font.family"][0])).get_charmap()
    return [number for number, label in enumerate(labels) if any(ord(one) not in known for one in label)]


def _drawable(labels: Sequence[str]) -> list[str]:
    """Labels, and the numbers of those that cannot be drawn."""
    without = set(undrawable(labels))
    return [f"#{number}" if number in without else label for number, label in enumerate(labels)]


def heatmaps(
    maps: dict[str, NDArray[np.float64]],
    tokens: Sequence[str],
    rows: Sequence[str],
    keys: Sequence[str] | None = None,
) -> Figure:
    """Attention and contributions side by side.

    Args:
        maps: For each of :data:`MAPS` an array ``[row, query, key]``.
        tokens: Labels of queries and keys.
        rows: Titles of the rows, such as ``"layer 3, head 5"``.
        keys: Labels of keys, where they are of another text. Default: ``None``, as ``tokens``.

    Returns:
        A figure with one row of panels for each of ``rows``, on one colour scale a row.
    """
    keys = _drawable(tokens if keys is None else keys)
    tokens = _drawable(tokens)
    width, height = _sides(len(keys), len(tokens), len(rows))
    with mpl.rc_context(STYLE):
        figure = Figure(
            figsize=(len(maps) * (width + 1.3) + 0.8, len(rows) * (height + 1.25) + 0.3),
            layout="constrained",
        )
        axes = figure.subplots(len(rows), len(maps), squeeze=False)
        for row, title in enumerate(rows):
            top = max(1e-9, *(float(values[row].max()) for values in maps.values()))
            for column, (name, values) in enumerate(maps.items()):
                axis = axes[row, column]
                _heatmap(axis, values[row], top)
                _ticks(axis.xaxis, keys, width / len(keys), rotation=90)
                _ticks(axis.yaxis, tokens, height / len(tokens))
                axis.set_title(f"{title}\n{MAPS[name]}")
            axes[row, 0].set_ylabel("query (target token)")
        for axis in axes[-1]:
            axis.set_xlabel("key (source token)")
    return figure


def _sides(keys: int, queries: int, rows: int) -> tuple[float, float]:
    """Inches of a heatmap's width and height: of equal cells, but for a side too short for a title."""
    cell = _cell(max(keys, queries), rows)
    longest = cell * max(keys, queries)
    return (
        max(cell * keys, min(LEAST_SIDE, longest)),
        max(cell * queries, min(LEAST_SIDE / 2, longest)),
    )


def _cell(tokens: int, rows: int) -> float:
    """Inches of a cell: large for short texts, and for long ones such that a viewer opens the image."""
    readable = float(np.clip(4.2 / tokens, 0.155, 0.3))
    return min(max(readable, LEAST_SIDE / tokens), MOST_SIDE / tokens, MOST_INCHES / (rows * tokens))


def _heatmap(axis: Axes, values: NDArray[np.float64], top: float) -> None:
    """One panel, in the colours of its row: equal ones are equal numbers. Small ones are spread."""
    image = axis.imshow(values, cmap="magma_r", norm=PowerNorm(0.5, vmin=0, vmax=top), aspect="auto")
    axis.tick_params(length=2)
    axis.spines[:].set_visible(False)
    _colour_bar(axis, image)


def _ticks(line: Axis, labels: Sequence[str], cell: float, rotation: float = 0) -> None:
    """Labels on an axis whose cells are so many inches wide; not all, where they would not fit."""
    step = max(1, round(0.155 / cell))
    size = min(9.0, 52 * cell * step)
    line.set_ticks(
        range(0, len(labels), step), labels[::step], rotation=rotation, fontsize=size, parse_math=False
    )


def _colour_bar(axis: Axes, image: AxesImage) -> None:
    bar = axis.figure.colorbar(image, cax=axis.inset_axes((1.03, 0, 0.045, 1)))
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)


# --- images --------------------------------------------------------------------------------------


def overlays(
    maps: dict[str, NDArray[np.float64]],
    image: NDArray[np.float64],
    grid: tuple[int, int],
    tokens: Sequence[str],
    query: int,
    rows: Sequence[str],
) -> Figure:
    """A image, and over it attention and contributions of one query's patches.

    Args:
        maps: For each of :data:`MAPS` an array ``[row, key]``.
        image: ``[height, width, 3]`` in 0 to 1.
        grid: Rows and columns of the patches, which are the last keys.
        tokens: Labels of queries and keys.
        query: Which token takes in what is shown; a patch is framed in the image.
        rows: Titles of the rows, such as ``"layer 3, head 5"``.

    Returns:
        A figure with one row of panels for each of ``rows``, on one colour scale a row. Titles say what
        comes from the tokens that have no place in the image.
    """
    special = tokens[: len(tokens) - grid[0] * grid[1]]
    width, height = _image_sides(image, len(rows))
    with mpl.rc_context(STYLE):
        figure = Figure(
            figsize=(width + 0.5 + len(maps) * (width + 0.75), len(rows) * (height + 0.75)),
            layout="constrained",
        )
        axes = figure.subplots(len(rows), 1 + len(maps), squeeze=False)
        for row, title in enumerate(rows):
            _image(axes[row, 0], image)
            axes[row, 0].set_title(f"{title}\nquery {tokens[query]}", parse_math=False)
            _frame(axes[row, 0], image, grid, query - len(special))
            top = max(1e-9, *(float(values[row, len(special) :].max()) for values in maps.values()))
            for axis, (name, values) in zip(axes[row, 1:], maps.items(), strict=True):
                _overlay(axis, image, values[row, len(special) :].reshape(grid), top)
                share = f"\n{values[row, : len(special)].sum():.0%} from {' and '.join(special)}"
                axis.set_title(MAPS[name] + share * bool(special), parse_math=False)
    return figure


def _image_sides(image: NDArray[np.float64], rows: int) -> tuple[float, float]:
    """Inches of an image's width and height."""
    height, width = image.shape[:2]
    scale = min(IMAGE_SIDE, MOST_INCHES / rows) / max(height, width)
    return max(scale * width, LEAST_SIDE), scale * height


def _image(axis: Axes, image: NDArray[np.float64]) -> None:
    axis.imshow(image)
    axis.set_axis_off()


def _overlay(axis: Axes, image: NDArray[np.float64], values: NDArray[np.float64], top: float) -> None:
    """Values of patches over an image without its colours, which would be taken for them."""
    height, width = image.shape[:2]
    axis.imshow(image @ LUMINANCE, cmap="gray", vmin=-1, vmax=1)  # light
    image = axis.imshow(
        values, cmap=VEIL, norm=PowerNorm(0.5, vmin=0, vmax=top), interpolation="nearest",
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
    )  # fmt: skip
    axis.set_axis_off()
    _colour_bar(axis, image)


def _frame(axis: Axes, image: NDArray[np.float64], grid: tuple[int, int], patch: int) -> None:
    """A frame around a patch, if it is one."""
    if patch < 0:
        return
    row, column = divmod(patch, grid[1])
    height, width = image.shape[0] / grid[0], image.shape[1] / grid[1]
    corner = (column * width - 0.5, row * height - 0.5)
    axis.add_patch(Rectangle(corner, width, height, fill=False, edgecolor="white", linewidth=3))
    axis.add_patch(Rectangle(corner, width, height, fill=False, edgecolor="black", linewidth=1))


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


# --- figures of comparisons ------------------------------------------------------------------------


def agreement_figure(matrix: pd.DataFrame) -> Figure:
    """Spearman's correlation of every method with every other, the mean over rows."""
    names = list(matrix.columns)
    side = 0.42 * len(names) + 1.2
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(side + 2.2, side + 1.6), layout="constrained")
        axis = figure.subplots()
        axis.imshow(matrix, cmap="magma_r", vmin=0, vmax=1)
        for row, column in np.ndindex(matrix.shape):
            value = matrix.iat[row, column]
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
