"""The precision of float32 matrix products, set for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PRECISIONS = ("highest", "high", "medium")


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """The precision of float32 matrix products, as it was before on any exit.

    Raises:
        ValueError: If ``precision`` is not ``"highest"``, ``"high"`` or ``"medium"``.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
