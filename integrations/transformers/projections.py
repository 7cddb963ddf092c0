"""The projections and norms of a block, as the closed form needs them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

from captum_hta.integrations.conditions import relative_error
from captum_hta.integrations.transformers.layouts import (
    Layout,
    Projection,
    norm_eps,
    norm_weight,
    taken,
    turned,
)
from captum_hta.integrations.weights import is_plain, matrix, repeated, token_norm
from captum_hta.model.attention import TokenNorm


def split_weights(layout: Layout, block: Module, heads: int, width: int) -> list[Tensor]:
    """The weights ``[head, d_head, width]`` of queries, keys and values.

    Args:
        layout: The layout.
        block: The block.
        heads: Number of query heads; keys and values of grouped heads are repeated.
        width: Width of a head.
    """
    weights = []
    for projection in (layout.query, layout.key, layout.value):
        weight = matrix(block.get_submodule(projection.name))
        weight = weight if projection.rows is None else weight[projection.rows.to(weight.device)]
        weights.append(repeated(torch.unflatten(weight, 0, (-1, width)), heads, 0))
    return weights


def later_map(projection: Projection, rotary: Tensor | None, x: Tensor, width: int) -> Tensor | None:
    """The Jacobian ``[1, 1, token or 1, d_head, d_head]`` of what follows a projection, or ``None``."""
    if projection.rotated and rotary is not None:
        return projection.factor * rotary
    if projection.factor == 1:
        return None
    return projection.factor * torch.eye(width, device="cpu").to(x)[None, None, None]


def follows(
    projection: Projection, projected: Tensor, rotary: Tensor | None, found: Tensor, bound: float
) -> bool:
    """Whether queries, keys or values are what a layout says for this batch too: nothing else, such as a
    limit of their size, changes them.

    Args:
        projection: The projection.
        projected: What its module returned, ``[batch, token, width]``.
        rotary: The rotary embedding ``[1, 1, token, d_head, d_head]``.
        found: What attention was given, ``[batch, head, token, d_head]``.
        bound: The relative error that rounding explains.
    """
    wanted = found.transpose(1, 2)
    turn = rotary[0, 0] if projection.rotated and rotary is not None else None
    expected = projection.factor * turned(taken(projected, projection.rows, wanted), turn)
    return relative_error(expected, wanted) <= bound


def knows_projections(layout: Layout, block: Module) -> bool:
    """Whether queries, keys and values are computed by plain matrices, and not by wrapped ones."""
    projections = (layout.query, layout.key, layout.value)
    return all(is_plain(block.get_submodule(one.name)) for one in projections)


def knows_norm(layout: Layout, block: Module) -> bool:
    """Whether the norm before the projections is one of PyTorch or ``transformers``."""
    norm = None if layout.norm is None else block.get_submodule(layout.norm.name)
    return norm is None or type(norm).__module__.partition(".")[0] in ("torch", "transformers")


def input_norm(layout: Layout, block: Module, x: Tensor) -> TokenNorm | None:
    """The normalisation of a block's input, or ``None`` for post-LN blocks.

    Args:
        layout: The layout.
        block: A block.
        x: Its input, ``[batch, token, width]``.
    """
    if layout.norm is None:
        return None
    norm = block.get_submodule(layout.norm.name)
    eps = norm_eps(norm)
    assert eps is not None
    return token_norm(x, norm_weight(norm, layout.norm, x), eps, centred=layout.norm.centred)
