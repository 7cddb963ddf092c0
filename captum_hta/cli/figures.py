"""Figures that commands write."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from captum_hta.cli.checks import FIGURES, WRITER
from captum_hta.cli.console import say

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_figure(figure: Figure, output: Path, labels: Iterable[str], kind: str = "Heatmap") -> None:
    """Write a figure; print where it is, and what its font cannot show.

    Args:
        figure: The figure.
        output: A path that :func:`captum_hta.cli.checks.check_figure` accepted.
        labels: The labels of tokens in the figure.
        kind: What to call it.
    """
    from captum_hta.storage import write_whole
    from captum_hta.views.heatmaps import undrawable

    content = BytesIO()
    suffix = output.suffix.lower()
    metadata = {FIGURES[suffix]: WRITER.decode()}
    figure.savefig(content, format=suffix[1:], dpi=150, metadata=metadata)
    write_whole(output, lambda path: path.write_bytes(content.getvalue()))
    if undrawable(labels):
        say("Tokens with letters that the figure's font lacks are shown there by their numbers.", "dim")
    say(f"{kind}: {output}")
