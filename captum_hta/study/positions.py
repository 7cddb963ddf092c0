"""Where attention and input contributions lie relative to the query.

After Pascual et al., "Telling BERT's Full Story", EACL 2021, Figures 2 to 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pandas as pd

from captum_hta.statistics.accumulators import OffsetHistogram
from captum_hta.study.analysis import Analysis, TextResult
from captum_hta.study.encoded_corpus import Dimensions

QUANTITIES = ("attention", "input")


class RelativePositions(Analysis):
    """Histograms over the offset of keys from their query, and their centres of mass.

    Attributes:
        histograms: For attention and the input contribution a histogram of each head.
    """

    name = "positions"
    layer_columns: ClassVar[Mapping[str, str]] = {
        "centre_of_mass_attention": "centre of attention",
        "centre_of_mass_input": "centre of input contribution",
    }
    layer_note = "Centres of mass are in tokens, means over a layer's heads: below zero is before the query."

    def __init__(self, size: Dimensions) -> None:
        super().__init__(size)
        shape = (len(size.layers), size.heads, size.longest)
        self.histograms = {quantity: OffsetHistogram.zero(*shape) for quantity in QUANTITIES}

    @property
    def accumulators(self) -> dict[str, OffsetHistogram]:
        """The histograms."""
        return self.histograms

    def add(self, text: TextResult) -> None:
        """Add one text."""
        self.histograms["attention"].add(text.attention)
        self.histograms["input"].add(text.contributions["input"])

    def tables(self) -> dict[str, pd.DataFrame]:
        """``relative_positions`` and ``centres_of_mass``."""
        return {"relative_positions": self.table(), "centres_of_mass": self.centres_of_mass()}

    def table(self) -> pd.DataFrame:
        """A row for each quantity, layer, head and offset that occurs: the mean value there and its standard
        error by example.
        """
        return pd.concat([self._table(quantity) for quantity in QUANTITIES], ignore_index=True)

    def _table(self, quantity: str) -> pd.DataFrame:
        histogram = self.histograms[quantity]
        seen = histogram.counts > 0
        index = pd.MultiIndex.from_product(
            [[quantity], self.size.layers, range(self.size.heads), histogram.offsets[seen]],
            names=["quantity", "layer", "head", "offset"],
        )
        columns = {"value": histogram.histogram(), "value_error": histogram.standard_error()}
        return pd.DataFrame(
            {name: values[..., seen].ravel() for name, values in columns.items()}, index
        ).reset_index()

    def centres_of_mass(self) -> pd.DataFrame:
        """A row for each quantity, layer and head: the mean offset of its histogram."""
        frames = []
        for quantity, histogram in self.histograms.items():
            index = pd.MultiIndex.from_product(
                [[quantity], self.size.layers, range(self.size.heads)], names=["quantity", "layer", "head"]
            )
            centres = pd.Series(histogram.centre_of_mass().ravel(), index, name="centre_of_mass")
            frames.append(centres.reset_index())
        return pd.concat(frames, ignore_index=True)

    def by_layer(self) -> pd.DataFrame:
        """Means of the centres of mass over heads, a row for each layer."""
        means = self.centres_of_mass().pivot_table(
            index="layer", columns="quantity", values="centre_of_mass", aggfunc="mean"
        )
        means.columns = pd.Index([f"centre_of_mass_{quantity}" for quantity in means.columns])
        return means
