"""The folder of a finished study: its tables, its record and the matrices that were kept."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from captum_hta.storage import StoredArray, write_whole
from captum_hta.study.outputs import KEPT, is_intact, own_folder

if TYPE_CHECKING:
    import pandas as pd

Matrices = dict[str, StoredArray]
"""The matrices of a text by name, and the labels of its tokens."""
RUN = "run"
"""Name of the digest of the run in a file of matrices."""
UNREADABLE = (OSError, ValueError, EOFError, NotImplementedError, zlib.error, zipfile.BadZipFile)
"""Errors of reading a damaged file; a damaged zip header can name a compression that is not known."""


def open_study(folder: str | Path) -> StudyFolder:
    """Open the folder that ``captum-hta study`` wrote.

    Args:
        folder: The argument of ``--out``.

    Raises:
        ValueError: If there is no finished study in it.

    Example:
        >>> study = open_study("results")  # doctest: +SKIP
        >>> study.tables["correlations"].query("layer == 3")  # doctest: +SKIP
        >>> study[0]["input"].shape  # of the first text, with --keep-contributions  # doctest: +SKIP
        (6, 12, 21, 21)
    """
    folder = Path(folder)
    if not (folder / "run.json").is_file():
        several = sorted(path.parent.name for path in folder.glob("*/run.json"))
        raise ValueError(
            f"{folder} holds several studies: open one of its folders, {', '.join(several)}"
            if several
            else f"{folder} holds no finished study: pass the folder that was --out of a study"
        )
    return StudyFolder(folder)


@dataclass(frozen=True)
class StudyFolder:
    """A finished study, indexed by the numbers of the texts whose matrices were kept.

    Attributes:
        folder: The folder.
    """

    folder: Path

    @cached_property
    def run(self) -> dict[str, Any]:
        """The record of the run: model, arguments, counts, results, seconds, versions."""
        path = self.folder / "run.json"
        with _named(path):
            record: dict[str, Any] = json.loads(path.read_text("utf-8"))
            if not isinstance(record, dict):
                raise ValueError("it is not a JSON object")
        return record

    @cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables by their names, such as ``"correlations"``."""
        import pandas as pd

        tables = {}
        for path in sorted(self.folder.glob("*.csv")):
            with _named(path):
                tables[path.stem] = pd.read_csv(path)
        return tables

    @cached_property
    def _files(self) -> dict[int, Path]:
        asked = self.run.get("arguments", {}).get("keep_contributions", True)
        files = sorted((self.folder / KEPT).glob("*.npz")) if asked else []
        if not files:
            raise ValueError(
                f"{self.folder} kept no contributions: repeat the study with --keep-contributions and "
                "another --out"
            )
        found: dict[int, Path] = {}
        for path in files:
            with _named(path), np.load(path) as archive:
                found |= {int(name.partition("/")[0]): path for name in archive.files if name != RUN}
        missing = sorted(set(range(self.run.get("counts", {}).get("examples", 0))) - found.keys())
        if missing:
            raise ValueError(
                f"{self.folder / KEPT} lacks the matrices of {len(missing)} texts, the first is text "
                f"{missing[0]}: repeat the command of the study, which computes them again"
            )
        return dict(sorted(found.items()))

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[int]:
        return iter(self._files)

    def __getitem__(self, number: int) -> dict[str, NDArray[np.float32]]:
        """The matrices of a text, by its number in the corpus, from 0.

        Returns:
            ``"attention"``, ``"input"`` and ``"previous_layer"`` contributions ``[layer, head, query, key]``,
            and those to ``"hidden"`` embeddings ``[layer, query, key]``, rounded to half precision.

        Raises:
            KeyError: If there is no such text.
            ValueError: If no matrices were kept.
        """
        matrices = self._read(number)
        return {name: array.astype(np.float32) for name, array in matrices.items() if array.dtype.kind == "f"}

    def tokens(self, number: int) -> list[str]:
        """Labels of the tokens of a text, the queries; raises as indexing does."""
        return _labels(self._read(number)["tokens"])

    def key_tokens(self, number: int) -> list[str]:
        """Labels of the keys, of another text for cross attention; raises as indexing does."""
        kept = self._read(number)
        return _labels(kept.get("keys", kept["tokens"]))

    def _read(self, number: int) -> Matrices:
        path = self._files[number]
        with _named(path), np.load(path) as archive:
            own = [name for name in archive.files if name.startswith(f"{number}/")]
            matrices = {name.partition("/")[2]: archive[name] for name in own}
        return matrices


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raise a ``ValueError`` that names the file if it cannot be read or was changed since it was written."""
    try:
        if not is_intact(path):
            raise ValueError("it is not as it was written")
        yield
    except UNREADABLE as error:
        raise ValueError(
            f"{path} is damaged ({error}): delete it and repeat the command of the study, which writes it "
            "again"
        ) from error


def _labels(array: NDArray[np.str_]) -> list[str]:
    return [str(label) for label in array]


def check_nothing_kept(folder: Path) -> None:
    """Raise a ``ValueError`` if there are matrices of another study in the folder."""
    if any((folder / KEPT).glob("*.npz")):
        raise ValueError(
            f"{folder / KEPT} holds matrices of another study: delete it, or choose another folder"
        )


def is_kept(folder: Path, shard: int, run: str) -> bool:
    """Whether the matrices of a shard of texts are there, as :func:`keep` wrote them in the same run."""
    path = _kept_file(folder, shard)
    try:
        with np.load(path) as archive:
            return RUN in archive.files and str(archive[RUN]) == run
    except UNREADABLE:
        return False


def _kept_file(folder: Path, shard: int) -> Path:
    return folder / KEPT / f"{shard:06}.npz"


def keep(folder: Path, shard: int, texts: Mapping[int, Matrices], run: str) -> None:
    """Write the matrices of a shard of texts, compressed and in half precision.

    Args:
        folder: Folder of the study.
        shard: Number of the shard.
        run: Digest of the run.
        texts: Matrices of each text by its number, with its ``"tokens"`` and, if they differ, ``"keys"``.

    Raises:
        OSError: If they cannot be written.
    """
    arrays: dict[str, StoredArray] = {
        f"{number}/{name}": array.astype(np.float16) if array.dtype.kind == "f" else array
        for number, matrices in texts.items()
        for name, array in matrices.items()
    } | {RUN: np.array(run)}

    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)

    own_folder(folder / KEPT)
    write_whole(_kept_file(folder, shard), write)
