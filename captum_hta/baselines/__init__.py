"""Methods that people use in place of contributions, on the same axes.

Each is an attribution object over a model: ``Baseline(model).attribute(texts)`` gives
``[batch, layer, head, query, key]``, without the axes that the method does not have, padded with NaN.
"""

from captum_hta.baselines.attention import AttentionWeights, EffectiveAttention
from captum_hta.baselines.base import Baseline
from captum_hta.baselines.logits import (
    AttentionConductance,
    EmbeddingInputXGradient,
    EmbeddingIntegratedGradients,
    EmbeddingSaliency,
    GradientTimesAttention,
    IntegratedAttention,
)
from captum_hta.baselines.norms import BlockNorm, ValueNorm, ValueWeightedNorm
from captum_hta.baselines.routes import Alti, AttentionFlow, AttentionRollout
from captum_hta.baselines.scopes import JacobianScope
from captum_hta.baselines.zeroing import ValueZeroing

__all__ = [
    "Alti",
    "AttentionConductance",
    "AttentionFlow",
    "AttentionRollout",
    "AttentionWeights",
    "Baseline",
    "BlockNorm",
    "EffectiveAttention",
    "EmbeddingInputXGradient",
    "EmbeddingIntegratedGradients",
    "EmbeddingSaliency",
    "GradientTimesAttention",
    "IntegratedAttention",
    "JacobianScope",
    "ValueNorm",
    "ValueWeightedNorm",
    "ValueZeroing",
]
