"""Adapters between model libraries and the core of ``captum_hta``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from captum_hta.integrations.loading import load_model

__all__ = ["load_model"]


def __getattr__(name: str) -> object:
    """Import the loading of models on first use, and with it ``transformers`` and TransformerLens."""
    if name == "load_model":
        from captum_hta.integrations.loading import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
