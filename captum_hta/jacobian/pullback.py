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
            rows = _pulled(target, x, _cotangents(target, direction, queries))
            if rows is None:
                raise forward_pass.no_path(site)
            found.append(_pullback(rows, x, direction.shape[:2]))
        return found


def _cotangents(target: Tensor, direction: Tensor, queries: Tensor) -> Tensor:
    """A cotangent for each head and query, ``[head * query, *target.shape]``."""
    heads, count, _ = direction.shape
    out = target.new_zeros(heads, count, *target.shape)
    parts = out.reshape(heads, count, target.shape[1], heads, -1)
    numbers = torch.arange(count, device=out.device)
    for head in range(heads):
        parts[head, numbers, queries, head] = direction[head].to(out)
    return out.flatten(0, 1)


def _pulled(target: Tensor, x: Tensor, cotangents: Tensor) -> Tensor | None:
    """The pullbacks ``[row, key, width]``, or ``None`` if the source does not reach the target."""
    rows = chunk_size(target.numel() * target.element_size(), x.device)
    chunks = [vector_jacobian_products(target, [x], chunk)[0] for chunk in torch.split(cotangents, rows)]
    known = [chunk for chunk in chunks if chunk is not None]
    return torch.cat(known)[:, 0].detach() if known else None


def _pullback(rows: Tensor, x: Tensor, shape: Sequence[int]) -> Pullback:
    refuse_not_finite("derivatives", ~rows.isfinite().flatten(1).all(0)[None])
    source = x.detach()[0].to(accumulation_dtype(x.device))
    return Pullback(
        torch.unflatten(energies(rows, "frobenius"), 0, shape),
        torch.unflatten((rows.to(source) * source).sum(-1), 0, shape),
    )
