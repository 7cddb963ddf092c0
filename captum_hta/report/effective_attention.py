"""Attention and effective attention: Figure 1 (a) of Brunner et al. 2020."""

from __future__ import annotations

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from captum_hta.report.over_layers import course, draw_grid
from captum_hta.report.page import CaptionedFigure, Section, Table
from captum_hta.study.effective_attention import EffectiveCorrelation
from captum_hta.study.run import Study
from captum_hta.views.style import STYLE, shades

COLUMNS = {
    "layer": "layer",
    "lengths": "tokens",
    "correlation": "correlation",
    "examples": "examples",
}

# --- section ---------------------------------------------------------------------------------------


def effective_attention(study: Study) -> Section | None:
    """The section; ``None`` if effective attention was not measured."""
    analysis = study.find(EffectiveCorrelation)
    if analysis is None:
        return None
    table, d_head = analysis.table(), analysis.size.d_head
    long = analysis.by_width.counts[:, 1].any()
    return Section(
        "Effective attention",
        "If a text has more tokens than a head is wide, part of the attention has no effect on the head's "
        "output; the rest is the effective attention (Brunner et al. 2020, section 3). "
        + ("" if long else "No text here is that long, so all attention is effective."),
        [
            CaptionedFigure(
                "figure11_effective_attention.png",
                "Attention and effective attention by the length of texts",
                "Correlation between the entries of the two matrices of a head, mean over heads. Up to "
                f"{d_head} tokens, the width of a head, the two are the same.",
                effective_figure(table, d_head),
                _alt(table, d_head),
            )
        ],
        [_width_table(analysis.width_table(), d_head), _length_table(table)],
    )


def _width_table(table: pd.DataFrame, d_head: int) -> Table:
    lengths = [f"more than {d_head}" if long else f"to {d_head}" for long in table["longer_than_d_head"]]
    return Table.of(
        table.assign(lengths=lengths),
        "Attention and effective attention up to the width of a head and beyond",
        "Pearson's correlation, mean over heads and texts ± its standard error by text.",
        COLUMNS,
    )


def _length_table(table: pd.DataFrame) -> Table:
    lengths = [f"{low} to {high}" for low, high in zip(table["shortest"], table["longest"], strict=True)]
    return Table.of(
        table.assign(lengths=lengths),
        "Attention and effective attention by layer and length",
        "As above.",
        COLUMNS,
        folded=True,
    )


def _alt(table: pd.DataFrame, d_head: int) -> str:
    longest = table[table["shortest"] == table["shortest"].max()].set_index("layer")["correlation"]
    tokens = f"{table['shortest'].max()} to {table['longest'].max()}"
    return (
        "A line for each layer over the number of tokens: the correlation of attention with effective "
        f"attention. A dashed line marks the width of a head, {d_head}. For texts of {tokens} tokens the "
        f"correlation {course(longest)}."
    )


# --- figure ----------------------------------------------------------------------------------------


def effective_figure(table: pd.DataFrame, d_head: int) -> Figure:
    """The correlation of attention with effective attention by the length of texts, a line for each layer
    with its standard error.

    Args:
        table: As :meth:`captum_hta.study.effective_attention.EffectiveCorrelation.table` returns.
        d_head: Width of a head's output, up to which all attention has an effect.
    """
    layers = sorted(table["layer"].unique())
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.8, 3.6), layout="constrained")
        axis = figure.subplots()
        lines = []
        for layer, shade in zip(layers, shades(len(layers)), strict=True):
            rows = table[table["layer"] == layer].sort_values("shortest")
            lines.append(
                axis.errorbar(
                    (rows["shortest"] + rows["longest"]) / 2, rows["correlation"], rows["correlation_error"],
                    color=shade, marker="o", markersize=3, elinewidth=0.8, label=str(layer),
                )
            )  # fmt: skip
        dashed = axis.axvline(d_head + 0.5, color="0.4", linestyle="--", label=f"width of a head, {d_head}")
        axis.set_xlabel("tokens of the text")
        axis.set_ylabel("Pearson correlation of attention\nand effective attention")
        draw_grid(axis)
        axis.legend(handles=[dashed], frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1))
        columns = 1 + (len(layers) - 1) // 12
        figure.legend(handles=lines, loc="outside right center", frameon=False, title="layer", ncols=columns)
    return figure
