"""HiddenTokenAttribution as a Captum class: forms of arguments and results, settings, errors and numbers."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from captum.attr import GradientAttribution, NeuronAttribution, NeuronGradient, NoiseTunnel
from captum.metrics import sensitivity_max
from captum.testing.helpers.basic_models import (
    BasicEmbeddingModel,
    BasicModel_MultiLayer,
    BasicModel_MultiLayer_MultiInput,
)
from reference import jacobian, norms, shares
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from captum_hta import HiddenTokenAttribution
from captum_hta.jacobian.forward_pass import SWITCHES
from captum_hta.jacobian.norms import NORMS

MODES = ("forward", "reverse")
ANY_WAY = (None, *MODES)
BATCH, TOKENS, WIDTH, HEADS = 3, 4, 8, 2


# --- models and references ------------------------------------------------------------------------


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in elementary operators; all are ``[batch, head, position, d_head]``."""
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


class Block(nn.Module):
    """Attention behind a LayerNorm, with a residual; ``z`` holds ``[batch, position, head, d]``."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.z, self.out, self.attend = nn.Identity(), nn.Linear(WIDTH, WIDTH), attend

    def forward(self, x: Tensor, gain: Any = 1.0) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        z = self.z(self.attend(q, k, v).transpose(1, 2))
        return x + gain * self.out(z.flatten(2)).tanh()


class Model(nn.Module):
    """Two blocks on embeddings, or on token ids."""

    def __init__(self, attend: Callable[..., Tensor] = eager) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(20, WIDTH), Block(attend), Block(attend)

    def forward(self, x: Tensor, gain: Any = 1.0, note: str | None = None) -> Tensor:
        x = x if x.is_floating_point() else self.embed(x)
        x = x if note is None else x.sin()
        return self.second(self.first(x, gain), gain)


class Mixed(nn.Module):
    """Mixes positions, applies a function in ``act``, then a linear layer ``last``."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.pre, self.act, self.last = (
            nn.Linear(WIDTH, WIDTH),
            Apply(function),
            nn.Linear(WIDTH, 6),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.pre(x).tanh().cumsum(1)))


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def tiny(attend: Callable[..., Tensor] = eager, cls: type = Model) -> Any:
    """A random model in float64, with the same weights whatever the argument."""
    torch.manual_seed(0)
    return cls(attend).double().eval()


def data(*shape: int, seed: int = 1) -> Tensor:
    """Normal numbers ``[batch, position, width]`` in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (BATCH, TOKENS, WIDTH)), generator=generator).double()


def ids() -> Tensor:
    """Token ids ``[batch, position]``."""
    return torch.arange(BATCH * TOKENS).view(BATCH, TOKENS)


def value_of(layer: nn.Module, run: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """The output of ``layer`` while ``run(x)`` runs, as ``[batch, position, width]``."""
    kept: list[Tensor] = []

    def keep(module: Any, args: Any, out: Any) -> None:
        kept.append((out[0] if isinstance(out, tuple) else out).clone())

    handle = layer.register_forward_hook(keep)
    try:
        run(x)
    finally:
        handle.remove()
    return kept[0].flatten(2)


def dense(
    run: Callable[[Tensor], Any],
    layer: nn.Module,
    x: Tensor,
    heads: int | None = None,
    norm: str = "frobenius",
    times_inputs: bool = False,
) -> Tensor:
    """Contributions by a backward pass for every component of every example; rows without a path are zero."""
    rows = []
    for example in x.split(1):
        queries = range(value_of(layer, run, example).shape[1])
        blocks = jacobian(lambda a: value_of(layer, run, a), example, queries)
        rows.append(norms(blocks * example[0] if times_inputs else blocks, heads or 1, norm))
    whole = shares(torch.stack(rows)).nan_to_num(0)
    return whole if heads else whole.squeeze(1)


def hta(model: Any, layer: Any, **settings: Any) -> HiddenTokenAttribution:
    """The class, with modules or names of modules."""

    def module(item: Any) -> Any:
        return model.get_submodule(item) if isinstance(item, str) else item

    layer = [module(item) for item in layer] if isinstance(layer, list) else module(layer)
    settings["source_layer"] = module(settings.get("source_layer"))
    return HiddenTokenAttribution(model, layer, **settings)


def same(actual: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Check that values are equal to a relative tolerance, in the same shape, dtype and form."""
    assert type(actual) is type(expected)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-12)


class Work(TorchDispatchMode):
    """Counts the elements that all operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements += out.numel() if isinstance(out, Tensor) else 0
        return out


def work(run: Callable[..., Any], *args: Any, **options: Any) -> int:
    """The number of elements that operators return while ``run`` runs."""
    with Work() as counter:
        run(*args, **options)
    return counter.elements


# --- forms of inputs, layers and results ----------------------------------------------------------

FORMS = [
    ("second.out", None, (BATCH, TOKENS, TOKENS)),
    ("second.out", 2, (BATCH, 2, TOKENS, TOKENS)),
    ("second.out", 1, (BATCH, 1, TOKENS, TOKENS)),
    ("second.qkv", 6, (BATCH, 6, TOKENS, TOKENS)),
    ("second.z", None, (BATCH, HEADS, TOKENS, TOKENS)),
    ("second.z", HEADS, (BATCH, HEADS, TOKENS, TOKENS)),
    ("second", None, (BATCH, TOKENS, TOKENS)),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("layer", "heads", "shape"), FORMS)
def test_tensor_in_tensor_out(layer, heads, shape, mode):
    """A tensor gives ``[batch, head, query, key]``, without the head axis if the target has no heads."""
    model, x = tiny(), data()
    result = hta(model, layer, num_heads=heads).attribute(x, mode=mode)
    count = shape[1] if len(shape) == 4 else None
    same(result, dense(model, model.get_submodule(layer), x, count))
    assert result.shape == shape


@pytest.mark.parametrize("mode", ANY_WAY)
def test_tuple_in_tuple_out(mode):
    """Two inputs give two tensors, whose rows sum to 1 over both together."""
    model, x = tiny(), data(BATCH, 5, WIDTH)
    joined = HiddenTokenAttribution(lambda a, b: model(torch.cat([a, b], 1)), model.second.z)
    result = joined.attribute((x[:, :3], x[:, 3:]), mode=mode)
    same(result, dense(model, model.second.z, x, HEADS).split((3, 2), -1))
    same(torch.cat(result, -1).sum(-1), torch.ones(BATCH, HEADS, 5).double())
    assert all((part.sum(-1) < 1).all() for part in result)


def test_tuple_of_one_stays_a_tuple():
    """A tuple of one input gives a tuple of one result."""
    (result,) = hta(tiny(), "second.z").attribute((data(),))
    same(result, hta(tiny(), "second.z").attribute(data()))


@pytest.mark.parametrize("mode", MODES)
def test_unused_input_has_no_share(mode):
    """An input that the target is not computed from gets zeros and changes nothing else."""
    model = tiny()
    two = HiddenTokenAttribution(lambda a, b: model(a), model.second.z)
    used, unused = two.attribute((data(), data(BATCH, 2, 5)), mode=mode)
    same(used, hta(model, "second.z").attribute(data()))
    same(unused, torch.zeros(BATCH, HEADS, TOKENS, 2).double())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "layers",
    [
        ["first.z", "second.z"],
        ["second.out", "first.z", "first.out"],
        ["second.z"],
        ["first", "second.norm", "second"],
        ["second.z", "second.z"],
    ],
)
def test_list_of_layers(layers, mode):
    """A list gives a list, in its own order, with the results of single layers."""
    model = tiny()
    result = hta(model, layers).attribute(data(), mode=mode)
    same(result, [hta(model, layer).attribute(data(), mode=mode) for layer in layers])


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_pass_one_tensor_on(mode):
    """A container has its last module's output, and a dropout in eval mode its input."""
    last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()).double().eval()
    run = HiddenTokenAttribution(lambda x: last(x.cumsum(1)), [last[0], last[1], last])
    one = HiddenTokenAttribution(run.forward_func, last[0]).attribute(data())
    same(run.attribute(data(), mode=mode), [one] * 3)


def test_list_of_layers_and_tuple_of_inputs():
    """A list of layers and a tuple of inputs give a list of tuples."""
    model, pair = tiny(), (data(), data(seed=2))
    run = lambda a, b: model(torch.cat([a, b], 1))  # noqa: E731
    result = HiddenTokenAttribution(run, [model.first.z, model.second.z]).attribute(pair)
    layers = (model.first.z, model.second.z)
    same(result, [HiddenTokenAttribution(run, layer).attribute(pair) for layer in layers])
    assert isinstance(result[0], tuple)


def test_list_with_and_without_heads():
    """Each layer of a list has a head axis if it has one alone."""
    four, three = hta(tiny(), ["first.z", "second.out"]).attribute(data())
    assert (four.dim(), three.dim()) == (4, 3)


def test_standard_error_has_the_form_of_the_result():
    """Contributions and errors are a pair of the same forms; exact ones have errors of zero."""
    values, errors = hta(tiny(), ["first.z", "second.z"]).attribute((data(),), return_standard_error=True)
    same(values, hta(tiny(), ["first.z", "second.z"]).attribute((data(),)))
    same(errors, [(torch.zeros_like(value),) for (value,) in values])


@pytest.mark.parametrize("mode", MODES)
def test_token_ids_with_a_source_layer(mode):
    """Token ids are inputs where the source is the embedding."""
    model = tiny()
    result = hta(model, "second.z", source_layer="embed").attribute(ids(), mode=mode)
    same(result, hta(model, "second.z").attribute(model.embed(ids())))


@pytest.mark.parametrize("mode", MODES)
def test_source_layer_within_the_model(mode):
    """The source is the module's output, whatever came before it."""
    model = tiny()
    result = hta(model, "second.z", source_layer="first").attribute(data(), mode=mode)
    same(result, dense(model.second, model.second.z, model.first(data()).detach(), HEADS))


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_is_its_own_source(mode):
    """If the target is the source, each token contributes to itself alone."""
    result = hta(tiny(), "first.out", source_layer="first.out").attribute(data(), mode=mode)
    same(result, torch.eye(TOKENS).double().expand(BATCH, -1, -1))


@pytest.mark.parametrize("mode", MODES)
def test_layers_behind_the_target_run_once(mode):
    """A first forward pass shows whether the target is called again; all others end at the last target."""
    model, runs = tiny(), []
    model.second.out.register_forward_hook(lambda *args: runs.append(1))
    assert hta(model, ["first.z", "second.z"]).attribute(data(), mode=mode)
    assert len(runs) == 1


@pytest.mark.parametrize("mode", MODES)
def test_what_fails_behind_the_target_does_not_matter(mode):
    """As of an encoder-decoder model that is called without the decoder's text."""
    model = tiny()

    def fail(*args):
        raise TypeError("there is no text for the decoder")

    expected = hta(model, "first.z").attribute(data(), mode=mode)
    model.second.out.register_forward_hook(fail)
    same(hta(model, "first.z").attribute(data(), mode=mode), expected)


class Rounded(torch.autograd.Function):
    """A straight-through estimator, or the exact derivative."""

    @staticmethod
    def forward(ctx, x, straight_through):
        ctx.save_for_backward(x)
        ctx.straight_through = straight_through
        return x.round() if straight_through else x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return (gradient if ctx.straight_through else gradient * x.cos()), None


@pytest.mark.parametrize("mode", ANY_WAY)
@pytest.mark.parametrize("straight_through", [True, False])
def test_a_backward_function_of_the_model(mode, straight_through, caplog):
    """Contributions are those of the function, with a warning if the target moves otherwise."""
    model = tiny()
    model.first.register_forward_hook(lambda module, args, out: Rounded.apply(out, straight_through))
    if mode == "forward" and straight_through:
        with pytest.raises(ValueError, match="custom backward"):
            hta(model, "second.z").attribute(data(), mode=mode)
        return
    hta(model, "second.z").attribute(data(), mode=mode)
    assert (
        "do not move as the model's own backward functions say (Rounded" in caplog.text
    ) == straight_through


@pytest.mark.parametrize("mode", MODES)
def test_a_target_that_is_called_again(mode):
    """It is not clear which call is meant, be it for an example or for a weight shared by two blocks."""
    model = tiny()
    twice = torch.nn.Module()
    twice.inner = model
    twice.forward = lambda x: model(model(x))
    with pytest.raises(
        ValueError, match=r"'inner.first.z' is called 2 times in one forward pass.*called once"
    ):
        HiddenTokenAttribution(twice, model.first.z).attribute(data(), mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["counter", "cache", "own random numbers"])
def test_a_model_that_keeps_state(mode, kind):
    """Each forward pass would be another function."""
    model, seen = tiny(), []
    generator = torch.Generator()

    def disturbed(x):
        seen.append(x.detach())
        change = {
            "counter": len(seen),
            "cache": sum(seen),
            "own random numbers": torch.rand((), generator=generator),
        }
        return model(x * change[kind])

    with pytest.raises(
        ValueError, match=r"has another value when forward_func is called again.*keeps no state"
    ):
        HiddenTokenAttribution(disturbed, model.second.z).attribute(data(), mode=mode)


# --- arguments of attribute -----------------------------------------------------------------------

GAIN = 2.0 + torch.arange(BATCH)[:, None, None].double()
EXTRA = {
    "tensor": GAIN,
    "tuple": (GAIN, "sine"),
    "number": 3.0,
    "number and text": (0.5, "sine"),
    "None within": (2.0, None),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extra", EXTRA.values(), ids=EXTRA)
def test_additional_forward_args(extra, mode):
    """Further arguments reach the model and nothing is attributed to them."""
    model, x = tiny(), data()
    result = hta(model, "second.z").attribute(x, additional_forward_args=extra, mode=mode)
    closed = lambda a: model(a, *(extra if isinstance(extra, tuple) else (extra,)))  # noqa: E731
    same(result, HiddenTokenAttribution(closed, model.second.z).attribute(x))
    assert not torch.allclose(result, hta(model, "second.z").attribute(x))


SELECTORS = [
    (1, [1]),
    (-1, [3]),
    (slice(1, 3), [1, 2]),
    (slice(None, None, -2), [3, 1]),
    ([2, 0], [2, 0]),
    ((1, 1), [1, 1]),
    (range(2), [0, 1]),
    (torch.tensor([3, -3]), [3, 1]),
    (torch.tensor(2), [2]),
    (np.int64(1), [1]),
    (np.array([1, -1]), [1, 3]),
    ([np.int32(2)], [2]),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("selector", "rows"), SELECTORS)
def test_neuron_selector(selector, rows, mode):
    """The selector keeps query positions, and their axis."""
    method = hta(tiny(), ["first.z", "second.out"])
    result = method.attribute(data(), neuron_selector=selector, mode=mode)
    same(result, [whole[..., rows, :] for whole in method.attribute(data())])


@pytest.mark.parametrize("norm", NORMS)
def test_selected_queries_are_less_work(norm):
    """In reverse mode one query of eight takes a fraction of the work, and by default as well."""
    method, x = hta(tiny(), "second.out", norm=norm), data(1, 8, WIDTH)
    whole = work(method.attribute, x, mode="reverse")
    assert work(method.attribute, x, mode="reverse", neuron_selector=5) < whole / 3
    assert work(method.attribute, x, neuron_selector=5) < work(method.attribute, x) * 0.8


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("layer", "before"), [("second.out", "second.z"), ("second", "first")])
def test_attribute_to_neuron_input(layer, before, mode):
    """The input of a module is the output of the module before it."""
    heads = HEADS if before == "second.z" else None
    method = hta(tiny(), layer, num_heads=heads)
    result = method.attribute(data(), attribute_to_neuron_input=True, mode=mode)
    same(result, hta(tiny(), before).attribute(data()))
    assert not torch.allclose(result, method.attribute(data()))


def test_attribute_to_an_input_given_by_name():
    """The input is also found where it is passed by keyword."""
    model = tiny()
    named = HiddenTokenAttribution(lambda x: model.second(x=model.first(x)), model.second)
    result = named.attribute(data(), attribute_to_neuron_input=True)
    same(result, hta(model, "first").attribute(data()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("size", "norm"),
    [*((size, "frobenius") for size in (1, 2, 3, 7, 1000)), (2, "spectral"), (7, "spectral")],
)
def test_internal_batch_size(size, norm, mode):
    """Parts of the batch, with their rows of further arguments, give the result of the whole batch."""
    method = hta(tiny(), ["first.z", "second.z"], norm=norm)
    options = {"additional_forward_args": (GAIN, "sine"), "mode": mode}
    result = method.attribute(data(), internal_batch_size=size, **options)
    same(result, method.attribute(data(), **options))


def test_internal_batch_size_with_token_ids():
    """Token ids are split like embeddings, and probes are the same in every part."""
    method = hta(tiny(), "second.z", source_layer="embed")
    for options in ({}, {"n_probes": 3}):
        whole = method.attribute(ids(), **options)
        same(method.attribute(ids(), internal_batch_size=1, **options), whole)


@pytest.mark.parametrize("options", [{"mode": "forward"}, {"mode": "reverse"}, {"n_probes": 3}])
def test_show_progress(options, capsys):
    """A bar on stderr runs to its end, and the result is the same."""
    method = hta(tiny(), "second.z")
    silent = method.attribute(data(), **options)
    assert capsys.readouterr().err == ""
    same(method.attribute(data(), show_progress=True, **options), silent)
    printed = capsys.readouterr()
    assert "Hidden token attribution" in printed.err
    assert "100%" in printed.err
    assert printed.out == ""


# --- as a Captum class ----------------------------------------------------------------------------


def test_is_a_captum_class():
    """It can be used wherever Captum takes a neuron attribution by gradients."""
    method = hta(tiny(), "second.z")
    assert isinstance(method, NeuronAttribution)
    assert isinstance(method, GradientAttribution)
    assert method.has_convergence_delta() is False


@pytest.mark.parametrize("flag", [True, False])
def test_multiplies_by_inputs(flag):
    """The property returns the argument."""
    assert hta(tiny(), "second.z", multiply_by_inputs=flag).multiplies_by_inputs is flag


def test_no_convergence_delta():
    """The error says why there is none and what to use instead."""
    with pytest.raises(NotImplementedError, match=r"no convergence delta.*return_standard_error"):
        hta(tiny(), "second.z").compute_convergence_delta(data(), data())


@pytest.mark.parametrize("inputs", [data(), (data(), data(seed=2))], ids=["tensor", "tuple"])
def test_noise_tunnel_without_noise(inputs):
    """Without noise the tunnel gives the plain result."""
    model = tiny()
    method = HiddenTokenAttribution(lambda *x: model(torch.cat(x, 1)), model.second.z)
    same(NoiseTunnel(method).attribute(inputs, nt_samples=3, stdevs=0.0), method.attribute(inputs))


def test_noise_tunnel_smoothgrad():
    """The tunnel gives the mean over its noisy copies, with further arguments repeated."""
    method, options = hta(tiny(), "second.z"), {"additional_forward_args": GAIN}
    torch.manual_seed(0)
    noise = torch.normal(0, torch.full((4 * BATCH, TOKENS, WIDTH), 0.1))
    noisy = data().repeat_interleave(4, 0) + noise
    parts = [method.attribute(noisy[n::4], **options) for n in range(4)]
    torch.manual_seed(0)
    tunnel = NoiseTunnel(method)
    same(tunnel.attribute(data(), "smoothgrad", 4, stdevs=0.1, **options), sum(parts) / 4)


@pytest.mark.parametrize("nt_type", ["smoothgrad_sq", "vargrad"])
def test_noise_tunnel_other_types(nt_type):
    """Other types of the tunnel keep the shape and give positive numbers."""
    tunnel = NoiseTunnel(hta(tiny(), "second.z"))
    result = tunnel.attribute(data(), nt_type=nt_type, nt_samples=3, nt_samples_batch_size=2)
    assert result.shape == (BATCH, HEADS, TOKENS, TOKENS)
    assert (result > 0).all()


def test_sensitivity_max():
    """Captum's metric returns one number for each example, zero for a constant explanation."""
    method = hta(tiny(), "second.z")
    moved = sensitivity_max(method.attribute, data(), additional_forward_args=GAIN)
    kept = sensitivity_max(method.attribute, data(), perturb_func=lambda x: x)
    assert moved.shape == (BATCH,)
    assert (moved > 0).all()
    assert (kept < 1e-12).all()


@pytest.mark.parametrize("mode", MODES)
def test_results_are_plain_values(mode):
    """Results are contiguous, detached and of the model's dtype, in every form."""
    x = data().requires_grad_()
    model = tiny()
    joined = HiddenTokenAttribution(
        lambda a, b: model(torch.cat([a, b], 1)), [model.first.z, model.second.out]
    )
    pairs = joined.attribute((x, x), mode=mode, return_standard_error=True)
    for value in (tensor for form in pairs for by_layer in form for tensor in by_layer):
        assert value.is_contiguous()
        assert not value.requires_grad
        assert value.dtype == torch.float64


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)],
)
def test_dtype_of_the_model(dtype, tolerance, norm, mode):
    """Results have the dtype of the model and are close to those in float64."""
    exact = hta(tiny(), "second.z", norm=norm).attribute(data())
    result = hta(tiny().to(dtype), "second.z", norm=norm).attribute(data().to(dtype), mode=mode)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), exact, rtol=0, atol=tolerance)
    torch.testing.assert_close(
        result.double().sum(-1), torch.ones(BATCH, HEADS, TOKENS).double(), rtol=0, atol=tolerance
    )


# --- nothing of the caller's changes --------------------------------------------------------------


def state(model: nn.Module, *tensors: Tensor) -> dict[str, Any]:
    """Everything that an attribution must leave unchanged."""
    backends = torch.backends.cuda
    return {
        "hooks": {
            (name, key): dict(value)
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if "hook" in key and isinstance(value, dict)
        },
        "flags": [p.requires_grad for p in (*model.parameters(), *tensors)],
        "gradients": [p.grad is None for p in (*model.parameters(), *tensors)],
        "values": [p.detach().tolist() for p in (*model.parameters(), *tensors)],
        "training": [module.training for module in model.modules()],
        "grad enabled": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "attention": [
            backends.flash_sdp_enabled(),
            backends.mem_efficient_sdp_enabled(),
            backends.math_sdp_enabled(),
            backends.cudnn_sdp_enabled(),
        ],
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "random": (torch.get_rng_state().tolist(), random.getstate()),
    }


def breaks(*args: Any) -> None:
    """A forward hook that draws a random number and raises."""
    torch.rand(1)
    raise RuntimeError("broken model")


CALLS = {
    "forward": {"mode": "forward"},
    "reverse": {"mode": "reverse"},
    "probes": {"n_probes": 3},
    "tolerance": {"tolerance": 0.05},
    "split": {"internal_batch_size": 2, "precision": "medium"},
}


@contextmanager
def settings(changed: bool) -> Iterator[None]:
    """The settings of a fresh session, or all of them changed."""
    with (
        torch.set_grad_enabled(not changed),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION) if changed else nullcontext(),
    ):
        torch.backends.mha.set_fastpath_enabled(not changed)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("broken", [None, "first.z", "second.norm"])
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_nothing_of_the_callers_changes(options, broken, changed):
    """Hooks, flags, modes, settings, values and random states are unchanged, also if the model raises."""
    model, x = tiny(functional.scaled_dot_product_attention), data().requires_grad_(changed)
    model.first.requires_grad_(False)
    model.second.train()
    model.first.norm.register_forward_hook(lambda *args: torch.rand(1) and None)
    if broken:
        model.get_submodule(broken).register_forward_hook(breaks)
    method = hta(model, ["first", "second.z"], source_layer="first.norm")
    with settings(changed):
        before = state(model, x)
        with pytest.raises(RuntimeError, match="broken model") if broken else nullcontext():
            method.attribute(x, **options)
        assert state(model, x) == before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", ["embed", "second.z", "second.norm"])
def test_nothing_changes_where_an_error_is_raised(layer, mode):
    """They are unchanged after errors of the class, too."""
    model, x = tiny(), data()
    method = hta(model, [layer, "second"], num_heads=3, source_layer="second")
    before = state(model, x)
    with pytest.raises(ValueError, match="module"):
        method.attribute(x, mode=mode)
    assert state(model, x) == before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gradients", [torch.no_grad, torch.inference_mode])
def test_gradient_modes(gradients, mode):
    """The caller's gradient mode does not matter, nor the one that inputs were created in."""
    model = tiny()
    expected = hta(model, "second.z").attribute(data(), additional_forward_args=(GAIN, "sine"))
    with gradients():
        x, gain = data() * 1, GAIN * 1
        result = hta(model, "second.z").attribute(x, additional_forward_args=(gain, "sine"), mode=mode)
        numbers = hta(model, "second.z", source_layer="embed").attribute(ids() * 1, mode=mode)
    same(result, expected)
    same(numbers, hta(model, "second.z").attribute(model.embed(ids())))


@pytest.mark.parametrize("mode", MODES)
def test_inference_tensors_within_an_argument(mode):
    """A further argument may contain tensors created in inference mode."""
    model = tiny()
    run = lambda x, options: model(x, options["gain"])  # noqa: E731
    with torch.inference_mode():
        method = HiddenTokenAttribution(run, model.second.z)
        result = method.attribute(data(), additional_forward_args={"gain": GAIN * 1}, mode=mode)
    same(result, hta(model, "second.z").attribute(data(), additional_forward_args=GAIN))


def test_cache_that_was_filled_in_inference_mode():
    """A model that has run in inference mode may have kept tensors of it."""
    kept: dict[str, Tensor] = {}
    ramp = torch.arange(WIDTH).double()
    model = tiny(lambda h: h * kept.setdefault("ramp", ramp * 1), Mixed)
    with torch.inference_mode():
        model(data())
    result = hta(model, "last").attribute(data(), mode="forward")
    kept.clear()
    same(result, hta(model, "last").attribute(data()))


# --- rows that no source reaches ------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("times_inputs", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_unreached_rows_are_zero(norm, times_inputs, mode):
    """A query that no source reaches has a row of zeros; the others sum to 1."""
    model = tiny(lambda h: h * torch.tensor([1.0, 0.0, 1.0, 0.0]).double()[:, None], Mixed)
    method = hta(model, "act", norm=norm, num_heads=2, multiply_by_inputs=times_inputs)
    sums = method.attribute(data(), mode=mode).sum(-1)
    same(sums, torch.tensor([1.0, 0.0, 1.0, 0.0]).double().expand(BATCH, 2, -1))


@pytest.mark.parametrize("options", [{"mode": "forward"}, {"mode": "reverse"}, {"n_probes": 3}])
def test_unreached_target_is_zero(options):
    """A target multiplied by zero has contributions and errors of zero, never NaN."""
    method = hta(tiny(lambda h: h * 0, Mixed), ["act", "last"])
    values, errors = method.attribute(data(), return_standard_error=True, **options)
    for tensor in (*values, *errors):
        same(tensor, torch.zeros(BATCH, TOKENS, TOKENS).double())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_scale_of_a_target_does_not_matter(scale, mode):
    """In float32 a tiny or huge target has the same shares as the target itself."""
    method = hta(tiny(lambda h: h * scale, Mixed).float(), "act")
    result = method.attribute(data().float(), mode=mode)
    exact = hta(tiny(lambda h: h, Mixed), "act").attribute(data())
    torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-6)


# --- errors ---------------------------------------------------------------------------------------


def attributed(
    layer: Any = "second.z", x: Any = None, model: Any = None, **options: Any
) -> Callable[[], Any]:
    """A call of ``attribute``, with settings of the class among its options."""
    names = ("source_layer", "num_heads", "norm", "device_ids")
    chosen = {name: options.pop(name) for name in names if name in options}
    x = data() if x is None else x
    return lambda: hta(model or tiny(), layer, **chosen).attribute(x, **options)


def unreached(x: Tensor) -> Tensor:
    """A target that does not depend on the input."""
    return torch.ones_like(x)


class Pair(nn.Module):
    """Returns two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def in_train_mode(*modules: nn.Module) -> nn.Module:
    """Modules after a mixing of positions, in training mode and float64."""
    return nn.Sequential(Apply(lambda x: x.cumsum(1)), *modules).double().train()


def half_written(h: Tensor) -> Tensor:
    """Writes to parts of a new tensor."""
    out = torch.zeros_like(h)
    out[..., :4] = h[..., :4].sin()
    out[..., 4:] = h[..., 4:]
    return out


def dropping_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with dropout of its pattern."""
    return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


STRANGER = linear().double()
ENCODER = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True).double()
FLAT = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (4, 8)))
PAIR = nn.Sequential(Pair(), Apply(lambda pair: pair[0]))
TWICE = nn.Sequential(STRANGER, STRANGER, Apply(torch.sin))

ERRORS = {
    # modules of the wrong kind or in the wrong order
    "not called": (attributed("embed"), r"module 'embed' is not called.*pass a module that"),
    "foreign": (attributed(STRANGER), r"module Linear is not called.*pass a module that"),
    "source after target": (
        attributed("first.z", source_layer="second"),
        r"module 'first.z' is called before the source module 'second', if that is called at all",
    ),
    "source not called": (attributed(source_layer=STRANGER), r"source module Linear"),
    "source called twice": (
        attributed("2", source_layer="0", model=TWICE),
        r"module '0' is called more than once.*choose a module that is called once",
    ),
    "no path": (
        attributed("act", model=tiny(unreached, Mixed)),
        r"no path leads from the inputs to module 'act': choose a source that",
    ),
    "no path in reverse": (
        attributed("act", model=tiny(unreached, Mixed), mode="reverse"),
        r"no path leads from the inputs to module 'act': choose a source that",
    ),
    "no path from a module": (
        attributed("last", model=tiny(Tensor.detach, Mixed), source_layer="pre"),
        r"no path leads from module 'pre' to module 'last': choose a source that",
    ),
    "target 2-D": (
        attributed("0", model=FLAT),
        r"output of module '0' is \[3, 32\], but \[batch, position, width\].*choose a module",
    ),
    "source 2-D": (
        attributed("1", model=FLAT, source_layer="0"),
        r"output of module '0' is \[3, 32\], but \[batch, position, width\].*choose a module",
    ),
    "target of several tensors": (
        attributed("0", model=PAIR),
        r"output of module '0' holds 2 floating-point tensors, but one tensor is needed: choose a module",
    ),
    "source of several tensors": (
        attributed("1", model=PAIR, source_layer="0"),
        r"output of module '0' holds 2 floating-point tensors, but one tensor is needed: choose a module",
    ),
    # settings of the class
    "heads do not divide": (
        attributed("second.out", num_heads=3),
        r"module 'second.out' is 8 wide, which num_heads=3 does not divide: pass the model's",
    ),
    "other heads": (attributed(num_heads=4), r"'second.z' has 2 heads, but num_heads is 4"),
    "no heads": (attributed(num_heads=0), r"num_heads must be a positive int or None, got 0"),
    "norm": (attributed(norm="l2"), r"must be one of 'frobenius', .*, got 'l2'"),
    "devices": (
        attributed(device_ids=[0, 1]),
        r"device_ids names 2 devices.*pass the module that DataParallel wraps",
    ),
    "no such device": (attributed(device_ids=[99]), r"device_ids names \[99\], but there are devices 0 to"),
    "batch axis": (lambda: hta(tiny(), "second.z", batch_dim=2), "batch_dim must be 0 or 1, got 2"),
    # arguments of attribute
    "probes": (attributed(n_probes=0), r"n_probes must be a positive int or None, got 0"),
    "half a probe": (attributed(n_probes=0.5), r"n_probes must be a positive int.*got 0\.5"),
    "one probe": (
        attributed(n_probes=1, return_standard_error=True),
        r"one probe has no standard error: use at least two",
    ),
    "tolerance": (attributed(tolerance=0), r"tolerance must be positive or None, got 0"),
    "tolerance NaN": (attributed(tolerance=float("nan")), r"tolerance must be positive.*nan"),
    "spectral probes": (
        attributed(norm="spectral", n_probes=2),
        r"probes do not estimate a spectral norm: leave out n_probes and tolerance",
    ),
    "spectral tolerance": (
        attributed(norm="spectral", tolerance=0.1),
        r"probes do not estimate a spectral norm: leave out n_probes and tolerance",
    ),
    "mode": (attributed(mode="sideways"), r"mode must be one of .*'reverse'.*got 'sideways'"),
    "mode not valid": (attributed(mode="probes"), r"'probes' cannot .*valid here: forward, reverse"),
    "precision": (attributed(precision="low"), r"precision must be one of 'highest', 'high', 'me"),
    "selector too large": (
        attributed(neuron_selector=4),
        r"neuron_selector names \[4\], but the target has positions 0 to 3",
    ),
    "selector too small": (
        attributed(neuron_selector=[0, -5], mode="reverse"),
        r"neuron_selector names \[-5\], but the target has positions 0 to 3",
    ),
    "selector empty": (attributed(neuron_selector=[]), r"names no positions.*positions 0 to 3"),
    "slice empty": (
        attributed(neuron_selector=slice(4, 9)),
        r"neuron_selector slice\(4, 9, None\) is empty for a target of 4 positions",
    ),
    "internal batch of 0": (attributed(internal_batch_size=0), r"internal_batch_size must be"),
    "internal batch of -1": (attributed(internal_batch_size=-1), r"internal_batch_size must be"),
    "empty batch": (attributed(x=data()[:0]), r"inputs hold no example"),
    "no positions": (attributed(x=data()[:, :0]), r"position"),
    "inputs 2-D": (
        attributed(x=data()[0]),
        r"inputs must be \[batch, position, width\].*got \[4, 8\]: insert the missing axis",
    ),
    "batches differ": (
        attributed(STRANGER, (data(), data()[:1]), lambda a, b: STRANGER(a + b)),
        r"inputs.*(batch|example)",
    ),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS)
def test_value_errors(call, message):
    """A wrong value is refused with its cause and a remedy."""
    with pytest.raises(ValueError, match=message):
        call()


MODULES = r"layer must be a torch.nn.Module or a list of them, got "
NO_DERIVATIVE = r"inputs of type torch.int64 have no derivative: name the module.*as source_layer"
POSITIONS = r"neuron_selector names query positions: an int, a slice, or a list of ints, got "

TYPE_ERRORS = {
    "no layer": (lambda: HiddenTokenAttribution(tiny(), None), MODULES + "None"),
    "name": (lambda: HiddenTokenAttribution(tiny(), "first.z"), MODULES + "'first.z'"),
    "empty list": (lambda: HiddenTokenAttribution(tiny(), []), MODULES + r"\[\]"),
    "list of names": (lambda: HiddenTokenAttribution(tiny(), ["first.z"]), MODULES + r"\['first"),
    "source": (
        attributed(source_layer=3),
        r"source_layer must be a torch.nn.Module or None, got 3",
    ),
    "ids": (attributed(x=ids()), NO_DERIVATIVE),
    "ids in a tuple": (attributed(x=(data(), ids())), NO_DERIVATIVE),
    "list": (attributed(x=[data()]), r"inputs must be a tensor or a tuple of tensors, got list"),
    "seed": (attributed(seed="x"), "seed must be an int, got 'x'"),
    "probes true": (attributed(n_probes=True), "n_probes must be a positive int or None, got True"),
    "tolerance true": (attributed(tolerance=True), "tolerance must be a positive number or None, got True"),
    "heads true": (attributed(num_heads=True), "num_heads must be a positive int or None, got True"),
    "internal batch true": (
        attributed(internal_batch_size=True),
        "internal_batch_size must be a positive int",
    ),
    "inputs times": (
        lambda: hta(tiny(), "second.z", multiply_by_inputs="false"),
        "multiply_by_inputs must be True or False, got 'false'",
    ),
    "neuron input": (
        attributed(attribute_to_neuron_input="no"),
        "attribute_to_neuron_input must be True or False, got 'no'",
    ),
    "progress": (attributed(show_progress="no"), "show_progress must be True or False, got 'no'"),
    "standard error": (
        attributed(return_standard_error=1),
        "return_standard_error must be True or False, got 1",
    ),
    "device": (attributed(device_ids="cpu"), "device_ids must be a list of ints or None, got 'cpu'"),
    "direction": (attributed(direction=3.0), "direction must be a tensor or a list of tensors, got 3.0"),
    "selector text": (attributed(neuron_selector="0"), POSITIONS + "'0'"),
    "selector float": (attributed(neuron_selector=1.0), POSITIONS + r"1\.0"),
    "selector bool": (attributed(neuron_selector=True), POSITIONS + "True"),
    "selector mask": (attributed(neuron_selector=torch.ones(4) > 0), POSITIONS + r"\[True"),
}


@pytest.mark.parametrize(("call", "message"), TYPE_ERRORS.values(), ids=TYPE_ERRORS)
def test_type_errors(call, message):
    """A wrong type is refused with its cause and a remedy."""
    with pytest.raises(TypeError, match=message):
        call()


DROPOUTS = {
    "dropout": (in_train_mode(linear(), nn.Dropout(), linear()), "3"),
    "dropout first": (in_train_mode(nn.Dropout(), linear()), "2"),
    "in place": (in_train_mode(linear(), nn.Dropout(inplace=True), linear()), "3"),
    "of channels": (in_train_mode(linear(), nn.Dropout1d(), linear()), "3"),
    "alpha": (in_train_mode(linear(), nn.AlphaDropout(), linear()), "3"),
    "before a view is written": (
        in_train_mode(nn.Dropout(), Apply(half_written), linear()),
        "3",
    ),
    "after a view is written": (
        in_train_mode(Apply(half_written), Apply(lambda h: h * 1), nn.Dropout(), linear()),
        "4",
    ),
    "attention": (tiny(dropping_attention), "second.out"),
    "encoder": (nn.Sequential(ENCODER).train(), "0.linear1"),
}


@pytest.mark.parametrize("mode", [None, "reverse"])
@pytest.mark.parametrize(("model", "layer"), DROPOUTS.values(), ids=DROPOUTS)
def test_active_dropout(model, layer, mode):
    """An active dropout is refused, wherever it is."""
    with pytest.raises(ValueError, match=r"dropout is active.*call model.eval\(\) first"):
        hta(model, layer).attribute(data(), mode=mode)


def test_harmless_dropouts():
    """A dropout with rate 0 and one behind the target are accepted."""
    model = in_train_mode(nn.Dropout(0.0), linear(), nn.Dropout(0.5))
    same(hta(model, "2").attribute(data()), hta(model.eval(), "2").attribute(data()))


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("times_inputs", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("layer", "heads"), [("first.z", 2), ("second", 4)])
def test_norms(layer, heads, norm, times_inputs, mode):
    """In every mode, every norm equals that of the dense Jacobian."""
    model, x = tiny(), data()
    chosen = {"norm": norm, "num_heads": heads, "multiply_by_inputs": times_inputs}
    result = hta(model, layer, **chosen).attribute(x, mode=mode)
    same(result, dense(model, model.get_submodule(layer), x, heads, norm, times_inputs))


@pytest.mark.parametrize("mode", MODES)
def test_neuron_gradient(mode):
    """Captum's gradients of single neurons, added up, give the Frobenius norms."""
    model, x = tiny(), data()
    gradient = NeuronGradient(model, model.second.out)
    squares = [[gradient.attribute(x, (j, c)).square().sum(-1) for c in range(WIDTH)] for j in range(TOKENS)]
    r = torch.stack([sum(row) for row in squares], 1).sqrt()
    same(hta(model, "second.out").attribute(x, mode=mode), shares(r.detach()))


@pytest.mark.parametrize("mode", MODES)
def test_keys_that_a_causal_model_hides(mode):
    """In causal models later tokens contribute nothing."""
    result = hta(tiny(lambda h: h.sin(), Mixed), "last").attribute(data(), mode=mode)
    assert (result.triu(1) == 0).all()
    assert (result.tril()[..., 0] > 0).all()


# --- Captum's own test models ---------------------------------------------------------------------

BASIC = data(BATCH, 5, 3, seed=3)


def basic(layers: Any, inplace: bool, **options: Any) -> Any:
    """Contributions in Captum's BasicModel_MultiLayer, after a mixing of positions."""
    model = BasicModel_MultiLayer(inplace=inplace).double()
    run = lambda x: model(x.tanh().cumsum(1))  # noqa: E731
    source = options.pop("source", None)
    method = HiddenTokenAttribution(
        run,
        [model.get_submodule(layer) for layer in layers],
        source_layer=source and model.get_submodule(source),
        multiply_by_inputs=options.pop("times_inputs", False),
    )
    return method.attribute(BASIC, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", ["linear0", "linear1", "relu", "linear2"])
def test_basic_model(layer, mode):
    """Layers of BasicModel_MultiLayer match their dense reference; rows without a path are zero."""
    model = BasicModel_MultiLayer().double()
    run = lambda x: model(x.tanh().cumsum(1))  # noqa: E731
    (result,) = basic([layer], False, mode=mode)
    same(result, dense(run, model.get_submodule(layer), BASIC))
    assert (result.sum(-1) == 0).any() == (layer in ("relu", "linear2"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "layers",
    [
        ["linear1"],
        ["relu"],
        ["linear2"],
        ["linear1", "relu"],
        ["linear1", "linear2"],
        ["linear0", "relu", "linear2"],
    ],
)
def test_basic_model_in_place(layers, mode):
    """An in-place ReLU gives the same as any other, also for the layer whose output it overwrites."""
    same(basic(layers, True, mode=mode), basic(layers, False))


@pytest.mark.parametrize("mode", MODES)
def test_basic_model_in_place_at_inputs(mode):
    """The input of an in-place ReLU is the value before it."""
    layers, options = ["relu", "linear2"], {"attribute_to_neuron_input": True}
    same(basic(layers, True, mode=mode, **options), basic(layers, False, **options))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("times_inputs", [False, True])
def test_basic_model_in_place_at_the_source(times_inputs, mode):
    """The source may be a tensor that an in-place ReLU overwrites."""
    options = {"source": "linear1", "times_inputs": times_inputs}
    same(basic(["linear2"], True, mode=mode, **options), basic(["linear2"], False, **options))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("times_inputs", [False, True])
def test_inputs_written_in_place(times_inputs, mode):
    """A model that writes to its inputs changes neither the caller's tensors nor the result."""
    x, last = data(), linear().double()
    plain, writes = (
        HiddenTokenAttribution(
            lambda x, exp=exp: last(exp(x).cumsum(1)), last, multiply_by_inputs=times_inputs
        )
        for exp in (torch.exp, torch.exp_)
    )
    same(writes.attribute(x, mode=mode), plain.attribute(data()))
    same(x, data())


def test_basic_model_with_a_module_of_several_tensors():
    """MultiRelu returns two tensors and is refused; its parts return one each."""
    model = BasicModel_MultiLayer(multi_input_module=True).double()
    with pytest.raises(ValueError, match=r"'multi_relu' holds 2 floating-point tensors.*choose"):
        hta(model, "multi_relu").attribute(BASIC)
    alive = (model.linear1(BASIC) > 0).any(-1).double()
    same(hta(model, "multi_relu.relu1").attribute(BASIC), torch.diag_embed(alive))


@pytest.mark.parametrize("mode", MODES)
def test_basic_embedding_model(mode):
    """Each output of BasicEmbeddingModel depends on its own token, or on none after a dead ReLU."""
    torch.manual_seed(0)
    model = BasicEmbeddingModel(30, 6, 10).double()
    first, second = ids(), ids() + 5
    method = hta(model, "linear2", source_layer="embedding1")
    alive = (model.embedding1(first) + model.embedding2(second)).sum(-1) > 0
    same(method.attribute((first, second), mode=mode), torch.diag_embed(alive.double()))
    assert 0 < alive.sum() < alive.numel()


@pytest.mark.parametrize("mode", MODES)
def test_basic_model_with_several_inputs(mode):
    """Three inputs that are added with a scale contribute a third each."""
    model = BasicModel_MultiLayer_MultiInput().double()
    inputs = tuple(data(BATCH, 5, 3, seed=seed) for seed in range(3))
    result = hta(model, "model.linear1").attribute(inputs, additional_forward_args=4, mode=mode)
    same(result, (torch.eye(5).double().expand(BATCH, -1, -1) / 3,) * 3)


# --- attention kernels ----------------------------------------------------------------------------

MASK = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1]], dtype=torch.bool)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor = MASK) -> Tensor:
    """Attention with a mask in elementary operators."""
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by a fused kernel that the model requires."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(q, k, v)


def sdpa(**options: Any) -> Callable[..., Tensor]:
    """PyTorch's attention with the given options."""
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **options)


KERNELS = {
    "plain": (sdpa(), eager),
    "causal": (sdpa(is_causal=True), lambda q, k, v: masked(q, k, v, torch.ones(4, 4).tril() > 0)),
    "mask": (sdpa(attn_mask=MASK), masked),
    "bias": (sdpa(attn_mask=torch.zeros(4, 4).double().masked_fill(~MASK, -torch.inf)), masked),
    "scale": (sdpa(scale=2.0), lambda q, k, v: eager(q * 2 * q.shape[-1] ** 0.5, k, v)),
    "shared keys": (
        lambda q, k, v: sdpa(enable_gqa=True)(q, k[:, :1], v[:, :1]),
        lambda q, k, v: eager(q, k[:, :1], v[:, :1]),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kernel", "plain"), KERNELS.values(), ids=KERNELS)
def test_scaled_dot_product_attention(kernel, plain, mode):
    """PyTorch's attention gives the same as elementary operators, without any setting by the user."""
    result = hta(tiny(kernel), ["first.z", "second"]).attribute(data(), mode=mode)
    same(result, hta(tiny(plain), ["first.z", "second"]).attribute(data()))


def sees(rule: Callable[[Tensor, Tensor], Tensor], tokens: int = 8) -> Tensor:
    """The mask ``[query, key]`` of a rule on their positions."""
    positions = torch.arange(tokens)
    return rule(positions[:, None], positions) & torch.ones(tokens, tokens, dtype=torch.bool)


MASKS = {
    "causal": sees(lambda q, k: q >= k),
    "sliding": sees(lambda q, k: (q >= k) & (q - k < 3)),
    "anti-causal": sees(lambda q, k: q <= k),
    "prefix": sees(lambda q, k: (q >= k) | (k < 3)),
    "documents": sees(lambda q, k: q // 2 == k // 2),
    "causal except the first": sees(lambda q, k: (q >= k) | ((q == 0) & (k == 1))),
    "causal except the last": sees(lambda q, k: (q >= k) | ((q == 5) & (k == 7))),
    "sixteen causal": sees(lambda q, k: q >= k, 16),
    "sixteen causal except a pair": sees(lambda q, k: (q >= k) | ((q == 2) & (k == 5)), 16),
}


@pytest.mark.parametrize(
    ("size", "options"),
    [(1, {"mode": "forward"}), (3 * WIDTH, {"mode": "forward"}), (1, {"n_probes": WIDTH})],
    ids=["exact", "three tokens at once", "all probes"],
)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks(mask, size, options):
    """Contributions follow the mask, also with few tangents at a time."""
    model, x = tiny(lambda q, k, v: masked(q, k, v, mask)), data(1, len(mask), WIDTH)
    method = hta(model, ["first.z", "second.z", "second"])
    same(method.attribute(x, internal_batch_size=size, **options), method.attribute(x, mode="reverse"))


@pytest.mark.parametrize("size", [1, None])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, WIDTH, 2 * WIDTH])
def test_lengths(tokens, causal, size):
    """A sequence may have one token, or be as long as another axis, such as heads or width."""
    x = data(1, tokens, WIDTH)
    method = hta(tiny(sdpa(is_causal=causal)), ["first.z", "second"])
    result = method.attribute(x, internal_batch_size=size, mode="forward")
    same(result, method.attribute(x, mode="reverse"))
    assert all(bool((part.triu(1) == 0).all()) == (causal or tokens == 1) for part in result)


def test_query_that_attends_to_nothing():
    """A query with all keys masked has a row of zeros."""
    mask = MASK.clone()
    mask[1] = False
    for mode in MODES:
        sums = hta(tiny(sdpa(attn_mask=mask)), "first.z").attribute(data(), mode=mode).sum(-1)
        same(sums, torch.tensor([1.0, 0.0, 1.0, 1.0]).double().expand(BATCH, HEADS, -1))


def test_fused_attention_takes_the_reverse_mode(caplog):
    """A kernel without a forward derivative is differentiated in reverse mode, and the log says so."""
    result = hta(tiny(flash), ["first.z", "second"]).attribute(data())
    same(result, hta(tiny(), ["first.z", "second"]).attribute(data()))
    assert "taking the reverse mode" in caplog.text


@pytest.mark.parametrize("options", [{"mode": "forward"}, {"n_probes": 3}, {"tolerance": 0.1}])
def test_fused_attention_refuses_the_forward_mode(options):
    """Modes that need a forward derivative are refused where there is none."""
    with pytest.raises(ValueError, match=r"(?s)need a forward derivative.*ask for an exact result"):
        hta(tiny(flash), "second").attribute(data(), **options)


def encoder() -> nn.Module:
    """Two of PyTorch's own layers in float64 and eval mode."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2).double().eval()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gradients", [torch.enable_grad, torch.no_grad])
def test_transformer_encoder(gradients, mode):
    """PyTorch's encoder matches the dense reference, although it has a fast path in eval mode."""
    model, x, layers = encoder(), data(), ["layers.0.linear1", "layers.1"]
    with gradients():
        result = hta(model, layers).attribute(x, mode=mode)
    same(result, [dense(model, model.get_submodule(layer), x) for layer in layers])


@pytest.mark.parametrize("mode", MODES)
def test_transformer_encoder_with_padding(mode):
    """The padding mask of PyTorch's encoder is respected: padding contributes nothing."""
    model, padding = encoder(), torch.arange(TOKENS) >= torch.tensor([[4], [3], [2]])
    run = lambda x, mask: model(x, src_key_padding_mask=mask)  # noqa: E731
    method = HiddenTokenAttribution(run, model.layers[1].linear1)
    result = method.attribute(data(), additional_forward_args=padding, mode=mode)
    alone = [hta(model, "layers.1.linear1").attribute(data()[n : n + 1, : 4 - n]) for n in range(3)]
    for row, number in zip(alone, range(3), strict=True):
        same(result[number : number + 1, : 4 - number, : 4 - number], row)
        assert (result[number, : 4 - number, 4 - number :] == 0).all()


class OwnAttention(nn.Module):
    """PyTorch's MultiheadAttention, which returns ``(output, None)``, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor:
        y, _ = self.attend(x, x, x, need_weights=need_weights)
        return self.last(y.cumsum(1))


def own_attention() -> OwnAttention:
    """The module in float64 and eval mode."""
    torch.manual_seed(0)
    return OwnAttention().double().eval()


def heads_by_hand(attend: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """The outputs of the heads of self-attention ``[batch, position, head * d_head]``, from its weights."""
    q, k, v = (
        functional.linear(x, weight, bias).unflatten(-1, (attend.num_heads, -1)).transpose(1, 2)
        for weight, bias in zip(attend.in_proj_weight.chunk(3), attend.in_proj_bias.chunk(3), strict=True)
    )
    return eager(q, k, v).transpose(1, 2).flatten(2)


def by_hand(function: Callable[[Tensor], Tensor], x: Tensor, heads: int) -> Tensor:
    """Contributions to the output ``[batch, position, width]`` of a function, example by example."""
    blocks = [jacobian(function, example, range(x.shape[1])) for example in x.split(1)]
    return torch.stack([shares(norms(block, heads, "frobenius")) for block in blocks])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("need_weights", [False, True])
def test_heads_of_multihead_attention(need_weights, mode):
    """Heads are read before the output projection, whatever else the module returns."""
    model, x = own_attention(), data()
    options = {"additional_forward_args": need_weights, "mode": mode}
    with torch.no_grad():
        result = hta(model, "attend").attribute(x, **options)
    same(result, by_hand(lambda a: heads_by_hand(model.attend, a), x, 2))
    same(hta(model, "last").attribute(x, **options), dense(model, model.last, x))


@pytest.mark.parametrize("mode", MODES)
def test_heads_of_an_encoder(mode):
    """Both layers have heads with respect to the input, also in a list with other targets."""
    model, x = encoder(), data()
    layers = ["layers.1.self_attn", "layers.1.linear1", "layers.0.self_attn"]
    before = state(model, x)
    with torch.no_grad():
        heads, inner, first = hta(model, layers).attribute(x, mode=mode)
    assert state(model, x) == before
    same(heads, by_hand(lambda a: heads_by_hand(model.layers[1].self_attn, model.layers[0](a)), x, 2))
    same(first, by_hand(lambda a: heads_by_hand(model.layers[0].self_attn, a), x, 2))
    same(inner, dense(model, model.layers[1].linear1, x))


class HeadsFirst(nn.Module):
    """Heads of attention as ``[batch, head, position, d_head]`` and ``[batch, position, head, d_head]``."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q = k = v = self.project(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return self.after(self.before(eager(q, k, v)).transpose(1, 2))


@pytest.mark.parametrize("options", [*({"mode": mode} for mode in MODES), {"neuron_selector": 0}])
def test_heads_before_positions(options):
    """The number of heads tells which axis has them; without it, lengths that suggest it are refused."""
    torch.manual_seed(0)
    model, x = HeadsFirst().double().eval(), data()
    with pytest.raises(ValueError, match=r"'before'.*heads seem to come before.*num_heads=2"):
        hta(model, "before").attribute(x, **options)
    expected = by_hand(lambda a: model(a).flatten(2), x, 2)
    expected = expected[..., [0], :] if "neuron_selector" in options else expected
    same(hta(model, "before", num_heads=2).attribute(x, **options), expected)
    same(hta(model, "after", num_heads=2).attribute(x, **options), expected)
    same(hta(model, "after").attribute(x, **options), expected)


def test_heads_where_they_are_mixed():
    """Targets that mix heads are refused with the name of the module to use; the projection alone is not
    called.
    """
    model = encoder()
    with pytest.raises(ValueError, match=r"'layers\.1' mixes the heads.*pass its module 'self_attn'"):
        hta(model, "layers.1", num_heads=2).attribute(data())
    with pytest.raises(ValueError, match=r"out_proj' is not called.*MultiheadAttention the module itself"):
        hta(model, "layers.1.self_attn.out_proj", num_heads=2).attribute(data())
    with pytest.raises(ValueError, match=r"self_attn' has 2 heads, but num_heads is 4"):
        hta(model, "layers.1.self_attn", num_heads=4).attribute(data())


@pytest.mark.parametrize("mode", MODES)
def test_source_that_gives_a_tensor_and_none(mode):
    """As a source, such a module still returns everything that the model unpacks."""
    model = own_attention()
    result = hta(model, "last", source_layer="attend").attribute(data(), mode=mode)
    same(result, shares(torch.ones(TOKENS, TOKENS).double().tril()).expand(BATCH, -1, -1))


class Named(NamedTuple):
    """A tensor and a second field."""

    value: Tensor
    note: str


@pytest.mark.parametrize("mode", MODES)
def test_source_that_gives_a_named_tuple(mode):
    """As a source, a module that returns a named tuple still does so."""
    model = nn.Sequential(Apply(lambda x: Named(x.sin(), "kept")), Apply(lambda named: named.value.cumsum(1)))
    result = hta(model, "1", source_layer="0").attribute(data(), mode=mode)
    same(result, shares(torch.ones(TOKENS, TOKENS).double().tril()).expand(BATCH, -1, -1))


# --- what has no forward derivative, writes in place, or is a constant to autograd ----------------


class Sine(torch.autograd.Function):
    """A sine with its own backward function, and neither a forward derivative nor vmap."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()


class NumpySine(Sine):
    """The same through NumPy, where PyTorch sees no operator."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return torch.from_numpy(np.sin(h.detach().numpy()))


class StraightThrough(torch.autograd.Function):
    """Rounds, with the derivative of the identity."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return (3 * h).round() / 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@torch.library.custom_op("captum_hta_tests::sine", mutates_args=())
def sine_operator(h: Tensor) -> Tensor:
    """A custom operator without a forward derivative and without vmap."""
    return h.sin()


sine_operator.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def constant_norm(h: Tensor) -> Tensor:
    """Divides by a norm that autograd takes as constant."""
    with torch.no_grad():
        size = h.norm(dim=-1, keepdim=True)
    return h / size


FUNCTIONS = {
    "autograd.Function": lambda h: h + Sine.apply(h),
    "autograd.Function in NumPy": lambda h: h + NumpySine.apply(h),
    "autograd.Function in NumPy alone": NumpySine.apply,
    "straight through": lambda h: h.sin() + StraightThrough.apply(h),
    "operator": lambda h: h + sine_operator(h),
    "operator alone": sine_operator,
    "detach": lambda h: h / h.detach().norm(dim=-1, keepdim=True),
    "no_grad": constant_norm,
    "fft": lambda h: h + torch.fft.fft2(h).real,
    "fft alone": lambda h: torch.fft.fft2(h).real,
    "complex product": lambda h: torch.view_as_real(
        torch.view_as_complex(h.unflatten(-1, (-1, 2))) * (0.6 + 0.8j)
    ).flatten(-2),
    "sort": lambda h: h.sort(-1).values * h,
    "topk": lambda h: h.topk(3, -1).values.sum(-1, keepdim=True) * h,
    "einsum": lambda h: torch.einsum("bic,bjc,bjd->bid", h, h, h),
    "max": lambda h: h.max(1, keepdim=True).values * h,
    "conv": lambda h: functional.conv1d(h.mT, h.new_ones(8, 1, 3), padding=1, groups=8).mT * h,
    "group norm": lambda h: functional.group_norm(h.flatten(0, 1), 2).view_as(h),
}


def right(model: nn.Module, mode: str | None) -> None:
    """Check that in a mode both layers of a :class:`Mixed` model match the dense reference."""
    layers, x = ("act", "last"), data()
    expected = [dense(model, model.get_submodule(layer), x) for layer in layers]
    for layer, whole in zip(layers, expected, strict=True):
        same(hta(model, layer).attribute(x, mode=mode), whole)
    same(hta(model, list(layers)).attribute(x, mode=mode), expected)


def right_or_refused(model: nn.Module) -> None:
    """Check that the forward mode matches the dense reference or is refused."""
    try:
        right(model, "forward")
    except ValueError as error:
        assert "need a forward derivative" in str(error)  # noqa: PT017


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions(function):
    """The result is autograd's by default and in reverse mode; in forward mode too, or it is refused."""
    model = tiny(function, Mixed)
    right(model, None)
    right(model, "reverse")
    right_or_refused(model)


def test_operator_without_forward_derivative(caplog):
    """Reverse mode is used, and the log says why; forward mode and probes are refused."""
    model = tiny(sine_operator, Mixed)
    hta(model, "last").attribute(data())
    assert "taking the reverse mode" in caplog.text
    for options in ({"mode": "forward"}, {"n_probes": 3}):
        with pytest.raises(ValueError, match=r"(?s)need a forward derivative.*ask for"):
            hta(model, "last").attribute(data(), **options)


def zeroed(h: Tensor) -> Tensor:
    """Writes a constant to a view of a tensor that depends on the input."""
    h = h.sin()
    h[..., :3] = 0
    return h


def rolled(h: Tensor) -> Tensor:
    """Fills a buffer position by position, like a cache of keys."""
    out = torch.zeros_like(h)
    for position, token in enumerate(h.unbind(1)):
        out[:, position] = token.sin() + token * 0.5
    return out


def through_a_transpose(h: Tensor) -> Tensor:
    """Writes through a transposed view created before."""
    h = h.sin()
    view = h.mT
    view[:, 2:5] += 1.0
    view[:, :2].mul_(3.0)
    return h


def read_by_a_view(h: Tensor) -> Tensor:
    """Writes to the whole tensor and reads from a view created before."""
    h = h.sin()
    view = h[..., :4]
    h.mul_(torch.arange(8).double())
    return torch.cat([view, h], -1)[..., :8]


def chained(h: Tensor) -> Tensor:
    """Changes a whole tensor in place, again and again."""
    return h.sin().add_(h).mul_(3).masked_fill_(h > 0.5, 0.5).relu_()


def indexed(h: Tensor) -> Tensor:
    """Writes at indices and at a mask."""
    h = h * 1.0
    h[:, [0, 2]] = h[:, [1, 3]].cos()
    h[h > 1] = 1.0
    return h.index_add_(1, torch.tensor([1]), h[:, 2:3] * 1.0)


IN_PLACE = [half_written, zeroed, rolled, through_a_transpose, read_by_a_view, chained, indexed]


@pytest.mark.parametrize("function", IN_PLACE)
def test_in_place(function):
    """Writing in place, also to views, is right by default and in reverse mode; in forward mode it is right
    or refused.
    """
    model = tiny(function, Mixed)
    right(model, None)
    right(model, "reverse")
    right_or_refused(model)


# --- the batch axis -------------------------------------------------------------------------------

ASKED = {
    "default": {},
    "forward": {"mode": "forward"},
    "reverse": {"mode": "reverse"},
    "probes": {"n_probes": 3},
    "one query": {"neuron_selector": [0]},
    "direction": {"direction": torch.arange(1, 1 + WIDTH // 2).double()},
    "sum": {"norm": "sum"},
}


def asked(layer: Any, x: Tensor, model: Any, **options: Any) -> Any:
    """What a call gives, with the options of :data:`ASKED` and the class's among them."""
    chosen = {name: options.pop(name) for name in ("norm", "batch_dim") if name in options}
    return hta(model, layer, num_heads=2, **chosen).attribute(x, **options)


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h + h.flip(0),
        lambda h: h - h.mean(0, keepdim=True),
        lambda h: (h @ h.mean(0).mT) @ h.mean(0),
    ],
)
@pytest.mark.parametrize("options", ASKED.values(), ids=ASKED)
def test_examples_that_influence_each_other(options, function):
    """They are refused in every mode, since all are carried at once; a single example is right."""
    model = tiny(function, Mixed)
    with pytest.raises(ValueError, match="influence each other"):
        asked("act", data(), model, **options)
    one = data()[:1]
    same(hta(model, "last").attribute(one), dense(model, model.last, one))


def sequence_first() -> nn.Module:
    """The encoder of :func:`encoder` with PyTorch's default layout, ``[position, batch, width]``."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()


@pytest.mark.parametrize("layer", ["layers.1.self_attn", "layers.1.linear2"])
@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("options", ASKED.values(), ids=ASKED)
def test_sequence_first_modules(options, batch, layer):
    """With ``batch_dim=1`` they give the same as batch-first modules; without it they are refused."""
    x, model = data(batch, 5, WIDTH), sequence_first()
    expected = asked(layer, x, encoder(), **options)
    same(asked(layer, x.transpose(0, 1), model, batch_dim=1, **options), expected)
    with pytest.raises(ValueError, match="batch_dim=1"):
        asked(layer, x, model, **options)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("mode", ANY_WAY)
def test_sequence_first_recurrent_modules(mode, kind):
    """The same for recurrent modules, compared with a computation by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(kind(WIDTH, WIDTH), Apply(lambda out: out[0]), linear()).double().eval()
    x = data(2, 5, WIDTH)
    for some in (x, x[:1]):
        with pytest.raises(ValueError, match="batch_dim=1"):
            hta(model, "2").attribute(some)
    result = hta(model, "2", batch_dim=1).attribute(x.transpose(0, 1))
    same(result, by_hand(lambda a: model(a.transpose(0, 1)).transpose(0, 1), x, 1).squeeze(1))


@pytest.mark.parametrize("size", [1, 2])
def test_sequence_first_batches_are_split(size):
    """Parts of the batch have their rows of masks, whose first axis is the batch."""
    model, padding = sequence_first(), torch.arange(TOKENS) >= torch.tensor([[4], [3], [2]])
    run = lambda x, mask: model(x, src_key_padding_mask=mask)  # noqa: E731
    method = HiddenTokenAttribution(run, model.layers[1].self_attn, batch_dim=1)
    x, options = data().transpose(0, 1), {"additional_forward_args": padding}
    same(method.attribute(x, internal_batch_size=size, **options), method.attribute(x, **options))


@pytest.mark.parametrize("options", ASKED.values(), ids=ASKED)
def test_targets_of_another_batch(options):
    """Windows of local attention and sequence-first targets are refused by name."""
    windows = Apply(lambda h: h.unflatten(1, (2, -1)).flatten(0, 1))
    turned = Apply(lambda h: h.transpose(0, 1))
    for module in (windows, turned):
        model = nn.Sequential(Apply(lambda x: x.cumsum(1)), module, linear()).double()
        for x in (data(), data()[:1]):
            with pytest.raises(
                ValueError, match=r"output of module '2' is \[.*\], so axis 0 is not the batch"
            ):
                asked("2", x, model, **options)


def test_sources_of_another_batch():
    """Such sources are refused like such targets."""
    model = nn.Sequential(nn.Embedding(20, WIDTH), Apply(lambda h: h.transpose(0, 1)), linear()).double()
    with pytest.raises(ValueError, match=r"output of module '1' is .*so axis 0 is not the batch of 3"):
        hta(model, "2", source_layer="1").attribute(ids())


def test_splits_that_are_not_of_the_batch():
    """Token ids without a batch axis cannot be split."""
    model = nn.Sequential(nn.Embedding(20, WIDTH), Apply(lambda h: h[None].cumsum(1)), linear()).double()
    method = hta(model, "2", source_layer="1")
    same(method.attribute(ids()[0]), torch.eye(TOKENS).double()[None])
    with pytest.raises(ValueError, match="internal_batch_size splits axis 0 of the inputs, 4 long, but the"):
        method.attribute(ids()[0], internal_batch_size=1)
    model[1] = Apply(lambda h: h.transpose(0, 1))
    method = hta(model, "2", source_layer="1", batch_dim=1)
    same(method.attribute(ids()[:1]), torch.eye(TOKENS).double()[None])
    with pytest.raises(ValueError, match="internal_batch_size splits axis 1 of the inputs, 4 long, but the"):
        method.attribute(ids()[:1], internal_batch_size=1)


def test_batch_statistics_are_refused():
    """A batch normalisation in training mode is refused: it would also change."""
    norm = nn.BatchNorm1d(8).double()
    model = tiny(lambda h: norm(h.mT).mT, Mixed)
    model.norm = norm
    for mode in ("forward", "reverse"):
        with pytest.raises(ValueError, match="statistics of the batch"):
            hta(model, "last").attribute(data(), mode=mode)
        with pytest.raises(ValueError, match="statistics of the batch"):
            HiddenTokenAttribution(lambda x: model(x), model.last).attribute(data(), mode=mode)
    assert norm.num_batches_tracked == 0
    norm.eval()
    right(model, None)


# --- threads, processes and devices ----------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_random_numbers_of_other_threads(mode):
    """Numbers that another thread draws during an attribution are not drawn again."""
    drawn: list[Tensor] = []

    def elsewhere(*args: Any) -> None:
        thread = threading.Thread(target=lambda: drawn.append(torch.rand(3)))
        thread.start()
        thread.join()
        torch.rand(5), torch.empty(4).normal_(), torch.randperm(6)  # for the model alone

    model = tiny()
    model.second.norm.register_forward_hook(elsewhere)
    torch.manual_seed(3)
    hta(model, "second.z", source_layer="first").attribute(data(), mode=mode)
    drawn.append(torch.rand(3))
    torch.manual_seed(3)
    assert torch.equal(torch.cat(drawn), torch.rand(3 * len(drawn)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_fork_while_another_thread_attributes():
    """The child process can attribute as well, with the precision and the kernels that the user has set."""
    inside, done = threading.Event(), threading.Event()
    model = tiny()
    model.first.register_forward_hook(lambda *args: inside.set() or (done.wait(60) and None))
    method, other = hta(model, "second.z"), hta(tiny(), "second.z")
    expected, precision = other.attribute(data()), torch.get_float32_matmul_precision()
    kernels = [enabled() for enabled, _ in SWITCHES]
    assert all(kernels)
    thread = threading.Thread(target=lambda: method.attribute(data(), precision="medium"))
    thread.start()
    assert inside.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(60)
        right = torch.equal(other.attribute(data()), expected)
        right = right and torch.get_float32_matmul_precision() == precision
        right = right and [enabled() for enabled, _ in SWITCHES] == kernels
        os._exit(0 if right else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("options", ASKED.values(), ids=ASKED)
def test_default_device(options):
    """The default device does not matter: tensors are created on the model's device."""
    model, x = tiny(), data()
    expected = asked("second.z", x, model, **options)
    with torch.device("meta"):
        result = asked("second.z", x, model, **options)
    same(result, expected)
