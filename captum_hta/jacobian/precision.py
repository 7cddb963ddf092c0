"""The precision of float32 matrix products, set for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LOCK = threading.RLock()
PRECISIONS = ("highest", "high", "medium")


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """The precision of float32 matrix products, as it was before on any exit.

    The setting is the process's, so one thread at a time is let in. That also keeps apart derivatives in
    forward mode, whose levels PyTorch counts for the process.

    Raises:
        ValueError: If ``precision`` is not ``"highest"``, ``"high"`` or ``"medium"``.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}")
    with _LOCK:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
