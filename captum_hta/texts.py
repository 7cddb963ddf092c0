"""Texts as models read them: checked, encoded, truncated and grouped into words."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from captum_hta.model.encoding import Encoding
from captum_hta.model.protocol import Model, Reader, check_model

logger = logging.getLogger(__name__)

CHARACTERS = 64
"""Largest number of characters a token, on average over a text."""

LONGEST = 131072
"""Largest number of tokens of a text for models without a limit."""


def listed(model: Model, texts: object) -> list[Any]:
    """One or several texts, images or audio clips, as a list.

    Raises:
        ValueError: If there is none.
        TypeError: If the model does not read one of them.
    """
    check_model(model)
    reader = model.reader
    if _is_one_text(reader, texts):
        texts = [texts]
    if not isinstance(texts, Iterable) or isinstance(texts, bytes | bytearray | Set):
        raise TypeError(
            f"texts must be a list, each of them {reader.reads}, got a {type(texts).__name__}: "
            f"{reprlib.repr(texts)}"
        )
    if isinstance(texts, Mapping) or (hasattr(texts, "columns") and hasattr(texts, "keys")):
        raise TypeError(
            f"texts must be a list, each of them {reader.reads}, got a {type(texts).__name__}, which is a "
            'table of named columns: pass its rows, such as table["text"] or list(zip(table["first"], '
            'table["second"]))'
        )
    rows = list(texts)
    if not rows:
        raise ValueError(f"there is no {reader.medium}: pass a list, each of them {reader.reads}")
    for number, text in enumerate(rows):
        if not reader.accepts(text):
            raise TypeError(f"{reader.medium} {number} must be {reader.reads}, got {reprlib.repr(text)}")
    return rows


def _is_one_text(reader: Reader, texts: object) -> bool:
    """Whether these are one text: two strings in a list are two texts, token ids or messages are one."""
    if isinstance(texts, str):
        return True
    if not reader.accepts(texts):
        return False
    return not isinstance(texts, tuple | list) or not all(reader.accepts(one) for one in texts)


def encoded(model: Model, text: object, number: int, truncation: bool = False) -> Encoding:
    """Encode a text.

    Args:
        model: The model that reads it.
        text: The text.
        number: The number of the text, for error messages.
        truncation: Cut a text that is longer than the model reads.

    Raises:
        ValueError: If the text has no token, or is too long and may not be cut.
    """
    _check_characters(model, text, number)
    encoding = model.encode(text)
    if not len(encoding):
        raise ValueError(f"text {number} has no token: {text!r}")
    length = max(text_lengths(encoding), default=0)
    if model.max_length is not None and length > model.max_length:
        if truncation:
            return model.encode(text, model.max_length)
        raise ValueError(
            f"text {number} has {length} tokens, but {model.name} reads at most {model.max_length}: shorten "
            "it, or let truncation=True (--truncation) cut it"
        )
    return encoding


def _check_characters(model: Model, text: object, number: int) -> None:
    """Refuse a text that is far too long before it is tokenised, which takes much memory.

    Raises:
        ValueError: If it has more than :data:`CHARACTERS` for each token that the model reads.
    """
    parts = text if isinstance(text, tuple | list) else [text]
    strings = [part.get("content") if isinstance(part, Mapping) else part for part in parts]
    count = sum(len(one) for one in strings if isinstance(one, str))
    longest = LONGEST if model.max_length is None else min(model.max_length, LONGEST)
    if count > CHARACTERS * longest:
        raise ValueError(
            f"text {number} has {count} characters, but {model.name} reads at most {longest} tokens, which "
            f"are fewer than {CHARACTERS * longest} characters: cut the text"
        )


def text_lengths(encoding: Encoding) -> list[int]:
    """The token counts of a text and of its context, without images and audio, which are never cut."""
    both = (encoding, encoding.context)
    return [len(one) for one in both if one is not None and one.content is None]


def missing_tokens(model: Model, text: object, encoding: Encoding) -> int:
    """The number of tokens that truncation removed from a text."""
    lengths = text_lengths(encoding)
    if model.max_length not in lengths:
        return 0
    return sum(text_lengths(model.encode(text))) - sum(lengths)


def cut_tokens(model: Model, texts: Sequence[object], encodings: Sequence[Encoding]) -> list[int]:
    """The number of tokens that truncation removed from each text, with a warning if there are any."""
    cut = [missing_tokens(model, *pair) for pair in zip(texts, encodings, strict=True)]
    if any(cut):
        rows = ", ".join(f"{count} of text {number}" for number, count in enumerate(cut) if count)
        logger.warning("tokens left out, since %s reads at most %d: %s", model.name, model.max_length, rows)
    return cut


def word_groups(encoding: Encoding) -> tuple[list[int], list[str]]:
    """The words and special tokens of a text, in order.

    Returns:
        The number of each token's word or special token, and the labels of those.

    Raises:
        ValueError: If the words are unknown.
    """
    if encoding.words is None or encoding.word_labels is None:
        raise ValueError(
            "images and audio are not made of words"
            if encoding.content is not None
            else "it is not known which tokens form a word: use a fast tokenizer, and strings, not token ids"
        )
    groups: list[int] = []
    labels: list[str] = []
    known: dict[int, int] = {}
    for token, word in zip(encoding.tokens, encoding.words, strict=True):
        if word is None or word not in known:
            labels.append(token if word is None else encoding.word_labels[word])
            if word is not None:
                known[word] = len(labels) - 1
        groups.append(len(labels) - 1 if word is None else known[word])
    return groups, labels
