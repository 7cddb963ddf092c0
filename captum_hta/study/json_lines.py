"""Records of files of JSON lines, in UTF-8 and nothing else."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

Record = tuple[int, object, str | None]
"""Number of a line, its value, and what is wrong with the line or ``None``."""
HEAD = 20
"""Lines by which a file of another format is recognised."""
ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
    b"\x2b\x2f\x76": "UTF-7",
}
"""Encodings by how a file begins; the longer ones first, since UTF-32 begins as UTF-16 does."""
FORMATS = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\x00": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"PK\x03\x04": ("zip", "unzip"),
}
"""Compressed formats by how a file begins, and the program that unpacks each."""


class CorpusError(ValueError):
    """A corpus cannot be read as a whole."""


def json_lines(file: Iterable[bytes], name: str) -> Iterator[Record]:
    """The records of a file; blank lines are skipped.

    Args:
        file: The lines of the file.
        name: What errors call it.

    Raises:
        CorpusError: If the file is in another encoding than UTF-8, or of another format.
    """
    records = _records(file, name)
    head = list(islice(records, HEAD))
    _check_head([line for _, line in head], name)
    for number, line in chain(head, records):
        yield number, *_parsed(line)


def check_format(file: Iterable[bytes], name: str) -> None:
    """Raise a ``CorpusError`` if the first lines of a file show that it is not of JSON lines in UTF-8."""
    next(json_lines(file, name), None)


def _records(file: Iterable[bytes], name: str) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, by their numbers."""
    for number, line in enumerate(file, 1):
        if number == 1:
            _check_encoding(line, name)
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield number, line


def _check_encoding(line: bytes, name: str) -> None:
    """Raise a ``CorpusError`` if the first line is in another encoding, or compressed."""
    for start, (form, program) in FORMATS.items():
        if line.startswith(start):
            raise CorpusError(f"{name} is compressed ({form}): unpack it first, with {program}")
    encoding = next((found for start, found in ENCODINGS.items() if line.startswith(start)), None)
    encoding = encoding or _encoding_without_mark(line)
    if encoding is not None:
        raise CorpusError(
            f"{name} is in {encoding}, not in UTF-8: convert it first, with "
            f"iconv -f {encoding.partition(',')[0]} -t UTF-8"
        )
    if b"\0" in line:
        raise CorpusError(f"{name} is a binary file: it must be JSON lines in UTF-8")


def _encoding_without_mark(line: bytes) -> str | None:
    """The encoding by where the zeros of the first ASCII characters are (RFC 4627, section 3)."""
    zeros = [byte == 0 for byte in line[:4]]
    patterns: dict[tuple[bool, ...], str] = {
        (True, True, True, False): "UTF-32BE",
        (False, True, True, True): "UTF-32LE",
        (True, False, True, False): "UTF-16BE",
        (False, True, False, True): "UTF-16LE",
    }
    return patterns.get(tuple(zeros)) if line[:4].strip(b"\0").isascii() and len(zeros) == 4 else None


def _check_head(lines: Sequence[bytes], name: str) -> None:
    """Raise a ``CorpusError`` if none of the first lines is JSON or begins as an object does."""
    if not lines:
        return
    parsed = [_parsed(line) for line in lines]
    is_array = len(lines) == 1 and isinstance(parsed[0][0], list) and bool(parsed[0][0])
    if is_array or (parsed[0][1] and lines[0].lstrip().startswith(b"[") and len(lines) > 1):
        raise CorpusError(f"{name} is a JSON array: write each object on a line of its own")
    if any(problem is None or "UTF-8" in problem for _, problem in parsed):
        return
    if any(line.lstrip().startswith(b"{") for line in lines):
        return
    table = any(separator in lines[0] for separator in (b",", b"\t", b";"))
    raise CorpusError(
        f"{name} is not JSON lines{' but looks like CSV' if table else ''}: each line must be a JSON object, "
        'such as {"premise": "...", "hypothesis": "..."} or {"text": "..."}'
    )


def _parsed(line: bytes) -> tuple[object, str | None]:
    """The value of a line, and what is wrong with the line, if anything."""
    try:
        return json.loads(line.decode("utf-8")), None
    except UnicodeDecodeError:
        return None, "not UTF-8"
    except json.JSONDecodeError as error:
        return None, f"not JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return None, f"not JSON that can be read: {error}"
