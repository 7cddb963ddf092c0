r"""Token-wise segments of a model, collapsed into one Jacobian per token.

Between two attentions a model is token-wise: its output at token ``j`` depends on its input at token ``j``
alone. From the residual stream before a block's feed-forward part to the one after it, a tangent is mapped by
:math:`D \times D` numbers per token:

.. math:: \dot w_j = \dot u_j N_j , \qquad N_j = \Big(\frac{\partial w_j}{\partial u_j}\Big)^{\!\top} .

With an inner width of :math:`4 D`, pushing a tangent through the segment costs :math:`16 D^2` operations per
token and the product :math:`2 D^2`, which reduces a block from :math:`24 D^2` to :math:`10 D^2`. Since tokens
do not affect each other, ``D`` tangents give the :math:`N_j` of all tokens at once, where an exact sweep
pushes ``D`` tangents for *each* source token. These ``D`` tangents are the unit vectors. The first matrix
product maps them to its rows, so a segment starts at the input of a product, whose own cost is saved:
:math:`8 D^3` operations per token remain, and collapsing pays off from few tangents on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from captum_hta.jacobian.linearize.jvp_rules import inner, outer
from captum_hta.jacobian.linearize.linearization import Linearization, between, flops_of, numel
from captum_hta.jacobian.linearize.recorder import Call
from captum_hta.jacobian.plan import chunk_size

STREAM = 80
"""Operations that a CPU performs in the time in which it reads one number from memory: with few tangents at
a time, reading the matrices takes longer than multiplying by them."""
MATRIX_PRODUCTS = ("mm", "addmm")
COLLAPSED_MEMORY = 0.5
"""Share of the memory budget for the Jacobians of collapsed segments."""


@dataclass(frozen=True)
class Segment:
    """Operators between two variables ``[batch, position, width]``, between which nothing else reads.

    Attributes:
        calls: The operators, in order of execution.
        entry: The variable that they read.
        exit: The variable that they compute.
        shape: ``(batch, positions, width of the entry, width of the exit)``.
        flops: Floating-point operations for one tangent of all tokens.
        first_flops: The share of ``flops`` in products that read the entry.
    """

    calls: tuple[Call, ...]
    entry: int
    exit: int
    shape: tuple[int, int, int, int]
    flops: int
    first_flops: int

    @property
    def elements(self) -> int:
        """Number of elements of the Jacobians of all tokens."""
        return numel(self.shape)

    @property
    def product_flops(self) -> int:
        """Floating-point operations of the product that replaces it, for one tangent of all tokens."""
        return 2 * self.elements

    @property
    def preparation_flops(self) -> int:
        """Floating-point operations for computing its Jacobians."""
        return self.shape[2] * (self.flops - self.first_flops)

    def gain(self, count: float, chunk: int) -> float:
        """Floating-point operations saved on ``count`` tangents, pushed ``chunk`` at a time."""
        product = self.elements * max(2.0, STREAM / chunk)
        return count * (self.flops - product) - self.preparation_flops


@dataclass(frozen=True)
class TokenJacobians:
    """The rule of a collapsed segment: ``matrices`` are ``[batch, position, width in, width out]``."""

    matrices: Tensor

    def __call__(self, call: Call) -> Callable[[Tensor], Tensor]:
        """The function that pushes a stack ``[n, batch, position, width in]``."""
        return lambda tangent: outer(inner(tangent) @ self.matrices)

    def at(self, start: int, count: int) -> TokenJacobians:
        """The Jacobians of ``count`` tokens."""
        return TokenJacobians(self.matrices.narrow(1, start, count))


def segments(
    calls: Sequence[Call], shapes: Sequence[tuple[int, ...]], length: int, targets: Iterable[int]
) -> list[Segment]:
    """Disjoint segments that a product with a Jacobian could replace for fewer operations.

    They are candidates judged by the shapes and the flow of their variables; :func:`token_jacobians` checks
    that they are token-wise.

    Args:
        calls: The operators between sources and targets.
        shapes: The shape of every variable.
        length: The number of positions.
        targets: Variables that must still be computed.
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
    """A search for the best segment that starts at a given variable."""

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
        if not first_products([self.calls[index] for index in closure], entry):
            return None
        best, saved = None, 1
        for index, segment in self._candidates(entry, closure):
            gain = segment.flops - segment.product_flops
            if gain >= saved:  # the longest of equally good ones
                best, saved = (segment, index + 1), gain
        return best

    def _candidates(self, entry: int, closure: Sequence[int]) -> Iterator[tuple[int, Segment]]:
        """The segments that end at one of the calls, each with the index of that call."""
        calls = [self.calls[index] for index in closure]
        for index in closure:
            exit_ = self.calls[index].outputs[0]
            if self._is_similar(entry, exit_, self.calls[index].dtype):
                inside = between(calls, (entry,), (exit_,))
                if self._is_closed(inside, exit_):
                    yield index, self._segment(entry, exit_, inside)

    def _is_sequence(self, variable: int) -> bool:
        shape = self.shapes[variable]
        return len(shape) == 3 and shape[1] == self.length

    def _is_similar(self, entry: int, exit_: int, dtype: torch.dtype) -> bool:
        """Whether the exit is a sequence of the same batch, length and dtype as the entry."""
        reader = self.calls[self.readers[entry][0]]
        same = self.shapes[exit_][:1] == self.shapes[entry][:1] and self._is_sequence(exit_)
        return same and dtype == reader.primals[reader.inputs.index(entry)].dtype

    def _closure(self, entry: int, first: int) -> list[int]:
        """Indices of the calls that depend on the entry alone, up to operators that mix tokens."""
        known, closure = {entry}, []
        last = max(self.readers.get(entry, [first]))
        for index in range(first, len(self.calls)):
            if index > last:
                break
            call = self.calls[index]
            if known.issuperset(call.inputs) and _may_be_tokenwise(call):
                closure.append(index)
                known.update(call.outputs)
                last = max([last, *(r for out in call.outputs for r in self.readers.get(out, []))])
        return closure

    def _is_closed(self, inside: Sequence[Call], exit_: int) -> bool:
        """Whether no other operator reads an intermediate variable."""
        members = {id(call) for call in inside}
        inner = {out for call in inside for out in call.outputs} - {exit_}
        readers = (self.calls[index] for out in inner for index in self.readers.get(out, []))
        return not inner & self.targets and all(id(call) in members for call in readers)

    def _segment(self, entry: int, exit_: int, inside: Sequence[Call]) -> Segment:
        batch, positions, width = self.shapes[entry]
        shape = (batch, positions, width, self.shapes[exit_][2])
        flops, first = (sum(map(flops_of, calls)) for calls in (inside, first_products(inside, entry)))
        return Segment(tuple(inside), entry, exit_, shape, flops, first)


def first_products(calls: Iterable[Call], entry: int) -> list[Call]:
    """The products of a variable with fixed matrices."""
    same, found = {entry}, []
    for call in calls:
        if not same.issuperset(call.inputs):
            continue
        if call.name in ("view", "_unsafe_view", "reshape") and call.shape[-1] == call.args[0].shape[-1]:
            same.update(call.outputs)
        elif call.name in MATRIX_PRODUCTS and call.argument_indices == [len(call.flat) - 2]:
            found.append(call)
    return found


def _may_be_tokenwise(call: Call) -> bool:
    """Whether an operator is real and not a matrix product of attention."""
    is_complex = call.dtype.is_complex or any(primal.is_complex() for primal in call.primals)
    return call.name not in ("bmm", "baddbmm") and not is_complex


def worthwhile(found: Sequence[Segment], count: float, chunk: int, elements: float) -> list[Segment]:
    """The segments to collapse for ``count`` tangents, whose Jacobians have at most ``elements`` in all."""
    chosen = []
    for segment in sorted(found, key=lambda segment: -segment.gain(count, chunk)):
        if segment.gain(count, chunk) > 0 and segment.elements <= elements:
            chosen.append(segment)
            elements -= segment.elements
    return chosen


def token_jacobians(segment: Segment, shapes: Sequence[tuple[int, ...]]) -> TokenJacobians | None:
    """The Jacobians of all tokens, or ``None`` if the segment is not token-wise.

    Each direction is pushed at all tokens of all examples at once. The result is right only if no token
    affects another, which is tested first; see :func:`separate`.

    Args:
        segment: The operators.
        shapes: The shape of every variable.
    """
    batch, positions, width_in, _ = segment.shape
    like = segment.calls[0].primals[0]
    with torch.no_grad():
        derivative = Linearization(segment.calls, shapes, (segment.entry,), (segment.exit,))

        def pushed(tangent: Tensor) -> Tensor:
            return next(out for _, out in derivative.push({segment.entry: tangent}))

        if not separate(pushed, like.new_empty(batch, positions, width_in)):
            return None
        matrices = like.new_empty(segment.shape)
        chunk = chunk_size(derivative.widest() * like.element_size(), like.device)
        for start, rows in _jacobian_rows(segment, shapes, chunk):
            matrices[:, :, start : start + len(rows)] = rows.permute(1, 2, 0, 3)
        probe = noise(2, like.new_empty(batch, positions, width_in))
        found = TokenJacobians(matrices)
        return found if close(found(segment.calls[0])(probe), pushed(probe)) else None


def _jacobian_rows(
    segment: Segment, shapes: Sequence[tuple[int, ...]], chunk: int
) -> Iterator[tuple[int, Tensor]]:
    """The unit vectors pushed at all tokens, ``chunk`` of them at a time, each chunk with its first index.

    The products that read the entry map unit vectors to rows of their matrices, so these rows enter as
    tangents after the products.
    """
    batch, positions, width, _ = segment.shape
    products = first_products(segment.calls, segment.entry)
    matrices = {product.outputs[0]: product.args[-1] for product in products}
    like = segment.calls[0].primals[0]
    units = torch.eye(width, dtype=like.dtype, device=like.device)
    skipped = {id(product) for product in products}
    rest = [call for call in segment.calls if id(call) not in skipped]
    derivative = Linearization(rest, shapes, (segment.entry, *matrices), (segment.exit,))
    for start in range(0, width, chunk):
        entering = {
            variable: outer(matrix[start : start + chunk].expand(*shapes[variable][:-1], -1, -1).contiguous())
            for variable, matrix in matrices.items()
        }
        at_entry = units[start : start + chunk, None, None].expand(-1, batch, positions, -1)
        yield start, next(out for _, out in derivative.push({segment.entry: at_entry} | entering))


def separate(push: Callable[[Tensor], Tensor], like: Tensor) -> bool:
    """Whether no token of any example affects another: outputs at tokens without a tangent are exactly zero.

    Tokens are numbered through the batch, and :func:`halves` of them get tangents. There is no tolerance,
    since one would let small effects pass beside a token with large values, or in half precision.

    Args:
        push: Pushes a stack ``[n, batch, position, width]``.
        like: A tensor of the shape, dtype and device of one tangent.
    """
    batch, positions, _ = like.shape
    if batch * positions == 1:
        return True
    moves = halves(batch * positions, like.device).view(-1, batch, positions)
    out = push(noise(1, like) * moves[..., None])
    return not out[~moves].any()


def halves(count: int, device: torch.device) -> Tensor:
    """Masks ``[half, count]``: for each binary digit, the numbers with a 0 there and those with a 1.

    For any two numbers there is a half with the first and without the second.
    """
    number = torch.arange(count, device=device)
    digits = range((count - 1).bit_length())
    return torch.stack([(number >> digit) & 1 == side for digit in digits for side in (0, 1)])


def noise(count: int, like: Tensor) -> Tensor:
    """A stack of random tangents, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, *like.shape, generator=generator, device="cpu").to(like)


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether two stacks of tangents ``[n, batch, position, ...]`` are equal up to rounding, at each
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
    """The operators with each segment replaced by a single operator, in the place of its last.

    A segment whose rule is ``None`` can be counted, but not run.
    """
    by_last = {id(segment.calls[-1]): (segment, rule) for segment, rule in rules}
    inside = {id(call) for segment, _ in rules for call in segment.calls}
    out = []
    for call in calls:
        if id(call) in by_last:
            segment, rule = by_last[id(call)]
            out.append(
                replace(
                    call, flat=[], argument_indices=[], inputs=[segment.entry], versions=[], rule=rule,
                    outputs=[segment.exit], flops=segment.product_flops,
                )
            )  # fmt: skip
        elif id(call) not in inside:
            out.append(call)
    return out
