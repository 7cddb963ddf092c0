"""A page of sections with figures and tables that needs no other file."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jinja2
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

PIXELS = 96
"""Pixels per inch on a page (CSS Values and Units, section 6.2)."""
WIDE = 8.0
"""Inches beyond which a figure scrolls on a phone."""
ERROR = "_error"
"""Suffix of the column that has the standard errors of the column named before it."""
DASH = "-"
"""Text for a number that is not defined."""


@dataclass(frozen=True)
class CaptionedFigure:
    """A figure with its title, caption and alternative text.

    Attributes:
        file: The name of its file.
        title: The title.
        caption: How to read it, and what it shows.
        figure: The figure.
        alt: What it shows, in words and numbers, for readers who cannot see it.
    """

    file: str
    title: str
    caption: str
    figure: Figure
    alt: str

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        width, height = self.figure.get_size_inches() * PIXELS
        return round(width), round(height)

    @property
    def wide(self) -> bool:
        """Whether it is too wide for a phone."""
        return self.figure.get_figwidth() > WIDE


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: The text.
        value: The number by which it is sorted; ``None`` for words, which are sorted alphabetically.
    """

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Table:
    """A table with its title and a note.

    Attributes:
        title: The title.
        note: How to read it, and the units.
        columns: Names of the columns.
        rows: A cell for each column in each row. The first cell names the row.
        folded: Whether it is hidden until a reader opens it.
    """

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    folded: bool = False

    @property
    def words(self) -> list[bool]:
        """Whether each column has words in it."""
        columns = zip(*self.rows, strict=True)
        return [any(cell.value is None and cell.text != DASH for cell in column) for column in columns]

    @classmethod
    def of(
        cls, frame: pd.DataFrame, title: str, note: str, names: Mapping[str, str], folded: bool = False
    ) -> Table:
        """A table of some columns of a frame, with standard errors after their numbers.

        Args:
            frame: Words and numbers. A column ``x_error`` has the standard errors of the column ``x``.
            title: As in the class.
            note: As in the class.
            names: Names of columns on the page, by their names in the frame; other columns are left out.
            folded: As in the class.
        """
        errors = {name: frame.get(name + ERROR, pd.Series(np.nan, frame.index)) for name in names}
        columns = [map(cell, frame[name], errors[name]) for name in names]
        return cls(title, note, list(names.values()), list(zip(*columns, strict=True)), folded)


def cell(value: str | float, error: float = np.nan) -> Cell:
    """A cell with a word or a number, and the standard error of the number if it is known."""
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
        title: The title, which no other section of the page has.
        intro: A few sentences at the beginning.
        figures: Its figures.
        tables: Its tables, which follow the figures.
    """

    title: str
    intro: str = ""
    figures: Sequence[CaptionedFigure] = ()
    tables: Sequence[Table] = ()

    @property
    def anchor(self) -> str:
        """The fragment of links to it."""
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")


def rendered(
    template: str,
    sections: Sequence[Section],
    images: Mapping[str, bytes],
    facts: Mapping[str, Mapping[str, object]],
    **more: object,
) -> str:
    """A page as HTML.

    Args:
        template: Name of a template that extends ``page.html.jinja``.
        sections: The sections of the page.
        images: The figures of the sections as PNG, by their file names.
        facts: Settings and versions: groups of names and values, shown at the end.
        **more: Further variables of the template.
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


def plain(value: object) -> str:
    """A value of a record as text for readers."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "; ".join(f"{plain(name)} {plain(one)}" for name, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value)) or "none"
    return "none" if value is None else str(value)
