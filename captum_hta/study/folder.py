"""A study that was written to a folder, read back: its tables, its record and the matrices it kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from captum_hta.study.checkpoint import write_whole

KEPT = "contributions"
"""The folder of the matrices, in that of the study."""


def open_study(folder: str | Path) -> StudyFolder:
    """Open what ``captum-hta study`` has written.

    Args:
        folder: What ``--out`` named.

    Raises:
        ValueError: If it holds no finished study.

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
            else f"{folder} holds no finished study: name the folder that --out of a study named"
        )
    return StudyFolder(folder)


@dataclass(frozen=True)
class StudyFolder:
    """A finished study; a mapping from the numbers of texts to the matrices that were kept of them.

    Attributes:
        folder: Where it is.
    """

    folder: Path

    @cached_property
    def run(self) -> dict[str, Any]:
        """The record of the run: model, arguments, counts, findings, seconds, versions."""
        return json.loads((self.folder / "run.json").read_text("utf-8"))

    @cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables by their names, such as ``"correlations"``."""
        return {path.stem: pd.read_csv(path) for path in sorted(self.folder.glob("*.csv"))}

    @cached_property
    def _files(self) -> dict[int, Path]:
        asked = self.run.get("arguments", {}).get("keep_contributions", True)
        files = sorted((self.folder / KEPT).glob("*.npz")) if asked else []
        if not files:
            raise ValueError(
                f"{self.folder} kept no contributions: repeat the study with --keep-contributions and "
                "another --out"
            )
        found = {}
        for path in files:
            with np.load(path) as archive:
                found |= {int(name.partition("/")[0]): path for name in archive.files}
        return dict(sorted(found.items()))

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[int]:
        return iter(self._files)

    def __getitem__(self, number: int) -> dict[str, NDArray[np.float32]]:
        """What was kept of a text, by its number in the corpus, from 0.

        Returns:
            ``"attention"``, ``"input"`` and ``"previous_layer"`` contributions ``[layer, head, query, key]``,
            and those to ``"hidden"`` embeddings ``[layer, query, key]``; half precision has rounded them.

        Raises:
            KeyError: If there is no such text.
            ValueError: If none was kept.
        """
        matrices = ((name, array) for name, array in self._read(number) if array.dtype.kind == "f")
        return {name: array.astype(np.float32) for name, array in matrices}

    def tokens(self, number: int) -> list[str]:
        """The labels of a text's tokens, the queries; raises as indexing does."""
        return dict(self._read(number))["tokens"].tolist()

    def key_tokens(self, number: int) -> list[str]:
        """Those of its keys, which of cross attention are of another text; raises as indexing does."""
        kept = dict(self._read(number))
        return kept.get("keys", kept["tokens"]).tolist()

    def _read(self, number: int) -> Iterator[tuple[str, NDArray]]:
        with np.load(self._files[number]) as archive:
            for name in archive.files:
                owner, _, what = name.partition("/")
                if int(owner) == number:
                    yield what, archive[name]


def check_nothing_kept(folder: Path) -> None:
    """Raise a ``ValueError`` if matrices of another study are in the folder."""
    if any((folder / KEPT).glob("*.npz")):
        raise ValueError(
            f"{folder / KEPT} holds matrices of another study: delete it, or name another folder"
        )


def keep(folder: Path, part: int, texts: Mapping[int, Mapping[str, NDArray]]) -> None:
    """Write the matrices of the texts of a part, in half precision and compressed.

    Args:
        folder: Of the study.
        part: Its number.
        texts: For each text by its number its matrices, ``"tokens"`` and, where they are others, ``"keys"``.

    Raises:
        OSError: If they cannot be written.
    """
    arrays = {
        f"{number}/{name}": array.astype(np.float16) if array.dtype.kind == "f" else array
        for number, matrices in texts.items()
        for name, array in matrices.items()
    }

    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)

    (folder / KEPT).mkdir(parents=True, exist_ok=True)
    write_whole(folder / KEPT / f"{part:06}.npz", write)
