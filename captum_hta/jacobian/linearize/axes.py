"""Where the positions of a sequence are in each tensor of a model, and operators narrowed to some of them.

Positions are followed from operator to operator: an operator that acts on each position by itself can be
run on a window of them, by narrowing what it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from captum_hta.jacobian.linearize.jvp_rules import ELEMENTWISE, Push, outer, product_push
from captum_hta.jacobian.linearize.recorder import Call
from captum_hta.jacobian.linearize.tokenwise import TokenJacobians
from captum_hta.jacobian.torch_internals import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Positions:
    """Where a variable holds its positions: ``outer * length`` elements of axis ``dim`` (negative)."""

    dim: int
    outer: int = 1


@dataclass(frozen=True)
class Window:
    """Positions ``start`` to ``stop`` of ``length``."""

    start: int
    stop: int
    length: int

    @property
    def width(self) -> int:
        """Number of its positions."""
        return self.stop - self.start

    def narrow(self, value: Tensor, at: Positions) -> Tensor:
        """The window of a tensor."""
        part = self._part(value, at)
        return part if at.outer == 1 else part.flatten(at.dim - 1, at.dim)

    def widen(self, stack: Tensor, at: Positions) -> Tensor:
        """A stack of tangents that is zero outside the window."""
        shape = list(stack.shape)
        shape[at.dim] = at.outer * self.length
        out = outer(stack.new_zeros(*shape[1:-1], shape[0], shape[-1]))
        part = self._part(out, at)
        part.copy_(stack.reshape(part.shape))
        return out

    def holds(self, stack: Tensor, at: Positions) -> bool:
        """Whether a stack of tangents is zero outside the window."""
        before = Window(0, self.start, self.length)
        after = Window(self.stop, self.length, self.length)
        return not any(side._part(stack, at).any() for side in (before, after))

    def _part(self, value: Tensor, at: Positions) -> Tensor:
        """The window as a view, with an axis of its own for ``outer`` where that is not 1."""
        if at.outer > 1:
            value = value.unflatten(at.dim, (at.outer, self.length))
        return value.narrow(at.dim, self.start, self.width)

    def shape(self, shape: Sequence[int], at: Positions) -> tuple[int, ...]:
        """The shape of the window of a tensor."""
        narrowed = list(shape)
        narrowed[at.dim] = at.outer * self.width
        return tuple(narrowed)


class MixedError(Exception):
    """An operator does not act on each position by itself."""


# --- following positions through operators ---------------------------------------------------------

_SOFTMAX = ("_softmax", "_safe_softmax")
_VIEWS = ("view", "_unsafe_view", "reshape", "expand")
_SIMPLE = """
    _to_copy add alias cat chunk clone contiguous div mean mul permute select slice split split_with_sizes
    squeeze stack sub sum t transpose unbind unsqueeze
"""
_EACH_POSITION = ELEMENTWISE | set(_SIMPLE.split())


def positions_of(
    call: Call, at: dict[int, Positions], window: Window, shapes: Sequence[tuple[int, ...]], causal: bool
) -> dict[int, Positions]:
    """Where the outputs of a call hold their positions.

    Raises:
        MixedError: If the call mixes positions, or cannot be followed.
    """
    moving = [at[variable] for variable in call.inputs]
    if call.name == "bmm":
        return {call.outputs[0]: _product_positions(call, moving, causal)}
    if call.name in ("mm", "addmm"):
        left = len(call.flat) - 2 if call.name == "mm" else 1
        if call.positions != [left] or moving[0].dim != -2:
            raise MixedError
        return {call.outputs[0]: moving[0]}
    if call.name in _VIEWS:
        return {call.outputs[0]: _viewed(call.primals[0].shape, call.shape, moving[0], window.length)}
    if call.name in (*_SOFTMAX, "native_layer_norm") or call.name in _EACH_POSITION:
        _check_axes(call, moving)
        return _compared(call, at, window, shapes)
    raise MixedError


def _check_axes(call: Call, moving: Sequence[Positions]) -> None:
    """Softmax and LayerNorm must not act along the positions."""
    if call.name in _SOFTMAX:
        dim, rank = call.args[1], len(call.shape)
        if (dim if dim < 0 else dim - rank) == moving[0].dim:
            raise MixedError
    if call.name == "native_layer_norm" and (-moving[0].dim <= len(call.args[1]) or moving[0].outer > 1):
        raise MixedError


def _viewed(before: Sequence[int], after: Sequence[int], at: Positions, length: int) -> Positions:
    """Positions of a view: the axis whose elements are as far apart as before."""
    inner = torch.Size(before[at.dim :][1:]).numel()
    for dim in range(-1, -len(after) - 1, -1):
        if torch.Size(after[dim:][1:]).numel() == inner and after[dim] % length == 0 and after[dim]:
            return Positions(dim, after[dim] // length)
    raise MixedError


def _product_positions(call: Call, moving: Sequence[Positions], causal: bool) -> Positions:
    """Rows of the left matrices, columns of the right ones, and, in causal models, keys as rows."""
    by_side = dict(zip(call.positions, moving, strict=True))
    if any(at.outer > 1 for at in moving):
        raise MixedError
    left, right = (by_side[side].dim if side in by_side else None for side in (0, 1))
    if (left, right) == (-2, None):
        return Positions(-2)
    if (left, right) == (None, -1):
        return Positions(-1)
    if causal and left in (-2, None) and right in (-1, -2):
        return Positions(-2)
    raise MixedError


def _compared(
    call: Call, at: dict[int, Positions], window: Window, shapes: Sequence[tuple[int, ...]]
) -> dict[int, Positions]:
    """Run the operator on the window: the axis that has become shorter holds the positions."""
    narrow = _narrow_arguments(call, at, window)
    args, kwargs = tree_unflatten(narrow, call.spec)
    outs = [value for value in tree_flatten(call.function(*args, **kwargs))[0] if isinstance(value, Tensor)]
    found = {}
    for variable, out in zip(call.outputs, outs, strict=True):
        whole = shapes[variable]
        if call.name == "native_layer_norm" and variable != call.outputs[0]:
            continue
        changed = [dim for dim in range(-len(whole), 0) if whole[dim] != out.shape[dim]]
        if len(changed) != 1 or whole[changed[0]] % window.length:
            raise MixedError
        at_out = Positions(changed[0], whole[changed[0]] // window.length)
        if window.shape(whole, at_out) != tuple(out.shape):
            raise MixedError
        found[variable] = at_out
    return found


def _narrow_arguments(call: Call, at: dict[int, Positions], window: Window) -> list[Any]:
    """The arguments of a call on the window; fixed tensors are narrowed where they have positions."""
    flat = list(call.flat)
    located = [at[variable] for variable in call.inputs]
    for position, where in zip(call.positions, located, strict=True):
        flat[position] = window.narrow(flat[position], where)
    if call.name in ELEMENTWISE | {"add", "sub", "mul", "div", "cat", "stack"}:
        if len(set(located)) > 1:
            raise MixedError
        for position, value in enumerate(flat):
            if isinstance(value, Tensor) and position not in call.positions:
                flat[position] = _aligned_part(value, located[0], window)
    return flat


def _aligned_part(value: Tensor, at: Positions, window: Window) -> Tensor:
    """The window of a fixed tensor that is broadcast against positions."""
    if value.dim() < -at.dim or value.shape[at.dim] == 1:
        return value
    if value.shape[at.dim] != at.outer * window.length:
        raise MixedError
    return window.narrow(value, at)


# --- narrowing operators ---------------------------------------------------------------------------


def narrowed(call: Call, at: dict[int, Positions], window: Window) -> Call:
    """The call on the window."""
    shape = window.shape(call.shape, at[call.outputs[0]])
    if isinstance(call.rule, TokenJacobians):
        rule = call.rule.at(window.start, window.width)
        return replace(call, shape=shape, rule=rule, flops=call.flops * window.width // window.length)
    if call.name == "bmm":
        rule = _NarrowProduct(at, window)
        return replace(call, shape=shape, versions=[], rule=rule)
    return replace(call, flat=_narrow_arguments(call, at, window), shape=shape, versions=[])


@dataclass(frozen=True)
class _NarrowProduct:
    """The rule of ``bmm`` on a window."""

    at: dict[int, Positions]
    window: Window

    def __call__(self, call: Call) -> Push:
        left, right = call.args
        sides = {
            position: self.at[variable].dim
            for position, variable in zip(call.positions, call.inputs, strict=True)
        }
        rows = self.at[call.outputs[0]].dim == -2
        keys = self.window.narrow(left, Positions(-2)) if rows else left
        if sides.get(1) == -2:
            keys = self.window.narrow(keys, Positions(-1))
        if rows and sides.get(1) == -1:
            return product_push(call, keys, right, lambda term: self.window.widen(term, Positions(-1)))
        return product_push(call, keys, right)
