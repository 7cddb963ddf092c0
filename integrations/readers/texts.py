"""Texts, read by a tokenizer of ``transformers``: token ids, legible labels, words, padding."""

from __future__ import annotations

from collections.abc import Sequence
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

    def sample(self, length: int = 6) -> Encoding:
        """Tokens of two segments, none of which is padding.

        Args:
            length: Their number, or fewer where the vocabulary is tiny.
        """
        ids = [(7 * number + 11) % self.vocabulary for number in range(2 * length + 2)]
        ids = [number for number in ids if number != self.tokenizer.pad_token_id][:length]
        half = len(ids) // 2
        return Encoding(ids, [0] * half + [1] * (len(ids) - half), [""] * len(ids))

    def encode(self, text: Text, max_length: int | None = None) -> Encoding:
        """Read a text, or a pair of them; with ``max_length``, only the first tokens."""
        pair = (text,) if isinstance(text, str) else text
        limit = {"truncation": True, "max_length": max_length}
        return self._read(pair, {"truncation": False} if max_length is None else limit)

    def decoder(self, text: str, start: int, max_length: int | None, context: Encoding) -> Encoding:
        """The text of a decoder: the token that it starts with, then the text without special tokens.

        Args:
            text: The text.
            start: The first token.
            max_length: If given, only so many tokens are kept.
            context: What the encoder reads.
        """
        plain = self._read((text,), {"add_special_tokens": False})
        encoding = Encoding(
            [start, *plain.ids],
            [0, *plain.segments],
            [self.tokenizer.convert_ids_to_tokens(start), *plain.tokens],
            None if plain.words is None else [None, *plain.words],
            plain.word_labels,
            context,
        )
        return encoding if max_length is None else encoding.first(max_length)

    def token(self, text: str) -> int:
        """The id of a text that is one token.

        Raises:
            ValueError: If the text is no token, or several.
        """
        ids = self._read((text,), {"add_special_tokens": False}).ids
        if len(ids) != 1:
            raise ValueError(
                f"{text!r} is {len(ids)} tokens, but one is needed: pass one token (many begin with a "
                "blank), or its id"
            )
        return ids[0]

    def _read(self, pair: Sequence[str], options: dict[str, Any]) -> Encoding:
        """Tokenize one text or two; labels and words are cut from the text if the tokenizer gives offsets."""
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
        words = _numbered(parts, _words_of(encoded.word_ids(0), parts, offsets, pair))
        return Encoding(ids, segments, labels, words, _word_labels(words, parts, offsets, pair, labels))

    def _label(self, token: int, part: int | None, span: tuple[int, int], pair: Sequence[str]) -> str:
        """The piece of the text that a token stands for; for special tokens their name."""
        if part is None:
            return self._plain_label(token)
        piece = pair[part][slice(*span)]
        return piece.strip() or piece.translate(_VISIBLE) or self._plain_label(token)

    def _plain_label(self, token: int) -> str:
        name: str = self.tokenizer.convert_ids_to_tokens(token)
        if token in self.tokenizer.all_special_ids:
            return name
        text: str = self.tokenizer.convert_tokens_to_string([name])
        if (len(name) == 1 and ord(name) < 256 and not text.translate(_VISIBLE).isprintable()) or not text:
            return f"<0x{ord(name):02X}>" if len(name) == 1 and ord(name) < 256 else name
        return text.strip().removeprefix("##") or text.translate(_VISIBLE) or name

    def batch(self, encodings: Sequence[Encoding], device: torch.device) -> Batch:
        """Pad encodings on the right. Without a padding token that the model embeds any id will do, since the
        mask hides it.

        Raises:
            ValueError: If a token is beyond the model's vocabulary.
        """
        largest = max((max(encoding.ids, default=0) for encoding in encodings), default=0)
        if largest >= self.vocabulary:
            raise ValueError(
                f"the tokenizer gives token {largest}, but the model knows {self.vocabulary}: pass the "
                "tokenizer that belongs to the model"
            )
        pad = self.tokenizer.pad_token_id
        pad = pad if pad is not None and 0 <= pad < self.vocabulary else 0
        ids = _padded([encoding.ids for encoding in encodings], pad, device)
        mask = _padded([[1] * len(encoding) for encoding in encodings], 0, device)
        segments = _padded([encoding.segments for encoding in encodings], 0, device)
        return Batch((ids,), (mask, segments), mask.bool())


def _words_of(
    words: Sequence[int | None],
    parts: Sequence[int | None],
    spans: Sequence[tuple[int, int]],
    pair: Sequence[str],
) -> Sequence[int | None]:
    """The words of the tokens: the tokenizer's, or split at blanks where one of those contains a blank.

    Tokenizers that do not split texts before they look for pieces (Llama, Gemma) give one word for all.
    """
    ends: dict[tuple[int, int], tuple[int, int]] = {}
    for word, part, (start, stop) in zip(words, parts, spans, strict=True):
        if word is not None and part is not None:
            first, last = ends.get((part, word), (start, stop))
            ends[part, word] = (min(first, start), max(last, stop))
    if all(len(pair[part][start:stop].split()) < 2 for (part, _), (start, stop) in ends.items()):
        return words
    return _split_at_blanks(parts, spans, pair)


def _split_at_blanks(
    parts: Sequence[int | None], spans: Sequence[tuple[int, int]], pair: Sequence[str]
) -> list[int | None]:
    """Number words that begin where a blank does, or after one."""
    words: list[int | None] = []
    number, after_blank, last_part = -1, True, None
    for part, (start, stop) in zip(parts, spans, strict=True):
        if part is None:
            words.append(None)
            continue
        piece = pair[part][start:stop]
        at_blank = (
            pair[part][max(start - 1, 0) : start + 1].strip() != pair[part][max(start - 1, 0) : start + 1]
        )
        if part != last_part or (at_blank and not after_blank):
            number += 1
        words.append(number)
        after_blank, last_part = not piece.strip(), part
    return words


def _numbered(parts: Sequence[int | None], words: Sequence[int | None]) -> list[int | None]:
    """Number the words of both texts of a pair consecutively; special tokens belong to no word."""
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
    """The text of each word, from its first to its last token; for blanks the label of the token."""
    spans: dict[int, tuple[int, int, int, str]] = {}
    for word, part, (start, stop), label in zip(words, parts, offsets, labels, strict=True):
        if word is not None and part is not None:
            _, first, last, known = spans.get(word, (part, start, stop, label))
            spans[word] = (part, min(first, start), max(last, stop), known)
    return [
        pair[part][first:last].strip() or label
        for part, first, last, label in (spans[word] for word in sorted(spans))
    ]


def _padded(rows: Sequence[Sequence[int]], value: int, device: torch.device) -> Tensor:
    tensors = [torch.tensor(row, device=device) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
