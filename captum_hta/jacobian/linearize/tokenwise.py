r"""Segmentes of a model that act on each token by itself, collapsed into one Jacobian a token.

Between two attentions a model is token-wise: its output at token ``j`` depends on its input at token ``j``
alone. From the residual stream before a block's feed-forward part to the one after it,
:math:`D \times D` numbers a token say all that tangents need:

.. math:: \dot w_j = \dot u_j N_j , \qquad N_j = \Big(\frac{\partial w_j}{\partial u_j}\Big)^{\!\top} .

With an inner width of :math:`4 D` the segment costs a tangent :math:`16 D^2` operations a token and the
product :math:`2 D^2`, so a block comes down from :math:`24 D^2` to :math:`10 D^2`. The :math:`N_j` of all
tokens take ``D`` tangents through the segment, since tokens do not disturb each other; an exact sweep
pushes ``D`` tangents for *each* source token. They are the unit vectors, which the first matrix product
turns into its rows: a segment starts at what a product reads, so that this one costs nothing,
:math:`8 D^3` operations a token are left, and it pays from few tangents on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from captum_hta.jacobian.linearize.jvp_rules import Push, inner, outer
from captum_hta.jacobian.linearize.linearization import Linearization, between, flops_of, numel
from captum_hta.jacobian.linearize.recorder import Call
from captum_hta.jacobian.plan import chunk_size

STREAM = 80
"""Operations that a CPU does while it reads one number from memory: a few tangents at a time read the
matrices for nearly nothing."""
MATRIX_PRODUCTS = ("mm", "addmm")
COLLAPSED_MEMORY = 0.5
"""Part of the memory budget that the Jacobians of collapsed segments may take."""


@dataclass(frozen=True)
class Segment:
    """Operators that lead from one variable ``[batch, position, width]`` to another and nowhere else.

    Attributes:
        calls: The operators, in their order.
        entry: The variable they read.
        exit: The variable that others read of them.
        shape: ``(batch, position, width of the entry, width of the exit)``.
        flops: Operations for one tangent of all tokens.
        first_flops: Those of them in products that read the entry.
    """

    calls: tuple[Call, ...]
    entry: int
    exit: int
    shape: tuple[int, int, int, int]
    flops: int
    first_flops: int

    @property
    def elements(self) -> int:
        """Numbers in the Jacobians of all tokens."""
        return numel(self.shape)

    @property
    def product_flops(self) -> int:
        """Operations of the product that replaces it, for one tangent of all tokens."""
        return 2 * self.elements

    @property
    def preparation_flops(self) -> int:
        """Operations that its Jacobians take."""
        return self.shape[2] * (self.flops - self.first_flops)

    def gain(self, count: float, chunk: int) -> float:
        """Operations saved on ``count`` tangents that are carried ``chunk`` at a time."""
        product = self.elements * max(2.0, STREAM / chunk)
        return count * (self.flops - product) - self.preparation_flops


@dataclass(frozen=True)
class TokenJacobians:
    """The rule of a collapsed segment: ``matrices`` are ``[batch, position, width in, width out]``."""

    matrices: Tensor

    def __call__(self, call: Call) -> Push:
        """The push of a stack ``[n, batch, position, width in]``."""
        return lambda tangent: outer(inner(tangent) @ self.matrices)

    def at(self, start: int, count: int) -> TokenJacobians:
        """Those of some positions."""
        return TokenJacobians(self.matrices.narrow(1, start, count))


def segments(
    calls: Sequence[Call], shapes: Sequence[tuple[int, ...]], length: int, targets: Iterable[int]
) -> list[Segment]:
    """Segmentes that a product with a Jacobian could replace for fewer operations, none within another.

    They are told by their shapes and by the flow of variables alone; whether one is token-wise
    :func:`token_jacobians` finds out.

    Args:
        calls: Operators on the way from sources to targets.
        shapes: The shape of every variable.
        length: The number of positions.
        targets: Variables that must be there in the end.
    """
    search = _Search(calls, shapes, length, set(targets))
    found: list[Segment] = []
    free = 0
    for index, call in enumerate(calls):
        if index < free:
            continue
        best = search.best(call.outputs[0], index + 1)
        if best is not None:
            segment, free = best
            found.append(segment)
    return found


class _Search:
    """Looks for the best segment from a given variable on."""

    def __init__(
        self, calls: Sequence[Call], shapes: Sequence[tuple[int, ...]], length: int, targets: set[int]
    ) -> None:
        self.calls, self.shapes, self.length, self.targets = calls, shapes, length, targets
        self.readers: dict[int, list[int]] = {}
        for index, call in enumerate(calls):
            for variable in call.inputs:
                self.readers.setdefault(variable, []).append(index)

    def best(self, entry: int, first: int) -> tuple[Segment, int] | None:
        """The segment that saves most, and the index of the call after it."""
        if not self._is_sequence(entry) or entry not in self.readers:
            return None
        closure = self._closure(entry, first)
        closure_calls = [self.calls[index] for index in closure]
        if not first_products(closure_calls, entry):
            return None
        best, after, saved = None, first, 0
        for index in closure:
            exit_ = self.calls[index].outputs[0]
            if not self._is_alike(entry, exit_, self.calls[index].dtype):
                continue
            inside = between(closure_calls, (entry,), (exit_,))
            if not self._is_closed(inside, exit_):
                continue
            segment = self._segment(entry, exit_, inside)
            gain = segment.flops - segment.product_flops
            if gain > 0 and gain >= saved:  # of equal ones the longest
                best, after, saved = segment, index + 1, gain
        return None if best is None else (best, after)

    def _is_sequence(self, variable: int) -> bool:
        shape = self.shapes[variable]
        return len(shape) == 3 and shape[1] == self.length

    def _is_alike(self, entry: int, exit_: int, dtype: torch.dtype) -> bool:
        """Whether the exit is a sequence of the same batch in the same type of numbers."""
        reader = self.calls[self.readers[entry][0]]
        same = self.shapes[exit_][:1] == self.shapes[entry][:1] and self._is_sequence(exit_)
        return same and dtype == reader.primals[reader.inputs.index(entry)].dtype

    def _closure(self, entry: int, first: int) -> dict[int, None]:
        """Calls that depend on the entry alone, up to where attention or the like mixes tokens."""
        known, closure = {entry}, {}
        last = max(self.readers.get(entry, [first]))
        for index in range(first, len(self.calls)):
            if index > last:
                break
            call = self.calls[index]
            if known.issuperset(call.inputs) and _may_be_tokenwise(call):
                closure[index] = None
                known.update(call.outputs)
                last = max([last, *(r for out in call.outputs for r in self.readers.get(out, []))])
        return closure

    def _is_closed(self, inside: Sequence[Call], exit_: int) -> bool:
        """Whether nothing else reads what is inside."""
        members = {id(call) for call in inside}
        inner = {out for call in inside for out in call.outputs} - {exit_}
        readers = (self.calls[index] for out in inner for index in self.readers.get(out, []))
        return not inner & self.targets and all(id(call) in members for call in readers)

    def _segment(self, entry: int, exit_: int, inside: Sequence[Call]) -> Segment:
        shape = (*self.shapes[entry], self.shapes[exit_][2])
        flops, first = (sum(map(flops_of, calls)) for calls in (inside, first_products(inside, entry)))
        return Segment(tuple(inside), entry, exit_, shape, flops, first)


def first_products(calls: Iterable[Call], entry: int) -> list[Call]:
    """The products of a variable with matrices that do not move."""
    same, found = {entry}, []
    for call in calls:
        if not same.issuperset(call.inputs):
            continue
        if call.name in ("view", "_unsafe_view", "reshape") and call.shape[-1] == call.args[0].shape[-1]:
            same.update(call.outputs)
        elif call.name in MATRIX_PRODUCTS and call.positions == [len(call.flat) - 2]:
            found.append(call)
    return found


def _may_be_tokenwise(call: Call) -> bool:
    """Not a product of attention, and a real function."""
    is_complex = call.dtype.is_complex or any(primal.is_complex() for primal in call.primals)
    return call.name not in ("bmm", "baddbmm") and not is_complex


def worthwhile(found: Sequence[Segment], count: float, chunk: int, numbers: float) -> list[Segment]:
    """The segments to collapse for ``count`` tangents, with room for that many ``numbers``."""
    chosen = []
    for segment in sorted(found, key=lambda segment: -segment.gain(count, chunk)):
        if segment.gain(count, chunk) > 0 and segment.elements <= numbers:
            chosen.append(segment)
            numbers -= segment.elements
    return chosen


def token_jacobians(segment: Segment, shapes: Sequence[tuple[int, ...]]) -> TokenJacobians | None:
    """The Jacobians of all tokens, or ``None`` if the segment is not token-wise.

    Every direction is pushed at all tokens of all examples at once. What comes of it is right only if none
    disturbs another, which is tested first; see :func:`separate`.

    Args:
        segment: The operators.
        shapes: The shape of every variable.
    """
    batch, positions, width_in, _ = segment.shape
    like = segment.calls[0].primals[0]
    with torch.no_grad():
        derivative = Linearization(segment.calls, shapes, (segment.entry,), (segment.exit,))

        def pushed(tangent: Tensor) -> Tensor:
            return next(image for _, image in derivative.push({segment.entry: tangent}))

        if not separate(pushed, like.new_empty(batch, positions, width_in)):
            return None
        matrices = like.new_empty(segment.shape)
        chunk = chunk_size(derivative.widest() * like.element_size(), like.device)
        for start, image in _unit_images(segment, shapes, chunk):
            matrices[:, :, start : start + len(image)] = image.permute(1, 2, 0, 3)
        probe = noise(2, like.new_empty(batch, positions, width_in))
        found = TokenJacobians(matrices)
        return found if close(found(segment.calls[0])(probe), pushed(probe)) else None


def _unit_images(
    segment: Segment, shapes: Sequence[tuple[int, ...]], chunk: int
) -> Iterator[tuple[int, Tensor]]:
    """The images of all unit vectors at all tokens, some at a time, each with the number of its first.

    The products that read the entry turn unit vectors into rows of their matrices, which therefore enter
    behind them.
    """
    batch, positions, width, _ = segment.shape
    products = first_products(segment.calls, segment.entry)
    matrices = {product.outputs[0]: product.args[-1] for product in products}
    units = torch.eye(width, out=segment.calls[0].primals[0].new_empty(width, width))
    skipped = {id(product) for product in products}
    rest = [call for call in segment.calls if id(call) not in skipped]
    derivative = Linearization(rest, shapes, (segment.entry, *matrices), (segment.exit,))
    for start in range(0, width, chunk):
        entering = {
            variable: outer(matrix[start : start + chunk].expand(*shapes[variable][:-1], -1, -1).contiguous())
            for variable, matrix in matrices.items()
        }
        at_entry = units[start : start + chunk, None, None].expand(-1, batch, positions, -1)
        yield start, next(image for _, image in derivative.push({segment.entry: at_entry} | entering))


def separate(push: Callable[[Tensor], Tensor], like: Tensor) -> bool:
    """Whether no token of no example reaches another: zeros must come out as zeros, to the last bit.

    Tokens are numbered through the batch, and :func:`halves` of them move while the others must stand
    still. Nothing is compared with a tolerance, which a single large token would blind, or a short type of
    numbers.

    Args:
        push: Pushes a stack ``[n, batch, position, width]``.
        like: A tensor of the shape, type and device of one tangent.
    """
    batch, positions, _ = like.shape
    if batch * positions == 1:
        return True
    moves = halves(batch * positions, like.device).unflatten(1, (batch, positions))
    image = push(noise(1, like) * moves[..., None])
    return not image[~moves].any()


def halves(count: int, device: torch.device) -> Tensor:
    """``[half, count]``, for each binary digit of a number those with 0 and those with 1: of any two, each
    is in a half without the other.
    """
    number = torch.arange(count, device=device)
    digits = range((count - 1).bit_length())
    return torch.stack([(number >> digit) & 1 == side for digit in digits for side in (0, 1)])


def noise(count: int, like: Tensor) -> Tensor:
    """A stack of random tangents, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, *like.shape, generator=generator).to(like)


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether two stacks of tangents ``[n, batch, position, ...]`` are equal but for rounding, at each
    position of each example.
    """
    if found.shape != expected.shape:
        return False
    tolerance = max(1e-2, 64 * torch.finfo(found.dtype).eps)
    error, size = (
        value.double().flatten(3).square().sum((0, -1)).sqrt() for value in (found - expected, expected)
    )
    return bool((error <= tolerance * size).all())


def collapsed(calls: Sequence[Call], rules: Sequence[tuple[Segment, TokenJacobians | None]]) -> list[Call]:
    """The operators with each segment as one of them, in the place of its last; without its rule it can
    be counted, not run.
    """
    by_last = {id(segment.calls[-1]): (segment, rule) for segment, rule in rules}
    inside = {id(call) for segment, _ in rules for call in segment.calls}
    out = []
    for call in calls:
        if id(call) in by_last:
            segment, rule = by_last[id(call)]
            out.append(
                replace(
                    call, flat=[], positions=[], inputs=[segment.entry], versions=[], rule=rule,
                    outputs=[segment.exit], flops=segment.product_flops,
                )
            )  # fmt: skip
        elif id(call) not in inside:
            out.append(call)
    return out
