r"""The forward mode: tangents of each source token, pushed through the model once.

All ``D`` directions of a source token give the columns of its Jacobian blocks with every target, so one
sweep over ``tokens * D`` tangents gives every layer, head and query, exactly:

.. math:: r_{ij}^2 = \sum_{d=1}^{D} \Big\| \frac{\partial y_j}{\partial x_i} e_d \Big\|^2 .
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from captum_hta.jacobian.linearize.windowed import WindowedLinearization
from captum_hta.jacobian.norms import NORMS, Energy, accumulation_dtype, energies
from captum_hta.jacobian.query import ResolvedQuery
from captum_hta.model.precision import matmul_precision


def forward_energies(
    derivatives: Sequence[WindowedLinearization],
    sources: Sequence[Tensor],
    resolved: ResolvedQuery,
    chunk: int,
) -> list[list[Energy]]:
    """Exact energies by all tangents of every source token.

    Args:
        derivatives: For each source the derivative with respect to it.
        sources: Each ``[batch, key, width]``.
        resolved: The norm, the heads and the queries.
        chunk: Tangents carried at once.

    Returns:
        For each source a list with the energies ``[batch, head, query, key]`` of each target.
    """
    found = []
    for derivative, x in zip(derivatives, sources, strict=True):
        basis = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)[:, None, None]
        columns = [Columns(resolved.query.norm, x.shape[1]) for _ in derivative.whole.targets]
        sweep(derivative, x, basis, resolved, chunk, columns)
        found.append([column.energy() for column in columns])
    return found


class Columns:
    """The energies of one target, which tangents add up to, one source token after the other.

    ``sums`` and ``squares`` are ``[key, batch, head, query]``, allocated whole at the first tangent: if they
    grew among the tensors of a sweep, the allocator could not reuse the memory between them.
    """

    def __init__(self, norm: str, tokens: int, squares: bool = False) -> None:
        self.norm = norm
        self._tokens, self._with_squares = tokens, squares
        self._totals: list[Tensor] = []
        self._gram: dict[int, Tensor] = {}

    @property
    def sums(self) -> Tensor:
        """The sum over tangents of their energies."""
        return self._totals[0]

    @property
    def squares(self) -> Tensor:
        """The sum over tangents of their squared energies, where these are wanted."""
        return self._totals[1]

    def add(self, first: int, tangents: Tensor, last_part: bool) -> None:
        """Add ``[token, direction, batch, query, head, d_head]`` of source tokens from ``first`` on."""
        if not self._totals:
            self._allocate(tangents)
        for token, part in enumerate(tangents, first):
            if (of_gram := NORMS[self.norm].of_gram) is not None:
                self._add_gram(token, part, last_part, of_gram)
                continue
            energy = energies(part, self.norm).mT
            self.sums[token] += energy.sum(0)
            if self._with_squares:
                self.squares[token] += energy.square().sum(0)

    def _allocate(self, tangents: Tensor) -> None:
        _, _, batch, query, head, _ = tangents.shape
        shape, dtype = (self._tokens, batch, head, query), accumulation_dtype(tangents.device)
        for _ in range(1 + self._with_squares):
            self._totals.append(torch.zeros(shape, dtype=dtype, device=tangents.device))

    def _add_gram(
        self, token: int, part: Tensor, last_part: bool, of_gram: Callable[[Tensor], Tensor]
    ) -> None:
        """Add to the Gram matrix over directions; after the last of them, take its norm."""
        part = part.to(accumulation_dtype(part.device))
        gram = torch.einsum("nbqhd,nbqhe->bhqde", part, part)
        if token in self._gram:
            gram += self._gram.pop(token)
        if last_part:
            self.sums[token] = of_gram(gram)
        else:
            self._gram[token] = gram

    def energy(self) -> Energy:
        """The energies for all source tokens, ``[batch, head, query, key]``."""
        return Energy(self.sums.movedim(0, -1).contiguous())


def sweep(
    derivative: WindowedLinearization,
    x: Tensor,
    directions: Tensor,
    resolved: ResolvedQuery,
    chunk: int,
    columns: Sequence[Columns],
    tokens: range | None = None,
) -> None:
    """Push directions at every token of a source and add their energies to ``columns``.

    Args:
        derivative: The derivative that carries the tangents.
        x: The value of its source ``[batch, key, width]``.
        directions: ``[direction, batch or 1, key or 1, width]``.
        resolved: The heads and the queries.
        chunk: Tangents carried at once.
        columns: One for each target of ``derivative``.
        tokens: A range of source tokens; ``None`` for all.
    """
    tokens = tokens or range(x.shape[1])
    with torch.no_grad(), matmul_precision("highest"):
        derivative.prepare(len(tokens) * len(directions))
    index = {target: number for number, target in enumerate(derivative.whole.targets)}
    for some, part in _chunks(tokens, len(directions), chunk):
        tangents = _tangents(x, directions[part], some, resolved.query.multiply_by_inputs)
        last_part = part.stop == len(directions)
        with torch.no_grad():
            for target, tangent in _every_target(derivative, tangents, some):
                number = index[target]
                stack = tangent.reshape(len(some), -1, *tangent.shape[1:3], tangent[0, 0, 0].numel())
                columns[number].add(some.start, resolved.select(stack, number), last_part)
        resolved.advance(len(tangents))


def _every_target(
    derivative: WindowedLinearization, tangents: Tensor, tokens: range
) -> Iterator[tuple[int, Tensor]]:
    """The tangents of all targets, zero for those that this source does not reach."""
    missing = set(derivative.whole.targets)
    for target, tangent in derivative.push(tangents, tokens):
        missing.discard(target)
        yield target, tangent
    for target in missing:
        yield target, tangents.new_zeros(len(tangents), *derivative.whole.shapes[target])


def _chunks(tokens: range, directions: int, chunk: int) -> Iterator[tuple[range, slice]]:
    """Several tokens at a time with all their directions; or, where these are too many, one token at a time
    with equal parts of them.
    """
    if chunk >= directions:
        step = chunk // directions
        for first in tokens[::step]:
            yield range(first, min(first + step, tokens.stop)), slice(0, directions)
        return
    size = -(-directions // -(-directions // chunk))
    for token in tokens:
        for start in range(0, directions, size):
            yield range(token, token + 1), slice(start, min(start + size, directions))


def _tangents(x: Tensor, directions: Tensor, tokens: range, multiply_by_inputs: bool) -> Tensor:
    """``[token * direction, batch, token, width]``: one direction at one token each, zero elsewhere."""
    batch, _, width = x.shape
    out = x.new_zeros(batch, len(tokens), len(tokens), len(directions), width).movedim((2, 3), (0, 1))
    shared = directions.shape[2] == 1
    for number, token in enumerate(tokens):
        row = directions[:, :, 0 if shared else token].to(x)
        out[number, :, :, number] = row * x[:, token] if multiply_by_inputs else row
    return out.flatten(0, 1)
