"""Texts in, encodings out: checked, truncated, batched by length, grouped into words."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterable, Iterator, Sequence

from captum_hta.model.encoding import Encoding, Text
from captum_hta.model.protocol import Model

logger = logging.getLogger(__name__)

BATCH_TOKENS = 1024
"""Positions of a batch, padding included. More gain nothing: the products are large enough."""


PADDING_SHARE = 1 / 8
"""Share of a batch that padding may be."""


GROUP = 4
"""Texts of a corpus that are attributed together: few, for an even progress."""


def batches_of(encodings: Sequence[Encoding]) -> Iterator[list[int]]:
    """Numbers of texts of like lengths; of images, of one size."""
    sizes: dict[object, list[int]] = {}
    for row, encoding in enumerate(encodings):
        sizes.setdefault(None if encoding.content is None else encoding.content.shape, []).append(row)
    for same in sizes.values():
        for rows in batches([len(encodings[row]) for row in same]):
            yield [same[row] for row in rows]


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Group sequences of like lengths, the shortest first: at most :data:`BATCH_TOKENS` positions, of
    which at most :data:`PADDING_SHARE` are padding.
    """
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (lengths[row], row)):
        positions = (len(rows) + 1) * lengths[row]
        real = sum(lengths[r] for r in rows) + lengths[row]
        if rows and (positions > BATCH_TOKENS or positions - real > PADDING_SHARE * positions):
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of texts of like lengths, :data:`GROUP` at a time."""
    for rows in batches(lengths):
        for start in range(0, len(rows), GROUP):
            yield rows[start : start + GROUP]


def listed(model: Model, texts: Sequence[Text] | Text) -> list[Text]:
    """Texts, or what else the model reads, as a list.

    Raises:
        ValueError: If there is none.
        TypeError: If the model does not read one of them.
    """
    if isinstance(texts, str) or (not isinstance(texts, tuple | list) and model.reader.accepts(texts)):
        texts = [texts]
    if not isinstance(texts, Iterable):
        raise TypeError(f"texts must be a list, each of them {model.reader.reads}, got {texts!r}")
    texts, medium = list(texts), model.reader.medium
    if not texts:
        raise ValueError(f"there is no {medium}: pass a list, each of them {model.reader.reads}")
    for number, text in enumerate(texts):
        if not model.reader.accepts(text):
            raise TypeError(f"{medium} {number} must be {model.reader.reads}, got {reprlib.repr(text)}")
    return texts


def encoded(model: Model, text: Text, number: int, truncation: bool = False) -> Encoding:
    """The text of that number as the model reads it.

    Raises:
        ValueError: If it has no token, or more than the model reads and ``truncation`` is not allowed.
    """
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


def text_lengths(encoding: Encoding) -> list[int]:
    """Tokens of a text and of its context; images and audio, which are never cut, are left out."""
    both = (encoding, encoding.context)
    return [len(one) for one in both if one is not None and one.content is None]


def missing_tokens(model: Model, text: Text, encoding: Encoding) -> int:
    """How many tokens of a text its encoding lacks."""
    lengths = text_lengths(encoding)
    if model.max_length not in lengths:
        return 0
    return sum(text_lengths(model.encode(text))) - sum(lengths)


def cut_tokens(model: Model, texts: Sequence[Text], encodings: Sequence[Encoding]) -> list[int]:
    """How many tokens of each text are missing."""
    cut = [missing_tokens(model, *pair) for pair in zip(texts, encodings, strict=True)]
    if any(cut):
        rows = ", ".join(f"{count} of text {number}" for number, count in enumerate(cut) if count)
        logger.warning("tokens left out, since %s reads %d: %s", model.name, model.max_length, rows)
    return cut


def word_groups(encoding: Encoding) -> tuple[list[int], list[str]]:
    """For each token the number of its word or special token, in the order of the text; and their labels.

    Raises:
        ValueError: If the words are not known.
    """
    if encoding.words is None or encoding.word_labels is None:
        raise ValueError(
            "images and audio are not made of words"
            if encoding.content is not None
            else "the tokenizer does not tell which tokens make a word: use a fast tokenizer"
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
