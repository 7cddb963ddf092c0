r"""Statistics of attention and contributions over many examples, as accumulators that merge.

Every accumulator holds plain sums, so examples may be added in any order and in any split. Axes are
``[layer, head, query, key]`` for one example.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from captum_hta.statistics.correlations import Array


@dataclass
class Mean:
    r"""A mean over rows, with a standard error by example.

    The mean is over all rows of all examples, :math:`\bar x = \sum_e s_e / \sum_e n_e` with the sum
    :math:`s_e` and the number :math:`n_e` of an example's rows. Rows of one example are not independent,
    so the error is that of a ratio of sums over examples (Cochran 1977, section 6.4):

    .. math:: \operatorname{Var} \bar x = \frac{E}{E - 1}
                \frac{\sum_e (s_e - \bar x\, n_e)^2}{(\sum_e n_e)^2} .

    NaN rows are left out and counted.
    """

    sums: Array
    counts: Array
    squares: tuple[Array, Array, Array]
    examples: Array
    left_out: Array

    @classmethod
    def zero(cls, *shape: int) -> Mean:
        """The mean of nothing, for values ``[*shape]``."""

        def zeros() -> Array:
            return np.zeros(shape)

        return cls(zeros(), zeros(), (zeros(), zeros(), zeros()), zeros(), zeros())

    def add(self, rows: Array) -> None:
        """Add one example's rows ``[*shape, row]``."""
        defined = ~np.isnan(rows)
        count = defined.sum(-1).astype(np.float64)
        total = np.where(defined, rows, 0).sum(-1)
        products = (total * total, total * count, count * count)
        self.sums += total
        self.counts += count
        self.squares = tuple(a + b for a, b in zip(self.squares, products, strict=True))
        self.examples += count > 0
        self.left_out += rows.shape[-1] - count

    def merge(self, other: Mean) -> None:
        """Add what another accumulator has seen."""
        self.sums += other.sums
        self.counts += other.counts
        self.squares = tuple(a + b for a, b in zip(self.squares, other.squares, strict=True))
        self.examples += other.examples
        self.left_out += other.left_out

    def arrays(self) -> dict[str, Array]:
        """All that it holds, by name."""
        return {
            "sums": self.sums, "counts": self.counts, "examples": self.examples, "left_out": self.left_out,
            **{f"squares{number}": square for number, square in enumerate(self.squares)},
        }  # fmt: skip

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Mean:
        """The accumulator that holds :meth:`arrays`."""
        squares = tuple(arrays[f"squares{number}"] for number in range(3))
        return cls(arrays["sums"], arrays["counts"], squares, arrays["examples"], arrays["left_out"])

    def mean(self) -> Array:
        """``[*shape]``; NaN where no row is defined."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.sums / self.counts

    def standard_error(self) -> Array:
        """``[*shape]``; NaN with fewer than two examples."""
        return _ratio_error(self.mean(), self.counts, self.squares, self.examples)


def _ratio_error(mean: Array, counts: Array, squares: tuple[Array, Array, Array], examples: Array) -> Array:
    """The standard error of a ratio of sums over examples; see :class:`Mean`."""
    ss, sn, nn = squares
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.clip(ss - 2 * mean * sn + mean**2 * nn, 0, None)
        factor = np.where(examples > 1, examples / (examples - 1), np.nan)
        return np.sqrt(factor * spread) / counts


@dataclass
class RelativePosition:
    r"""A histogram over the offset of a key from its query (Pascual et al. 2021, section 4).

    Token ``j`` is the origin: the value of key ``i`` in the row of query ``j`` is added at ``i - j``,
    and each offset is divided by how often it occurs, so that the many small offsets of short texts do
    not outweigh the rest.
    """

    sums: Array
    counts: Array
    squares: tuple[Array, Array, Array]
    examples: Array

    @classmethod
    def zero(cls, layers: int, heads: int, longest: int) -> RelativePosition:
        """An empty histogram for texts of at most ``longest`` tokens."""
        bins = 2 * longest - 1
        shape = (layers, heads, bins)
        squares = (np.zeros(shape), np.zeros(shape), np.zeros(bins))
        return cls(np.zeros(shape), np.zeros(bins), squares, np.zeros(bins))

    @property
    def offsets(self) -> Array:
        """The offsets of the histogram's bins."""
        longest = (len(self.counts) + 1) // 2
        return np.arange(1 - longest, longest)

    def add(self, values: Array) -> None:
        """Add one example ``[layer, head, query, key]``."""
        queries, keys = values.shape[-2:]
        middle = len(self.counts) // 2
        if max(queries, keys) > middle + 1:
            raise ValueError(
                f"a text of {max(queries, keys)} tokens, where at most {middle + 1} were said to come"
            )
        for offset in range(1 - queries, keys):
            diagonal = np.diagonal(values, offset, axis1=-2, axis2=-1)
            bin_, total, count = middle + offset, diagonal.sum(-1), diagonal.shape[-1]
            self.sums[..., bin_] += total
            self.counts[bin_] += count
            self.examples[bin_] += 1
            for square, product in zip(self.squares, (total**2, total * count, count**2), strict=True):
                square[..., bin_] += product

    def merge(self, other: RelativePosition) -> None:
        """Add what another histogram of the same size has seen."""
        if self.sums.shape != other.sums.shape:
            raise ValueError(f"histograms of shapes {self.sums.shape} and {other.sums.shape} do not merge")
        self.sums += other.sums
        self.counts += other.counts
        self.examples += other.examples
        self.squares = tuple(a + b for a, b in zip(self.squares, other.squares, strict=True))

    def arrays(self) -> dict[str, Array]:
        """All that it holds, by name."""
        return {
            "sums": self.sums, "counts": self.counts, "examples": self.examples,
            **{f"squares{number}": square for number, square in enumerate(self.squares)},
        }  # fmt: skip

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> RelativePosition:
        """The accumulator that holds :meth:`arrays`."""
        squares = tuple(arrays[f"squares{number}"] for number in range(3))
        return cls(arrays["sums"], arrays["counts"], squares, arrays["examples"])

    def histogram(self) -> Array:
        """Mean value at each offset ``[layer, head, offset]``; zero at offsets that do not occur."""
        return self.sums / np.maximum(self.counts, 1)

    def standard_error(self) -> Array:
        """Of :meth:`histogram`, by example as that of :class:`Mean`; NaN at offsets of fewer than two."""
        return _ratio_error(self.histogram(), self.counts, self.squares, self.examples)

    def centre_of_mass(self) -> Array:
        """Mean offset weighted by the histogram, ``[layer, head]``: negative is to the left."""
        histogram = self.histogram()
        total = histogram.sum(-1)
        with np.errstate(invalid="ignore"):
            return np.where(total > 0, (histogram * self.offsets).sum(-1) / total, np.nan)


BINS = 1000
"""Bins of a distribution of shares: quantiles are known to a thousandth."""


@dataclass
class Distribution:
    """How shares between 0 and 1 are distributed, by counts in :data:`BINS` bins of equal width.

    Attributes:
        counts: ``[*shape, bin]``.
    """

    counts: Array

    @classmethod
    def zero(cls, *shape: int) -> Distribution:
        """The distribution of nothing, for values ``[*shape]``."""
        return cls(np.zeros((*shape, BINS)))

    def add(self, rows: Array) -> None:
        """Add values ``[*shape, row]``; NaN is left out."""
        bins = np.clip((np.nan_to_num(rows) * BINS).astype(np.int64), 0, BINS - 1)
        for at in np.ndindex(self.counts.shape[:-1]):
            self.counts[at] += np.bincount(bins[at][~np.isnan(rows[at])], minlength=BINS)

    def merge(self, other: Distribution) -> None:
        """Add what another accumulator has seen."""
        self.counts += other.counts

    def arrays(self) -> dict[str, Array]:
        """All that it holds, by name."""
        return {"counts": self.counts}

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Distribution:
        """The accumulator that holds :meth:`arrays`."""
        return cls(arrays["counts"])

    def quantile(self, share: float) -> Array:
        """``[*shape]``: the middle of the bin that this share of the values do not exceed; NaN of nothing."""
        below = self.counts.cumsum(-1)
        total = below[..., -1]
        found = (below < share * total[..., None]).sum(-1)
        return np.where(total > 0, (np.minimum(found, BINS - 1) + 0.5) / BINS, np.nan)
