"""Hidden Token Attribution: how much of each token is in what each attention head of a transformer says."""

from captum_hta.attribution import HiddenTokenAttribution
from captum_hta.comparison import compare
from captum_hta.contributions import Contributions, contributions
from captum_hta.direction import logit_direction
from captum_hta.faithfulness import faithfulness
from captum_hta.forecast import Size, forecast
from captum_hta.plan import Plan, Work, plan
from captum_hta.study_folder import open_study

__version__ = "0.1.0"
__all__ = [
    "Contributions",
    "HiddenTokenAttribution",
    "Plan",
    "Size",
    "Work",
    "compare",
    "contributions",
    "faithfulness",
    "forecast",
    "logit_direction",
    "open_study",
    "plan",
]
