"""Where the time of a long run goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Stopwatch:
    """Seconds by what they were spent on.

    Attributes:
        seconds: By name, in the order in which they came first.

    Example:
        >>> watch = Stopwatch()
        >>> with watch("reading"):
        ...     total = sum(range(1000))
        >>> list(watch.seconds)
        ['reading']
    """

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count what happens inside under that name."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def merge(self, other: Stopwatch) -> None:
        """Add what another has counted."""
        for name, seconds in other.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
