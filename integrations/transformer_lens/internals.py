"""The only uses of names of TransformerLens 4 that are not part of its documented interface.

- ``SUPPORTED_ARCHITECTURES`` and ``build_bridge_from_module``: ``boot_transformers`` needs a tokenizer and a
  name on the hub, and refuses bare models and classifiers.
- ``component_mapping``, ``prepare_model`` and ``cfg`` of an architecture adapter: its layout, which is fitted
  to models without the head of a masked language model.
- ``tokenizer_prepends_bos``, ``tokenizer_appends_eos`` and ``default_prepend_bos`` of a bridge's ``cfg``:
  what ``to_tokens`` does. TransformerLens's own setup loads the tokenizer again, from the hub, and changes
  it.
- ``original_component`` and ``original_model``: what a bridge wraps of ``transformers``, for its
  weights.
"""

from __future__ import annotations

import copy
from typing import Any

from torch.nn import Module
from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import PreTrainedModel

from captum_hta.integrations.availability import BRIDGED

_MASKED_LM = {"bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM"}
"""For each ``model_type`` the class whose layout serves all its classes."""
_HEAD_COMPONENTS = ("mlm_head", "ln_final", "unembed")
"""Components that only the head of a masked language model has."""


def build_bridge(model: PreTrainedModel, name: str, tokenizer: object) -> TransformerBridge:
    """Build a bridge on a model, whose submodules it replaces.

    Args:
        model: A model of ``transformers``.
        name: What to call it.
        tokenizer: Its tokenizer. The bridge gets a copy, and its ``to_tokens`` gives the same tokens.

    Raises:
        ValueError: If TransformerLens does not know the architecture.
    """
    model.set_attn_implementation("eager")
    kind: str = model.config.model_type
    architecture = type(model).__name__
    if architecture not in BRIDGED:
        architecture = _MASKED_LM.get(kind, architecture)
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"TransformerLens does not bridge {architecture}: leave out adapter, which takes it as "
            "transformers has it, or pass a class that TransformerLens knows, such as a GPT2LMHeadModel"
        )
    bridge = build_bridge_from_module(
        model,
        architecture,
        hf_config=model.config,
        model_name=name,
        post_adapter_hook=lambda adapter: _fit(adapter, model, kind),
    )
    _give_tokenizer(bridge, copy.deepcopy(tokenizer))
    return bridge


def _give_tokenizer(bridge: TransformerBridge, tokenizer: Any) -> None:
    """Set a bridge's tokenizer so that ``to_tokens`` gives the tokenizer's own tokens."""
    if getattr(tokenizer, "pad_token", "") is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token  # to_tokens pads, which an unpadded batch of one needs too
    bridge.tokenizer = tokenizer
    first = [getattr(tokenizer, name, None) for name in ("bos_token_id", "cls_token_id")]
    prepends = tokenizer("a")["input_ids"][0] in first
    bridge.cfg.tokenizer_prepends_bos = bridge.cfg.default_prepend_bos = prepends
    bridge.cfg.tokenizer_appends_eos = False  # otherwise to_tokens removes it


def wrapped_module(component: Any) -> Module:
    """The module of ``transformers`` that a component of a bridge wraps."""
    module: Module = component.original_component
    return module


def wrapped_model(bridge: TransformerBridge) -> Any:
    """The model of ``transformers`` that a bridge wraps."""
    return bridge.original_model


def _fit(adapter: Any, model: PreTrainedModel, kind: str) -> None:
    """Fit the layout of a masked language model to classes with another head, or none."""
    if type(model).__name__ in BRIDGED or kind not in _MASKED_LM:
        return
    layout = adapter.component_mapping
    for component in _HEAD_COMPONENTS:
        layout.pop(component, None)
    has_prefix = hasattr(model, kind)
    if not has_prefix:
        for component in layout.values():
            component.name = component.name.removeprefix(f"{kind}.")
    encoder = getattr(model, kind) if has_prefix else model
    adapter.prepare_model = lambda hf_model: _read_length(adapter, encoder, kind)


def _read_length(adapter: Any, encoder: Any, kind: str) -> None:
    """Set the number of positions, for an encoder that may stand alone."""
    if kind == "roberta":
        table = encoder.embeddings.position_embeddings
        adapter.cfg.n_ctx = table.num_embeddings - (table.padding_idx or 0) - 1
