"""The supported model types of ``transformers``, each with its layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from captum_hta.integrations.transformers.layouts import Layout, SharedLayout

_BERT = Layout(
    "encoder.layer",
    "attention.self",
    "attention.output.dense",
    ("query", "key", "value"),
    sum_norm="attention.output.LayerNorm",
)  # post-LN, as of Devlin et al. 2019
_LLAMA = Layout(
    "layers", "self_attn", "self_attn.o_proj", ("q_proj", "k_proj", "v_proj"),
    norm="input_layernorm", direct_head=True, gated=True, final_norm="norm",
)  # fmt: skip
_WITHOUT_CLOSED_FORM = Layout(
    "layers", "self_attn", "self_attn.o_proj", direct_head=True, gated=True, final_norm="norm"
)
_VIT = ("attention", "attention.o_proj", ("q_proj", "k_proj", "v_proj"))

LAYOUTS: dict[str, Layout] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra"), _BERT),
    "albert": SharedLayout(
        "encoder.albert_layer_groups", "attention", "attention.dense", ("query", "key", "value"),
        sum_norm="attention.LayerNorm",
    ),
    "distilbert": Layout(
        "transformer.layer", "attention", "attention.out_lin", ("q_lin", "k_lin", "v_lin"),
        sum_norm="sa_layer_norm",
    ),
    **dict.fromkeys(
        ("deberta", "deberta-v2"),
        Layout(
            "encoder.layer", "attention.self", "attention.output.dense",
            sum_norm="attention.output.LayerNorm",
        ),
    ),
    "gpt2": Layout(
        "h", "attn", "attn.c_proj", ("c_attn",), joined="parts", norm="ln_1", direct_head=True,
        final_norm="ln_f",
    ),
    "gpt_neox": Layout(
        "layers", "attention", "attention.dense", ("query_key_value",), joined="heads",
        norm="input_layernorm", direct_head=True, final_norm="final_layer_norm",
    ),
    **dict.fromkeys(("llama", "mistral", "qwen2"), _LLAMA),
    "gemma": Layout(
        "layers", "self_attn", "self_attn.o_proj", ("q_proj", "k_proj", "v_proj"),
        norm="input_layernorm", unit_offset=True, direct_head=True, gated=True, final_norm="norm",
    ),
    "phi": Layout(
        "layers", "self_attn", "self_attn.dense", ("q_proj", "k_proj", "v_proj"),
        norm="input_layernorm", direct_head=True, final_norm="final_layernorm",
    ),
    "phi3": Layout(
        "layers", "self_attn", "self_attn.o_proj", ("qkv_proj",), joined="parts",
        norm="input_layernorm", direct_head=True, gated=True, final_norm="norm",
    ),
    "qwen3": _WITHOUT_CLOSED_FORM,
    **dict.fromkeys(("gemma2", "gemma3_text"), replace(_WITHOUT_CLOSED_FORM, residual=False)),
    **dict.fromkeys(("vit", "deit"), Layout("layers", *_VIT, norm="layernorm_before")),
    "dinov2": Layout("encoder.layer", *_VIT, norm="norm1", residual=False),
}  # fmt: skip
"""The layout of each model type. Scores that are normalised (Qwen3, Gemma 3), capped (Gemma 2) or
disentangled (DeBERTa) have no closed form here."""

_T5 = {
    "encoder": Layout(
        "encoder.block", "layer.0.SelfAttention", "layer.0.SelfAttention.o", ("q", "k", "v"),
        norm="layer.0.layer_norm", memory="encoder.final_layer_norm",
    ),
    "decoder": Layout(
        "decoder.block", "layer.0.SelfAttention", "layer.0.SelfAttention.o", ("q", "k", "v"),
        norm="layer.0.layer_norm", direct_head=True, final_norm="decoder.final_layer_norm",
    ),
    "cross": Layout(
        "decoder.block", "layer.1.EncDecAttention", "layer.1.EncDecAttention.o",
        final_norm="decoder.final_layer_norm", direct_head=True,
    ),
}  # fmt: skip


def _bart(pre_norm: bool) -> dict[str, Layout]:
    """BART (Lewis et al. 2020) and related models, with norms before or after the sublayers."""
    names = ("self_attn", "self_attn.out_proj", ("q_proj", "k_proj", "v_proj"))
    encoder = Layout("encoder.layers", *names)
    decoder = Layout("decoder.layers", *names, direct_head=True)
    cross = Layout("decoder.layers", "encoder_attn", "encoder_attn.out_proj", direct_head=True)
    if not pre_norm:
        return {
            "encoder": replace(encoder, sum_norm="self_attn_layer_norm"),
            "decoder": replace(decoder, sum_norm="self_attn_layer_norm"),
            "cross": replace(cross, sum_norm="encoder_attn_layer_norm"),
        }
    return {
        "encoder": replace(encoder, norm="self_attn_layer_norm", memory="encoder.layer_norm"),
        "decoder": replace(decoder, norm="self_attn_layer_norm", final_norm="decoder.layer_norm"),
        "cross": replace(cross, final_norm="decoder.layer_norm"),
    }


PARTS: dict[str, dict[str, Layout]] = {
    "t5": _T5,
    "bart": _bart(pre_norm=False),
    "mbart": _bart(pre_norm=True),
    "whisper": {part: replace(layout, scales_queries=True) for part, layout in _bart(pre_norm=True).items()},
}
"""The layouts of encoder-decoder models by part: the encoder, the self-attention of the decoder, and the
cross attention of the decoder to the encoder's output."""

_EXPERTS = (
    "dbrx", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "jetmoe",
    "llama4", "llama4_text", "mixtral", "nllb-moe", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
    "switch_transformers",
)  # fmt: skip
IMAGES = {"vit": ("[CLS]",), "deit": ("[CLS]", "[DIST]"), "dinov2": ("[CLS]",)}
"""Vision models, with the labels of the tokens before the patches."""
ANY_SIZE = ("dinov2",)
"""Vision models that interpolate their position embeddings, and so read images of any size."""
AUDIO = ("whisper",)
"""Audio models: their encoder reads audio."""

REFUSED = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv"), "a model without attention"),
    **dict.fromkeys(("jamba", "qwen3_next"), "a model with blocks that have no attention"),
    **dict.fromkeys(_EXPERTS, "a mixture of experts, whose choice between them is not tested here"),
}
"""Model types that are refused, with the reason."""


def layout_for(config: Any, architecture: str | None = None, part: str | None = None) -> Layout:
    """The layout for a configuration.

    Args:
        config: The configuration.
        architecture: Name of the model's class. Default: ``None``, the class that the configuration names.
        part: The part of an encoder-decoder model.

    Raises:
        ValueError: If the model type is not supported, or a part is missing or unknown.
    """
    kind = getattr(config, "model_type", None)
    if kind is None:
        raise ValueError(
            "this is not supported, since it is no model of transformers: pass a name, a folder or a model "
            "of transformers, or use the class HiddenTokenAttribution, which takes any PyTorch model"
        )
    if kind in PARTS:
        return _layout_of_part(kind, architecture or _named_class(config), part)
    if part is not None:
        raise ValueError(f"{kind!r} has no parts: leave out --part, or part=")
    if kind in LAYOUTS:
        return LAYOUTS[kind]
    raise ValueError(
        f"model type {kind!r} is not supported"
        + (f", since it is {REFUSED[kind]}" if kind in REFUSED else "")
        + f": use one of {', '.join(sorted([*LAYOUTS, *PARTS]))}, or the class HiddenTokenAttribution, which "
        "takes any PyTorch model"
    )


def _layout_of_part(kind: str, architecture: str, part: str | None) -> Layout:
    if "EncoderModel" in architecture and part is None:
        part = "encoder"
    if part is None or part not in PARTS[kind]:
        raise ValueError(
            f"{kind!r} is an encoder and a decoder: name the part (--part, or part=), encoder, decoder "
            f"(its self-attention) or cross (its attention to the encoder), got {part}"
        )
    return PARTS[kind][part]


def _named_class(config: Any) -> str:
    names: list[str] = getattr(config, "architectures", None) or [""]
    return names[0]


def medium_of(config: Any) -> str:
    """What a model reads: ``"text"``, ``"image"`` or ``"audio"``."""
    kind = config.model_type
    return "image" if kind in IMAGES else "audio" if kind in AUDIO else "text"
