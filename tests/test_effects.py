"""Direct effects of heads on logits, and their source tokens, compared with slow computations."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import transformers as hf
from conftest import WordTokenizer, tiny_bert
from families import FAMILIES, GROUPED
from reference import hooked, jacobian, shares
from torch import Tensor, nn

from captum_hta import HeadEffects, head_effects, load_model
from captum_hta.effects import effects_plan
from captum_hta.model.sites import Site, observed

TEXT = "a b c d"
DECODERS = [name for name, family in FAMILIES.items() if family.causal]


@dataclass(frozen=True)
class Parts:
    """Where a model has what lies between its heads and its logits.

    Attributes:
        block, projection: The path of a block by its number, and in it that of the output projection.
        norm: The final norm.
        behind: In a block, the norm of the projected outputs of its heads, if there is one.
        factor: The product of its multipliers.
    """

    block: str
    projection: str
    norm: str = "norm"
    behind: str | None = None
    factor: float = 1.0


NORMS = {
    **dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma 2", "Gemma 3", "Phi-3"), "norm"),
    "GPT-2": "ln_f",
    "GPT-NeoX (Pythia)": "final_layer_norm",
    "Phi": "final_layernorm",
}
"""The final norms of families whose effects are computed directly."""
BEHIND = dict.fromkeys(("Gemma 2", "Gemma 3"), "post_attention_layernorm")


def parts_of(name: str) -> Parts:
    family = FAMILIES[name]
    return Parts(family.block, family.projection, NORMS[name], BEHIND.get(name))


EMBEDDED = {"GPT-2": "drop", "GPT-NeoX (Pythia)": "embed_in"}
"""The module that gives the input of the first block."""


def before(block: nn.Module, path: str) -> nn.Module:
    """A module that does nothing, put before another one of a block: its output is what that reads."""
    parent, _, name = path.rpartition(".")
    reads = nn.Identity()
    setattr(block.get_submodule(parent), name, nn.Sequential(reads, block.get_submodule(path)))
    return reads


def tiny_decoder(name: str, dtype: torch.dtype = torch.float64, **options: object) -> nn.Module:
    """A model of a family with its head."""
    config = FAMILIES[name].make().config
    config.update(options)
    return randomised(config, dtype)


def randomised(config: hf.PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """A random model, whose biases are not 0 and norms not 1."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def loaded(model: nn.Module, **options: object):
    return load_model(model, tokenizer=WordTokenizer(60), **options)


def frozen(norm: nn.Module, x: Tensor, added: Tensor) -> Tensor:
    """What ``added`` contributes to the output of a norm at ``x``, by the definition of the norm."""
    if isinstance(norm, nn.LayerNorm):
        scale = (x.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        return norm.weight * (added - added.mean(-1, keepdim=True)) / scale
    weight = norm.weight + 1 if "Gemma" in type(norm).__name__ else norm.weight
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return weight * added / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@torch.no_grad()
def direct_effects(parts: Parts, model: nn.Module, ids: list[int], token: int, against: int) -> Tensor:
    """``[layer, head]`` at the last token: slices of ``W_O`` times ``z``, frozen norms, the unembedding."""
    directions, z = zip(
        *(directly(parts, model, torch.tensor([ids]), layer, token, against) for layer in range(3)),
        strict=True,
    )
    return (torch.stack(directions) * torch.stack(z)).sum(-1)


@torch.no_grad()
def directly(
    parts: Parts, model: nn.Module, ids: Tensor, layer: int, token: int, against: int
) -> tuple[Tensor, Tensor]:
    """For the heads of a layer the direction of their effects, and their outputs: ``[head, d_head]`` each.

    Effects are linear in an output, so the direction is that of the effects of unit vectors.
    """
    block = model.base_model.get_submodule(parts.block.format(layer))
    projection, last = block.get_submodule(parts.projection), model.base_model.get_submodule(parts.norm)
    sites = {"x": Site(last, at_input=True), "z": Site(projection, at_input=True), "out": Site(projection)}
    seen = {name: value[0, -1] for name, value in observed(sites, lambda: model(ids)).items()}
    added = projection.weight.T if isinstance(projection, nn.Linear) else projection.weight
    if parts.behind is not None:
        added = frozen(block.get_submodule(parts.behind), seen["out"], added)
    columns = model.get_output_embeddings().weight
    found = parts.factor * frozen(last, seen["x"], added) @ (columns[token] - columns[against])
    heads = model.config.num_attention_heads
    return found.unflatten(0, (heads, -1)), seen["z"].unflatten(0, (heads, -1))


@pytest.mark.parametrize("adapter", ["transformers", "transformer_lens"])
@pytest.mark.parametrize("name", DECODERS)
def test_effects_of_every_family(name: str, adapter: str) -> None:
    """In float32 all parts add up to the logits, and each head's effect is that of a direct computation."""
    if adapter == "transformer_lens" and not FAMILIES[name].bridge:
        pytest.skip("TransformerLens does not bridge this family")
    if type(FAMILIES[name].make().config) not in hf.MODEL_FOR_CAUSAL_LM_MAPPING:
        pytest.skip("this family has no class with a language modelling head")
    plain = tiny_decoder(name, torch.float32)
    model = loaded(copy.deepcopy(plain), adapter=adapter)
    found = head_effects(model, TEXT, 5, against=7)
    ids = model.encode(TEXT).ids
    logits = plain(torch.tensor([ids])).logits[0, -1]
    total = sum(found.parts.values())
    assert found.effects.abs().max() > 1e-3
    if name in NORMS:
        expected = direct_effects(parts_of(name), plain, ids, 5, 7)
        torch.testing.assert_close(found.effects, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(total, found.logit, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.logit, (logits[5] - logits[7]).detach(), rtol=1e-2, atol=1e-5)


OTHERS = {
    "multiplied": hf.GraniteConfig(
        **GROUPED, embedding_multiplier=2.0, residual_multiplier=0.3, attention_multiplier=0.5,
        logits_scaling=3.0,
    ),
    "parallel, added in place": hf.FalconConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=4, vocab_size=60, bias=True
    ),
    "added inside attention": hf.BloomConfig(hidden_size=16, n_layer=3, n_head=4, vocab_size=60),
    "experts": hf.MixtralConfig(**GROUPED, num_local_experts=4),
    "norms behind": hf.Olmo2Config(**GROUPED),
}  # fmt: skip
"""Other ways to add up parts."""
LAYOUTS = {
    "multiplied": Parts("layers.{}", "self_attn.o_proj", factor=0.3 / 3.0),
    "parallel, added in place": Parts("h.{}", "self_attention.dense", "ln_f"),
    "added inside attention": Parts("h.{}", "self_attention.dense", "ln_f"),
    "experts": Parts("layers.{}", "self_attn.o_proj"),
    "norms behind": Parts("layers.{}", "self_attn.o_proj", behind="post_attention_layernorm"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_ways_to_add_up_parts(kind: str) -> None:
    """The same for multipliers, parallel blocks, residual sums inside attention, experts and norms behind."""
    plain = randomised(OTHERS[kind], torch.float32)
    model = loaded(copy.deepcopy(plain), adapter="transformers")
    found = head_effects(model, TEXT, 5, against=7)
    ids = model.encode(TEXT).ids
    logits = plain(torch.tensor([ids])).logits[0, -1].detach()
    torch.testing.assert_close(found.logit, logits[5] - logits[7], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(sum(found.parts.values()), found.logit, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        found.effects, direct_effects(LAYOUTS[kind], plain, ids, 5, 7), rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Gemma 2"])
def test_sources_equal_plain_autograd(name: str) -> None:
    """Contributions and signed parts are those of whole Jacobians, times the gradient of each effect."""
    model = loaded(tiny_decoder(name))
    found = head_effects(model, TEXT, 5, against=7)
    plain, family = tiny_decoder(name), FAMILIES[name]
    ids = torch.tensor([model.encode(TEXT).ids])
    directions = [directly(parts_of(name), plain, ids, layer, 5, 7)[0] for layer in range(3)]
    source = plain.base_model.get_submodule(EMBEDDED.get(name, "embed_tokens"))
    for layer, direction in enumerate(directions):
        block = plain.base_model.get_submodule(family.block.format(layer))
        target = before(block, family.projection)
        run, x = hooked(lambda: plain(ids), source, target)
        blocks = jacobian(run, x, [x.shape[1] - 1])[0].unflatten(0, (4, -1))  # head, d_head, key, width
        along = torch.einsum("hd,hdkw->hkw", direction, blocks)
        close = {"rtol": 1e-4, "atol": 1e-6}  # norms in float32
        torch.testing.assert_close(
            found.contributions.values[0, layer, :, 0], shares(along.norm(dim=-1)), **close
        )
        torch.testing.assert_close(found.signed[layer], (along * x[0]).sum(-1).detach(), **close)


@pytest.fixture(scope="module")
def gpt2():
    """A tiny GPT-2 with its head."""
    return loaded(tiny_decoder("GPT-2"))


def test_queries(gpt2) -> None:
    """Several queries have an axis, and the numbers of each alone."""
    both = head_effects(gpt2, TEXT, 5, queries=[-1, 2])
    assert both.queries == [5, 2]
    assert both.effects.shape == (3, 4, 2)
    assert both.signed.shape == (3, 4, 2, 6)
    assert both.contributions.values.shape == (1, 3, 4, 2, 6)
    for index, query in enumerate(both.queries):
        one = head_effects(gpt2, TEXT, 5, queries=query)
        torch.testing.assert_close(both.effects[..., index], one.effects)
        torch.testing.assert_close(both.signed[:, :, index], one.signed)
        torch.testing.assert_close(both.mlps[:, index], one.mlps)
        for name in ("values", "attention"):
            expected, found = (getattr(result.contributions, name) for result in (one, both))
            torch.testing.assert_close(found[..., [index], :], expected)
    assert head_effects(gpt2, TEXT, 5, queries=slice(None)).queries == list(range(6))


def test_a_difference_is_that_of_two_effects(gpt2) -> None:
    """Effects and signed parts are linear in the logit; contributions, which are norms, are not."""
    one, other = (head_effects(gpt2, TEXT, token) for token in (5, 7))
    both = head_effects(gpt2, TEXT, 5, against=7)
    for name in ("effects", "signed", "mlps", "embedding", "biases", "logit"):
        torch.testing.assert_close(getattr(both, name), getattr(one, name) - getattr(other, name))


def test_attention_is_the_models(gpt2) -> None:
    """The rows of the queries."""
    found = head_effects(gpt2, TEXT, 5).contributions
    patterns = gpt2.attention(gpt2.batch([gpt2.encode(TEXT)]))
    torch.testing.assert_close(found.attention[0, 1], patterns[1].pattern[0, :, -1:])
    assert found.tokens == [[gpt2.encode(TEXT).tokens[-1]]]
    assert found.keys == [gpt2.encode(TEXT).tokens]


def test_verbs(gpt2) -> None:
    """The order of heads, the table of all numbers, and the line that shows the result."""
    found = head_effects(gpt2, TEXT, 5, against=7)
    top = found.top(3)
    assert len(top) == 3
    assert top["effect"].abs().is_monotonic_decreasing
    assert top["effect"].abs().iloc[0] == found.effects.abs().max()
    frame = found.to_frame()
    assert len(frame) == 3 * 4 * 6
    row = frame[(frame["name"] == "L2H1") & (frame["key"] == 4)].iloc[0]
    assert row["effect"] == found.effects[2, 1]
    assert row["signed"] == found.signed[2, 1, 4]
    assert row["contribution"] == found.contributions.values[0, 2, 1, 0, 4]
    assert row["attention"] == found.contributions.attention[0, 2, 1, 0, 4]
    assert row["token"] == found.keys[4]
    assert repr(found).startswith("HeadEffects('t5' against 't7', ")
    several = head_effects(gpt2, TEXT, 5, queries=[1, 2])
    assert set(several.top(40)["query"]) == {1, 2}


def test_a_cap_is_reported() -> None:
    """Effects add up to the logit before the cap; one that does nothing is none."""
    capped = head_effects(loaded(tiny_decoder("Gemma 2", final_logit_softcapping=0.1)), TEXT, 5)
    plain = head_effects(loaded(tiny_decoder("Gemma 2", final_logit_softcapping=None)), TEXT, 5)
    assert capped.is_capped
    assert not plain.is_capped
    torch.testing.assert_close(capped.effects, plain.effects)
    torch.testing.assert_close(capped.logit, plain.logit)


def test_half_precision() -> None:
    """Effects are near those of float64."""
    exact = head_effects(loaded(tiny_decoder("Llama")), TEXT, 5, against=7)
    found = head_effects(loaded(tiny_decoder("Llama").bfloat16()), TEXT, 5, against=7)
    assert found.effects.dtype == torch.float32
    assert (found.effects - exact.effects).abs().max() < 0.05 * exact.effects.abs().max()


def test_the_plan_counts_a_pass_for_each_layer(gpt2) -> None:
    """Operations grow with the queries; all heads of a layer are carried at once."""
    one, two = (effects_plan(gpt2, 6, queries) for queries in (1, 2))
    assert one.mode == "reverse"
    assert one.chunk == gpt2.num_heads
    assert two.flops == 2 * one.flops
    assert head_effects(gpt2, TEXT, 5).plan == one


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"token": 99}, ValueError, "there is no token 99"),
        ({"token": "two words"}, ValueError, r"is 4 tokens, but one is needed \('t1', .*\): pass one token"),
        ({"token": 5.0}, TypeError, "must be an id or a text"),
        ({"token": 5, "queries": 6}, ValueError, r"queries names \[6\], but the target has positions 0 to 5"),
        ({"token": 5, "queries": "last"}, TypeError, "queries names query positions"),
        ({"token": 5, "text": 3}, TypeError, "must be a string"),
    ],
)
def test_errors(arguments: dict[str, object], error: type[Exception], message: str, gpt2) -> None:
    """Tokens and queries that do not exist are named."""
    with pytest.raises(error, match=message):
        head_effects(gpt2, **({"text": TEXT} | arguments))


def test_models_without_direct_effects() -> None:
    """Models without a head and encoders are refused, with a remedy."""
    with pytest.raises(
        ValueError, match=r"has no logits: load a class with a head, such as a \.\.\.ForCausal"
    ):
        head_effects(loaded(tiny_decoder("GPT-2").transformer), TEXT, 5)
    with pytest.raises(ValueError, match=r"is an encoder.*use a decoder"):
        head_effects(load_model(tiny_bert(), tokenizer=WordTokenizer()), TEXT, 5)


def test_blocks_that_are_no_sum_are_refused() -> None:
    """A block that normalises its output, and a change behind the last block."""
    plain = tiny_decoder("GPT-2")
    model = loaded(plain)
    block = model.base.h[1]
    handle = block.register_forward_hook(lambda module, args, out: nn.functional.layer_norm(out, (16,)))
    with pytest.raises(ValueError, match=r"block 1 of .* does not add its attention and one feed-forward"):
        head_effects(model, TEXT, 5)
    handle.remove()
    model.model.lm_head.register_forward_hook(lambda module, args, out: out + torch.arange(60))
    with pytest.raises(ValueError, match=r"add up to .* but the logit is"):
        head_effects(model, TEXT, 5)


def test_the_result_is_public() -> None:
    """Its class has a name to check against."""
    assert HeadEffects.__module__ == "captum_hta.effects"
