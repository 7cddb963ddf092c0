"""A batch in parts, as ``internal_batch_size`` splits it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch import Tensor

from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.model.sites import observed

_Value = TypeVar("_Value", Tensor, object)


def examples_of(forward_pass: ForwardPass) -> int:
    """The number of examples in the inputs of a forward pass."""
    first, dim = forward_pass.inputs[0], forward_pass.batch_dim
    return first.shape[dim if first.dim() > dim else 0]


def splits(batch: int, internal_batch_size: int | None) -> Iterator[slice]:
    """The rows of each part of a batch, at most ``internal_batch_size`` of them."""
    step = batch if internal_batch_size is None else min(internal_batch_size, batch)
    for start in range(0, batch, step):
        yield slice(start, min(start + step, batch))


def check_split(forward_pass: ForwardPass) -> None:
    """Check that a split of the inputs splits the source in the same way.

    Raises:
        ValueError: If the source has another number of examples.
    """
    source, inputs, dim = forward_pass.source, forward_pass.inputs, forward_pass.batch_dim
    if source is None or (inputs[0].dim() > 1 and dim == 0):
        return
    run = forward_pass.forward_func
    found = observed({"source": source}, lambda: run(*inputs, *forward_pass.extra))
    batch = examples_of(forward_pass)
    examples = found["source"].shape[dim] if "source" in found else batch
    if examples != batch:
        raise ValueError(
            f"internal_batch_size splits axis {dim} of the inputs, {batch} long, but the source has "
            f"{examples} examples: leave it out, or pass inputs with the batch on that axis"
        )


def part_of(forward_pass: ForwardPass, rows: slice) -> ForwardPass:
    """The forward pass of some examples: those rows of each tensor that has one for each example."""
    batch = examples_of(forward_pass)
    if rows == slice(0, batch):
        return forward_pass
    part, dim = copy.copy(forward_pass), forward_pass.batch_dim
    part.inputs = tuple(_rows(value, rows, batch, dim) for value in part.inputs)
    part.extra = tuple(_rows(value, rows, batch, dim) for value in part.extra)
    return part


def _rows(value: _Value, rows: slice, batch: int, batch_dim: int) -> _Value:
    """Rows along the axis of the examples: the batch axis, or the first one, as masks have it."""
    if not isinstance(value, Tensor):
        return value
    axes = [dim for dim in (batch_dim, 0) if value.shape[dim : dim + 1] == (batch,)]
    return value.narrow(axes[0], rows.start, rows.stop - rows.start) if axes else value


def direction_rows(
    direction: Tensor | Sequence[Tensor] | None, rows: slice, batch: int
) -> Tensor | Sequence[Tensor] | None:
    """Directions for some examples, where they have a batch axis."""
    if isinstance(direction, list | tuple):
        return [_direction_rows(one, rows, batch) for one in direction]
    return _direction_rows(direction, rows, batch) if isinstance(direction, Tensor) else direction


def _direction_rows(direction: Tensor, rows: slice, batch: int) -> Tensor:
    has_batch = isinstance(direction, Tensor) and direction.dim() >= 3 and len(direction) == batch
    return direction[rows] if has_batch else direction
