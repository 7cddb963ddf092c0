"""Finished parts of a long run on disk, so that it continues where it was stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from captum_hta.storage import StoredArray, checksum, write_whole
from captum_hta.study.outputs import own_folder


class OtherRunError(ValueError):
    """The folder has parts of another run."""


class Shards:
    """A folder of finished parts of a run, each a file that is written as a whole.

    Every file has the digest of its run, its own name and a checksum of its arrays in its header, so that a
    file of another run, a renamed file or a damaged file is never taken for a result.

    Args:
        folder: The folder; made if it is missing.
        facts: What decides the numbers of the run: arguments, model, data.

    Attributes:
        digest: Digest of the facts.

    Raises:
        OtherRunError: If the folder has parts of a run with other facts; names them.
        OSError: If the folder cannot be written, or its settings cannot be read.
    """

    def __init__(self, folder: Path, facts: Mapping[str, object]) -> None:
        self.folder = folder
        own_folder(folder)
        facts = json.loads(json.dumps(dict(facts)))
        self.digest = _digest(json.dumps(facts, sort_keys=True).encode())
        known = self._read_facts()
        if known is None:
            text = json.dumps(facts, indent=2)
            write_whole(folder / "settings.json", lambda path: path.write_text(text, "utf-8"))
        elif known != facts:
            raise OtherRunError(_difference(folder, known, facts))

    def _read_facts(self) -> dict[str, object] | None:
        path = self.folder / "settings.json"
        if not path.exists():
            return None
        try:
            facts = json.loads(path.read_text("utf-8"))
            if not isinstance(facts, dict):
                raise ValueError("it is not a JSON object")
        except ValueError as error:
            raise OSError(
                f"{path} cannot be read ({error}): delete it, and finished parts are checked one by one"
            ) from error
        return facts

    def _path(self, name: int | str) -> Path:
        return self.folder / f"{name if isinstance(name, str) else f'{name:06}'}.safetensors"

    def __contains__(self, name: int | str) -> bool:
        return self._path(name).exists()

    def write(self, name: int | str, arrays: Mapping[str, StoredArray]) -> None:
        """Keep the arrays under that number or name."""
        contiguous = {key: np.asarray(array, order="C") for key, array in arrays.items()}
        path = self._path(name)
        header = {"run": self.digest, "name": path.name, "checksum": checksum(contiguous)}
        write_whole(path, lambda part: save_file(contiguous, part, header))

    def read(self, name: int | str) -> dict[str, StoredArray]:
        """The arrays under that number or name.

        Raises:
            OtherRunError: If the file is of another run; names it.
            OSError: If it cannot be read or is damaged; says what to do.
        """
        path = self._path(name)
        try:
            with safe_open(path, "numpy") as file:
                header = file.metadata() or {}
                arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError, ValueError) as error:
            raise OSError(f"{path} cannot be read ({error}): delete it, and it is computed again") from error
        if header.get("run") != self.digest or header.get("name") != path.name:
            raise OtherRunError(
                f"{path} is not a part of this run, which has other arguments, model or data: delete it, and "
                "it is computed again, or name another folder"
            )
        if header.get("checksum") != checksum(arrays):
            raise OSError(f"{path} is damaged, its checksum differs: delete it, and it is computed again")
        return arrays


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _difference(folder: Path, known: Mapping[str, object], facts: Mapping[str, object]) -> str:
    names = [name for name in {**known, **facts} if known.get(name) != facts.get(name)]
    what = ", ".join(f"{name} {known.get(name)!r} (now {facts.get(name)!r})" for name in names)
    return (
        f"{folder} holds parts of a run with {what}: repeat that run, name another folder, or delete this one"
    )
