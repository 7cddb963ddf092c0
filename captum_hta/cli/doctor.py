"""``captum-hta doctor``: what was found in a model, and what was checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from captum_hta.cli.console import add_row, show, table
from captum_hta.cli.errors import UserError
from captum_hta.cli.loading import ModelChoice
from captum_hta.cli.options import Adapter, Debug, Device, Part

if TYPE_CHECKING:
    from captum_hta.model.protocol import Model

TOKENS = 32
"""Length of the text whose cost is shown."""


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder or a name on the Hugging Face hub. Default: the demo model."),
    ] = None,
    part: Part = None,
    adapter: Adapter = None,
    device: Device = None,
    debug: Debug = False,
) -> None:
    """Show what is found in a model: its size, the checks made when it is loaded, and the modes that apply.

    The exit status is 1 if a check fails.

    Example: captum-hta doctor bert-base-uncased
    """
    choice = ModelChoice(model, device, adapter, part)
    choice.check(layers=None)
    loaded = choice.load()
    _print_pairs("Found", _facts(loaded) | _forecasts(loaded))
    _print_pairs("Checked", _checks(loaded))
    if not all(check.passed for check in loaded.checks):
        raise UserError("a check failed; the general modes are used, whose results are still right")


def _facts(model: Model) -> dict[str, str]:
    return {
        "model": model.name,
        "adapter": f"{type(model).__name__} on {model.architecture}",
        "size": f"{model.num_layers} layers of {model.num_heads} heads, {model.d_head} wide each",
        "width": str(model.d_model),
        "reads": model.reader.reads,
        "at most": "any length" if model.max_length is None else f"{model.max_length} tokens",
        "weights": f"{str(model.dtype).removeprefix('torch.')} on {model.device}",
        "closed form": "yes" if model.size.closed_form else "no, the general modes are used",
    }


def _forecasts(model: Model) -> dict[str, str]:
    """About what contributions will cost; cross attention has no forecast."""
    from captum_hta.jacobian.forecast import forecast
    from captum_hta.study.settings import SOURCES
    from captum_hta.views.names import QUANTITY_NAMES

    if model.key_layers is not None:
        return {}
    return {
        f"{QUANTITY_NAMES[source]}, {TOKENS} tokens": str(
            forecast(model.size, TOKENS, source=source, dtype=model.dtype, device=model.device)
        )
        for source in SOURCES
    }


def _checks(model: Model) -> dict[str, str]:
    return {
        check.name: " ".join(filter(None, ("passed" if check.passed else "FAILED", check.found)))
        for check in model.checks
    }


def _print_pairs(title: str, pairs: Mapping[str, str]) -> None:
    pairs_table = table(title, header=False)
    pairs_table.add_column(style="bold")
    pairs_table.add_column(overflow="fold")
    for name, value in pairs.items():
        add_row(pairs_table, name, value)
    show(pairs_table)
