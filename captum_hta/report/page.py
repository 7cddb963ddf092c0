"""A page of sections with figures and tables that needs no other file."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

PIXELS = 96
"""Pixels of an inch on a page (CSS Values and Units, section 6.2)."""
WIDE = 8.0
"""Inches of a figure that a phone shows a part of at a time."""
ERROR = "_error"
"""How the column ends that holds the standard errors of the column whose name comes before."""


DASH = "-"
"""What stands for a number that is not defined."""


@dataclass(frozen=True)
class Shown:
    """A figure with what to say about it.

    Attributes:
        file: Its name as a file.
        title: Its title.
        sentence: What to see in it.
        figure: The figure.
        alt: What it shows, by its numbers, for those who do not see it.
    """

    file: str
    title: str
    sentence: str
    figure: Figure
    alt: str

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        width, height = self.figure.get_size_inches() * PIXELS
        return round(width), round(height)

    @property
    def wide(self) -> bool:
        """Whether it is too wide to be read on a phone as a whole."""
        return self.figure.get_figwidth() > WIDE


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: What is in it.
        value: The number that it is sorted by; ``None`` for words, which are sorted by themselves.
    """

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Table:
    """A table with what to say about it.

    Attributes:
        title: Its title.
        sentence: How to read it, and in which units.
        columns: Names of the columns.
        rows: Rows of a cell for each column. The first names the row.
        folded: Whether it is shown only when it is asked for.
    """

    title: str
    sentence: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    folded: bool = False

    @property
    def words(self) -> list[bool]:
        """For each column whether words are in it."""
        columns = zip(*self.rows, strict=True)
        return [any(cell.value is None and cell.text != DASH for cell in column) for column in columns]

    @classmethod
    def of(
        cls, frame: pd.DataFrame, title: str, sentence: str, names: Mapping[str, str], folded: bool = False
    ) -> Table:
        """A table of the columns that have a name; standard errors stand behind what they are errors of.

        Args:
            frame: Words and numbers. A column ``x_error`` holds the standard errors of the column ``x``.
            title: As in the class.
            sentence: As in the class.
            names: Names of columns on the page, by their names in the frame.
            folded: As in the class.
        """
        errors = {name: frame.get(name + ERROR, pd.Series(np.nan, frame.index)) for name in names}
        columns = [map(cell, frame[name], errors[name]) for name in names]
        return cls(title, sentence, list(names.values()), list(zip(*columns, strict=True)), folded)


def cell(value: Any, error: float = np.nan) -> Cell:
    """A word or a number, with its standard error where that is known."""
    if isinstance(value, str):
        return Cell(value)
    if not np.isfinite(value):
        return Cell(DASH)
    text = str(value) if isinstance(value, int | np.integer) else f"{value:.3f}"
    return Cell(text + (f" ± {error:.3f}" if np.isfinite(error) else ""), float(value))


@dataclass(frozen=True)
class Section:
    """A section of a page.

    Attributes:
        title: Its title, which no other section of the page has.
        intro: A few sentences to begin with.
        shown: Its figures.
        tables: Its tables, which follow the figures.
    """

    title: str
    intro: str = ""
    shown: Sequence[Shown] = ()
    tables: Sequence[Table] = ()

    @property
    def anchor(self) -> str:
        """What links to it end with."""
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")


def rendered(
    template: str,
    sections: Sequence[Section],
    images: Mapping[str, bytes],
    facts: Mapping[str, Mapping[str, Any]],
    **more: Any,
) -> str:
    """A page as HTML.

    Args:
        template: Name of a template that extends ``page.html.jinja``.
        sections: What is on the page.
        images: The figures of the sections as PNG, by their file names.
        facts: How it came about: groups of names and values, shown at the end.
        **more: What else the template asks for.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("captum_hta.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = plain
    encoded = {name: base64.b64encode(image).decode() for name, image in images.items()}
    return environment.get_template(template).render(sections=sections, images=encoded, facts=facts, **more)


def plain(value: Any) -> str:
    """A value of a record as a reader would write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "; ".join(f"{plain(name)} {plain(one)}" for name, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value)) or "none"
    return "none" if value is None else str(value)
