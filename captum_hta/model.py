"""The protocol by which the core knows a model; adapters in ``captum_hta.integrations`` fulfil it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from captum_hta.attention_jacobian import AttentionFactors
from captum_hta.forecast import Size
from captum_hta.forward_pass import Site

Text = str | tuple[str, str]


@dataclass(frozen=True)
class Encoding:
    """One text, picture or sound as the model reads it.

    Attributes:
        ids: Token ids; only of texts.
        segments: For each token the segment it belongs to, 0 or 1 in a pair.
        tokens: For each token a label.
        words: For each token the number of its word, ``None`` for special tokens; where the words are not
            known, ``None`` for all.
        word_labels: For each word its label.
        context: What the encoder read, where these are the tokens of a decoder.
        content: What is read in the place of ids: pixel values ``[channel, height, width]`` of a picture,
            features ``[feature, frame]`` of a sound.
        grid: Rows and columns of the patches that the last tokens of a picture are.
        picture: The picture as it is read, to be shown: ``[height, width, 3]`` in 0 to 1.
    """

    ids: list[int]
    segments: list[int]
    tokens: list[str]
    words: list[int | None] | None = None
    word_labels: list[str] | None = None
    context: Encoding | None = None
    content: Tensor | None = field(default=None, repr=False, compare=False)
    grid: tuple[int, int] | None = None
    picture: NDArray[np.float64] | None = field(default=None, repr=False, compare=False)

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
class Check:
    """One thing that an adapter checked of itself.

    Attributes:
        name: What.
        passed: Whether it holds.
        found: What was found, for a reader.
    """

    name: str
    passed: bool
    found: str = ""


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
            raise ValueError(f"pictures of one call must be of one size, got {shapes}: call once for each")
        contents = torch.stack([encoding.content for encoding in encodings]).to(device)
        mask = torch.ones(len(encodings), len(encodings[0]), dtype=torch.bool, device=device)
        return cls((contents,), (None,), mask)

    @property
    def keys(self) -> Tensor:
        """The mask of the keys."""
        return self.mask if self.key_mask is None else self.key_mask


@dataclass(frozen=True)
class Attention:
    """What one layer's attention did in a forward pass.

    Attributes:
        pattern: ``[batch, head, query, key]``, after the softmax.
        factors: What the closed form needs, or ``None`` where it does not hold.
        value: ``[batch, head, key, d_head]``, which the pattern is multiplied by; ``None`` where the model
            does not show it.
    """

    pattern: Tensor
    factors: AttentionFactors | None = None
    value: Tensor | None = None


@dataclass(frozen=True)
class SumNorm:
    """A LayerNorm.

    Attributes:
        weight, bias: ``[width]``.
        eps: Added to the variance.
    """

    weight: Tensor
    bias: Tensor
    eps: float


@dataclass(frozen=True)
class OutputProjection:
    """How a block adds what its heads say to its input: ``norm(x + sum_h z_h W_h + b)``.

    Attributes:
        weight: ``[head, d_head, width]``.
        bias: ``[width]``, or ``None``.
        norm: The LayerNorm of the sum, in a post-LN block; ``None`` in a pre-LN block.
        residual: Whether the sum is as above; not so where heads' outputs are normalised on their own
            before.
    """

    weight: Tensor
    bias: Tensor | None = None
    norm: SumNorm | None = None
    residual: bool = True


@dataclass(frozen=True)
class Unembedding:
    """How the last hidden embedding becomes logits: ``norm(x) W^T``.

    Attributes:
        weight: ``[token, width]``.
        norm: The final norm, or ``None``.
    """

    weight: Tensor
    norm: Module | None = None


class Reader(Protocol):
    """What makes tokens of a text, a picture or a sound.

    Attributes:
        medium: What it reads, in a word: ``"text"``, ``"picture"`` or ``"sound"``.
        reads: What it takes, in words that go on from "must be".
    """

    medium: str
    reads: str

    def accepts(self, text: Any) -> bool:
        """Whether a thing is of a kind that it reads."""


class Model(Protocol):
    """A transformer with its tokenizer.

    Attributes:
        reader: What reads texts for it.
        name: What to call it.
        num_layers: Number of blocks ``L``.
        num_heads: Query heads of a block ``H``.
        d_head: Width of a head's output.
        d_model: Width of a hidden embedding ``D``.
        max_length: Most tokens that it reads, or ``None``.
        architecture: The kind of model.
        key_layers: Of cross attention, the number of encoder blocks: ``source(key_layers)`` is what the
            encoder gives, which every layer reads. ``None`` for self-attention.
        checks: What was checked when it was loaded.
    """

    reader: Reader
    name: str
    num_layers: int
    num_heads: int
    d_head: int
    d_model: int
    max_length: int | None
    architecture: str
    key_layers: int | None
    checks: Sequence[Check]

    @property
    def device(self) -> torch.device:
        """Where the model runs."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""

    @property
    def fingerprint(self) -> str:
        """Of the weights: equal for equal weights, and for no others that occur."""

    @property
    def size(self) -> Size:
        """The numbers that decide what contributions cost."""

    def encode(self, text: Text, max_length: int | None = None) -> Encoding:
        """Read a text, or a pair of them; with ``max_length`` the first tokens alone."""

    def batch(self, encodings: Sequence[Encoding]) -> Batch:
        """Pad encodings to one length, on the model's device."""

    def forward(self, *args: Any) -> Any:
        """Run the model on ``(*batch.inputs, *batch.extra)``."""

    def source(self, layer: int) -> Module | Site:
        """Where what enters block ``layer`` is: a site, or a module whose output it is."""

    def target(self, layer: int, kind: str) -> Module | Site:
        """Where the ``"head"`` or ``"layer"`` target of block ``layer`` is."""

    def attention(self, batch: Batch) -> list[Attention]:
        """What every layer's attention does, from one forward pass."""

    def output_projection(self, layer: int) -> OutputProjection:
        """What becomes of the heads' outputs of block ``layer``."""

    @property
    def unembedding(self) -> Unembedding:
        """How the last hidden embedding becomes logits.

        Raises:
            ValueError: If the model has no logits of tokens, or more than a norm lies before them.
        """

    def logits(self, *args: Any) -> Tensor:
        """What the model's head gives for ``(*batch.inputs, *batch.extra)``: ``[batch, position, token]``,
        or ``[batch, class]``.

        Raises:
            ValueError: If it has none.
        """

    def token(self, text: str) -> int:
        """The one token that a text is.

        Raises:
            ValueError: If it is none, or several.
        """

    @property
    def mask_token(self) -> int | None:
        """The token that stands for a hidden one, if there is such a token."""
