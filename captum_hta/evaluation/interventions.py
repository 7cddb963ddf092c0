"""Changes to single source tokens, and how far they move the output of every head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Generator, Tensor

from captum_hta.model.activations import Activations, promoted
from captum_hta.model.encoding import Encoding
from captum_hta.model.sites import observed, replaced

MAX_DRAWS = 20
"""Draws after which a token keeps its place, in a corpus with hardly any other token."""
MIN_NOISE = 8
"""Smallest size of noise, in units of the rounding of a model's dtype."""
COPIES = 32
"""Copies of a text in one forward pass."""


@dataclass(frozen=True)
class Change:
    """New source vectors, or new token ids, for some tokens of a text; each token is changed on its own.

    Attributes:
        keys: The changed tokens, ``[copy]``.
        new: New source vectors, ``[copy, width]``, or new token ids, ``[copy]``.
        of_ids: Whether ``new`` holds token ids.
    """

    keys: Tensor
    new: Tensor
    of_ids: bool = False

    def chunks(self) -> Iterator[Change]:
        """The change in pieces of at most :data:`COPIES` tokens."""
        for start in range(0, len(self.keys), COPIES):
            some = slice(start, start + COPIES)
            yield Change(self.keys[some], self.new[some], self.of_ids)


class Intervention(ABC):
    """A way to change one source token."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The intervention's name in tables."""

    def resolved_in(self, dtype: torch.dtype) -> bool:
        """Whether responses to the change are larger than the rounding of a model of this dtype."""
        return True

    @abstractmethod
    def changes(self, encoding: Encoding, x: Tensor, generator: Generator) -> Iterator[Change]:
        """Samples of the change, each for all tokens that it applies to.

        Args:
            encoding: The text.
            x: Its source vectors ``[key, width]``.
            generator: Source of random numbers.
        """


@dataclass(frozen=True)
class Noise(Intervention):
    """Isotropic Gaussian noise added to a source vector.

    Attributes:
        size: The standard deviation, in units of the root mean square over all components of the text's
            source vectors; the same for every token.
        samples: Number of samples.

    Raises:
        ValueError: If the size is not positive and finite, or there are no samples.
    """

    size: float
    samples: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.size < float("inf") or self.samples < 1:
            raise ValueError(f"noise needs a positive, finite size and at least one sample, got {self}")

    @property
    def name(self) -> str:
        """The intervention's name in tables."""
        return f"noise {self.size:g}"

    def resolved_in(self, dtype: torch.dtype) -> bool:
        """Whether the size is several times the rounding of a model of this dtype."""
        return self.size >= MIN_NOISE * torch.finfo(dtype).eps

    def changes(self, encoding: Encoding, x: Tensor, generator: Generator) -> Iterator[Change]:
        """Samples for all tokens."""
        deviation = self.size * x.square().mean().sqrt()
        for _ in range(self.samples):
            noise = torch.randn(x.shape, generator=generator, device="cpu").to(x)
            yield Change(torch.arange(len(x), device="cpu"), x + deviation * noise)


@dataclass(frozen=True)
class MeanVector(Intervention):
    """A source vector replaced by the mean of the text's source vectors."""

    name: ClassVar[str] = "mean vector"

    def changes(self, encoding: Encoding, x: Tensor, generator: Generator) -> Iterator[Change]:
        """One change of all tokens."""
        yield Change(torch.arange(len(x), device="cpu"), x.mean(0).expand_as(x))


@dataclass(frozen=True)
class ZeroVector(Intervention):
    """A source vector replaced by zero."""

    name: ClassVar[str] = "zero vector"

    def changes(self, encoding: Encoding, x: Tensor, generator: Generator) -> Iterator[Change]:
        """One change of all tokens."""
        yield Change(torch.arange(len(x), device="cpu"), torch.zeros_like(x))


@dataclass(frozen=True)
class MaskToken(Intervention):
    """A token replaced by the mask token; special tokens are not changed.

    Attributes:
        token: The id of the mask token.
    """

    token: int
    name: ClassVar[str] = "mask token"

    def changes(self, encoding: Encoding, x: Tensor, generator: Generator) -> Iterator[Change]:
        """One change of all tokens that belong to words."""
        keys = _keys_of_words(encoding)
        yield Change(keys, torch.full_like(keys, self.token), of_ids=True)


@dataclass(frozen=True)
class OtherToken(Intervention):
    """A token replaced by another one that is drawn from a corpus; special tokens are not changed.

    Attributes:
        corpus: Token ids to draw from, repeated as often as they occur.
        samples: Number of samples.

    Raises:
        ValueError: If there is no token to draw from, or there are no samples.
    """

    corpus: tuple[int, ...]
    samples: int = 1
    name: ClassVar[str] = "other word"

    def __post_init__(self) -> None:
        if not self.corpus or self.samples < 1:
            raise ValueError("another word needs a corpus of tokens and at least one sample")

    def changes(self, encoding: Encoding, x: Tensor, generator: Generator) -> Iterator[Change]:
        """Samples for all tokens that belong to words."""
        keys = _keys_of_words(encoding)
        for _ in range(self.samples):
            yield Change(
                keys, self._drawn(torch.tensor(encoding.ids, device="cpu")[keys], generator), of_ids=True
            )

    def _drawn(self, present: Tensor, generator: Generator) -> Tensor:
        """A token of the corpus for each present one, and other than it."""
        corpus, drawn = torch.tensor(self.corpus, device="cpu"), present.clone()
        for _ in range(MAX_DRAWS):
            places = torch.randint(len(corpus), (len(present),), generator=generator, device="cpu")
            drawn = torch.where(drawn == present, corpus[places], drawn)
        return drawn


def _keys_of_words(encoding: Encoding) -> Tensor:
    """The tokens that belong to words; all tokens, where the words are not known."""
    words = encoding.words or range(len(encoding))
    return torch.tensor(
        [key for key, word in enumerate(words) if word is not None], dtype=torch.long, device="cpu"
    )


# --- responses of heads ----------------------------------------------------------------------------


def responses(
    activations: Activations,
    encoding: Encoding,
    intervention: Intervention,
    layers: Sequence[int],
    generator: Generator,
) -> Tensor:
    r"""How far the output of each head moves when a source token that enters the first block is changed.

    Args:
        activations: The text.
        encoding: The same text.
        intervention: The change.
        layers: Layers of the heads.
        generator: Source of random numbers.

    Returns:
        The root mean square of :math:`\| y_j' - y_j \|` over samples, ``[layer, head, query, key]`` in
        float64; NaN for keys that are not changed.

    Raises:
        ValueError: If responses are infinite, NaN or lost in rounding, or the model reads no token ids that
            could be changed.
    """
    model = activations.model
    if not intervention.resolved_in(model.dtype):
        raise ValueError(
            f"responses to {intervention.name!r} are lost in the rounding of {model.dtype}: "
            f"load {model.name} in float32, or make larger changes"
        )
    x = activations.hidden[0]
    # From as many copies as are changed at once: outputs that do not move are then equal on any processor.
    unchanged = cache(lambda copies: _head_outputs(activations, layers, copies))
    squares = x.new_zeros(len(layers), model.num_heads, len(x), len(x), dtype=torch.float64)
    counts = squares.new_zeros(len(x))
    for change in intervention.changes(encoding, x, generator):
        counts[change.keys] += 1
        for chunk in change.chunks():
            moved = _changed_outputs(activations, chunk, layers) - unchanged(len(chunk.keys))
            squares[..., chunk.keys] += moved.double().square().sum(-1).permute(1, 2, 3, 0)
    activations.finite(f"responses to {intervention.name!r}", squares)
    return (squares / counts).sqrt()  # 0 / 0 is NaN where nothing was changed


def _changed_outputs(activations: Activations, change: Change, layers: Sequence[int]) -> Tensor:
    """Head outputs for copies with one token changed in each, ``[copy, layer, head, query, d_head]``."""
    copies = torch.arange(len(change.keys), device="cpu")
    if change.of_ids:
        if activations.batch.inputs[0].is_floating_point():
            raise ValueError(
                f"{activations.model.name} reads no token ids that could be changed: use interventions on "
                "vectors, such as Noise or ZeroVector"
            )
        ids = activations.batch.inputs[0].repeat(len(copies), 1)
        ids[copies, change.keys] = change.new.to(ids)
        return _head_outputs(activations, layers, len(copies), ids)

    def replace(x: Tensor) -> Tensor:
        x = x.clone()
        x[copies, change.keys] = change.new.to(x)
        return x

    with replaced(activations.model.source(activations.model.first_entry), replace):
        return _head_outputs(activations, layers, len(copies))


def _head_outputs(
    activations: Activations, layers: Sequence[int], copies: int, ids: Tensor | None = None
) -> Tensor:
    """Head outputs, ``[copy, layer, head, query, d_head]``."""
    model = activations.model
    arguments: tuple[object, ...] = activations.repeated(copies)
    if ids is not None:
        arguments = (ids, *arguments[1:])
    targets = {str(layer): model.target(layer, "head") for layer in layers}
    found = observed(targets, lambda: model.forward(*arguments))
    outputs = [promoted(found[str(layer)]) for layer in layers]
    return torch.stack([z.reshape(*z.shape[:2], model.num_heads, -1).transpose(1, 2) for z in outputs], dim=1)
