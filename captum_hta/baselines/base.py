"""The base class of all baselines: texts in, values with the axes of contributions out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from captum_hta.model.activations import Activations
from captum_hta.model.encoding import Encoding, Text
from captum_hta.model.precision import full_precision
from captum_hta.model.protocol import Model
from captum_hta.texts import encoded, listed


class Baseline(ABC):
    """A method that people use in place of contributions, as an attribution object.

    A subclass sets :attr:`name` and implements :meth:`values`.

    Args:
        model: An adapter around a model, as :func:`captum_hta.load_model` returns.
    """

    name: str
    """The method's name in tables."""
    axes: str = "batch layer head query key"
    """The axes of the result."""
    supports_cross_attention: ClassVar[bool] = False
    """Whether the method is defined for cross attention."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model.name})"

    def attribute(self, texts: Sequence[Text] | Text) -> Tensor:
        """Attribute texts.

        Args:
            texts: Texts, or pairs of texts.

        Returns:
            Values with the axes in :attr:`axes`, padded with NaN. A text's values do not depend on the other
            texts.

        Raises:
            ValueError: If a text cannot be read, its activations are not finite, or the model lacks what the
                method needs.
        """
        if self.model.key_layers is not None and not self.supports_cross_attention:
            raise ValueError(f"{self.name} is not defined for cross attention")
        encodings = [encoded(self.model, text, row) for row, text in enumerate(listed(self.model, texts))]
        with torch.inference_mode(False), full_precision(), self.model.device:
            return padded([self._checked_values(row, encoding) for row, encoding in enumerate(encodings)])

    def _checked_values(self, row: int, encoding: Encoding) -> Tensor:
        activations = Activations(self.model, self.model.batch([encoding]), f"text {row}")
        _ = activations.pattern  # raises while a dropout is active
        self.check(activations)
        values = self.values(activations)
        activations.finite(f"values of {self.name!r}", self.defined(values))
        return values

    def check(self, activations: Activations) -> None:
        """Raise a ``ValueError`` if the method gives no right values for a text; here it always does."""
        return

    def defined(self, values: Tensor) -> Tensor:
        """The values of one text that must be finite; by default all."""
        return values

    @abstractmethod
    def values(self, activations: Activations) -> Tensor:
        """Values for one text, with all of :attr:`axes` except the first."""


def padded(values: Sequence[Tensor]) -> Tensor:
    """Stack ``[..., query, key]`` of several texts into ``[batch, ..., query, key]``, padded with NaN."""
    shape = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    out = values[0].new_full((len(values), *shape), torch.nan)
    for row, value in zip(out, values, strict=True):
        row[..., : value.shape[-2], : value.shape[-1]] = value
    return out
