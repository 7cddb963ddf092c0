"""Results of finished parts of a long run on disk, so that it goes on where it was stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

Array = NDArray[np.float64]


class OtherRunError(ValueError):
    """The folder holds parts of another run."""


class Shards:
    """A folder of parts, each a file that is written whole and then renamed.

    Args:
        folder: Made if it is missing.
        facts: What decides the numbers of the run: arguments, model, data.

    Raises:
        OtherRunError: If the folder holds parts of a run with other facts; names them.
        OSError: If the folder cannot be written.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        facts = json.loads(json.dumps(dict(facts)))
        known = self._read_facts()
        if known is None:
            text = json.dumps(facts, indent=2)
            write_whole(folder / "settings.json", lambda path: path.write_text(text, "utf-8"))
        elif known != facts:
            raise OtherRunError(_difference(folder, known, facts))

    def _read_facts(self) -> dict[str, Any] | None:
        path = self.folder / "settings.json"
        return json.loads(path.read_text("utf-8")) if path.exists() else None

    def _path(self, part: int | str) -> Path:
        return self.folder / f"{part if isinstance(part, str) else f'{part:06}'}.safetensors"

    def __contains__(self, part: int | str) -> bool:
        return self._path(part).exists()

    def write(self, part: int | str, arrays: Mapping[str, Array]) -> None:
        """Keep the part of that number or name."""
        contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        write_whole(self._path(part), lambda path: save_file(contiguous, path))

    def read(self, part: int | str) -> dict[str, Array]:
        """The part of that number or name.

        Raises:
            OSError: If it cannot be read; says what to do.
        """
        try:
            return load_file(self._path(part))
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"{self._path(part)} cannot be read ({error}): delete it, and it is computed again"
            ) from error


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` write a file such that it is there whole, or not at all.

    Raises:
        OSError: If the file cannot be written; names it and what to do.
    """
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        write(part)
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OSError(f"{path} cannot be written ({reason}): make room, or name another folder") from error
    finally:
        part.unlink(missing_ok=True)


def _difference(folder: Path, known: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    names = [name for name in {**known, **facts} if known.get(name) != facts.get(name)]
    what = ", ".join(f"{name} {known.get(name)!r} (now {facts.get(name)!r})" for name in names)
    return (
        f"{folder} holds parts of a run with {what}: repeat that run, name another folder, or delete this one"
    )
