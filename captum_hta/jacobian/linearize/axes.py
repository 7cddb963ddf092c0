"""The axis of each tensor that holds the tokens, and operators narrowed to a window of tokens.

The token axis is followed from operator to operator. An operator that acts on each token separately can run
on a window of tokens: its arguments are narrowed along their token axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from captum_hta.jacobian.linearize.jvp_rules import ELEMENTWISE, outer, product_push
from captum_hta.jacobian.linearize.recorder import Call, Push
from captum_hta.jacobian.linearize.tokenwise import TokenJacobians
from captum_hta.jacobian.torch_internals import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class TokenAxis:
    """The axis of a variable that holds the tokens.

    Attributes:
        dim: Number of the axis, counted from the end, so negative.
        outer: The axis has ``outer * length`` elements, where a view merged it with axes before it.
    """

    dim: int
    outer: int = 1


ROWS, COLUMNS = TokenAxis(-2), TokenAxis(-1)
"""Tokens as the rows of matrices, as in hidden embeddings, and as their columns, as in transposed keys."""


@dataclass(frozen=True)
class Window:
    """Tokens ``start`` to ``stop`` of ``length``."""

    start: int
    stop: int
    length: int

    @property
    def width(self) -> int:
        """Number of tokens in the window."""
        return self.stop - self.start

    def narrow(self, value: Tensor, axis: TokenAxis) -> Tensor:
        """A tensor narrowed to the window."""
        part = self._part(value, axis)
        return part if axis.outer == 1 else part.flatten(axis.dim - 1, axis.dim)

    def widen(self, stack: Tensor, axis: TokenAxis) -> Tensor:
        """A stack of tangents of all tokens, zero outside the window."""
        shape = list(stack.shape)
        shape[axis.dim] = axis.outer * self.length
        out = outer(stack.new_zeros(*shape[1:-1], shape[0], shape[-1]))
        part = self._part(out, axis)
        part.copy_(stack.reshape(part.shape))
        return out

    def holds(self, stack: Tensor, axis: TokenAxis) -> bool:
        """Whether a stack of tangents is exactly zero outside the window."""
        before = Window(0, self.start, self.length)
        after = Window(self.stop, self.length, self.length)
        return not any(side._part(stack, axis).any() for side in (before, after))

    def _part(self, value: Tensor, axis: TokenAxis) -> Tensor:
        """The window as a view, in which a merged token axis is split in two."""
        if axis.outer > 1:
            shape = list(value.shape)
            shape[axis.dim : axis.dim + 1 or None] = [axis.outer, self.length]
            value = value.view(shape)
        return value.narrow(axis.dim, self.start, self.width)

    def shape(self, shape: Sequence[int], axis: TokenAxis) -> tuple[int, ...]:
        """The shape of a tensor narrowed to the window."""
        narrowed = list(shape)
        narrowed[axis.dim] = axis.outer * self.width
        return tuple(narrowed)


class MixesTokensError(Exception):
    """An operator does not act on each token separately, or its token axis cannot be followed."""


# --- following token axes through operators --------------------------------------------------------

_SOFTMAX = ("_softmax", "_safe_softmax")
_VIEWS = ("view", "_unsafe_view", "reshape", "expand")
_SIMPLE = """
    _to_copy add alias cat chunk clone contiguous div mean mul permute select slice split split_with_sizes
    squeeze stack sub sum t transpose unbind unsqueeze
"""
_EACH_TOKEN = ELEMENTWISE | set(_SIMPLE.split())


def token_axes(
    call: Call,
    axes: Mapping[int, TokenAxis],
    window: Window,
    shapes: Sequence[tuple[int, ...]],
    causal: bool,
) -> dict[int, TokenAxis]:
    """The token axes of the outputs of a call.

    Args:
        call: The operator.
        axes: The token axis of each of its inputs.
        window: A window to try the operator on.
        shapes: The shape of every variable.
        causal: Also follow the product of a causal attention pattern with its values, whose keys are tokens.

    Raises:
        MixesTokensError: If the operator mixes tokens, or cannot be followed.
    """
    moving = [axes[variable] for variable in call.inputs]
    if call.name == "bmm":
        return {call.outputs[0]: _product_axis(call, moving, causal)}
    if call.name in ("mm", "addmm"):
        left = len(call.flat) - 2 if call.name == "mm" else 1
        if call.argument_indices != [left] or moving[0].dim != -2:
            raise MixesTokensError
        return {call.outputs[0]: moving[0]}
    if call.name in _VIEWS:
        return {call.outputs[0]: _viewed_axis(call.primals[0].shape, call.shape, moving[0], window.length)}
    if call.name in (*_SOFTMAX, "native_layer_norm") or call.name in _EACH_TOKEN:
        _check_reduced_axes(call, moving)
        return _axes_by_trial(call, axes, window, shapes)
    raise MixesTokensError


def _check_reduced_axes(call: Call, moving: Sequence[TokenAxis]) -> None:
    """Softmax and LayerNorm must not act along the token axis."""
    if call.name in _SOFTMAX:
        dim, rank = call.args[1], len(call.shape)
        if (dim if dim < 0 else dim - rank) == moving[0].dim:
            raise MixesTokensError
    if call.name == "native_layer_norm" and (-moving[0].dim <= len(call.args[1]) or moving[0].outer > 1):
        raise MixesTokensError


def _viewed_axis(before: Sequence[int], after: Sequence[int], axis: TokenAxis, length: int) -> TokenAxis:
    """The token axis of a view: the one whose elements are as far apart as before."""
    inner = torch.Size(before[axis.dim :][1:]).numel()
    for dim in range(-1, -len(after) - 1, -1):
        if torch.Size(after[dim:][1:]).numel() == inner and after[dim] % length == 0 and after[dim]:
            return TokenAxis(dim, after[dim] // length)
    raise MixesTokensError


def _product_axis(call: Call, moving: Sequence[TokenAxis], causal: bool) -> TokenAxis:
    """Rows of the left matrices, columns of the right ones, and, in causal models, keys as rows."""
    sides = dict(zip(call.argument_indices, moving, strict=True))
    if any(axis.outer > 1 for axis in moving):
        raise MixesTokensError
    left, right = (sides[side].dim if side in sides else None for side in (0, 1))
    if (left, right) == (-2, None):
        return ROWS
    if (left, right) == (None, -1):
        return COLUMNS
    if causal and left in (-2, None) and right in (-1, -2):
        return ROWS
    raise MixesTokensError


def _axes_by_trial(
    call: Call, axes: Mapping[int, TokenAxis], window: Window, shapes: Sequence[tuple[int, ...]]
) -> dict[int, TokenAxis]:
    """Run the operator on the window: the axis that becomes shorter is the token axis."""
    args, kwargs = tree_unflatten(_narrowed_arguments(call, axes, window), call.spec)
    outs = [value for value in tree_flatten(call.function(*args, **kwargs))[0] if isinstance(value, Tensor)]
    found = {}
    for variable, out in zip(call.outputs, outs, strict=True):
        if call.name == "native_layer_norm" and variable != call.outputs[0]:
            continue
        found[variable] = _shortened_axis(shapes[variable], out.shape, window)
    return found


def _shortened_axis(whole: tuple[int, ...], part: Sequence[int], window: Window) -> TokenAxis:
    changed = [dim for dim in range(-len(whole), 0) if whole[dim] != part[dim]]
    if len(changed) != 1 or whole[changed[0]] % window.length:
        raise MixesTokensError
    axis = TokenAxis(changed[0], whole[changed[0]] // window.length)
    if window.shape(whole, axis) != tuple(part):
        raise MixesTokensError
    return axis


def _narrowed_arguments(call: Call, axes: Mapping[int, TokenAxis], window: Window) -> list[object]:
    """The arguments of a call on the window. Fixed tensors are narrowed where they broadcast against
    tokens.
    """
    flat = list(call.flat)
    moving = [axes[variable] for variable in call.inputs]
    for index, axis in zip(call.argument_indices, moving, strict=True):
        flat[index] = window.narrow(flat[index], axis)
    if call.name in ELEMENTWISE | {"add", "sub", "mul", "div", "cat", "stack"}:
        if len(set(moving)) > 1:
            raise MixesTokensError
        for index, value in enumerate(flat):
            if isinstance(value, Tensor) and index not in call.argument_indices:
                flat[index] = _aligned_part(value, moving[0], window)
    return flat


def _aligned_part(value: Tensor, axis: TokenAxis, window: Window) -> Tensor:
    """The window of a fixed tensor that is broadcast against tokens."""
    if value.dim() < -axis.dim or value.shape[axis.dim] == 1:
        return value
    if value.shape[axis.dim] != axis.outer * window.length:
        raise MixesTokensError
    return window.narrow(value, axis)


# --- narrowing operators ---------------------------------------------------------------------------


def narrowed(call: Call, axes: Mapping[int, TokenAxis], window: Window) -> Call:
    """The call on the window."""
    shape = window.shape(call.shape, axes[call.outputs[0]])
    if isinstance(call.rule, TokenJacobians):
        jacobians = call.rule.at(window.start, window.width)
        flops = None if call.flops is None else call.flops * window.width // window.length
        return replace(call, shape=shape, rule=jacobians, flops=flops)
    if call.name == "bmm":
        return replace(call, shape=shape, versions=[], rule=_NarrowProduct(axes, window))
    return replace(call, flat=_narrowed_arguments(call, axes, window), shape=shape, versions=[])


@dataclass(frozen=True)
class _NarrowProduct:
    """The rule of ``bmm`` on a window."""

    axes: Mapping[int, TokenAxis]
    window: Window

    def __call__(self, call: Call) -> Push:
        left, right = call.args
        sides = {
            index: self.axes[variable]
            for index, variable in zip(call.argument_indices, call.inputs, strict=True)
        }
        rows = self.axes[call.outputs[0]].dim == -2
        keys = self.window.narrow(left, ROWS) if rows else left
        if 1 in sides and sides[1].dim == -2:
            keys = self.window.narrow(keys, COLUMNS)
        if rows and 1 in sides and sides[1].dim == -1:
            return product_push(call, keys, right, lambda term: self.window.widen(term, COLUMNS))
        return product_push(call, keys, right)
