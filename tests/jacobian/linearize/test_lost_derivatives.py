"""Operators that lose a derivative on the way to a target are refused by name."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from conftest import WordTokenizer, tiny_bert
from torch import Tensor, nn
from transformers import BertModel

from captum_hta import HiddenTokenAttribution, contributions, load_model
from captum_hta.jacobian.linearize.lost_derivatives import LostDerivativeError

MODES: list[dict] = [
    {},
    {"mode": "forward"},
    {"mode": "reverse"},
    {"n_probes": 3},
    {"direction": torch.ones(8)},
]
WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


@torch.library.custom_op("captum_hta_tests::cosine", mutates_args=())
def cosine(x: Tensor) -> Tensor:
    """An operator without a derivative of any kind."""
    return x.cos()


LIBRARY = torch.library.Library("captum_hta_plain", "DEF")
LIBRARY.define("double(Tensor x) -> Tensor")
LIBRARY.impl("double", lambda x: 2 * x, "CPU")


class Residual(nn.Module):
    """Adds to its input a function of it, after a mixing of tokens."""

    def __init__(self, function) -> None:
        super().__init__()
        self.embed, self.out = nn.Identity(), nn.Identity()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.out(x + self.function(x.cumsum(1)))


def int8_product(x: Tensor) -> Tensor:
    """A linear layer with activations and weights rounded to 8 bits, computed in integers."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    numbers = (x / scale).round().clamp(-128, 127).to(torch.int8)
    return numbers.to(torch.int32).matmul((WEIGHT * 30).to(torch.int32)).to(x.dtype) * scale / 30


def quantized(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8).dequantize()


def float8(x: Tensor) -> Tensor:
    return torch.floor(x.to(torch.float32) * 16) / 16


LOST = {
    "dynamic quantisation": (
        torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear}),
        "quantized::linear_dynamic of module 'function.0'",
    ),
    "int8 product": (int8_product, "round"),
    "cast to integers": (lambda x: (x * 10).to(torch.int16).float() / 10, "_to_copy"),
    "quantised numbers": (quantized, "quantize_per_tensor"),
    "fixed point": (float8, "floor"),
    "operator of a library": (torch.ops.captum_hta_plain.double, "captum_hta_plain::double"),
    "into a buffer": (lambda x: torch.zeros_like(x).copy_(x.round()), "round"),
    "in place": (lambda x: (x * 1).round_().sin(), "round"),
    "through a view": (lambda x: x.round().mT.mT.flatten(1).view(x.shape), "round"),
    "under no_grad": (torch.no_grad()(int8_product), "round"),
}


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("name", LOST)
def test_losses_are_refused(name: str, options: dict) -> None:
    """They are refused in every mode with the operator's name, although other paths have derivatives."""
    function, operator = LOST[name]
    model = Residual(function)
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1))
    with pytest.raises(LostDerivativeError, match=f"lost in the operator {operator}.*floating point"):
        HiddenTokenAttribution(model, model.out, model.embed).attribute(x, **options)


@pytest.mark.parametrize("options", MODES, ids=str)
def test_operator_that_autograd_refuses(options: dict) -> None:
    """The error names the operator, in every mode."""
    model = Residual(cosine)
    x = torch.randn(1, 4, 8)
    with pytest.raises(ValueError, match=r"captum_hta_tests\.cosine"):
        HiddenTokenAttribution(model, model.out, model.embed).attribute(x, **options)


def experts(x: Tensor) -> Tensor:
    """Routes each token to one of two experts, by the index of its largest score, once as a mask."""
    scores = (x @ WEIGHT)[..., :2].softmax(-1)
    best = scores.topk(1, -1)
    mask = torch.nn.functional.one_hot(best.indices.squeeze(-1), 2).to(x.dtype)
    outs = torch.stack([x.sin(), x @ WEIGHT], -1)
    return (outs * mask[..., None, :]).sum(-1) * best.values


def by_index(x: Tensor) -> Tensor:
    """Tokens in the order of their first component, and a table by a rounded number."""
    order = x[..., 0].argsort(1)
    table = torch.linspace(0, 1, 50)[(x[..., :1].abs() * 5).round().long().clamp(0, 49)]
    return x.gather(1, order[..., None].expand_as(x)) * (1 + table)


SELECTIONS = {
    "experts": experts,
    "indices": by_index,
    "comparison": lambda x: x * (x > 0).to(x.dtype) + x.sign() * x.square(),
    "mask of scores": lambda x: x.masked_fill(x < x.mean(), -1.0).softmax(-1),
    "largest": lambda x: x * torch.nn.functional.one_hot(x.argmax(-1), 8),
    "length in a number": lambda x: x / float(x.shape[1]),
    "shape only": lambda x: x + torch.zeros_like(x.round()) + x.new_ones(x.shape),
    "straight through, detached": lambda x: x + (x.round() - x).detach(),
    "rounded elsewhere": lambda x: (x.round(), x.sin())[1],
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_selections_are_right(name: str) -> None:
    """Masks, indices and shapes stay fixed: all modes give the same."""
    model = Residual(SELECTIONS[name]).double()
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1)).double()
    global WEIGHT
    WEIGHT = WEIGHT.double()
    hta = HiddenTokenAttribution(model, model.out, model.embed)
    forward, reverse = (hta.attribute(x, mode=mode) for mode in (None, "reverse"))
    WEIGHT = WEIGHT.float()
    torch.testing.assert_close(forward, reverse, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("function", "warned"),
    [
        (lambda x: x * x.detach(), True),
        (lambda x: x * torch.no_grad()(torch.sin)(x), True),
        (lambda x: x * x.data.sin(), True),
        (lambda x: (x.detach(), x.sin())[1], False),
        (lambda x: x * (x.detach() > 0), False),
    ],
    ids=["detach", "no_grad", "data", "elsewhere", "mask"],
)
def test_stops_are_respected(function, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Values that a model detaches are constant, and the log says so."""
    model = Residual(function)
    x = torch.randn(1, 4, 8)
    with caplog.at_level(logging.WARNING):
        HiddenTokenAttribution(model, model.out, model.embed).attribute(x)
    assert ("taken as constant" in caplog.text) == warned


def scaled(x: Tensor) -> Tensor:
    """A scale that is computed outside of PyTorch."""
    return x / float(np.abs(x.detach().numpy()).max())


LEFT = {
    "numpy": (lambda x: torch.from_numpy(np.sin(x.detach().numpy())), "numpy"),
    "item": (lambda x: x * x.square().mean().item(), "item"),
    "float": (lambda x: x * float(x.square().mean()), "float"),
    "list": (lambda x: x * torch.tensor(x.detach().tolist()), "tolist"),
    "scale": (scaled, "numpy"),
}


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("name", LEFT)
def test_numbers_that_come_back(name: str, options: dict) -> None:
    """Autograd takes numbers that left PyTorch as constants, so they are refused in every mode."""
    function, exit_ = LEFT[name]
    model = Residual(function)
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1))
    with pytest.raises(LostDerivativeError, match=f"leave PyTorch by {exit_} of the model itself"):
        HiddenTokenAttribution(model, model.out, model.embed).attribute(x, **options)


LOOKED_AT = {
    "branch": lambda x: x.sin() if x.max().item() > -1 else x,
    "printed": lambda x: (f"{x.mean().item():.3f}", x.sin())[1],
    "converged": lambda x: x * sum(1 for value in x.norm(dim=-1).tolist()[0] if value > 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LOOKED_AT)
def test_numbers_that_are_only_looked_at(name: str, dtype: torch.dtype) -> None:
    """They are constant around the point, so all modes give the same."""
    model = Residual(LOOKED_AT[name])
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    hta = HiddenTokenAttribution(model, model.out, model.embed)
    forward, reverse = (hta.attribute(x, mode=mode) for mode in (None, "reverse"))
    torch.testing.assert_close(forward, reverse)


def test_numbers_that_leave_in_half_precision(caplog: pytest.LogCaptureFixture) -> None:
    """Differences say nothing there, so the log says that they are taken as constant."""
    model = Residual(lambda x: x * x.square().mean().item())
    with caplog.at_level(logging.WARNING):
        HiddenTokenAttribution(model, model.out, model.embed).attribute(torch.randn(1, 4, 8).bfloat16())
    assert "by item of the model itself" in caplog.text
    assert "taken as constant" in caplog.text


@pytest.mark.parametrize("adapter", ["transformer_lens", "transformers"])
@pytest.mark.parametrize("options", [{}, {"mode": "reverse"}, {"n_probes": 3}, {"target": "layer"}], ids=str)
@pytest.mark.parametrize("layers", ["all", "one"])
def test_quantized_models(layers: str, options: dict, adapter: str) -> None:
    """Models with int8 layers on the way are refused by both adapters."""
    one = {"encoder.layer.0.intermediate.dense": torch.ao.quantization.default_dynamic_qconfig}
    model = torch.ao.quantization.quantize_dynamic(
        tiny_bert(BertModel).float(), {nn.Linear} if layers == "all" else one
    )
    with pytest.raises(LostDerivativeError, match="quantized::linear_dynamic"):
        contributions(load_model(model, WordTokenizer(), adapter=adapter), "a b c", **options)
