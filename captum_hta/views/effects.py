"""The effects of all heads on a logit, and the source tokens of the strongest."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from captum_hta.views.heatmaps import colour_bar, draw_heatmap, drawable, label_ticks
from captum_hta.views.names import QUANTITY_NAMES
from captum_hta.views.style import SIGNED, STYLE

CELL = 0.24
"""Inches of a cell."""
MOST_CELLS = 42
"""Cells of a side that are drawn at their full size; of more, all are smaller."""


def effects_figure(
    effects: NDArray[np.float64],
    maps: dict[str, NDArray[np.float64]],
    signed: NDArray[np.float64],
    names: Sequence[str],
    keys: Sequence[str],
    title: str,
) -> Figure:
    """Effects of all heads, and where those of some come from.

    Args:
        effects: ``[layer, head]``.
        maps: For each of :data:`QUANTITY_NAMES` an array ``[row, key]``.
        signed: The signed parts of the rows, ``[row, key]``.
        names: Labels of the rows, such as ``"L18H6"``.
        keys: Labels of the source tokens.
        title: What the effects are on.

    Returns:
        A figure with a panel for all effects, one for each of ``maps`` on one colour scale, and one for
        ``signed``.
    """
    keys = drawable(keys)
    sides = _side(effects.shape[1]), _side(len(keys))
    height = max(_side(len(effects)), _side(len(names)) + 0.2)
    count = len(maps) + 1
    with mpl.rc_context(STYLE):
        figure = Figure(
            figsize=(sides[0] + count * (sides[1] + 0.8) + 1.8, height + 1.7), layout="constrained"
        )
        axes = figure.subplots(1, 1 + count, width_ratios=[sides[0], *[sides[1]] * count])
        figure.suptitle(title, parse_math=False)
        _all_effects(axes[0], effects)
        top = max(1e-9, *(float(values.max()) for values in maps.values()))
        for axis, (name, values) in zip(axes[1:], maps.items(), strict=False):
            draw_heatmap(axis, values, top)
            axis.set_title(QUANTITY_NAMES[name])
        _signed_heatmap(axes[-1], signed)
        axes[-1].set_title("signed part of the effect")
        for axis in axes[1:]:
            label_ticks(axis.xaxis, keys, sides[1] / len(keys), rotation=90)
            axis.set_yticks([])
            axis.set_xlabel("key (source token)")
        label_ticks(axes[1].yaxis, names, height / len(names))
    return figure


def _side(cells: int) -> float:
    """Inches of a side."""
    return max(1.6, CELL * min(cells, MOST_CELLS))


def _all_effects(axis: Axes, effects: NDArray[np.float64]) -> None:
    _signed_heatmap(axis, effects)
    axis.set_title("effect of each head")
    axis.set_xlabel("head")
    axis.set_ylabel("layer")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))


def _signed_heatmap(axis: Axes, values: NDArray[np.float64]) -> None:
    """A panel in colours for both signs, white at zero."""
    top = max(1e-9, float(np.abs(values).max()))
    image = axis.imshow(values, cmap=SIGNED, norm=Normalize(-top, top), aspect="auto")
    axis.tick_params(length=2)
    axis.spines[:].set_visible(False)
    colour_bar(axis, image)
