r"""Statistics of attention and contributions over many examples, as accumulators that merge.

Every accumulator holds plain sums, so examples may be added in any order and in any split. Axes are
``[layer, head, query, key]`` for one example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.spatial import distance

Array = NDArray[np.float64]
ROUNDING = 1e-12
SHORTEST_ROW = 3
"""A correlation of fewer tokens than these is always 1 or -1, or undefined."""


def row_correlations(first: Array, second: Array) -> tuple[Array, Array]:
    """Pearson's and Spearman's correlation of each row of two arrays.

    Args:
        first: ``[..., key]``.
        second: Of the same shape.

    Returns:
        Two arrays ``[...]``; NaN where a row is constant or shorter than :data:`SHORTEST_ROW`.

    Example:
        >>> pearson, spearman = row_correlations(np.array([[1.0, 2, 3]]), np.array([[1.0, 4, 9]]))
        >>> pearson.round(2), spearman.round(2)
        (array([0.99]), array([1.]))
    """
    return StandardRows.of(first).correlations(StandardRows.of(second))


@dataclass(frozen=True)
class StandardRows:
    """Rows of mean zero and length one, whose products are correlations; NaN where a row is constant, shorter
    than :data:`SHORTEST_ROW`, or holds NaN.

    Attributes:
        values: ``[..., key]``.
        ranks: The same of their ranks.
    """

    values: Array
    ranks: Array

    @classmethod
    def of(cls, values: Array, causal: bool = False) -> StandardRows:
        """Of any rows; of a causal model ``[..., query, key]``, each among the keys that its query sees."""
        return cls(in_sight(standard_values, values, causal), in_sight(standard_ranks, values, causal))

    def correlations(self, other: StandardRows) -> tuple[Array, Array]:
        """Pearson's and Spearman's correlations, ``[...]``."""
        pairs = ((self.values, other.values), (self.ranks, other.ranks))
        return tuple(np.einsum("...k,...k->...", *pair).clip(-1, 1) for pair in pairs)


def visible(queries: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Queries with the keys that they can see: all at once, or of a causal model one at a time. What they
    cannot see is zero for every method, which would count as agreement.
    """
    if not causal:
        yield slice(None), slice(None)
        return
    for query in range(queries):
        yield slice(query, query + 1), slice(0, query + 1)


def is_causal(attention: Array) -> bool:
    """Whether no query of attention ``[..., query, key]`` sees a later key."""
    queries, keys = attention.shape[-2:]
    return queries == keys and not np.triu(attention, 1).any()


def row_agreement(first: Array, second: Array, top: int = 3) -> dict[str, Array]:
    """How far the rows of two arrays agree, by several measures.

    Args:
        first: ``[layer, head, query, key]``.
        second: Of the same shape.
        top: Keys that the overlap looks at.

    Returns:
        For each of :data:`MEASURES` an array ``[layer, head, query]``: correlations as
        :func:`row_correlations`; Kendall's tau-b; the share of the ``top`` largest keys that are the same;
        the Jensen-Shannon distance (base 2) of the rows' absolute values as distributions. NaN where a row is
        constant, shorter than :data:`SHORTEST_ROW`, or holds NaN.
    """
    pearson, spearman = row_correlations(first, second)
    undefined = np.isnan(pearson)
    rest = {
        "kendall": np.stack([_kendall(a, b) for a, b in zip(first, second, strict=True)]),
        "top_overlap": _top_overlap(first, second, top),
        "jensen_shannon": _jensen_shannon(first, second),
    }
    return {"pearson": pearson, "spearman": spearman} | {
        name: np.where(undefined, np.nan, values) for name, values in rest.items()
    }


MEASURES = ("pearson", "spearman", "kendall", "top_overlap", "jensen_shannon")
"""What :func:`row_agreement` gives."""


def _kendall(first: Array, second: Array) -> Array:
    """Tau-b of each row, by the signs of all pairs of keys (scipy's function takes one row at a time)."""
    one, two = (
        np.sign(rows[..., :, None] - rows[..., None, :]).astype(np.float32) for rows in (first, second)
    )
    together = np.einsum("...ij,...ij->...", one, two)
    pairs = np.einsum("...ij,...ij->...", one, one) * np.einsum("...ij,...ij->...", two, two)
    with np.errstate(invalid="ignore", divide="ignore"):
        return together / np.sqrt(pairs)


def _top_overlap(first: Array, second: Array, top: int) -> Array:
    top = min(top, first.shape[-1])
    one, two = (np.argsort(-rows, axis=-1, kind="stable")[..., :top] for rows in (first, second))
    return (one[..., :, None] == two[..., None, :]).any(-1).mean(-1)


def _jensen_shannon(first: Array, second: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        return distance.jensenshannon(np.abs(first), np.abs(second), base=2, axis=-1)


def standard_values(values: Array) -> Array:
    """Rows ``[..., key]`` of mean zero and length one, so that their products are Pearson's correlations; NaN
    where a row is constant, shorter than :data:`SHORTEST_ROW`, or holds NaN.
    """
    return _standard(values, _varies(values))


def standard_ranks(values: Array) -> Array:
    """Rows ``[..., key]`` as ranks of mean zero and length one, so that their products are Spearman's
    correlations; NaN where a row is constant, shorter than :data:`SHORTEST_ROW`, or holds NaN.
    """
    varied = _varies(values)
    return _standard(_ranks(values) if varied.any() else values, varied)


def _ranks(values: Array) -> Array:
    """Ranks of the values of each row, from 1; equal values have their mean rank. Those are rare among
    contributions, so scipy, which takes three times as long, ranks only the rows that have some.
    """
    order = np.argsort(values, axis=-1)
    in_order = np.take_along_axis(values, order, axis=-1)
    ranks = np.empty(values.shape)
    np.put_along_axis(ranks, order, np.arange(1.0, values.shape[-1] + 1), axis=-1)
    tied = (in_order[..., 1:] == in_order[..., :-1]).any(-1)
    if tied.any():
        ranks[tied] = stats.rankdata(values[tied], axis=-1)
    return ranks


def _standard(rows: Array, varied: NDArray[np.bool_]) -> Array:
    centred = rows - rows.mean(-1, keepdims=True) if rows.size else rows
    length = np.linalg.norm(centred, axis=-1, keepdims=True)
    return np.divide(centred, length, out=np.full(rows.shape, np.nan), where=varied[..., None])


def in_sight(standard: Callable[[Array], Array], values: Array, causal: bool) -> Array:
    """:func:`standard_values` or :func:`standard_ranks` of rows ``[..., query, key]``; of a causal model
    among the keys that their query can see, and zero for the others.
    """
    if not causal:
        return standard(values)
    out = np.zeros(values.shape)
    for rows, keys in visible(values.shape[-2], causal):
        out[..., rows, keys] = standard(values[..., rows, keys])
    return out


def _varies(rows: Array) -> NDArray[np.bool_]:
    """Whether the values of a row differ by more than rounding, and are enough for a correlation."""
    if rows.shape[-1] < SHORTEST_ROW:
        return np.zeros(rows.shape[:-1], dtype=bool)
    largest = np.abs(rows).max(-1)
    return np.ptp(rows, axis=-1) > ROUNDING * largest


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
