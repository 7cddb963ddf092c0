"""Baselines compared with results on paper, with Captum's classes, and by their identities."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers as hf
from captum.attr import LayerActivation, LayerConductance, LayerGradientXActivation
from circuits import Block, Circuit
from conftest import PAIR, WordTokenizer, tiny_bert
from families import FAMILIES, tiny, tiny_with_head
from reference import jacobian
from torch import Tensor

from captum_hta import baselines, contributions, load_model
from captum_hta.baselines.logits import LogitBaseline
from captum_hta.baselines.norms import decomposed_block
from captum_hta.integrations import TransformerLensModel, TransformersModel
from captum_hta.model.activations import Activations
from captum_hta.model.sites import Site, observed

EVERY = [method for name in baselines.__all__ if name != "Baseline" for method in [getattr(baselines, name)]]


def on_paper(value: Tensor, layers: int = 1) -> Circuit:
    """Tokens A = (1, 0) and B = (0, 2); B attends to both by 3 to 1. The first component of ``x V`` is added
    to the residual twice, and the second once.
    """
    nothing = torch.zeros(1, 2, 2)
    out = torch.tensor([[[2.0, 0], [0, 1]]])
    bias = torch.tensor([[1.0, 1], [3.0, 1]]).double().log()
    blocks = [Block(nothing, nothing, value[None], out, bias=bias) for _ in range(layers)]
    embedding = torch.tensor([[1.0, 0], [0, 2]])
    return Circuit(embedding, torch.zeros(2, 2), blocks, torch.tensor([[1.0, 1], [0, 1]]))


STRETCHED = torch.tensor([[1.0, 0], [0, 3]])
"""Gives the values (1, 0) and (0, 6), which reach the residual as (2, 0) and (0, 6)."""
FLAT = torch.tensor([[1.0, 0], [1, 0]])
"""Gives the values (1, 0) and (2, 0)."""
LONG, SHORT_STEP = (1.5**2 + 3.5**2) ** 0.5, 2.5
LOST_A, LOST_B = 1 - 3.5 / LONG, 1 - 9.25 / (LONG * SHORT_STEP)


@pytest.mark.parametrize(
    ("method", "value", "layers", "expected"),
    [
        (baselines.AttentionWeights, STRETCHED, 1, [0.75, 0.25]),
        (baselines.EffectiveAttention, STRETCHED, 1, [0.75, 0.25]),
        (baselines.EffectiveAttention, FLAT, 1, [0.25, 0.5]),  # less 1.25 / 5 of the null vector (2, -1)
        (baselines.ValueNorm, STRETCHED, 1, [2, 6]),
        (baselines.ValueWeightedNorm, STRETCHED, 1, [1.5, 1.5]),
        (baselines.BlockNorm, STRETCHED, 1, [1.5, 3.5]),  # (1.5, 0) and (0, 1.5) with the residual (0, 2)
        (baselines.Alti, STRETCHED, 1, [0.3, 0.7]),
        (baselines.AttentionRollout, STRETCHED, 1, [0.375, 0.625]),
        (baselines.AttentionRollout, STRETCHED, 2, [0.375 + 0.625 * 0.375, 0.625**2]),
        (baselines.AttentionFlow, STRETCHED, 1, [0.375, 0.625]),
        (baselines.AttentionFlow, STRETCHED, 2, [0.75, 0.625]),  # to A two paths of 0.375
        (baselines.ValueZeroing, STRETCHED, 1, [LOST_A / (LOST_A + LOST_B), LOST_B / (LOST_A + LOST_B)]),
        (baselines.GradientTimesAttention, STRETCHED, 1, [0.75 * 2, 0.25 * 6]),  # of the logit of A, (1, 1)
        (baselines.IntegratedAttention, STRETCHED, 1, [0.75 * 2, 0.25 * 6]),
        (baselines.EmbeddingSaliency, STRETCHED, 1, [0.75 * 13**0.5, (1.5**2 + 1.75**2) ** 0.5]),
        (baselines.EmbeddingInputXGradient, STRETCHED, 1, [1.5, 2 * 1.75]),
        (baselines.EmbeddingIntegratedGradients, STRETCHED, 1, [1.5, 2 * 1.75]),
        (baselines.JacobianScope, STRETCHED, 1, [0.75 * 13**0.5, (1.5**2 + 1.75**2) ** 0.5]),
    ],
)
def test_on_paper(method: type, value: Tensor, layers: int, expected: list[float]) -> None:
    """The row of the second token in the last layer is as computed by hand."""
    found = method(on_paper(value, layers)).attribute("AB")[0]
    while found.dim() > 2:
        found = found[-1]
    torch.testing.assert_close(found[1], torch.tensor(expected).double(), rtol=1e-6, atol=1e-6)


def test_of_the_layer_on_paper() -> None:
    """Heads of a layer add up, here two equal ones."""
    one = on_paper(STRETCHED).blocks[0]
    both = Block(*(torch.cat([w, w]) for w in (one.query, one.key, one.value, one.out)), bias=one.bias)
    model = Circuit(torch.tensor([[1.0, 0], [0, 2]]), torch.zeros(2, 2), [both])
    found = baselines.ValueWeightedNorm(model, heads=False).attribute("AB")
    torch.testing.assert_close(found[0, 0, 1], torch.tensor([3.0, 3]).double())
    alti = baselines.Alti(model, rollout=False).attribute("AB")
    torch.testing.assert_close(alti[0, 0, 1], torch.tensor([3 / 8, 5 / 8]).double())


# --- on models -------------------------------------------------------------------------------------


@functools.cache
def decoder(adapter: str = "transformers") -> TransformersModel | TransformerLensModel:
    return load_model(tiny_with_head("GPT-2"), tokenizer=WordTokenizer(60), adapter=adapter)


@pytest.mark.parametrize("method", EVERY)
def test_axes_padding_and_adapters(method: type) -> None:
    """Results have the named axes, NaN as padding, and agree for single texts and for both adapters."""
    one = method(decoder())
    together = one.attribute(["one two three", "four"])
    sizes = {"batch": 2, "layer": 3, "head": 4, "query": 5, "key": 5}
    assert list(together.shape) == [sizes[axis] for axis in one.axes.split()]
    alone = one.attribute("four")
    torch.testing.assert_close(together[1:, ..., :3, :3], alone, rtol=1e-6, atol=1e-9, equal_nan=True)
    assert together[1, ..., 3:, :].isnan().all()
    assert together[1, ..., 3:].isnan().all()
    bridged = method(decoder("transformer_lens")).attribute(["one two three", "four"])
    torch.testing.assert_close(together, bridged, rtol=1e-6, atol=1e-9, equal_nan=True)
    assert one.name
    assert repr(one)


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_make_the_whole(name: str) -> None:
    """Patterns times values through the output projection are the projection's output; with the residual,
    through the norm of a post-LN block, they are the output of that norm.
    """
    model = TransformersModel(tiny(name), WordTokenizer(60))
    activations = Activations(model, model.batch([model.encode("one two three")]))
    for layer, place in enumerate(model.places):
        given = observed({"": Site(place.projection, call=place.call)}, activations.run)[""][0]
        parts = torch.einsum("hqk,hkd->qd", activations.pattern[layer], activations.projected[layer])
        bias = place.projection.bias
        parts = parts if bias is None else parts + bias.detach()
        torch.testing.assert_close(parts.to(given), given, rtol=1e-5, atol=1e-6)
        projection = model.output_projection(layer)
        if not projection.residual:
            with pytest.raises(ValueError, match="the heads' outputs before they are added"):
                decomposed_block(activations, layer)
        elif projection.norm is not None:
            _, whole = decomposed_block(activations, layer)
            given = observed({"": Site(place.sum_norm, call=place.call)}, activations.run)[""][0]
            torch.testing.assert_close(whole, given, rtol=1e-7, atol=1e-9)


def test_identities_of_real_weights(minilm64: TransformerLensModel) -> None:
    """Rows of rollouts sum to 1; effective attention has the same effect on values as attention, and equals
    it while tokens are few; each method has its own numbers for heads or layers.
    """
    for method in (baselines.AttentionRollout, baselines.Alti, baselines.ValueZeroing):
        values = method(minilm64).attribute([PAIR])
        torch.testing.assert_close(values.sum(-1), torch.ones_like(values[..., 0]))
        assert values.min() >= 0
    effective = baselines.EffectiveAttention(minilm64).attribute([PAIR])
    pattern = baselines.AttentionWeights(minilm64).attribute([PAIR])
    torch.testing.assert_close(effective, pattern)
    long = "The trophy did not fit in the brown suitcase because it was too big. " * 3
    activations = Activations(minilm64, minilm64.batch([minilm64.encode(long)]))
    assert activations.pattern.shape[-1] > minilm64.d_head
    effective = baselines.EffectiveAttention(minilm64).values(activations)
    assert (effective - activations.pattern).abs().max() > 1e-3
    torch.testing.assert_close(effective @ activations.projected, activations.pattern @ activations.projected)
    null = activations.pattern - effective
    torch.testing.assert_close(
        null @ activations.projected, torch.zeros_like(activations.projected), atol=1e-9, rtol=0
    )


def test_flow_of_real_weights(minilm: TransformerLensModel) -> None:
    """In the first layer flow is the capacity; later it is at least as large as rollout."""
    flow = baselines.AttentionFlow(minilm).attribute("Dogs bark.")
    rollout = baselines.AttentionRollout(minilm).attribute("Dogs bark.")
    torch.testing.assert_close(flow[:, 0], rollout[:, 0], atol=1e-6, rtol=0)
    assert (flow[:, 1:] > rollout[:, 1:] - 1e-6).all()


# --- against Captum --------------------------------------------------------------------------------


def test_attention_is_captums_activation(minilm: TransformerLensModel) -> None:
    """It equals ``LayerActivation`` on the hook point of the pattern."""
    batch = minilm.batch([minilm.encode("Dogs bark.")])
    point = minilm.hook_point("blocks.2.attn.hook_pattern")
    expected = LayerActivation(minilm.forward, point).attribute(*batch.inputs, batch.extra)
    found = baselines.AttentionWeights(minilm).attribute("Dogs bark.")
    torch.testing.assert_close(found[:, 2], expected)


def driven(layers: int = 2) -> Circuit:
    """A random circuit whose patterns are modules that determine the output, through a tanh."""
    torch.manual_seed(0)
    blocks = []
    for _ in range(layers):
        weights = [torch.randn(2, 6, 3), torch.randn(2, 6, 3), torch.randn(2, 6, 3), torch.randn(2, 3, 6)]
        blocks.append(Block(*(0.7 * weight for weight in weights), feed_forward=torch.tanh))
    return Circuit(torch.randn(4, 6), torch.randn(5, 6), blocks, torch.randn(4, 6))


def from_embedding(model: Circuit):
    """The last logit of token 1 as a function of the embedding that enters the first block."""

    def logit(x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[:2], dtype=torch.bool)
        for block in model.blocks:
            x = block(x, mask)
        return model.head(x)[:, -1, 1]

    return logit


def embedded(model: Circuit, text: str) -> Tensor:
    ids = torch.tensor([model.encode(text).ids])
    return model.embedding[ids] + model.positions[: len(text)]


def test_gradient_times_attention_is_captums() -> None:
    """It equals ``LayerGradientXActivation`` on the pattern."""
    model = driven()
    found = baselines.GradientTimesAttention(model, token=1).attribute("ABCD")
    for layer, block in enumerate(model.blocks):
        expected = LayerGradientXActivation(from_embedding(model), block.pattern).attribute(
            embedded(model, "ABCD")
        )
        torch.testing.assert_close(found[:, layer], expected)


def test_conductance_is_captums() -> None:
    """It equals ``LayerConductance`` on the pattern."""
    model = driven()
    found = baselines.AttentionConductance(model, token=1, n_steps=20).attribute("ABCD")
    for layer, block in enumerate(model.blocks):
        expected = LayerConductance(from_embedding(model), block.pattern).attribute(
            embedded(model, "ABCD"), n_steps=20
        )
        torch.testing.assert_close(found[:, layer], expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("adapter", ["transformers", "transformer_lens"])
def test_integrated_attention_is_complete(adapter: str) -> None:
    """The values of a layer add up to the logit minus the logit without its heads."""
    model = decoder(adapter)
    found = baselines.IntegratedAttention(model, token=7).attribute("one two three")[0]
    batch = model.batch([model.encode("one two three")])
    logit = model.logits(*batch.inputs, *batch.extra)[0, -1, 7]
    for layer in range(3):
        projection = model.target(layer)
        module = projection.module if isinstance(projection, Site) else projection
        if isinstance(projection, Site):
            handle = module.register_forward_pre_hook(lambda m, args: (0 * args[0], *args[1:]))
        else:
            handle = module.register_forward_hook(lambda m, args, out: 0 * out)
        without = model.logits(*batch.inputs, *batch.extra)[0, -1, 7]
        handle.remove()
        assert abs(found[layer].sum() - (logit - without)) < 1e-3 * abs(logit - without)


def test_integrated_gradients_are_complete() -> None:
    """They add up to the logit minus that of a zero embedding; only the logit's row holds numbers."""
    model = driven()
    found = baselines.EmbeddingIntegratedGradients(model, token=1, n_steps=300).attribute("ABCD")[0]
    logit = from_embedding(model)
    x = embedded(model, "ABCD")
    change = (logit(x) - logit(0 * x)).item()
    assert abs(found[-1].sum().item() - change) < 1e-3 * abs(change)
    assert found[:-1].isnan().all()


def test_logits_of_encoders(model: TransformerLensModel) -> None:
    """Masked language models have logits through their head, classifiers have classes, bare models none."""
    found = baselines.GradientTimesAttention(model, position=1, token=9).attribute("a b")
    pattern = baselines.AttentionWeights(model).attribute("a b")
    assert found.shape == pattern.shape
    assert found.abs().max() > 0  # although the bridge discards edits of this pattern
    classifier = load_model(
        tiny_bert(hf.BertForSequenceClassification), tokenizer=WordTokenizer(), adapter="transformers"
    )
    assert baselines.EmbeddingSaliency(classifier).attribute("a b")[0, -1].min() > 0
    bare = load_model(tiny_bert(hf.BertModel), tokenizer=WordTokenizer())
    with pytest.raises(ValueError, match="has no logits: load a class with a head"):
        baselines.GradientTimesAttention(bare).attribute("a b")


# --- scopes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["semantic", "temperature", "fisher"])
def test_scopes_equal_a_dense_reference(scope: str) -> None:
    """They match whole Jacobians to the final hidden state and the whole Fisher matrix."""
    model = decoder()
    plain = tiny_with_head("GPT-2")
    ids = torch.tensor([model.encode("one two").ids])
    embedded = plain.transformer.wte(ids) + plain.transformer.wpe(torch.arange(ids.shape[1]))

    def function(x: Tensor) -> Tensor:
        return plain.transformer(inputs_embeds=x - plain.transformer.wpe(torch.arange(x.shape[1])))[0]

    blocks = jacobian(function, embedded, range(ids.shape[1]))
    hidden = function(embedded).detach()[0]
    unembedding = plain.lm_head.weight.detach()
    rows = []
    for h in hidden:
        p = (unembedding @ h).softmax(-1)
        fisher = unembedding.T @ (p.diag() - torch.outer(p, p)) @ unembedding
        rows.append(
            {
                "semantic": unembedding[p.argmax()],
                "temperature": h / h.norm(),
                "fisher": torch.linalg.eigh(fisher)[1][:, -1],
            }[scope]
        )
    expected = torch.einsum("qc,qckd->qkd", torch.stack(rows), blocks).norm(dim=-1)
    found = baselines.JacobianScope(model, scope).attribute("one two")[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_scopes_of_encoders(model: TransformerLensModel) -> None:
    """The temperature scope needs no logits; the others say so."""
    assert baselines.JacobianScope(model, "temperature").attribute("a b").shape == (1, 4, 4)
    with pytest.raises(ValueError, match="is an encoder"):
        baselines.JacobianScope(model, "semantic").attribute("a b")
    with pytest.raises(ValueError, match="scope must be one of"):
        baselines.JacobianScope(model, "wide")


def test_cross_attention_and_bad_texts() -> None:
    """Weights of cross attention are returned; rollouts of it and empty lists of texts are refused."""
    model = TransformersModel(tiny("T5"), WordTokenizer(60), part="cross")
    pair = ("one two three", "four")
    found = baselines.AttentionWeights(model).attribute([pair])
    torch.testing.assert_close(found, contributions(model, [pair], source="previous_layer").attention)
    assert baselines.EffectiveAttention(model).attribute([pair]).shape == found.shape
    with pytest.raises(ValueError, match="not defined for cross attention"):
        baselines.AttentionRollout(model).attribute([pair])
    with pytest.raises(ValueError, match="there is no text"):
        baselines.AttentionWeights(decoder()).attribute([])


# --- projections that are wrapped ------------------------------------------------------------------


class Adapted(torch.nn.Module):
    """A projection with a low-rank update next to it, and no weight of its own name."""

    def __init__(self, base: torch.nn.Module, width: int) -> None:
        super().__init__()
        self.base_layer = base
        self.down, self.up = torch.randn(width, 2).double(), torch.randn(2, width).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.down @ self.up


def test_wrapped_projections() -> None:
    """Head outputs are read through the wrapper, as in the model with the update merged."""
    torch.manual_seed(0)
    wrapped, merged = tiny_bert(), tiny_bert()
    for layer in range(2):
        output = wrapped.bert.encoder.layer[layer].attention.output
        output.dense = Adapted(output.dense, 8)
        change = (output.dense.down @ output.dense.up).T
        merged.bert.encoder.layer[layer].attention.output.dense.weight.data.add_(change)
    wrapped, merged = (TransformersModel(one, WordTokenizer()) for one in (wrapped, merged))
    for method in (baselines.ValueWeightedNorm, baselines.BlockNorm, baselines.Alti):
        torch.testing.assert_close(method(wrapped).attribute("a b c"), method(merged).attribute("a b c"))
    torch.testing.assert_close(contributions(wrapped, "a b c").values, contributions(merged, "a b c").values)


def test_modes_of_a_caller() -> None:
    """Gradients are computed under ``no_grad`` and ``inference_mode``."""
    model = decoder()
    for method in (
        baselines.GradientTimesAttention,
        baselines.IntegratedAttention,
        baselines.AttentionConductance,
        baselines.EmbeddingSaliency,
    ):
        expected = method(model).attribute("one two")
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                found = method(model).attribute("one two")
            torch.testing.assert_close(found, expected, equal_nan=True)


def test_logits_that_are_none() -> None:
    """Positions, tokens and steps out of range are errors that name them."""
    model = decoder()
    for options, words in (
        ({"position": 9}, "position must be between -4 and 3, as the text has 4 tokens, got 9"),
        ({"token": 99}, "token must be between 0 and 59, .*got 99"),
        ({"token": -1}, "token must be between 0 .*got -1"),
    ):
        with pytest.raises(ValueError, match=words):
            baselines.GradientTimesAttention(model, **options).attribute("one two")
    with pytest.raises(ValueError, match=r"token must be between 0 and 59, .*got 99"):
        baselines.JacobianScope(model, token=99).attribute("one two")
    with pytest.raises(ValueError, match="n_steps must be"):
        baselines.AttentionConductance(model, n_steps=0)


# --- what must not give numbers --------------------------------------------------------------------


@functools.cache
def unsound() -> TransformersModel:
    """A decoder in which the embedding of one word is NaN."""
    plain = tiny_with_head("Llama")
    model = load_model(plain, tokenizer=WordTokenizer(60), adapter="transformers")
    with torch.no_grad():
        model.base.embed_tokens.weight[model.encode("zebra").ids[1]] = torch.nan
    return model


@pytest.mark.parametrize("method", EVERY)
def test_activations_that_are_not_finite(method: type) -> None:
    """The error names the text."""
    one = method(unsound())
    one.attribute("the cat")
    with pytest.raises(ValueError, match=r"text 1: .* not finite"):
        one.attribute(["the cat", "the zebra"])


def test_logits_that_are_not_finite() -> None:
    """They are refused, also where all attention is finite."""
    model = load_model(tiny_with_head("Llama"), tokenizer=WordTokenizer(60), adapter="transformers")
    with torch.no_grad():
        model.model.lm_head.weight[7] = torch.inf
    baselines.AttentionWeights(model).attribute("one two")
    for method in (baselines.GradientTimesAttention, baselines.EmbeddingSaliency, baselines.JacobianScope):
        with pytest.raises(ValueError, match=r"text 0: logits .* not finite"):
            method(model).attribute("one two")


@pytest.mark.parametrize("method", EVERY)
def test_active_dropout_is_refused(method: type) -> None:
    """Every method refuses it, also those that do not read attention."""
    plain = tiny_with_head("GPT-2")
    model = load_model(plain, tokenizer=WordTokenizer(60), adapter="transformers")
    model.model.train()
    with pytest.raises(ValueError, match="training mode"):
        method(model).attribute("one two")


def test_small_distances_of_value_zeroing() -> None:
    """In single precision, distances of tokens that hardly matter are not rounded to zero."""
    exact, single = tiny_bert(), tiny_bert().float()
    for plain in (exact, single):
        for layer in plain.bert.encoder.layer:
            layer.attention.self.value.weight.data *= 3e-3
    found, expected = (
        baselines.ValueZeroing(load_model(plain, WordTokenizer(), adapter="transformers")).attribute(
            "a b c d"
        )
        for plain in (single, exact)
    )
    torch.testing.assert_close(found.double(), expected, rtol=5e-2, atol=0)


def test_scopes_use_the_logits_of_the_model() -> None:
    """A bias of the unembedding changes the likeliest token; capped logits have another Fisher matrix."""
    plain = tiny_with_head("GPT-2")
    head = torch.nn.Linear(16, 60).double()
    head.weight = plain.lm_head.weight
    torch.nn.init.zeros_(head.bias)
    head.bias.data[7] = 100.0
    plain.lm_head = head
    model = load_model(plain, tokenizer=WordTokenizer(60), adapter="transformers")
    found = baselines.JacobianScope(model).attribute("one two")
    torch.testing.assert_close(found, baselines.JacobianScope(model, token=7).attribute("one two"))
    capped = load_model(tiny_with_head("Gemma 2"), tokenizer=WordTokenizer(60), adapter="transformers")
    with torch.no_grad():
        capped.model.lm_head.weight *= 100
    with pytest.raises(ValueError, match="scales or caps its logits"):
        baselines.JacobianScope(capped, "fisher").attribute("one two")


@pytest.mark.parametrize("options", [{"position": 1.0}, {"position": True}, {"token": "a"}, {"token": False}])
def test_arguments_that_are_no_ints(options: dict[str, object]) -> None:
    """The error names the argument."""
    with pytest.raises(TypeError, match=f"{next(iter(options))} must be an int"):
        baselines.GradientTimesAttention(decoder(), **options)


@pytest.mark.parametrize("method", EVERY)
def test_half_precision(method: type) -> None:
    """Values are close to exact ones, or the error names the remedy."""
    half = load_model(
        tiny_with_head("GPT-2").to(torch.bfloat16), tokenizer=WordTokenizer(60), adapter="transformers"
    )
    if method is baselines.AttentionConductance:
        with pytest.raises(ValueError, match=r"lost in the rounding of torch.bfloat16: load .* in float32"):
            method(half).attribute("one two three")
        return
    options = {"token": 7} if issubclass(method, LogitBaseline | baselines.JacobianScope) else {}
    found, exact = (method(model, **options).attribute("one two three") for model in (half, decoder()))
    assert found.dtype == torch.float32
    error = (found - exact).abs().nan_to_num().max() / exact.abs().nan_to_num().max()
    assert error < 0.1
