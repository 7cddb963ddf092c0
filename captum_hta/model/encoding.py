"""Texts, images and audio as a model reads them: encodings, and padded batches of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Text = str | tuple[str, str] | Sequence[int] | Tensor | Sequence[Mapping[str, str]]
"""A string, a pair of them, token ids, or chat messages."""


@dataclass(frozen=True)
class Encoding:
    """One text, image or audio as the model reads it.

    Attributes:
        ids: Token ids of a text; empty for images and audio.
        segments: The segment of each token, 0 or 1 in a pair.
        tokens: The label of each token.
        words: The number of each token's word, ``None`` for special tokens. ``None`` if words are unknown.
        word_labels: The label of each word.
        context: What the encoder reads, if these are the tokens of a decoder.
        content: What is read instead of ids: the pixel values ``[channel, height, width]`` of an image, or
            the features ``[feature, frame]`` of audio.
        grid: Rows and columns of an image's patches, which are its last tokens.
        image: The image as it is read, for display: ``[height, width, 3]`` in 0 to 1.
        regime: Texts of different regimes are never put into one batch: the model treats a batch otherwise if
            it holds a text beyond a certain length.
    """

    ids: list[int]
    segments: list[int]
    tokens: list[str]
    words: list[int | None] | None = None
    word_labels: list[str] | None = None
    context: Encoding | None = None
    content: Tensor | None = field(default=None, repr=False, compare=False)
    grid: tuple[int, int] | None = None
    image: NDArray[np.float64] | None = field(default=None, repr=False, compare=False)
    regime: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int | None) -> Encoding:
        """The encoding of the first ``count`` tokens only; of all with ``None``."""
        return self._slice(slice(count))

    def without_first(self) -> Encoding:
        """The encoding without the first token."""
        return self._slice(slice(1, None))

    def after(self, ids: list[int], tokens: list[str]) -> Encoding:
        """The encoding with special tokens before it."""
        no_words: list[int | None] = [None] * len(ids)
        return replace(
            self,
            ids=ids + self.ids,
            segments=[0] * len(ids) + self.segments,
            tokens=tokens + self.tokens,
            words=None if self.words is None else no_words + self.words,
        )

    def _slice(self, kept: slice) -> Encoding:
        return replace(
            self,
            ids=self.ids[kept],
            segments=self.segments[kept],
            tokens=self.tokens[kept],
            words=None if self.words is None else self.words[kept],
        )


@dataclass(frozen=True)
class Batch:
    """A batch of encodings, padded on the right.

    Attributes:
        inputs: The first arguments of ``forward``: token ids ``[batch, position]``, or the contents that are
            read instead.
        extra: Further arguments of ``forward``.
        mask: ``[batch, position]``, true for real tokens.
        key_mask: The same for the keys of cross attention; ``None`` if keys are the same tokens.
    """

    inputs: tuple[Tensor, ...]
    extra: tuple[Tensor | None, ...]
    mask: Tensor
    key_mask: Tensor | None = None

    @property
    def keys(self) -> Tensor:
        """The mask ``[batch, key]`` of the keys."""
        return self.mask if self.key_mask is None else self.key_mask
