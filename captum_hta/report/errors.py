"""What a page says about the accuracy of contributions."""

from __future__ import annotations

import numpy as np

from captum_hta.study.errors import ProbeErrors
from captum_hta.study.run import Study
from captum_hta.views.names import QUANTITY_NAMES


def accuracy(study: Study) -> list[str]:
    """Sentences about standard errors, and about tokens that are left out."""
    sentences = []
    for source, errors in study[ProbeErrors].summary().items():
        name = f"{QUANTITY_NAMES[source].capitalize()}s"
        if np.isfinite(errors["largest"]):
            sentences.append(
                f"{name} are estimates, with a standard error of {errors['mean']:.4f} on average and of at "
                f"most {errors['largest']:.4f}."
            )
        else:
            sentences.append(f"{name} are estimates from a single probe, whose error is not known.")
    sentences = sentences or ["All contributions are exact."]
    if study.exclude_special:
        sentences.append(
            "Special tokens are left out of all statistics except identifiability and effective attention."
        )
    return sentences
