"""Folders of results: files are written whole, and only this package's own files are ever replaced.

A folder has a manifest with a digest of every file that was written to it. A file that is not in it,
or has been changed since, is the user's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from captum_hta.storage import write_whole

MANIFEST = ".captum-hta.json"
WRITER = "captum-hta"
PARTS, KEPT = "parts", "contributions"
"""Folders in the folder of a study: of finished parts, and of every matrix."""
Digests = dict[str, list[str]]
"""For each file by its name the digests of what was written; two while it is being replaced."""


class ForeignFileError(ValueError):
    """A file that this package did not write is in the place of a result."""


def check_outputs(folder: Path, patterns: Iterable[str]) -> None:
    """Check that no file which matches a pattern is the user's, and that no folder for parts is a link.

    Raises:
        ForeignFileError: If one is; names it.
    """
    for name in (PARTS, KEPT):
        _refuse_link(folder / name)
    known = _read_manifest(folder)
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            _check_own(path, known)


def write_outputs(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write files to a folder by their names, each whole or not at all.

    Returns:
        The files.

    Raises:
        ForeignFileError: If one would replace a file of the user; nothing is written then.
        OSError: If one cannot be written; says what to do.
    """
    known = _read_manifest(folder)
    for name in contents:
        _check_own(folder / name, known)
    new = {name: [_digest(content)] for name, content in contents.items()}
    _write_manifest(folder, known | {name: [*known.get(name, []), *digests] for name, digests in new.items()})
    for name, content in contents.items():
        write_whole(folder / name, partial(Path.write_bytes, data=content))
    _write_manifest(folder, known | new)
    return [folder / name for name in contents]


def is_intact(path: Path) -> bool:
    """Whether a file is as it was written, as far as the manifest of its folder knows it."""
    digests = _read_manifest(path.parent).get(path.name)
    return digests is None or _digest(path.read_bytes()) in digests


def own_folder(path: Path) -> Path:
    """Make a folder for parts of results, if it is missing.

    Raises:
        ForeignFileError: If its path is a symbolic link: what it points to is not ours to write to.
    """
    _refuse_link(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise ForeignFileError(f"{path} is a symbolic link: remove it, or name another folder")


def _check_own(path: Path, known: Digests) -> None:
    """Raise a ``ForeignFileError`` if something else than a file of this package has this path."""
    _refuse_link(path)
    if path.exists() and not path.is_file():
        raise ForeignFileError(f"{path} is not a file: move it, or name another folder")
    if path.exists() and _digest(path.read_bytes()) not in known.get(path.name, []):
        raise ForeignFileError(
            f"{path} was not written by captum-hta, or was changed since: move it, or name another folder"
        )


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _read_manifest(folder: Path) -> Digests:
    path = folder / MANIFEST
    if not path.exists() and not path.is_symlink():
        return {}
    try:
        manifest = json.loads(path.read_text("utf-8"))
        if path.is_symlink() or manifest["written_by"] != WRITER:
            raise ValueError
        return {str(name): [str(digest) for digest in digests] for name, digests in manifest["files"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ForeignFileError(
            f"{path} is not the list of files that captum-hta writes: move it, or name another folder"
        ) from error


def _write_manifest(folder: Path, digests: Digests) -> None:
    text = json.dumps({"written_by": WRITER, "files": digests}, indent=2) + "\n"
    write_whole(folder / MANIFEST, partial(Path.write_text, data=text, encoding="utf-8"))
