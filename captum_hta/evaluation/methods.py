"""The methods that are compared: contributions, and the baselines that a model allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from captum_hta import baselines
from captum_hta.batching import groups
from captum_hta.computation import contributions
from captum_hta.model.encoding import Text
from captum_hta.model.protocol import Model
from captum_hta.texts import encoded, listed

Array = NDArray[np.float64]
HTA = {"input": "HTA, input", "previous_layer": "HTA, previous layer"}
"""What tables call contributions, by their source."""


class Method(Protocol):
    """Anything that attributes texts, with the axes of contributions or without the layer or head axis."""

    @property
    def name(self) -> str:
        """The method's name in tables."""

    def attribute(self, texts: Sequence[Text]) -> Tensor:
        """``[batch, layer, head, query, key]``, padded with NaN."""


@dataclass(frozen=True)
class HtaMethod:
    """Contributions to heads, as one method among others.

    Attributes:
        model: The model.
        source: As in :func:`captum_hta.contributions`.
        n_probes: Probes of each source token; ``None`` for exact contributions.
        seed: Seed of the probes.
    """

    model: Model
    source: str = "input"
    n_probes: int | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        """The method's name in tables."""
        return HTA[self.source]

    def attribute(self, texts: Sequence[Text]) -> Tensor:
        """``[batch, layer, head, query, key]``, padded with NaN."""
        found = contributions(
            self.model, list(texts), source=self.source, n_probes=self.n_probes, seed=self.seed
        )
        return found.values


ATTENTION_BASED: tuple[Callable[[Model], Method], ...] = (
    baselines.AttentionWeights,
    baselines.EffectiveAttention,
    baselines.ValueWeightedNorm,
    baselines.BlockNorm,
    baselines.Alti,
    baselines.AttentionRollout,
    baselines.ValueZeroing,
)
"""Baselines that explain heads or layers, in the order of tables; attention flow is too slow to be here."""
LOGIT_BASED: tuple[Callable[[Model], Method], ...] = (
    baselines.GradientTimesAttention,
    baselines.EmbeddingSaliency,
    partial(baselines.JacobianScope, scope="semantic"),
    partial(baselines.JacobianScope, scope="temperature"),
)
"""Baselines that explain a logit or the final hidden state."""


def methods_for(
    model: Model, example: Text, n_probes: int | None, seed: int = 0, with_logits: bool = True
) -> tuple[list[Method], dict[str, str]]:
    """Contributions and the baselines that a model allows, and why it does not allow the others.

    Args:
        model: The model.
        example: A text to try each baseline on.
        n_probes: Probes for the input contribution; ``None`` for exact contributions.
        seed: Seed of the probes.
        with_logits: Whether to include :data:`LOGIT_BASED`.

    Returns:
        The methods, the input contribution first; and for each refused baseline, by its name, the reason.
    """
    allowed: list[Method] = [
        HtaMethod(model, "input", n_probes, seed),
        HtaMethod(model, "previous_layer", None, seed),
    ]
    refused = {}
    for make in (*ATTENTION_BASED, *(LOGIT_BASED if with_logits else ())):
        method = make(model)
        try:
            method.attribute([example])
        except ValueError as error:
            refused[method.name] = str(error)
        else:
            allowed.append(method)
    return allowed, refused


def attributed(
    methods: Sequence[Method], model: Model, texts: Sequence[Text], layers: Sequence[int]
) -> Iterator[tuple[list[int], dict[str, list[Array]]]]:
    """Attribute a corpus by several methods, a few texts at a time.

    Args:
        methods: The methods, with distinct names.
        model: Their model.
        texts: The corpus.
        layers: The layers to keep.

    Yields:
        The numbers of some texts, and for each method one array ``[layer, head, query, key]`` a text, with an
        axis of length 1 where the method has none.

    Raises:
        ValueError: If two methods share a name, there is no text, or one cannot be read.
    """
    texts = listed(model, texts)
    names = [method.name for method in methods]
    if len(set(names)) < len(names):
        raise ValueError(f"each method needs a name of its own, got {', '.join(names)}")
    lengths = [len(encoded(model, text, number)) for number, text in enumerate(texts)]
    for rows in groups(lengths):
        found = {}
        for method in methods:
            values = _with_all_axes(method.attribute([texts[row] for row in rows]), layers)
            found[method.name] = [
                unpadded(value, lengths[row], lengths[row]) for value, row in zip(values, rows, strict=True)
            ]
        yield rows, found


def _with_all_axes(values: Tensor, layers: Sequence[int]) -> Tensor:
    """``[batch, layer, head, query, key]`` for these layers; axes that a method lacks have length 1."""
    if values.dim() == 3:
        return values[:, None, None]
    return values[:, list(layers)] if values.dim() == 5 else values[:, list(layers), None]


def unpadded(value: Tensor, queries: int, keys: int) -> Array:
    """Values of one text without padding, ``[layer, head, query, key]``."""
    value = value[..., :queries, :keys]
    array: Array = (value if value.dim() == 4 else value[:, None]).detach().double().cpu().numpy()
    return array
