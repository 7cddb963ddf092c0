"""The commands under one name, and how an error ends them.

To show the help, nothing but typer and rich is imported: each command imports what it needs when it runs.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated

import typer

from captum_hta import __version__
from captum_hta.cli.compare import compare
from captum_hta.cli.console import say, tolerate_encodings, warn
from captum_hta.cli.doctor import doctor
from captum_hta.cli.errors import UserError
from captum_hta.cli.explain import explain
from captum_hta.cli.faithfulness import faithfulness
from captum_hta.cli.study import study

FAILED = 1

app = typer.Typer(
    name="captum-hta",
    help="Hidden Token Attribution: how much of each token is in the output of each attention head.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for _command in (explain, study, compare, faithfulness, doctor):
    app.command()(_command)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        say(f"captum-hta {__version__}")
        raise typer.Exit


def run(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status, as :func:`captum_hta.cli.main` does."""
    arguments = sys.argv[1:] if arguments is None else arguments
    tolerate_encodings()
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    try:
        status = _guarded(lambda: app(arguments), "--debug" in arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who read the output, such as head, has ended
        _discard_output()
        return FAILED


def _discard_output() -> None:
    """Let Python flush what is left to nowhere at exit (as its manual says, signal: "Note on SIGPIPE")."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _guarded(call: Callable[[], object], debug: bool) -> int:
    try:
        call()
        return 0
    except SystemExit as stop:  # from typer, which has already explained wrong usage
        return stop.code if isinstance(stop.code, int) else FAILED
    except BrokenPipeError:
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        _explain(error, debug)
        return FAILED


def _explain(error: Exception, debug: bool) -> None:
    expected = isinstance(error, UserError | ValueError | OSError)
    warn(f"error: {error}" if expected else f"error: {type(error).__name__}: {error}")
    if not expected and not debug:
        warn("This is a bug; run again with --debug to see where.")
