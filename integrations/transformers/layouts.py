"""The layout of attention: how queries, keys and values are computed, as the closed form needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Layout:
    """What the structure of a model does not tell about its attention.

    Attributes:
        projections: Within the attention module, the modules that compute queries, keys and values, or the
            single module that computes all three; empty if the closed form is not known.
        joined: How a single module computes all three: ``"parts"``, one after the other; ``"heads"``, the
            three of each head together.
        norm: The module of a block that normalises the input of the projections; ``None`` for post-LN blocks.
        unit_offset: Whether the norm's weight is stored as its difference from one.
        scales_queries: Whether queries are multiplied by the ``scaling`` of ``attention`` when they are
            computed, instead of the scores.
    """

    projections: tuple[str, ...] = ()
    joined: Literal["", "parts", "heads"] = ""
    norm: str | None = None
    unit_offset: bool = False
    scales_queries: bool = False
