"""Attention and contributions: Figures 1 and 6 of Pascual et al. 2021, and a table of heads."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from captum_hta.report.over_layers import course, draw_grid, head_names
from captum_hta.report.page import CaptionedFigure, Section, Table
from captum_hta.study.correlations import Correlations
from captum_hta.study.run import Study
from captum_hta.study.settings import SOURCES
from captum_hta.views.names import QUANTITY_NAMES
from captum_hta.views.style import INPUT, PREVIOUS, STYLE

UNDEFINED = (
    "In some layers no correlation is defined, because the texts are too short or attention is too even."
)
HEAD_COLUMNS = {
    "name": "head",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "rows": "rows",
    "rows_left_out": "rows left out",
    "examples": "examples",
}

# --- sections --------------------------------------------------------------------------------------


def within_a_block(study: Study) -> Section:
    """The section with Figure 1."""
    analysis = study[Correlations]
    return Section(
        "Within a block",
        "How well attention reflects what a head takes from the hidden tokens that enter its own block.",
        [
            _captioned(
                "figure1_attention_and_previous_layer.png",
                "Attention and previous-layer contribution",
                _caption_within_a_block(analysis.shares_of_heads()),
                analysis.table(),
                "previous_layer",
            )
        ],
    )


def from_the_input(study: Study) -> Section:
    """The section with Figure 6."""
    analysis = study[Correlations]
    return Section(
        "From the input",
        "How well attention reflects what a head takes from the input tokens, through all blocks below it.",
        [
            _captioned(
                "figure6_attention_and_input.png",
                "Attention and input contribution",
                _caption_from_the_input(analysis.by_layer()),
                analysis.table(),
                "input",
            )
        ],
    )


def _captioned(file: str, title: str, caption: str, table: pd.DataFrame, source: str) -> CaptionedFigure:
    return CaptionedFigure(file, title, caption, correlation_figure(table, source), _alt(table, source))


def by_head(study: Study) -> Section:
    """The section with a row for each head."""
    left_out = " and ".join(
        f"{count} rows for the {source}" for source, count in rows_left_out(study).items()
    )
    table = study[Correlations].table()
    return Section(
        "By head",
        f"Left out are {left_out}, because they have no correlation: rows of fewer than three tokens, and "
        "rows whose values are all equal.",
        tables=[_head_table(table, source) for source in SOURCES],
    )


def _head_table(table: pd.DataFrame, source: str) -> Table:
    return Table.of(
        table.assign(name=head_names(table))[table["source"] == source],
        f"Attention and {QUANTITY_NAMES[source]} by head",
        "Correlations from -1 to 1, means over the rows of all examples ± standard errors by example. A row "
        "is the attention of one query.",
        HEAD_COLUMNS,
        folded=True,
    )


def rows_left_out(study: Study) -> dict[str, str]:
    """The number of rows without a correlation and of all rows, for each source."""
    by_source = study[Correlations].table().groupby("source")
    rows, left_out = by_source["rows"].sum(), by_source["rows_left_out"].sum()
    return {
        QUANTITY_NAMES[source]: f"{left_out[source]} of {rows[source] + left_out[source]}"
        for source in SOURCES
    }


# --- captions and alternative text -----------------------------------------------------------------


def _caption_within_a_block(shares: dict[str, float]) -> str:
    pearson = shares["share_of_heads_pearson_over_0.85"]
    spearman = shares["share_of_heads_spearman_over_0.95"]
    if np.isnan(pearson) or np.isnan(spearman):
        return UNDEFINED
    return (
        f"Within its own block, attention reflects what a head takes: {pearson:.0%} of the heads have a "
        f"Pearson correlation above 0.85 (Pascual et al. 2021, BERT: 90%), and {spearman:.0%} a Spearman "
        "correlation above 0.95 (75%)."
    )


def _caption_from_the_input(layers: pd.DataFrame) -> str:
    pearson, spearman = layers["pearson_input_median"], layers["spearman_input_median"]
    if pearson.isna().any() or spearman.isna().any():
        return UNDEFINED
    if len(layers) == 1:
        return (
            f"The median Pearson correlation over heads is {pearson.item():.2f}, the median Spearman "
            f"correlation {spearman.item():.2f}."
        )
    lowest = pearson.idxmin()
    inside = layers.index[0] < lowest < layers.index[-1]
    return (
        f"Over the layers, the median Pearson correlation over heads goes from {pearson.iloc[0]:.2f} to "
        f"{pearson.iloc[-1]:.2f}"
        + (f", with its lowest value, {pearson.min():.2f}, in layer {lowest}" if inside else "")
        + f"; the median Spearman correlation goes from {spearman.iloc[0]:.2f} to {spearman.iloc[-1]:.2f}."
    )


def _alt(table: pd.DataFrame, source: str) -> str:
    table = table[table["source"] == source]
    medians = table.groupby("layer")[["pearson", "spearman"]].median()
    return (
        f"Two panels of box plots over the layers, with a point for each of {table['head'].nunique()} heads: "
        f"the correlation of attention with the {QUANTITY_NAMES[source]}. The median of Pearson's "
        f"correlation {course(medians['pearson'])}; that of Spearman's {course(medians['spearman'])}."
    )


# --- figure ----------------------------------------------------------------------------------------


def correlation_figure(correlations: pd.DataFrame, source: str) -> Figure:
    """Figures 1 and 6: the correlation of attention with a contribution, one point for each head.

    Args:
        correlations: As :meth:`captum_hta.study.correlations.Correlations.table` returns.
        source: ``"previous_layer"`` or ``"input"``.
    """
    table = correlations[correlations["source"] == source]
    layers = sorted(table["layer"].unique())
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(6.4, 0.55 * len(layers) + 3), 3.4), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for axis, measure in zip(axes, ("pearson", "spearman"), strict=True):
            groups = [table.loc[table["layer"] == layer, measure].dropna() for layer in layers]
            _draw_boxes(axis, groups, layers, PREVIOUS if source == "previous_layer" else INPUT)
            axis.set_title(f"{measure.capitalize()} correlation")
            axis.set_xlabel("layer")
        lowest = table[["pearson", "spearman"]].min().min()
        axes[0].set_ylim(min(0.0, lowest - 0.05) if np.isfinite(lowest) else 0.0, 1.02)
        axes[0].set_ylabel(f"attention and {QUANTITY_NAMES[source]}")
    return figure


def _draw_boxes(axis: Axes, groups: Sequence[pd.Series[float]], layers: Sequence[int], colour: str) -> None:
    grey = {"color": "0.6"}
    axis.boxplot(
        [group.to_numpy() for group in groups],
        tick_labels=[str(layer) for layer in layers],
        showfliers=False,
        widths=0.6,
        medianprops={"color": "black"},
        boxprops=grey,
        whiskerprops=grey,
        capprops=grey,
    )
    for position, group in enumerate(groups, 1):
        spread = np.linspace(-0.22, 0.22, len(group)) if len(group) > 1 else np.zeros(len(group))
        axis.scatter(position + spread, group, s=9, color=colour, alpha=0.8, linewidths=0, zorder=3)
    draw_grid(axis)
