"""Forecasts from dimensions alone, compared with the plans of actual runs."""

from __future__ import annotations

import pytest
import torch
from conftest import WordTokenizer
from families import tiny

from captum_hta import Plan, Size, contributions, forecast
from captum_hta.integrations import TransformersModel
from captum_hta.jacobian.engine import answer
from captum_hta.jacobian.forecast import in_all
from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.jacobian.query import Query

TEXT = "one two three four five six seven"
SMALL = Size(layers=3, heads=4, width=32, inner=128)


@pytest.mark.parametrize("source", ["input", "previous_layer", 1])
@pytest.mark.parametrize(
    "options",
    [{}, {"n_probes": 3}, {"norm": "sum"}, {"norm": "spectral"}, {"target": "layer"}, {"layers": [1]}],
    ids=str,
)
def test_forecast_is_what_happens(bert, source: str | int, options: dict) -> None:
    """Mode, operations and memory are those of the plans that were followed."""
    found = contributions(bert, TEXT, source=source, **options)
    tokens = len(found.tokens[0])
    expected = forecast(bert.size, tokens, source=source, dtype=bert.dtype, **options)
    assert {plan.mode for plan in found.plans} == {expected.mode}
    (done,) = in_all(found.plans)
    assert expected.flops == pytest.approx(done.flops, rel=1e-9)
    assert expected.memory == pytest.approx(done.memory, rel=1e-9)
    assert expected.chunk == done.chunk


@pytest.mark.parametrize("n_probes", [None, 16])
def test_forecast_of_a_real_model(minilm, n_probes: int | None) -> None:
    """Feed-forward parts that are worth collapsing are counted as collapsed."""
    found = contributions(minilm, "Dogs bark.", layers=[0, 1], n_probes=n_probes)
    expected = forecast(minilm.size, len(found.tokens[0]), layers=[0, 1], n_probes=n_probes)
    (done,) = in_all(found.plans)
    assert (expected.mode, expected.chunk) == (done.mode, done.chunk)
    assert expected.flops == pytest.approx(done.flops, rel=1e-9)


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
@pytest.mark.parametrize("queries", [None, 1])
def test_forecast_of_causal_models(name: str, queries: int | None) -> None:
    """Windows, grouped heads and gates are counted."""
    model = TransformersModel(tiny(name), WordTokenizer(60))
    heads = [model.target(layer) for layer in range(model.num_layers)]
    ids = torch.arange(5, 21)[None]
    forward_pass = ForwardPass(model.forward, (ids,), (), heads, model.source(0), num_heads=model.num_heads)
    selector = None if queries is None else 3
    done = answer(forward_pass, Query(neuron_selector=selector)).plan
    expected = forecast(model.size, 16, queries=queries, dtype=model.dtype)
    assert expected.mode == done.mode
    assert done.flops <= expected.flops * (1 + 1e-9)  # segments may reach further than is forecast
    assert expected.flops == pytest.approx(done.flops, rel=0.06)


def test_mode_can_be_forced() -> None:
    """A mode can be forced; one that is not valid is an error."""
    assert forecast(SMALL, 8, mode="reverse").mode == "reverse"
    assert forecast(SMALL, 8, source="previous_layer", mode="forward").mode == "forward"
    with pytest.raises(ValueError, match="the closed form gives the previous-layer contribution"):
        forecast(SMALL, 8, mode="closed form")


def test_memory_is_bounded() -> None:
    """Long texts and wide models stay within a bound."""
    for tokens in (16, 128, 1024):
        large = forecast(Size(32, 32, 4096, 16384), tokens)
        assert large.chunk >= 1
        assert large.memory < 3 << 30


def test_plans_in_all() -> None:
    """Operations add up and memory does not; modes and numbers of probes are kept apart."""
    plans = [
        Plan("probes", 1.0, 5.0, 3, "8 a token"),
        Plan("probes", 2.0, 4.0, 7, "8 a token"),
        Plan("probes", 4.0, 4.0, 7, "16 a token"),
        Plan("closed form", 1.0, 1.0, None, "no tangents"),
    ]
    first, second, third = in_all(plans)
    assert first == Plan("probes", 3.0, 5.0, 7, "8 a token")
    assert second.flops == 4.0
    assert third.chunk is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": 0}, "tokens must be positive"),
        ({"batch": 0}, "batch must be positive"),
        ({"n_probes": -1}, "n_probes must be a positive int"),
        ({"source": "prev_layer"}, "source must be"),
        ({"source": 3}, "source 3 is no block: the model has 0 to 2"),
        ({"target": "foo"}, "target must be"),
        ({"norm": "l1"}, "norm must be one of"),
        ({"layers": [3]}, r"layers names \[3\], but the model has layers 0 to 2"),
        ({"size": Size(3, 5, 32, 128)}, "5 heads do not divide"),
    ],
    ids=str,
)
def test_nonsense_is_refused(change: dict, words: str) -> None:
    """Wrong arguments are refused as the computation refuses them."""
    with pytest.raises(ValueError, match=words):
        forecast(**({"size": SMALL, "tokens": 8} | change))


def test_a_model_is_no_size(bert) -> None:
    """The error names the model's attribute that holds its size."""
    with pytest.raises(TypeError, match=r"such as model\.size"):
        forecast(bert, 8)
