"""Bridges in the compatibility mode of TransformerLens 4, which may fold, centre and factor the weights."""

from __future__ import annotations

import pytest
import torch
from conftest import WordTokenizer
from families import tiny_with_head
from reference import hooked, jacobian, norms, shares
from torch import Tensor
from torch.nn import Module

from captum_hta import contributions, load_model
from captum_hta.integrations import TransformerLensModel

TEXT, OTHER = "one two three four", "five six"
STEPS = (
    "fold_ln",
    "center_writing_weights",
    "center_unembed",
    "fold_value_biases",
    "refactor_factored_attn_matrices",
)
FAMILIES = ("GPT-2", "Llama", "BERT")
FLOAT32 = 1e-6
"""The weights go through float32 on their way, so that contributions move by up to 1e-7."""


def plain(name: str) -> Module:
    """A model with a head, whose biases are not zero and whose norms are not one."""
    model = tiny_with_head(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def bridged(name: str) -> TransformerLensModel:
    return load_model(plain(name), tokenizer=WordTokenizer(60), adapter="transformer_lens")


def compatible(name: str, **options: bool) -> TransformerLensModel:
    """The same bridge in compatibility mode."""
    model = bridged(name)
    model.bridge.enable_compatibility_mode(disable_warnings=True, **options)
    return load_model(model.bridge, tokenizer=WordTokenizer(60))


def one_step(name: str) -> dict[str, bool]:
    """Options by which that step alone is taken."""
    return {step: step == name for step in STEPS}


def off(found: TransformerLensModel, expected: TransformerLensModel, source: str, target: str) -> float:
    """The largest difference of contributions, for two texts that are padded together."""
    values = [
        contributions(model, [TEXT, OTHER], source=source, target=target).values
        for model in (found, expected)
    ]
    assert torch.equal(values[0].isnan(), values[1].isnan())
    return (values[0] - values[1]).nan_to_num(0).abs().max().item()


@pytest.mark.parametrize("target", ["head", "layer"])
@pytest.mark.parametrize("source", ["input", "previous_layer"])
@pytest.mark.parametrize("name", FAMILIES)
def test_without_processing(name: str, source: str, target: str) -> None:
    """Names of hook points are all that changes."""
    assert off(compatible(name, no_processing=True), bridged(name), source, target) < 1e-12


@pytest.mark.parametrize("source", ["input", "previous_layer"])
@pytest.mark.parametrize("name", FAMILIES)
def test_all_steps_that_are_taken_by_default(name: str, source: str) -> None:
    """The contributions to heads are the same."""
    assert off(compatible(name), bridged(name), source, "head") < FLOAT32


@pytest.mark.parametrize("target", ["head", "layer"])
@pytest.mark.parametrize("source", ["input", "previous_layer"])
@pytest.mark.parametrize("step", ["fold_ln", "center_unembed", "fold_value_biases"])
@pytest.mark.parametrize("name", FAMILIES)
def test_steps_that_change_nothing(name: str, step: str, source: str, target: str) -> None:
    """Neither a norm's weights in the projections nor constants elsewhere are part of a derivative."""
    assert off(compatible(name, **one_step(step)), bridged(name), source, target) < FLOAT32


@pytest.mark.parametrize("step", ["none", "all"])
def test_closed_form_of_an_encoder(step: str) -> None:
    """The closed form of a bridged BERT holds with processed weights too."""
    model = compatible("BERT", no_processing=step == "none")
    assert {plan.mode for plan in contributions(model, TEXT, source="previous_layer").plans} == {
        "closed form"
    }


def dense(model: TransformerLensModel, source: str, kind: str) -> Tensor:
    """The Jacobian ``[query, component, key, width]`` of layer 1 by autograd."""
    entry = 0 if source == "input" else 1
    encoding = model.encode(TEXT)
    ids = torch.tensor([encoding.ids])
    run, x = hooked(lambda: model.forward(ids), model.source(entry), model.target(1, kind))
    return jacobian(lambda value: run(value).flatten(2), x, range(len(encoding)))


@pytest.mark.parametrize("source", ["input", "previous_layer"])
def test_centred_writing(source: str) -> None:
    r"""What blocks write loses its mean: :math:`I + P (J - I)` in place of :math:`J`, with
    :math:`P = 1 - 1 1^\top / D`, so contributions to hidden embeddings change, those to heads do not.
    """
    before, after = bridged("GPT-2"), compatible("GPT-2", **one_step("center_writing_weights"))
    assert off(after, before, source, "head") < FLOAT32
    blocks = dense(before, source, "layer")
    tokens, width = blocks.shape[:2]
    identity = torch.eye(tokens * width, dtype=blocks.dtype).reshape(blocks.shape)
    written = blocks - identity
    expected = shares(norms(identity + written - written.mean(1, keepdim=True), 1, "frobenius"))[0]
    found = contributions(after, TEXT, source=source, target="layer", layers=1).values[0, 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=FLOAT32)
    assert (found - shares(norms(blocks, 1, "frobenius"))[0]).abs().max() > 1e-4


@pytest.mark.parametrize("source", ["input", "previous_layer"])
def test_refactored_heads(source: str) -> None:
    """A head's output is then measured as it is written to the hidden embedding, by an orthonormal output
    projection, so contributions to heads are those to what each head writes.
    """
    model = plain("GPT-2")
    before, after = bridged("GPT-2"), compatible("GPT-2", **one_step("refactor_factored_attn_matrices"))
    assert off(after, before, source, "layer") < FLOAT32
    blocks = dense(before, source, "head").unflatten(1, (4, 4))
    weight = model.base_model.h[1].attn.c_proj.weight.detach().unflatten(0, (4, 4))
    written = torch.einsum("qhcki,hcm->qhmki", blocks, weight).flatten(1, 2)
    found = contributions(after, TEXT, source=source, layers=1).values[0, 0]
    torch.testing.assert_close(found, shares(norms(written, 4, "frobenius")), rtol=0, atol=FLOAT32)
    assert (found - shares(norms(blocks.flatten(1, 2), 4, "frobenius"))).abs().max() > 1e-3
