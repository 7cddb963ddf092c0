"""Tiny random models of every family: the case table of many tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers as hf
from torch.nn import Module

SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 60}
ENCODER = SIZES | {"intermediate_size": 32, "max_position_embeddings": 40}
ROTARY = ENCODER | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = ("encoder.layer.{}", "attention.output.dense")
GROUPED = ROTARY | {"num_key_value_heads": 2}


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        make: Makes a tiny one with random weights.
        block: The path of a block, by its number.
        projection: The path in a block of what mixes the outputs of its heads.
        causal: Whether queries see no later keys.
        closed_form: Whether the closed form of the previous layer is expected to hold.
        exact: Whether it computes in float64 throughout, once it is cast to that.
        bridge: The class with a head that TransformerLens bridges, if it does.
        real: Real weights that it is tested on too.
        note: What is special about it.
    """

    make: Callable[[], Module]
    block: str = "layers.{}"
    projection: str = "self_attn.o_proj"
    causal: bool = False
    closed_form: bool = True
    exact: bool = True
    bridge: str = ""
    real: str = ""
    note: str = ""


def _encoder(config: str, model: str, **options: object) -> Callable[[], Module]:
    return lambda: getattr(hf, model)(getattr(hf, config)(**(ENCODER | options)))


def _grouped(config: str, model: str, **options: object) -> Callable[[], Module]:
    return lambda: getattr(hf, model)(getattr(hf, config)(**(GROUPED | options)))


FAMILIES = {
    "BERT": Family(
        _encoder("BertConfig", "BertModel"),
        *BERT,
        bridge="BertForMaskedLM",
        real="all-MiniLM-L6-v2, AntiBERTy",
    ),
    "RoBERTa": Family(
        _encoder("RobertaConfig", "RobertaModel", pad_token_id=0),
        *BERT,
        bridge="RobertaForMaskedLM",
    ),
    "XLM-RoBERTa": Family(
        _encoder("XLMRobertaConfig", "XLMRobertaModel", pad_token_id=0),
        *BERT,
    ),
    "ELECTRA": Family(
        _encoder("ElectraConfig", "ElectraModel", embedding_size=8),
        *BERT,
    ),
    "ALBERT": Family(
        _encoder("AlbertConfig", "AlbertModel", embedding_size=8),
        "encoder.albert_layer_groups.0.albert_layers.0",
        "attention.dense",
        note="one shared block, run several times",
    ),
    "DistilBERT": Family(
        lambda: hf.DistilBertModel(
            hf.DistilBertConfig(
                dim=16, hidden_dim=32, n_layers=3, n_heads=4, vocab_size=60, max_position_embeddings=40
            )
        ),
        "transformer.layer.{}",
        "attention.out_lin",
    ),
    "DeBERTa": Family(
        _encoder("DebertaConfig", "DebertaModel", relative_attention=True, pos_att_type=["c2p", "p2c"]),
        *BERT,
        closed_form=False,
        exact=False,
        note="disentangled scores",
    ),
    "DeBERTa v2": Family(
        _encoder("DebertaV2Config", "DebertaV2Model", relative_attention=True, pos_att_type=["c2p", "p2c"]),
        *BERT,
        closed_form=False,
        note="disentangled scores",
    ),
    "GPT-2": Family(
        lambda: hf.GPT2Model(hf.GPT2Config(n_embd=16, n_layer=3, n_head=4, vocab_size=60, n_positions=40)),
        "h.{}",
        "attn.c_proj",
        causal=True,
        note="pre-LN",
        bridge="GPT2LMHeadModel",
    ),
    "GPT-NeoX (Pythia)": Family(
        _encoder("GPTNeoXConfig", "GPTNeoXModel", pad_token_id=0, bos_token_id=1, eos_token_id=2),
        projection="attention.dense",
        causal=True,
        exact=False,
        note="parallel blocks, partial rotary embedding",
        bridge="GPTNeoXForCausalLM",
    ),
    "Llama": Family(
        _grouped("LlamaConfig", "LlamaModel"),
        causal=True,
        exact=False,
        note="grouped heads, rotary, RMSNorm",
        bridge="LlamaForCausalLM",
        real="SmolLM2-135M (GGUF)",
    ),
    "Mistral": Family(
        _grouped("MistralConfig", "MistralModel", sliding_window=3),
        causal=True,
        exact=False,
        note="sliding window, shorter than the text",
        bridge="MistralForCausalLM",
    ),
    "Qwen2": Family(
        _grouped("Qwen2Config", "Qwen2Model"),
        causal=True,
        exact=False,
        note="biases on queries and keys",
        bridge="Qwen2ForCausalLM",
    ),
    "Qwen3": Family(
        _grouped("Qwen3Config", "Qwen3Model", head_dim=8),
        causal=True,
        closed_form=False,
        exact=False,
        note="normalised queries and keys",
        bridge="Qwen3ForCausalLM",
    ),
    "Gemma": Family(
        _grouped("GemmaConfig", "GemmaModel", head_dim=8), causal=True, exact=False, note="scaled embedding"
    ),
    "Gemma 2": Family(
        _grouped("Gemma2Config", "Gemma2Model", head_dim=8, sliding_window=3),
        causal=True,
        closed_form=False,
        exact=False,
        note="capped scores, norms after the sublayers",
        bridge="Gemma2ForCausalLM",
    ),
    "Gemma 3": Family(
        _grouped("Gemma3TextConfig", "Gemma3TextModel", head_dim=8, sliding_window=3),
        causal=True,
        closed_form=False,
        exact=False,
        note="normalised queries and keys",
        bridge="Gemma3ForCausalLM",
    ),
    "Phi": Family(
        lambda: hf.PhiModel(hf.PhiConfig(**ROTARY)),
        projection="self_attn.dense",
        causal=True,
        exact=False,
        note="parallel, partial rotary",
        bridge="PhiForCausalLM",
    ),
    "Phi-3": Family(
        _grouped("Phi3Config", "Phi3Model"),
        causal=True,
        exact=False,
        note="joint projections",
        bridge="Phi3ForCausalLM",
    ),
}


SEEN = {"image_size": 12, "patch_size": 4}
VISION = {
    name: value for name, value in (ENCODER | SEEN).items()
    if name not in ("vocab_size", "max_position_embeddings")
}  # fmt: skip
IMAGES = {
    "ViT": Family(
        lambda: hf.ViTModel(hf.ViTConfig(**VISION)), projection="attention.o_proj", exact=False
    ),
    "DeiT": Family(
        lambda: hf.DeiTModel(hf.DeiTConfig(**VISION)), projection="attention.o_proj", exact=False
    ),
    "DINOv2": Family(
        lambda: hf.Dinov2Model(hf.Dinov2Config(**VISION)), "encoder.layer.{}", "attention.o_proj",
        exact=False, note="of any size",
    ),
}  # fmt: skip
"""Models of images. Their softmax is in float32, whatever the weights are in."""


@dataclass(frozen=True)
class Pair:
    """A kind of encoder-decoder.

    Attributes:
        make: Makes a tiny one with random weights.
        blocks: The paths of a block of the encoder and of one of the decoder.
        projections: The paths in a block of what mixes the outputs of heads, by part.
        memory: The path of what gives what the decoder reads.
        exact: Whether it computes in float64 throughout, once it is cast to that.
        note: What is special about it.
    """

    make: Callable[[], Module]
    blocks: tuple[str, str]
    projections: dict[str, str]
    memory: str
    exact: bool = True
    note: str = ""


BART = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 60,
    "max_position_embeddings": 40, "pad_token_id": 0, "decoder_start_token_id": 2,
}  # fmt: skip
WHISPER = BART | {
    "num_mel_bins": 4, "max_source_positions": 6, "max_target_positions": 20, "bos_token_id": 2,
    "eos_token_id": 2,
}  # fmt: skip
BART_PATHS = (
    ("encoder.layers.{}", "decoder.layers.{}"),
    {"encoder": "self_attn.out_proj", "decoder": "self_attn.out_proj", "cross": "encoder_attn.out_proj"},
)
PAIRS = {
    "T5": Pair(
        lambda: hf.T5Model(
            hf.T5Config(
                d_model=16, d_kv=4, d_ff=32, num_layers=2, num_decoder_layers=3, num_heads=4, vocab_size=60,
                decoder_start_token_id=0,
            )
        ),
        ("encoder.block.{}", "decoder.block.{}"),
        {
            "encoder": "layer.0.SelfAttention.o",
            "decoder": "layer.0.SelfAttention.o",
            "cross": "layer.1.EncDecAttention.o",
        },
        "encoder.final_layer_norm",
        exact=False,
        note="relative positions, RMSNorm",
    ),
    "BART": Pair(lambda: hf.BartModel(hf.BartConfig(**BART)), *BART_PATHS, "encoder.layers.1"),
    "mBART": Pair(
        lambda: hf.MBartModel(hf.MBartConfig(**BART)), *BART_PATHS, "encoder.layer_norm", note="pre-LN"
    ),
    "Whisper": Pair(
        lambda: hf.WhisperModel(hf.WhisperConfig(**WHISPER)), *BART_PATHS, "encoder.layer_norm",
        note="the encoder reads audio, pre-LN",
    ),
}  # fmt: skip


def tiny(name: str) -> Module:
    """The model of a family, in float64 and eval mode."""
    torch.manual_seed(0)
    model = (FAMILIES | IMAGES | PAIRS)[name].make().double().eval()
    with torch.no_grad():  # so that biases are not 0 and norms not 1
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tiny_with_head(name: str) -> Module:
    """The same family with the head that TransformerLens needs, and other random weights."""
    torch.manual_seed(0)
    config = FAMILIES[name].make().config
    return getattr(hf, FAMILIES[name].bridge)(config).double().eval()


def table() -> str:
    """The families as a table for the README."""
    lines = [
        "| family | closed form of the previous layer | TransformerLens too | tested on | notes |",
        "|---|---|---|---|---|",
    ]
    for name, family in (FAMILIES | IMAGES).items():
        kind = "decoder" if family.causal else "encoder"
        kind = f"vision {kind}" if name in IMAGES else kind
        notes = f"{kind}, {family.note}" if family.note else kind
        tested = f"tiny random; real: {family.real}" if family.real else "tiny random"
        answers = ("yes" if holds else "no" for holds in (family.closed_form, family.bridge))
        lines.append(f"| {name} | {' | '.join(answers)} | {tested} | {notes} |")
    for name, pair in PAIRS.items():
        notes = ", ".join(filter(None, ("encoder, decoder and cross attention", pair.note)))
        lines.append(f"| {name} | except cross attention | no | tiny random | {notes} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
