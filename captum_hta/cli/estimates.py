"""What contributions will cost, and how accurate the estimates are, on the console."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from captum_hta.cli.console import say

if TYPE_CHECKING:
    from captum_hta.jacobian.plan import Plan
    from captum_hta.model.protocol import Model


def print_forecasts(
    model: Model,
    lengths: Sequence[int],
    layers: Sequence[int],
    norm: str,
    n_probes: int | None,
    tolerance: float | None,
    hidden: bool = False,
) -> None:
    """Print the modes that will be used and about what they will cost; cross attention has no forecast.

    Args:
        model: The model.
        lengths: Tokens of each text.
        layers: Layers of the targets.
        norm: Norm of the Jacobian.
        n_probes: Probes of each source token, ``None`` for an exact result or with a ``tolerance``.
        tolerance: Standard error at which to stop adding probes.
        hidden: Whether contributions to hidden embeddings are computed too.
    """
    if model.key_layers is not None:
        return
    from captum_hta.jacobian.forecast import forecast
    from captum_hta.jacobian.probes import FIRST_PROBES
    from captum_hta.study.settings import SOURCES

    if n_probes is None and tolerance is not None:
        n_probes = FIRST_PROBES
    for source in SOURCES:
        target = "layer" if hidden and source == "input" else "head"
        plans = [
            forecast(
                model.size, length, source=source, target=target, layers=layers, norm=norm,
                n_probes=n_probes, dtype=model.dtype, device=model.device,
            )
            for length in lengths
        ]  # fmt: skip
        at_least = tolerance is not None and plans[0].mode == "probes"
        print_plans(source, plans, " or more" if at_least else "")


def print_plans(source: str, plans: Iterable[Plan], more: str = "") -> None:
    """Print the modes of the contributions from a source, each with its cost in total."""
    from captum_hta.jacobian.forecast import in_all
    from captum_hta.views.names import QUANTITY_NAMES

    for plan in in_all(plans):
        say(f"{QUANTITY_NAMES[source]}: {plan}{more}", "dim")


def print_standard_error(source: str, mean: float, largest: float) -> None:
    """Print the standard errors of the contributions from a source."""
    from captum_hta.views.names import QUANTITY_NAMES

    known = (
        f"{mean:.4f} on average, {largest:.4f} at most."
        if math.isfinite(largest)
        else "not known from one probe."
    )
    say(f"Standard error of the {QUANTITY_NAMES[source].lower()}s: {known}")
