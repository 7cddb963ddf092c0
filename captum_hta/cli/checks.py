"""Checks of options that need no model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile

from captum_hta.cli.errors import UserError

FIGURES = {".png": "Software", ".svg": "Creator", ".pdf": "Creator"}
"""Formats of figures, and the field of their metadata that names the program."""
WRITER = b"captum-hta"
"""What the metadata of a figure of this package contain."""


def check_figure(path: Path) -> None:
    """Raise a ``UserError`` if no figure can be written to this path, or a file of the user is there."""
    if path.suffix.lower() not in FIGURES:
        raise UserError(f"--out {path} must end in .png, .svg or .pdf")
    if path.is_dir():
        raise UserError(f"--out {path} is a folder: name a file in it")
    if not path.absolute().parent.is_dir():
        raise UserError(f"the folder {path.absolute().parent} does not exist: make it first")
    if path.is_symlink() or (path.exists() and WRITER not in path.read_bytes()):
        raise UserError(f"--out {path} was not written by captum-hta: move it, or name another file")


def check_folder(path: Path, patterns: Iterable[str]) -> None:
    """Make the output folder, and check that results can be written to it before the work is done in vain.

    Args:
        path: The folder.
        patterns: Patterns of the names of the results.

    Raises:
        UserError: If it cannot be written.
        ForeignFileError: If a file of the user has the name of a result.
    """
    from captum_hta.study.outputs import check_outputs

    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
        check_outputs(path, patterns)
    except OSError as error:
        raise UserError(f"the folder {path} cannot be written: {error.strerror or error}") from error


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
    if NORMS[norm].of_gram is not None and (probes is not None or tolerance is not None):
        raise UserError(f"--probes and --tolerance do not estimate a {norm} norm: leave them out")
    Query(norm=norm, n_probes=probes, tolerance=tolerance)
    if exact or NORMS[norm].of_gram is not None:
        return None
    return probes if probes is not None or tolerance is not None else default
