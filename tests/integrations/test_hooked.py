"""HookedTransformer and HookedEncoder of TransformerLens 2 and 3, against plain autograd."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from conftest import WordTokenizer
from reference import hooked, jacobian, norms, shares
from torch import Tensor
from torch.nn import Module

from captum_hta import contributions, load_model, logit_direction
from captum_hta.baselines.norms import decomposed_block
from captum_hta.integrations import HookedModel
from captum_hta.model.activations import Activations
from captum_hta.model.sites import observed

try:
    from transformer_lens import (
        HookedEncoder,
        HookedEncoderDecoder,
        HookedTransformer,
        HookedTransformerConfig,
    )
except ImportError:
    pytest.skip("TransformerLens 4 has no Hooked classes; HTA_LEGACY=1 has others", allow_module_level=True)

TEXT, OTHER = "one two three four", "five six"


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        options: Of its configuration.
        encoder: Whether it is a HookedEncoder.
        closed_form: Whether the closed form of the previous layer is expected to hold.
    """

    options: dict[str, object] = field(default_factory=dict)
    encoder: bool = False
    closed_form: bool = True


ROTARY = {"positional_embedding_type": "rotary", "rotary_dim": 4}
KINDS = {
    "LayerNorm": Kind(),
    "folded LayerNorm": Kind({"normalization_type": "LNPre"}),
    "no norm": Kind({"normalization_type": None}),
    "Llama": Kind(ROTARY | {"normalization_type": "RMS", "n_key_value_heads": 2, "gated_mlp": True}),
    "folded RMSNorm": Kind(ROTARY | {"normalization_type": "RMSPre", "rotary_dim": 2}),
    "parallel, adjacent pairs": Kind(ROTARY | {"parallel_attn_mlp": True, "rotary_adjacent_pairs": True}),
    "ALiBi": Kind({"positional_embedding_type": "alibi"}),
    "shortformer": Kind({"positional_embedding_type": "shortformer"}),
    "local": Kind({"use_local_attn": True, "attn_types": ["global", "local", "local"], "window_size": 3}),
    "scaled by layer": Kind({"scale_attn_by_inverse_layer_idx": True}),
    "attention only": Kind({"attn_only": True, "act_fn": None}),
    "split inputs": Kind({"use_split_qkv_input": True, "use_attn_result": True}),
    "capped scores": Kind({"attn_scores_soft_cap": 1.0}, closed_form=False),
    "normalised queries": Kind({"use_qk_norm": True}, closed_form=False),
    "encoder": Kind({"attention_dir": "bidirectional"}, encoder=True),
}


def tiny(name: str, dtype: torch.dtype = torch.float64) -> Module:
    """A random model of 3 layers with 4 heads of 4, and 40 positions."""
    kind = KINDS[name]
    options = {
        "n_layers": 3, "d_model": 16, "n_ctx": 40, "d_head": 4, "n_heads": 4, "d_mlp": 32, "d_vocab": 60,
        "act_fn": "gelu", "dtype": dtype, "device": "cpu", "seed": 0,
    }  # fmt: skip
    config = HookedTransformerConfig(**(options | kind.options))
    model = (HookedEncoder if kind.encoder else HookedTransformer)(config)
    torch.manual_seed(0)
    with torch.no_grad():  # a HookedEncoder leaves its weights as the memory was
        for key, parameter in model.named_parameters():
            norm = "ln" in key and key.endswith(".w")
            values = torch.randn(parameter.shape, dtype=torch.float64)
            parameter.copy_(0.3 * values + (1 if norm else 0))
    return model.eval()


def words(side: str = "right", pad: int = 0) -> WordTokenizer:
    tokenizer = WordTokenizer(60)
    tokenizer.padding_side, tokenizer.pad_token_id = side, pad
    return tokenizer


@functools.cache
def adapter(name: str) -> HookedModel:
    return load_model(tiny(name), tokenizer=words())


def dense(name: str, source: str, layer: int, kind: str, plain: Module | None = None) -> Tensor:
    """Contributions ``[head, query, key]`` of one text by autograd, one component at a time."""
    plain = tiny(name) if plain is None else plain
    encoding = adapter(name).encode(TEXT)
    ids = torch.tensor([encoding.ids])
    is_encoder = "token_type_ids" in inspect.signature(plain.forward).parameters
    options = {"token_type_ids": torch.tensor([encoding.segments])} if is_encoder else {}
    last = "hook_normalized_resid_post" if KINDS[name].encoder else "hook_resid_post"
    run, x = hooked(
        lambda: plain(ids, return_type=None, **options),
        plain.hook_dict[f"blocks.{0 if source == 'input' else layer}.hook_resid_pre"],
        plain.hook_dict[f"blocks.{layer}.{'attn.hook_z' if kind == 'head' else last}"],
    )
    blocks = jacobian(lambda value: run(value).flatten(2), x, range(len(encoding)))
    return shares(norms(blocks, 4 if kind == "head" else 1, "frobenius"))


@pytest.mark.parametrize("kind", ["head", "layer"])
@pytest.mark.parametrize("source", ["input", "previous_layer"])
@pytest.mark.parametrize("name", KINDS)
def test_contributions_equal_autograd(name: str, source: str, kind: str) -> None:
    """Every head and query of the first and last layer; rows sum to 1; decoders look back only."""
    result = contributions(adapter(name), TEXT, source=source, target=kind)
    found = result.values[0]
    assert "reverse" not in {plan.mode for plan in result.plans}
    for layer in (0, 2):
        expected = dense(name, source, layer, kind)
        expected = expected if kind == "head" else expected[0]
        torch.testing.assert_close(found[layer], expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.sum(-1), torch.ones_like(found.sum(-1)))
    if not KINDS[name].encoder:
        assert not found.triu(1).any()


@pytest.mark.parametrize("name", KINDS)
def test_closed_form(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It holds where it should, and models without it are loaded without a warning, and left as they were."""
    with caplog.at_level(logging.WARNING, logger="captum_hta"):
        model = load_model(tiny(name), tokenizer=words())
    result = contributions(model, TEXT, source="previous_layer")
    assert ({plan.mode for plan in result.plans} == {"closed form"}) == KINDS[name].closed_form
    assert model.size.closed_form == KINDS[name].closed_form
    assert model.size.causal != KINDS[name].encoder
    assert not caplog.records
    assert not any("rotate_every_two" in vars(module) for module in model.lens.modules())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("source", ["input", "previous_layer"])
@pytest.mark.parametrize("name", ["LayerNorm", "Llama", "ALiBi", "shortformer", "local", "encoder"])
def test_batches_equal_single_texts(name: str, source: str, pad: int, side: str) -> None:
    """Padding changes nothing, on whichever side the tokenizer pads, even if texts start with its token."""
    plain = tiny(name)
    plain.tokenizer = words(side, pad)
    model = load_model(plain)
    together = contributions(model, [TEXT, OTHER], source=source)
    for index, text in enumerate([TEXT, OTHER]):
        alone = contributions(adapter(name), text, source=source)
        torch.testing.assert_close(together.example(index).values, alone.values, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(together.example(index).attention, alone.attention, rtol=1e-9, atol=1e-12)


def test_pairs_of_an_encoder() -> None:
    """Segments reach the model."""
    pair, joined = (contributions(adapter("encoder"), [text]) for text in (("one", "two"), "one two"))
    assert pair.values.shape[-1] == 5
    assert joined.values.shape[-1] == 4
    model, encoding = adapter("encoder"), adapter("encoder").encode(("one", "two"))
    patterns = [
        model.attention(model.batch([changed]))[0].pattern
        for changed in (encoding, type(encoding)(encoding.ids, [0] * 5, encoding.tokens))
    ]
    assert (patterns[0] - patterns[1]).abs().max() > 1e-3


@pytest.mark.parametrize("source", ["input", "previous_layer"])
@pytest.mark.parametrize(
    "point", ["blocks.1.attn.hook_q", "blocks.1.attn.hook_z", "blocks.0.hook_resid_post"]
)
@pytest.mark.parametrize("name", ["LayerNorm", "Llama", "encoder"])
def test_active_hooks_act(name: str, point: str, source: str) -> None:
    """The contributions of a model with a hook are those of the changed model."""
    plain = tiny(name)
    model = load_model(plain, tokenizer=words())
    with plain.hooks(fwd_hooks=[(point, lambda value, hook: torch.tanh(2 * value))]):
        found = contributions(model, TEXT, source=source, layers=1).values[0, 0]
        expected = dense(name, source, 1, "head", plain)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("source", ["input", "previous_layer"])
@pytest.mark.parametrize("name", ["LayerNorm", "Llama"])
def test_dtype(name: str, source: str, dtype: torch.dtype, tolerance: float) -> None:
    """Narrow weights give nearly the same."""
    found = contributions(load_model(tiny(name, dtype), tokenizer=words()), TEXT, source=source).values
    expected = contributions(adapter(name), TEXT, source=source).values
    assert (found - expected).abs().max() < tolerance


def encoder_decoder() -> Module:
    return HookedEncoderDecoder(
        HookedTransformerConfig(
            n_layers=1, d_model=8, n_ctx=20, d_head=4, n_heads=2, d_mlp=16, d_vocab=60, act_fn="relu",
            device="cpu", attention_dir="bidirectional", tie_word_embeddings=True,
            positional_embedding_type="relative_positional_bias", relative_attention_num_buckets=8,
            relative_attention_max_distance=16, use_attn_scale=False,
        )
    )  # fmt: skip


def in_four_bits() -> Module:
    model = tiny("LayerNorm")
    model.cfg.load_in_4bit = True
    return model


@pytest.mark.parametrize(
    ("load", "error", "message"),
    [
        (lambda: load_model(tiny("LayerNorm")), ValueError, "the HookedTransformer has no tokenizer"),
        (lambda: load_model(tiny("encoder")), ValueError, "the HookedEncoder has no tokenizer"),
        (lambda: load_model(encoder_decoder(), words()), TypeError, "got HookedEncoderDecoder"),
        (lambda: load_model(in_four_bits(), words()), ValueError, "weights in 4 bits"),
        (
            lambda: load_model(tiny("LayerNorm"), words(), dtype=torch.half),
            ValueError,
            "move or cast it before",
        ),
    ],
)
def test_refused(load: Callable[[], object], error: type[Exception], message: str) -> None:
    """What does not fit is refused by name, with the remedy."""
    with pytest.raises(error, match=message):
        load()


@pytest.mark.parametrize("name", ["LayerNorm", "encoder"])
@pytest.mark.parametrize(
    ("kind", "point", "message"),
    [
        ("head", "attn.hook_v", "are off the heads. outputs"),
        ("layer", "hook_attn_out", "not what enters the next block"),
    ],
)
def test_proof_catches_a_wrong_target(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str, point: str, message: str
) -> None:
    """A target that is not the value it is named after is refused."""
    right = HookedModel.target

    def wrong(self: HookedModel, layer: int, asked: str = "head") -> Module:
        return self.hook_point(f"blocks.{layer}.{point}") if asked == kind else right(self, layer, asked)

    monkeypatch.setattr(HookedModel, "target", wrong)
    with pytest.raises(ValueError, match=f"does not fit Hooked.*{message}"):
        load_model(tiny(name), tokenizer=words())


def test_proof_catches_a_wrong_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that is not what enters the block is refused."""
    monkeypatch.setattr(
        HookedModel, "source", lambda self, layer: self.hook_point(f"blocks.{layer}.hook_attn_out")
    )
    with pytest.raises(ValueError, match="the source is not what enters the block"):
        load_model(tiny("LayerNorm"), tokenizer=words())


@pytest.mark.parametrize("name", KINDS)
def test_what_becomes_of_heads(name: str) -> None:
    """Patterns times values through the output projection are what the attention gives, and with the residual
    through a post-LN block's norm what that norm gives.
    """
    model = adapter(name)
    activations = Activations(model, model.batch([model.encode(TEXT)]))
    for layer, block in enumerate(model.lens.blocks):
        added = torch.einsum("hqk,hkd->qd", activations.pattern[layer], activations.projected[layer])
        given = observed({"": block.attn}, activations.run)[""][0]
        if given.dim() == 2:
            torch.testing.assert_close(added + block.attn.b_O.detach(), given)
        _, whole = decomposed_block(activations, layer)
        if KINDS[name].encoder:
            torch.testing.assert_close(whole, observed({"": block.ln1}, activations.run)[""][0])


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.encoder])
def test_logits_and_their_directions(name: str) -> None:
    """The model's logits, and the gradient of one in what a head adds, with the final scale fixed."""
    model = adapter(name)
    batch = model.batch([model.encode(TEXT)])
    plain = tiny(name)
    torch.testing.assert_close(
        model.logits(*batch.inputs, *batch.extra), plain(batch.inputs[0], attention_mask=batch.extra[0])
    )
    column = plain.unembed.W_U[:, 5].detach()
    norm = getattr(plain, "ln_final", None)
    column = column * norm.w.detach() if hasattr(norm, "w") else column
    if type(norm).__name__.startswith("Layer"):
        column = column - column.mean()
    expected = torch.stack([block.attn.W_O.detach() @ column for block in plain.blocks])
    torch.testing.assert_close(logit_direction(model, 5), expected)
