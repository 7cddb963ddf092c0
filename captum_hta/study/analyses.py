"""The list of all analyses, to which a new one is added."""

from captum_hta.study.analysis import Analysis
from captum_hta.study.correlations import Correlations
from captum_hta.study.effective_attention import EffectiveCorrelation
from captum_hta.study.errors import ProbeErrors
from captum_hta.study.hidden_tokens import Mixing
from captum_hta.study.identifiability import Identifiability
from captum_hta.study.patterns import Patterns
from captum_hta.study.positions import RelativePositions
from captum_hta.study.sinks import Sinks

ANALYSES: tuple[type[Analysis], ...] = (
    Correlations,
    RelativePositions,
    ProbeErrors,
    Mixing,
    Patterns,
    Sinks,
    EffectiveCorrelation,
    Identifiability,
)
