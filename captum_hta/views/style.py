"""Fonts, sizes and colours that all figures share."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.typing import RcKeyType
from numpy.typing import NDArray

ATTENTION, PREVIOUS, INPUT = "#4c72b0", "#55a868", "#c44e52"
"""Colours of attention and of the previous-layer and the input contribution."""
HEAT = "magma_r"
"""Name of the colours of heatmaps."""
SIGNED = "RdBu_r"
"""Name of the colours of heatmaps of numbers with a sign, white at zero."""
VEIL = ListedColormap(
    np.column_stack([mpl.colormaps[HEAT](np.arange(256))[:, :3], np.linspace(0.1, 0.9, 256)])
)
"""The colours of heatmaps, through which an image is seen where values are small."""
STYLE: dict[RcKeyType, Any] = {
    "font.size": 9,
    "font.family": ["DejaVu Sans"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "figure.dpi": 120,
}


def shades(count: int) -> NDArray[np.float64]:
    """Colours ``[count, 4]`` of lines that are in an order, such as layers or distances."""
    found: NDArray[np.float64] = mpl.colormaps["viridis"](np.linspace(0, 0.9, max(1, count)))
    return found
