"""``captum-hta doctor``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from captum_hta.cli.options import Adapter, Debug, Device, Part, UserError, load, out, plain
from captum_hta.jacobian.forecast import forecast
from captum_hta.model.protocol import Model
from captum_hta.study import run as study
from captum_hta.views.names import QUANTITY_NAMES

DOCTOR_TOKENS = 32


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder, or a name on the Hugging Face hub. Default: the demo model."),
    ] = None,
    part: Part = None,
    adapter: Adapter = None,
    device: Device = None,
    debug: Debug = False,
) -> None:
    """Show what is found in a model: its parts, the checks at loading, and the modes that will be taken.

    Ends with status 1 if a check fails.

    Example: captum-hta doctor bert-base-uncased
    """
    loaded = load(model, device, adapter, part)
    facts = {
        "model": loaded.name,
        "adapter": f"{type(loaded).__name__} on {loaded.architecture}",
        "size": f"{loaded.num_layers} layers of {loaded.num_heads} heads, {loaded.d_head} wide each",
        "width": str(loaded.d_model),
        "reads": loaded.reader.reads,
        "at most": "any length" if loaded.max_length is None else f"{loaded.max_length} tokens",
        "weights": f"{str(loaded.dtype).removeprefix('torch.')} on {loaded.device}",
        "closed form": "yes" if loaded.size.closed_form else "no, the general modes are taken",
    }
    facts |= _forecasts(loaded)
    _print_pairs("Found", facts)
    _print_pairs(
        "Checked",
        {
            check.name: " ".join(filter(None, ("passed" if check.passed else "FAILED", check.found)))
            for check in loaded.checks
        },
    )
    if not all(check.passed for check in loaded.checks):
        raise UserError("a check failed; results by the general modes are right all the same")


def _forecasts(model: Model) -> dict[str, str]:
    """What contributions will cost about; of cross attention it is not known."""
    if model.key_layers is not None:
        return {}
    return {
        f"{QUANTITY_NAMES[source]}, {DOCTOR_TOKENS} tokens": str(
            forecast(model.size, DOCTOR_TOKENS, source=source, dtype=model.dtype, device=model.device)
        )
        for source in study.SOURCES
    }


def _print_pairs(title: str, pairs: dict[str, str]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in pairs.items():
        table.add_row(name, plain(value))
    out.print(table)
