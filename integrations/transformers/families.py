"""What the structure of a model does not tell: overrides for some model types of ``transformers``."""

from __future__ import annotations

from typing import Any

from captum_hta.integrations.transformers.layouts import Layout

_LLAMA = Layout(("q_proj", "k_proj", "v_proj"), norm="input_layernorm")
_BART = Layout(("q_proj", "k_proj", "v_proj"))

LAYOUTS: dict[str, Layout] = {
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "electra", "albert"), Layout(("query", "key", "value"))
    ),
    "distilbert": Layout(("q_lin", "k_lin", "v_lin")),
    "gpt2": Layout(("c_attn",), "parts", "ln_1"),
    "gpt_neox": Layout(("query_key_value",), "heads", "input_layernorm"),
    **dict.fromkeys(("llama", "mistral", "qwen2", "phi"), _LLAMA),
    "gemma": Layout(_LLAMA.projections, norm="input_layernorm", unit_offset=True),
    "phi3": Layout(("qkv_proj",), "parts", "input_layernorm"),
    **dict.fromkeys(("vit", "deit"), Layout(_LLAMA.projections, norm="layernorm_before")),
    "dinov2": Layout(_LLAMA.projections, norm="norm1"),
    "t5": Layout(("q", "k", "v"), norm="layer.0.layer_norm"),
    "bart": _BART,
    "mbart": Layout(_BART.projections, norm="self_attn_layer_norm"),
    "whisper": Layout(_BART.projections, norm="self_attn_layer_norm", scales_queries=True),
}
"""How the attention of some model types computes queries, keys and values."""

IMAGES = {"vit": ("[CLS]",), "deit": ("[CLS]", "[DIST]"), "dinov2": ("[CLS]",)}
"""Vision models, with the labels of the tokens before the patches."""


def layout_of(config: Any) -> Layout:
    """The layout of the attention of a model type; without one there is no closed form."""
    return LAYOUTS.get(getattr(config, "model_type", ""), Layout())
