r"""Which methods rank source tokens as heads respond when these tokens are changed.

Each source token is changed on its own, and :math:`\| y_j' - y_j \|` is measured for every head and query. A
method is as faithful as its rows agree with these responses, by Spearman's correlation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from captum_hta.evaluation.interventions import (
    Intervention,
    MaskToken,
    MeanVector,
    Noise,
    OtherToken,
    ZeroVector,
    responses,
)
from captum_hta.evaluation.methods import Array, Method, attributed
from captum_hta.jacobian.endpoints import layers_of
from captum_hta.model.activations import Activations
from captum_hta.model.encoding import Encoding, Text
from captum_hta.model.protocol import Model
from captum_hta.statistics.correlations import attended, in_sight, reached, standard_ranks
from captum_hta.texts import encoded, listed

SMALL, LARGE = 0.01, 1.0
"""Default sizes of noise."""
RESAMPLES = 1000


@dataclass
class Faithfulness:
    """Rank correlations of methods with the responses of heads, by intervention.

    Attributes:
        layers: The layers of the layer axis.
        values: For each intervention and method one array ``[layer, head]`` a text: Spearman's correlation,
            as a mean over queries. A method without heads or layers is compared with every head or layer.
        rows: For each intervention and method the number of query rows.
    """

    layers: list[int]
    values: dict[tuple[str, str], list[Array]] = field(default_factory=dict)
    rows: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(
        self,
        intervention: str,
        measured: Array,
        methods: Mapping[str, Array],
        reached: NDArray[np.bool_] | None = None,
    ) -> None:
        """Add one text.

        Args:
            intervention: The intervention's name.
            measured: The responses, ``[layer, head, query, key]``; NaN for keys that were not changed.
            methods: The values of each method, with the same axes or axes of length 1.
            reached: The keys that reach a query through the layers, ``[layer, query, key]``; others do not
                count. Default: ``None``, all reach it.
        """
        counted = np.broadcast_to(~np.isnan(measured).all((0, 1, 2)), (len(measured), *measured.shape[2:]))
        counted = counted if reached is None else counted & reached
        truth = in_sight(standard_ranks, measured, counted)
        for name, value in methods.items():
            correlation = (truth * in_sight(standard_ranks, value, counted)).sum(-1)
            key = (intervention, name)
            self.rows[key] = self.rows.get(key, 0) + int((~np.isnan(correlation)).sum())
            self.values.setdefault(key, []).append(_mean(correlation, -1))

    def table(self) -> pd.DataFrame:
        """One row for each intervention, method, layer and head: the rank correlation as a mean over texts,
        with a 95% confidence interval by the bootstrap over texts.
        """
        return pd.DataFrame(list(self._rows()))

    def _rows(self) -> Iterator[dict[str, object]]:
        for (intervention, method), values in self.values.items():
            by_text = np.stack(values)
            mean, low, high = _interval(by_text)
            examples = np.isfinite(by_text).sum(0)
            for at in np.ndindex(mean.shape):
                yield {
                    "intervention": intervention, "method": method, "layer": self.layers[at[0]],
                    "head": at[1], "spearman": mean[at], "low": low[at], "high": high[at],
                    "examples": int(examples[at]),
                }  # fmt: skip

    def by_layer(self) -> pd.DataFrame:
        """As :meth:`table`, but over all heads: one row for each intervention, method and layer."""
        return self._over(lambda values: _mean(values, 2), self.layers)

    def summary(self) -> pd.DataFrame:
        """As :meth:`table`, but over all layers and heads: one row for each intervention and method."""
        return self._over(lambda values: _mean(values, (1, 2))[:, None], [None])

    def _over(self, mean_over: Callable[[Array], Array], layers: Sequence[int | None]) -> pd.DataFrame:
        rows = []
        for (intervention, method), values in self.values.items():
            mean, low, high = _interval(mean_over(np.stack(values)))
            for index, layer in enumerate(layers):
                row: dict[str, object] = {"intervention": intervention, "method": method}
                row |= {} if layer is None else {"layer": layer}
                row |= {"spearman": mean[index], "low": low[index], "high": high[index]}
                rows.append(row | {"examples": len(values), "rows": self.rows[intervention, method]})
        return pd.DataFrame(rows)


def _interval(values: Array) -> tuple[Array, Array, Array]:
    """The mean over those texts ``[text, ...]`` that have a number, and the limits of its 95% interval by the
    percentile bootstrap (Efron and Tibshirani 1993, chapter 13); NaN limits for a single text.
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
    mean, low, high = (one.reshape(values.shape[1:]) for one in (mean, *limits))
    return mean, low, high


def _mean(values: Array, axis: int | tuple[int, ...]) -> Array:
    """The mean over defined values; NaN where there is none."""
    defined = ~np.isnan(values)
    counts = defined.sum(axis)
    sums = np.where(defined, values, 0).sum(axis)
    mean: Array = np.divide(sums, counts, out=np.full(counts.shape, np.nan), where=counts > 0)
    return mean


def default_interventions(model: Model, encodings: Sequence[Encoding]) -> list[Intervention]:
    """Small and large noise (without what is lost in the rounding of the model), the mean vector, zero, the
    mask token (if there is one) and other words.

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
    noise = [one for one in (Noise(SMALL), Noise(LARGE)) if one.resolved_in(model.dtype)]
    found: list[Intervention] = [*noise, MeanVector(), ZeroVector()]
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
    r"""Change each source token, measure how far every head moves, and rank methods by their agreement with
    that.

    Source tokens are changed at the embedding that enters the first block, or by their ids. For small noise
    of variance :math:`s^2`, :math:`E \| y_j' - y_j \|^2 = s^2 \| J_{ji} \|_F^2`, which input contributions
    are made of; no such identity holds for large changes.

    Args:
        model: An adapter around a model.
        texts: Texts, or pairs of texts.
        methods: Objects with a ``name`` and ``attribute(texts)``: baselines, or
            :class:`captum_hta.evaluation.HtaMethod` for contributions.
        interventions: The changes. Default: ``None``, those of :func:`default_interventions`.
        layers: Layers of the heads. Default: ``None``, all.
        seed: Seed of random changes.
        advance: Called with the number of texts done.

    Returns:
        Rank correlations, with tables by head, by layer and over all.

    Raises:
        ValueError: If there is no text, one cannot be read, a method does not fit the model, or there is no
            such layer.

    Example:
        >>> from captum_hta import load_model
        >>> from captum_hta.baselines import AttentionWeights
        >>> from captum_hta.evaluation import HtaMethod
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
            activations = Activations(model, model.batch([encodings[row]]), f"text {row}")
            reach = reached(attended(activations.pattern.double().cpu().numpy()))[layers]
            by_method = {name: arrays[index] for name, arrays in values.items()}
            generator = torch.Generator().manual_seed(seed + row)
            for one in interventions:
                measured = responses(activations, encodings[row], one, layers, generator)
                found.add(one.name, measured.cpu().numpy(), by_method, reach)
        advance(len(rows))
    return found
