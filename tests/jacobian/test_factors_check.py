"""The factors of the closed form are checked on every batch, not only when a model is loaded."""

from __future__ import annotations

import pytest
import torch
from conftest import WordTokenizer
from families import FAMILIES, tiny
from torch.nn import Module
from transformers.models.llama import modeling_llama

from captum_hta import contributions
from captum_hta.integrations import TransformersModel
from captum_hta.jacobian.factors_check import checked_factors, pattern_error

LONG = "one two three four five six seven eight nine ten eleven twelve"


def own_eager(module: Module, query, key, value, attention_mask, scaling, **options):
    """Attention whose scores grow with the length of the text, as in models for long texts."""
    if key.shape[2] > 8:
        scaling = 2 * scaling
    return modeling_llama.plain_eager(module, query, key, value, attention_mask, scaling, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_patterns_are_the_softmax_of_scores(name: str) -> None:
    """For every family that has the closed form."""
    model = TransformersModel(tiny(name), WordTokenizer(60))
    texts = [model.encode(text) for text in ("one two three four five", "six")]
    for one in model.attention(model.batch(texts)):
        assert one.factors is None or pattern_error(one.factors) < 1e-6


def test_attention_that_depends_on_the_length(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """The closed form holds for short texts, and the general modes are taken for long ones."""
    monkeypatch.setattr(modeling_llama, "plain_eager", modeling_llama.eager_attention_forward, raising=False)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", own_eager)
    plain = tiny("Llama")
    plain.set_attn_implementation("eager")
    model = TransformersModel(plain, WordTokenizer(60))
    results = [contributions(model, text, source="previous_layer") for text in ("one two three", LONG)]
    assert [result.plans[0].mode == "closed form" for result in results] == [True, False]
    assert "does not hold for these texts in block 0" in caplog.text
    for result, text in zip(results, ("one two three", LONG), strict=True):
        exact = contributions(model, text, source="previous_layer", mode="reverse")
        assert torch.allclose(result.values, exact.values, atol=1e-6)
    with pytest.raises(ValueError, match="the closed form gives"):
        contributions(model, LONG, source="previous_layer", mode="closed form")


def test_layers_without_factors_stay_as_they_are() -> None:
    """There is nothing to check in them."""
    model = TransformersModel(tiny("DeBERTa"), WordTokenizer(60))
    attention = model.attention(model.batch([model.encode("one two")]))
    assert checked_factors(attention) == attention
