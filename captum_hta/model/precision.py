"""The precision of computations, set for a while."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

PRECISIONS = ("highest", "high", "medium")


class _Turn:
    """The turn of one thread to set the precision, which is a setting of the process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.holder: int | None = None
        self.before = ""  # the precision before the holder's first setting

    def after_fork(self) -> None:
        """Take back, in a child process, the turn of a thread that only the parent has."""
        if self.holder in (None, threading.get_ident()):
            return
        torch.set_float32_matmul_precision(self.before)
        self.lock, self.holder = threading.RLock(), None


_turn = _Turn()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turn.after_fork)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """The precision of float32 matrix products, as it was before on any exit.

    The setting is the process's, so only one thread at a time may enter. That also separates derivatives
    in forward mode, whose levels PyTorch counts for the whole process.

    Raises:
        ValueError: If ``precision`` is not ``"highest"``, ``"high"`` or ``"medium"``.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}")
    with _turn.lock:
        before, holder = torch.get_float32_matmul_precision(), _turn.holder
        if holder is None:
            _turn.before, _turn.holder = before, threading.get_ident()
        torch.set_float32_matmul_precision(precision)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
            _turn.holder = holder


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute without autocast, and matrix products in the highest precision, within the context."""
    with matmul_precision("highest"), ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
