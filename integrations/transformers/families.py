"""What the structure of a model does not tell: overrides for some model types of ``transformers``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Override:
    """What is known of a model type beforehand.

    Attributes:
        labels: Of vision models, the labels of the tokens before the patches.
    """

    labels: tuple[str, ...] = ()


OVERRIDES = {"deit": Override(labels=("[CLS]", "[DIST]"))}
"""What is known of some model types."""


def override_for(config: Any) -> Override:
    """What is known of the model type of a configuration."""
    return OVERRIDES.get(getattr(config, "model_type", ""), Override())
