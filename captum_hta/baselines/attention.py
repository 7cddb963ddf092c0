"""Attention weights, and what of them reaches the output."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_hta.baselines.base import Baseline, Example, wide


class AttentionWeights(Baseline):
    """The attention pattern: where a head looks.

    References:
        Vaswani et al., "Attention Is All You Need", NeurIPS 2017; what Captum's ``LayerActivation`` gives on
        the pattern, as in its tutorial "Interpreting BERT Models (Part 2)".
    """

    name = "attention"
    crosses = True

    def of(self, example: Example) -> Tensor:
        """The values of one text, without the batch axis."""
        return example.pattern


class EffectiveAttention(Baseline):
    r"""Attention without what the values do not let through.

    :math:`A^\perp = A - A U U^\top`, with the columns of :math:`U` an orthonormal basis of the left null
    space of the values after the output projection, :math:`\{u : u^\top V W_O = 0\}`: so
    :math:`A^\perp V W_O = A V W_O`. It is ``A`` itself where the rank is the number of keys; entries may be
    negative.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.
    """

    name = "effective attention"
    crosses = True

    def of(self, example: Example) -> Tensor:
        """The values of one text, without the batch axis."""
        weights = torch.stack([wide(one.weight) for one in example.projections])
        return effective_attention(example.pattern, example.value, weights)


def effective_attention(pattern: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """Attention without its part in the left null space of the values after the output projection.

    Args:
        pattern: ``[..., query, key]``.
        value: ``[..., key, d_head]``.
        weight: Of the output projection, ``[..., d_head, width]``.

    Returns:
        Of the shape of ``pattern``; see :class:`EffectiveAttention`.
    """
    corner = torch.linalg.qr(weight.mT, mode="r").R.mT  # V W_O is V times this, turned in the width
    basis, singular, _ = torch.linalg.svd(value @ corner, full_matrices=False)
    longest = max(value.shape[-2:])  # not the width: single precision keeps values smaller than that allows
    tolerance = longest * torch.finfo(singular.dtype).eps * singular[..., :1]  # as numpy's matrix_rank
    let_through = basis * (singular > tolerance)[..., None, :]
    return pattern @ let_through @ let_through.mT
