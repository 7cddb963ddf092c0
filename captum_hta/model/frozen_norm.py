r"""LayerNorm and RMSNorm with their scale frozen, which makes them affine maps.

At a token :math:`x` a norm gives :math:`w \odot (x - m\,\bar x) / \sigma + b`, where :math:`m` is 1 for a
LayerNorm and 0 for an RMSNorm. With :math:`\sigma` held at its value for the token, every part of :math:`x`
has an effect of its own on the output (Elhage et al., "A Mathematical Framework for Transformer Circuits",
2021).

Norms store their weights in different ways (as they are, or minus one), so weights and biases are read off
the norm's outputs, and the scale is found by comparing its output with its input.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

LARGE = 1e4
"""Size of the components that norms are probed with, large enough that their epsilon does not matter."""
TOLERANCE = 1e-3
"""Largest relative error of a norm's output that rounding explains."""


@dataclass(frozen=True)
class NormWeights:
    """The parameters of a norm.

    Attributes:
        weight, bias: ``[width]``.
        centred: Whether the mean is removed (LayerNorm).
    """

    weight: Tensor
    bias: Tensor
    centred: bool

    @classmethod
    def of(cls, norm: Module, like: Tensor) -> NormWeights:
        """Read the parameters off the outputs of a norm, in at least single precision.

        Args:
            norm: The norm.
            like: A tensor ``[..., width]`` with the norm's device and dtype.
        """
        if like.dtype in (torch.float16, torch.bfloat16):
            return cls.of(copy.deepcopy(norm).float(), like.float())
        with torch.no_grad():
            ones = like.new_ones(like.shape[-1])
            signs = _signs(ones)
            constant, bias = _parts(norm, LARGE * ones)
            alternating, _ = _parts(norm, LARGE * signs)
            if constant.abs().max() > 1e-3 * alternating.abs().max():
                return cls(constant, bias, centred=False)
            offset = signs - signs.mean()
            return cls(alternating * offset.square().mean().sqrt() / offset, bias, centred=True)

    def pull(self, vector: Tensor) -> Tensor:
        """Vectors ``[..., width]`` behind the norm, pulled back through it with a scale of 1."""
        scaled = self.weight * vector
        return scaled - scaled.mean(-1, keepdim=True) if self.centred else scaled

    def push(self, vector: Tensor) -> Tensor:
        """Vectors ``[..., width]`` before the norm, carried through it with a scale of 1 and no bias."""
        moved = vector - vector.mean(-1, keepdim=True) if self.centred else vector
        return self.weight * moved


@dataclass(frozen=True)
class FrozenNorm:
    r"""A norm whose scale is frozen at some tokens.

    Attributes:
        weights: Its parameters.
        inverse: :math:`1 / \sigma`, ``[token]``.
    """

    weights: NormWeights
    inverse: Tensor

    @classmethod
    def at(cls, norm: Module, x: Tensor, y: Tensor) -> FrozenNorm:
        """Freeze a norm.

        Args:
            norm: The norm.
            x: Its inputs ``[token, width]``, in the norm's dtype.
            y: Its outputs of the same shape.

        Raises:
            ValueError: If the module is neither a LayerNorm nor an RMSNorm.
        """
        weights = NormWeights.of(norm, x)
        wide = torch.promote_types(x.dtype, torch.float32)
        scaled, found = weights.push(x.to(wide)), y.to(wide) - weights.bias.to(wide)
        inverse = (found * scaled).sum(-1) / scaled.square().sum(-1).clamp_min(torch.finfo(wide).tiny)
        error = (found - inverse[:, None] * scaled).norm()
        if error > max(TOLERANCE, 8 * torch.finfo(y.dtype).eps) * found.norm():
            raise ValueError(
                f"{type(norm).__name__} is neither a LayerNorm nor an RMSNorm, so it has no scale to freeze"
            )
        return cls(weights, inverse)

    @property
    def bias(self) -> Tensor:
        """What the norm adds to every token, ``[width]``."""
        return self.weights.bias.to(self.inverse)

    def pull(self, vector: Tensor) -> Tensor:
        """Vectors ``[token, width]`` behind the norm, pulled back through it."""
        return self.inverse[:, None] * self.weights.pull(vector)

    def push(self, vector: Tensor) -> Tensor:
        """Vectors ``[token, width]`` before the norm, carried through it, without the bias."""
        return self.inverse[:, None] * self.weights.push(vector)


def _parts(norm: Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output of a norm without its bias, and the bias."""
    plus, minus = norm(x), norm(-x)
    return (plus - minus) / 2, (plus + minus) / 2


def _signs(vector: Tensor) -> Tensor:
    """Alternating one and minus one, ``[width]``."""
    signs = torch.ones_like(vector)
    signs[1::2] = -1
    return signs
