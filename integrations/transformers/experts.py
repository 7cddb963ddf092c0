"""Mixtures of experts in float64, in which PyTorch has no grouped matrix product."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from captum_hta.integrations.transformers.attention import SWITCH

GROUPED = "grouped_mm"
BATCHED = "batched_mm"


@contextmanager
def computable_experts(model: PreTrainedModel) -> Iterator[None]:
    """Within the context, experts in float64 are computed by batched matrix products, not grouped ones."""
    before = model.get_experts_implementation() if hasattr(model, "get_experts_implementation") else {}
    if model.dtype != torch.float64 or GROUPED not in before.values():
        yield
        return
    with SWITCH.changed(
        lambda: model.set_experts_implementation(BATCHED), lambda: model.set_experts_implementation(before)
    ):
        yield
