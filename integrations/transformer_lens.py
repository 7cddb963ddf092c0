"""Bridges of TransformerLens 4 as the core's model, and loading of any model by name, folder or object."""

from __future__ import annotations

import copy
import importlib
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Linear, Module
from transformer_lens.hook_points import HookPoint

from captum_hta.attention_jacobian import AttentionFactors
from captum_hta.forward_pass import Site
from captum_hta.integrations.hook_points import HookPointModel
from captum_hta.integrations.hooked import HookedModel
from captum_hta.integrations.layouts import PICTURES, SOUNDS, layout_for, linear_map, sum_norm
from captum_hta.integrations.loading import demo_path, load_pretrained, load_processor, load_tokenizer
from captum_hta.integrations.proof import Proof, is_untouched
from captum_hta.integrations.transformers import TransformersModel
from captum_hta.model import OutputProjection

if TYPE_CHECKING:  # TransformerLens has bridges since its version 4
    from transformer_lens.model_bridge import TransformerBridge

HOOKS = {"head": "blocks.{}.attn.hook_z", "layer": "blocks.{}.hook_out"}

_POST_NORM = ("BertForMaskedLM", "BertLMHeadModel", "RobertaForMaskedLM")
"""Architectures whose projections read the block's input itself, so that the closed form is known."""


_BY_BRIDGE = (*_POST_NORM, "BertModel", "RobertaModel")
"""Classes that are bridged by default; those with other heads would lose them."""


class TransformerLensModel(HookPointModel):
    """A TransformerLens bridge as the model that the core works with.

    The bridge is used as it is: hooks that are active on it act on the result. On creation the adapter
    proves itself on a few tokens: shapes, that ``hook_z`` is what the output projection reads, that
    patterns sum to 1, that a change at the source changes the target, and that the closed form agrees
    with autograd (else the general ways are taken, with a warning).

    Args:
        bridge: A ``TransformerBridge`` in eval mode, with eager attention.
        tokenizer: Its tokenizer. Default: ``None``, the bridge's own.
        name: What to call the model. Default: ``None``, its name in the bridge's configuration.

    Raises:
        TypeError: If ``bridge`` is no bridge.
        ValueError: If there is no tokenizer, or the proof fails.
    """

    kind = "bridge"
    factor_hooks: ClassVar = {"x": "hook_in", "q": "attn.hook_q", "k": "attn.hook_k", "v": "attn.hook_v"}

    def __init__(self, bridge: TransformerBridge, tokenizer: Any = None, name: str | None = None) -> None:
        if not is_bridge(bridge):
            raise TypeError(
                f"bridge must be a TransformerBridge, got {type(bridge).__name__}: use load_model for "
                "names, folders and transformers models"
            )
        vocabulary = bridge.original_model.get_input_embeddings().weight.shape[0]
        super().__init__(bridge, tokenizer, name, vocabulary)

    @property
    def bridge(self) -> TransformerBridge:
        """The bridge."""
        return self.lens

    def _run(self, wanted: str | None, ids: Tensor, mask: Tensor | None, segments: Tensor | None) -> Any:
        """Run the bridge, for its ``"logits"`` or for nothing."""
        options = {} if segments is None or not self._has_segments else {"token_type_ids": segments}
        return self.bridge(ids, attention_mask=mask, return_type=wanted, **options)

    @property
    def _has_segments(self) -> bool:
        config = getattr(self.bridge.original_model, "config", None)
        return getattr(config, "type_vocab_size", 0) > 1

    def source(self, layer: int) -> Module:
        """The hook point whose value enters block ``layer``."""
        return self.hook_point(f"blocks.{layer}.hook_in")

    def target(self, layer: int, kind: str = "head") -> Module:
        """The hook point of the ``"head"`` or ``"layer"`` target of block ``layer``."""
        return self.hook_point(HOOKS[kind].format(layer))

    def _may_have_closed_form(self) -> bool:
        return self._is_encoder

    def _factors(self, layer: int, pattern: Tensor, seen: dict[str, Tensor]) -> AttentionFactors:
        """The closed form's view of a post-LN block: projections read the block's input itself."""

        def weight(name: str) -> Tensor:
            linear = getattr(self.bridge.blocks[layer].attn, name)
            return linear.weight.detach().unflatten(0, (self.num_heads, self.d_head))

        return AttentionFactors(
            pattern=pattern,
            query=self._split(seen["q"]),
            key=self._split(seen["k"]),
            value=self._split(seen["v"]),
            scale=self.d_head**-0.5,
            x=seen["x"],
            query_weight=weight("q"),
            key_weight=weight("k"),
            value_weight=weight("v"),
        )

    def output_projection(self, layer: int) -> OutputProjection:
        """What becomes of the heads' outputs of block ``layer``."""
        block = self.bridge.blocks[layer]
        width = self.num_heads * self.d_head
        weight, bias = linear_map(block.attn.o.original_component, width, self.device, self.dtype)
        return OutputProjection(
            weight.unflatten(0, (self.num_heads, self.d_head)),
            bias,
            sum_norm(block.ln1.original_component) if self._is_encoder else None,
            not hasattr(block, "ln1_post"),
        )

    @property
    def _is_encoder(self) -> bool:
        return self.architecture in _POST_NORM

    @property
    def _unembedding_weight(self) -> Tensor:
        return self.bridge.unembed.original_component.weight.detach()

    def _unhooked(self, layer: int) -> bool:
        """Whether no hook but the bridge's own may change what a block's attention computes."""
        block = self.bridge.blocks[layer]
        within = (block, block.original_component, block.hook_in, *block.attn.modules())
        points = [module for module in within if isinstance(module, HookPoint)]
        parts = [module for module in within if not isinstance(module, HookPoint)]
        plain = all(type(block.attn.get_submodule(name).original_component) is Linear for name in "qkv")
        return plain and is_untouched(parts, ("transformer_lens",)) and is_untouched(points, ())

    def _run_proof(self, proof: Proof) -> None:
        block = self.bridge.blocks[proof.layer]
        proof.run(
            {
                "source": Site(block.original_component, at_input=True),
                "head": Site(block.attn.o.original_component, at_input=True),
            }
        )


def is_bridge(model: Any) -> bool:
    """Whether a model is a ``TransformerBridge``, by what it has."""
    return all(hasattr(model, name) for name in ("hook_dict", "cfg", "original_model"))


# --- loading ---------------------------------------------------------------------------------------


def load_model(
    model: str | Path | Module | None = None,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    adapter: str | None = None,
    part: str | None = None,
    **options: Any,
) -> TransformerLensModel | HookedModel | TransformersModel:
    """Load a model: a BERT or RoBERTa, bare or a masked language model, through TransformerLens; others as
    ``transformers`` has them.

    Args:
        model: A name on the Hugging Face hub, a folder, a model of ``transformers`` (with its
            ``tokenizer``), or one of TransformerLens, which is used as it is: a ``TransformerBridge``, a
            ``HookedTransformer`` or a ``HookedEncoder``. Default: ``None``, the demo model (a real 6-layer
            BERT, all-MiniLM-L6-v2) of the extra ``captum-hta[demo]``. A model of ``transformers`` is not
            changed: what is used is a copy in eval mode that shares its weights.
        tokenizer: Its tokenizer, or for a model of pictures or sounds its processor. Default: ``None``, the
            one saved with the model. Without a processor, pictures are arrays of pixel values.
        device: Where to run. Default: ``None``, where the model is.
        dtype: Of the weights. Default: ``None``, as they are.
        adapter: Force ``"transformer_lens"``, for its hook points, or ``"transformers"``, which knows the
            closed form of more families. Default: ``None``, as above; with TransformerLens before its
            version 4, whose bridges are not used, always ``"transformers"``.
        part: Of an encoder-decoder, ``"encoder"``, ``"decoder"`` or ``"cross"``; see
            :class:`captum_hta.integrations.transformers.TransformersModel`.
        options: Passed to ``from_pretrained``, such as ``revision``, ``gguf_file`` or ``device_map``.

    Returns:
        The model, ready for :func:`captum_hta.contributions`.

    Raises:
        ValueError: If the model cannot be found, is of an architecture that is not supported, lacks a
            tokenizer, or fails the checks of :class:`TransformerLensModel`.
        ModuleNotFoundError: If the demo model is asked for and not installed, or a bridge of a
            TransformerLens that has none.

    Example:
        >>> load_model().num_layers
        6
    """
    if adapter not in (None, "transformer_lens", "transformers"):
        raise ValueError(f"adapter must be 'transformer_lens', 'transformers' or None, got {adapter!r}")
    if hasattr(model, "hook_dict"):
        _refuse_changes(device, dtype)
        return TransformerLensModel(model, tokenizer) if is_bridge(model) else HookedModel(model, tokenizer)
    if not isinstance(model, Module):
        path = demo_path() if model is None else str(model)
        loaded = load_pretrained(path, lambda config: layout_for(config, part=part), **options)
        if tokenizer is None:
            medium = medium_of(loaded)
            if medium == "text":
                tokenizer = load_tokenizer(path, **options)
            else:
                tokenizer = load_processor(path, medium, **options)
        name = "all-MiniLM-L6-v2" if model is None else Path(options.get("gguf_file") or path).name
    else:
        if options:
            raise ValueError(f"a model object is loaded already: leave out {', '.join(options)}")
        layout_for(getattr(model, "config", None), type(model).__name__, part)
        loaded = _copy(model, shares_weights=device is None and dtype is None)
        name = Path(getattr(model, "name_or_path", "") or type(model).__name__).name
    if tokenizer is None and medium_of(loaded) == "text":
        raise ValueError("a model object carries no tokenizer: pass tokenizer=")
    loaded = loaded.to(device=device, dtype=dtype).eval()
    if adapter is None and type(loaded).__name__ in _BY_BRIDGE and has_bridges():
        adapter = "transformer_lens"
    if adapter == "transformer_lens":
        if part is not None:
            raise ValueError("the adapter of TransformerLens knows no parts: leave out adapter")
        if medium_of(loaded) != "text":
            raise ValueError(
                f"the adapter of TransformerLens reads texts, and {type(loaded).__name__} "
                f"{medium_of(loaded)}s: leave out adapter"
            )
        return TransformerLensModel(_bridges().bridge(loaded, name), tokenizer, name)
    return TransformersModel(loaded, tokenizer, name, part)


def has_bridges() -> bool:
    """Whether the installed TransformerLens has the bridges that this package works with."""
    return int(metadata.version("transformer-lens").partition(".")[0]) >= 4


def _bridges() -> ModuleType:
    """The module that builds bridges.

    Raises:
        ModuleNotFoundError: If TransformerLens is of a version without them.
    """
    if not has_bridges():
        raise ModuleNotFoundError(
            f"TransformerLens {metadata.version('transformer-lens')} has no bridges that fit: install "
            "transformer-lens>=4.3, leave out adapter, or pass a HookedTransformer"
        )
    return importlib.import_module("captum_hta.integrations.bridges")


def medium_of(model: Module) -> str:
    """What it reads; but for texts, a processor is optional."""
    kind = model.config.model_type
    return "picture" if kind in PICTURES else "sound" if kind in SOUNDS else "text"


def _refuse_changes(device: Any, dtype: Any) -> None:
    if device is not None or dtype is not None:
        raise ValueError(
            "a model of TransformerLens is used as it is: move or cast it before, without device or dtype"
        )


def _copy(model: Module, shares_weights: bool) -> Module:
    """A copy of the modules and the configuration, on the same parameters where they are to stay."""
    tensors = (*model.parameters(), *model.buffers()) if shares_weights else ()
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
