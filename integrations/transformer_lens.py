"""Models of TransformerLens 4: a bridge as the core's model, and loading by name, folder or model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module
from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module

from captum_hta.attention_jacobian import AttentionFactors
from captum_hta.forecast import Size
from captum_hta.forward_pass import Site, observed
from captum_hta.integrations.layouts import PICTURES, SOUNDS, layout_for
from captum_hta.integrations.loading import demo_path, load_pretrained, load_processor, load_tokenizer
from captum_hta.integrations.proof import Proof, is_untouched, require_eval, require_weights
from captum_hta.integrations.texts import TextReader
from captum_hta.integrations.transformers import TransformersModel
from captum_hta.model import Attention, Batch, Check, Encoding, Text

HOOKS = {"head": "blocks.{}.attn.hook_z", "layer": "blocks.{}.hook_out"}

_MASKED_LM = {"bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM"}
"""For each supported ``model_type`` the class whose layout the bridge knows."""
_BRIDGED = {"BertForMaskedLM", "BertLMHeadModel", "RobertaForMaskedLM"}
"""Classes that the bridge takes as they are."""
_HEAD_PARTS = ("mlm_head", "ln_final", "unembed")
"""Parts of the bridge's layout that only a masked-language-model head has."""
_POST_NORM = ("BertForMaskedLM", "BertLMHeadModel", "RobertaForMaskedLM")
"""Architectures whose projections read the block's input itself, so that the closed form is known."""


class TransformerLensModel:
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

    key_layers: int | None = None

    def __init__(self, bridge: TransformerBridge, tokenizer: Any = None, name: str | None = None) -> None:
        if not hasattr(bridge, "hook_dict") or not hasattr(bridge, "cfg"):
            raise TypeError(
                f"bridge must be a TransformerBridge, got {type(bridge).__name__}: use load_model for "
                "names, folders and transformers models"
            )
        self.bridge = bridge
        tokenizer = tokenizer if tokenizer is not None else getattr(bridge, "tokenizer", None)
        if tokenizer is None:
            raise ValueError("the bridge has no tokenizer: pass tokenizer=")
        self.reader = TextReader(tokenizer, _vocabulary(bridge))
        self.architecture = str(getattr(bridge.cfg, "architecture", type(bridge).__name__))
        self.name = name or getattr(bridge.cfg, "model_name", self.architecture)
        self.num_layers = bridge.cfg.n_layers
        self.num_heads = bridge.cfg.n_heads
        self.d_head = bridge.cfg.d_head
        self.d_model = bridge.cfg.d_model
        self.max_length = getattr(bridge.cfg, "n_ctx", None)
        self._closed_form = self.architecture in _POST_NORM
        require_weights(self.name, bridge)
        self._require_eval()
        self.checks = self._proven()

    def __repr__(self) -> str:
        return f"TransformerLensModel({self.name}: {self.num_layers} layers of {self.num_heads} heads)"

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self.reader.tokenizer

    @property
    def device(self) -> torch.device:
        """Where the bridge runs."""
        return next(self.bridge.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the bridge's weights."""
        return next(self.bridge.parameters()).dtype

    @property
    def size(self) -> Size:
        """The bridge's dimensions."""
        return Size(
            layers=self.num_layers,
            heads=self.num_heads,
            width=self.d_model,
            inner=getattr(self.bridge.cfg, "d_mlp", None) or 4 * self.d_model,
            d_head=self.d_head,
            key_heads=getattr(self.bridge.cfg, "n_key_value_heads", None),
            gated=bool(getattr(self.bridge.cfg, "gated_mlp", False)),
            causal=self._causal,
            closed_form=self._closed_form,
        )

    # --- texts

    def encode(self, text: Text, max_length: int | None = None) -> Encoding:
        """Read a text, or a pair of them; with ``max_length`` the first tokens alone."""
        return self.reader.encode(text, max_length)

    def batch(self, encodings: Sequence[Encoding]) -> Batch:
        """Pad encodings on the right, on the model's device."""
        return self.reader.batch(encodings, self.device)

    # --- the model

    def forward(self, ids: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Any:
        """Run the bridge on token ids ``[batch, position]``."""
        options = {} if segments is None or not self._has_segments else {"token_type_ids": segments}
        return self.bridge(ids, attention_mask=mask, return_type=None, **options)

    @property
    def _has_segments(self) -> bool:
        config = getattr(self.bridge.original_model, "config", None)
        return getattr(config, "type_vocab_size", 0) > 1

    def hook_point(self, name: str) -> Module:
        """The hook point of that name, such as ``"blocks.3.attn.hook_z"``."""
        return self.bridge.hook_dict[name]

    def source(self, layer: int) -> Module:
        """The hook point whose value enters block ``layer``."""
        return self.hook_point(f"blocks.{layer}.hook_in")

    def target(self, layer: int, kind: str = "head") -> Module:
        """The hook point of the ``"head"`` or ``"layer"`` target of block ``layer``."""
        return self.hook_point(HOOKS[kind].format(layer))

    def attention(self, batch: Batch) -> list[Attention]:
        """What every layer's attention does, from one forward pass."""
        self._require_eval()
        wanted = ["attn.hook_pattern"]
        closed = [self._closed_form and self._unhooked(layer) for layer in range(self.num_layers)]
        if any(closed):
            wanted += ["hook_in", "attn.hook_q", "attn.hook_k", "attn.hook_v"]
        names = [f"blocks.{layer}.{name}" for layer in range(self.num_layers) for name in wanted]
        kept = self._observe(names, batch)
        return [self._attention(layer, kept, closed[layer]) for layer in range(self.num_layers)]

    def _attention(self, layer: int, kept: dict[str, Tensor], closed: bool) -> Attention:
        pattern = kept.get(f"blocks.{layer}.attn.hook_pattern")
        if pattern is None or pattern.dim() != 4:
            raise ValueError(
                f"{self.architecture} gives no attention pattern in block {layer}: it must run eager "
                'attention, as after model.set_attn_implementation("eager")'
            )
        return Attention(pattern, self._factors(layer, pattern, kept) if closed else None)

    def _factors(self, layer: int, pattern: Tensor, kept: dict[str, Tensor]) -> AttentionFactors:
        """The closed form's view of a post-LN block: projections read the block's input itself."""

        def split(name: str) -> Tensor:
            value = kept[f"blocks.{layer}.attn.hook_{name}"]
            return value.reshape(*value.shape[:2], self.num_heads, self.d_head).transpose(1, 2)

        def weight(name: str) -> Tensor:
            linear = getattr(self.bridge.blocks[layer].attn, name)
            return linear.weight.detach().unflatten(0, (self.num_heads, self.d_head))

        return AttentionFactors(
            pattern=pattern,
            query=split("q"),
            key=split("k"),
            value=split("v"),
            scale=self.d_head**-0.5,
            x=kept[f"blocks.{layer}.hook_in"],
            query_weight=weight("q"),
            key_weight=weight("k"),
            value_weight=weight("v"),
        )

    def _observe(self, names: Sequence[str], batch: Batch) -> dict[str, Tensor]:
        """The values of hook points in a forward pass."""
        modules = {name: self.hook_point(name) for name in names}
        return observed(modules, lambda: self.forward(*batch.inputs, *batch.extra))

    def _unhooked(self, layer: int) -> bool:
        """Whether no hook but the bridge's own may change what a block's attention computes."""
        block = self.bridge.blocks[layer]
        within = (block, block.original_component, block.hook_in, *block.attn.modules())
        points = [module for module in within if isinstance(module, HookPoint)]
        parts = [module for module in within if not isinstance(module, HookPoint)]
        plain = all(type(block.attn.get_submodule(name).original_component) is Linear for name in "qkv")
        return plain and is_untouched(parts, ("transformer_lens",)) and is_untouched(points, ())

    def _proven(self) -> list[Check]:
        """Check the adapter; give up the closed form if that alone does not hold."""
        proof = Proof(self, self.architecture, self.reader.sample())
        block = self.bridge.blocks[proof.layer]
        proof.run(
            {
                "source": Site(block.original_component, at_input=True),
                "head": Site(block.attn.o.original_component, at_input=True),
            }
        )
        if self._closed_form:
            self._closed_form = proof.closed_form_holds()
        self._causal = proof.is_causal()
        return proof.checks

    def _require_eval(self) -> None:
        require_eval(self.name, self.bridge)


def _vocabulary(bridge: TransformerBridge) -> int:
    """The number of token ids that a bridge embeds."""
    return bridge.original_model.get_input_embeddings().weight.shape[0]


# --- loading ---------------------------------------------------------------------------------------


def load_model(
    model: str | Path | Module | None = None,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    adapter: str | None = None,
    part: str | None = None,
    **options: Any,
) -> TransformerLensModel | TransformersModel:
    """Load a model: a BERT or RoBERTa through TransformerLens, others as ``transformers`` has them.

    Args:
        model: A name on the Hugging Face hub, a folder, a model of ``transformers`` (with its
            ``tokenizer``), or a ``TransformerBridge``. Default: ``None``, the demo model (a real 6-layer
            BERT, all-MiniLM-L6-v2) of the extra ``captum-hta[demo]``. A model that is passed in is not
            changed: what is used is a copy in eval mode that shares its weights.
        tokenizer: Its tokenizer, or for a model of pictures or sounds its processor. Default: ``None``, the
            one saved with the model. Without a processor, pictures are arrays of pixel values.
        device: Where to run. Default: ``None``, where the model is.
        dtype: Of the weights. Default: ``None``, as they are.
        adapter: Force ``"transformer_lens"``, for its hook points, or ``"transformers"``, which knows the
            closed form of more families. Default: ``None``, as above.
        part: Of an encoder-decoder, ``"encoder"``, ``"decoder"`` or ``"cross"``; see
            :class:`captum_hta.integrations.transformers.TransformersModel`.
        options: Passed to ``from_pretrained``, such as ``revision``, ``gguf_file`` or ``device_map``.

    Returns:
        The model, ready for :func:`captum_hta.contributions`.

    Raises:
        ValueError: If the model cannot be found, is of an architecture that is not supported, lacks a
            tokenizer, or fails the checks of :class:`TransformerLensModel`.
        ModuleNotFoundError: If the demo model is asked for and not installed.

    Example:
        >>> load_model().num_layers
        6
    """
    if adapter not in (None, "transformer_lens", "transformers"):
        raise ValueError(f"adapter must be 'transformer_lens', 'transformers' or None, got {adapter!r}")
    if isinstance(model, TransformerBridge):
        _refuse_changes(device, dtype)
        return TransformerLensModel(model, tokenizer)
    if not isinstance(model, Module):
        path = demo_path() if model is None else str(model)
        loaded = load_pretrained(path, lambda config: layout_for(config, part=part), **options)
        if tokenizer is None:
            medium = _medium(loaded)
            tokenizer = load_tokenizer(path) if medium == "text" else load_processor(path, medium)
        name = "all-MiniLM-L6-v2" if model is None else Path(path).name
    else:
        if options:
            raise ValueError(f"a model object is loaded already: leave out {', '.join(options)}")
        layout_for(getattr(model, "config", None), type(model).__name__, part)
        loaded = _copy(model, shares_weights=device is None and dtype is None)
        name = Path(getattr(model, "name_or_path", "") or type(model).__name__).name
    if tokenizer is None and _medium(loaded) == "text":
        raise ValueError("a model object carries no tokenizer: pass tokenizer=")
    loaded = loaded.to(device=device, dtype=dtype).eval()
    if adapter == "transformer_lens" or (adapter is None and loaded.config.model_type in _MASKED_LM):
        if part is not None:
            raise ValueError("the adapter of TransformerLens knows no parts: leave out adapter")
        return TransformerLensModel(_bridge(loaded, name), tokenizer, name)
    return TransformersModel(loaded, tokenizer, name, part)


def _medium(model: Module) -> str:
    """What it reads; but for texts, a processor is optional."""
    kind = model.config.model_type
    return "picture" if kind in PICTURES else "sound" if kind in SOUNDS else "text"


def _refuse_changes(device: Any, dtype: Any) -> None:
    if device is not None or dtype is not None:
        raise ValueError("a bridge is used as it is: move or cast it before, without device or dtype")


def _copy(model: Module, shares_weights: bool) -> Module:
    """A copy of the modules and the configuration, on the same parameters where they are to stay."""
    tensors = (*model.parameters(), *model.buffers()) if shares_weights else ()
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _bridge(model: Module, name: str) -> TransformerBridge:
    """A bridge on ``model``, whose modules it replaces."""
    kind = model.config.model_type
    architecture = type(model).__name__
    if _medium(model) != "text":
        raise ValueError(
            f"the adapter of TransformerLens reads texts, and {architecture} {_medium(model)}s: leave out "
            "adapter"
        )
    model.set_attn_implementation("eager")
    if architecture not in _BRIDGED:
        architecture = _MASKED_LM.get(kind, architecture)
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"TransformerLens does not bridge {architecture}: leave out adapter, which takes it as "
            "transformers has it, or pass a class that TransformerLens knows, such as a GPT2LMHeadModel"
        )
    return build_bridge_from_module(
        model,
        architecture,
        hf_config=model.config,
        model_name=name,
        post_adapter_hook=lambda adapter: _fit(adapter, model, kind),
    )


def _fit(adapter: Any, model: Module, kind: str) -> None:
    """Fit the layout of a masked language model to classes with another head, or none."""
    if type(model).__name__ in _BRIDGED or kind not in _MASKED_LM:
        return
    layout = adapter.component_mapping
    for part in _HEAD_PARTS:
        layout.pop(part, None)
    has_prefix = hasattr(model, kind)
    if not has_prefix:
        for component in layout.values():
            component.name = component.name.removeprefix(f"{kind}.")
    encoder = getattr(model, kind) if has_prefix else model
    adapter.prepare_model = lambda hf_model: _prepare(adapter, encoder, kind)


def _prepare(adapter: Any, encoder: Module, kind: str) -> None:
    """What the bridge's adapter reads off the model, for an encoder that may stand alone."""
    if kind == "roberta":
        table = encoder.embeddings.position_embeddings
        adapter.cfg.n_ctx = table.num_embeddings - (table.padding_idx or 0) - 1
