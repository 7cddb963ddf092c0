"""Adapters between model libraries and the core of ``captum_hta``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from captum_hta.integrations.loading import load_model
    from captum_hta.integrations.transformer_lens.adapter import TransformerLensModel
    from captum_hta.integrations.transformer_lens.head_detection import head_scores
    from captum_hta.integrations.transformer_lens.hooked import HookedModel
    from captum_hta.integrations.transformers.adapter import TransformersModel

__all__ = ["HookedModel", "TransformerLensModel", "TransformersModel", "head_scores", "load_model"]

_HOMES = {
    "HookedModel": "transformer_lens.hooked",
    "TransformerLensModel": "transformer_lens.adapter",
    "TransformersModel": "transformers.adapter",
    "head_scores": "transformer_lens.head_detection",
    "load_model": "loading",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use: ``transformers`` and TransformerLens take seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
