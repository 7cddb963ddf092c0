r"""Statistics of attention and contributions over many examples, as accumulators that merge.

Every accumulator holds plain sums, so examples may be added in any order and in any split. Axes are
``[layer, head, query, key]`` for one example.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from captum_hta.statistics.correlations import Array


@dataclass
class Accumulator:
    """Arrays that summarise examples; those of two accumulators add."""

    def merge(self, other: Self) -> None:
        """Add what another accumulator has seen.

        Raises:
            ValueError: If it is of another shape.
        """
        others = other.arrays()
        self._check_shapes(others)
        for name, array in self.arrays().items():
            self._combine(array, others[name])

    def arrays(self) -> dict[str, Array]:
        """Its arrays by field name; they are not copies."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Take over what :meth:`arrays` of another accumulator returned.

        Raises:
            ValueError: If an array is missing or of another shape.
        """
        self._check_shapes(arrays)
        for name, array in self.arrays().items():
            array[...] = arrays[name]

    def _check_shapes(self, arrays: Mapping[str, Array]) -> None:
        for name, array in self.arrays().items():
            found = arrays[name].shape if name in arrays else None
            if found != array.shape:
                raise ValueError(
                    f"{type(self).__name__} has {name} of shape {array.shape}, got {found}: the layers, "
                    "heads and longest text must be the same"
                )

    @staticmethod
    def _combine(mine: Array, others: Array) -> None:
        mine += others


@dataclass
class RowMean(Accumulator):
    r"""A mean over rows, with a standard error by example.

    The mean is over all rows of all examples, :math:`\bar x = \sum_e s_e / \sum_e n_e` with the sum
    :math:`s_e` and the number :math:`n_e` of an example's rows. Rows of one example are not independent,
    so the error is that of a ratio of sums over examples (Cochran 1977, section 6.4):

    .. math:: \operatorname{Var} \bar x = \frac{E}{E - 1}
                \frac{\sum_e (s_e - \bar x\, n_e)^2}{(\sum_e n_e)^2} .

    NaN rows are left out and counted.

    Attributes:
        sums: :math:`\sum_e s_e`.
        counts: :math:`\sum_e n_e`.
        square_sums: :math:`\sum_e s_e^2`.
        products: :math:`\sum_e s_e n_e`.
        square_counts: :math:`\sum_e n_e^2`.
        examples: Number of examples with at least one row that is not NaN.
        left_out: Number of NaN rows.
    """

    sums: Array
    counts: Array
    square_sums: Array
    products: Array
    square_counts: Array
    examples: Array
    left_out: Array

    @classmethod
    def zero(cls, *shape: int) -> RowMean:
        """An empty accumulator for values ``[*shape]``."""
        return cls(*(np.zeros(shape) for _ in fields(cls)))

    def add(self, rows: Array) -> None:
        """Add one example's rows ``[*shape, row]``."""
        defined = ~np.isnan(rows)
        count = defined.sum(-1).astype(np.float64)
        total = np.where(defined, rows, 0).sum(-1)
        self.sums += total
        self.counts += count
        self.square_sums += total * total
        self.products += total * count
        self.square_counts += count * count
        self.examples += count > 0
        self.left_out += rows.shape[-1] - count

    def mean(self) -> Array:
        """``[*shape]``; NaN where no row is defined."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.sums / self.counts

    def standard_error(self) -> Array:
        """``[*shape]``; NaN with fewer than two examples."""
        return _ratio_error(self, self.mean())


@dataclass
class OffsetHistogram(Accumulator):
    r"""A histogram over the offset of a key from its query (Pascual et al. 2021, section 4).

    Token ``j`` is the origin: the value of key ``i`` in the row of query ``j`` is added at ``i - j``,
    and each offset is divided by how often it occurs, so that the many small offsets of short texts do
    not outweigh the rest.

    Attributes:
        sums: ``[layer, head, offset]``; the other fields are as in :class:`RowMean`.
        counts: ``[offset]``.
        square_sums: ``[layer, head, offset]``.
        products: ``[layer, head, offset]``.
        square_counts: ``[offset]``.
        examples: ``[offset]``.
    """

    sums: Array
    counts: Array
    square_sums: Array
    products: Array
    square_counts: Array
    examples: Array

    @classmethod
    def zero(cls, layers: int, heads: int, longest: int) -> OffsetHistogram:
        """An empty histogram for texts of at most ``longest`` tokens."""
        bins = 2 * longest - 1
        shape = (layers, heads, bins)
        return cls(*(np.zeros(one) for one in (shape, bins, shape, shape, bins, bins)))

    @property
    def offsets(self) -> NDArray[np.int_]:
        """The offsets of the histogram's bins."""
        longest = (len(self.counts) + 1) // 2
        return np.arange(1 - longest, longest)

    def add(self, values: Array) -> None:
        """Add one example ``[layer, head, query, key]``.

        Raises:
            ValueError: If it has more tokens than the histogram has room for.
        """
        queries, keys = values.shape[-2:]
        middle = len(self.counts) // 2
        if max(queries, keys) > middle + 1:
            raise ValueError(
                f"got a text of {max(queries, keys)} tokens, but the histogram has room for {middle + 1}"
            )
        for offset in range(1 - queries, keys):
            diagonal = np.diagonal(values, offset, axis1=-2, axis2=-1)
            self._add_at(middle + offset, diagonal.sum(-1), diagonal.shape[-1])

    def _add_at(self, place: int, total: Array, count: int) -> None:
        self.sums[..., place] += total
        self.counts[place] += count
        self.square_sums[..., place] += total**2
        self.products[..., place] += total * count
        self.square_counts[place] += count**2
        self.examples[place] += 1

    def histogram(self) -> Array:
        """Mean value at each offset ``[layer, head, offset]``; zero at offsets that do not occur."""
        return self.sums / np.maximum(self.counts, 1)

    def standard_error(self) -> Array:
        """Standard errors of :meth:`histogram`, by example; NaN at offsets of fewer than two examples."""
        return _ratio_error(self, self.histogram())

    def centre_of_mass(self) -> Array:
        """Mean offset weighted by the histogram, ``[layer, head]``: negative is to the left."""
        histogram = self.histogram()
        total = histogram.sum(-1)
        with np.errstate(invalid="ignore"):
            return np.where(total > 0, (histogram * self.offsets).sum(-1) / total, np.nan)


def _ratio_error(sums: RowMean | OffsetHistogram, mean: Array) -> Array:
    """The standard error of a ratio of sums over examples; see :class:`RowMean`."""
    examples = sums.examples
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.clip(sums.square_sums - 2 * mean * sums.products + mean**2 * sums.square_counts, 0, None)
        factor = np.where(examples > 1, examples / (examples - 1), np.nan)
        return np.sqrt(factor * spread) / sums.counts


BINS = 1000
"""Bins of a distribution of shares: quantiles are known to a thousandth."""


@dataclass
class Distribution(Accumulator):
    """The distribution of shares between 0 and 1, as counts in :data:`BINS` bins of equal width.

    Attributes:
        counts: ``[*shape, bin]``.
    """

    counts: Array

    @classmethod
    def zero(cls, *shape: int) -> Distribution:
        """An empty accumulator for values ``[*shape]``."""
        return cls(np.zeros((*shape, BINS)))

    def add(self, rows: Array) -> None:
        """Add values ``[*shape, row]``; NaN is left out."""
        bins = np.clip((np.nan_to_num(rows) * BINS).astype(np.int64), 0, BINS - 1)
        for at in np.ndindex(self.counts.shape[:-1]):
            self.counts[at] += np.bincount(bins[at][~np.isnan(rows[at])], minlength=BINS)

    def quantile(self, share: float) -> Array:
        """The middle of the first bin up to which this share of the values lies, ``[*shape]``; NaN if there
        are no values.
        """
        below = self.counts.cumsum(-1)
        total = below[..., -1]
        found = (below < share * total[..., None]).sum(-1)
        return np.where(total > 0, (np.minimum(found, BINS - 1) + 0.5) / BINS, np.nan)


@dataclass
class Largest(Accumulator):
    """The largest of all values.

    Attributes:
        values: ``[*shape]``; minus infinity where there is none.
    """

    values: Array

    @classmethod
    def zero(cls, *shape: int) -> Largest:
        """An empty accumulator for values ``[*shape]``."""
        return cls(np.full(shape, -np.inf))

    def add(self, rows: Array) -> None:
        """Add values ``[*shape, row]``."""
        self._combine(self.values, rows.max(-1, initial=-np.inf))

    @staticmethod
    def _combine(mine: Array, others: Array) -> None:
        np.maximum(mine, others, out=mine)
