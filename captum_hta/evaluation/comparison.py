"""How far other methods agree with contributions, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations_with_replacement

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from captum_hta.evaluation.methods import Array, Method, attributed, unpadded
from captum_hta.model.activations import Activations
from captum_hta.model.encoding import Text
from captum_hta.model.protocol import Model
from captum_hta.result import Contributions
from captum_hta.statistics.accumulators import RowMean
from captum_hta.statistics.correlations import (
    MEASURES,
    attended,
    in_sight,
    row_agreement,
    rows_alike,
    standard_ranks,
)
from captum_hta.texts import encoded, listed


def compare(
    result: Contributions, methods: Mapping[str, Tensor | Contributions], top: int = 3
) -> pd.DataFrame:
    """Compare other methods with contributions, row by row.

    Args:
        result: Contributions for some texts.
        methods: For each method, by name, its values for the same texts, as its ``attribute`` returns them:
            ``[batch, layer, head, query, key]`` with the same layers or all of the model's. Values without
            the head axis, or without the layer axis too, are compared with every head or layer.
        top: How many of the largest keys ``top_overlap`` looks at.

    Returns:
        One row for each method, layer and head: means over query rows of each of
        :data:`captum_hta.statistics.correlations.MEASURES`, the number of rows, and the number of rows that
        were left out because they are constant, shorter than three tokens or undefined.

    Raises:
        ValueError: If values have other axes than these, or are for other texts, queries or layers.
        TypeError: If values are not tensors or contributions.

    Example:
        >>> from captum_hta import contributions, load_model
        >>> from captum_hta.baselines import AttentionRollout
        >>> model, texts = load_model(), ["The cat sat."]
        >>> result = contributions(model, texts, source="previous_layer")
        >>> table = compare(result, {"rollout": AttentionRollout(model).attribute(texts)})
        >>> len(table), sorted(table.columns)[:3]
        (72, ['head', 'jensen_shannon', 'kendall'])
    """
    if not isinstance(top, int) or top < 1:
        raise ValueError(f"top must be a positive int, got {top!r}")
    whole = {name: _aligned(name, value, result) for name, value in methods.items()}
    comparison = Comparison(result.layers, top)
    for row in range(len(result)):
        queries = len(result.tokens[row] if result.queries is None else result.queries[row])
        keys = len(result.tokens[row] if result.keys is None else result.keys[row])
        comparison.add(
            unpadded(result.values[row], queries, keys),
            {name: unpadded(value[row], queries, keys) for name, value in whole.items()},
            attended(unpadded(result.attention[row], queries, keys)),
        )
    return comparison.table()


def compare_methods(
    methods: Sequence[Method],
    model: Model,
    texts: Sequence[Text],
    layers: Sequence[int],
    advance: Callable[[int], object] = lambda done: None,
) -> tuple[Comparison, RankMatrix]:
    """Compare methods with the first of them, and all with each other, over a corpus.

    Args:
        methods: The methods.
        model: Their model.
        texts: The corpus.
        layers: The layers to compare.
        advance: Called with the number of texts done.

    Raises:
        ValueError: If two methods share a name, there is no text, or one cannot be read.
    """
    texts = listed(model, texts)
    comparison, ranks = Comparison(layers), RankMatrix(methods[0].name)
    for rows, found in attributed(methods, model, texts, layers):
        for index, row in enumerate(rows):
            one = encoded(model, texts[row], row)
            activations = Activations(model, model.batch([one]), f"text {row}")
            sight = attended(activations.pattern[list(layers)].double().cpu().numpy())
            values = {name: arrays[index] for name, arrays in found.items()}
            ranks.add(values, sight)
            comparison.add(values.pop(methods[0].name), values, sight)
        advance(len(rows))
    return comparison, ranks


def _aligned(name: str, value: Tensor | Contributions, result: Contributions) -> Tensor:
    """A method's values with all axes of the result, for its texts and layers."""
    if isinstance(value, Contributions):
        same_rows = value.tokens == result.tokens and value.queries == result.queries
        if not same_rows or not set(result.layers) <= set(value.layers):
            raise ValueError(
                f"{name!r} is for other texts, queries or layers than the contributions: pass the same"
            )
        value = value.values[:, [value.layers.index(layer) for layer in result.layers]]
    elif not isinstance(value, Tensor):
        raise TypeError(
            f"the values of {name!r} must be a tensor or contributions, got {type(value).__name__}"
        )
    elif value.dim() > 3 and value.shape[1] > max(len(result.layers), *result.layers):
        value = value[:, result.layers]
    value = _broadcast(value, result.values)
    if value.shape != result.values.shape:
        raise ValueError(
            f"the values of {name!r} are {list(value.shape)}, but the contributions "
            f"{list(result.values.shape)}: pass [batch, layer, head, query, key] for the same texts, or "
            "without the head axis or both the layer and head axes"
        )
    _check_texts(name, value, result)
    return value


def _check_texts(name: str, value: Tensor, result: Contributions) -> None:
    """Check that values are not padding where the result has keys, as for other or reordered texts."""
    for row, tokens in enumerate(result.tokens):
        keys = len(tokens if result.keys is None else result.keys[row])
        if value[row, ..., keys - 1].isnan().all() and not value[row].isnan().all():
            raise ValueError(
                f"the values of {name!r} for text {row} end before its {keys} tokens: pass the values of the "
                "same texts in the same order"
            )


def _broadcast(value: Tensor, like: Tensor) -> Tensor:
    """Add the layer and head axes that a method lacks."""
    if value.dim() == 3:
        value = value[:, None].expand(-1, like.shape[1], -1, -1)
    if value.dim() == 4 and like.dim() == 5:
        value = value[:, :, None].expand(-1, -1, like.shape[2], -1, -1)
    return value


class Comparison:
    """Means over texts of how far methods agree with contributions.

    Args:
        layers: The layers of the layer axis.
        top: How many of the largest keys ``top_overlap`` looks at.
    """

    def __init__(self, layers: Sequence[int], top: int = 3) -> None:
        self.layers, self.top = list(layers), top
        self.means: dict[str, dict[str, RowMean]] = {}

    def add(
        self, reference: Array, methods: Mapping[str, Array], attended: NDArray[np.bool_] | None = None
    ) -> None:
        """Add one text.

        Args:
            reference: The values that the methods are compared with, ``[layer, head, query, key]``.
            methods: The values of each method, with the same axes or axes of length 1.
            attended: The keys that heads attend to, ``[layer, query, key]``. Other keys count only where the
                reference is not zero, as where earlier layers have carried them. Default: ``None``, all
                count.
        """
        seen = _seen(reference, attended)
        for name, value in methods.items():
            self._add_rows(name, reference, value, _counted(seen, attended, reference, value))

    def _add_rows(self, name: str, reference: Array, value: Array, seen: NDArray[np.bool_]) -> None:
        by_row = self._agreement(reference, np.broadcast_to(value, reference.shape), seen)
        for measure in MEASURES:
            mean = self.means.setdefault(name, {}).setdefault(measure, RowMean.zero(*reference.shape[:2]))
            mean.add(by_row[measure])

    def _agreement(self, first: Array, second: Array, seen: NDArray[np.bool_]) -> dict[str, Array]:
        """Every measure of each row among its seen keys, ``[layer, head, query]``."""
        if seen.all():
            return row_agreement(first, second, self.top)
        found = {measure: np.full(first.shape[:3], np.nan) for measure in MEASURES}
        for query in range(first.shape[2]):
            for layers, keys in rows_alike(seen[:, query]):
                one, two = (values[layers, :, query][..., keys] for values in (first, second))
                for measure, values in row_agreement(one[None], two[None], self.top).items():
                    found[measure][layers, :, query] = values[0]
        return found

    def table(self) -> pd.DataFrame:
        """One row for each method, layer and head; see :func:`compare`."""
        return pd.DataFrame(list(self._rows()))

    def _rows(self) -> Iterator[dict[str, object]]:
        for name, by_measure in self.means.items():
            means = {measure: by_measure[measure].mean() for measure in MEASURES}
            rows = by_measure["pearson"]
            for index, head in np.ndindex(rows.counts.shape):
                yield {
                    "method": name, "layer": self.layers[index], "head": head,
                    **{measure: mean[index, head] for measure, mean in means.items()},
                    "rows": int(rows.counts[index, head]),
                    "rows_left_out": int(rows.left_out[index, head]),
                }  # fmt: skip

    def summary(self) -> pd.DataFrame:
        """One row for each method: means over the query rows of all layers and heads."""
        rows = []
        for name, by_measure in self.means.items():
            row: dict[str, object] = {"method": name}
            for measure in MEASURES:
                mean = by_measure[measure]
                count = mean.counts.sum()
                row[measure] = mean.sums.sum() / count if count else np.nan
            rows.append(row | {"rows": int(by_measure["pearson"].counts.sum())})
        return pd.DataFrame(rows)


def _seen(reference: Array, attended: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """The keys that can count in a row, ``[layer, query, key]``."""
    carried = (reference != 0).any(1)
    return np.ones_like(carried) if attended is None else attended | carried


def _counted(
    seen: NDArray[np.bool_], attended: NDArray[np.bool_] | None, first: Array, second: Array
) -> NDArray[np.bool_]:
    """The keys that count in a comparison of two methods, ``[layer, query, key]``: only attended ones, if
    both methods are zero elsewhere, as methods are that look at a single layer with a window.
    """
    if attended is None or (seen == attended).all():
        return seen
    carried = (seen & ~attended)[:, None]
    both_local = not any((np.where(carried, values, 0) != 0).any() for values in (first, second))
    return attended if both_local else seen


class RankMatrix:
    """Spearman's correlation of each method with each other, a mean over the query rows of all texts.

    Args:
        reference: The name of the method that tells which keys are carried by earlier layers.
    """

    def __init__(self, reference: str) -> None:
        self.reference = reference
        self.pairs: dict[tuple[str, str], RowMean] = {}

    def add(self, methods: Mapping[str, Array], attended: NDArray[np.bool_] | None = None) -> None:
        """Add one text.

        Args:
            methods: The values of each method, ``[layer, head, query, key]``; axes may have length 1.
            attended: As in :meth:`Comparison.add`.
        """
        seen = _seen(methods[self.reference], attended)
        ranked: dict[tuple[str, bool], Array] = {}
        for name, other in combinations_with_replacement(methods, 2):
            counted = _counted(seen, attended, methods[name], methods[other])
            for one in {name, other}:
                if (one, counted is seen) not in ranked:
                    ranked[one, counted is seen] = in_sight(standard_ranks, methods[one], counted)
            rows = (ranked[name, counted is seen] * ranked[other, counted is seen]).sum(-1)
            self.pairs.setdefault((name, other), RowMean.zero()).add(rows.ravel())

    def table(self) -> pd.DataFrame:
        """The symmetric matrix, methods by methods."""
        names = list(dict.fromkeys(name for name, _ in self.pairs))
        matrix = pd.DataFrame(np.nan, index=names, columns=names)
        for (name, other), mean in self.pairs.items():
            matrix.loc[name, other] = matrix.loc[other, name] = float(mean.mean())
        return matrix
