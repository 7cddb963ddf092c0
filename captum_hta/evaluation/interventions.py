"""Changes of single source tokens, and what they do to the output of every head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from captum_hta.baselines.base import Example, wide
from captum_hta.model.encoding import Encoding
from captum_hta.model.sites import observed, replaced

TRIES = 20
"""Draws after which a token keeps its place in a corpus that has hardly another."""
COPIES = 32
"""Copies of a text in one forward pass."""


@dataclass(frozen=True)
class Changed:
    """A text with one token changed, for some of its tokens.

    Attributes:
        keys: The tokens, ``[copy]``.
        vectors: What takes the place of each one's source vector, ``[copy, width]``; or
        ids: the token that takes its place, ``[copy]``.
    """

    keys: Tensor
    vectors: Tensor | None = None
    ids: Tensor | None = None


class Intervention(ABC):
    """A way to change one source token."""

    of_vectors: ClassVar[bool] = True
    """Whether it changes source vectors, or token ids."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What tables call it."""

    @abstractmethod
    def changes(self, encoding: Encoding, x: Tensor, generator: Generator) -> Iterator[Changed]:
        """Samples of the change of every token.

        Args:
            encoding: The text.
            x: Its source vectors ``[key, width]``.
            generator: For what is drawn at random.
        """


@dataclass(frozen=True)
class Noise(Intervention):
    """Isotropic noise on a source vector.

    Attributes:
        size: Its standard deviation, in units of the root mean square of all components of the text's source
            vectors: the same for each token.
        samples: How many are drawn.
    """

    size: float
    samples: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.size < float("inf") or self.samples < 1:
            raise ValueError(f"noise needs a positive size and at least one sample, got {self}")

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"noise {self.size:g}"

    def changes(self, encoding: Encoding, x: Tensor, generator: Generator) -> Iterator[Changed]:
        """Samples of the change of every token."""
        deviation = self.size * x.square().mean().sqrt()
        for _ in range(self.samples):
            noise = torch.randn(x.shape, generator=generator).to(x)
            yield Changed(torch.arange(len(x)), x + deviation * noise)


@dataclass(frozen=True)
class Mean(Intervention):
    """The mean of the text's source vectors in the place of one."""

    name = "mean vector"

    def changes(self, encoding: Encoding, x: Tensor, generator: Generator) -> Iterator[Changed]:
        """The change of every token."""
        yield Changed(torch.arange(len(x)), x.mean(0).expand_as(x))


@dataclass(frozen=True)
class Zero(Intervention):
    """Zero in the place of a source vector."""

    name = "zero vector"

    def changes(self, encoding: Encoding, x: Tensor, generator: Generator) -> Iterator[Changed]:
        """The change of every token."""
        yield Changed(torch.arange(len(x)), torch.zeros_like(x))


@dataclass(frozen=True)
class MaskToken(Intervention):
    """The mask token in the place of a token that is not special.

    Attributes:
        token: Its id.
    """

    token: int
    of_vectors = False
    name = "mask token"

    def changes(self, encoding: Encoding, x: Tensor, generator: Generator) -> Iterator[Changed]:
        """The change of every token of a word."""
        keys = _of_words(encoding)
        yield Changed(keys, ids=torch.full_like(keys, self.token))


@dataclass(frozen=True)
class OtherToken(Intervention):
    """A token drawn from a corpus in the place of one that is not special.

    Attributes:
        corpus: Tokens to draw from, as often as they occur.
        samples: How many are drawn.
    """

    corpus: tuple[int, ...]
    samples: int = 1
    of_vectors = False
    name = "other word"

    def __post_init__(self) -> None:
        if not self.corpus or self.samples < 1:
            raise ValueError("another word needs a corpus of tokens and at least one sample")

    def changes(self, encoding: Encoding, x: Tensor, generator: Generator) -> Iterator[Changed]:
        """Samples of the change of every token of a word."""
        keys, corpus = _of_words(encoding), torch.tensor(self.corpus)
        for _ in range(self.samples):
            yield Changed(keys, ids=self._drawn(corpus, torch.tensor(encoding.ids)[keys], generator))

    def _drawn(self, corpus: Tensor, usual: Tensor, generator: Generator) -> Tensor:
        """Tokens of the corpus, others than the usual ones."""
        drawn = usual.clone()
        for _ in range(TRIES):
            same = drawn == usual
            places = torch.randint(len(corpus), (len(usual),), generator=generator)
            drawn = torch.where(same, corpus[places], drawn)
        return drawn


def _of_words(encoding: Encoding) -> Tensor:
    """The tokens that are pieces of words; all, where that is not known."""
    words = encoding.words or range(len(encoding))
    return torch.tensor([key for key, word in enumerate(words) if word is not None])


# --- what they do ----------------------------------------------------------------------------------


def responses(
    example: Example,
    encoding: Encoding,
    intervention: Intervention,
    entry: int,
    layers: Sequence[int],
    generator: Generator,
) -> Tensor:
    r"""How far the output of each head moves: the root mean square of :math:`\| y_j' - y_j \|` over samples.

    Args:
        example: The text.
        encoding: The same.
        intervention: The change.
        entry: The block whose input holds the source vectors.
        layers: Layers of the heads.
        generator: For what is drawn at random.

    Returns:
        ``[layer, head, query, key]``; NaN for keys that are not changed.
    """
    x = example.hidden[entry]
    usual = _heads(example, layers, 1)
    squares = x.new_zeros(*usual.shape[1:4], len(x), dtype=torch.float64)
    samples = 0
    for changed in intervention.changes(encoding, x, generator):
        samples += 1
        for part in torch.arange(len(changed.keys)).split(COPIES):
            moved = _moved(example, changed, part, entry, layers) - usual
            squares[..., changed.keys[part]] += moved.double().square().sum(-1).permute(1, 2, 3, 0)
    untouched = torch.ones(len(x), dtype=torch.bool)
    untouched[changed.keys] = False
    return (squares / samples).sqrt().masked_fill(untouched.to(x.device), torch.nan)


def _moved(example: Example, changed: Changed, part: Tensor, entry: int, layers: Sequence[int]) -> Tensor:
    """What heads give for copies with one token changed: ``[copy, layer, head, query, d_head]``."""
    copies, keys = torch.arange(len(part)), changed.keys[part]
    if changed.ids is not None:
        ids = example.batch.inputs[0].repeat(len(part), 1)
        ids[copies, keys] = changed.ids[part].to(ids)
        return _heads(example, layers, len(part), ids)

    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[copies, keys] = changed.vectors[part].to(x)
        return x

    with replaced(example.model.source(entry), change):
        return _heads(example, layers, len(part))


def _heads(example: Example, layers: Sequence[int], copies: int, ids: Tensor | None = None) -> Tensor:
    """What heads give, ``[copy, layer, head, query, d_head]``."""
    model = example.model
    arguments: tuple[Any, ...] = example.repeated(copies)
    if ids is not None:
        arguments = (ids, *arguments[1:])
    found = observed(
        {str(layer): model.target(layer, "head") for layer in layers}, lambda: model.forward(*arguments)
    )
    outputs = [wide(found[str(layer)]) for layer in layers]
    return torch.stack([z.reshape(*z.shape[:2], model.num_heads, -1).transpose(1, 2) for z in outputs], dim=1)
