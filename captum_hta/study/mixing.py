"""How much hidden tokens keep of themselves, and from how far they take the rest.

After Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from captum_hta.statistics.accumulators import Distribution, Mean

Array = NDArray[np.float64]
NEIGHBOURS = 10
"""Distances that are looked at."""


@dataclass
class Mixing:
    """Contributions of input tokens to hidden tokens, over the layers.

    Attributes:
        layers: The layers of the layer axis.
        own: The share of a token's own input.
        own_spread: The same as a distribution.
        largest: Whether it is the largest of the row.
        rank: Its place in the row; the largest has 1.
        neighbours: What both tokens at each distance give together.
    """

    layers: list[int]
    own: Mean
    own_spread: Distribution
    largest: Mean
    rank: Mean
    neighbours: Mean

    @classmethod
    def empty(cls, layers: list[int]) -> Mixing:
        """Of no example."""
        count = len(layers)
        means = [Mean.zero(count) for _ in range(3)]
        return cls(list(layers), means[0], Distribution.zero(count), *means[1:], Mean.zero(count, NEIGHBOURS))

    def add(self, values: Array) -> None:
        """Add one example's contributions to hidden embeddings, ``[layer, query, key]``."""
        own = values.diagonal(axis1=-2, axis2=-1)
        above = (values > own[..., None]).sum(-1)
        self.own.add(own)
        self.own_spread.add(own)
        self.largest.add((above == 0).astype(np.float64))
        self.rank.add(above + 1.0)
        self.neighbours.add(np.stack([_at_distance(values, step + 1) for step in range(NEIGHBOURS)], axis=1))

    @property
    def parts(self) -> dict[str, Mean | Distribution]:
        """Its accumulators, by name."""
        names = ("own", "own_spread", "largest", "rank", "neighbours")
        return {name: getattr(self, name) for name in names}

    def table(self) -> pd.DataFrame:
        """A row for each layer: the share of a token's own input (mean and quartiles), how often it is the
        largest, its mean rank; and what its neighbours at each distance that occurs give. Means have errors
        by example.
        """
        table = pd.DataFrame(
            {
                "layer": self.layers,
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
    """Of the columns of :meth:`Mixing.table` those that tell what neighbours give, by their distance."""
    given = table.filter(regex=r"^at_distance_\d+$")
    return given.rename(columns=lambda name: int(name.removeprefix("at_distance_")))


def _at_distance(values: Array, step: int) -> Array:
    """For each query what the tokens that many places before and behind it give, ``[layer, query]``; NaN
    where there are none.
    """
    queries = values.shape[-1]
    out = np.full(values.shape[:-1], np.nan)
    for offset in (-step, step):
        rows = np.arange(max(0, -offset), min(queries, queries - offset))
        out[:, rows] = np.nan_to_num(out[:, rows]) + values[:, rows, rows + offset]
    return out
