"""Batch sizes: how many texts a model reads at once, and which of them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from captum_hta.model.encoding import Encoding

BATCH_TOKENS = 1024
"""Largest number of positions in a batch, including padding; larger matrices are no faster."""

PADDING_SHARE = 1 / 8
"""Largest share of a batch that may be padding."""

GROUP = 4
"""Number of texts of a corpus that are attributed together; small, so that progress is even."""


def batches_of(encodings: Sequence[Encoding]) -> Iterator[list[int]]:
    """Row numbers of each batch: texts of similar lengths and the same regime, or images of one size."""
    sizes: dict[object, list[int]] = {}
    for row, encoding in enumerate(encodings):
        shape = None if encoding.content is None else encoding.content.shape
        sizes.setdefault((shape, encoding.regime), []).append(row)
    for same in sizes.values():
        for rows in batches([len(encodings[row]) for row in same]):
            yield [same[row] for row in rows]


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Row numbers of each batch of sequences with these lengths, the shortest first.

    A batch has at most :data:`BATCH_TOKENS` positions, of which at most :data:`PADDING_SHARE` are padding.
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
    """Row numbers of at most :data:`GROUP` texts of similar lengths at a time."""
    for rows in batches(lengths):
        for start in range(0, len(rows), GROUP):
            yield rows[start : start + GROUP]
