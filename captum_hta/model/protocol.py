"""The protocol by which the core knows a model; adapters in ``captum_hta.integrations`` fulfil it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from captum_hta.model.attention import Attention, OutputProjection, Unembedding
from captum_hta.model.encoding import Batch, Encoding, Text
from captum_hta.model.sites import Site
from captum_hta.model.size import Size


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


class Reader(Protocol):
    """What makes tokens of a text, an image or audio.

    Attributes:
        medium: What it reads, in a word: ``"text"``, ``"image"`` or ``"audio"``.
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
