"""How well attention correlates with the contributions of each source.

After Pascual et al., "Telling BERT's Full Story", EACL 2021, Figures 1 and 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pandas as pd

from captum_hta.statistics.accumulators import RowMean
from captum_hta.statistics.correlations import StandardRows, attended, carried
from captum_hta.study.analysis import Analysis, TextResult, finite
from captum_hta.study.encoded_corpus import Dimensions
from captum_hta.study.settings import SOURCES

BOUNDS = {"pearson": (0.7, 0.85), "spearman": (0.9, 0.95)}
"""Correlations over which heads are counted."""


class Correlations(Analysis):
    """The correlation of each row of attention with the same row of the contributions, among the keys that
    the query attends to or that contribute to it.

    Attributes:
        pearson: Pearson's correlation by source, ``[layer, head]``.
        spearman: Spearman's correlation by source, ``[layer, head]``.
    """

    name = "correlations"
    layer_columns: ClassVar[Mapping[str, str]] = {
        "pearson_previous_layer_median": "previous layer, Pearson",
        "spearman_previous_layer_median": "previous layer, Spearman",
        "pearson_input_median": "input, Pearson",
        "spearman_input_median": "input, Spearman",
    }
    layer_note = (
        "Correlations of attention with both contributions, from -1 to 1: medians over the heads of a layer."
    )

    def __init__(self, size: Dimensions) -> None:
        super().__init__(size)
        shape = (len(size.layers), size.heads)
        self.pearson = {source: RowMean.zero(*shape) for source in SOURCES}
        self.spearman = {source: RowMean.zero(*shape) for source in SOURCES}

    @property
    def accumulators(self) -> dict[str, RowMean]:
        """A mean over rows for each measure and source."""
        measures = {"pearson": self.pearson, "spearman": self.spearman}
        return {
            f"{measure}/{source}": measures[measure][source] for measure in measures for source in SOURCES
        }

    def add(self, text: TextResult) -> None:
        """Add one text."""
        window = attended(text.attention)
        for source, values in text.contributions.items():
            seen = carried(values, window)
            rows = StandardRows.of(text.attention, seen)
            pearson, spearman = rows.correlations(StandardRows.of(values, seen))
            self.pearson[source].add(pearson)
            self.spearman[source].add(spearman)

    def tables(self) -> dict[str, pd.DataFrame]:
        """``correlations``: see :meth:`table`."""
        return {"correlations": self.table()}

    def table(self) -> pd.DataFrame:
        """A row for each source, layer and head: the correlations of attention with the contribution, their
        standard errors by example, and the numbers of rows and examples.
        """
        return pd.concat([self._table(source) for source in SOURCES], ignore_index=True)

    def _table(self, source: str) -> pd.DataFrame:
        pearson, spearman = self.pearson[source], self.spearman[source]
        index = pd.MultiIndex.from_product(
            [[source], self.size.layers, range(self.size.heads)], names=["source", "layer", "head"]
        )
        columns = {
            "pearson": pearson.mean(),
            "pearson_error": pearson.standard_error(),
            "spearman": spearman.mean(),
            "spearman_error": spearman.standard_error(),
            "rows": pearson.counts.astype(np.int64),
            "rows_left_out": pearson.left_out.astype(np.int64),
            "examples": pearson.examples.astype(np.int64),
        }
        return pd.DataFrame({name: one.ravel() for name, one in columns.items()}, index).reset_index()

    def by_layer(self) -> pd.DataFrame:
        """Medians over heads, a row for each layer."""
        medians = self.table().pivot_table(
            index="layer", columns="source", values=["pearson", "spearman"], aggfunc="median", dropna=False
        )
        return medians.set_axis([f"{one[0]}_{one[1]}_median" for one in medians.columns], axis=1)

    def shares_of_heads(self) -> dict[str, float]:
        """Shares of heads whose attention correlates with the previous-layer contribution over
        :data:`BOUNDS`.
        """
        table = self.table()
        return {
            f"share_of_heads_{measure}_over_{bound}": share_over(table, measure, bound)
            for measure, bounds in BOUNDS.items()
            for bound in bounds
        }

    def record(self) -> Mapping[str, object]:
        """The shares of heads, as ``shares_of_heads``."""
        return {"shares_of_heads": {name: finite(share) for name, share in self.shares_of_heads().items()}}


def share_over(table: pd.DataFrame, measure: str, bound: float) -> float:
    """The share of heads whose correlation with the previous-layer contribution is over a bound.

    Args:
        table: As :meth:`Correlations.table` returns.
        measure: ``"pearson"`` or ``"spearman"``.
        bound: The bound.

    Returns:
        The share among the heads whose correlation is defined; NaN if there is none.
    """
    values = table.loc[table["source"] == "previous_layer", measure].dropna()
    return float((values > bound).mean())
