"""Tangents stored only where they can differ from zero: the same numbers with less work."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, tiny
from reference import hooked, jacobian, norms, shares
from torch import Tensor, nn

from captum_hta import HiddenTokenAttribution
from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.jacobian.linearize.axes import ROWS, TokenAxis, Window
from captum_hta.jacobian.linearize.windowed import WindowedLinearization

WIDTH = 16


def decoder(name: str, kernel: str = "eager") -> tuple[nn.Module, list[nn.Module], nn.Module]:
    """A random causal model in float64, the output projections of its heads, and its embedding."""
    model, family = tiny(name), FAMILIES[name]
    model.set_attn_implementation(kernel)
    blocks = [model.get_submodule(family.block.format(layer)) for layer in range(3)]
    heads = [block.get_submodule(family.projection) for block in blocks]
    return model, heads, model.get_input_embeddings()


def windowed(name: str, batch: int = 1, kernel: str = "eager") -> WindowedLinearization:
    model, heads, source = decoder(name, kernel)
    ids = torch.randint(5, 60, (batch, 9), generator=torch.Generator().manual_seed(0))
    derivative, *_ = ForwardPass(model, (ids,), (), heads, source).linearize()
    return WindowedLinearization(derivative, derivative.sources[0])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Qwen3"])
def test_causal_models_are_narrowed(name: str, kernel: str, batch: int) -> None:
    """Each target's tangents equal those without windows, for about half of the work."""
    found = windowed(name, batch, kernel)
    assert found.causal
    assert found.flops(found.whole.targets[-1]) < 0.6 * found.whole.flops(found.whole.targets[-1])
    for tokens in (range(1), range(3, 5), range(8, 9)):
        tangents = torch.randn(3, batch, len(tokens), WIDTH, dtype=torch.float64)
        full = Window(tokens.start, tokens.stop, 9).widen(tangents, ROWS)
        with torch.no_grad():
            expected = dict(found.whole.push({found.source: full}))
            pushed = dict(found.push(tangents, tokens))
        for target, value in expected.items():
            torch.testing.assert_close(pushed[target], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_causal_contributions_equal_autograd(name: str) -> None:
    """Forward mode matches one backward pass for each component, and is zero above the diagonal."""
    model, heads, source = decoder(name)
    ids = torch.randint(5, 60, (1, 5))
    found = HiddenTokenAttribution(model, heads[1], source, num_heads=4).attribute(
        ids, attribute_to_neuron_input=True, mode="forward"
    )
    seen: list[Tensor] = []

    class Before(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    probe = Before()
    heads[1].register_forward_pre_hook(lambda module, args: seen.append(probe(args[0])))
    run, x = hooked(lambda: model(ids), source, probe)
    expected = shares(norms(jacobian(run, x, range(5)), 4, "frobenius"))
    rtol = 1e-9 if FAMILIES[name].exact else 1e-6
    torch.testing.assert_close(found[0], expected, rtol=rtol, atol=1e-14)
    assert not found.triu(1).any()


def test_projections_of_the_first_block_are_narrowed(bert) -> None:
    """In encoders, work is saved only before positions are mixed for the first time."""
    batch = bert.batch([bert.encode("one two three four five six")])
    forward_pass = ForwardPass(bert.forward, batch.inputs, batch.extra, [bert.target(1)], bert.source(1))
    derivative, *_ = forward_pass.linearize()
    found = WindowedLinearization(derivative, derivative.sources[0])
    assert not found.causal
    saved = 3 * 2 * 8 * 8 * (batch.inputs[0].shape[1] - 1)
    target = derivative.targets[0]
    assert derivative.flops(target) - found.flops(target) == pytest.approx(saved)


def test_window_of_merged_axes() -> None:
    """Positions that share an axis with the batch are narrowed within each example."""
    value = torch.arange(12).view(6, 2)
    window, at = Window(1, 2, 3), TokenAxis(-2, outer=2)
    part = window.narrow(value, at)
    assert part.tolist() == [[2, 3], [8, 9]]
    assert window.widen(part, at).tolist() == [[0, 0], [2, 3], [0, 0], [0, 0], [8, 9], [0, 0]]


class Attention(nn.Module):
    """Attention with an additive mask, on a residual stream that outweighs it."""

    def __init__(self, mask: Tensor, gain: Tensor | float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = 8
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.embed, self.out = nn.Identity(), nn.Identity()
        self.mask, self.gain = mask, gain

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        scores = self.q(x) @ self.k(x).mT / 8**0.5 + self.mask.to(x)
        return self.out((20 * x + scores.softmax(-1) @ self.v(x)) * self.gain)


def soft(length: int, value: float) -> Tensor:
    return torch.full((length, length), value).triu(1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_soft_mask_is_not_causal(dtype: torch.dtype) -> None:
    """Small contributions of later tokens are found, in every dtype."""
    model = Attention(soft(12, -4.0)).to(dtype)
    x = torch.randn(1, 12, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    hta = HiddenTokenAttribution(model, model.out, model.embed)
    forward, reverse = (
        hta.attribute(x, mode=mode, internal_batch_size=8).double() for mode in ("forward", "reverse")
    )
    later = reverse.triu(1).sum()
    assert later > 0
    assert (forward.triu(1).sum() - later).abs() < 0.1 * later


@pytest.mark.parametrize("gain", [1e4, 1e8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_dominant_token_hides_nothing(dtype: torch.dtype, gain: float) -> None:
    """A token with an output many times larger than the others does not hide them."""
    scale = torch.ones(12, 1, dtype=dtype)
    scale[-1] = gain
    model = Attention(torch.zeros(12, 12), scale).to(dtype)
    x = torch.randn(1, 12, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    hta = HiddenTokenAttribution(model, model.out, model.embed)
    forward, reverse = (hta.attribute(x, mode=mode, internal_batch_size=8) for mode in ("forward", "reverse"))
    torch.testing.assert_close(forward, reverse, rtol=1e-4, atol=1e-5)
