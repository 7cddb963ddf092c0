"""The command ``captum-hta``."""

from __future__ import annotations

STOPPED = 130
"""Exit status of a command that Ctrl-C has ended."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 for a failure, 2 for wrong usage, 130 if stopped.

    Everything else is imported in here, so that Ctrl-C during an import ends without a traceback too.
    """
    try:
        from captum_hta.cli.application import run

        return run(arguments)
    except KeyboardInterrupt:
        return STOPPED
