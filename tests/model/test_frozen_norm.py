"""Norms with a frozen scale, compared with their modules and with autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from captum_hta.model.frozen_norm import FrozenNorm, NormWeights

NORMS = {
    "LayerNorm": nn.LayerNorm,
    "RMSNorm": nn.RMSNorm,
    "a weight stored minus one": GemmaRMSNorm,
}


def random_norm(name: str, width: int) -> nn.Module:
    torch.manual_seed(0)
    norm = NORMS[name](width).double()
    for parameter in norm.parameters():
        parameter.data.normal_()
    return norm


def by_definition(norm: nn.Module, x: Tensor, added: Tensor) -> Tensor:
    """What something added to ``x`` changes in the norm's output, at the scale of ``x``."""
    weight = norm.weight + 1 if isinstance(norm, GemmaRMSNorm) else norm.weight
    if isinstance(norm, nn.LayerNorm):
        scale = (x.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        return (weight * (added - added.mean(-1, keepdim=True)) / scale).detach()
    return (weight * added / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()).detach()


@pytest.mark.parametrize("width", [8, 7])
@pytest.mark.parametrize("name", NORMS)
def test_a_frozen_norm(name: str, width: int) -> None:
    """It is an affine map that gives the norm's output, and its pull is the transpose of its push."""
    norm = random_norm(name, width)
    x, added, vector = torch.randn(3, 4, width).double()
    frozen = FrozenNorm.at(norm, x, norm(x).detach())
    close = {"rtol": 1e-5, "atol": 1e-6}  # Gemma's norm computes in float32
    torch.testing.assert_close(frozen.push(x) + frozen.bias, norm(x).detach(), **close)
    torch.testing.assert_close(frozen.push(added), by_definition(norm, x, added), **close)
    torch.testing.assert_close((frozen.pull(vector) * added).sum(-1), (frozen.push(added) * vector).sum(-1))


@pytest.mark.parametrize("name", NORMS)
def test_weights_in_half_precision(name: str) -> None:
    """They are read in single precision."""
    norm = random_norm(name, 8)
    exact = NormWeights.of(norm, torch.zeros(8).double())
    found = NormWeights.of(norm.bfloat16(), torch.zeros(8, dtype=torch.bfloat16))
    assert found.weight.dtype == torch.float32
    torch.testing.assert_close(found.weight.double(), exact.weight, rtol=0.02, atol=0.02)


def test_other_modules_are_refused() -> None:
    """A module that divides by no scale, or by one for each component."""
    x = torch.randn(3, 8)
    for module in (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.Tanh()):
        with pytest.raises(ValueError, match="neither a LayerNorm nor an RMSNorm"):
            FrozenNorm.at(module, x, module(x).detach())
