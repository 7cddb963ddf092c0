"""TransformerLens 4 bridges on models of ``transformers``: the only module that imports what builds them."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module

MASKED_LM = {"bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM"}
"""For each ``model_type`` of encoders that are bridged the class whose layout the bridge knows."""
_BRIDGED = {"BertForMaskedLM", "BertLMHeadModel", "RobertaForMaskedLM"}
"""Classes that the bridge takes as they are."""
_HEAD_PARTS = ("mlm_head", "ln_final", "unembed")
"""Parts of the bridge's layout that only a masked-language-model head has."""


def bridge(model: Module, name: str) -> TransformerBridge:
    """A bridge on ``model``, whose modules it replaces."""
    model.set_attn_implementation("eager")
    kind = model.config.model_type
    architecture = type(model).__name__
    if architecture not in _BRIDGED:
        architecture = MASKED_LM.get(kind, architecture)
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
    if type(model).__name__ in _BRIDGED or kind not in MASKED_LM:
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
