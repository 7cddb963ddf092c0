"""Attention weights, and the part of them that affects a head's output."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_hta.baselines.base import Baseline
from captum_hta.model.activations import Activations, promoted


class AttentionWeights(Baseline):
    """The model's own attention pattern.

    References:
        Vaswani et al., "Attention Is All You Need", NeurIPS 2017; equal to Captum's ``LayerActivation`` on
        the pattern, as in its tutorial "Interpreting BERT Models (Part 2)".
    """

    name = "attention"
    supports_cross_attention = True

    def values(self, activations: Activations) -> Tensor:
        """``[layer, head, query, key]``."""
        return activations.pattern


class EffectiveAttention(Baseline):
    r"""Attention without the part that has no effect on the head's output.

    :math:`A^\perp = A - A U U^\top`, where the columns of :math:`U` are an orthonormal basis of the left null
    space of the values after the output projection, :math:`\{u : u^\top V W_O = 0\}`; hence
    :math:`A^\perp V W_O = A V W_O`. It equals ``A`` where that null space is empty; entries may be negative.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.
    """

    name = "effective attention"
    supports_cross_attention = True

    def values(self, activations: Activations) -> Tensor:
        """``[layer, head, query, key]``."""
        weights = torch.stack([promoted(one.weight) for one in activations.projections])
        return effective_attention(activations.pattern, activations.value, weights)


def effective_attention(pattern: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """Remove the part of attention in the left null space of the values after the output projection.

    Args:
        pattern: ``[..., query, key]``.
        value: ``[..., key, d_head]``.
        weight: The output projection, ``[..., d_head, width]``.

    Returns:
        A tensor with the shape of ``pattern``; see :class:`EffectiveAttention`.
    """
    # V W_O = (V corner) Q^T, where Q^T has orthonormal rows: both products have the same left null space.
    corner = torch.linalg.qr(weight.mT, mode="r").R.mT
    basis, singular, _ = torch.linalg.svd(value @ corner, full_matrices=False)
    longest = max(value.shape[-2:])  # not the width: single precision resolves smaller values than it allows
    tolerance = longest * torch.finfo(singular.dtype).eps * singular[..., :1]  # as numpy's matrix_rank
    let_through: Tensor = basis * (singular > tolerance)[..., None, :]
    return pattern @ let_through @ let_through.mT
