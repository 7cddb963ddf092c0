"""How far other methods agree with contributions, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations_with_replacement

import numpy as np
import pandas as pd
from torch import Tensor

from captum_hta.evaluation.methods import Array, Method, attributed, unpadded
from captum_hta.model.encoding import Text
from captum_hta.model.protocol import Model
from captum_hta.result import Contributions
from captum_hta.statistics.accumulators import RowMean
from captum_hta.statistics.correlations import (
    MEASURES,
    in_sight,
    is_causal,
    row_agreement,
    standard_ranks,
    visible,
)


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
        ValueError: If values have other axes than these, or are for other texts or layers.
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
        queries = len(result.tokens[row])
        keys = queries if result.keys is None else len(result.keys[row])
        comparison.add(
            unpadded(result.values[row], queries, keys),
            {name: unpadded(value[row], queries, keys) for name, value in whole.items()},
            result.keys is None and is_causal(unpadded(result.attention[row], queries, keys)),
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
    comparison, ranks = Comparison(layers), RankMatrix()
    for rows, found in attributed(methods, model, texts, layers):
        for index in range(len(rows)):
            values = {name: arrays[index] for name, arrays in found.items()}
            ranks.add(values, model.size.causal)
            comparison.add(values.pop(methods[0].name), values, model.size.causal)
        advance(len(rows))
    return comparison, ranks


def _aligned(name: str, value: Tensor | Contributions, result: Contributions) -> Tensor:
    """A method's values with all axes of the result, for its texts and layers."""
    if isinstance(value, Contributions):
        if value.tokens != result.tokens or not set(result.layers) <= set(value.layers):
            raise ValueError(f"{name!r} is for other texts or layers than the contributions: pass the same")
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
    return value


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

    def add(self, reference: Array, methods: Mapping[str, Array], causal: bool = False) -> None:
        """Add one text.

        Args:
            reference: The values that the methods are compared with, ``[layer, head, query, key]``.
            methods: The values of each method, with the same axes or axes of length 1.
            causal: Whether queries see no later keys, which then do not count.
        """
        for name, value in methods.items():
            self._add_rows(name, reference, np.broadcast_to(value, reference.shape), causal)

    def _add_rows(self, name: str, reference: Array, value: Array, causal: bool) -> None:
        found = [
            row_agreement(reference[..., rows, keys], value[..., rows, keys], self.top)
            for rows, keys in visible(reference.shape[-2], causal)
        ]
        for measure in MEASURES:
            by_row = np.concatenate([one[measure] for one in found], axis=-1)
            mean = self.means.setdefault(name, {}).setdefault(measure, RowMean.zero(*by_row.shape[:2]))
            mean.add(by_row)

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


class RankMatrix:
    """Spearman's correlation of each method with each other, a mean over the query rows of all texts."""

    def __init__(self) -> None:
        self.pairs: dict[tuple[str, str], RowMean] = {}

    def add(self, methods: Mapping[str, Array], causal: bool = False) -> None:
        """Add one text.

        Args:
            methods: The values of each method, ``[layer, head, query, key]``; axes may have length 1.
            causal: Whether queries see no later keys, which then do not count.
        """
        ranked = {name: in_sight(standard_ranks, value, causal) for name, value in methods.items()}
        for name, other in combinations_with_replacement(ranked, 2):
            rows = (ranked[name] * ranked[other]).sum(-1)
            self.pairs.setdefault((name, other), RowMean.zero()).add(rows.ravel())

    def table(self) -> pd.DataFrame:
        """The symmetric matrix, methods by methods."""
        names = list(dict.fromkeys(name for name, _ in self.pairs))
        matrix = pd.DataFrame(np.nan, index=names, columns=names)
        for (name, other), mean in self.pairs.items():
            matrix.loc[name, other] = matrix.loc[other, name] = float(mean.mean())
        return matrix
