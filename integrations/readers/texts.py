"""Texts as a tokenizer of ``transformers`` reads them: ids, labels that a reader knows, padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from captum_hta.model.encoding import Batch, Encoding, Text

_VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "↵"})


class TextReader:
    """Reads texts with a tokenizer, which is left as it is.

    Args:
        tokenizer: A tokenizer of ``transformers``, fast or slow.
        vocabulary: The number of token ids that the model knows.
    """

    medium = "text"
    reads = "a string or a pair of strings"
    longest: int | None = None

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary

    def accepts(self, text: Any) -> bool:
        """Whether it is a string or a pair of strings."""
        pair = isinstance(text, tuple | list) and len(text) == 2 and all(isinstance(t, str) for t in text)
        return pair or isinstance(text, str)

    def sample(self) -> Encoding:
        """Six tokens, none of which is padding."""
        ids = [(7 * number + 11) % self.vocabulary for number in range(8)]
        ids = [number for number in ids if number != self.tokenizer.pad_token_id][:6]
        return Encoding(ids, [0] * len(ids), [""] * len(ids))

    def encode(self, text: Text, max_length: int | None = None) -> Encoding:
        """Read a text, or a pair of them; with ``max_length`` the first tokens alone."""
        pair = (text,) if isinstance(text, str) else text
        limit = {"truncation": True, "max_length": max_length}
        return self._read(pair, {"truncation": False} if max_length is None else limit)

    def decoder(self, text: str, start: int, max_length: int | None, context: Encoding) -> Encoding:
        """What a decoder has said: its first token, then the text without special tokens."""
        said = self._read((text,), {"add_special_tokens": False})
        encoding = Encoding(
            [start, *said.ids],
            [0, *said.segments],
            [self.tokenizer.convert_ids_to_tokens(start), *said.tokens],
            None if said.words is None else [None, *said.words],
            said.word_labels,
            context,
        )
        return encoding if max_length is None else encoding.first(max_length)

    def token(self, text: str) -> int:
        """The one token that a text is.

        Raises:
            ValueError: If it is none, or several.
        """
        ids = self._read((text,), {"add_special_tokens": False}).ids
        if len(ids) != 1:
            raise ValueError(
                f"{text!r} is {len(ids)} tokens, but one is needed: pass one token (many begin with a "
                "blank), or its id"
            )
        return ids[0]

    def _read(self, pair: Sequence[str], options: dict[str, Any]) -> Encoding:
        """What the tokenizer makes of one text or two; labels and words by offsets, where it has them."""
        fast = getattr(self.tokenizer, "is_fast", False)
        encoded = self.tokenizer(*pair, verbose=False, return_offsets_mapping=fast, **options)
        ids = list(encoded["input_ids"])
        segments = list(encoded.get("token_type_ids", [0] * len(ids)))
        if not fast:
            return Encoding(ids, segments, [self._plain_label(token) for token in ids])
        parts, offsets = encoded.sequence_ids(0), encoded["offset_mapping"]
        labels = [
            self._label(token, part, span, pair)
            for token, part, span in zip(ids, parts, offsets, strict=True)
        ]
        words = _numbered(parts, encoded.word_ids(0))
        return Encoding(ids, segments, labels, words, _word_labels(words, parts, offsets, pair, labels))

    def _label(self, token: int, part: int | None, span: tuple[int, int], pair: Sequence[str]) -> str:
        """The piece of the text that a token stands for; a special token's own name."""
        if part is None:
            return self._plain_label(token)
        piece = pair[part][slice(*span)]
        return piece.strip() or piece.translate(_VISIBLE) or self._plain_label(token)

    def _plain_label(self, token: int) -> str:
        name = self.tokenizer.convert_ids_to_tokens(token)
        if token in self.tokenizer.all_special_ids:
            return name
        text = self.tokenizer.convert_tokens_to_string([name])
        return text.strip().removeprefix("##") or text.translate(_VISIBLE) or name

    def batch(self, encodings: Sequence[Encoding], device: torch.device) -> Batch:
        """Pad encodings on the right; a tokenizer without a padding token pads with any id, which the mask
        hides.

        Raises:
            ValueError: If the model does not know a token.
        """
        largest = max((max(encoding.ids, default=0) for encoding in encodings), default=0)
        if largest >= self.vocabulary:
            raise ValueError(
                f"the tokenizer gives token {largest}, but the model knows {self.vocabulary}: pass the "
                "tokenizer that belongs to the model"
            )
        pad = self.tokenizer.pad_token_id or 0
        ids = _padded([encoding.ids for encoding in encodings], pad, device)
        mask = _padded([[1] * len(encoding) for encoding in encodings], 0, device)
        segments = _padded([encoding.segments for encoding in encodings], 0, device)
        return Batch((ids,), (mask, segments), mask.bool())


class PairReader:
    """Reads what an encoder reads together with what a decoder has said.

    Args:
        context: Reads what the encoder reads.
        said: Reads texts for the decoder.
        start: The token that the decoder starts from.
        cross: Whether keys are of what the encoder reads.
    """

    longest: int | None = None

    def __init__(self, context: Any, said: TextReader, start: int, cross: bool) -> None:
        self.context, self.said, self.start, self.cross = context, said, start, cross
        self.tokenizer, self.medium = said.tokenizer, context.medium
        self.reads = f"a pair, what the encoder reads ({context.reads}) and what the decoder has said"

    def token(self, text: str) -> int:
        """The one token that a text of the decoder is.

        Raises:
            ValueError: If it is none, or several.
        """
        return self.said.token(text)

    def accepts(self, text: Any) -> bool:
        """Whether it is a pair of what the encoder reads and a string."""
        pair = isinstance(text, tuple | list) and len(text) == 2
        return pair and self.context.accepts(text[0]) and isinstance(text[1], str)

    def sample(self) -> Encoding:
        """A few tokens, of another number than what the encoder reads."""
        return replace(self.said.sample().first(5), context=self.context.sample())

    def encode(self, text: tuple[Any, str], max_length: int | None = None) -> Encoding:
        """Read both; with ``max_length`` the first tokens of either alone."""
        read, said = text
        return self.said.decoder(said, self.start, max_length, self.context.encode(read, max_length))

    def batch(self, encodings: Sequence[Encoding], device: torch.device) -> Batch:
        """Pad both on the right."""
        said = self.said.batch(encodings, device)
        context = self.context.batch([encoding.context for encoding in encodings], device)
        extra = (said.extra[0], context.inputs[0], context.extra[0])
        return Batch(said.inputs, extra, said.mask, context.mask if self.cross else None)


def _numbered(parts: Sequence[int | None], words: Sequence[int | None]) -> list[int | None]:
    """Words numbered through both texts of a pair; special tokens are of none."""
    numbers: dict[tuple[int, int], int] = {}
    return [
        None if part is None or word is None else numbers.setdefault((part, word), len(numbers))
        for part, word in zip(parts, words, strict=True)
    ]


def _word_labels(
    words: Sequence[int | None],
    parts: Sequence[int | None],
    offsets: Sequence[tuple[int, int]],
    pair: Sequence[str],
    labels: Sequence[str],
) -> list[str]:
    """What stands in the text from the first to the last token of each word; of blanks, the token's label."""
    first_labels: dict[int, str] = {}
    for word, label in zip(words, labels, strict=True):
        if word is not None:
            first_labels.setdefault(word, label)
    spans: dict[int, tuple[int, int, int]] = {}
    for word, part, (start, stop) in zip(words, parts, offsets, strict=True):
        if word is not None:
            _, first, last = spans.get(word, (part, start, stop))
            spans[word] = (part, min(first, start), max(last, stop))
    pieces = [pair[part][start:stop] for part, start, stop in (spans[word] for word in sorted(spans))]
    return [piece.strip() or first_labels[word] for piece, word in zip(pieces, sorted(spans), strict=True)]


def _padded(rows: Sequence[Sequence[int]], value: int, device: torch.device) -> Tensor:
    tensors = [torch.tensor(row, device=device) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
