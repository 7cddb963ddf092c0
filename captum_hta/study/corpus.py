"""Texts to study, single or in pairs, from JSON lines or a dataset on the Hugging Face hub."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import BinaryIO

from captum_hta.model.encoding import Text
from captum_hta.study.json_lines import CorpusError, Record, json_lines

FIELDS = ("premise", "hypothesis")
STANDARD_INPUT = Path("-")
"""What stands for standard input in the place of a file."""


@dataclass(frozen=True)
class BadLine:
    """A line or record that is not an example."""

    number: int
    problem: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.problem}"


@dataclass(frozen=True)
class Choice:
    """Which examples of a corpus to take, and which fields of them.

    Attributes:
        check: Returns what is wrong with a text, or ``None``.
        wanted: Whether to take a good text; others are left out without a message.
        limit: Take at most this many examples; ``None`` for all.
        sample: Seed to draw them at random; ``None`` for the first ones.
        fields: One or two fields of a record, with dots for nested ones. ``None`` for ``text``, or
            ``premise`` and ``hypothesis``.
    """

    check: Callable[[Text], str | None] = lambda text: None
    wanted: Callable[[Text], bool] = lambda text: True
    limit: int | None = None
    sample: int | None = None
    fields: Sequence[str] | None = None


def shipped_pairs() -> Path:
    """The 64 pairs that come with the package."""
    return Path(str(resources.files("captum_hta.study") / "pairs.jsonl"))


def read_texts(path: Path, choice: Choice) -> tuple[list[Text], list[BadLine]]:
    """Read JSON lines.

    Args:
        path: The file, in UTF-8; :data:`STANDARD_INPUT` reads from there.
        choice: Which examples to take.

    Returns:
        The texts in the order of the file, and the bad lines.

    Raises:
        OSError: If the file cannot be read.
        CorpusError: If the file is in another encoding or of another format.
    """
    with _opened(path) as file:
        return _chosen(json_lines(file, "standard input" if path == STANDARD_INPUT else str(path)), choice)


def _opened(path: Path) -> AbstractContextManager[BinaryIO]:
    return nullcontext(sys.stdin.buffer) if path == STANDARD_INPUT else path.open("rb")


def read_dataset(name: str, choice: Choice) -> tuple[list[Text], list[BadLine]]:
    """Stream a dataset with the package ``datasets``.

    Args:
        name: ``PATH``, ``PATH:SPLIT`` or ``PATH:CONFIGURATION:SPLIT``, such as
            ``nyu-mll/glue:mnli:validation_matched``; without a split it is ``validation``.
        choice: Which examples to take.

    Returns:
        The texts in order, and the bad records.

    Raises:
        CorpusError: If ``datasets`` is missing or cannot load it.
    """
    return _chosen(_records(name), choice)


def _records(name: str) -> Iterator[Record]:
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise CorpusError('datasets is not installed: pip install "captum-hta[datasets]"') from error
    path, *rest = name.split(":")
    if len(rest) > 2 or not all([path, *rest]):
        raise CorpusError(f"{name!r} is not a dataset: write PATH, PATH:SPLIT or PATH:CONFIGURATION:SPLIT")
    split, configuration = (rest or ["validation"])[-1], rest[0] if len(rest) == 2 else None
    try:
        records = load_dataset(path, configuration, split=split, streaming=True)
        yield from ((number, record, None) for number, record in enumerate(records, 1))
    except Exception as error:  # of any type: from the network, the hub or a builder
        raise CorpusError(f"the dataset {name} cannot be loaded: {error}") from error


@dataclass
class _Drawn:
    """The first examples, or a random sample in which each has the same chance (Vitter 1985, algorithm R)."""

    limit: int | None
    random: random.Random | None
    seen: int = 0
    kept: list[tuple[int, Text]] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether further examples would be ignored."""
        return self.random is None and self.limit is not None and self.seen >= self.limit

    def offer(self, text: Text) -> None:
        self.seen += 1
        if self.limit is None or self.seen <= self.limit:
            self.kept.append((self.seen, text))
        elif self.random is not None:
            place = self.random.randrange(self.seen)
            if place < self.limit:
                self.kept[place] = (self.seen, text)

    def texts(self) -> list[Text]:
        return [text for _, text in sorted(self.kept, key=lambda one: one[0])]


def _chosen(records: Iterable[Record], choice: Choice) -> tuple[list[Text], list[BadLine]]:
    """The texts and bad lines among numbered records, each with its problem or ``None``."""
    drawn = _Drawn(choice.limit, None if choice.sample is None else random.Random(choice.sample))
    bad: list[BadLine] = []
    for number, record, problem in records:
        text, problem = ("", problem) if problem else _text(record, choice.fields)
        problem = problem or choice.check(text)
        if problem:
            bad.append(BadLine(number, problem))
        elif choice.wanted(text):
            drawn.offer(text)
        if drawn.full:
            break
    return drawn.texts(), bad


def _text(record: object, fields: Sequence[str] | None) -> tuple[Text, str | None]:
    """The text of a record, and what is wrong with the record, if anything."""
    if not isinstance(record, dict):
        return "", f"not a JSON object but {type(record).__name__}"
    values = []
    for name in fields or (("text",) if "text" in record else FIELDS):
        value, problem = _value(record, name, fields is not None)
        if problem:
            return "", problem
        values.append(value)
    return (values[0] if len(values) == 1 else (values[0], values[1])), None


def _value(record: Mapping[str, object], name: str, named: bool) -> tuple[str, str | None]:
    """A field of a record, and what is wrong with it, if anything."""
    value: object = record
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            needed = "" if named else ": a line needs premise and hypothesis, or text"
            return "", f"no field {name!r}{needed}"
        value = value[part]
    if not isinstance(value, str):
        return "", f"field {name!r} is not a string"
    if not value.strip():
        return "", f"field {name!r} is empty"
    if any("\ud800" <= character <= "\udfff" for character in value):
        return "", f"field {name!r} contains half a character (a lone surrogate)"
    return value, None
