"""The precision of computations, set for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from captum_hta.model.process_settings import Turn

PRECISIONS = ("highest", "high", "medium")


PRECISION = Turn()
"""The turn to set the precision, which is a setting of the process."""


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
    with PRECISION.taken():
        before = torch.get_float32_matmul_precision()
        with PRECISION.changed(
            lambda: torch.set_float32_matmul_precision(precision),
            lambda: torch.set_float32_matmul_precision(before),
        ):
            yield


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute without autocast, and matrix products in the highest precision, within the context."""
    with matmul_precision("highest"), ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
