"""Texts, read by a tokenizer of ``transformers``: token ids, legible labels, words, padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from captum_hta.model.encoding import Batch, Encoding, Text

_VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "↵"})


class TextReader:
    """Reads texts with a tokenizer, which is left as it is.

    A text is a string, a pair of strings, token ids (a list of int or a tensor ``[token]``), which are used
    as they are, or chat messages (a list of dictionaries with ``role`` and ``content``), which the
    tokenizer's chat template turns into a string. If the last message is not the assistant's, the prompt for
    its answer is added, as the pipelines of ``transformers`` do.

    Args:
        tokenizer: A tokenizer of ``transformers``, fast or slow.
        vocabulary: The number of token ids that the model knows.

    Attributes:
        add_special_tokens: Whether the tokenizer adds its special tokens to strings; ``None``, as it does by
            default. Token ids and chat messages get none: a chat template writes its own.
    """

    medium = "text"
    reads = "a string, a pair of strings, token ids or chat messages"
    longest: int | None = None

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self.add_special_tokens: bool | None = None

    def accepts(self, text: object) -> bool:
        """Whether it is a string, a pair of strings, token ids or chat messages."""
        return isinstance(text, str) or _is_pair(text) or _are_ids(text) or _is_chat(text)

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
        """Read a text; with ``max_length``, only the first tokens.

        Raises:
            ValueError: If token ids are not the model's or contain padding, or there is no chat template.
            TypeError: If it is none of what is read.
        """
        limit = {"truncation": True, "max_length": max_length}
        options = {"truncation": False} if max_length is None else limit
        if _is_chat(text):
            return self._read((self._conversation(text),), options | {"add_special_tokens": False})
        if _are_ids(text):
            encoding = self._of_ids([int(number) for number in text])
            return encoding if max_length is None else encoding.first(max_length)
        if self.add_special_tokens is not None:
            options["add_special_tokens"] = self.add_special_tokens
        if isinstance(text, str):
            return self._read((text,), options)
        if not _is_pair(text):
            raise TypeError(f"a text must be {self.reads}, got a {type(text).__name__}")
        return self._read(text, options)

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
        read = self._read((text,), {"add_special_tokens": False})
        if len(read) != 1:
            pieces = f" ({', '.join(map(repr, read.tokens))})" if read.tokens else ""
            raise ValueError(
                f"{text!r} is {len(read)} tokens, but one is needed{pieces}: pass one token (many begin with "
                "a blank), or its id"
            )
        return read.ids[0]

    def _of_ids(self, ids: list[int]) -> Encoding:
        """Token ids, with labels; they have no words.

        Raises:
            ValueError: If the model does not know one of them, or padding follows the text.
        """
        for number in ids:
            if not 0 <= number < self.vocabulary:
                raise ValueError(
                    f"there is no token {number}: the token ids of the model are 0 to {self.vocabulary - 1}"
                )
        pad = self.tokenizer.pad_token_id
        others = ("bos_token_id", "eos_token_id", "unk_token_id")
        has_other_use = pad in [getattr(self.tokenizer, name, None) for name in others]
        padding = [pad] * (2 if has_other_use else 1)
        if pad is not None and padding in (ids[-len(padding) :], ids[: len(padding)]):
            raise ValueError(
                f"token ids begin or end with the padding token {pad}, which would count as part of the "
                "text: pass each text without padding, which is added where it is needed"
            )
        return Encoding(ids, [0] * len(ids), [self._plain_label(number) for number in ids])

    def _conversation(self, messages: Sequence[Mapping[str, object]]) -> str:
        """Chat messages as the text that the model was trained on.

        Raises:
            ValueError: If the tokenizer has no chat template.
        """
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError(
                "the tokenizer has no chat template: set tokenizer.chat_template, or pass the conversation "
                "as a string"
            )
        answer = messages[-1]["role"] != "assistant"
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=answer
        )
        return text

    def _read(self, pair: Sequence[str], options: Mapping[str, object]) -> Encoding:
        """Tokenize one text or two; labels and words are cut from the text if the tokenizer gives offsets.

        If a text begins with the token that the tokenizer puts before it, as a chat that is written out does,
        that token is not doubled.
        """
        encoding = self._tokenized(pair, options)
        first = getattr(self.tokenizer, "bos_token_id", None)
        is_doubled = first is not None and encoding.ids[:2] == [first, first]
        text = getattr(self.tokenizer, "bos_token", None) or ""
        doubled = is_doubled and pair[0].startswith(text) and not pair[0].startswith(2 * text)
        return encoding.without_first() if doubled else encoding

    def _tokenized(self, pair: Sequence[str], options: Mapping[str, object]) -> Encoding:
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


def _is_pair(text: object) -> TypeGuard[Sequence[str]]:
    return isinstance(text, tuple | list) and len(text) == 2 and all(isinstance(one, str) for one in text)


def _are_ids(text: object) -> TypeGuard[Sequence[int] | Tensor | NDArray[np.integer[Any]]]:
    """Whether it is a list of integers, or one axis of them in a tensor or array."""
    if isinstance(text, list | tuple):
        return bool(text) and all(isinstance(one, Integral) and not isinstance(one, bool) for one in text)
    if isinstance(text, Tensor):
        return text.dim() == 1 and not (
            text.is_floating_point() or text.is_complex() or text.dtype == torch.bool
        )
    return isinstance(text, np.ndarray) and text.ndim == 1 and np.issubdtype(text.dtype, np.integer)


def _is_chat(text: object) -> TypeGuard[Sequence[Mapping[str, object]]]:
    """Whether it is a list of messages."""
    return (
        isinstance(text, list | tuple)
        and bool(text)
        and all(isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in text)
    )


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
