"""Which mode to an attribution is the cheapest, what it costs, and how much is carried at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil
import torch

MODES = ("closed form", "forward", "reverse", "probes")
REVERSE_OVERHEAD = 1.5
"""A backward pass through autograd takes about this times as long as the same FLOPs of a sweep."""
MEMORY_SHARE = 0.25
"""Share of the available memory that may be used."""
CPU_MEMORY = 2 << 30
"""But at most these bytes on a CPU."""
CACHE = 12 << 20
"""On a CPU, stacks of tangents of about these bytes run fastest: they stay in the outer caches."""
LIVE_STACKS = 6
"""Stacks of the widest tangent that are alive at once, with what an operator makes on its way."""


@dataclass(frozen=True)
class Work:
    """What is asked for, in the numbers that decide its cost.

    Attributes:
        tokens: Source tokens of the longest example, over all sources.
        width: Their dimension ``D``.
        queries: Query positions asked for.
        heads: Parts of each target.
        target_widths: Width of each target.
        push_flops: For each target, the operations that carry one tangent of the batch to it.
        pull_flops: For each target, those that carry one cotangent of the batch back.
        tangent_bytes: Bytes of the widest tangent of the batch.
        preparation_flops: Operations before the first tangent.
        preparation_bytes: Bytes that they leave behind for all tangents.
        norm: The norm asked for.
        along_direction: Whether one vector of each head is asked for, instead of all its components.
        n_probes: Probes per source token; ``None`` for an exact result.
        closed_form: Operations of the closed form, where it holds.
        device: Where the model runs.
    """

    tokens: int
    width: int
    queries: int
    heads: int
    target_widths: Sequence[int]
    push_flops: Sequence[float]
    pull_flops: Sequence[float]
    tangent_bytes: float
    preparation_flops: float = 0.0
    preparation_bytes: float = 0.0
    norm: str = "frobenius"
    along_direction: bool = False
    n_probes: int | None = None
    closed_form: float | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def cotangents(self) -> list[int]:
        """Cotangents of each target in the reverse mode: one a component, or one a head for sums."""
        summed = self.norm == "sum" or self.along_direction
        rows = [self.heads if summed else width for width in self.target_widths]
        return [self.queries * count for count in rows]


@dataclass(frozen=True)
class Plan:
    """A mode and what it costs.

    Attributes:
        mode: One of :data:`MODES`.
        flops: Floating-point operations of its matrix products, ``None`` where they were not counted.
        memory: Bytes of extra memory at its peak, roughly.
        chunk: Tangents or cotangents of the batch that are carried at once, ``None`` where there are none.
        reason: Why this way.
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


def plan(work: Work, mode: str | None = None, chunk: int | None = None) -> Plan:
    """Choose the cheapest mode that is valid for the work.

    Args:
        work: What is asked for.
        mode: Force one of :data:`MODES`.
        chunk: Force the number of tangents or cotangents carried at once.

    Raises:
        ValueError: If ``mode`` is not a mode, or not valid for this work.

    Example:
        >>> work = Work(tokens=32, width=384, queries=32, heads=12, target_widths=[384] * 6,
        ...             push_flops=[1e8 * k for k in range(1, 7)],
        ...             pull_flops=[1e8 * k for k in range(1, 7)], tangent_bytes=2e5)
        >>> plan(work).mode
        'forward'
        >>> print(plan(work, mode="reverse"))
        reverse (asked for): 25.8 TFLOP, 62 at a time in about 74.4 MB
    """
    plans = {candidate.mode: candidate for candidate in _candidates(work, chunk)}
    if mode is None:
        return next(iter(plans.values()))
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}")
    if mode not in plans:
        raise ValueError(f"the mode {mode!r} cannot give this result; valid here: {', '.join(plans)}")
    chosen = plans[mode]
    return Plan(chosen.mode, chosen.flops, chosen.memory, chosen.chunk, "asked for")


def _candidates(work: Work, chunk: int | None) -> list[Plan]:
    """The valid modes, the best first."""
    chunk = chunk or chunk_size(work.tangent_bytes, work.device)
    memory = LIVE_STACKS * chunk * work.tangent_bytes
    deepest = max(work.push_flops, default=0)
    if work.n_probes is not None:
        tangents = work.n_probes * work.tokens
        flops = work.preparation_flops + tangents * deepest
        kept = work.preparation_bytes + memory
        return [Plan("probes", flops, kept, chunk, f"{work.n_probes} a token", work.n_probes)]
    kept = work.preparation_bytes + memory
    tangents, cotangents = work.tokens * work.width, sum(work.cotangents)
    pulled = zip(work.cotangents, work.pull_flops, strict=True)
    pushed = work.preparation_flops + tangents * deepest
    forward = Plan("forward", pushed, kept, chunk, f"{tangents} tangents")
    reverse = Plan(
        "reverse", sum(n * flops for n, flops in pulled), memory, chunk, f"{cotangents} cotangents"
    )
    modes = sorted((forward, reverse), key=_time)
    if work.closed_form is not None:
        modes.insert(0, Plan("closed form", work.closed_form, memory, None, "no tangents"))
    return modes


def _time(candidate: Plan) -> float:
    return candidate.flops * (REVERSE_OVERHEAD if candidate.mode == "reverse" else 1)


def chunk_size(tangent_bytes: float, device: torch.device) -> int:
    """Tangents to carry at once: as many as the caches of a CPU or the memory of a device hold."""
    limit = memory_budget(device) / LIVE_STACKS
    if device.type == "cpu":
        limit = min(limit, CACHE)
    return max(1, int(limit // max(tangent_bytes, 1)))


def memory_budget(device: torch.device) -> float:
    """Bytes of extra memory that an attribution may take."""
    if device.type == "cuda":
        return MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu":
        return min(MEMORY_SHARE * psutil.virtual_memory().available, CPU_MEMORY)
    return CPU_MEMORY


def si(value: float) -> str:
    """``value`` with three digits and a decimal prefix, ready for its unit."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 1000 or prefix == "P":
            return f"{value:.3g} {prefix}"
        value /= 1000
    raise AssertionError("unreachable")
