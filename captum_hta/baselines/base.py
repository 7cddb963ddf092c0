"""What all baselines share: a text as a model reads it, and results with the axes of contributions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from captum_hta.model.attention import Attention, OutputProjection
from captum_hta.model.encoding import Batch, Text
from captum_hta.model.protocol import Model
from captum_hta.model.sites import observed, without_autocast
from captum_hta.texts import encoded, listed


class Baseline(ABC):
    """A method that people use in the place of contributions, as an attribution object.

    Args:
        model: An adapter around a model, such as
            :func:`captum_hta.load_model` gives.
    """

    name: ClassVar[str]
    """What tables call it."""
    axes: ClassVar[str] = "batch layer head query key"
    """The axes of the result."""
    crosses: ClassVar[bool] = False
    """Whether it is defined for cross attention."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model.name})"

    def attribute(self, texts: Sequence[Text] | Text) -> Tensor:
        """Attribute texts.

        Args:
            texts: Texts, or pairs of texts.

        Returns:
            Values with the axes of the method (see its class), padded with NaN; of a text alone they are the
            same.

        Raises:
            ValueError: If a text cannot be read, or the model does not show what the method needs.
        """
        if self.model.key_layers is not None and not self.crosses:
            raise ValueError(f"{self.name} is not defined for cross attention")
        with torch.inference_mode(False), without_autocast():
            return self._of_all(texts)

    def _of_all(self, texts: Sequence[Text] | Text) -> Tensor:
        encodings = [encoded(self.model, text, row) for row, text in enumerate(listed(self.model, texts))]
        return padded([self.of(Example(self.model, self.model.batch([one]))) for one in encodings])

    @abstractmethod
    def of(self, example: Example) -> Tensor:
        """The values of one text, without the batch axis."""


def padded(values: Sequence[Tensor]) -> Tensor:
    """Tensors ``[..., query, key]`` of several texts as ``[batch, ..., query, key]``, padded with NaN."""
    shape = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    out = values[0].new_full((len(values), *shape), torch.nan)
    for row, value in zip(out, values, strict=True):
        row[..., : value.shape[-2], : value.shape[-1]] = value
    return out


@dataclass(frozen=True)
class Example:
    """One text as a model reads it, and what the model does with it.

    Attributes:
        model: The model.
        batch: The text, alone.
    """

    model: Model
    batch: Batch

    @cached_property
    def _attention(self) -> list[Attention]:
        return self.model.attention(self.batch)

    @cached_property
    def pattern(self) -> Tensor:
        """``[layer, head, query, key]``."""
        return wide(torch.cat([one.pattern for one in self._attention]))

    @cached_property
    def value(self) -> Tensor:
        """``[layer, head, key, d_head]``.

        Raises:
            ValueError: If the model does not show the values of its attention.
        """
        values = [one.value for one in self._attention]
        if any(value is None for value in values):
            raise ValueError(
                f"{self.model.name} ({self.model.architecture}) does not show the values that its attention "
                "weighs, so this method cannot be computed for it"
            )
        return wide(torch.cat(values))

    @cached_property
    def projections(self) -> list[OutputProjection]:
        """What becomes of the heads' outputs, of every layer."""
        return [self.model.output_projection(layer) for layer in range(self.model.num_layers)]

    @cached_property
    def projected(self) -> Tensor:
        """Values through the output projection, ``f(x)`` of Kobayashi et al. 2020 but for its constant bias:
        ``[layer, head, key, width]``.
        """
        weights = torch.stack([wide(one.weight) for one in self.projections])
        return self.value @ weights

    @cached_property
    def hidden(self) -> Tensor:
        """What enters each block, ``[layer, token, width]``."""
        sites = {str(layer): self.model.source(layer) for layer in range(self.model.num_layers)}
        found = observed(sites, self.run)
        return wide(torch.cat([found[str(layer)] for layer in range(self.model.num_layers)]))

    def run(self) -> Any:
        """The model's forward pass."""
        return self.model.forward(*self.batch.inputs, *self.batch.extra)

    def repeated(self, count: int) -> tuple[Any, ...]:
        """The arguments of the forward pass for that many copies of the text."""
        return tuple(
            value.expand(count, *value.shape[1:]) if isinstance(value, Tensor) else value
            for value in (*self.batch.inputs, *self.batch.extra)
        )


def wide(value: Tensor) -> Tensor:
    """A tensor in at least single precision, apart from any graph and any mode."""
    value = value.clone() if value.is_inference() else value.detach()
    return value.to(torch.promote_types(value.dtype, torch.float32))
