"""What the adapters have in common: a model, and what reads for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Module

from captum_hta.integrations.proof import require_eval, weights_fingerprint
from captum_hta.model.encoding import Batch, Encoding, Text


class Adapter:
    """A model with its reader.

    Attributes:
        module: What holds the weights.
        reader: Reads texts, or what else the model reads.
        name: What to call the model.
    """

    module: Module
    reader: Any
    name: str
    num_layers: int
    num_heads: int

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({self.name}: {self.num_layers} layers of {self.num_heads} heads)"

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or the processor of what else is read."""
        return self.reader.tokenizer

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's weights."""
        return next(self.module.parameters()).dtype

    @property
    def fingerprint(self) -> str:
        """Of the weights."""
        return weights_fingerprint(self.module)

    def encode(self, text: Text, max_length: int | None = None) -> Encoding:
        """Read a text, or what else the model reads; with ``max_length`` the first tokens alone."""
        return self.reader.encode(text, max_length)

    def batch(self, encodings: Sequence[Encoding]) -> Batch:
        """Pad encodings on the right, on the model's device."""
        return self.reader.batch(encodings, self.device)

    def token(self, text: str) -> int:
        """The one token that a text is.

        Raises:
            ValueError: If it is none, or several.
        """
        return self.reader.token(text)

    @property
    def mask_token(self) -> int | None:
        """The token that stands for a hidden one, if there is such a token."""
        return getattr(self.tokenizer, "mask_token_id", None)

    def _require_eval(self) -> None:
        require_eval(self.name, self.module)
