"""Where the blocks, heads and projections are in the model classes of ``transformers``, by model type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers.pytorch_utils import Conv1D

from captum_hta.model.attention import SumNorm, TokenNorm


@dataclass(frozen=True)
class Layout:
    """The layout of one kind of model, relative to its base model and to a block.

    Attributes:
        blocks: The list of blocks.
        attention: The module of a block that computes attention.
        projection: The module of a block that mixes the outputs of its heads.
        projections: Within ``attention``, the modules that give queries, keys and values, or the one that
            gives them all; empty where the closed form is not known.
        joined: How one module gives all three: ``"parts"``, one after the other; ``"heads"``, the three of
            each head together.
        norm: The module of a block that normalises what the projections read; ``None`` in a post-LN block.
        unit_offset: Whether the norm's weight is stored as its distance from one.
        causal: Whether queries see no later keys.
        gated: Whether the feed-forward part has a gate.
        scales_queries: Whether queries are scaled by the ``scaling`` of ``attention`` when they are made, not
            when they meet keys.
        memory: Of an encoder, the module that gives what a decoder reads; ``None``: its last block.
        sum_norm: The module of a post-LN block that normalises the sum of its input and what its heads
            say; ``None`` in a pre-LN block.
        residual: Whether what heads say is added to the block's input as it is, without a norm or a scale.
        final_norm: The module of the base model behind its last block; ``None``: there is none.
    """

    blocks: str
    attention: str
    projection: str
    projections: tuple[str, ...] = ()
    joined: str = ""
    norm: str | None = None
    unit_offset: bool = False
    causal: bool = False
    gated: bool = False
    scales_queries: bool = False
    memory: str | None = None
    sum_norm: str | None = None
    residual: bool = True
    final_norm: str | None = None

    def places(self, base: Module) -> list[Place]:
        """The blocks of a model in the order in which it runs them."""
        return list(self._calls(base))

    def _calls(self, base: Module) -> Iterator[Place]:
        for block in base.get_submodule(self.blocks):
            yield Place(block, block.get_submodule(self.attention), block.get_submodule(self.projection))


@dataclass(frozen=True)
class SharedLayout(Layout):
    """ALBERT: groups of blocks that are run several times."""

    def _calls(self, base: Module) -> Iterator[Place]:
        groups = base.get_submodule(self.blocks)
        layers = base.config.num_hidden_layers
        calls: dict[Module, int] = {}
        for layer in range(layers):
            for block in groups[layer * len(groups) // layers].albert_layers:
                call = calls.get(block, 0)
                calls[block] = call + 1
                yield Place(
                    block, block.get_submodule(self.attention), block.get_submodule(self.projection), call
                )


@dataclass(frozen=True)
class Place:
    """One block as a model runs it.

    Attributes:
        block: The block.
        attention: Its attention.
        projection: Its output projection.
        call: Which call of the block, where it is run several times.
    """

    block: Module
    attention: Module
    projection: Module
    call: int | None = field(default=None)


_BERT = Layout(
    "encoder.layer",
    "attention.self",
    "attention.output.dense",
    ("query", "key", "value"),
    sum_norm="attention.output.LayerNorm",
)  # post-LN, as of Devlin et al. 2019
_LLAMA = Layout(
    "layers", "self_attn", "self_attn.o_proj", ("q_proj", "k_proj", "v_proj"),
    norm="input_layernorm", causal=True, gated=True, final_norm="norm",
)  # fmt: skip
_WITHOUT_CLOSED_FORM = Layout(
    "layers", "self_attn", "self_attn.o_proj", causal=True, gated=True, final_norm="norm"
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
        "h", "attn", "attn.c_proj", ("c_attn",), joined="parts", norm="ln_1", causal=True,
        final_norm="ln_f",
    ),
    "gpt_neox": Layout(
        "layers", "attention", "attention.dense", ("query_key_value",), joined="heads",
        norm="input_layernorm", causal=True, final_norm="final_layer_norm",
    ),
    **dict.fromkeys(("llama", "mistral", "qwen2"), _LLAMA),
    "gemma": Layout(
        "layers", "self_attn", "self_attn.o_proj", ("q_proj", "k_proj", "v_proj"),
        norm="input_layernorm", unit_offset=True, causal=True, gated=True, final_norm="norm",
    ),
    "phi": Layout(
        "layers", "self_attn", "self_attn.dense", ("q_proj", "k_proj", "v_proj"),
        norm="input_layernorm", causal=True, final_norm="final_layernorm",
    ),
    "phi3": Layout(
        "layers", "self_attn", "self_attn.o_proj", ("qkv_proj",), joined="parts",
        norm="input_layernorm", causal=True, gated=True, final_norm="norm",
    ),
    "qwen3": _WITHOUT_CLOSED_FORM,
    **dict.fromkeys(("gemma2", "gemma3_text"), replace(_WITHOUT_CLOSED_FORM, residual=False)),
    **dict.fromkeys(("vit", "deit"), Layout("layers", *_VIT, norm="layernorm_before")),
    "dinov2": Layout("encoder.layer", *_VIT, norm="norm1", residual=False),
}  # fmt: skip
"""Model types with their layouts. Scores that are normalised (Qwen3, Gemma 3), capped (Gemma 2) or
disentangled (DeBERTa) have no closed form here."""

_T5 = {
    "encoder": Layout(
        "encoder.block", "layer.0.SelfAttention", "layer.0.SelfAttention.o", ("q", "k", "v"),
        norm="layer.0.layer_norm", memory="encoder.final_layer_norm",
    ),
    "decoder": Layout(
        "decoder.block", "layer.0.SelfAttention", "layer.0.SelfAttention.o", ("q", "k", "v"),
        norm="layer.0.layer_norm", causal=True, final_norm="decoder.final_layer_norm",
    ),
    "cross": Layout(
        "decoder.block", "layer.1.EncDecAttention", "layer.1.EncDecAttention.o",
        final_norm="decoder.final_layer_norm",
    ),
}  # fmt: skip


def _bart(pre_norm: bool) -> dict[str, Layout]:
    """Of Lewis et al. 2020 and its kin, with norms before or behind the sublayers."""
    names = ("self_attn", "self_attn.out_proj", ("q_proj", "k_proj", "v_proj"))
    cross = ("encoder_attn", "encoder_attn.out_proj")
    if not pre_norm:
        norm = {"sum_norm": "self_attn_layer_norm"}
        return {
            "encoder": Layout("encoder.layers", *names, **norm),
            "decoder": Layout("decoder.layers", *names, causal=True, **norm),
            "cross": Layout("decoder.layers", *cross, sum_norm="encoder_attn_layer_norm"),
        }
    norm, last = {"norm": "self_attn_layer_norm"}, "decoder.layer_norm"
    return {
        "encoder": Layout("encoder.layers", *names, memory="encoder.layer_norm", **norm),
        "decoder": Layout("decoder.layers", *names, causal=True, final_norm=last, **norm),
        "cross": Layout("decoder.layers", *cross, final_norm=last),
    }


PARTS: dict[str, dict[str, Layout]] = {
    "t5": _T5,
    "bart": _bart(pre_norm=False),
    "mbart": _bart(pre_norm=True),
    "whisper": {part: replace(layout, scales_queries=True) for part, layout in _bart(pre_norm=True).items()},
}
"""The same for the parts of an encoder-decoder: its encoder, the self-attention of its decoder, and the cross
attention of its decoder to what the encoder gives."""

_EXPERTS = (
    "dbrx", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "jetmoe",
    "llama4", "llama4_text", "mixtral", "nllb-moe", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
    "switch_transformers",
)  # fmt: skip
IMAGES = {"vit": ("[CLS]",), "deit": ("[CLS]", "[DIST]"), "dinov2": ("[CLS]",)}
"""Model types that read images, with the labels of the tokens that come before the patches."""
ANY_SIZE = ("dinov2",)
"""Those that segment their positions to images of any size."""
AUDIO = ("whisper",)
"""Model types whose encoder reads audio."""

REFUSED = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv"), "a model without attention"),
    **dict.fromkeys(("jamba", "qwen3_next"), "a model with blocks that have no attention"),
    **dict.fromkeys(_EXPERTS, "a mixture of experts, whose choice between them is not tested here"),
}
"""Model types that are refused, with the reason."""


def layout_for(config: Any, architecture: str | None = None, part: str | None = None) -> Layout:
    """The layout of models with a configuration.

    Args:
        config: The configuration.
        architecture: Name of the model's class. Default: ``None``, as the configuration has it.
        part: Of an encoder-decoder, which part is meant.

    Raises:
        ValueError: If that kind of model is not supported, or the part is not named or is none.
    """
    kind = getattr(config, "model_type", None)
    if kind is None:
        raise ValueError(
            "this is not supported, since it is no model of transformers: pass a name, a folder or a model "
            "of transformers, or use the class HiddenTokenAttribution, which takes any PyTorch model"
        )
    architecture = architecture or (getattr(config, "architectures", None) or [""])[0]
    if kind in PARTS:
        if "EncoderModel" in architecture and part is None:
            part = "encoder"
        if part not in PARTS[kind]:
            raise ValueError(
                f"{kind!r} is an encoder and a decoder: name the part (--part, or part=), encoder, decoder "
                f"(its self-attention) or cross (its attention to the encoder), got {part}"
            )
        return PARTS[kind][part]
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


def split_weights(layout: Layout, attention: Module, heads: int, key_heads: int, width: int) -> list[Tensor]:
    """The weights ``[head, d_head, width]`` of queries, keys and values.

    Args:
        layout: The layout.
        attention: A block's attention.
        heads: Heads of queries.
        key_heads: Heads of keys and values, each repeated for its group of queries.
        width: Width of a head.
    """
    weights = [matrix(attention.get_submodule(name)) for name in layout.projections]
    if layout.joined == "parts":
        sizes = [heads * width, key_heads * width, key_heads * width]
        weights = list(weights[0].split(sizes))
    elif layout.joined == "heads":
        weights = [part.flatten(0, 1) for part in weights[0].unflatten(0, (heads, 3, width)).unbind(1)]
    return [repeated(weight.unflatten(0, (-1, width)), heads, 0) for weight in weights]


def knows_projections(layout: Layout, attention: Module) -> bool:
    """Whether queries, keys and values are given by plain matrices, and not by what wraps them."""
    return all(type(attention.get_submodule(name)) in _PLAIN for name in layout.projections)


_PLAIN = (torch.nn.Linear, Conv1D)


def inner_width(projection: Module, config: Any) -> int:
    """The width of what an output projection reads."""
    if type(projection) in _PLAIN:
        return matrix(projection).shape[1]
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or config.hidden_size // heads
    return getattr(projection, "in_features", heads * width)


def linear_map(
    module: Module, width: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The matrix ``[in, out]`` and the bias ``[out]`` of a module; of what wraps one or is stored otherwise,
    by what it does to a basis.
    """
    if type(module) in _PLAIN:
        bias = module.bias
        return matrix(module).T, None if bias is None else bias.detach()
    basis = torch.eye(width, device=device, dtype=dtype)
    with torch.no_grad():
        bias = module(torch.zeros_like(basis[:1])[None])[0, 0]
        return module(basis[None])[0] - bias, bias


def matrix(module: Any) -> Tensor:
    """``[out, in]``: GPT-2's ``Conv1D`` keeps its weight the other way round."""
    weight = module.weight.detach()
    return weight if isinstance(module, torch.nn.Linear) else weight.T


def repeated(value: Tensor, heads: int, dim: int) -> Tensor:
    """Grouped heads, once for each query head."""
    return value.repeat_interleave(heads // value.shape[dim], dim)


def sum_norm(norm: Module) -> SumNorm:
    """A LayerNorm of ``torch`` in the core's words."""
    return SumNorm(norm.weight.detach(), norm.bias.detach(), _eps(norm))


def _eps(norm: Module) -> float:
    return norm.eps if hasattr(norm, "eps") else norm.variance_epsilon


def token_norm(layout: Layout, block: Module, x: Tensor) -> TokenNorm | None:
    """The normalisation of a block's input, or ``None`` in a post-LN block.

    Args:
        layout: The layout.
        block: A block.
        x: What enters it, ``[batch, token, width]``.
    """
    if layout.norm is None:
        return None
    norm = block.get_submodule(layout.norm)
    weight = norm.weight.detach()
    return normalised(
        x,
        1 + weight if layout.unit_offset else weight,
        _eps(norm),
        centred=isinstance(norm, torch.nn.LayerNorm),
    )


def normalised(x: Tensor, weight: Tensor, eps: float, centred: bool) -> TokenNorm:
    """The normalisation at ``x``.

    Args:
        x: What is normalised, ``[batch, token, width]``.
        weight: ``[width]``.
        eps: Added to the variance.
        centred: Whether the mean is removed (LayerNorm).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    inverse = (wide.square().mean(-1) + eps).rsqrt()
    return TokenNorm(normalised=wide * inverse[..., None], inverse=inverse, weight=weight, centred=centred)
