"""Contributions along directions in target space, compared with a dense reference."""

from __future__ import annotations

import pytest
import torch
from conftest import WordTokenizer, tiny_bert
from families import tiny_with_head
from reference import hooked, jacobian, shares
from torch import Tensor, nn

from captum_hta import HiddenTokenAttribution, contributions, load_model, logit_direction
from captum_hta.integrations import TransformerLensModel

TOKENS, HEADS, D_HEAD = 5, 2, 4
WIDTH = HEADS * D_HEAD


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True) for _ in range(2)]
    return nn.Sequential(*layers).double().eval()


def inputs(batch: int = 2) -> Tensor:
    return torch.randn(batch, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def dense(model: nn.Module, x: Tensor, direction: Tensor, scaled: bool = False) -> Tensor:
    """``[head, query, key]`` of one example by whole Jacobians, for ``[head, query, d_head]``."""

    def function(value: Tensor) -> Tensor:
        return model[1].linear1(model[1].norm1(model[0](value)))[..., :WIDTH]

    blocks = jacobian(function, x[None], range(TOKENS)).unflatten(1, (HEADS, D_HEAD))
    along = torch.einsum("hqc,qhckd->hqkd", direction, blocks)
    return shares((along * x if scaled else along).norm(dim=-1))


class Head(nn.Module):
    """The function above as a model with a module for its target."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.target = encoder(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        second = self.inner[1]
        return self.target(second.linear1(second.norm1(self.inner[0](x)))[..., :WIDTH])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", [(D_HEAD,), (HEADS, D_HEAD), (2, HEADS, TOKENS, D_HEAD)])
def test_every_shape_equals_the_dense_reference(shape: tuple[int, ...], scaled: bool) -> None:
    """One vector for all heads, one for each head, or one for every example, head and query."""
    model, x = Head(), inputs()
    direction = torch.randn(shape, generator=torch.Generator().manual_seed(2)).double()
    hta = HiddenTokenAttribution(model, model.target, num_heads=HEADS, multiply_by_inputs=scaled)
    found = hta.attribute(x, direction=direction)
    whole = direction[None, :, None] if direction.dim() == 2 else direction
    whole = whole.expand(2, HEADS, TOKENS, D_HEAD)
    for row in range(2):
        torch.testing.assert_close(found[row], dense(model.inner, x[row], whole[row], scaled))


def test_selected_queries_and_split_batches() -> None:
    """Some queries, and parts of the batch, have the same numbers."""
    model, x = Head(), inputs()
    direction = torch.randn(2, HEADS, TOKENS, D_HEAD).double()
    hta = HiddenTokenAttribution(model, model.target, num_heads=HEADS)
    whole = hta.attribute(x, direction=direction)
    some = hta.attribute(x, neuron_selector=[3, 1], direction=direction[:, :, [3, 1]])
    torch.testing.assert_close(some, whole[:, :, [3, 1]])
    torch.testing.assert_close(hta.attribute(x, direction=direction, internal_batch_size=1), whole)


def test_without_a_head_axis_and_for_several_layers() -> None:
    """A vector of the whole width, and a list of vectors for a list of layers."""
    model, x = Head(), inputs()
    one, other = torch.randn(WIDTH).double(), torch.randn(2, TOKENS, 16).double()
    second = model.inner[1]
    hta = HiddenTokenAttribution(model, [model.target, second.linear1])
    values = hta.attribute(x, direction=[one, other])
    alone = HiddenTokenAttribution(model, model.target).attribute(x, direction=one)
    assert alone.shape == (2, TOKENS, TOKENS)
    torch.testing.assert_close(values[0], alone)
    torch.testing.assert_close(
        values[1], HiddenTokenAttribution(model, second.linear1).attribute(x, direction=other)
    )


def test_all_unit_vectors_make_the_whole(model: TransformerLensModel) -> None:
    """Energies of an orthonormal basis add up to those of the Frobenius norm."""
    run, x = hooked(
        lambda: model.forward(*model.batch([model.encode("a b")]).inputs), model.source(0), model.target(1)
    )
    blocks = jacobian(run, x, range(x.shape[1])).unflatten(1, (2, 4)).permute(1, 0, 3, 2, 4)
    for component in range(4):
        found = contributions(model, "a b", direction=torch.eye(4)[component].double())
        torch.testing.assert_close(found.values[0, 1], shares(blocks[..., component, :].norm(dim=-1)))


def test_layers_of_contributions(model: TransformerLensModel) -> None:
    """Layers have their own directions; for hidden embeddings these are as wide as the model."""
    direction = torch.randn(2, 2, 4).double()
    both = contributions(model, ["a b c", "d"], direction=direction)
    assert {plan.mode for plan in both.plans} == {"reverse"}
    last = contributions(model, ["a b c", "d"], layers=[-1], direction=direction)
    torch.testing.assert_close(last.values[:, 0], both.values[:, 1], equal_nan=True)
    one = contributions(model, ["a b c", "d"], layers=[1], direction=direction[1])
    torch.testing.assert_close(one.values[:, 0], both.values[:, 1], equal_nan=True)
    hidden = contributions(model, "a b c", target="layer", direction=torch.randn(2, 8).double())
    assert hidden.values.shape == (1, 2, 5, 5)
    local = contributions(model, "a b c", source="previous_layer", direction=direction)
    torch.testing.assert_close(local.values.sum(-1), torch.ones(1, 2, 2, 5).double())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": torch.zeros(3)}, r"takes \[2, 2, 4\] or \[2, 4\] or \[4\]|takes"),
        ({"direction": torch.full((4,), torch.nan)}, "infinite numbers or NaN"),
        ({"direction": torch.ones(4), "n_probes": 4}, "leave out n_probes"),
        ({"direction": torch.ones(4), "norm": "spectral"}, "leave out norm"),
        ({"direction": torch.ones(4), "mode": "forward"}, "leave out mode"),
    ],
)
def test_errors(options: dict[str, object], message: str, model: TransformerLensModel) -> None:
    """Directions that do not fit, and arguments that do not go with them, are refused."""
    with pytest.raises(ValueError, match=message):
        contributions(model, "a b", **options)


def test_wrong_types() -> None:
    """A direction is a tensor of real numbers; a list has one for each target."""
    model, x = Head(), inputs()
    hta = HiddenTokenAttribution(model, model.target, num_heads=HEADS)
    with pytest.raises(TypeError, match="floating-point"):
        hta.attribute(x, direction=torch.ones(D_HEAD, dtype=torch.long))
    with pytest.raises(ValueError, match="one for each"):
        hta.attribute(x, direction=[torch.ones(D_HEAD)] * 2)
    with pytest.raises(ValueError, match=r"\[3, 4\], but this target takes"):
        hta.attribute(x, direction=torch.ones(3, D_HEAD))


# --- logit directions ------------------------------------------------------------------------------

FINAL_NORMS = {"GPT-2": "ln_f", "GPT-NeoX (Pythia)": "final_layer_norm", "Phi": "final_layernorm"}


@pytest.mark.parametrize("adapter", ["transformers", "transformer_lens"])
@pytest.mark.parametrize("name", ["GPT-2", "GPT-NeoX (Pythia)", "Llama", "Qwen3", "Phi"])
def test_logit_direction(name: str, adapter: str) -> None:
    """It is the gradient of a logit difference with respect to what a head adds to the last hidden embedding,
    through the model's own final norm with its scale frozen.
    """
    model = load_model(tiny_with_head(name), tokenizer=WordTokenizer(60), adapter=adapter)
    found = logit_direction(model, 5, against=7)
    plain = tiny_with_head(name)
    columns = plain.get_output_embeddings().weight.double()
    norm = plain.base_model.get_submodule(FINAL_NORMS.get(name, "norm"))
    weight, centred = norm.weight.double(), isinstance(norm, nn.LayerNorm)
    for layer in range(model.num_layers):
        mixing = model.output_projection(layer).weight.double()
        z = torch.randn(model.num_heads, model.d_head).double().requires_grad_()
        added = torch.einsum("hc,hcd->d", z, mixing)
        scaled = (added - added.mean() if centred else added) * weight  # with its scale frozen at 1
        (expected,) = torch.autograd.grad((columns[5] - columns[7]) @ scaled, z)
        torch.testing.assert_close(found[layer].double(), expected, rtol=1e-5, atol=1e-9)


def test_logit_direction_errors() -> None:
    """Missing unembeddings, unknown tokens, texts of several tokens and encoders are refused."""
    gpt = tiny_with_head("GPT-2")
    model = load_model(gpt, tokenizer=WordTokenizer(60))
    with pytest.raises(ValueError, match="there is no token 99"):
        logit_direction(model, 99)
    with pytest.raises(ValueError, match="is 4 tokens, but one is needed"):
        logit_direction(model, "two words")  # with the special tokens of this tokenizer
    with pytest.raises(ValueError, match="has no logits"):
        logit_direction(load_model(gpt.transformer, tokenizer=WordTokenizer(60)), 5)
    with pytest.raises(ValueError, match="is an encoder"):
        logit_direction(load_model(tiny_bert(), tokenizer=WordTokenizer()), 5)
    with pytest.raises(ValueError, match="normalises or scales the outputs of its heads"):
        logit_direction(load_model(tiny_with_head("Gemma 2"), tokenizer=WordTokenizer(60)), 5)


@pytest.mark.parametrize("adapter", ["transformers", "transformer_lens"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_logit_direction_in_half_precision(name: str, dtype: torch.dtype, adapter: str) -> None:
    """Every head's direction equals that of single-precision weights up to rounding."""
    wide = load_model(tiny_with_head(name), tokenizer=WordTokenizer(60), adapter=adapter)
    half = load_model(tiny_with_head(name).to(dtype), tokenizer=WordTokenizer(60), adapter=adapter)
    expected, found = (logit_direction(model, 5, against=7).double() for model in (wide, half))
    assert torch.cosine_similarity(found, expected, dim=-1).min() > 0.999


def test_tokens_are_ids_or_texts() -> None:
    """Anything else is a TypeError."""
    model = load_model(tiny_with_head("GPT-2"), tokenizer=WordTokenizer(60))
    for token in (True, 5.0):
        with pytest.raises(TypeError, match="must be an id or a text"):
            logit_direction(model, token)
