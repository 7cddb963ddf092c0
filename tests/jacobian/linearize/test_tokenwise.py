"""Token-wise segments collapsed into one Jacobian a token: the same tangents with fewer operations."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, tiny
from torch import Tensor, nn

from captum_hta import HiddenTokenAttribution
from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.jacobian.linearize.axes import ROWS, Window
from captum_hta.jacobian.linearize.tokenwise import (
    Segment,
    segments,
    separate,
    token_jacobians,
    worthwhile,
)
from captum_hta.jacobian.linearize.windowed import WindowedLinearization
from captum_hta.jacobian.plan import CACHE
from captum_hta.model.sites import Site

LENGTH, WIDTH = 9, 16
SEGMENTS = {"BERT": 3, "GPT-2": 3, "Llama": 3, "GPT-NeoX (Pythia)": 2}
"""How many segments each model has; the first of a parallel block is before any mixing of tokens."""
INNER = {"BERT": 2, "GPT-2": 4, "GPT-NeoX (Pythia)": 2}
"""The inner width of feed-forward parts, in widths of the model."""


def derivative(name: str, batch: int = 1) -> WindowedLinearization:
    """The derivative of the outputs of a random model's blocks with respect to the input of the first."""
    model = tiny(name)
    blocks = [model.get_submodule(FAMILIES[name].block.format(layer)) for layer in range(3)]
    ids = torch.randint(5, 60, (batch, LENGTH), generator=torch.Generator().manual_seed(0))
    forward_pass = ForwardPass(model, (ids,), (), blocks, Site(blocks[0], at_input=True))
    whole = forward_pass.linearize()[0]
    return WindowedLinearization(whole, whole.sources[0])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", SEGMENTS)
def test_collapsed_tangents_are_those_of_the_whole(name: str, batch: int) -> None:
    """Tangents of the first token and of middle ones are right for every target."""
    found = derivative(name, batch)
    found.prepare(10**6)
    assert len(found.collapsed) == SEGMENTS[name]
    scale = 1 if FAMILIES[name].exact else 1e4
    for tokens in (range(1), range(4, 6)):
        tangents = torch.randn(3, batch, len(tokens), WIDTH, dtype=torch.float64)
        full = Window(tokens.start, tokens.stop, LENGTH).widen(tangents, ROWS)
        with torch.no_grad():
            expected = dict(found.whole.push({found.source: full}))
            pushed = dict(found.push(tangents, tokens))
        assert pushed.keys() == expected.keys()
        for target, value in expected.items():
            torch.testing.assert_close(pushed[target], value, rtol=1e-10 * scale, atol=1e-12 * scale)


@pytest.mark.parametrize("name", INNER)
def test_operations_saved(name: str) -> None:
    """With an inner width of r D, 4 r D^2 operations per token become 2 D^2, prepared in 2 r D^3."""
    found = derivative(name)
    last = found.whole.targets[-1]
    saved = SEGMENTS[name] * (4 * INNER[name] - 2) * WIDTH**2 * LENGTH
    assert found.flops(last, 1) - found.flops(last, 10**6) == pytest.approx(saved * found.share)
    assert found.preparation_flops(10**6) == SEGMENTS[name] * 2 * INNER[name] * WIDTH**3 * LENGTH
    assert found.preparation_flops(1) == 0


def test_few_tangents_are_not_worth_it() -> None:
    """Nothing is collapsed for fewer tangents than the Jacobians themselves take."""
    found = derivative("BERT")
    found.prepare(WIDTH // 2)
    assert not found.collapsed
    found.prepare(LENGTH * WIDTH)
    assert len(found.collapsed) == 3


def test_gain_counts_reading() -> None:
    """With few tangents at a time, reading the matrices is the bottleneck; memory is limited."""
    segment = Segment((), 0, 1, (1, 10, 8, 8), 16 * 10 * 64, 8 * 10 * 64)
    assert segment.gain(1000, 100) > 0 > segment.gain(1000, 1)
    assert worthwhile([segment], 1000, 100, 640) == [segment]
    assert worthwhile([segment], 1000, 100, 639) == []


def test_target_inside() -> None:
    """A segment with a variable that is read elsewhere is not replaced as a whole."""
    found = derivative("BERT")
    inner = segments(found.whole.calls, found.whole.shapes, LENGTH, found.whole.targets)
    added = inner[1].calls[-2].outputs[0]  # before the last normalisation
    split = segments(found.whole.calls, found.whole.shapes, LENGTH, [*found.whole.targets, added])
    assert [one.entry for one in split] == [one.entry for one in inner]
    assert split[1].exit == added != inner[1].exit


class Mixer(nn.Module):
    """Attention, then a feed-forward part that mixes tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Identity(), nn.Identity()
        self.mix = nn.Sequential(nn.Linear(LENGTH, 64), nn.Tanh(), nn.Linear(64, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        y = (x @ x.mT).softmax(-1) @ x
        return self.out(self.mix(y.mT).mT)


def test_mixing_segment_is_refused() -> None:
    """Random tangents detect a segment that only looks token-wise; the result stays right."""
    torch.manual_seed(0)
    model = Mixer().double()
    x = torch.randn(1, LENGTH, LENGTH, dtype=torch.float64)
    forward_pass = ForwardPass(model, (x,), (), [model.out], model.embed)
    whole = forward_pass.linearize()[0]
    found = WindowedLinearization(whole, whole.sources[0])
    assert [token_jacobians(segment, whole.shapes) for segment in found.segments] == [None]
    found.prepare(10**6)
    assert not found.collapsed
    hta = HiddenTokenAttribution(model, model.out, model.embed)
    forward, reverse = (hta.attribute(x, mode=mode) for mode in ("forward", "reverse"))
    torch.testing.assert_close(forward, reverse, rtol=1e-10, atol=1e-14)


def test_widest_tangent_of_collapsed(minilm) -> None:
    """Without the inner width of the feed-forward part, more tangents fit in the cache."""
    batch = minilm.batch([minilm.encode("one two three four five six")])
    forward_pass = ForwardPass(
        minilm.forward, batch.inputs, batch.extra, [minilm.target(2)], minilm.source(0)
    )
    whole = forward_pass.linearize()[0]
    found = WindowedLinearization(whole, whole.sources[0])
    assert found.widest(1) == 4 * found.widest(10**5)
    assert CACHE // (4 * found.widest(10**5)) > 200


@pytest.mark.parametrize(
    ("row", "token"), [((0, 0), (0, 5)), ((0, 3), (0, 1)), ((0, 2), (1, 2)), ((1, 4), (0, 0))]
)
def test_a_single_leak_is_found(row: tuple[int, int], token: tuple[int, int]) -> None:
    """A leak from any token of any example to any other is found, however small."""

    def push(stack: Tensor) -> Tensor:
        out = stack.clone()
        out[:, token[0], token[1]] += 1e-9 * stack[:, row[0], row[1]]
        return out

    like = torch.empty(2, 6, 4)
    assert separate(lambda stack: 3 * stack, like)
    assert not separate(push, like)


class Shifted(nn.Module):
    """Attention, a normalisation that inflates one token, a feed-forward part and a small shift."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Identity(), nn.Identity()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + (x @ x.mT / WIDTH).softmax(-1) @ x
        keep = torch.ones(x.shape[1], 1, dtype=x.dtype)
        keep[0] = 1e-7
        x = torch.nn.functional.layer_norm(x * keep, (WIDTH,), eps=1e-16)
        x = x + self.down(torch.tanh(self.up(x)))
        return self.out(x + self.shift * torch.cat([x[:, :1], x[:, :-1]], 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [1.0, 0.01])
def test_a_shift_of_tokens_is_not_token_wise(dtype: torch.dtype, shift: float) -> None:
    """The shift is detected next to a token with large values, and in half precision."""
    model = Shifted(shift).to(dtype)
    x = torch.randn(1, 12, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    hta = HiddenTokenAttribution(model, model.out, model.embed)
    forward, reverse = (hta.attribute(x, mode=mode).double() for mode in ("forward", "reverse"))
    close = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.03}[dtype]
    assert (forward - reverse).abs().max() < close
