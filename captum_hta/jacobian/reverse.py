r"""The reverse mode: cotangents of each target component, pulled back to the source by autograd.

Every component ``c`` of a target gives one row of its Jacobian blocks with every source token:

.. math:: r_{ij}^2 = \sum_c \Big\| \frac{\partial y_{j,c}}{\partial x_i} \Big\|^2 .
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.jacobian.norms import NORMS, Energy, accumulation_dtype
from captum_hta.jacobian.query import ResolvedQuery, joined_heads

logger = logging.getLogger(__name__)


def reverse_energies(
    forward_pass: ForwardPass,
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    resolved: ResolvedQuery,
    chunk: int,
) -> list[list[Energy]]:
    """Exact energies by cotangents of every target component.

    Args:
        forward_pass: The forward pass that joins sources and targets.
        sources: Leaves of its graph, each ``[batch, key, width]``.
        targets: The targets in that graph.
        resolved: The norm, the heads and the queries.
        chunk: Cotangents carried at once.

    Returns:
        For each source a list with the energies ``[batch, head, query, key]`` of each target.

    Raises:
        NoPathError: If no source reaches a target.
    """
    columns = []
    for number, target in enumerate(targets):
        direction = None if resolved.directions is None else resolved.directions[number]
        rows = _Rows(joined_heads(target), resolved, resolved.parts(number), direction)
        found = rows.pull_back(sources, chunk)
        if found is None:
            raise forward_pass.no_path(forward_pass.layers[number])
        columns.append(found)
    return [list(row) for row in zip(*columns, strict=True)]


class _Rows:
    """The rows of the Jacobian of one target ``[batch, position, width]``, numbered by query, head and
    component. With a norm of a weighted sum, or along a direction ``[batch, head, query, d_head]``, a head
    has a single row: that sum of its components.
    """

    def __init__(self, target: Tensor, resolved: ResolvedQuery, heads: int, direction: Tensor | None) -> None:
        self.target, self.resolved, self.heads = target, resolved, heads
        positions = torch.arange(target.shape[1], device=target.device)
        self.queries = positions if resolved.positions is None else resolved.positions
        width = target.shape[2] // heads
        weights = NORMS[resolved.query.norm].row_weights(torch.unflatten(target, -1, (heads, -1)))
        if weights is not None:
            direction = weights.expand(len(target), heads, len(self.queries), width)
        self.direction = direction
        self.components = width if direction is None else 1

    def pull_back(self, sources: Sequence[Tensor], chunk: int) -> list[Energy] | None:
        """The energies for each source, or ``None`` if no source reaches the target."""
        blocks = len(self.queries) * self.heads
        dtype = accumulation_dtype(self.target.device)
        sums = [x.new_zeros(blocks, *x.shape[:2], dtype=dtype) for x in sources]
        for rows in self._chunks(blocks * self.components, chunk):
            gradients = vector_jacobian_products(self.target, sources, self._cotangents(rows))
            if all(gradient is None for gradient in gradients):
                return None
            for total, x, gradient in zip(sums, sources, gradients, strict=True):
                if gradient is not None:
                    scaled = gradient * x if self.resolved.query.multiply_by_inputs else gradient
                    self._add(total, rows // self.components, scaled.detach().to(dtype))
            self.resolved.advance(len(rows))
        shape = (len(self.queries), self.heads)
        return [Energy(torch.unflatten(total, 0, shape).permute(2, 1, 0, 3)) for total in sums]

    def _chunks(self, rows: int, chunk: int) -> Sequence[Tensor]:
        """Chunks of row numbers; a norm of the Gram matrix needs all rows of a block together."""
        if NORMS[self.resolved.query.norm].of_gram is not None:
            chunk = max(chunk // self.components, 1) * self.components
        return torch.split(torch.arange(rows, device=self.target.device), chunk)

    def _cotangents(self, rows: Tensor) -> Tensor:
        """``[row, *target.shape]``: one at the row's component, or the weights of its sum, for every example
        of the batch.
        """
        out = self.target.new_zeros(len(rows), *self.target.shape)
        parts = torch.unflatten(out, -1, (self.heads, -1))
        numbers = torch.arange(len(rows), device=rows.device)
        blocks = rows // self.components
        query, head = self.queries[blocks // self.heads], blocks % self.heads
        if self.direction is not None:
            parts[numbers, :, query, head] = self.direction[:, head, blocks // self.heads].transpose(0, 1)
        else:
            parts[numbers, :, query, head, rows % self.components] = 1
        return out

    def _add(self, total: Tensor, blocks: Tensor, gradients: Tensor) -> None:
        """Add the energies of gradients ``[row, batch, key, width]`` to those of their block."""
        of_gram = NORMS[self.resolved.query.norm].of_gram
        if of_gram is None:
            total.index_add_(0, blocks, gradients.square().sum(-1))
            return
        grouped = torch.unflatten(gradients, 0, (-1, self.components))
        gram = torch.einsum("gcbkw,gebkw->gbkce", grouped, grouped)
        total[blocks[:: self.components]] = of_gram(gram)


def vector_jacobian_products(
    target: Tensor, sources: Sequence[Tensor], cotangents: Tensor
) -> list[Tensor | None]:
    """Vector-Jacobian products of a stack of cotangents, one at a time where they do not vectorise."""
    options = {"retain_graph": True, "allow_unused": True}
    try:
        return list(torch.autograd.grad(target, sources, cotangents, is_grads_batched=True, **options))
    except RuntimeError as error:
        logger.info("the backward pass does not vectorise, so it runs once a component: %s", error)
    rows = [torch.autograd.grad(target, sources, row, **options) for row in cotangents]
    return [None if parts[0] is None else torch.stack(parts) for parts in zip(*rows, strict=True)]
