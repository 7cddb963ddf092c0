"""The projections and norms of a block, as the closed form needs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

from captum_hta.integrations.conditions import relative_error
from captum_hta.integrations.transformers.layouts import (
    Layout,
    Projection,
    norm_eps,
    norm_weight,
    normalised_heads,
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
    weights = (weight_in(one, block) for one in (layout.query, layout.key, layout.value))
    return [repeated(torch.unflatten(weight, 0, (-1, width)), heads, 0) for weight in weights]


def weight_in(projection: Projection, block: Module) -> Tensor:
    """The weight ``[head * d_head, width]`` of a projection of a block."""
    weight = matrix(block.get_submodule(projection.name))
    return weight if projection.rows is None else weight[projection.rows.to(weight.device)]


@dataclass(frozen=True)
class LaterMap:
    """What follows the projection of queries or of keys, at one forward pass.

    Attributes:
        jacobian: ``[batch or 1, head or 1, token or 1, d_head, row]``; ``row`` is ``d_head``, or one more
            with ``row``. ``None`` if nothing follows.
        row: The further row ``[batch, token, width]`` of the projection, where a norm of all heads together
            follows; ``None`` without one.
    """

    jacobian: Tensor | None
    row: Tensor | None = None


def later_map(
    projection: Projection, block: Module, projected: Tensor, rotary: Tensor | None, heads: int, found: Tensor
) -> LaterMap | None:
    """What follows a projection; ``None`` if it is not known.

    Args:
        projection: The projection.
        block: The block.
        projected: What its module returned, ``[batch, token, width]``.
        rotary: The rotary embedding ``[1, 1, token, d_head, d_head]``.
        heads: Number of query heads.
        found: What attention was given, ``[batch, head, token, d_head]``.
    """
    row, jacobian = None, None
    if projection.norm is not None:
        value = taken(projected, projection.rows, found.transpose(1, 2))
        norm, _ = normalised_heads(block.get_submodule(projection.norm), value)
        is_whole = norm.normalised.dim() == 3
        if is_whole and norm.centred:
            return None
        jacobian = _jacobian_together(norm, found.shape[-1]) if is_whole else _jacobian(norm)
        jacobian = repeated(jacobian, heads, 1)
        weight = weight_in(projection, block)
        row = norm.normalised.to(weight) @ weight if is_whole else None
    if projection.rotated and rotary is not None:
        jacobian = rotary if jacobian is None else rotary.to(jacobian) @ jacobian
    if projection.factor != 1:
        unit = torch.eye(found.shape[-1], device="cpu").to(found)[None, None, None]
        jacobian = projection.factor * (unit if jacobian is None else jacobian)
    return LaterMap(jacobian, row)


def _jacobian(norm: TokenNorm) -> Tensor:
    r"""The Jacobians of the norm of each head, :math:`\Gamma\,(P - \hat y \hat y^\top / d) / \sigma`:
    ``[batch, head, token, d_head, d_head]``.
    """
    unit, width = norm.normalised, norm.normalised.shape[-1]
    centre = torch.eye(width, device="cpu").to(unit) - (1 / width if norm.centred else 0)
    jacobian = centre - unit[..., :, None] * unit[..., None, :] / width
    return (jacobian * (norm.weight * norm.inverse[..., None])[..., None]).transpose(1, 2)


def _jacobian_together(norm: TokenNorm, width: int) -> Tensor:
    r"""The Jacobians of an RMSNorm of all heads together, ``N`` wide: ``[batch, head, token, d_head, row]``.

    One head's part, times the projection ``W``, is :math:`\Gamma_h \big( W_h - \hat y_h\, r^\top / N \big) /
    \sigma` with :math:`r = W^\top \hat y`, which is the further row.
    """
    scale = norm.weight * norm.inverse[..., None]
    column = -scale * norm.normalised / norm.normalised.shape[-1]
    scale, column = (torch.unflatten(one, -1, (-1, width)).transpose(1, 2) for one in (scale, column))
    return torch.cat([torch.diag_embed(scale), column[..., None]], -1)


def follows(
    projection: Projection,
    block: Module,
    projected: Tensor,
    rotary: Tensor | None,
    found: Tensor,
    bound: float,
) -> bool:
    """Whether queries, keys or values are what a layout says for this batch too: nothing else, such as a
    limit of their size, changes them.

    Args:
        projection: The projection.
        block: The block.
        projected: What its module returned, ``[batch, token, width]``.
        rotary: The rotary embedding ``[1, 1, token, d_head, d_head]``.
        found: What attention was given, ``[batch, head, token, d_head]``.
        bound: The relative error that rounding explains.
    """
    wanted = found.transpose(1, 2)
    turn = rotary[0, 0] if projection.rotated and rotary is not None else None
    value = taken(projected, projection.rows, wanted)
    if projection.norm is not None:
        value = normalised_heads(block.get_submodule(projection.norm), value)[1]
    expected = projection.factor * turned(value, turn)
    return relative_error(expected, wanted) <= bound


def knows_projections(layout: Layout, block: Module) -> bool:
    """Whether queries, keys and values are computed by plain matrices, and not by wrapped ones."""
    projections = (layout.query, layout.key, layout.value)
    return all(is_plain(block.get_submodule(one.name)) for one in projections)


def knows_norm(layout: Layout, block: Module) -> bool:
    """Whether the norms before and after the projections are of PyTorch or ``transformers``."""
    later = [one.norm for one in (layout.query, layout.key) if one.norm is not None]
    names = later if layout.norm is None else [layout.norm.name, *later]
    modules = (type(block.get_submodule(name)).__module__ for name in names)
    return all(module.partition(".")[0] in ("torch", "transformers") for module in modules)


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
