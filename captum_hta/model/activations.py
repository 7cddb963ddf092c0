"""One text in a model's forward pass: attention, values and hidden embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from captum_hta.model.attention import Attention, OutputProjection
from captum_hta.model.encoding import Batch
from captum_hta.model.protocol import Model
from captum_hta.model.sites import observed


@dataclass(frozen=True)
class Activations:
    """What a model computes for one text, in at least single precision. Properties are computed on first use.

    Attributes:
        model: The model.
        batch: The text, as a batch of one.
        label: The text's name in errors.
    """

    model: Model
    batch: Batch
    label: str = "the text"

    @cached_property
    def _attention(self) -> list[Attention]:
        return self.model.attention(self.batch)

    @cached_property
    def pattern(self) -> Tensor:
        """Attention patterns, ``[layer, head, query, key]``.

        Raises:
            ValueError: If one is infinite or NaN.
        """
        return self.finite("attention", promoted(torch.cat([one.pattern for one in self._attention])))

    @cached_property
    def value(self) -> Tensor:
        """Values, ``[layer, head, key, d_head]``.

        Raises:
            ValueError: If the model does not show the values of its attention, or one is infinite or NaN.
        """
        values = [one.value for one in self._attention if one.value is not None]
        if len(values) < len(self._attention):
            raise ValueError(
                f"{self.model.name} ({self.model.architecture}) does not show the values that its attention "
                "weighs, so this method cannot be computed for it"
            )
        return self.finite("values", promoted(torch.cat(values)))

    @cached_property
    def projections(self) -> list[OutputProjection]:
        """The output projection of every layer."""
        return [self.model.output_projection(layer) for layer in range(self.model.num_layers)]

    @cached_property
    def projected(self) -> Tensor:
        """Values after the output projection without its bias, ``f(x)`` in Kobayashi et al. 2020:
        ``[layer, head, key, width]``.
        """
        weights = torch.stack([promoted(one.weight) for one in self.projections])
        return self.value @ weights

    @cached_property
    def hidden(self) -> Tensor:
        """Hidden embeddings that enter each block, ``[layer, token, width]``.

        Raises:
            ValueError: If one is infinite or NaN.
        """
        sites = {str(layer): self.model.source(layer) for layer in range(self.model.num_layers)}
        found = observed(sites, self.run)
        hidden = torch.cat([found[str(layer)] for layer in range(self.model.num_layers)])
        return self.finite("hidden embeddings", promoted(hidden))

    def finite(self, what: str, value: Tensor) -> Tensor:
        """Return a value after checking that it is finite.

        Raises:
            ValueError: If it holds an infinite number or NaN; the error names the text.
        """
        if not value.isfinite().all():
            raise ValueError(
                f"{self.label}: {what} of {self.model.name} are not finite; check its weights, or load it in "
                "float32"
            )
        return value

    def run(self) -> object:
        """Run the model."""
        return self.model.forward(*self.batch.inputs, *self.batch.extra)

    def repeated(self, count: int) -> tuple[Tensor | None, ...]:
        """The arguments of ``forward`` for ``count`` copies of the text."""
        return tuple(
            value.expand(count, *value.shape[1:]) if isinstance(value, Tensor) else value
            for value in (*self.batch.inputs, *self.batch.extra)
        )


def promoted(value: Tensor) -> Tensor:
    """A tensor in at least single precision, outside any autograd graph and inference mode."""
    value = value.clone() if value.is_inference() else value.detach()
    return value.to(torch.promote_types(value.dtype, torch.float32))
