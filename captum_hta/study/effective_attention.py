"""How well attention correlates with effective attention, by the length of texts.

After Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3 and Figure 1 (a). The values
of a head have a rank of at most ``d_head``: in a text with more tokens, only part of the attention has an
effect on the head's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from captum_hta.statistics.accumulators import RowMean
from captum_hta.statistics.correlations import attended, standard_values
from captum_hta.study.analysis import Analysis, TextResult
from captum_hta.study.encoded_corpus import Dimensions

if TYPE_CHECKING:
    from captum_hta.study.encoded_corpus import EncodedCorpus

Array = NDArray[np.float64]
STEP = 8
"""Width of a bin of lengths; widths of heads are multiples of it."""


class EffectiveCorrelation(Analysis):
    """Pearson's correlation of attention with effective attention, over the entries of each head's matrix.

    Attributes:
        by_length: The mean over heads, ``[layer, bin]``: bin ``b`` has texts of ``STEP * b + 1`` to
            ``STEP * (b + 1)`` tokens.
        by_width: The same for texts of at most ``d_head`` tokens and for longer ones, ``[layer, 2]``.
    """

    name = "effective"
    needs = frozenset({"effective_attention"})

    def __init__(self, size: Dimensions) -> None:
        super().__init__(size)
        self.by_length = RowMean.zero(len(size.layers), -(-size.longest // STEP))
        self.by_width = RowMean.zero(len(size.layers), 2)

    @classmethod
    def applies(cls, corpus: EncodedCorpus) -> bool:
        """To self-attention, if the adapter gives values and output projections."""
        return corpus.is_self_attention and corpus.shows_values

    @property
    def accumulators(self) -> dict[str, RowMean]:
        """One for each attribute."""
        return {"by_length": self.by_length, "by_width": self.by_width}

    def add(self, text: TextResult) -> None:
        """Add one text.

        Raises:
            ValueError: If it has no effective attention, or more tokens than the longest text.
        """
        if text.effective_attention is None:
            raise ValueError("attention is compared with effective attention, got none")
        tokens, bins = text.whole_attention.shape[-1], self.by_length.sums.shape[-1]
        if tokens > STEP * bins:
            raise ValueError(f"got a text of {tokens} tokens, but there are bins for at most {STEP * bins}")
        correlations = matrix_correlations(text.whole_attention, text.effective_attention)
        self.by_length.add(_in_bin(correlations, (tokens - 1) // STEP, bins))
        self.by_width.add(_in_bin(correlations, int(tokens > self.size.d_head), 2))

    def tables(self) -> dict[str, pd.DataFrame]:
        """``effective_attention``: see :meth:`table`."""
        return {"effective_attention": self.table()}

    def table(self) -> pd.DataFrame:
        """A row for each layer and each bin of lengths that occurs: the shortest and the longest length, the
        mean correlation with its standard error by example, and the number of examples.
        """
        lower = STEP * np.arange(self.by_length.sums.shape[-1]) + 1
        return self._table(self.by_length, {"shortest": lower, "longest": lower + STEP - 1})

    def width_table(self) -> pd.DataFrame:
        """As :meth:`table`, for texts of at most ``d_head`` tokens and for longer ones."""
        return self._table(self.by_width, {"longer_than_d_head": np.array([False, True])})

    def _table(self, means: RowMean, bins: Mapping[str, NDArray[np.generic]]) -> pd.DataFrame:
        """A row for each layer and bin that has an example."""
        layers = self.size.layers
        table = pd.DataFrame(
            {
                "layer": np.repeat(layers, means.sums.shape[-1]),
                **{name: np.tile(values, len(layers)) for name, values in bins.items()},
                "correlation": means.mean().ravel(),
                "correlation_error": means.standard_error().ravel(),
                "examples": means.examples.ravel().astype(np.int64),
            }
        )
        return table[table["examples"] > 0].reset_index(drop=True)


def matrix_correlations(first: Array, second: Array) -> Array:
    """Pearson's correlation of the entries of each head's matrix, among the keys that queries attend to.

    Args:
        first: Attention ``[layer, head, query, key]``.
        second: An array of the same shape.

    Returns:
        ``[layer, head]``; NaN where a matrix is constant, or has fewer than three visible entries.
    """
    correlations = []
    for one, two, seen in zip(first, second, attended(first), strict=True):
        products = standard_values(one[:, seen]) * standard_values(two[:, seen])
        correlations.append(products.sum(-1).clip(-1, 1))
    return np.stack(correlations)


def _in_bin(correlations: Array, place: int, bins: int) -> Array:
    """Correlations ``[layer, head]`` in one bin of ``[layer, bin, head]``, with NaN in the others."""
    rows = np.full((len(correlations), bins, correlations.shape[-1]), np.nan)
    rows[:, place] = correlations
    return rows
