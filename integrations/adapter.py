"""The base of all adapters: a model, the reader of its inputs, and the proof that the adapter fits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from captum_hta.integrations.conditions import require_eval, require_weights, weights_fingerprint
from captum_hta.integrations.proof import Proof
from captum_hta.integrations.readers.texts import TextReader
from captum_hta.model.attention import Attention, OutputProjection, Unembedding
from captum_hta.model.encoding import Batch, Encoding
from captum_hta.model.precision import full_precision
from captum_hta.model.protocol import Check, Reader
from captum_hta.model.sites import Site
from captum_hta.model.size import Size

MAX_SAMPLE = 128
"""Tokens of the longest sample: a forward pass of more takes too long while a model is loaded."""


class Adapter(ABC):
    """A model with its reader, as the core's :class:`captum_hta.model.protocol.Model`.

    Attributes:
        module: The module that holds the weights.
        reader: Turns a text, an image or audio into tokens.
        name: What to call the model.
        architecture: The kind of model.
        num_layers: Number of blocks ``L``.
        num_heads: Query heads of a block ``H``.
        d_head: Width of a head's output.
        d_model: Width of a hidden embedding ``D``.
        max_length: The most tokens that the model reads, or ``None``.
        key_layers: For cross attention, the number of encoder blocks; ``None`` for self-attention.
        checks: What was checked when the adapter was made.
        thresholds: Numbers of tokens beyond which the model treats a whole batch otherwise.
        first_entry: The number of the source that is the model's input; -1 if it is not that of block 0.
        gaps: Numbers of blocks after which blocks without attention run, before the next one.
    """

    module: Module
    reader: Reader
    name: str
    architecture: str
    num_layers: int
    num_heads: int
    d_head: int
    d_model: int
    max_length: int | None
    key_layers: int | None = None
    checks: Sequence[Check] = ()
    thresholds: Sequence[int] = ()
    first_entry: int = 0
    gaps: frozenset[int] = frozenset()
    _closed_form: bool
    _causal: bool

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({self.name}: {self.num_layers} layers of {self.num_heads} heads)"

    @property
    def tokenizer(self) -> Any:
        """The tokenizer or processor of the reader."""
        return self.reader.tokenizer

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return next(self.module.parameters()).dtype

    @property
    def fingerprint(self) -> str:
        """A digest of the weights."""
        return weights_fingerprint(self.module)

    def encode(self, text: Any, max_length: int | None = None) -> Encoding:
        """Read a text, an image or audio; with ``max_length``, only the first tokens of a text."""
        encoding = self.reader.encode(text, max_length)
        return replace(encoding, regime=sum(len(encoding) > length for length in self.thresholds))

    def batch(self, encodings: Sequence[Encoding]) -> Batch:
        """Pad encodings on the right, on the model's device.

        Raises:
            ValueError: If the model treats a batch of them otherwise than some of them alone.
        """
        if len({encoding.regime for encoding in encodings}) > 1:
            lengths = sorted({len(encoding) for encoding in encodings})
            raise ValueError(
                f"texts of {lengths[0]} and {lengths[-1]} tokens are in one batch, but {self.name} treats "
                f"all texts of a batch otherwise if one has more than {list(self.thresholds)} tokens: call "
                "it once for each"
            )
        return self.reader.batch(encodings, self.device)

    def token(self, text: str) -> int:
        """The id of a text that is one token.

        Raises:
            ValueError: If the text is no token, or several.
        """
        return self.reader.token(text)

    @property
    def mask_token(self) -> int | None:
        """The id of the mask token, if there is one."""
        return getattr(self.tokenizer, "mask_token_id", None)

    def prove(self) -> None:
        """Check the adapter on a few tokens; give up the closed form if only that does not hold.

        Raises:
            ValueError: If weights are missing, a dropout is active, or the adapter does not fit.
        """
        require_weights(self.name, self.module)
        self.require_eval()
        proof = Proof(self, self.architecture, self.reader.sample(), self.gaps)
        with full_precision():
            self._run_proof(proof)
            if self._closed_form:
                self._closed_form = proof.closed_form_holds()
            self._causal = proof.is_causal()
        self.checks = proof.checks

    def require_eval(self) -> None:
        """Raise a ``ValueError`` if a dropout is active."""
        require_eval(self.name, self.module)

    @abstractmethod
    def _run_proof(self, proof: Proof) -> None:
        """Run all checks except that of the closed form."""

    @property
    @abstractmethod
    def size(self) -> Size:
        """The model's dimensions."""

    @abstractmethod
    def forward(self, *args: Any) -> object:
        """Run the model on ``(*batch.inputs, *batch.extra)``."""

    @abstractmethod
    def source(self, layer: int) -> Module | Site:
        """Where the input of block ``layer`` is."""

    @abstractmethod
    def target(self, layer: int, kind: str = "head") -> Module | Site:
        """Where the ``"head"`` or ``"layer"`` target of block ``layer`` is."""

    @abstractmethod
    def attention(self, batch: Batch) -> list[Attention]:
        """The attention of every layer, from one forward pass."""

    @abstractmethod
    def output_projection(self, layer: int) -> OutputProjection:
        """How block ``layer`` adds the outputs of its heads to its input."""

    @property
    @abstractmethod
    def unembedding(self) -> Unembedding:
        """How the last hidden embedding becomes logits.

        Raises:
            ValueError: If the model has no logits of tokens, or more than a norm lies before them.
        """

    @abstractmethod
    def logits(self, *args: Any) -> Tensor:
        """The logits for ``(*batch.inputs, *batch.extra)``.

        Raises:
            ValueError: If the model has no head.
        """


def long_sample(reader: Reader, window: int, max_length: int | None) -> Encoding:
    """Tokens to compare an adapter with its model on: more than a window, if that takes no time.

    Args:
        reader: Reads for the model.
        window: The largest length at which the model's behaviour changes, or 0.
        max_length: The most tokens that the model reads.
    """
    longest = min(MAX_SAMPLE, max_length or MAX_SAMPLE)
    if not isinstance(reader, TextReader) or window + 2 > longest:
        return reader.sample()
    return reader.sample(max(6, window + 2))
