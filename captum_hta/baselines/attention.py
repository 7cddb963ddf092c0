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
        corner = torch.linalg.qr(weights.mT, mode="r").R.mT  # V W_O is V times this, turned in the width
        basis, singular, _ = torch.linalg.svd(example.value @ corner, full_matrices=False)
        longest = max(example.value.shape[-2], weights.shape[-1])
        tolerance = longest * torch.finfo(singular.dtype).eps * singular[..., :1]  # as numpy's matrix_rank
        let_through = basis * (singular > tolerance)[..., None, :]
        return example.pattern @ let_through @ let_through.mT
