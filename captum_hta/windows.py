"""Tangents of a few positions, carried at those positions alone for as long as that is right.

A tangent of one source token is zero at every other token until an operator mixes positions, and in a
causal model it is zero before its token throughout. A :class:`WindowedLinearization` finds which axis of
each variable holds the positions, narrows the operators to the positions that can move, and so saves
most of the first block's projections and about half of a causal model.

Nothing is taken on trust: random tangents are pushed both ways when it is made, for every window, and the
windows are given up if the results differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from captum_hta.linearization import Linearization, between, flops_of
from captum_hta.recorder import Call
from captum_hta.rules import ELEMENTWISE, Push, product_push

STEPS = 8
"""A causal model is narrowed to this many starting positions at most."""


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
        if at.outer == 1:
            return value.narrow(at.dim, self.start, self.width)
        parts = value.unflatten(at.dim, (at.outer, self.length))
        return parts.narrow(at.dim, self.start, self.width).flatten(at.dim - 1, at.dim)

    def widen(self, value: Tensor, at: Positions) -> Tensor:
        """A tensor that is zero outside the window."""
        padding = [0, 0] * (-at.dim - 1) + [self.start, self.length - self.stop]
        if at.outer == 1:
            return F.pad(value, padding)
        return F.pad(value.unflatten(at.dim, (at.outer, -1)), padding).flatten(at.dim - 1, at.dim)

    def shape(self, shape: Sequence[int], at: Positions) -> tuple[int, ...]:
        """The shape of the window of a tensor."""
        narrowed = list(shape)
        narrowed[at.dim] = at.outer * self.width
        return tuple(narrowed)


class _MixedError(Exception):
    """An operator does not act on each position by itself."""


class WindowedLinearization:
    """A linearisation whose tangents start at a few tokens of one source.

    Args:
        whole: The derivative.
        source: One of its source variables, with the value ``[batch, position, width]``.
    """

    def __init__(self, whole: Linearization, source: int) -> None:
        self.whole, self.source = whole, source
        self.length = whole.shapes[source][1]
        self.at: dict[int, Positions] = {source: Positions(-2)}
        tokenwise = self._locate(whole.calls, causal=False)
        self._prefix = [call for index, call in enumerate(whole.calls) if index in tokenwise]
        self._rest = [call for index, call in enumerate(whole.calls) if index not in tokenwise]
        self._border = self._border_variables()
        self._located = dict(self.at)
        self.causal = len(self._locate(self._rest, causal=True)) == len(self._rest)
        self._cache: dict[tuple[str, int, int], Linearization] = {}
        if not self._proven():
            self.causal = False
            if not self._proven():
                self._prefix, self._rest, self._border = [], list(whole.calls), [source]

    def flops(self, target: int) -> float:
        """Operations for one tangent of one token up to ``target``, on average over the tokens."""
        share = 0.5 * (1 + 1 / min(STEPS, self.length)) if self.causal else 1.0
        needed = between(self.whole.calls, self.whole.sources, (target,))
        kept = {id(call) for call in self._prefix}
        return sum(flops_of(call) * (1 / self.length if id(call) in kept else share) for call in needed)

    def push(self, tangents: Tensor, tokens: range) -> Iterator[tuple[int, Tensor]]:
        """Push tangents of some tokens.

        Args:
            tangents: ``[n, batch, len(tokens), width]``, zero at all other positions.
            tokens: The tokens, from one to another.

        Yields:
            ``(target, tangent)`` as :meth:`Linearization.push` does.
        """
        at_tokens = Window(tokens.start, tokens.stop, self.length)
        onward = Window(self._start(tokens.start), self.length, self.length)
        inner = Window(at_tokens.start - onward.start, at_tokens.stop - onward.start, onward.width)
        border = {}
        for variable, tangent in self._through_prefix(tangents, at_tokens):
            border[variable] = inner.widen(tangent, self._located[variable])
        for target in self.whole.targets:
            if target in border and target in self._located:
                yield target, onward.widen(border[target], self._located[target])
        for target, tangent in self._through_rest(onward).push(border):
            if target not in border:
                full = onward.width == self.length
                yield target, tangent if full else onward.widen(tangent, self.at[target])

    def _start(self, token: int) -> int:
        if not self.causal:
            return 0
        step = -(-self.length // STEPS)
        return token - token % step

    def _through_prefix(self, tangents: Tensor, window: Window) -> Iterator[tuple[int, Tensor]]:
        if self.source in self._border:
            yield self.source, tangents
        targets = [variable for variable in self._border if variable != self.source]
        if targets:
            prefix = self._narrowed("prefix", window, self._prefix, (self.source,), targets)
            yield from prefix.push({self.source: tangents})

    def _through_rest(self, window: Window) -> Linearization:
        return self._narrowed("rest", window, self._rest, self._border, self.whole.targets)

    def _narrowed(
        self, part: str, window: Window, calls: list[Call], sources: Sequence[int], targets: Sequence[int]
    ) -> Linearization:
        """A part of the linearisation on a window; the last one of each part is kept."""
        key = (part, window.start, window.stop)
        if key not in self._cache:
            for other in [known for known in self._cache if known[0] == part]:
                del self._cache[other]
            if window.width < self.length:
                calls = [_narrow(call, self.at, window) for call in calls]
            with torch.no_grad():
                self._cache[key] = Linearization(calls, self.whole.shapes, sources, targets)
        return self._cache[key]

    def _locate(self, calls: Sequence[Call], causal: bool) -> set[int]:
        """Find the positions of what the calls give; the numbers of those that could be followed."""
        probe = Window(0, max(1, self.length - 1), self.length)
        followed = set()
        for number, call in enumerate(calls):
            if self.length < 2 or not all(variable in self.at for variable in call.inputs):
                continue
            try:
                found = _positions(call, self.at, probe, self.whole.shapes, causal)
            except (_MixedError, RuntimeError):
                continue
            self.at.update(found)
            followed.add(number)
        return followed

    def _border_variables(self) -> list[int]:
        """Variables that the prefix gives and something else reads, or that are asked for."""
        given = {self.source, *(variable for call in self._prefix for variable in call.outputs)}
        read = {variable for call in self._rest for variable in call.inputs} | set(self.whole.targets)
        return sorted(given & read)

    def _proven(self) -> bool:
        """Whether random tangents come out the same through the windows and through the whole.

        Every window of a causal model is tried, for a mask may be causal in one place and not in another;
        of an encoder's first projections, which know no mask, the middle one.
        """
        if not self.whole.calls:
            return True
        batch, _, width = self.whole.shapes[self.source]
        like = self.whole.calls[0].primals[0]
        generator = torch.Generator().manual_seed(0)
        step = -(-self.length // STEPS)
        starts = range(0, self.length, step) if self.causal else [self._middle(step)]
        for start in starts:
            tokens = range(start, min(start + step, self.length))
            tangent = torch.randn(1, batch, len(tokens), width, generator=generator).to(like)
            if not self._same(tangent, tokens):
                return False
        return True

    def _middle(self, step: int) -> int:
        return self.length // 2 // step * step

    def _same(self, tangent: Tensor, tokens: range) -> bool:
        window = Window(tokens.start, tokens.stop, self.length)
        with torch.no_grad():
            expected = dict(self.whole.push({self.source: window.widen(tangent, Positions(-2))}))
            found = dict(self.push(tangent, tokens))
        tolerance = min(max(64 * torch.finfo(tangent.dtype).eps, 1e-6), 0.1)
        return found.keys() == expected.keys() and all(
            _close(found[target], expected[target], tolerance) for target in expected
        )


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    if found.shape != expected.shape:
        return False
    error = (found - expected).double().norm()
    return bool(error <= tolerance * expected.double().norm())


# --- following positions through operators ---------------------------------------------------------

_SOFTMAX = ("_softmax", "_safe_softmax")
_VIEWS = ("view", "_unsafe_view", "reshape", "expand")
_SIMPLE = """
    _to_copy add alias cat chunk clone contiguous div mean mul permute select slice split split_with_sizes
    squeeze stack sub sum t transpose unbind unsqueeze
"""
_EACH_POSITION = ELEMENTWISE | set(_SIMPLE.split())


def _positions(
    call: Call, at: dict[int, Positions], window: Window, shapes: Sequence[tuple[int, ...]], causal: bool
) -> dict[int, Positions]:
    """Where the outputs of a call hold their positions.

    Raises:
        _MixedError: If the call mixes positions, or cannot be followed.
    """
    moving = [at[variable] for variable in call.inputs]
    if call.name == "bmm":
        return {call.outputs[0]: _product_positions(call, moving, causal)}
    if call.name in ("mm", "addmm"):
        left = len(call.flat) - 2 if call.name == "mm" else 1
        if call.positions != [left] or moving[0].dim != -2:
            raise _MixedError
        return {call.outputs[0]: moving[0]}
    if call.name in _VIEWS:
        return {call.outputs[0]: _viewed(call.primals[0].shape, call.shape, moving[0], window.length)}
    if call.name in (*_SOFTMAX, "native_layer_norm") or call.name in _EACH_POSITION:
        _check_axes(call, moving)
        return _compared(call, at, window, shapes)
    raise _MixedError


def _check_axes(call: Call, moving: Sequence[Positions]) -> None:
    """Softmax and LayerNorm must not act along the positions."""
    if call.name in _SOFTMAX:
        dim, rank = call.args[1], len(call.shape)
        if (dim if dim < 0 else dim - rank) == moving[0].dim:
            raise _MixedError
    if call.name == "native_layer_norm" and (-moving[0].dim <= len(call.args[1]) or moving[0].outer > 1):
        raise _MixedError


def _viewed(before: Sequence[int], after: Sequence[int], at: Positions, length: int) -> Positions:
    """Positions of a view: the axis whose elements are as far apart as before."""
    inner = torch.Size(before[at.dim :][1:]).numel()
    for dim in range(-1, -len(after) - 1, -1):
        if torch.Size(after[dim:][1:]).numel() == inner and after[dim] % length == 0 and after[dim]:
            return Positions(dim, after[dim] // length)
    raise _MixedError


def _product_positions(call: Call, moving: Sequence[Positions], causal: bool) -> Positions:
    """Rows of the left matrices, columns of the right ones, and, in causal models, keys as rows."""
    by_side = dict(zip(call.positions, moving, strict=True))
    if any(at.outer > 1 for at in moving):
        raise _MixedError
    left, right = (by_side[side].dim if side in by_side else None for side in (0, 1))
    if (left, right) == (-2, None):
        return Positions(-2)
    if (left, right) == (None, -1):
        return Positions(-1)
    if causal and left in (-2, None) and right in (-1, -2):
        return Positions(-2)
    raise _MixedError


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
            raise _MixedError
        at_out = Positions(changed[0], whole[changed[0]] // window.length)
        if window.shape(whole, at_out) != tuple(out.shape):
            raise _MixedError
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
            raise _MixedError
        for position, value in enumerate(flat):
            if isinstance(value, Tensor) and position not in call.positions:
                flat[position] = _aligned_part(value, located[0], window)
    return flat


def _aligned_part(value: Tensor, at: Positions, window: Window) -> Tensor:
    """The window of a fixed tensor that is broadcast against positions."""
    if value.dim() < -at.dim or value.shape[at.dim] == 1:
        return value
    if value.shape[at.dim] != at.outer * window.length:
        raise _MixedError
    return window.narrow(value, at)


# --- narrowing operators ---------------------------------------------------------------------------


def _narrow(call: Call, at: dict[int, Positions], window: Window) -> Call:
    """The call on the window."""
    shape = window.shape(call.shape, at[call.outputs[0]])
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
