"""Models of ``transformers``, without TransformerLens."""

from captum_hta.integrations.transformers.adapter import TransformersModel

__all__ = ["TransformersModel"]
