"""How far attention agrees with effective attention, by the length of texts.

After Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3 and Figure 1 (a). The values
of a head have a rank of at most ``d_head``: of a text of more tokens they let only part of the attention
through.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from captum_hta.statistics.accumulators import Mean
from captum_hta.statistics.correlations import is_causal, standard_values

Array = NDArray[np.float64]
STEP = 8
"""Lengths that are counted together; widths of heads are multiples of it."""


@dataclass
class EffectiveAgreement:
    """Pearson's correlation of attention with effective attention, over the entries of each head's matrix.

    Attributes:
        layers: The layers of the layer axis.
        d_head: Width of a head's output.
        by_length: The mean over heads, ``[layer, bin]``: bin ``b`` has ``STEP * b + 1`` to ``STEP * (b + 1)``
            tokens.
        by_width: The same of texts of at most ``d_head`` tokens and of longer ones, ``[layer, 2]``.
    """

    layers: list[int]
    d_head: int
    by_length: Mean
    by_width: Mean

    @classmethod
    def empty(cls, layers: list[int], longest: int, d_head: int) -> EffectiveAgreement:
        """Of no example, for texts of at most ``longest`` tokens."""
        bins = -(-longest // STEP)
        return cls(list(layers), d_head, Mean.zero(len(layers), bins), Mean.zero(len(layers), 2))

    def add(self, attention: Array, effective: Array) -> None:
        """Add one example.

        Args:
            attention: ``[layer, head, query, key]``, without padding.
            effective: What :func:`captum_hta.baselines.attention.effective_attention` gives of it.

        Raises:
            ValueError: If it has more tokens than were said to come.
        """
        tokens, bins = attention.shape[-1], self.by_length.sums.shape[-1]
        if tokens > STEP * bins:
            raise ValueError(f"a text of {tokens} tokens, where at most {STEP * bins} were said to come")
        correlations = matrix_correlations(attention, effective)
        self.by_length.add(_at(correlations, (tokens - 1) // STEP, bins))
        self.by_width.add(_at(correlations, int(tokens > self.d_head), 2))

    @property
    def parts(self) -> dict[str, Mean]:
        """Its accumulators, by name."""
        return {"by_length": self.by_length, "by_width": self.by_width}

    def table(self) -> pd.DataFrame:
        """A row for each layer and each bin of lengths that occurs: the shortest and the longest length, the
        mean correlation and its error by example, and the number of examples.
        """
        lower = STEP * np.arange(self.by_length.sums.shape[-1]) + 1
        return self._table(self.by_length, {"shortest": lower, "longest": lower + STEP - 1})

    def width_table(self) -> pd.DataFrame:
        """As :meth:`table`, for texts of at most ``d_head`` tokens and for longer ones."""
        return self._table(self.by_width, {"longer_than_d_head": np.array([False, True])})

    def _table(self, part: Mean, bins: dict[str, NDArray]) -> pd.DataFrame:
        """A row for each layer and bin in which something is known."""
        table = pd.DataFrame(
            {
                "layer": np.repeat(self.layers, part.sums.shape[-1]),
                **{name: np.tile(values, len(self.layers)) for name, values in bins.items()},
                "correlation": part.mean().ravel(),
                "correlation_error": part.standard_error().ravel(),
                "examples": part.examples.ravel().astype(np.int64),
            }
        )
        return table[table["examples"] > 0].reset_index(drop=True)


def matrix_correlations(first: Array, second: Array) -> Array:
    """Pearson's correlation of the entries of each head's matrix; of a causal model, those that queries see.

    Args:
        first: Attention ``[layer, head, query, key]``, which tells whether the model is causal.
        second: Of the same shape.

    Returns:
        ``[layer, head]``; NaN where a matrix is constant, or has fewer than three entries.
    """
    queries, keys = first.shape[-2:]
    seen = np.tri(queries, keys, dtype=bool) if is_causal(first) else np.ones((queries, keys), dtype=bool)
    one, two = (standard_values(matrices[..., seen]) for matrices in (first, second))
    return np.einsum("lhk,lhk->lh", one, two).clip(-1, 1)


def _at(correlations: Array, place: int, bins: int) -> Array:
    """Correlations ``[layer, head]`` in one of the bins of ``[layer, bin, head]``, NaN in the others."""
    rows = np.full((len(correlations), bins, correlations.shape[-1]), np.nan)
    rows[:, place] = correlations
    return rows
