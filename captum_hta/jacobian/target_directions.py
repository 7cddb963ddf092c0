r"""Directions in the space of a target: how much of a token is in one component of a target.

For a vector :math:`v` in the space of a target,

.. math:: r_{ij} = \Big\| v^\top \frac{\partial y_j}{\partial x_i} \Big\|_2 ,

which takes one backward pass for each head and query.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from captum_hta.jacobian.arguments import as_int, is_integer
from captum_hta.model.frozen_norm import NormWeights
from captum_hta.model.protocol import Model


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
    vector = unembedding.weight[token_id(model, token)]
    if against is not None:
        vector = vector - unembedding.weight[token_id(model, against)]
    if final_norm and unembedding.norm is not None:
        weights = NormWeights.of(unembedding.norm, vector)
        vector = weights.pull(vector.to(weights.weight)).to(vector)
    projections = [model.output_projection(layer) for layer in range(model.num_layers)]
    if not all(projection.residual for projection in projections):
        raise ValueError(
            f"{model.name} normalises or scales the outputs of its heads before it adds them, so no "
            "direction in the space of a head stands for a logit"
        )
    return torch.stack([projection.weight @ vector for projection in projections])


def token_id(model: Model, token: int | str) -> int:
    """The id of a token that has a logit.

    Raises:
        ValueError: If the model has no such logit, or a text is not one token of it.
        TypeError: If the token is neither an id nor a text.
    """
    named = model.token(token) if isinstance(token, str) else token
    if not is_integer(named):
        raise TypeError(f"a token must be an id or a text, got {token!r}")
    number, count = as_int(named), len(model.unembedding.weight)
    if not 0 <= number < count:
        raise ValueError(f"there is no token {number}: the model has {count} tokens")
    return number
