"""Correlations and other measures of agreement between rows of attention and contributions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.spatial import distance

Array = NDArray[np.float64]
ROUNDING = 1e-12
"""Rows whose values differ relatively by less than this are constant."""
SHORTEST_ROW = 3
"""Correlations of fewer tokens are always 1, -1 or undefined."""


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
    def of(cls, values: Array, seen: NDArray[np.bool_] | None = None) -> StandardRows:
        """Standardise rows ``[..., key]``; with the keys ``seen`` as :func:`in_sight` takes them, rows
        ``[layer, head, query, key]`` among those keys.
        """
        return cls(in_sight(standard_values, values, seen), in_sight(standard_ranks, values, seen))

    def correlations(self, other: StandardRows) -> tuple[Array, Array]:
        """Pearson's and Spearman's correlations, ``[...]``."""
        pairs = ((self.values, other.values), (self.ranks, other.ranks))
        return tuple(np.einsum("...k,...k->...", *pair).clip(-1, 1) for pair in pairs)


def attended(attention: Array) -> NDArray[np.bool_]:
    """Keys that some head of a layer attends to, or the query itself: ``[layer, query, key]`` from patterns
    ``[layer, head, query, key]``.
    """
    queries, keys = attention.shape[-2:]
    seen: NDArray[np.bool_] = (attention != 0).any(-3)
    return seen | np.eye(queries, keys, dtype=np.bool_) if queries == keys else seen


def carried(contributions: Array, attended: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Keys that are attended to, or that contribute to some head of a layer: ``[layer, query, key]``.

    Through the layers below, input reaches a head also from outside the window of its own attention.

    Args:
        contributions: ``[layer, head, query, key]``.
        attended: As :func:`attended` returns it.
    """
    reaches: NDArray[np.bool_] = (contributions != 0).any(-3)
    return attended | reaches


def reached(attended: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Tokens of the input that reach a head through the layers up to its own, ``[layer, query, key]``.

    Args:
        attended: What :func:`attended` gives for all layers of a model from the first.
    """
    return np.stack(list(accumulate(attended, lambda below, layer: layer @ below)))


def rows_alike(seen: NDArray[np.bool_]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Numbers of the rows of ``seen``, ``[row, key]``, with the same true keys, and these keys."""
    masks, which = np.unique(seen, axis=0, return_inverse=True)
    for number, mask in enumerate(masks):
        yield np.flatnonzero(which.ravel() == number), np.flatnonzero(mask)


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
"""The measures of :func:`row_agreement`."""


def _kendall(first: Array, second: Array) -> Array:
    """Tau-b of each row, by the signs of all pairs of keys (scipy's function takes one row at a time)."""
    one, two = (
        np.sign(rows[..., :, None] - rows[..., None, :]).astype(np.float32) for rows in (first, second)
    )
    together = np.einsum("...ij,...ij->...", one, two)
    pairs = np.einsum("...ij,...ij->...", one, one) * np.einsum("...ij,...ij->...", two, two)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(together / np.sqrt(pairs), dtype=np.float64)


def _top_overlap(first: Array, second: Array, top: int) -> Array:
    top = min(top, first.shape[-1])
    one, two = (np.argsort(-rows, axis=-1, kind="stable")[..., :top] for rows in (first, second))
    return np.asarray((one[..., :, None] == two[..., None, :]).any(-1).mean(-1), dtype=np.float64)


def _jensen_shannon(first: Array, second: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(distance.jensenshannon(np.abs(first), np.abs(second), base=2, axis=-1))


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
    out: Array = np.divide(centred, length, out=np.full(rows.shape, np.nan), where=varied[..., None])
    return out


def in_sight(standard: Callable[[Array], Array], values: Array, seen: NDArray[np.bool_] | None) -> Array:
    """:func:`standard_values` or :func:`standard_ranks` among the keys that count.

    Args:
        standard: One of the two.
        values: ``[layer, head, query, key]``; axes of layers and heads may have length 1.
        seen: The keys that count, ``[layer, query, key]``, with a layer axis of any length; ``None``: all.
            Keys that a query cannot see are zero for every method, which would count as agreement.

    Returns:
        ``[layer, head, query, key]``, zero for the other keys.
    """
    if seen is None or seen.all():
        return standard(values)
    layers = max(len(values), len(seen))
    rows = np.broadcast_to(values, (layers, *values.shape[1:])).swapaxes(1, 2)
    out = np.zeros(rows.shape)
    masks = np.broadcast_to(seen, (layers, *seen.shape[1:]))
    for query in range(rows.shape[1]):
        for where, keys in rows_alike(masks[:, query]):
            at = np.ix_(where, np.arange(rows.shape[2]), keys)
            out[:, query][at] = standard(rows[:, query][at])
    return out.swapaxes(1, 2)


def _varies(rows: Array) -> NDArray[np.bool_]:
    """Whether the values of a row differ by more than rounding, and are enough for a correlation."""
    if rows.shape[-1] < SHORTEST_ROW:
        return np.zeros(rows.shape[:-1], dtype=bool)
    varies: NDArray[np.bool_] = np.ptp(rows, axis=-1) > ROUNDING * np.abs(rows).max(-1)
    return varies
