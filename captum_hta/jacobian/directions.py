r"""Contributions along a direction: not how much of a token is in a target, but how much of it is in what the
target says about something.

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

from captum_hta.model.protocol import Model

LARGE = 1e4
"""Length of the components that norms are probed with, beside which their epsilon is nothing."""


def directions_for(
    direction: Tensor | Sequence[Tensor], shapes: Sequence[tuple[int, int, int, int]], like: Tensor
) -> list[Tensor]:
    """For each target its directions, in full.

    Args:
        direction: One for all targets, or one for each: ``[d_head]``, ``[head, d_head]`` or
            ``[batch, head, query, d_head]``, any of whose first three axes may be 1; of a target without
            heads ``[width]`` or ``[batch, query, width]``.
        shapes: For each target ``(batch, heads, queries, d_head)``.
        like: A tensor of the model.

    Raises:
        ValueError: If a direction does not fit its target, or holds no finite numbers.
        TypeError: If it is no tensor.
    """
    several = isinstance(direction, list | tuple)
    each = list(direction) if several else [direction] * len(shapes)
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


def check_direction(
    direction: object, norm: str, n_probes: int | None, tolerance: float | None, mode: str | None
) -> None:
    """Check the arguments that come with a direction, if there is one.

    Raises:
        ValueError: If another norm, an estimate or another way is asked for.
    """
    if direction is None:
        return
    if norm != "frobenius":
        raise ValueError(f"along a direction there is one norm, the vector's length: leave out norm={norm!r}")
    if n_probes is not None or tolerance is not None:
        raise ValueError(
            "along a direction the exact result takes one backward pass a head and query: leave out n_probes "
            "and tolerance"
        )
    if mode not in (None, "reverse"):
        raise ValueError(f"along a direction the way is 'reverse', got {mode!r}: leave out mode")


def logit_direction(
    model: Model, token: int | str, against: int | str | None = None, final_norm: bool = True
) -> Tensor:
    r"""What each head says about a logit: the directions of its direct effect.

    The output :math:`z` of head ``h`` reaches the logit of token ``t`` past all later blocks as
    :math:`z^\top W_O^h\, \Gamma\, u_t / \sigma`, with the column :math:`u_t` of the unembedding and the final
    norm frozen: its scale :math:`\sigma` is taken as it is, and as a factor of whole rows it leaves
    contributions as they are; its weight and its centring are :math:`\Gamma`.

    Args:
        model: An adapter around a decoder with a head.
        token: A token, by its id or as a text of one token.
        against: Another one, whose logit is subtracted. Default: ``None``.
        final_norm: Whether ``Gamma`` is part of it. Without it, directions are those of the bare unembedding.

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
            f"{model.name} normalises or scales what its heads say before it is added, so no direction of "
            "a head stands for a logit"
        )
    return torch.stack([projection.weight @ vector for projection in projections])


def _column(model: Model, weight: Tensor, token: int | str) -> Tensor:
    number = model.token(token) if isinstance(token, str) else token
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"a token is an id or a text, got {token!r}")
    if not 0 <= number < len(weight):
        raise ValueError(f"token {number} is none: the model has {len(weight)}")
    return weight[number]


def through_frozen_norm(norm: Module, vector: Tensor) -> Tensor:
    """A vector of the normed space, taken back through a norm whose scale stays: ``[width]``.

    Weights are stored in several ways (as they are, or less one), so they are read off what the norm does, in
    at least single precision.
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
    """What a norm does but for its bias."""
    return (norm(x) - norm(-x)) / 2


def _signs(vector: Tensor) -> Tensor:
    """One and minus one in turn."""
    return 1 - 2 * (torch.arange(len(vector), device=vector.device) % 2).to(vector)
