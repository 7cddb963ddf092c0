"""The closed form against autograd on hand-written attention blocks of every kind."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from reference import jacobian, norms
from torch import Tensor

from captum_hta.jacobian import closed_form as attention_jacobian
from captum_hta.jacobian.closed_form import attention_energies
from captum_hta.model.attention import AttentionFactors, TokenNorm

BATCH, TOKENS, WIDTH, HEADS, GROUPS, D_HEAD, EPS = 2, 6, 16, 4, 2, 4, 1e-5
NORMS = {"post-LN": None, "LayerNorm": True, "RMSNorm": False}


def block(norm: str, rotary: bool, causal: bool):
    """A block as a function of its input, and its factors at a random input."""
    torch.manual_seed(0)
    weights = [torch.randn(count, D_HEAD, WIDTH) for count in (HEADS, GROUPS, GROUPS)]
    query_w, key_w, value_w = (w.repeat_interleave(HEADS // len(w), 0) for w in weights)
    query_b, key_b, value_b = torch.randn(3, HEADS, 1, D_HEAD)
    gain, shift = torch.rand(WIDTH) + 0.5, torch.randn(WIDTH)
    turn = torch.linalg.qr(torch.randn(TOKENS, D_HEAD, D_HEAD))[0] if rotary else None
    bias = torch.randn(HEADS, TOKENS, TOKENS)
    if causal:
        bias = bias.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf)
    x = torch.randn(BATCH, TOKENS, WIDTH)

    def run(x: Tensor) -> dict[str, Tensor]:
        u = {
            "post-LN": lambda: x,
            "LayerNorm": lambda: F.layer_norm(x, (WIDTH,), gain, shift, EPS),
            "RMSNorm": lambda: F.rms_norm(x, (WIDTH,), gain, EPS),
        }[norm]()
        q, k, v = (
            torch.einsum("hcd,btd->bhtc", w, u) + b
            for w, b in ((query_w, query_b), (key_w, key_b), (value_w, value_b))
        )
        if rotary:
            q, k = (torch.einsum("tcd,bhtd->bhtc", turn, value) for value in (q, k))
        pattern = (q @ k.mT / D_HEAD**0.5 + bias).softmax(-1)
        return {"pattern": pattern, "query": q, "key": k, "value": v}

    at = run(x)
    factors = AttentionFactors(
        **at,
        scale=D_HEAD**-0.5,
        x=x,
        query_weight=query_w,
        key_weight=key_w,
        value_weight=value_w,
        norm=token_norm(x, gain, NORMS[norm]),
        query_map=turn[None, None] if rotary else None,
        key_map=turn[None, None] if rotary else None,
    )
    return (lambda x: (lambda o: (o["pattern"] @ o["value"]).transpose(1, 2).flatten(2))(run(x))), factors


def token_norm(x: Tensor, gain: Tensor, centred: bool | None) -> TokenNorm | None:
    """The normalisation of a pre-LN block at ``x``."""
    if centred is None:
        return None
    moved = x - x.mean(-1, keepdim=True) if centred else x
    inverse = torch.rsqrt(moved.square().mean(-1) + EPS)
    return TokenNorm(moved * inverse[..., None], inverse, gain, centred)


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("norm", "rotary", "causal", "scaled"),
    list(product(NORMS, (False, True), (False, True), (False, True))),
)
def test_equals_autograd(norm: str, rotary: bool, causal: bool, scaled: bool) -> None:
    """Every kind of block, with grouped heads and biases, matches autograd."""
    run, factors = block(norm, rotary, causal)
    found = attention_energies(factors, multiply_by_inputs=scaled)
    for row in range(BATCH):
        blocks = jacobian(run, factors.x[row : row + 1], range(TOKENS))
        blocks = blocks * factors.x[row] if scaled else blocks
        expected = norms(blocks, HEADS, "frobenius").square()
        assert (found[row] - expected).abs().max() < 1e-12 * expected.max()


def normed(x: Tensor, width: int, gain: Tensor) -> tuple[Tensor, Tensor]:
    """An RMSNorm over the last axis, and its Jacobians, by definition."""
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    unit = x * inverse
    jacobians = torch.eye(width) - unit[..., :, None] * unit[..., None, :] / width
    return gain * unit, gain[..., :, None] * jacobians * inverse[..., None]


def special_block(kind: str, norm: str):
    """A block with one thing that is not plain attention, as a function of its source, and its factors."""
    torch.manual_seed(1)
    capped = "capped" in kind
    weights = torch.randn(3, HEADS, D_HEAD, WIDTH)
    gain, gains = torch.rand(WIDTH) + 0.5, torch.rand(2, HEADS, 1, D_HEAD) + 0.5
    sink, x = torch.randn(HEADS, 1, 1), torch.randn(BATCH, TOKENS, WIDTH)

    def whole(q: Tensor, gain: Tensor) -> Tensor:
        flat = q.transpose(1, 2).flatten(2)
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
        return flat.unflatten(2, (HEADS, D_HEAD)).transpose(1, 2) * gain

    def run(x: Tensor) -> dict[str, Tensor]:
        u = {
            "post-LN": lambda: x,
            "LayerNorm": lambda: F.layer_norm(x, (WIDTH,), gain, None, EPS),
            "RMSNorm": lambda: F.rms_norm(x, (WIDTH,), gain, EPS),
        }[norm]()
        q, k, v = torch.einsum("nhcd,btd->nbhtc", weights, u)
        raw = q, k
        if "heads" in kind:
            q, k = (normed(one, D_HEAD, g)[0] for one, g in zip((q, k), gains, strict=True))
        if "whole" in kind:
            q, k = (whole(one, g) for one, g in zip((q, k), gains, strict=True))
        scores = q @ k.mT / D_HEAD**0.5
        scores = 2 * (scores / 2).tanh() if capped else scores
        pattern = scores.softmax(-1)
        if "sinks" in kind:
            columns = sink.expand(len(x), HEADS, TOKENS, 1)
            pattern = torch.cat([scores, columns], -1).softmax(-1)[..., :-1]
        return {"pattern": pattern, "query": q, "key": k, "value": v, "raw": raw}

    at = run(x)
    raw, maps = at.pop("raw"), {}
    for name, y, g, weight in zip(("query", "key"), raw, gains, weights[:2], strict=True):
        if "heads" in kind:
            maps[f"{name}_map"] = normed(y, D_HEAD, g)[1]
        if "whole" in kind:
            flat = y.transpose(1, 2).flatten(2)
            inverse = torch.rsqrt(flat.square().mean(-1) + EPS)[:, None, :, None, None]
            unit = y * inverse[..., 0]
            scale = inverse * torch.diag_embed(g).expand(BATCH, HEADS, TOKENS, D_HEAD, D_HEAD)
            column = -g * unit * inverse[..., 0] / (HEADS * D_HEAD)
            maps[f"{name}_map"] = torch.cat([scale, column[..., None]], -1)
            maps[f"{name}_row"] = torch.einsum("bhtc,hcd->btd", unit, weight)
    factors = AttentionFactors(
        **at, **maps, scale=D_HEAD**-0.5, x=x, query_weight=None if kind == "cross" else weights[0],
        key_weight=weights[1], value_weight=weights[2], norm=token_norm(x, gain, NORMS[norm]),
        cap=2.0 if capped else None, has_sinks="sinks" in kind,
    )  # fmt: skip
    return (lambda x: (lambda o: (o["pattern"] @ o["value"]).transpose(1, 2).flatten(2))(run(x))), factors


SPECIAL = ("capped", "sinks", "heads normalised", "heads capped", "whole normalised", "whole capped")


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_attention_equals_autograd(kind: str, norm: str, scaled: bool) -> None:
    """Capped scores, sinks, and normalised queries and keys match autograd."""
    run, factors = special_block(kind, norm)
    found = attention_energies(factors, multiply_by_inputs=scaled)
    assert found.shape == factors.pattern.shape
    for row in range(BATCH):
        blocks = jacobian(run, factors.x[row : row + 1], range(TOKENS))
        blocks = blocks * factors.x[row] if scaled else blocks
        expected = norms(blocks, HEADS, "frobenius").square()
        assert (found[row] - expected).abs().max() < 1e-12 * expected.max()


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_attention_in_single_precision(kind: str) -> None:
    """Energies in float32 are those in float64 up to rounding."""
    _, factors = special_block(kind, "post-LN")
    single = {name: value.float() for name, value in vars(factors).items() if isinstance(value, Tensor)}
    whole = attention_energies(factors)
    found = attention_energies(replace(factors, **single))
    assert (found - whole).abs().max() < 1e-5 * whole.max()


def test_causal_rows_are_zero_above_the_diagonal() -> None:
    """A later token contributes exactly nothing."""
    _, factors = block("RMSNorm", True, True)
    assert not attention_energies(factors).triu(1).any()


@pytest.mark.parametrize("norm", NORMS)
def test_parts_equal_the_whole(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small memory budget splits the batch and the heads without changing the result."""
    _, factors = block(norm, True, False)
    whole = attention_energies(factors)
    for budget in (1, 40_000, 100_000):
        monkeypatch.setattr(attention_jacobian, "memory_budget", lambda device, b=budget: b)
        torch.testing.assert_close(attention_energies(factors), whole, rtol=1e-12, atol=0)


def test_half_precision_is_accumulated_in_single() -> None:
    """bfloat16 factors give float32 energies."""
    _, factors = block("post-LN", False, False)
    whole = attention_energies(factors)
    half = {name: value.bfloat16() for name, value in vars(factors).items() if isinstance(value, Tensor)}
    found = attention_energies(replace(factors, **half))
    assert found.dtype == torch.float32
    assert (found - whole).abs().max() < 0.1 * whole.max()
