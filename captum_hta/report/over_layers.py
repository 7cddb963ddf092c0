"""What the analyses' figures and texts have in common: numbers over the layers of a model."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from captum_hta.model.head_names import head_name
from captum_hta.views.heatmaps import drawable

LONGEST_LABEL = 32
"""Characters of a label in a legend."""


def draw_layer_axis(axis: Axes, layers: Sequence[int], ticks: int = 16) -> None:
    """Label the horizontal axis with the numbers of layers.

    Args:
        axis: The axes.
        layers: The layers, in order.
        ticks: Largest number of labels.
    """
    axis.set_xlabel("layer")
    axis.xaxis.set_major_locator(FixedLocator(layers, nbins=ticks))


def draw_grid(axis: Axes) -> None:
    """Draw horizontal lines behind the data."""
    axis.grid(axis="y", color="0.92")
    axis.set_axisbelow(True)


def draw_legend(axis: Axes, lines: Sequence[Line2D], labels: Sequence[str]) -> None:
    """Draw a legend to the right of the axes, with any labels.

    Labels are shown as they are, neither as mathematics nor hidden because they begin with an underscore.
    Long ones are cut, and labels with characters that the font lacks are shown by their numbers.
    """
    legend = axis.legend(
        lines, list(map(str, range(len(lines)))), frameon=False, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    for text, label in zip(legend.get_texts(), drawable(labels), strict=True):
        text.set_parse_math(False)
        text.set_text(label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…")


def width(layers: Sequence[int]) -> float:
    """Inches of a figure in which every layer has room."""
    return max(6.4, 0.4 * len(layers) + 3)


def course(values: pd.Series[float]) -> str:
    """How a number changes over the layers, in words.

    Args:
        values: The numbers, indexed by layer.

    Example:
        >>> course(pd.Series([0.5, 0.75], index=[3, 4]))
        'goes from 0.50 in layer 3 to 0.75 in layer 4, between 0.50 and 0.75'
    """
    known = values.dropna()
    if known.empty:
        return "is not defined in any layer"
    if len(known) == 1:
        return f"is {known.iloc[0]:.2f} in layer {known.index[0]}"
    return (
        f"goes from {known.iloc[0]:.2f} in layer {known.index[0]} to {known.iloc[-1]:.2f} in layer "
        f"{known.index[-1]}, between {known.min():.2f} and {known.max():.2f}"
    )


def head_names(table: pd.DataFrame) -> list[str]:
    """Names of heads, for a table with the columns ``layer`` and ``head``."""
    return [head_name(*place) for place in zip(table["layer"], table["head"], strict=True)]
