"""Hidden Token Attribution for transformers: how much of each token is in each attention head's output."""

from captum_hta.attribution import HiddenTokenAttribution
from captum_hta.contributions import Contributions, contributions
from captum_hta.plan import Plan, Work, plan

__version__ = "0.1.0"
__all__ = [
    "Contributions",
    "HiddenTokenAttribution",
    "Plan",
    "Work",
    "contributions",
    "plan",
]
