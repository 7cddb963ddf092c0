"""A check, on every batch, that attention is what the closed form takes it for.

A model is proven on a few tokens when it is loaded. Its attention may compute something else for other texts,
such as scores that are scaled by the length of the text. So the pattern must be the softmax of the scores.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from captum_hta.model.attention import Attention, AttentionFactors
from captum_hta.model.precision import full_precision

logger = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Largest difference of a weight of the pattern in single precision, which may be that of TF32."""


def checked_factors(attention: Sequence[Attention]) -> list[Attention]:
    """The attention of every layer, without the factors of layers in which the closed form does not hold."""
    checked = []
    for layer, one in enumerate(attention):
        error = 0.0 if one.factors is None else pattern_error(one.factors)
        if one.factors is not None and error > tolerance(one.pattern.dtype):
            logger.warning(
                "the closed form does not hold for these texts in block %d, where the pattern is off the "
                "softmax of its scores by %.2g, so the general modes are taken",
                layer,
                error,
            )
            one = replace(one, factors=None)
        checked.append(one)
    return checked


def pattern_error(factors: AttentionFactors) -> float:
    """The largest difference between the pattern and the softmax of the scores of the keys that are seen."""
    wide = torch.promote_types(factors.pattern.dtype, torch.float32)
    with full_precision():
        scores = factors.scale * (factors.query.to(wide) @ factors.key.to(wide).mT)
    if factors.cap is not None:
        scores = factors.cap * (scores / factors.cap).tanh()
    if factors.bias is not None:
        scores = scores + factors.bias.to(wide)
    seen = factors.pattern > 0
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    if factors.has_sinks:
        expected = expected * factors.pattern.sum(-1, keepdim=True)
    differences = (expected - factors.pattern).where(seen, 0)
    return float(differences.abs().amax())


def tolerance(dtype: torch.dtype) -> float:
    """The difference that rounding may cause."""
    return max(TOLERANCE, 32 * torch.finfo(dtype).eps)
