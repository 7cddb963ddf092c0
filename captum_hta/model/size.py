"""The dimensions of a transformer and what they cost in floating-point operations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """The dimensions of a transformer that decide what contributions cost.

    Attributes:
        layers: Number of blocks.
        heads: Query heads of a block.
        width: Width ``D`` of a hidden embedding.
        inner: Inner width of the feed-forward part.
        d_head: Width of a head's output. Default: ``None``, ``width / heads``.
        key_heads: Heads of keys and values. Default: ``None``, as many as ``heads``.
        gated: Whether the feed-forward part has a third matrix, a gate.
        causal: Whether queries attend to no later keys.
        closed_form: Whether the closed form gives the previous-layer contribution.
    """

    layers: int
    heads: int
    width: int
    inner: int
    d_head: int | None = None
    key_heads: int | None = None
    gated: bool = False
    causal: bool = False
    closed_form: bool = True

    @property
    def _d_head(self) -> int:
        return self.d_head or self.width // self.heads

    def projections(self, tokens: int) -> float:
        """FLOPs of the query, key and value projections for one tangent of all tokens."""
        out = self._d_head * (self.heads + 2 * (self.key_heads or self.heads))
        return 2.0 * tokens * self.width * out

    def attention(self, tokens: int) -> float:
        """FLOPs of scores and values for one tangent, where both factors of each product carry one."""
        return 8.0 * tokens**2 * self._d_head * self.heads

    def output(self, tokens: int) -> float:
        """FLOPs of the output projection for one tangent of all tokens."""
        return 2.0 * tokens * self._d_head * self.heads * self.width

    def feed_forward(self, tokens: int) -> float:
        """FLOPs of the feed-forward part for one tangent of all tokens."""
        return 2.0 * (2 + self.gated) * tokens * self.width * self.inner
