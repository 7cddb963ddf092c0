"""Checks of options that need no model."""

from __future__ import annotations

from pathlib import Path

from captum_hta.cli.errors import UserError

FIGURES = (".png", ".svg", ".pdf")


def check_figure(path: Path) -> None:
    """Raise a ``UserError`` if no figure can be written to this path."""
    if path.suffix.lower() not in FIGURES:
        raise UserError(f"--out {path} must end in .png, .svg or .pdf")
    if path.is_dir():
        raise UserError(f"--out {path} is a folder: name a file in it")
    if not path.absolute().parent.is_dir():
        raise UserError(f"the folder {path.absolute().parent} does not exist: make it first")


def check_folder(path: Path) -> None:
    """Make the output folder and write to it, before the work is done in vain.

    Raises:
        UserError: If that fails.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"the folder {path} cannot be written: {error.strerror or error}") from error


def check_file(path: Path) -> None:
    """Raise a ``UserError`` if a file cannot be read."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def probes_or_exact(
    probes: int | None, tolerance: float | None, exact: bool, norm: str, default: int
) -> int | None:
    """The number of probes to take, ``None`` for an exact result.

    Raises:
        UserError: If options contradict each other.
        ValueError: If there is no such norm, or it has no such estimate.
    """
    from captum_hta.jacobian.arguments import choice
    from captum_hta.jacobian.norms import NORMS
    from captum_hta.jacobian.query import Query

    if exact and (probes is not None or tolerance is not None):
        raise UserError("--exact takes no probes: leave out --probes and --tolerance")
    choice("norm", norm, NORMS)
    if norm == "spectral" and (probes is not None or tolerance is not None):
        raise UserError("--probes and --tolerance do not estimate a spectral norm: leave them out")
    Query(norm=norm, n_probes=probes, tolerance=tolerance)
    if exact or norm == "spectral":
        return None
    return probes if probes is not None or tolerance is not None else default
