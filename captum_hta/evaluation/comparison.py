"""Contributions beside the methods that people use in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations_with_replacement
from typing import Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from captum_hta import baselines
from captum_hta.computation import contributions
from captum_hta.model.encoding import Text
from captum_hta.model.protocol import Model
from captum_hta.result import Contributions
from captum_hta.statistics.accumulators import Mean
from captum_hta.statistics.correlations import (
    MEASURES,
    in_sight,
    is_causal,
    row_agreement,
    standard_ranks,
    visible,
)
from captum_hta.texts import encoded, groups, listed

Array = NDArray[np.float64]
HTA = {"input": "HTA, input", "previous_layer": "HTA, previous layer"}
"""What tables call contributions, by their source."""


class Method(Protocol):
    """What gives values with the axes of contributions, or without the layer or the head axis."""

    name: str

    def attribute(self, texts: Sequence[Text]) -> Tensor:
        """``[batch, layer, head, query, key]``, padded with NaN."""


@dataclass(frozen=True)
class HtaMethod:
    """Contributions of heads as one method among others.

    Attributes:
        model: The model.
        source: As in :func:`captum_hta.contributions`.
        n_probes: Probes of each source token; ``None``: exact.
        seed: Of the probes.
    """

    model: Model
    source: str = "input"
    n_probes: int | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        """What tables call it."""
        return HTA[self.source]

    def attribute(self, texts: Sequence[Text]) -> Tensor:
        """``[batch, layer, head, query, key]``, padded with NaN."""
        found = contributions(
            self.model, list(texts), source=self.source, n_probes=self.n_probes, seed=self.seed
        )
        return found.values


CHEAP: Sequence[Callable[[Model], Method]] = (
    baselines.AttentionWeights,
    baselines.EffectiveAttention,
    baselines.ValueWeightedNorm,
    baselines.BlockNorm,
    baselines.Alti,
    baselines.AttentionRollout,
    baselines.ValueZeroing,
)
"""Methods that explain heads and layers, in the order of tables; attention flow is slow, and left out."""
OF_LOGITS: Sequence[Callable[[Model], Method]] = (
    baselines.GradientTimesAttention,
    baselines.EmbeddingSaliency,
    partial(baselines.JacobianScope, scope="semantic"),
    partial(baselines.JacobianScope, scope="temperature"),
)
"""Methods that explain a logit or the last hidden state, one row or one map a text."""


def methods_for(
    model: Model, example: Text, n_probes: int | None, seed: int = 0, with_logits: bool = True
) -> tuple[list[Method], dict[str, str]]:
    """The methods that a model allows, and why it does not allow the others.

    Args:
        model: The model.
        example: A text that they are tried on.
        n_probes: Probes of the input contribution.
        seed: Of the probes.
        with_logits: Whether methods that explain a logit are wanted.
    """
    allowed: list[Method] = [
        HtaMethod(model, "input", n_probes, seed),
        HtaMethod(model, "previous_layer", None, seed),
    ]
    refused = {}
    for make in (*CHEAP, *(OF_LOGITS if with_logits else ())):
        method = make(model)
        try:
            method.attribute([example])
        except ValueError as error:
            refused[method.name] = str(error)
        else:
            allowed.append(method)
    return allowed, refused


def compare_methods(
    methods: Sequence[Method],
    model: Model,
    texts: Sequence[Text],
    layers: Sequence[int],
    advance: Callable[[int], object] = lambda done: None,
) -> Agreement:
    """Hold methods against the first of them, over a corpus.

    Args:
        methods: The methods.
        model: Their model.
        texts: The corpus.
        layers: The layers to look at.
        advance: Called with the number of texts done.
    """
    agreement = Agreement(methods[0].name, layers)
    for rows, found in attributed(methods, model, texts, layers):
        for index in range(len(rows)):
            agreement.add({name: values[index] for name, values in found.items()}, model.size.causal)
        advance(len(rows))
    return agreement


def attributed(
    methods: Sequence[Method], model: Model, texts: Sequence[Text], layers: Sequence[int]
) -> Iterator[tuple[list[int], dict[str, list[Array]]]]:
    """Numbers of a few texts at a time, and by method for each of them ``[layer, head, query, key]``; an axis
    that a method does not have is 1 long.
    """
    texts = listed(model, texts)
    names = [method.name for method in methods]
    if len(set(names)) < len(names):
        raise ValueError(f"methods must have names of their own, got {', '.join(names)}")
    lengths = [len(encoded(model, text, number)) for number, text in enumerate(texts)]
    for rows in groups(lengths):
        found = {}
        for method in methods:
            values = _with_all_axes(method.attribute([texts[row] for row in rows]), layers)
            found[method.name] = [
                _array(value, lengths[row], lengths[row]) for value, row in zip(values, rows, strict=True)
            ]
        yield rows, found


def _with_all_axes(values: Tensor, layers: Sequence[int]) -> Tensor:
    """``[batch, layer, head, query, key]`` of the layers, with axes of 1 where a method has none."""
    if values.dim() == 3:
        return values[:, None, None]
    return values[:, list(layers)] if values.dim() == 5 else values[:, list(layers), None]


# --- agreement -------------------------------------------------------------------------------------


def compare(
    result: Contributions, methods: Mapping[str, Tensor | Contributions], top: int = 3
) -> pd.DataFrame:
    """How far other methods agree with contributions, row by row.

    Args:
        result: Contributions of some texts.
        methods: By name the values of others for the same texts, as their ``attribute`` gives them:
            ``[batch, layer, head, query, key]`` with the same layers or all of the model; without the head
            axis, or without the layer axis too, they are held against every head or layer.
        top: Keys that the overlap of the largest looks at.

    Returns:
        A row for each method, layer and head: means over query rows of each of
        :data:`captum_hta.statistics.correlations.MEASURES`, the number of rows, and of those left out
        (constant, shorter than three tokens, or without numbers).

    Raises:
        ValueError: If values do not have the axes above, or are of other texts or layers.
        TypeError: If values are no tensors.

    Example:
        >>> from captum_hta.baselines import AttentionRollout
        >>> from captum_hta import load_model
        >>> model, texts = load_model(), ["The cat sat."]
        >>> result = contributions(model, texts, source="previous_layer")
        >>> table = compare(result, {"rollout": AttentionRollout(model).attribute(texts)})
        >>> len(table), sorted(table.columns)[:3]
        (72, ['head', 'jensen_shannon', 'kendall'])
    """
    if not isinstance(top, int) or top < 1:
        raise ValueError(f"top must be a positive int, got {top!r}")
    whole = {name: _aligned(name, value, result) for name, value in methods.items()}
    agreement = Agreement(_RESULT, result.layers, top)
    for row in range(len(result)):
        queries = len(result.tokens[row])
        keys = queries if result.keys is None else len(result.keys[row])
        causal = result.keys is None and is_causal(_array(result.attention[row], queries, keys))
        agreement.add(
            {_RESULT: _array(result.values[row], queries, keys)}
            | {name: _array(value[row], queries, keys) for name, value in whole.items()},
            causal,
        )
    return agreement.table()


_RESULT = "\0"  # which is the name of no method


def _aligned(name: str, value: Tensor | Contributions, result: Contributions) -> Tensor:
    """Values with all axes of a result, for its texts and layers."""
    like, layers = result.values, None
    if isinstance(value, Contributions):
        if value.tokens != result.tokens or not set(result.layers) <= set(value.layers):
            raise ValueError(f"{name!r} is of other texts or layers than the contributions: pass the same")
        value, layers = value.values, [value.layers.index(layer) for layer in result.layers]
    if not isinstance(value, Tensor):
        raise TypeError(
            f"the values of {name!r} must be a tensor or contributions, got {type(value).__name__}"
        )
    if value.dim() == 3:
        value, layers = value[:, None].expand(-1, like.shape[1], -1, -1), None
    elif layers is None and value.dim() > 3 and value.shape[1] > max(len(result.layers), *result.layers):
        layers = result.layers
    value = value if layers is None else value[:, layers]
    if value.dim() == 4 and like.dim() == 5:
        value = value[:, :, None].expand(-1, -1, like.shape[2], -1, -1)
    if value.shape != like.shape:
        raise ValueError(
            f"the values of {name!r} are {list(value.shape)}, but the contributions {list(like.shape)}: pass "
            "[batch, layer, head, query, key] of the same texts, or without head or layer axis"
        )
    return value


def _array(value: Tensor, queries: int, keys: int) -> Array:
    """One example without padding as ``[layer, head, query, key]``."""
    value = value[..., :queries, :keys]
    return (value if value.dim() == 4 else value[:, None]).detach().double().cpu().numpy()


class Agreement:
    """Agreement of methods over examples.

    Args:
        first: The name of the method that the others are held against.
        layers: The layers of the layer axis.
        top: Keys that the overlap of the largest looks at.
    """

    def __init__(self, first: str, layers: Sequence[int], top: int = 3) -> None:
        self.first, self.layers, self.top = first, list(layers), top
        self.means: dict[str, dict[str, Mean]] = {}
        self.pairs: dict[tuple[str, str], Mean] = {}

    def add(self, values: Mapping[str, Array], causal: bool = False) -> None:
        """Add an example's values ``[layer, head, query, key]``, by method; of a causal model, rows are of
        the keys that their query can see.
        """
        first = values[self.first]
        for name, value in values.items():
            if name != self.first:
                self._add_rows(name, first, np.broadcast_to(value, first.shape), causal)
        self._add_pairs(values, causal)

    def _add_rows(self, name: str, first: Array, value: Array, causal: bool) -> None:
        parts = [
            row_agreement(first[..., rows, keys], value[..., rows, keys], self.top)
            for rows, keys in visible(first.shape[-2], causal)
        ]
        for measure in MEASURES:
            rows = np.concatenate([part[measure] for part in parts], axis=-1)
            mean = self.means.setdefault(name, {}).setdefault(measure, Mean.zero(*rows.shape[:2]))
            mean.add(rows)

    def _add_pairs(self, values: Mapping[str, Array], causal: bool) -> None:
        ranked = {name: in_sight(standard_ranks, value, causal) for name, value in values.items()}
        for name, other in combinations_with_replacement(ranked, 2):
            rows = (ranked[name] * ranked[other]).sum(-1)
            self.pairs.setdefault((name, other), Mean.zero()).add(rows.ravel())

    def table(self) -> pd.DataFrame:
        """A row for each method, layer and head."""
        rows = []
        for name, by_measure in self.means.items():
            for (index, head), count in np.ndenumerate(by_measure["pearson"].counts):
                row = {"method": name, "layer": self.layers[index], "head": head}
                row |= {measure: by_measure[measure].mean()[index, head] for measure in MEASURES}
                left_out = by_measure["pearson"].left_out[index, head]
                rows.append(row | {"rows": int(count), "rows_left_out": int(left_out)})
        return pd.DataFrame(rows)

    def summary(self) -> pd.DataFrame:
        """A row for each method: means over the rows of all layers and heads."""
        rows = []
        for name, by_measure in self.means.items():
            row = {"method": name}
            for measure in MEASURES:
                mean = by_measure[measure]
                count = mean.counts.sum()
                row[measure] = mean.sums.sum() / count if count else np.nan
            rows.append(row | {"rows": int(by_measure["pearson"].counts.sum())})
        return pd.DataFrame(rows)

    def matrix(self) -> pd.DataFrame:
        """Spearman's correlation of every method with every other, the mean over rows."""
        names = list(dict.fromkeys(name for name, _ in self.pairs))
        matrix = pd.DataFrame(np.nan, index=names, columns=names)
        for (name, other), mean in self.pairs.items():
            matrix.loc[name, other] = matrix.loc[other, name] = float(mean.mean())
        return matrix
