"""Pairs of a model and the corpus that it is studied on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from captum_hta.cli.errors import UserError

STANDARD_INPUT = Path("-")
RESULTS = {
    "centres_of_mass.csv", "layers.csv", "centre_of_attention.png", "centre_of_input.png", "report.html",
}  # fmt: skip
"""Files that the comparison of several studies writes next to their folders."""
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Pairing:
    """A model and a corpus.

    Attributes:
        model: Folder or name of the model; ``None`` for the demo model.
        source: A file, or the name of a dataset; ``None`` for the pairs that come with the package.
        fields: Fields of the records to read; ``None`` for the usual ones.
        label: What to call the study; ``None`` if it is the only one.
    """

    model: str | None
    source: Path | str | None
    fields: tuple[str, ...] | None
    label: str | None = None

    @property
    def folder(self) -> str:
        """Subfolder of the results."""
        return _file_name(self.label or "")


def pairings(
    models: Sequence[str],
    files: Sequence[Path],
    datasets: Sequence[str],
    fields: Sequence[str],
    labels: Sequence[str],
) -> list[Pairing]:
    """Pairs of models and corpora in order; a single model goes with every corpus, and the reverse.

    Raises:
        UserError: If the numbers of values do not match, or two studies would have the same name.
    """
    sources: list[Path | str] = [*files, *datasets]
    columns = {"--model": models, "--data": sources, "--fields": fields, "--label": labels}
    count = max(map(len, columns.values()), default=0) or 1
    for name, values in columns.items():
        if len(values) not in ((0, count) if name == "--label" else (0, 1, count)):
            raise UserError(f"{name} is given {len(values)} times for {count} studies: give it once for each")
    if count > 1 and (sources == [STANDARD_INPUT] or sources.count(STANDARD_INPUT) > 1):
        raise UserError("standard input can be read only once: save it to a file")
    _check_characters(columns)
    named = [
        Pairing(_at(models, run), _at(sources, run), _fields(_at(fields, run)), _at(labels, run))
        for run in range(count)
    ]
    return named if count == 1 else _labelled(named)


def _check_characters(columns: Mapping[str, Sequence[object]]) -> None:
    """Raise if a name cannot be written to the record of a study."""
    for option, values in columns.items():
        for value in map(str, values):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise UserError(f"{option} {value!r} is not UTF-8: rename it") from None


def _at(values: Sequence[_Value], run: int) -> _Value | None:
    """The value of that run; one value holds for all."""
    return values[run if len(values) > 1 else 0] if values else None


def _fields(spec: str | None) -> tuple[str, ...] | None:
    """The fields in a list such as ``"premise,hypothesis"``."""
    if spec is None:
        return None
    names = tuple(name.strip() for name in spec.split(","))
    if not all(names) or len(names) > 2:
        raise UserError(f'--fields {spec!r} must name one field or two, such as "premise,hypothesis"')
    return names


def _labelled(runs: Sequence[Pairing]) -> list[Pairing]:
    """Runs with labels: the given ones, or else whatever differs between the runs."""
    several = [
        name for name in ("model", "source", "fields") if len({getattr(run, name) for run in runs}) > 1
    ]
    labelled = [
        Pairing(
            run.model, run.source, run.fields,
            run.label or ", ".join(_name(getattr(run, name)) for name in several),
        )
        for run in runs
    ]  # fmt: skip
    folders = [run.folder for run in labelled]
    twice = sorted({name for name in folders if folders.count(name) > 1})
    if twice:
        raise UserError(f"two studies would be called {', '.join(twice)!r}: give each its own --label")
    taken = sorted(RESULTS & set(folders))
    if taken:
        raise UserError(f"{taken[0]!r} is the name of a result: give that study another --label")
    return labelled


def _name(value: Path | str | tuple[str, ...] | None) -> str:
    if value is None:
        return "the default"
    return value.stem if isinstance(value, Path) else " ".join([value] if isinstance(value, str) else value)


def _file_name(label: str) -> str:
    return re.sub(r"[^\w.-]+", "-", label).strip(".-") or "run"
