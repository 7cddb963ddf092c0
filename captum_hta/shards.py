"""Results of finished parts of a long run on disk, so that it goes on where it was stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
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
            write_whole(folder / "settings.json", json.dumps(facts, indent=2).encode())
        elif known != facts:
            raise OtherRunError(_difference(folder, known, facts))

    def _read_facts(self) -> dict[str, Any] | None:
        path = self.folder / "settings.json"
        return json.loads(path.read_text("utf-8")) if path.exists() else None

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06}.safetensors"

    def __contains__(self, number: int) -> bool:
        return self._path(number).exists()

    def write(self, number: int, arrays: Mapping[str, Array]) -> None:
        """Keep the part of that number."""
        path = self._path(number).with_suffix(f".{os.getpid()}.part")
        try:
            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
            os.replace(path, self._path(number))
        finally:
            path.unlink(missing_ok=True)

    def read(self, number: int) -> dict[str, Array]:
        """The part of that number."""
        return load_file(self._path(number))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file such that it is there whole, or not at all."""
    part = path.with_suffix(f"{path.suffix}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _difference(folder: Path, known: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    names = [name for name in {**known, **facts} if known.get(name) != facts.get(name)]
    what = ", ".join(f"{name} {known.get(name)!r} (now {facts.get(name)!r})" for name in names)
    return (
        f"{folder} holds parts of a run with {what}: repeat that run, name another folder, or delete this one"
    )
