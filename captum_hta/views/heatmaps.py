"""Heatmaps of attention and contributions, and the same over an image."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from unicodedata import category

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from captum_hta.views.names import QUANTITY_NAMES
from captum_hta.views.style import HEAT, STYLE, VEIL

LEAST_SIDE = 2.0
"""Inches of a heatmap's side that its title fits on."""
MOST_SIDE = 9.3
"""Inches of a heatmap's side; of longer texts some tokens go without a label."""
MOST_INCHES = 95.0
"""Inches of the heatmaps of a column together."""
IMAGE_SIDE = 2.6
"""Inches of an image's longer side."""
CONTROLS = ("Cc", "Cf", "Zl", "Zp")
"""Unicode categories of control and format characters and of separators of lines and paragraphs."""
LUMINANCE = np.array([0.299, 0.587, 0.114])
"""Weights of red, green and blue in grey (ITU-R BT.601)."""


def escaped(label: str) -> str:
    r"""A label with an escape such as ``\u202e`` in place of each character that would change how it is set:
    controls, marks of the writing direction and separators of lines.
    """
    return "".join(
        one.encode("unicode_escape").decode("ascii") if category(one) in CONTROLS else one for one in label
    )


def undrawable(labels: Iterable[str]) -> list[int]:
    """The numbers of labels with characters that the font of figures lacks."""
    known = get_font(findfont(STYLE["font.family"][0])).get_charmap()
    return [
        number for number, label in enumerate(labels) if any(ord(one) not in known for one in escaped(label))
    ]


def drawable(labels: Sequence[str]) -> list[str]:
    """Labels with controls escaped, and the numbers of those that cannot be drawn."""
    without = set(undrawable(labels))
    return [f"#{number}" if number in without else escaped(label) for number, label in enumerate(labels)]


def heatmaps(
    maps: dict[str, NDArray[np.float64]],
    tokens: Sequence[str],
    rows: Sequence[str],
    keys: Sequence[str] | None = None,
) -> Figure:
    """Attention and contributions side by side.

    Args:
        maps: For each of :data:`QUANTITY_NAMES` an array ``[row, query, key]``.
        tokens: Labels of queries and keys.
        rows: Titles of the rows, such as ``"L3H5"``.
        keys: Labels of keys, where they are of another text. Default: ``None``, as ``tokens``.

    Returns:
        A figure with one row of panels for each of ``rows``, on one colour scale a row.
    """
    keys = drawable(tokens if keys is None else keys)
    tokens = drawable(tokens)
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
                draw_heatmap(axis, values[row], top)
                label_ticks(axis.xaxis, keys, width / len(keys), rotation=90)
                label_ticks(axis.yaxis, tokens, height / len(tokens))
                axis.set_title(f"{title}\n{QUANTITY_NAMES[name]}", parse_math=False)
            axes[row, 0].set_ylabel("query (target token)")
        for axis in axes[-1]:
            axis.set_xlabel("key (source token)")
    return figure


def _sides(keys: int, queries: int, rows: int) -> tuple[float, float]:
    """Inches of a heatmap's width and height: of equal cells, except a side too short for a title."""
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


def draw_heatmap(axis: Axes, values: NDArray[np.float64], top: float) -> None:
    """One panel, in the colours of its row: equal ones are equal numbers. Small ones are spread."""
    image = axis.imshow(values, cmap=HEAT, norm=PowerNorm(0.5, vmin=0, vmax=top), aspect="auto")
    axis.tick_params(length=2)
    axis.spines[:].set_visible(False)
    colour_bar(axis, image)


def label_ticks(line: Axis, labels: Sequence[str], cell: float, rotation: float = 0) -> None:
    """Labels on an axis whose cells are so many inches wide; not all, where they would not fit."""
    step = max(1, round(0.155 / cell))
    size = min(9.0, 52 * cell * step)
    line.set_ticks(
        range(0, len(labels), step), labels[::step], rotation=rotation, fontsize=size, parse_math=False
    )


def colour_bar(axis: Axes, image: AxesImage) -> None:
    """A colour bar beside a panel."""
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
    """An image, and over it attention and contributions of one query's patches.

    Args:
        maps: For each of :data:`QUANTITY_NAMES` an array ``[row, key]``.
        image: ``[height, width, 3]`` in 0 to 1.
        grid: Rows and columns of the patches, which are the last keys.
        tokens: Labels of queries and keys.
        query: Which token takes in what is shown; a patch is framed in the image.
        rows: Titles of the rows, such as ``"L3H5"``.

    Returns:
        A figure with one row of panels for each of ``rows``, on one colour scale a row. Titles say what
        comes from the tokens that have no place in the image.
    """
    tokens = drawable(tokens)
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
                axis.set_title(QUANTITY_NAMES[name] + share * bool(special), parse_math=False)
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
    veil = axis.imshow(
        values, cmap=VEIL, norm=PowerNorm(0.5, vmin=0, vmax=top), interpolation="nearest",
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
    )  # fmt: skip
    axis.set_axis_off()
    colour_bar(axis, veil)


def _frame(axis: Axes, image: NDArray[np.float64], grid: tuple[int, int], patch: int) -> None:
    """A frame around a patch, if it is one."""
    if patch < 0:
        return
    row, column = divmod(patch, grid[1])
    height, width = image.shape[0] / grid[0], image.shape[1] / grid[1]
    corner = (column * width - 0.5, row * height - 0.5)
    axis.add_patch(Rectangle(corner, width, height, fill=False, edgecolor="white", linewidth=3))
    axis.add_patch(Rectangle(corner, width, height, fill=False, edgecolor="black", linewidth=1))
