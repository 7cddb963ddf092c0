"""How much of a hidden token comes from its own input, and from how far the rest comes.

After Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from captum_hta.jacobian.norms import NORMS
from captum_hta.statistics.accumulators import Accumulator, Distribution, RowMean
from captum_hta.study.analysis import Analysis, TextResult
from captum_hta.study.encoded_corpus import Dimensions

if TYPE_CHECKING:
    from captum_hta.study.encoded_corpus import EncodedCorpus

Array = NDArray[np.float64]
NEIGHBOURS = 10
"""Largest distance of neighbours."""


class Mixing(Analysis):
    """Contributions of input tokens to hidden embeddings, over the layers.

    Attributes:
        own: The share of a token's own input, ``[layer]``.
        own_spread: The distribution of that share.
        largest: Whether the own input has the largest share of the row.
        rank: The rank of the own input in the row; the largest share has rank 1.
        neighbours: What both tokens at each distance contribute together, ``[layer, distance]``.
    """

    name = "mixing"
    needs = frozenset({"hidden"})

    def __init__(self, size: Dimensions) -> None:
        super().__init__(size)
        count = len(size.layers)
        self.own, self.largest, self.rank = (RowMean.zero(count) for _ in range(3))
        self.own_spread = Distribution.zero(count)
        self.neighbours = RowMean.zero(count, NEIGHBOURS)

    @classmethod
    def applies(cls, corpus: EncodedCorpus) -> bool:
        """To self-attention; not with norms of the Gram matrix, slow for a target as wide as the model."""
        return corpus.is_self_attention and NORMS[corpus.settings.norm].of_gram is None

    @property
    def accumulators(self) -> dict[str, Accumulator]:
        """One for each attribute."""
        return {
            "own": self.own, "own_spread": self.own_spread, "largest": self.largest, "rank": self.rank,
            "neighbours": self.neighbours,
        }  # fmt: skip

    def add(self, text: TextResult) -> None:
        """Add one text.

        Raises:
            ValueError: If it has no contributions to hidden embeddings.
        """
        if text.hidden is None:
            raise ValueError("mixing is measured on contributions to hidden embeddings, got none")
        values = text.hidden
        own = values.diagonal(axis1=-2, axis2=-1)
        above = (values > own[..., None]).sum(-1)
        self.own.add(own)
        self.own_spread.add(own)
        self.largest.add((above == 0).astype(np.float64))
        self.rank.add(above + 1.0)
        self.neighbours.add(np.stack([_at_distance(values, step + 1) for step in range(NEIGHBOURS)], axis=1))

    def tables(self) -> dict[str, pd.DataFrame]:
        """``mixing``: see :meth:`table`."""
        return {"mixing": self.table()}

    def table(self) -> pd.DataFrame:
        """A row for each layer: the share of a token's own input (mean and quartiles), how often it is the
        largest, its mean rank; and what the neighbours at each distance that occurs contribute. Means have
        standard errors by example.
        """
        table = pd.DataFrame(
            {
                "layer": self.size.layers,
                "own_mean": self.own.mean(),
                "own_mean_error": self.own.standard_error(),
                "own_median": self.own_spread.quantile(0.5),
                "own_lower_quartile": self.own_spread.quantile(0.25),
                "own_upper_quartile": self.own_spread.quantile(0.75),
                "own_is_largest": self.largest.mean(),
                "own_is_largest_error": self.largest.standard_error(),
                "own_rank": self.rank.mean(),
                "own_rank_error": self.rank.standard_error(),
            }
        )
        neighbours, errors = self.neighbours.mean(), self.neighbours.standard_error()
        for step in np.flatnonzero(self.neighbours.counts.any(0)):
            table[f"at_distance_{step + 1}"] = neighbours[:, step]
            table[f"at_distance_{step + 1}_error"] = errors[:, step]
        return table


def by_distance(table: pd.DataFrame) -> pd.DataFrame:
    """The columns of :meth:`Mixing.table` with the contributions of neighbours, named by distance."""
    given = table.filter(regex=r"^at_distance_\d+$")
    return given.rename(columns=lambda name: int(name.removeprefix("at_distance_")))


def _at_distance(values: Array, step: int) -> Array:
    """What the tokens ``step`` places before and after each query contribute together, ``[layer, query]``;
    NaN where there are none.
    """
    queries = values.shape[-1]
    out = np.full(values.shape[:-1], np.nan)
    for offset in (-step, step):
        rows = np.arange(max(0, -offset), min(queries, queries - offset))
        out[:, rows] = np.nan_to_num(out[:, rows]) + values[:, rows, rows + offset]
    return out
