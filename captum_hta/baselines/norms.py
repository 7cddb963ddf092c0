"""Norms of what each key adds to a query, after Kobayashi et al. 2020 and 2021."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_hta.baselines.base import Baseline
from captum_hta.model.activations import Activations, promoted
from captum_hta.model.attention import SumNorm
from captum_hta.model.protocol import Model


class ValueWeightedNorm(Baseline):
    r"""The norm of what a head takes from a token: :math:`\| \alpha_{ji} f(x_i) \|`, where :math:`f(x)` is
    the token's value after the output projection, or for a whole layer :math:`\| \sum_h \alpha_{ji}^h
    f^h(x_i) \|`.

    Args:
        model: An adapter around a model.
        heads: Whether to give each head (the default) or all heads of a layer together.

    References:
        Kobayashi et al., "Attention is Not Only a Weight: Analyzing Transformers with Vector Norms", EMNLP
        2020; Captum's tutorial "Interpreting BERT Models (Part 2)".
    """

    supports_cross_attention = True

    def __init__(self, model: Model, heads: bool = True) -> None:
        super().__init__(model)
        self.heads = heads
        self.name = "value-weighted norm" if heads else "value-weighted norm of the layer"
        self.axes = "batch layer head query key" if heads else "batch layer query key"

    def values(self, activations: Activations) -> Tensor:
        """``[layer, head, query, key]``, without the head axis for whole layers."""
        if self.heads:
            return activations.pattern * _norms(activations.projected)[..., None, :]
        return _norms(torch.einsum("lhqk,lhkd->lqkd", activations.pattern, activations.projected))


class ValueNorm(Baseline):
    r"""The norm of a token's value after the output projection, :math:`\| f(x_i) \|`, the same for every
    query.

    References:
        Kobayashi et al. 2020.
    """

    name = "value norm"
    supports_cross_attention = True

    def values(self, activations: Activations) -> Tensor:
        """``[layer, head, query, key]``."""
        return _norms(activations.projected)[..., None, :].expand_as(activations.pattern)


class BlockNorm(Baseline):
    """The norm of what a token adds to a block's sum of attention and residual, after the LayerNorm of that
    sum in a post-LN block.

    References:
        Kobayashi et al., "Incorporating Residual and Normalization Layers into Analysis of Masked Language
        Models", EMNLP 2021, where it is called "AttnResLn-N", or for a pre-LN block "AttnRes-N".
    """

    name = "block norm"
    axes = "batch layer query key"

    def values(self, activations: Activations) -> Tensor:
        """``[layer, query, key]``."""
        layers = range(len(activations.projections))
        return torch.stack([_norms(decomposed_block(activations, layer)[0]) for layer in layers])


def _norms(vectors: Tensor) -> Tensor:
    """Euclidean norms over the last axis."""
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return norms


def decomposed_block(activations: Activations, layer: int) -> tuple[Tensor, Tensor]:
    """Split a block's sum of attention and residual by key, after the LayerNorm of that sum if there is one.

    Args:
        activations: The text.
        layer: The block.

    Returns:
        What each key adds, ``[query, key, width]``, and the whole ``[query, width]``, which the second half
        of the block reads: the sum over keys plus the biases, which belong to no key.

    Raises:
        ValueError: If the heads' outputs are not added to the residual unchanged.
    """
    projection = activations.projections[layer]
    if not projection.residual:
        raise ValueError(
            f"{activations.model.name} normalises or scales the heads' outputs before they are added to the "
            "residual, which this method does not cover"
        )
    added = torch.einsum("hqk,hkd->qkd", activations.pattern[layer], activations.projected[layer])
    added = added + torch.diag_embed(activations.hidden[layer].mT).permute(1, 2, 0)
    whole = added.sum(1)
    if projection.bias is not None:
        whole = whole + promoted(projection.bias)
    return (added, whole) if projection.norm is None else _normalised(projection.norm, added, whole)


def _normalised(norm: SumNorm, added: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Apply a LayerNorm with the scale of the whole."""
    scale = (whole.var(-1, unbiased=False) + norm.eps).rsqrt()
    weight = promoted(norm.weight)

    def scaled(vectors: Tensor, by: Tensor) -> Tensor:
        return (vectors - vectors.mean(-1, keepdim=True)) * weight * by

    return scaled(added, scale[:, None, None]), scaled(whole, scale[:, None]) + promoted(norm.bias)
