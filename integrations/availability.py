"""Which models TransformerLens is used for. Nothing here imports it, since that takes seconds."""

from __future__ import annotations

from importlib import metadata

BRIDGED = ("BertForMaskedLM", "BertLMHeadModel", "RobertaForMaskedLM")
"""Post-LN classes that TransformerLens bridges as they are."""
BRIDGED_BY_DEFAULT = (*BRIDGED, "BertModel", "RobertaModel")
"""Classes that ``load_model`` bridges; those with other heads would lose them."""


def is_bridge(model: object) -> bool:
    """Whether a model is a ``TransformerBridge``, judged by its attributes."""
    return all(hasattr(model, name) for name in ("hook_dict", "cfg", "original_model"))


def has_bridges() -> bool:
    """Whether the installed TransformerLens has the bridges that this package works with."""
    return int(metadata.version("transformer-lens").partition(".")[0]) >= 4


def require_bridges() -> None:
    """Raise a ``ModuleNotFoundError`` if the installed TransformerLens has no bridges."""
    if not has_bridges():
        raise ModuleNotFoundError(
            f"TransformerLens {metadata.version('transformer-lens')} has no bridges that fit: install "
            "transformer-lens>=4.3, leave out adapter, or pass a HookedTransformer"
        )
