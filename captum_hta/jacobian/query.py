"""A query: what a user asks for, and what that means for one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from captum_hta.jacobian.arguments import (
    as_int,
    choice,
    flag,
    integer,
    is_integer,
    optional_count,
    optional_positive,
)
from captum_hta.jacobian.norms import NORMS
from captum_hta.jacobian.plan import MODES
from captum_hta.model.precision import PRECISIONS

Selector = int | slice | Sequence[int] | Tensor | None
"""Positions: one, a range, several, or ``None`` for all."""


@dataclass(frozen=True, eq=False)
class Query:
    """What a user asks for, independent of the model. Its fields are checked on creation.

    Attributes:
        norm: One of :data:`captum_hta.jacobian.norms.NORMS`.
        multiply_by_inputs: Scale column ``d`` of each Jacobian by ``x_i[d]``.
        direction: Vectors that multiply Jacobians from the left, as
            :func:`captum_hta.jacobian.target_directions.directions_for` takes them. ``None``: whole
            Jacobians.
        neuron_selector: Query positions, as :func:`query_positions` takes them; ``None`` for all.
        n_probes: Probes of each source token, or ``None`` for an exact result.
        tolerance: Double the probes until every standard error is at most this.
        seed: Seed of the probes.
        mode: Force one of :data:`captum_hta.jacobian.plan.MODES`; ``None``: the cheapest.
        precision: Precision of float32 matrix products, as ``torch.set_float32_matmul_precision`` takes it.

    Raises:
        ValueError: If an argument is out of its range, or does not go with another one.
        TypeError: If an argument is of a wrong type.
    """

    norm: str = "frobenius"
    multiply_by_inputs: bool = False
    direction: Tensor | Sequence[Tensor] | None = None
    neuron_selector: Selector = None
    n_probes: int | None = None
    tolerance: float | None = None
    seed: int = 0
    mode: str | None = None
    precision: str = "highest"

    def __post_init__(self) -> None:
        checked = {
            "norm": choice("norm", self.norm, NORMS),
            "multiply_by_inputs": flag("multiply_by_inputs", self.multiply_by_inputs),
            "n_probes": optional_count("n_probes", self.n_probes),
            "tolerance": optional_positive("tolerance", self.tolerance),
            "seed": integer("seed", self.seed),
            "mode": None if self.mode is None else choice("mode", self.mode, MODES),
            "precision": choice("precision", self.precision, PRECISIONS),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._check_estimate()
        self._check_direction()

    def _check_estimate(self) -> None:
        if NORMS[self.norm].of_gram is not None and self.is_estimate:
            raise ValueError(
                f"probes do not estimate a {self.norm} norm: leave out n_probes and tolerance, or use the "
                "norm 'frobenius'"
            )
        if self.n_probes == 1 and self.tolerance is not None:
            raise ValueError(ONE_PROBE)

    def _check_direction(self) -> None:
        if self.direction is None:
            return
        if self.norm != "frobenius":
            raise ValueError(
                f"along a direction the norm is the length of a vector: leave out norm={self.norm!r}"
            )
        if self.is_estimate:
            raise ValueError(
                "along a direction the exact result takes one backward pass for each head and query: leave "
                "out n_probes and tolerance"
            )
        if self.mode not in (None, "reverse"):
            raise ValueError(
                f"along a direction the mode must be 'reverse', got {self.mode!r}: leave out mode"
            )

    @property
    def is_estimate(self) -> bool:
        """Whether probes are asked for."""
        return self.n_probes is not None or self.tolerance is not None

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for queries that ask the same: their values, and tensors by identity."""
        return tuple(_identity(getattr(self, field.name)) for field in fields(self))

    def cotangents(self, queries: int, heads: int, width: int) -> int:
        """Backward passes for one target: one for each component, or for each head where these are summed."""
        summed = NORMS[self.norm].weights is not None or self.direction is not None
        return queries * (heads if summed else width)


ONE_PROBE = "one probe has no standard error: use at least two"


def _identity(value: object) -> object:
    if isinstance(value, Tensor):
        return Tensor, id(value)
    if isinstance(value, slice):
        return slice, value.start, value.stop, value.step
    return tuple(map(_identity, value)) if isinstance(value, list | tuple) else value


def _no_progress(count: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class ResolvedQuery:
    """What a query means for the sources and targets of one forward pass.

    Attributes:
        query: The query.
        heads: For each target the number of heads, ``None`` for a target without a head axis.
        positions: Query positions ``[query]``, or ``None`` for all.
        directions: For each target vectors ``[batch, head, query, d_head]`` that Jacobians are multiplied by
            from the left; ``None``: whole Jacobians.
        streams: For each example the integers that name its stream of random numbers.
        advance: Called with the number of tangents or cotangents that have been carried.
    """

    query: Query
    heads: Sequence[int | None]
    positions: Tensor | None = None
    directions: Sequence[Tensor] | None = None
    streams: Sequence[tuple[int, ...]] = ()
    advance: Callable[[int], object] = _no_progress

    def parts(self, target: int) -> int:
        """The number of equal parts of the width of the target with that index."""
        return self.heads[target] or 1

    def queries(self, length: int) -> int:
        """The number of query positions in a target of this length."""
        return length if self.positions is None else len(self.positions)

    def select(self, values: Tensor, target: int) -> Tensor:
        """``[..., query, head, d_head]`` from ``[..., position, width]``, for the target with that index."""
        if self.positions is not None:
            values = values.index_select(-2, self.positions)
        return torch.unflatten(values, -1, (self.parts(target), -1))


def joined_heads(target: Tensor) -> Tensor:
    """A target ``[batch, position, head, d_head]`` or ``[batch, position, width]`` as the latter."""
    return target.flatten(2) if target.dim() == 4 else target


def query_positions(
    selector: Selector, length: int, device: torch.device, name: str = "neuron_selector"
) -> Tensor | None:
    """The positions ``[query]`` that an argument of that name selects, or ``None`` for all.

    Raises:
        ValueError: If a position lies outside the sequence, or there is none.
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
        positions = list(range(length))[selector]
        if not positions:
            raise ValueError(f"{name} {selector} is empty for a target of {length} positions")
        return torch.tensor(positions, device=device)
    named = _named_positions(selector, name)
    outside = [position for position in named if not -length <= position < length]
    if outside or not named:
        raise ValueError(
            f"{name} names {outside or 'no positions'}, but the target has positions 0 to {length - 1}"
        )
    return torch.tensor([position % length for position in named], device=device)


def _named_positions(selector: object, name: str) -> list[int]:
    several = selector.tolist() if isinstance(selector, Tensor | np.ndarray) else selector
    several = [several] if is_integer(several) else several
    if not isinstance(several, list | tuple | range) or not all(map(is_integer, several)):
        raise TypeError(f"{name} names query positions: an int, a slice, or a list of ints, got {several!r}")
    return [as_int(position) for position in several]
