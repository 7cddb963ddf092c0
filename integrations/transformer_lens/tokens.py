"""Tokens as models of TransformerLens make them from texts, with the BOS token that they may put first."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from captum_hta.integrations.readers.texts import TextReader
from captum_hta.model.encoding import Encoding, Text


class LensTextReader(TextReader):
    """Reads strings as a model of TransformerLens does, whose ``to_tokens`` may put a BOS token before them.

    Pairs of strings, token ids and chat messages are read as by
    :class:`captum_hta.integrations.readers.texts.TextReader`, and so are strings if ``add_special_tokens`` is
    ``False``.

    Args:
        lens: A model of TransformerLens with a tokenizer.
        vocabulary: The number of token ids that the model knows.
    """

    def __init__(self, lens: Any, vocabulary: int) -> None:
        super().__init__(lens.tokenizer, vocabulary)
        self.lens = lens

    def encode(self, text: Text, max_length: int | None = None) -> Encoding:
        """Read a text; with ``max_length``, only the first tokens.

        Raises:
            ValueError: If token ids are not the model's or contain padding, or there is no chat template.
        """
        if not isinstance(text, str) or self.add_special_tokens is False:
            return super().encode(text, max_length)
        encoding = self._as_the_lens(super().encode(text), text)
        return encoding if max_length is None else encoding.first(max_length)

    def _as_the_lens(self, encoding: Encoding, text: str) -> Encoding:
        """The encoding with the tokens of ``to_tokens``: with BOS before it, or without its ends."""
        found = self.lens.to_tokens(text, truncate=False)
        if not isinstance(found, Tensor):
            return encoding  # a HookedEncoder gives segments too, and the tokens of its tokenizer
        ids: list[int] = found[0].tolist()
        for candidate in (encoding, encoding.after(ids[:1], [self._plain_label(token) for token in ids[:1]])):
            if candidate.ids[: len(ids)] == ids:
                return candidate.first(len(ids))
        if encoding.without_first().ids[: len(ids)] == ids:
            return encoding.without_first().first(len(ids))
        return Encoding(ids, [0] * len(ids), [self._plain_label(token) for token in ids])
