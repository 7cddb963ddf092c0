"""Tiny random models of every family: the case table of many tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import transformers as hf
from torch.nn import Module

from captum_hta.integrations.transformers.families import OVERRIDES

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
        layers: The numbers of its blocks with attention.
        start: The number of the block that reads the embedding.
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
    layers: tuple[int, ...] = (0, 1, 2)
    start: int = 0


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
        exact=False,
        note="normalised queries and keys",
        bridge="Qwen3ForCausalLM",
    ),
    "Gemma": Family(
        _grouped("GemmaConfig", "GemmaModel", head_dim=8), causal=True, exact=False, note="scaled embedding"
    ),
    "Gemma 2": Family(
        _grouped("Gemma2Config", "Gemma2Model", head_dim=8, sliding_window=3, attn_logit_softcapping=0.5),
        causal=True,
        exact=False,
        note="capped scores, norms after the sublayers",
        bridge="Gemma2ForCausalLM",
    ),
    "Gemma 3": Family(
        _grouped("Gemma3TextConfig", "Gemma3TextModel", head_dim=8, sliding_window=3),
        causal=True,
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


def _decoder(config: str, model: str, **options: object) -> Callable[[], Module]:
    return lambda: getattr(hf, model)(getattr(hf, config)(**(ROTARY | options)))


ATTENTION = "self_attention.dense"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MAMBA = {
    "num_hidden_layers": 2, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
    "mamba_chunk_size": 4,
}  # fmt: skip
EYES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def _rotary(model: str, **options: object) -> Family:
    """A decoder that is laid out as Llama is."""
    return Family(
        _grouped(model.replace("Model", "Config"), model, **options),
        causal=True,
        exact=False,
    )


STRUCTURED = {
    "OPT": Family(
        _decoder("OPTConfig", "OPTModel", ffn_dim=32, word_embed_proj_dim=16),
        "decoder.layers.{}", "self_attn.out_proj", causal=True, exact=False,
    ),
    "GPT-J": Family(
        lambda: hf.GPTJModel(
            hf.GPTJConfig(
                n_embd=16, n_layer=3, n_head=4, vocab_size=60, n_positions=40, rotary_dim=2, bos_token_id=1,
                eos_token_id=2,
            )
        ),
        "h.{}", "attn.out_proj", causal=True, closed_form=False, exact=False, note="parallel blocks",
    ),
    "GPT-Neo": Family(
        lambda: hf.GPTNeoModel(
            hf.GPTNeoConfig(
                hidden_size=16, num_layers=2, num_heads=4, vocab_size=60, window_size=3,
                attention_types=[[["global", "local"], 1]], max_position_embeddings=40, intermediate_size=32,
                bos_token_id=1, eos_token_id=2,
            )
        ),
        "h.{}", "attn.attention.out_proj", causal=True, closed_form=False, exact=False,
        note="blocks with a window between others", layers=(0, 1),
    ),
    "Falcon": Family(
        lambda: hf.FalconModel(hf.FalconConfig(**SIZES, **IDS)), "h.{}", ATTENTION, causal=True,
        closed_form=False, exact=False, note="parallel blocks, one head of keys",
    ),
    "BLOOM": Family(
        lambda: hf.BloomModel(hf.BloomConfig(hidden_size=16, n_layer=3, n_head=4, vocab_size=60, **IDS)),
        "h.{}", ATTENTION, causal=True, closed_form=False, exact=False, note="ALiBi",
    ),
    "MPT": Family(
        lambda: hf.MptModel(hf.MptConfig(d_model=16, n_layers=3, n_heads=4, vocab_size=60, max_seq_len=40)),
        "blocks.{}", "attn.out_proj", causal=True, closed_form=False, exact=False, note="ALiBi",
    ),
    "StableLM": replace(
        _rotary("StableLmModel", qk_layernorm=True, partial_rotary_factor=0.5),
        note="a norm for each head",
    ),
    "OLMo2": replace(
        _rotary("Olmo2Model"),
        note="normalised queries and keys, norms after the sublayers",
    ),
    "Granite": replace(_rotary("GraniteModel", residual_multiplier=0.5), note="scaled sublayers"),
    "Cohere": replace(_rotary("CohereModel"), note="parallel blocks"),
    "StarCoder2": _rotary("Starcoder2Model"),
    "SmolLM3": replace(_rotary("SmolLM3Model"), note="blocks without positions between others"),
    "Nemotron": _rotary("NemotronModel"),
    "GLM": replace(_rotary("GlmModel", head_dim=4), note="partial rotary, joint gate"),
    "EXAONE4": replace(
        _rotary("Exaone4Model", sliding_window=3),
        note="norms after the sublayers, windows",
    ),
    "Persimmon": Family(
        _decoder("PersimmonConfig", "PersimmonModel"), projection="self_attn.dense", causal=True,
        exact=False, note="normalised queries and keys",
    ),
    "GPT-BigCode": Family(
        lambda: hf.GPTBigCodeModel(
            hf.GPTBigCodeConfig(n_embd=16, n_layer=3, n_head=4, vocab_size=60, n_positions=40, **IDS)
        ),
        "h.{}", "attn.c_proj", causal=True, exact=False, note="one head of keys",
    ),
    "Mixtral": replace(_rotary("MixtralModel", num_local_experts=4), note="mixture of experts"),
    "Qwen3-MoE": replace(
        _rotary("Qwen3MoeModel", head_dim=8, **EXPERTS), note="mixture of experts"
    ),
    "gpt-oss": replace(
        _rotary("GptOssModel", head_dim=4, num_local_experts=4, sliding_window=3),
        note="mixture of experts, sinks, windows",
    ),
    "DeepSeek-V2": replace(
        _rotary("DeepseekV2Model", n_group=1, **LATENT), closed_form=False,
        note="latent keys and values, mixture of experts",
    ),
    "DeepSeek-V3": replace(
        _rotary("DeepseekV3Model", n_group=2, **LATENT), closed_form=False,
        note="latent keys and values, mixture of experts",
    ),
    "Qwen2-VL": Family(
        lambda: hf.Qwen2VLForConditionalGeneration(
            hf.Qwen2VLConfig(
                text_config=GROUPED | {
                    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1], "rope_theta": 1e4}
                },
                vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2},
            )
        ),
        "model.language_model.layers.{}", causal=True, exact=False, note="its text side",
    ),
    "LLaVA": Family(
        lambda: hf.LlavaForConditionalGeneration(
            hf.LlavaConfig(
                text_config=hf.LlamaConfig(**GROUPED), image_token_index=59,
                vision_config=hf.CLIPVisionConfig(**EYES, image_size=8, patch_size=4),
            )
        ),
        "model.language_model.layers.{}", causal=True, exact=False, note="its text side",
    ),
    "MPNet": Family(
        _encoder("MPNetConfig", "MPNetModel"), "encoder.layer.{}", "attention.attn.o", closed_form=False,
        note="relative positions",
    ),
    "CamemBERT": Family(_decoder("CamembertConfig", "CamembertModel"), *BERT),
    "ModernBERT": Family(
        _decoder(
            "ModernBertConfig", "ModernBertModel", local_attention=4, global_attn_every_n_layers=2,
            cls_token_id=1, sep_token_id=2,
        ),
        projection="attn.Wo", exact=False, note="pre-LN, windows",
    ),
    "ESM": Family(
        _decoder(
            "EsmConfig", "EsmModel", mask_token_id=3, position_embedding_type="rotary", token_dropout=False
        ),
        *BERT, exact=False, note="pre-LN, rotary",
    ),
    "RoFormer": Family(
        _encoder("RoFormerConfig", "RoFormerModel", embedding_size=16), *BERT, closed_form=False,
        exact=False, note="rotary",
    ),
    "CLIP, text": Family(
        _decoder("CLIPTextConfig", "CLIPTextModel"), "encoder.layers.{}", "self_attn.out_proj", causal=True,
        exact=False,
    ),
    "SigLIP, text": Family(
        _decoder("SiglipTextConfig", "SiglipTextModel", projection_size=16), "encoder.layers.{}",
        "self_attn.out_proj", exact=False,
    ),
    "Jamba": Family(
        _grouped(
            "JambaConfig", "JambaModel", num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1,
            num_experts=2, num_experts_per_tok=1, expert_layer_period=2, use_mamba_kernels=False,
            mamba_d_state=4, mamba_dt_rank=4,
        ),
        causal=True, exact=False, layers=(1, 3),
        note="its blocks with attention, mixture of experts",
    ),
    "Bamba": Family(
        _grouped("BambaConfig", "BambaModel", attn_layer_indices=[1], mamba_expand=2, **MAMBA),
        causal=True, exact=False, layers=(1,), note="its blocks with attention",
    ),
    "Qwen3-Next": Family(
        _grouped(
            "Qwen3NextConfig", "Qwen3NextModel", num_hidden_layers=2, head_dim=8, linear_key_head_dim=4,
            layer_types=["linear_attention", "full_attention"],
            linear_value_head_dim=4, linear_num_key_heads=2, linear_num_value_heads=2,
            shared_expert_intermediate_size=8, **EXPERTS,
        ),
        causal=True, closed_form=False, exact=False, layers=(1,),
        note="its blocks with attention, gated heads, mixture of experts",
    ),
    "Falcon-H1": Family(
        _grouped("FalconH1Config", "FalconH1Model", mamba_d_ssm=32, **MAMBA), causal=True,
        exact=False, note="attention beside state spaces", layers=(0, 1),
    ),
}  # fmt: skip
"""Models that are loaded by their structure alone; fewer tests run on them than on those of ``FAMILIES``."""


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

STRUCTURED_IMAGES = {
    "CLIP, image": Family(
        lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**VISION)), "encoder.layers.{}", "self_attn.out_proj",
        exact=False,
    ),
    "SigLIP, image": Family(
        lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**VISION)), "encoder.layers.{}",
        "self_attn.out_proj", exact=False,
    ),
    "BEiT": Family(
        lambda: hf.BeitModel(hf.BeitConfig(**VISION, use_relative_position_bias=True)),
        "layers.{}", "attention.o_proj", exact=False, note="relative positions",
    ),
}  # fmt: skip

CONVOLUTIONS = {
    "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
HEARING = {"vocab_size": 32, **{name: VISION[name] for name in VISION if name not in SEEN}, **CONVOLUTIONS}
STRUCTURED_AUDIO = {
    "Wav2Vec2": Family(
        lambda: hf.Wav2Vec2Model(hf.Wav2Vec2Config(**HEARING)), "encoder.layers.{}", "attention.out_proj",
        note="reads waves",
    ),
    "HuBERT": Family(
        lambda: hf.HubertModel(hf.HubertConfig(**HEARING)), "encoder.layers.{}", "attention.out_proj",
        note="reads waves",
    ),
}  # fmt: skip
SINGLE = STRUCTURED | STRUCTURED_IMAGES | STRUCTURED_AUDIO
"""All models that are loaded by their structure alone, except encoder-decoders."""


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

SPEAKING = BART | {"bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": 2}
STRUCTURED_PAIRS = {
    "MT5": replace(
        PAIRS["T5"],
        make=lambda: hf.MT5Model(
            hf.MT5Config(
                d_model=16, d_kv=4, d_ff=32, num_layers=2, num_decoder_layers=3, num_heads=4, vocab_size=60,
                decoder_start_token_id=0,
            )
        ),
    ),
    "Marian": Pair(
        lambda: hf.MarianModel(hf.MarianConfig(**SPEAKING, decoder_vocab_size=60)), *BART_PATHS,
        "encoder.layers.1",
    ),
    "Pegasus": Pair(
        lambda: hf.PegasusModel(hf.PegasusConfig(**SPEAKING)), *BART_PATHS, "encoder.layer_norm",
        note="pre-LN",
    ),
    "M2M100": Pair(
        lambda: hf.M2M100Model(hf.M2M100Config(**SPEAKING)), *BART_PATHS, "encoder.layer_norm", note="pre-LN"
    ),
}  # fmt: skip
"""Encoder-decoders that are loaded by their structure alone."""
EVERY = FAMILIES | SINGLE | IMAGES | PAIRS | STRUCTURED_PAIRS


def tiny(name: str) -> Module:
    """The model of a family, in float64 and eval mode."""
    torch.manual_seed(0)
    model = EVERY[name].make().double().eval()
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
    closed_form = "closed form of the previous layer"
    titles = ["family", "loaded by", closed_form, "TransformerLens too", "tested on", "notes"]
    lines = [f"| {' | '.join(titles)} |", "|---|---|---|---|---|---|"]
    for name, family in (FAMILIES | STRUCTURED | IMAGES | STRUCTURED_IMAGES | STRUCTURED_AUDIO).items():
        kind = "decoder" if family.causal else "encoder"
        kind = f"vision {kind}" if name in IMAGES | STRUCTURED_IMAGES else kind
        kind = f"audio {kind}" if name in STRUCTURED_AUDIO else kind
        notes = f"{kind}, {family.note}" if family.note else kind
        tested = f"tiny random; real: {family.real}" if family.real else "tiny random"
        answers = ("yes" if holds else "no" for holds in (family.closed_form, family.bridge))
        lines.append(f"| {name} | {_loaded_by(name)} | {' | '.join(answers)} | {tested} | {notes} |")
    for name, pair in (PAIRS | STRUCTURED_PAIRS).items():
        notes = ", ".join(filter(None, ("encoder, decoder and cross attention", pair.note)))
        answers = f"{_loaded_by(name)} | except cross attention | no"
        lines.append(f"| {name} | {answers} | tiny random | {notes} |")
    return "\n".join(lines)


def _loaded_by(name: str) -> str:
    kind = EVERY[name].make().config.model_type
    return "override" if kind in OVERRIDES else "structure"


if __name__ == "__main__":
    print(table())
