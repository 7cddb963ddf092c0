"""Texts, images and audio as a model reads them, alone and in padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Text = str | tuple[str, str]


@dataclass(frozen=True)
class Encoding:
    """One text, image or audio as the model reads it.

    Attributes:
        ids: Token ids; only of texts.
        segments: For each token the segment it belongs to, 0 or 1 in a pair.
        tokens: For each token a label.
        words: For each token the number of its word, ``None`` for special tokens; where the words are not
            known, ``None`` for all.
        word_labels: For each word its label.
        context: What the encoder read, where these are the tokens of a decoder.
        content: What is read in the place of ids: pixel values ``[channel, height, width]`` of an image,
            features ``[feature, frame]`` of audio.
        grid: Rows and columns of the patches that the last tokens of an image are.
        image: The image as it is read, to be shown: ``[height, width, 3]`` in 0 to 1.
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

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> Encoding:
        """The first tokens alone."""
        return replace(
            self,
            ids=self.ids[:count],
            segments=self.segments[:count],
            tokens=self.tokens[:count],
            words=None if self.words is None else self.words[:count],
        )


@dataclass(frozen=True)
class Batch:
    """Texts of a batch, padded on the right.

    Attributes:
        inputs: What ``forward`` is called with: token ids ``[batch, position]``, or what is read in their
            place.
        extra: Further arguments of ``forward``.
        mask: ``[batch, position]``, true for real tokens.
        key_mask: The same for the keys of cross attention; ``None``: they are the same tokens.
    """

    inputs: tuple[Tensor, ...]
    extra: tuple[Any, ...]
    mask: Tensor
    key_mask: Tensor | None = None

    @classmethod
    def of_contents(cls, encodings: Sequence[Encoding], device: torch.device) -> Batch:
        """What several encodings hold in the place of ids, without padding.

        Raises:
            ValueError: If they are of several shapes.
        """
        shapes = sorted({tuple(encoding.content.shape) for encoding in encodings})
        if len(shapes) > 1:
            raise ValueError(f"images of one call must be of one size, got {shapes}: call once for each")
        contents = torch.stack([encoding.content for encoding in encodings]).to(device)
        mask = torch.ones(len(encodings), len(encodings[0]), dtype=torch.bool, device=device)
        return cls((contents,), (None,), mask)

    @property
    def keys(self) -> Tensor:
        """The mask of the keys."""
        return self.mask if self.key_mask is None else self.key_mask
