r"""Single directions of every head, pulled back to the source: one backward pass for all heads of a layer.

For vectors :math:`v` in the space of heads' outputs :math:`y_j`, the pullbacks
:math:`g_i = v^\top \partial y_j / \partial x_i` to each source token give both the norm :math:`\| g_i \|` and
the signed part :math:`g_i^\top x_i`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.jacobian.norms import accumulation_dtype, energies, refuse_not_finite
from captum_hta.jacobian.plan import chunk_size
from captum_hta.jacobian.reverse import vector_jacobian_products
from captum_hta.model.precision import full_precision


@dataclass(frozen=True)
class Pullback:
    """What reaches the source tokens along one direction of each head and query of a layer.

    Attributes:
        energy: Squared norms of the pullbacks, ``[head, query, key]``.
        signed: Their products with the source vectors, of the same shape.
    """

    energy: Tensor
    signed: Tensor


def pulled_back(forward_pass: ForwardPass, directions: Sequence[Tensor], queries: Tensor) -> list[Pullback]:
    """Pull directions back, for each target all its heads at once.

    Args:
        forward_pass: The forward pass of one text, with one source.
        directions: For each target ``[head, query, d_head]``.
        queries: Positions of the queries ``[query]``.

    Raises:
        NotFiniteError: If an activation or a derivative is infinite or NaN.
        NoPathError: If the source does not reach a target.
    """
    with full_precision(), forward_pass.differentiable() as (sources, targets):
        (x,) = sources
        found = []
        for site, target, direction in zip(forward_pass.layers, targets, directions, strict=True):
            refuse_not_finite("activations", target[:, queries].detach().isnan())
            pullback = _pullback(target, x, direction, queries)
            if pullback is None:
                raise forward_pass.no_path(site)
            found.append(pullback)
        return found


def _pullback(target: Tensor, x: Tensor, direction: Tensor, queries: Tensor) -> Pullback | None:
    """The pullbacks to one target, a few rows at a time; ``None`` if the source does not reach it."""
    heads, count, _ = direction.shape
    at_once = chunk_size(target.numel() * target.element_size(), x.device)
    source = x.detach()[0].to(accumulation_dtype(x.device))
    energy, signed = [], []
    for rows in torch.split(torch.arange(heads * count, device="cpu"), at_once):
        cotangents = _cotangents(target, direction, queries, rows)
        (gradients,) = vector_jacobian_products(target, [x], cotangents)
        if gradients is None:
            return None
        pulled = gradients[:, 0].detach()  # row, key, width
        refuse_not_finite("derivatives", ~pulled.isfinite().flatten(1).all(0)[None])
        energy.append(energies(pulled, "frobenius"))
        signed.append((pulled.to(source) * source).sum(-1))
    shape = (heads, count)
    return Pullback(*(torch.unflatten(torch.cat(parts), 0, shape) for parts in (energy, signed)))


def _cotangents(target: Tensor, direction: Tensor, queries: Tensor, rows: Tensor) -> Tensor:
    """A cotangent for each row, ``[row, *target.shape]``; rows are numbered by head and query."""
    heads, count, width = direction.shape
    out = target.new_zeros(len(rows), *target.shape)
    head, query = rows // count, rows % count
    parts = out.reshape(len(rows), target.shape[1], heads, width)
    parts[range(len(rows)), queries[query], head] = direction[head, query].to(out)
    return out
