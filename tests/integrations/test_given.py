"""The model that is handed in is the model that is explained: wrappers, attention functions, batches."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from conftest import WordTokenizer, tiny_bert
from families import GROUPED, tiny
from torch import Tensor
from torch.nn import Module
from torch.nn.utils import prune
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

from captum_hta import baselines, contributions, load_model
from captum_hta.integrations import TransformersModel

PAIR = ("one two three", "four five")
TEXT = "one two three four five six seven eight nine ten"
SOURCES = ("input", "previous_layer")


def off(found: Any, expected: Any) -> float:
    return (found.values - expected.values).nan_to_num(0).abs().max().item()


# --- PEFT ----------------------------------------------------------------------------------------


def lora(model: Module, **options: Any) -> Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2, target_modules=["query", "value", "dense"], init_lora_weights=False, **options
    )
    return peft.get_peft_model(model, config).double().eval()


@pytest.mark.parametrize("adapter", [None, "transformers", "transformer_lens"])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (hf.BertModel, {}),
        (hf.BertForMaskedLM, {}),
        (hf.BertForSequenceClassification, {"task_type": "SEQ_CLS"}),
    ],
)
def test_lora_equals_the_merged_model(cls: type[Module], options: dict, adapter: str | None) -> None:
    """For a pair, whose segments PEFT does not name in the signature of its forward."""
    wrapped = lora(tiny_bert(cls), **options)
    found = [
        contributions(load_model(wrapped, WordTokenizer(), adapter=adapter), [PAIR], source=s)
        for s in SOURCES
    ]
    merged = load_model(copy.deepcopy(wrapped).merge_and_unload(), WordTokenizer(), adapter=adapter)
    for one, source in zip(found, SOURCES, strict=True):
        assert off(one, contributions(merged, [PAIR], source=source)) < 1e-9
    plain = load_model(tiny_bert(cls), WordTokenizer(), adapter=adapter)
    assert off(found[0], contributions(plain, [PAIR])) > 1e-3


@pytest.mark.parametrize("method", [baselines.ValueWeightedNorm, baselines.BlockNorm, baselines.Alti])
def test_lora_around_output_projections(method: type[baselines.Baseline]) -> None:
    """Baselines use the projection with its update, as in the merged model."""
    wrapped = lora(tiny_bert(hf.BertModel))
    merged = copy.deepcopy(wrapped).merge_and_unload()
    found, expected, plain = (
        method(load_model(model, WordTokenizer(), adapter="transformers")).attribute(TEXT)
        for model in (wrapped, merged, tiny_bert(hf.BertModel))
    )
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, plain)


def test_fingerprints_know_adapters() -> None:
    """Which adapters are active and how they are scaled decides the numbers, without changing a weight."""
    peft = pytest.importorskip("peft")
    wrapped = lora(tiny_bert(hf.BertModel))
    wrapped.add_adapter("other", peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False))
    layers = [module for module in wrapped.modules() if hasattr(module, "set_scale")]
    found, prints = [], []
    for change in (
        lambda: None,
        lambda: wrapped.set_adapter("other"),
        lambda: wrapped.set_adapter("default"),
        lambda: [layer.set_scale("default", 3.0) for layer in layers],
    ):
        change()
        model = load_model(wrapped.double(), WordTokenizer())
        prints.append(model.fingerprint)
        found.append(contributions(model, "a b c").values)
    assert prints[0] == prints[2]
    assert found[0].equal(found[2])
    assert len(set(prints)) == 3
    assert not any(found[0].allclose(other) for other in (found[1], found[3]))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("wrapper", [partial(torch.compile, backend="eager"), torch.nn.DataParallel])
def test_wrappers_of_pytorch(wrapper: Callable[[Module], Module], source: str) -> None:
    """Compiled models and data parallelism compute the same as the model inside."""
    model = tiny_bert(hf.BertModel)
    expected = contributions(load_model(model, WordTokenizer()), [PAIR], source=source)
    for wrapped in (wrapper(model), torch.nn.DataParallel(wrapper(model))):
        assert (
            off(contributions(load_model(wrapped, WordTokenizer()), [PAIR], source=source), expected) < 1e-9
        )


def test_what_transformer_lens_does_not_bridge() -> None:
    """Such as a config that disagrees with the heads of the model. The error names a remedy that works."""
    model = tiny_bert(hf.BertModel)
    model.config.num_attention_heads = 4
    with pytest.raises(ValueError, match=r"does not bridge this BertModel .* adapter='transformers'"):
        load_model(model, WordTokenizer(), adapter="transformer_lens")
    result = contributions(load_model(model, WordTokenizer(), adapter="transformers"), TEXT)
    expected = contributions(load_model(tiny_bert(hf.BertModel), WordTokenizer()), TEXT)
    assert off(result, expected) < 1e-9


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="flex attention is compiled on a CPU")
def test_a_kernel_without_derivatives() -> None:
    """Flex attention has no backward on a CPU, so eager attention takes its place, and the setting stays."""
    plain, flex = tiny("Llama").float(), tiny("Llama").float()
    flex.set_attn_implementation("flex_attention")
    model, expected = (TransformersModel(one, WordTokenizer(60)) for one in (flex, plain))
    for options in ({}, {"mode": "reverse"}, {"source": "previous_layer"}, {"n_probes": 3}):
        found = contributions(model, TEXT, **options)
        assert off(found, contributions(expected, TEXT, **options)) < 1e-5
    assert flex.config._attn_implementation == "flex_attention"


def test_a_block_whose_attention_cannot_be_seen() -> None:
    """A replaced forward keeps the attention of the model that was copied, and no layer is left out."""
    model = tiny_bert(hf.BertModel)
    attention = model.encoder.layer[1].attention.self
    own = attention.forward
    attention.forward = lambda *args, **options: own(*args, **options)
    with pytest.raises(
        ValueError, match="call 1 of BertSelfAttention computes no attention that can be seen"
    ):
        load_model(model, WordTokenizer(), adapter="transformers")


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig", "PromptEncoderConfig"])
def test_virtual_tokens_are_refused(kind: str) -> None:
    """Their rows would be those of the model without them."""
    peft = pytest.importorskip("peft")
    model = tiny_bert(hf.BertForSequenceClassification)
    wrapped = peft.get_peft_model(model, getattr(peft, kind)(task_type="SEQ_CLS", num_virtual_tokens=2))
    with pytest.raises(ValueError, match=r"adds virtual tokens.*LoRA"):
        load_model(wrapped.eval(), WordTokenizer())


def test_a_forward_that_is_replaced_is_noticed() -> None:
    """A subclass that doubles the embeddings on its way is not the model that its base is."""

    class Doubling(hf.BertForMaskedLM):
        def forward(self, input_ids: Tensor, **options: Any) -> Any:
            return super().forward(
                inputs_embeds=2 * self.bert.embeddings.word_embeddings(input_ids), **options
            )

    with pytest.raises(ValueError, match="off those of the model as it is called by its user"):
        load_model(tiny_bert(Doubling), WordTokenizer(), adapter="transformers")


# --- attention functions -------------------------------------------------------------------------


def ablated(module: Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    out, weights = sdpa_attention_forward(module, query, key, value, mask, **options)
    return torch.cat([torch.zeros_like(out[:, :, :1]), out[:, :, 1:]], dim=2), weights


def windowed(module: Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """Exact up to eight tokens."""
    near = torch.ones(query.shape[2], key.shape[2]).tril(7).triu(-7).bool()[None, None]
    return sdpa_attention_forward(module, query, key, value, near if mask is None else mask & near, **options)


def harmless(*args: Any, **options: Any) -> Any:
    return sdpa_attention_forward(*args, **options)


for function in (ablated, windowed, harmless):
    AttentionInterface.register(f"test_{function.__name__}", function)
    AttentionMaskInterface.register(f"test_{function.__name__}", AttentionMaskInterface()["sdpa"])


def with_attention(name: str) -> Module:
    model = tiny_bert()
    model.set_attn_implementation(f"test_{name}")
    return model


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (None, "ablated"),
        ("transformers", "ablated"),
        ("transformer_lens", "in the place of the attention function"),
    ],
)
def test_an_attention_function_that_is_no_attention_is_refused(adapter: str | None, words: str) -> None:
    """Head 0 has no output, whatever its pattern."""
    with pytest.raises(ValueError, match=words):
        load_model(with_attention("ablated"), WordTokenizer(), adapter=adapter)


def test_an_attention_function_is_checked_on_every_batch() -> None:
    """One with a window passes on a short text, and is refused on a longer one."""
    model = load_model(with_attention("windowed"), WordTokenizer())
    assert (
        off(
            contributions(model, "one two"),
            contributions(load_model(tiny_bert(), WordTokenizer()), "one two"),
        )
        < 1e-9
    )
    with pytest.raises(ValueError, match="attention function 'test_windowed'"):
        contributions(model, TEXT)


@pytest.mark.parametrize("source", SOURCES)
def test_an_attention_function_that_is_attention_is_taken(source: str) -> None:
    """Whatever it is called."""
    found = contributions(
        load_model(with_attention("harmless"), WordTokenizer()), [PAIR, TEXT], source=source
    )
    expected = contributions(load_model(tiny_bert(), WordTokenizer()), [PAIR, TEXT], source=source)
    assert off(found, expected) < 1e-9


def test_a_function_under_the_name_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is the function, not its name."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", ablated)
    model = tiny_bert()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attention function 'sdpa'"):
        load_model(model, WordTokenizer())


def test_segments_reach_the_patterns_of_deberta() -> None:
    """Its patterns are of the pair with its segments, and its outputs may be tuples."""
    torch.manual_seed(0)
    config = hf.DebertaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, vocab_size=64,
        max_position_embeddings=40, relative_attention=True, pos_att_type=["c2p"], type_vocab_size=2,
        return_dict=False, initializer_range=0.5,
    )  # fmt: skip
    plain = hf.DebertaModel(config).eval()
    model = load_model(plain, WordTokenizer())
    encoding = model.encode(PAIR)
    found = contributions(model, [PAIR], source="previous_layer").attention[0]
    with torch.no_grad():
        expected = plain(
            torch.tensor([encoding.ids]), token_type_ids=torch.tensor([encoding.segments]),
            output_attentions=True, return_dict=True,
        ).attentions  # fmt: skip
    torch.testing.assert_close(found, torch.cat(expected))


# --- properties of the model, not of its family ----------------------------------------------------


@pytest.mark.parametrize("adapter", [None, "transformers"])
@pytest.mark.parametrize("cls", [hf.BertLMHeadModel, hf.RobertaForCausalLM])
def test_decoders_of_encoder_families(cls: type[Module], adapter: str | None) -> None:
    """They are causal, and keys that no query sees do not count as agreement."""
    torch.manual_seed(0)
    config = cls.config_class(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=40, is_decoder=True, pad_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    model = load_model(cls(config).double().eval(), WordTokenizer(), adapter=adapter)
    assert model.size.causal
    assert not contributions(model, TEXT).values.triu(1).any()
    with pytest.raises(ValueError, match="no direction stands for a token"):
        _ = model.unembedding


def test_a_bidirectional_model_of_a_causal_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queries see later keys, and its logits still have directions."""
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **options: None)
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)).double().eval()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    adapter = load_model(model, WordTokenizer(60))
    assert not adapter.size.causal
    assert contributions(adapter, "a b c").values.triu(1).any()
    assert adapter.unembedding.weight.shape == (60, 16)


# --- batches ---------------------------------------------------------------------------------------


def longrope() -> Module:
    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [8.0] * 2, "rope_theta": 1e4,
        "original_max_position_embeddings": 6,
    }  # fmt: skip
    config = hf.Phi3Config(
        **(GROUPED | {"max_position_embeddings": 60}), original_max_position_embeddings=6,
        rope_parameters=rope, initializer_range=0.5,
    )  # fmt: skip
    return hf.Phi3ForCausalLM(config).double().eval()


@pytest.mark.parametrize("source", SOURCES)
def test_longrope_does_not_depend_on_the_batch(source: str) -> None:
    """A text of six tokens has its short factors, also beside one of seven."""
    model = load_model(longrope(), WordTokenizer(60))
    short, long = "a b c d", "a b c d e"
    together = contributions(model, [short, long], source=source)
    for row, text in enumerate((short, long)):
        assert off(together.example(row), contributions(model, text, source=source)) < 1e-9
    with pytest.raises(ValueError, match="call it once for each"):
        model.batch([model.encode(short), model.encode(long)])


# --- copies ----------------------------------------------------------------------------------------


def prune_otherwise(name: str) -> Module:
    """The same weights under another mask."""
    model = tiny(name)
    linear = next(m for m in model.modules() if type(m).__name__ in ("Linear", "Conv1D"))
    prune.l1_unstructured(linear, "weight", 0.25)
    return model


@pytest.mark.parametrize("name", ["BERT", "GPT-2"])
def test_pruned_models(name: str) -> None:
    """Their weights are computed before each call; a copy computes the same."""
    model = tiny(name)
    linear = next(m for m in model.modules() if type(m).__name__ in ("Linear", "Conv1D"))
    prune.l1_unstructured(linear, "weight", 0.5)
    pruned = load_model(model, WordTokenizer(60))
    assert pruned.fingerprint != load_model(prune_otherwise(name), WordTokenizer(60)).fingerprint
    found = contributions(pruned, "a b c", source="previous_layer")
    prune.remove(linear, "weight")
    expected = contributions(load_model(model, WordTokenizer(60)), "a b c", source="previous_layer")
    assert off(found, expected) < 1e-9


@pytest.mark.parametrize("adapter", ["transformer_lens", "transformers"])
def test_models_made_under_inference_mode(adapter: str | None) -> None:
    """They have no derivatives; the copy that is used has."""
    with torch.inference_mode():
        model = tiny_bert()
    with pytest.raises(ValueError, match=r"made under torch\.inference_mode"):
        TransformersModel(model, WordTokenizer())
    found = contributions(load_model(model, WordTokenizer(), adapter=adapter), TEXT, source="input")
    assert off(found, contributions(load_model(tiny_bert(), WordTokenizer(), adapter=adapter), TEXT)) < 1e-12


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("adapter", ["transformers", "transformer_lens"])
def test_adapters_can_be_copied(adapter: str, copied: Callable[[Any], Any]) -> None:
    """By value: a change of the first does not reach the copy."""
    model = load_model(tiny_bert(), WordTokenizer(), adapter=adapter)
    expected = contributions(model, [PAIR])
    again = copied(model)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(0.5)
    assert again.name == model.name
    assert off(contributions(again, [PAIR]), expected) < 1e-12
    assert off(contributions(model, [PAIR]), expected) > 1e-3
