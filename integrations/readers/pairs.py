"""Pairs for encoder-decoder models: what the encoder reads, and the text of the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from captum_hta.integrations.readers.audio import AudioReader
from captum_hta.integrations.readers.texts import TextReader
from captum_hta.integrations.readers.waves import WaveReader
from captum_hta.model.encoding import Batch, Encoding


class PairReader:
    """Reads what the encoder reads together with the text of the decoder.

    Args:
        context: Reads what the encoder reads.
        texts: Reads texts of the decoder.
        start: The token that the decoder starts with.
        cross: Whether keys are tokens of the encoder.
    """

    longest: int | None = None

    def __init__(
        self, context: TextReader | AudioReader | WaveReader, texts: TextReader, start: int, cross: bool
    ) -> None:
        self.context, self.texts, self.start, self.cross = context, texts, start, cross
        self.tokenizer, self.medium = texts.tokenizer, context.medium
        self.reads = f"a pair, what the encoder reads ({context.reads}) and the text of the decoder"

    def token(self, text: str) -> int:
        """The id of a text of the decoder that is one token.

        Raises:
            ValueError: If the text is no token, or several.
        """
        return self.texts.token(text)

    def accepts(self, text: object) -> bool:
        """Whether it is a pair of something that the encoder reads and a string."""
        if not isinstance(text, tuple | list) or len(text) != 2:
            return False
        return self.context.accepts(text[0]) and isinstance(text[1], str)

    def sample(self) -> Encoding:
        """A few tokens of the decoder, and a different number of tokens of the encoder."""
        return replace(self.texts.sample().first(5), context=self.context.sample())

    def encode(self, text: tuple[Any, str], max_length: int | None = None) -> Encoding:
        """Read both; with ``max_length``, only the first tokens of each."""
        read, written = text
        return self.texts.decoder(written, self.start, max_length, self.context.encode(read, max_length))

    def batch(self, encodings: Sequence[Encoding], device: torch.device) -> Batch:
        """Pad both on the right."""
        written = self.texts.batch(encodings, device)
        contexts = [encoding.context for encoding in encodings if encoding.context is not None]
        context = self.context.batch(contexts, device)
        extra = (written.extra[0], context.inputs[0], context.extra[0])
        return Batch(written.inputs, extra, written.mask, context.mask if self.cross else None)
