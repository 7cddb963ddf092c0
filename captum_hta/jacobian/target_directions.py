r"""Directions in the space of a target: how much of a token is in one component of a target.

For a vector :math:`v` in the space of a target,

.. math:: r_{ij} = \Big\| v^\top \frac{\partial y_j}{\partial x_i} \Big\|_2 ,

which takes one backward pass for each head and query.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Module

from captum_hta.jacobian.arguments import as_int, is_integer
from captum_hta.model.protocol import Model

LARGE = 1e4
"""Size of the components that norms are probed with, large enough that their epsilon does not matter."""


def directions_for(
    direction: Tensor | Sequence[Tensor], shapes: Sequence[tuple[int, int, int, int]], like: Tensor
) -> list[Tensor]:
    """For each target its directions, expanded to all examples, heads and queries.

    Args:
        direction: One for all targets, or one for each: ``[d_head]``, ``[head, d_head]`` or
            ``[batch, head, query, d_head]``, any of whose first three axes may be 1; of a target without
            heads ``[width]`` or ``[batch, query, width]``.
        shapes: For each target ``(batch, heads, queries, d_head)``.
        like: A tensor of the model.

    Raises:
        ValueError: If a direction does not fit its target, or holds no finite numbers.
        TypeError: If it is no tensor, nor a list of tensors.
    """
    if not isinstance(direction, Tensor | list | tuple):
        raise TypeError(f"direction must be a tensor or a list of tensors, got {direction!r}")
    each = [direction] * len(shapes) if isinstance(direction, Tensor) else list(direction)
    if len(each) != len(shapes):
        raise ValueError(f"direction has {len(each)} tensors for {len(shapes)} targets: pass one for each")
    return [_direction(one, shape, like) for one, shape in zip(each, shapes, strict=True)]


def _direction(direction: Tensor, shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
    if not isinstance(direction, Tensor) or not direction.is_floating_point():
        raise TypeError(f"direction must be a tensor of floating-point numbers, got {direction!r}")
    batch, heads, queries, width = shape
    value = direction.detach().to(like)
    if value.dim() == 2:
        value = value[None, :, None]
    if value.dim() == 3 and heads == 1:
        value = value[:, None]
    fits = value.dim() in (1, 4) and value.shape[-1] == width
    fits = fits and all(have in (1, want) for have, want in zip(value.shape[:-1], shape[:-1], strict=False))
    if not fits:
        wanted = f"[{width}] or [{batch}, {queries}, {width}]"
        if heads > 1:
            wanted = f"[{width}], [{heads}, {width}] or [{batch}, {heads}, {queries}, {width}]"
        raise ValueError(f"direction is {list(direction.shape)}, but this target takes {wanted}")
    if not value.isfinite().all():
        raise ValueError("direction holds infinite numbers or NaN: pass finite ones")
    return value.expand(shape)


def logit_direction(
    model: Model, token: int | str, against: int | str | None = None, final_norm: bool = True
) -> Tensor:
    r"""For each head the direction of its direct effect on a logit.

    The output :math:`z` of head ``h`` adds :math:`z^\top W_O^h\, \Gamma\, u_t / \sigma` to the logit of token
    ``t`` when it passes no later block. Here :math:`u_t` is the column of the unembedding, :math:`\Gamma` the
    weight and the centring of the final norm, and :math:`\sigma` its scale, which is frozen: as a factor of
    whole rows it does not change contributions.

    Args:
        model: An adapter around a decoder with a language modelling head.
        token: A token, by its id or as a text of one token.
        against: Another token, whose logit is subtracted. Default: ``None``.
        final_norm: Whether to include :math:`\Gamma`. Default: ``True``.

    Returns:
        ``[layer, head, d_head]``, ready for ``contributions(..., direction=...)``.

    Raises:
        ValueError: If the model has no unembedding, a text is not one token of it, or heads' outputs are
            normalised before they are added.
        TypeError: If a token is neither an id nor a text.
    """
    unembedding = model.unembedding
    vector = _column(model, unembedding.weight, token)
    if against is not None:
        vector = vector - _column(model, unembedding.weight, against)
    if final_norm and unembedding.norm is not None:
        vector = through_frozen_norm(unembedding.norm, vector)
    projections = [model.output_projection(layer) for layer in range(model.num_layers)]
    if not all(projection.residual for projection in projections):
        raise ValueError(
            f"{model.name} normalises or scales the outputs of its heads before it adds them, so no "
            "direction in the space of a head stands for a logit"
        )
    return torch.stack([projection.weight @ vector for projection in projections])


def _column(model: Model, weight: Tensor, token: int | str) -> Tensor:
    """The row of the unembedding for a token, ``[width]``."""
    named = model.token(token) if isinstance(token, str) else token
    if not is_integer(named):
        raise TypeError(f"a token must be an id or a text, got {token!r}")
    number = as_int(named)
    if not 0 <= number < len(weight):
        raise ValueError(f"there is no token {number}: the model has {len(weight)} tokens")
    return weight[number]


def through_frozen_norm(norm: Module, vector: Tensor) -> Tensor:
    """A vector behind a norm, pulled back through the norm with its scale frozen: ``[width]``.

    Norms store their weights in different ways (as they are, or minus one), so the weights are read off the
    norm's outputs, in at least single precision.
    """
    if vector.dtype in (torch.float16, torch.bfloat16):
        return through_frozen_norm(copy.deepcopy(norm).float(), vector.float()).to(vector)
    with torch.no_grad():
        ones = torch.ones_like(vector)
        constant = _odd_part(norm, LARGE * ones)
        if constant.abs().max() > 1e-3 * _odd_part(norm, LARGE * _signs(vector)).abs().max():
            return constant * vector  # a norm by the root mean square
        signs = _signs(vector)
        offset = signs - signs.mean()
        weight = _odd_part(norm, LARGE * signs) * offset.square().mean().sqrt() / offset
        scaled = weight * vector
        return scaled - scaled.mean()


def _odd_part(norm: Module, x: Tensor) -> Tensor:
    """The output of a norm without its bias."""
    odd: Tensor = (norm(x) - norm(-x)) / 2
    return odd


def _signs(vector: Tensor) -> Tensor:
    """Alternating one and minus one, ``[width]``."""
    signs = torch.ones_like(vector)
    signs[1::2] = -1
    return signs
