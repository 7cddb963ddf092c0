"""The interface through which the core uses a model; adapters in ``captum_hta.integrations`` implement it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from captum_hta.model.attention import Attention, OutputProjection, Unembedding
from captum_hta.model.encoding import Batch, Encoding
from captum_hta.model.sites import Site
from captum_hta.model.size import Size


@dataclass(frozen=True)
class Check:
    """One check that an adapter ran on itself when it was loaded.

    Attributes:
        name: What was checked.
        passed: Whether the check passed.
        found: What was found, in words.
    """

    name: str
    passed: bool
    found: str = ""


class Reader(Protocol):
    """Turns texts, images or audio into tokens. What it reads is called a text throughout.

    Attributes:
        medium: ``"text"``, ``"image"`` or ``"audio"``.
        tokenizer: The tokenizer or processor that it uses, or ``None``.
    """

    medium: str
    tokenizer: Any

    @property
    def reads(self) -> str:
        """What it accepts, in words that complete "must be"."""

    @property
    def longest(self) -> int | None:
        """The number of tokens of every text, where all have the same; ``None`` where they differ."""

    def accepts(self, text: object) -> bool:
        """Whether it reads objects of this kind."""

    def sample(self) -> Encoding:
        """A few tokens to check an adapter on."""

    def encode(self, text: Any, max_length: int | None = None) -> Encoding:
        """Read a text; with ``max_length``, its first tokens only.

        Raises:
            ValueError: If the text cannot be read.
        """

    def batch(self, encodings: Sequence[Encoding], device: torch.device) -> Batch:
        """Pad encodings on the right to a batch on a device."""

    def token(self, text: str) -> int:
        """The id of a text that is exactly one token.

        Raises:
            ValueError: If it is not, or there are no token ids.
        """


class Model(Protocol):
    """A transformer with its tokenizer.

    Attributes:
        reader: Turns texts into tokens.
        name: What to call the model.
        num_layers: Number of blocks ``L``.
        num_heads: Number of query heads of a block ``H``.
        d_head: Width of a head's output.
        d_model: Width of a hidden embedding ``D``.
        max_length: The largest number of tokens that it reads, or ``None`` without a limit.
        architecture: The kind of model, such as the name of its class.
        key_layers: With cross attention, the number of encoder blocks: ``source(key_layers)`` is the output
            of the encoder, which every layer reads. ``None`` with self-attention.
        first_entry: The number of the source that is the model's input: 0, or -1 if blocks without attention
            run before block 0.
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
    first_entry: int
    checks: Sequence[Check]

    @property
    def device(self) -> torch.device:
        """Device of the weights."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""

    @property
    def fingerprint(self) -> str:
        """A digest of the weights."""

    @property
    def size(self) -> Size:
        """The dimensions that decide what contributions cost."""

    def encode(self, text: Any, max_length: int | None = None) -> Encoding:
        """Read a text, or whatever the reader accepts; with ``max_length``, its first tokens only."""

    def batch(self, encodings: Sequence[Encoding]) -> Batch:
        """Pad encodings on the right to a batch on the model's device."""

    def forward(self, *args: Any) -> object:
        """Run the model on ``(*batch.inputs, *batch.extra)``."""

    def source(self, layer: int) -> Module | Site:
        """Where the input of block ``layer`` is, or with ``first_entry`` the model's: a site, or a module
        whose output it is.
        """

    def target(self, layer: int, kind: str = "head") -> Module | Site:
        """Where the ``"head"`` or ``"layer"`` target of block ``layer`` is."""

    def attention(self, batch: Batch) -> list[Attention]:
        """The attention of every layer, from one forward pass."""

    def output_projection(self, layer: int) -> OutputProjection:
        """How block ``layer`` adds the outputs of its heads to its input."""

    @property
    def unembedding(self) -> Unembedding:
        """How the last hidden embedding becomes logits.

        Raises:
            ValueError: If the model has no token logits, or more than a norm before them.
        """

    def logits(self, *args: Any) -> Tensor:
        """The logits for ``(*batch.inputs, *batch.extra)``, of tokens or classes.

        Returns:
            ``[batch, position, token]`` or ``[batch, class]``.

        Raises:
            ValueError: If the model has no head.
        """

    def token(self, text: str) -> int:
        """The id of a text that is exactly one token.

        Raises:
            ValueError: If it is not.
        """

    @property
    def mask_token(self) -> int | None:
        """The id of the mask token, if there is one."""


def check_model(model: object) -> None:
    """Check that an object is an adapter.

    Raises:
        TypeError: If it is anything else, such as a name, a module or a pipeline.
    """
    if isinstance(model, str) or not all(hasattr(model, name) for name in ("reader", "encode", "num_layers")):
        what = repr(model) if isinstance(model, str) else f"a {type(model).__name__}"
        raise TypeError(
            "model must be an adapter, as captum_hta.load_model returns it for a name, a folder, a model of "
            f"transformers with its tokenizer or a TransformerLens model, got {what}"
        )
