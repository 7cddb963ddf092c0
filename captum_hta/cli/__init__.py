"""The command ``captum-hta``."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer

from captum_hta import __version__
from captum_hta.cli import doctor, explain, methods, study
from captum_hta.cli.options import UserError, err, out

FAILED = 1

app = typer.Typer(
    name="captum-hta",
    help="Hidden token attribution: how much of each token is in what an attention head takes in.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False,
) -> None:
    if version:
        out.print(f"captum-hta {__version__}", highlight=False)
        raise typer.Exit


for name, command in {
    "explain": explain.explain,
    "study": study.run_study,
    "compare": methods.compare,
    "faithfulness": methods.faithfulness,
    "doctor": doctor.doctor,
}.items():
    app.command(name=name)(command)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 for a failure, 2 for wrong usage, 130 if stopped."""
    arguments = sys.argv[1:] if arguments is None else arguments
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    return _guarded(lambda: app(arguments), "--debug" in arguments)


def _guarded(call: Callable[[], Any], debug: bool) -> int:
    try:
        call()
        return 0
    except SystemExit as stop:  # of typer, which has shown what was wrong with the usage
        return stop.code if isinstance(stop.code, int) else FAILED
    except KeyboardInterrupt:
        err.print("stopped")
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        expected = isinstance(error, UserError | ValueError | OSError)
        what = str(error) if expected else f"{type(error).__name__}: {error}"
        err.print(f"error: {what}", markup=False)
        if not expected and not debug:
            err.print("This should not happen; run again with --debug to see where.")
        return FAILED
