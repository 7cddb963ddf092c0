"""Contributions compared with other methods, and all of them with how heads respond to changed tokens."""

from captum_hta.evaluation.comparison import Comparison, RankMatrix, compare, compare_methods
from captum_hta.evaluation.faithfulness import Faithfulness, default_interventions, faithfulness
from captum_hta.evaluation.interventions import (
    Intervention,
    MaskToken,
    MeanVector,
    Noise,
    OtherToken,
    ZeroVector,
)
from captum_hta.evaluation.methods import HtaMethod, Method, methods_for

__all__ = [
    "Comparison",
    "Faithfulness",
    "HtaMethod",
    "Intervention",
    "MaskToken",
    "MeanVector",
    "Method",
    "Noise",
    "OtherToken",
    "RankMatrix",
    "ZeroVector",
    "compare",
    "compare_methods",
    "default_interventions",
    "faithfulness",
    "methods_for",
]
