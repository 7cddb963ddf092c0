"""Texts to study: JSON lines with pairs or single texts."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from captum_hta.model import Text

FIELDS = ("premise", "hypothesis")


@dataclass(frozen=True)
class BadLine:
    """A line of the input that is no example."""

    number: int
    problem: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.problem}"


def shipped_pairs() -> Path:
    """The 64 pairs that come with the package."""
    return Path(str(resources.files("captum_hta") / "pairs.jsonl"))


def read_texts(
    path: Path, check: Callable[[Text], str | None], limit: int | None = None
) -> tuple[list[Text], list[BadLine]]:
    """Read JSON lines with ``premise`` and ``hypothesis``, or with ``text``.

    Args:
        path: The file, in UTF-8.
        check: Says what is wrong with a text, or ``None``.
        limit: Stop after this many good lines.

    Returns:
        The texts, and the lines that are none.

    Raises:
        OSError: If the file cannot be read.
    """
    texts: list[Text] = []
    bad: list[BadLine] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if limit is not None and len(texts) >= limit:
                break
            if not line.strip():
                continue
            text, problem = _parse(line)
            problem = problem or check(text)
            if problem:
                bad.append(BadLine(number, problem))
            else:
                texts.append(text)
    return texts, bad


def _parse(line: bytes) -> tuple[Text, str | None]:
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        return "", "not UTF-8"
    except json.JSONDecodeError as error:
        return "", f"not JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return "", f"not JSON that can be read: {error}"
    if not isinstance(record, dict):
        return "", f"not a JSON object but {type(record).__name__}"
    names = ("text",) if "text" in record else FIELDS
    for name in names:
        if name not in record:
            return "", f"no field {name!r}: a line needs premise and hypothesis, or text"
        if not isinstance(record[name], str):
            return "", f"field {name!r} is not a string"
        if not record[name].strip():
            return "", f"field {name!r} is empty"
        if any("\ud800" <= character <= "\udfff" for character in record[name]):
            return "", f"field {name!r} holds half a character (a lone surrogate)"
    values = tuple(record[name] for name in names)
    return (values[0] if len(values) == 1 else values), None
