"""Batch sizes: how many texts a model reads at once, and which of them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from captum_hta.model.encoding import Encoding

BATCH_TOKENS = 1024
"""Most positions of a batch, including padding. Matrices are then so large that more gain nothing."""

PADDING_SHARE = 1 / 8
"""Largest share of a batch that may be padding."""

GROUP = 4
"""Texts of a corpus that are attributed together; few, so that progress is even."""


def batches_of(encodings: Sequence[Encoding]) -> Iterator[list[int]]:
    """Batches of row numbers: texts of similar lengths and one regime, images of one size."""
    sizes: dict[object, list[int]] = {}
    for row, encoding in enumerate(encodings):
        shape = None if encoding.content is None else encoding.content.shape
        sizes.setdefault((shape, encoding.regime), []).append(row)
    for same in sizes.values():
        for rows in batches([len(encodings[row]) for row in same]):
            yield [same[row] for row in rows]


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Batches of row numbers for sequences of these lengths, the shortest first.

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
    """Row numbers of texts of similar lengths, :data:`GROUP` at a time."""
    for rows in batches(lengths):
        for start in range(0, len(rows), GROUP):
            yield rows[start : start + GROUP]
