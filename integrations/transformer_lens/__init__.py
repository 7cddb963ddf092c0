"""Models of TransformerLens: bridges of version 4, and the hooked classes of versions 2 and 3."""

from captum_hta.integrations.transformer_lens.adapter import TransformerLensModel
from captum_hta.integrations.transformer_lens.hooked import HookedModel

__all__ = ["HookedModel", "TransformerLensModel"]
