"""Fonts, sizes and colours that all figures share."""

from typing import Any

from matplotlib.typing import RcKeyType

ATTENTION, PREVIOUS, INPUT = "#4c72b0", "#55a868", "#c44e52"
"""Colours of attention and of the previous-layer and the input contribution."""
STYLE: dict[RcKeyType, Any] = {
    "font.size": 9,
    "font.family": ["DejaVu Sans"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "figure.dpi": 120,
}
