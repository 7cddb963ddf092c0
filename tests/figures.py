"""Checks of figures that several tests use."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text

from captum_hta.views.names import QUANTITY_NAMES

WORDS = [
    "[CLS]", "the", "ladder", "is", "in", "Ġgarage", "##ing", ",", "é", "ß", "Ω", "я", "$", "50%",
    "<s>", "▁of", "\\n", "_", "^", "#", "&", "{", "unbelievable", "[SEP]",
]  # fmt: skip  # fmt: skip


def maps(tokens: int, rows: int = 1) -> dict[str, np.ndarray]:
    """Random attention and contributions ``[row, query, key]``."""
    rng = np.random.default_rng(0)
    return {name: rng.dirichlet(np.full(tokens, 0.3), (rows, tokens)) for name in QUANTITY_NAMES}


def tidy(**keys: Any) -> pd.DataFrame:
    """A table with a row for each combination of keys."""
    return pd.MultiIndex.from_product(keys.values(), names=list(keys)).to_frame(index=False)


def drawn(figure: Figure) -> Figure:
    """Lay out a figure and all that is on it; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.draw_without_rendering()
    return figure


def panels(figure: Figure) -> list[Axes]:
    """The axes of a figure, without those of colour bars."""
    return [axis for axis in figure.axes if not hasattr(axis, "_colorbar")]


def legend_of(figure: Figure) -> Legend:
    """The legend, within the axes or outside of them."""
    return figure.axes[0].get_legend() or figure.legends[0]


def assert_readable(figure: Figure) -> None:
    """A figure draws without a warning, nothing on it is clipped or covered, and its panels have room."""
    drawn(figure)
    _assert_nothing_is_clipped(figure)
    _assert_labels_are_apart(figure)
    for panel in panels(figure):
        box = panel.get_window_extent()
        assert min(box.width, box.height) / figure.dpi > 0.25


def _assert_nothing_is_clipped(figure: Figure) -> None:
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert box.x0 > -0.01
    assert box.y0 > -0.01
    assert box.x1 < width + 0.01
    assert box.y1 < height + 0.01


def _assert_labels_are_apart(figure: Figure) -> None:
    """No title covers that of the next panel, and no tick label the next."""
    _assert_apart([panel.title for panel in panels(figure)])
    for axis in panels(figure):
        for number, (line, limits) in enumerate(
            ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim()))
        ):
            low, high = sorted(limits)
            labels = {label.get_position()[number]: label for label in line.get_ticklabels()}
            _assert_apart([labels[at] for at in sorted(labels) if low <= at <= high])


def _assert_apart(labels: list[Text]) -> None:
    boxes = [(text.get_text(), text.get_window_extent()) for text in labels if text.get_text()]
    for (first, a), (second, b) in itertools.pairwise(boxes):
        assert not a.padded(-1).overlaps(b.padded(-1)), f"{first!r} covers {second!r}"
