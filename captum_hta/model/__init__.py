"""What the core knows of a model: the protocol that adapters implement, and its data types."""

from captum_hta.model.attention import (
    Attention,
    AttentionFactors,
    OutputProjection,
    SumNorm,
    TokenNorm,
    Unembedding,
)
from captum_hta.model.encoding import Batch, Encoding, Text
from captum_hta.model.protocol import Check, Model, Reader
from captum_hta.model.sites import Site
from captum_hta.model.size import Size

__all__ = [
    "Attention",
    "AttentionFactors",
    "Batch",
    "Check",
    "Encoding",
    "Model",
    "OutputProjection",
    "Reader",
    "Site",
    "Size",
    "SumNorm",
    "Text",
    "TokenNorm",
    "Unembedding",
]
