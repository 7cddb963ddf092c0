"""Batches of texts of similar lengths."""

from __future__ import annotations

import pytest
import torch

from captum_hta.batching import BATCH_TOKENS, PADDING_SHARE, batches


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([5], [[0]]),
        ([7, 7, 7], [[0, 1, 2]]),
        ([9, 3, 9, 3], [[1, 3], [0, 2]]),
        ([8, 7], [[1, 0]]),
        ([8, 5], [[1], [0]]),
        ([512, 512, 512], [[0, 1], [2]]),
        ([2000, 2000], [[0], [1]]),
        ([1024, 1], [[1], [0]]),
    ],
)
def test_batches(lengths: list[int], expected: list[list[int]]) -> None:
    """Similar lengths share a batch, the shortest first, within both limits."""
    assert list(batches(lengths)) == expected


@pytest.mark.parametrize("seed", range(5))
def test_batches_of_random_lengths(seed: int) -> None:
    """Every row occurs once, in order of length, and no batch exceeds a limit."""
    lengths = torch.randint(2, 300, (200,), generator=torch.Generator().manual_seed(seed)).tolist()
    found = list(batches(lengths))
    flat = [row for rows in found for row in rows]
    assert sorted(flat) == list(range(200))
    assert [lengths[row] for row in flat] == sorted(lengths)
    for rows in found:
        positions = len(rows) * max(lengths[row] for row in rows)
        assert positions <= BATCH_TOKENS
        assert positions - sum(lengths[row] for row in rows) <= PADDING_SHARE * positions
    assert len(found) < 60
