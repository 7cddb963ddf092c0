"""Weights of projections and norms, as the core's closed forms and baselines take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import LayerNorm, Linear, Module
from transformers.pytorch_utils import Conv1D

from captum_hta.model.attention import SumNorm, TokenNorm


def is_plain(projection: Module) -> bool:
    """Whether a projection is a plain matrix, and nothing that wraps or replaces one."""
    return type(projection) in (Linear, Conv1D)


def matrix(projection: Module) -> Tensor:
    """The weight ``[out, in]`` of a plain projection; GPT-2's ``Conv1D`` stores its transpose."""
    weight = weight_of(projection)
    return weight if isinstance(projection, Linear) else weight.T


def weight_of(module: Any) -> Tensor:
    """The weight of a module, detached; it need not be a parameter, as after pruning."""
    weight: Tensor = module.weight
    return weight.detach()


def linear_map(
    projection: Module, width: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The matrix ``[in, out]`` and the bias ``[out]`` of a projection.

    They are read from a plain projection, and otherwise computed from its outputs for a basis.

    Args:
        projection: A module that is an affine map.
        width: Its input width.
        device: Where the basis is made.
        dtype: Dtype of the basis.
    """
    if is_plain(projection):
        bias = projection.bias
        return matrix(projection).T, bias.detach() if isinstance(bias, Tensor) else None
    basis = torch.eye(width, device=device, dtype=dtype)
    with torch.no_grad():
        offset: Tensor = projection(torch.zeros_like(basis[:1])[None])[0, 0]
        return projection(basis[None])[0] - offset, offset


def is_affine(module: Module, x: Tensor) -> bool:
    """Whether a module is an affine map of its only argument, ``[batch, token, width]``.

    Args:
        module: The module.
        x: An argument that it takes, to which others are compared.
    """
    if is_plain(module):
        return True
    with torch.inference_mode():
        try:
            zero, one, other, both = (module(scale * x) for scale in (0.0, 1.0, -2.0, -1.0))
        except Exception:  # whatever the module raises when it lacks other arguments
            return False
    if not isinstance(zero, Tensor):
        return False
    scale = max(value.abs().max().item() for value in (one, other))
    error = (one + other - zero - both).abs().max().item()
    return bool(error <= 64 * torch.finfo(x.dtype).eps * scale)


def repeated(value: Tensor, heads: int, dim: int) -> Tensor:
    """Keys or values of grouped heads, repeated for each query head."""
    return value.repeat_interleave(heads // value.shape[dim], dim)


def sum_norm(norm: Module) -> SumNorm:
    """The parameters of a LayerNorm of PyTorch.

    Raises:
        ValueError: If it is another module.
    """
    if not isinstance(norm, LayerNorm):
        raise ValueError(
            f"a {type(norm).__name__} stands in the place of a LayerNorm, so what it adds up is not known: "
            "merge adapters into the weights, as merge_and_unload() of PEFT does"
        )
    return SumNorm(norm.weight.detach(), norm.bias.detach(), norm.eps)


def token_norm(x: Tensor, weight: Tensor, eps: float, centred: bool) -> TokenNorm:
    """The normalisation at ``x``.

    Args:
        x: The norm's input, ``[batch, token, width]``.
        weight: ``[width]``.
        eps: Added to the variance.
        centred: Whether the mean is removed (LayerNorm).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    inverse = (wide.square().mean(-1) + eps).rsqrt()
    return TokenNorm(normalised=wide * inverse[..., None], inverse=inverse, weight=weight, centred=centred)
