"""The recorded derivative compared with ``torch.func.jvp``, operator by operator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from captum_hta import HiddenTokenAttribution
from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.jacobian.linearize.linearization import Linearization
from captum_hta.jacobian.linearize.recorder import NotLinearizableError, Recorder

torch.manual_seed(0)
W = torch.randn(4, 4, dtype=torch.float64)
B = torch.randn(4, dtype=torch.float64)
MASK = torch.rand(5, 4) > 0.5


def in_place_chain(x: Tensor) -> Tensor:
    y = F.linear(x, W, B)
    y += 1
    y.mul_(x)
    return torch.relu_(y)


def masked_scores(x: Tensor) -> Tensor:
    scores = x @ x.mT
    scores.masked_fill_(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ x


CASES = {
    "linear": lambda x: F.linear(x, W, B),
    "matmul, fixed left": lambda x: W @ x.mT,
    "matmul, both move": lambda x: x @ x.mT,
    "bmm, fixed right": lambda x: x.bmm(W.expand(2, 4, 4)),
    "baddbmm": lambda x: torch.baddbmm(x, x @ x.mT, x, beta=0.5, alpha=2),
    "addmm, factors": lambda x: torch.stack([torch.addmm(B, one, W, beta=2, alpha=3) for one in x]),
    "addmm, bias moves": lambda x: torch.stack([torch.addmm(x[1], x[0], W), x[0]]),
    "einsum": lambda x: torch.einsum("bic,cd,bjd->bij", x, W, x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x * 2, x + 1),
    "causal attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "softmax": lambda x: x.softmax(-1),
    "softmax, first axis": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, (4,), B, W[0]),
    "layer norm, plain": lambda x: F.layer_norm(x, (4,)),
    "layer norm, two axes": lambda x: F.layer_norm(x, (5, 4)),
    "rms norm": lambda x: F.rms_norm(x, (4,), B),
    "group norm": lambda x: F.group_norm(x.mT, 2).mT,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "elu": F.elu,
    "softplus": F.softplus,
    "power": lambda x: x.abs() ** 2.5,
    "rsqrt": lambda x: torch.rsqrt(x.square() + 1),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "quotient": lambda x: x / (x.square() + 1),
    "quotient by a number": lambda x: x / 3,
    "rounded quotient": lambda x: torch.div(x, 3, rounding_mode="floor") + x,
    "product, broadcast": lambda x: x * x.mean(-1, keepdim=True),
    "product by a vector": lambda x: B * x,
    "sum, weighted": lambda x: torch.add(x, x.square(), alpha=3),
    "difference": lambda x: torch.sub(x, x.square(), alpha=0.5),
    "reversed difference": lambda x: 1 - x,
    "sum, new axis": lambda x: x.sum(1) + x.mT[..., :4].sum(1)[:, None] * x.mean((0, 1)),
    "where": lambda x: torch.where(MASK, x, x.square()),
    "masked_fill": lambda x: x.masked_fill(MASK, 2.0),
    "cat": lambda x: torch.cat([x, B.expand(2, 5, 4), x.square()], 1),
    "stack": lambda x: torch.stack([x, 2 * x], 1).flatten(1, 2),
    "split": lambda x: torch.cat(x.split([1, 3], -1)[::-1], -1),
    "chunk": lambda x: x.chunk(2, -1)[0] * x.chunk(2, -1)[1],
    "unbind": lambda x: torch.stack(x.unbind(1)[::-1], 1),
    "slice": lambda x: x[:, 1:4, ::2],
    "index": lambda x: x[:, torch.tensor([3, 0, 0])],
    "index_select": lambda x: x.index_select(1, torch.tensor([3, 0, 0])),
    "gather": lambda x: x.gather(1, torch.zeros(2, 2, 4, dtype=torch.long)),
    "view": lambda x: x.view(2, 5, 2, 2).transpose(1, 2).reshape(2, 2, 10),
    "permute": lambda x: x.permute(0, 2, 1),
    "negative axes": lambda x: x.permute(0, -1, -2).transpose(-1, -2),
    "expand": lambda x: x[:, :1].expand(2, 3, 4),
    "expand, new axis": lambda x: x[0].expand(2, 5, 4),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "roll": lambda x: x.roll(1, 1),
    "flip": lambda x: x.flip(1),
    "pad": lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "cumsum": lambda x: x.cumsum(1),
    "triangle": lambda x: (x @ x.mT).tril() @ x,
    "maximum": lambda x: torch.maximum(x, x.mean(-1, keepdim=True)),
    "max": lambda x: x.max(-1, keepdim=True).values * x,
    "top-k": lambda x: x.topk(2, -1).values,
    "indices of top-k": lambda x: x.gather(-1, x.topk(2, -1).indices).sin() + x.sort(1).indices[..., :2],
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "convolution": lambda x: F.conv1d(x.mT, W[:, :, None]).mT,
    "rotation": lambda x: x * B.cos() + torch.cat([-x[..., 2:], x[..., :2]], -1) * B.sin(),
    "detach": lambda x: x * x.detach(),
    "comparison": lambda x: x * (x > 0),
    "cast": lambda x: x.float().square().double(),
    "in place": in_place_chain,
    "in place, mask": masked_scores,
    "unused output": lambda x: (x.exp(), x.square())[1],
}


def linearized(function, x: Tensor) -> Linearization:
    """The derivative of ``function`` at ``x``."""
    layer = nn.Identity()
    forward_pass = ForwardPass(lambda value: layer(function(value)), (x,), (), [layer])
    return forward_pass.linearize()[0]


@pytest.mark.parametrize("name", CASES)
def test_push_equals_jvp(name: str) -> None:
    """Each operator's rule is right for a stack of three tangents."""
    function = CASES[name]
    torch.manual_seed(1)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    stack = torch.randn(3, 2, 5, 4, dtype=torch.float64)
    derivative = linearized(function, x)
    ((_, pushed),) = derivative.push({derivative.sources[0]: stack})
    expected = torch.stack(
        [torch.func.jvp(lambda v: function(v.clone()), (x,), (tangent,))[1] for tangent in stack]
    )
    error = (pushed - expected).abs().max() / expected.abs().max()
    assert error < (1e-6 if name == "cast" else 1e-12)


def test_two_sources_move_apart() -> None:
    """A tangent of one source leaves the other source fixed."""
    layer = nn.Identity()
    x, y = torch.randn(2, 2, 5, 4, dtype=torch.float64)
    forward_pass = ForwardPass(lambda a, b: layer(a.exp() * b + (b @ b.mT) @ a), (x, y), (), [layer])
    derivative, *_ = forward_pass.linearize()
    tangent = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    ((_, pushed),) = derivative.push({derivative.sources[1]: tangent})
    expected = torch.func.jvp(lambda b: x.exp() * b + (b @ b.mT) @ x, (y,), (tangent[0],))[1]
    torch.testing.assert_close(pushed[0], expected)


def write_through_a_view(x: Tensor) -> Tensor:
    out = torch.zeros(2, 5, 4, dtype=torch.float64)
    out[:, :2] = x[:, :2]
    return out


def write_to_what_was_read(x: Tensor) -> Tensor:
    y = x * 2
    z = y.exp()
    y.add_(1)
    return z + y


def write_under_an_alias(x: Tensor) -> Tensor:
    y = x * 2
    alias = y.view(2, 20)
    y.mul_(x)
    return alias.view(2, 5, 4)


@pytest.mark.parametrize("function", [write_through_a_view, write_to_what_was_read, write_under_an_alias])
def test_refuses_what_it_cannot_follow(function) -> None:
    """Writing in place is followed correctly or refused."""
    with pytest.raises(NotLinearizableError, match="in place"):
        linearized(function, torch.randn(2, 5, 4, dtype=torch.float64))


def test_operator_that_fails_in_forward_mode() -> None:
    """PyTorch's own error, here for a fill of an expanded tensor, is given as the reason."""
    with pytest.raises(NotLinearizableError, match="masked_fill has no forward derivative: unsupported"):
        linearized(
            lambda x: x[..., None].expand(2, 5, 4, 3).masked_fill(MASK[..., None], 0).sum(-1),
            torch.randn(2, 5, 4, dtype=torch.float64),
        )


@pytest.mark.parametrize("name", ["Mamba2", "Llama 4"])
def test_models_with_unusual_operators(name: str) -> None:
    """The default mode is the reverse mode, or agrees with it."""
    torch.manual_seed(0)
    if name == "Mamba2":
        config = transformers.Mamba2Config(
            hidden_size=16, num_hidden_layers=2, vocab_size=99, state_size=4, num_heads=4, head_dim=8,
            expand=2, n_groups=1, chunk_size=4,
        )  # fmt: skip
        model = transformers.Mamba2Model(config).double().eval()
        target, source = model.layers[1].mixer.out_proj, model.embeddings
    else:
        config = transformers.Llama4TextConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=24, vocab_size=99, max_position_embeddings=64, head_dim=8,
            num_local_experts=2, intermediate_size_mlp=24, no_rope_layers=[1, 0],
        )  # fmt: skip
        model = transformers.Llama4TextModel(config).double().eval()
        target, source = model.layers[1].self_attn.o_proj, model.embed_tokens
    hta = HiddenTokenAttribution(model, target, source)
    ids = torch.randint(5, 99, (1, 7))
    found, reverse = (
        hta.attribute(ids, attribute_to_neuron_input=True, mode=mode) for mode in (None, "reverse")
    )
    torch.testing.assert_close(found, reverse, rtol=1e-5, atol=1e-7)


def test_flops_of_a_linear_layer() -> None:
    """It has two operations for each weight and position; what leads to no target has none."""
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    derivative = linearized(lambda v: (v @ W @ W, F.linear(v, W, B))[1], x)
    assert derivative.flops() == 2 * 10 * 16


def test_recorder_leaves_unrelated_operators_out() -> None:
    """Operators that depend on no source are not recorded."""
    with torch.no_grad(), Recorder() as recorder:
        x = torch.randn(2, 5, 4)
        recorder.mark_source(x)
        (torch.ones(3) * 2).exp()
        x.sum()
    assert [call.name for call in recorder.calls] == ["sum"]
