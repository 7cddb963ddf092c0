r"""Which method tells what a head does when a source token changes.

Each source token is changed on its own, and :math:`\| y_j' - y_j \|` measured for every head and query. A
method is as faithful as its row of the same query puts the tokens in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from captum_hta.baselines.base import Example
from captum_hta.computation import layers_of
from captum_hta.evaluation.comparison import Method, attributed
from captum_hta.evaluation.interventions import (
    Intervention,
    MaskToken,
    Mean,
    Noise,
    OtherToken,
    Zero,
    responses,
)
from captum_hta.model.encoding import Encoding, Text
from captum_hta.model.protocol import Model
from captum_hta.statistics.correlations import standard_ranks, visible
from captum_hta.texts import encoded, listed

Array = NDArray[np.float64]
SMALL, LARGE = 0.01, 1.0
"""Sizes of noise by default."""
RESAMPLES = 1000


@dataclass
class Faithfulness:
    """Rank correlations of methods with what heads do, by intervention.

    Attributes:
        layers: The layers of the layer axis.
        values: For each intervention and method one array ``[layer, head]`` an example: the mean over queries
            of Spearman's correlation; a method without heads or layers is held against each.
        rows: The number of query rows of each.
    """

    layers: list[int]
    values: dict[tuple[str, str], list[Array]] = field(default_factory=dict)
    rows: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(
        self, intervention: str, measured: Array, methods: dict[str, Array], causal: bool = False
    ) -> None:
        """Add an example.

        Args:
            intervention: Its name.
            measured: How far heads moved, ``[layer, head, query, key]``; NaN for keys that were not changed.
            methods: Values of the same axes, some of which may be 1 long.
            causal: Whether queries see no later keys.
        """
        changed = np.flatnonzero(~np.isnan(measured).all((0, 1, 2)))
        for name, correlation in _rank_correlations(measured, methods, changed, causal).items():
            defined = ~np.isnan(correlation)
            key = (intervention, name)
            self.rows[key] = self.rows.get(key, 0) + int(defined.sum())
            self.values.setdefault(key, []).append(_mean(correlation, -1))

    def table(self) -> pd.DataFrame:
        """A row for each intervention, method, layer and head: the mean over examples of the rank
        correlation, with a 95% confidence interval by the bootstrap over examples.
        """
        rows = []
        for (intervention, method), values in self.values.items():
            by_example = np.stack(values)
            mean, low, high = _interval(by_example)
            for (index, head), value in np.ndenumerate(mean):
                rows.append(
                    {
                        "intervention": intervention, "method": method, "layer": self.layers[index],
                        "head": head, "spearman": value, "low": low[index, head], "high": high[index, head],
                        "examples": int(np.isfinite(by_example[:, index, head]).sum()),
                    }
                )  # fmt: skip
        return pd.DataFrame(rows)

    def by_layer(self) -> pd.DataFrame:
        """The same for each intervention, method and layer, over all heads."""
        return self._over(lambda values: _mean(values, 2), self.layers)

    def summary(self) -> pd.DataFrame:
        """The same for each intervention and method, over all layers and heads."""
        return self._over(lambda values: _mean(values, (1, 2))[:, None], [None])

    def _over(self, mean_over: Callable[[Array], Array], layers: Sequence[int | None]) -> pd.DataFrame:
        rows = []
        for (intervention, method), values in self.values.items():
            mean, low, high = _interval(mean_over(np.stack(values)))
            for index, layer in enumerate(layers):
                row = {"intervention": intervention, "method": method}
                row |= {} if layer is None else {"layer": layer}
                row |= {"spearman": mean[index], "low": low[index], "high": high[index]}
                rows.append(row | {"examples": len(values), "rows": self.rows[intervention, method]})
        return pd.DataFrame(rows)


def _rank_correlations(
    measured: Array, methods: dict[str, Array], changed: NDArray[np.int64], causal: bool
) -> dict[str, Array]:
    """Spearman's correlation of each method's rows, ``[layer, head, query]``, over changed keys that a query
    can see.
    """
    parts: dict[str, list[Array]] = {name: [] for name in methods}
    for rows, keys in visible(measured.shape[-2], causal):
        among = changed[changed < keys.stop] if causal else changed
        truth = standard_ranks(measured[..., rows, :][..., among])
        for name, value in methods.items():
            parts[name].append((truth * standard_ranks(value[..., rows, :][..., among])).sum(-1))
    return {name: np.concatenate(each, axis=-1) for name, each in parts.items()}


def _interval(values: Array) -> tuple[Array, Array, Array]:
    """Mean over the examples ``[example, ...]`` that have a number, and the limits of its 95% interval by the
    percentile bootstrap (Efron and Tibshirani 1993, chapter 13); NaN of a single example.
    """
    flat = values.reshape(len(values), -1)
    defined = ~np.isnan(flat)
    filled = np.where(defined, flat, 0)
    weights = np.random.default_rng(0).multinomial(len(flat), np.full(len(flat), 1 / len(flat)), RESAMPLES)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = filled.sum(0) / defined.sum(0)
        resampled = (weights @ filled) / (weights @ defined)
    limits = np.full((2, flat.shape[1]), np.nan)
    several = defined.sum(0) > 1
    limits[:, several] = np.nanquantile(resampled[:, several], [0.025, 0.975], axis=0)
    low, high = limits
    return tuple(part.reshape(values.shape[1:]) for part in (mean, low, high))


def _mean(values: Array, axis: int | tuple[int, ...]) -> Array:
    """Over what is defined; NaN where nothing is."""
    defined = ~np.isnan(values)
    counts = defined.sum(axis)
    sums = np.where(defined, values, 0).sum(axis)
    return np.divide(sums, counts, out=np.full(counts.shape, np.nan), where=counts > 0)


def default_interventions(model: Model, encodings: Sequence[Encoding]) -> list[Intervention]:
    """Noise, little and much; the mean vector and zero; the mask token, where there is one; another word.

    Args:
        model: The model.
        encodings: The corpus, from which other words are drawn.
    """
    words = tuple(
        token
        for encoding in encodings
        for token, word in zip(encoding.ids, encoding.words or [0] * len(encoding.ids), strict=True)
        if word is not None
    )
    found: list[Intervention] = [Noise(SMALL), Noise(LARGE), Mean(), Zero()]
    if model.mask_token is not None:
        found.append(MaskToken(model.mask_token))
    return [*found, OtherToken(words)] if words else found


def faithfulness(
    model: Model,
    texts: Sequence[Text],
    methods: Sequence[Method],
    interventions: Sequence[Intervention] | None = None,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    advance: Callable[[int], object] = lambda done: None,
) -> Faithfulness:
    r"""Change each source token, see how far every head moves, and ask which methods told so.

    Source tokens are changed at the embedding that enters the first block (or by their ids). For small noise
    of variance :math:`s^2`, :math:`E \| y_j' - y_j \|^2 = s^2 \| J_{ji} \|_F^2`, which is what input
    contributions are made of; for large changes nothing of the kind holds.

    Args:
        model: An adapter around a model.
        texts: Texts, or pairs of texts.
        methods: What has a ``name`` and ``attribute(texts)``: baselines, or
            :class:`captum_hta.evaluation.comparison.HtaMethod`.
        interventions: The changes. Default: ``None``, those of :func:`default_interventions`.
        layers: Layers of the heads. Default: ``None``, all.
        seed: Of what is drawn at random.
        advance: Called with the number of texts done.

    Returns:
        Rank correlations, with tables of them.

    Raises:
        ValueError: If there is no text, one cannot be read, a method does not fit the model, or a layer is
            none.

    Example:
        >>> from captum_hta.baselines import AttentionWeights
        >>> from captum_hta.comparison import HtaMethod
        >>> from captum_hta import load_model
        >>> model = load_model()
        >>> methods = [HtaMethod(model, "input", n_probes=16), AttentionWeights(model)]
        >>> found = faithfulness(model, ["The cat sat.", "Dogs bark."], methods, [Noise(0.01)])
        >>> found.summary().set_index("method")["spearman"].idxmax()
        'HTA, input'
    """
    if model.key_layers is not None:
        raise ValueError("faithfulness is measured for self-attention, not for cross attention")
    texts, layers = listed(model, texts), layers_of(model, layers)
    encodings = [encoded(model, text, number) for number, text in enumerate(texts)]
    if interventions is None:
        interventions = default_interventions(model, encodings)
    found = Faithfulness(layers)
    for rows, values in attributed(methods, model, texts, layers):
        for index, row in enumerate(rows):
            example = Example(model, model.batch([encodings[row]]))
            by_method = {name: arrays[index] for name, arrays in values.items()}
            generator = torch.Generator().manual_seed(seed + row)
            for one in interventions:
                measured = responses(example, encodings[row], one, 0, layers, generator)
                found.add(one.name, measured.cpu().numpy(), by_method, model.size.causal)
        advance(len(rows))
    return found
