"""Console output: lines, tables and progress bars."""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tqdm import tqdm

_out = Console(soft_wrap=False)
_err = Console(stderr=True)
OBEYED = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal obeys: controls (C0 and C1), line separators, marks of the writing direction
(Unicode Standard Annex 9); and lone surrogates, which no encoding has."""


def visible(text: str) -> str:
    r"""A text with an escape such as ``\x1b`` in the place of each character that a terminal would obey."""
    return OBEYED.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), text)


def tolerate_encodings() -> None:
    """Let both streams write what their encoding lacks as an escape, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(line: str, style: str = "") -> None:
    """Print a line of results as it is: brackets, colons and control characters have no meaning."""
    _out.print(Text(visible(line), style), soft_wrap=True)


def warn(message: str) -> None:
    """Print a message, of one line or more, on the error stream as it is."""
    _err.print(Text("\n".join(map(visible, message.split("\n")))), soft_wrap=True)


def waiting(line: str) -> AbstractContextManager[object]:
    """A spinner on the error stream while something takes time."""
    return _err.status(Text(line))


def table(title: str, header: bool = True) -> Table:
    """An empty table with a title."""
    return Table(title=Text(visible(title), "table.title"), title_justify="left", show_header=header)


def add_row(to: Table, *cells: str) -> None:
    """Add a row of cells, each shown as it is."""
    to.add_row(*(Text(visible(cell)) for cell in cells))


def show(shown: Table) -> None:
    """Print a table."""
    _out.print(shown)


@contextmanager
def progress(examples: int) -> Iterator[Callable[[float], object]]:
    """A progress bar; yields what to call with the number of examples done."""
    with progress_of(counted(examples, "example")) as advance:
        advance(0)
        yield lambda done: advance(done / examples)


@contextmanager
def progress_of(what: str) -> Iterator[Callable[[float], object]]:
    """A progress bar that appears with the first step; yields what to call with the share done since."""
    with ExitStack() as open_bars:
        bars: list[tqdm] = []

        def advance(share: float) -> None:
            if not bars:
                bars.append(open_bars.enter_context(_bar(what)))
            bars[0].update(min(share, 1 - bars[0].n))

        yield advance


def _bar(what: str) -> tqdm:
    from tqdm import tqdm

    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
    return tqdm(total=1.0, desc=what, bar_format=form, file=sys.stderr)


def rounded(value: float, form: str) -> str:
    """A number, or a dash where it is not finite."""
    return format(value, form) if math.isfinite(value) else "-"


def counted(number: int, noun: str) -> str:
    """``"1 line"`` or ``"2 lines"``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
