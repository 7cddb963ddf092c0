"""What is asked of the Jacobian blocks between sources and targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def _no_progress(count: int) -> None:
    """Take no notice of progress."""


@dataclass(frozen=True)
class Request:
    """What is asked of the Jacobian blocks of one forward pass.

    Attributes:
        norm: One of :data:`captum_hta.jacobian.norms.NORMS`.
        heads: For each target the number of equal parts of its width.
        queries: Query positions ``[query]``, or ``None`` for all.
        multiply_by_inputs: Scale column ``d`` of a block by ``x_i[d]``.
        directions: For each target vectors ``[batch, head, query, d_head]`` that its blocks are multiplied
            by from the left; ``None``: whole blocks.
        advance: Called with the number of tangents or cotangents that have been carried.
    """

    norm: str
    heads: Sequence[int]
    queries: Tensor | None = None
    multiply_by_inputs: bool = False
    directions: Sequence[Tensor] | None = None
    advance: Callable[[int], object] = _no_progress

    def select(self, positions: Tensor, target: int) -> Tensor:
        """``[..., query, head, d_head]`` of ``[..., position, width]`` for the target of that index."""
        if self.queries is not None:
            positions = positions.index_select(-2, self.queries)
        return positions.unflatten(-1, (self.heads[target], -1))


def joined_heads(target: Tensor) -> Tensor:
    """A target ``[batch, position, head, d_head]`` or ``[batch, position, width]`` as the latter."""
    return target.flatten(2) if target.dim() == 4 else target


def query_positions(
    selector: int | slice | Sequence[int] | Tensor | None, length: int, device: torch.device
) -> Tensor | None:
    """The positions ``[query]`` that a ``neuron_selector`` names, or ``None`` for all.

    Raises:
        ValueError: If a position lies outside the sequence.
        TypeError: If the selector is none of the kinds above.

    Example:
        >>> query_positions(slice(1, None, 2), 6, torch.device("cpu")).tolist()
        [1, 3, 5]
        >>> query_positions(-1, 6, torch.device("cpu")).tolist()
        [5]
    """
    if selector is None:
        return None
    if isinstance(selector, slice):
        return torch.arange(length, device=device)[_forwards(selector, length)]
    if isinstance(selector, Tensor):
        selector = selector.tolist()
    if isinstance(selector, int) and not isinstance(selector, bool):
        selector = [selector]
    if not isinstance(selector, list | tuple | range) or not all(_is_position(p) for p in selector):
        raise TypeError(
            f"neuron_selector names query positions: an int, a slice, or a list of ints, got {selector!r}"
        )
    outside = [position for position in selector if not -length <= position < length]
    if outside or not len(selector):
        raise ValueError(
            f"neuron_selector names {outside or 'no positions'}, but the target has positions 0 to "
            f"{length - 1}"
        )
    return torch.tensor([position % length for position in selector], device=device)


def _is_position(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _forwards(selector: slice, length: int) -> slice | list[int]:
    """A tensor does not index with a negative step or an empty range."""
    positions = list(range(length))[selector]
    if not positions:
        raise ValueError(f"neuron_selector {selector} is empty for a target of {length} positions")
    return positions


def check_probes(n_probes: int | None, tolerance: float | None, norm: str, with_error: bool = False) -> None:
    """Check the arguments that ask for an estimate.

    Raises:
        ValueError: If they are out of their range, or no estimate of the norm exists.
    """
    if n_probes is not None and (not isinstance(n_probes, int) or n_probes < 1):
        raise ValueError(f"n_probes must be a positive int or None, got {n_probes!r}")
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"tolerance must be positive or None, got {tolerance!r}")
    if norm == "spectral" and (n_probes is not None or tolerance is not None):
        raise ValueError(
            "probes do not estimate a spectral norm: leave out n_probes and tolerance, or use the norm "
            "'frobenius'"
        )
    if n_probes == 1 and (with_error or tolerance is not None):
        raise ValueError("one probe has no standard error: use at least two")
