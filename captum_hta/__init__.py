"""Hidden Token Attribution: how much of each token is in the output of each attention head."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from captum_hta.attribution import HiddenTokenAttribution
    from captum_hta.computation import contributions
    from captum_hta.effects import HeadEffects, head_effects
    from captum_hta.evaluation.comparison import compare
    from captum_hta.evaluation.faithfulness import faithfulness
    from captum_hta.integrations import load_model
    from captum_hta.jacobian.forecast import forecast
    from captum_hta.jacobian.plan import Costs, Plan, plan
    from captum_hta.jacobian.target_directions import logit_direction
    from captum_hta.model.size import Size
    from captum_hta.result import Contributions
    from captum_hta.study.folder import open_study

__version__ = "0.1.0"
__all__ = [
    "Contributions",
    "Costs",
    "HeadEffects",
    "HiddenTokenAttribution",
    "Plan",
    "Size",
    "compare",
    "contributions",
    "faithfulness",
    "forecast",
    "head_effects",
    "load_model",
    "logit_direction",
    "open_study",
    "plan",
]

_HOMES = {
    "contributions": "captum_hta.computation",
    "Contributions": "captum_hta.result",
    "Costs": "captum_hta.jacobian.plan",
    "HeadEffects": "captum_hta.effects",
    "HiddenTokenAttribution": "captum_hta.attribution",
    "Plan": "captum_hta.jacobian.plan",
    "Size": "captum_hta.model.size",
    "compare": "captum_hta.evaluation.comparison",
    "faithfulness": "captum_hta.evaluation.faithfulness",
    "forecast": "captum_hta.jacobian.forecast",
    "head_effects": "captum_hta.effects",
    "load_model": "captum_hta.integrations",
    "logit_direction": "captum_hta.jacobian.target_directions",
    "open_study": "captum_hta.study.folder",
    "plan": "captum_hta.jacobian.plan",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that the package and the command line start fast."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
