"""Which mode is the cheapest, what it costs, and how many tangents are carried at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import psutil
import torch

MODES = ("closed form", "forward", "reverse", "probes")
REVERSE_OVERHEAD = 1.5
"""How many times longer autograd takes for a backward pass than a forward sweep of as many operations."""
MEMORY_SHARE = 0.25
"""Share of the available memory that may be used."""
CPU_MEMORY = 2 << 30
"""Bytes of memory that are used on a CPU at most."""
CACHE = 12 << 20
"""Bytes of a stack of tangents that runs fastest on a CPU: it stays in the outer caches."""
LIVE_STACKS = 6
"""Stacks of the widest tangent that are alive at once, with the intermediate results of one operator."""


@dataclass(frozen=True)
class Costs:
    """The numbers that decide what each mode costs for one query.

    Attributes:
        tokens: Source tokens of the longest example, over all sources.
        directions: Tangents of each source token: its width, or the number of its probes.
        cotangents: For each target the number of cotangents.
        push_flops: For each target, the operations that carry one tangent of the batch to it.
        pull_flops: For each target, those that carry one cotangent of the batch back.
        tangent_bytes: Bytes of the widest tangent of the batch.
        preparation_flops: Operations before the first tangent.
        preparation_bytes: Bytes of memory that they fill for all tangents.
        is_estimate: Whether the directions are probes.
        device: Where the model runs.
    """

    tokens: int
    directions: int
    cotangents: Sequence[int]
    push_flops: Sequence[float]
    pull_flops: Sequence[float]
    tangent_bytes: float
    preparation_flops: float = 0.0
    preparation_bytes: float = 0.0
    is_estimate: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def tangents(self) -> int:
        """The number of tangents."""
        return self.tokens * self.directions


@dataclass(frozen=True)
class Plan:
    """A mode and what it costs.

    Attributes:
        mode: One of :data:`MODES`.
        flops: Floating-point operations of its matrix products, ``None`` where they were not counted.
        memory: Bytes of extra memory at its peak, roughly.
        chunk: Tangents or cotangents of the batch that are carried at once, ``None`` where there are none.
        reason: Why this mode.
        probes: Probes of each source token, for estimates.
    """

    mode: str
    flops: float | None
    memory: float
    chunk: int | None
    reason: str
    probes: int | None = None

    def __str__(self) -> str:
        flops = "FLOP not counted" if self.flops is None else f"{si(self.flops)}FLOP"
        at_once = "" if self.chunk is None else f", {self.chunk} at a time"
        return f"{self.mode} ({self.reason}): {flops}{at_once} in about {si(self.memory)}B"


def plan(costs: Costs, mode: str | None = None, chunk: int | None = None) -> Plan:
    """Choose the cheapest mode that can give the result.

    Args:
        costs: What each mode costs.
        mode: Force one of :data:`MODES`.
        chunk: Force the number of tangents or cotangents carried at once.

    Raises:
        ValueError: If ``mode`` cannot give the result.

    Example:
        >>> costs = Costs(tokens=32, directions=384, cotangents=[32 * 384] * 6,
        ...               push_flops=[1e8 * k for k in range(1, 7)],
        ...               pull_flops=[1e8 * k for k in range(1, 7)], tangent_bytes=2e5)
        >>> plan(costs).mode
        'forward'
        >>> print(plan(costs, mode="reverse"))
        reverse (asked for): 25.8 TFLOP, 62 at a time in about 74.4 MB
    """
    plans = {one.mode: one for one in _valid_plans(costs, chunk)}
    if mode is None:
        return next(iter(plans.values()))
    if mode not in plans:
        raise ValueError(f"the mode {mode!r} cannot give this result; valid here: {', '.join(plans)}")
    return replace(plans[mode], reason="asked for", probes=None)


def _valid_plans(costs: Costs, chunk: int | None) -> list[Plan]:
    """Plans of the modes that can give the result, the fastest first."""
    chunk = chunk or chunk_size(costs.tangent_bytes, costs.device)
    memory = LIVE_STACKS * chunk * costs.tangent_bytes
    kept = costs.preparation_bytes + memory
    pushed = costs.preparation_flops + costs.tangents * max(costs.push_flops, default=0)
    if costs.is_estimate:
        return [Plan("probes", pushed, kept, chunk, f"{costs.directions} a token", costs.directions)]
    pulled = sum(n * flops for n, flops in zip(costs.cotangents, costs.pull_flops, strict=True))
    forward = Plan("forward", pushed, kept, chunk, f"{costs.tangents} tangents")
    reverse = Plan("reverse", pulled, memory, chunk, f"{sum(costs.cotangents)} cotangents")
    return [forward, reverse] if pushed <= REVERSE_OVERHEAD * pulled else [reverse, forward]


def chunk_size(tangent_bytes: float, device: torch.device) -> int:
    """Tangents to carry at once: as many as the caches of a CPU or the memory of a device hold."""
    limit = memory_budget(device) / LIVE_STACKS
    if device.type == "cpu":
        limit = min(limit, CACHE)
    return max(1, int(limit // max(tangent_bytes, 1)))


def memory_budget(device: torch.device) -> float:
    """Bytes of memory that an attribution may take in addition to the model."""
    if device.type == "cuda":
        return MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu":
        available: int = psutil.virtual_memory().available
        return min(MEMORY_SHARE * available, CPU_MEMORY)
    return CPU_MEMORY


def si(value: float) -> str:
    """``value`` with three digits and a decimal prefix, ready for its unit."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 1000 or prefix == "P":
            return f"{value:.3g} {prefix}"
        value /= 1000
    raise AssertionError("unreachable")
