"""Pages: what numbers look like, and that tables sort and nothing overflows in a real browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from browser import BROWSER, PHONE, SCREEN, visit
from matplotlib.figure import Figure

from captum_hta.report.files import images_of
from captum_hta.report.page import CaptionedFigure, Cell, Section, Table, cell, plain, rendered

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium")
FRAME = pd.DataFrame(
    {
        "name": ["ten", "nine", "none", "minus", "eleven"],
        "value": [10.0, 9.0, np.nan, -0.5, 11.0],
        "value_error": [0.25, np.nan, np.nan, 0.125, 0.5],
        "count": [3, 100, 20, 1, 0],
    }
)
NAMES = {"name": "name", "value": "value", "count": "count"}
LONG = "unbreakable" * 20


def captioned(file: str, width: float) -> CaptionedFigure:
    """A figure of a line."""
    figure = Figure(figsize=(width, 2))
    figure.subplots().plot([0, 1])
    return CaptionedFigure(
        file, f"A line, {width} inches", "It goes up.", figure, "A line that goes from 0 up to 1."
    )


@pytest.fixture(scope="module")
def page() -> str:
    """A page with figures, with a table of many columns, and with two to sort."""
    wide = pd.DataFrame({f"column {number}": [number / 7] for number in range(40)})
    sections = [
        Section("Figures & <more>", "Two.", [captioned("a.png", 5), captioned("b.png", 12)]),
        Section(
            "Open",
            tables=[
                Table.of(FRAME, "One", "Sorted.", NAMES),
                Table.of(wide, "Wide", "", {n: n for n in wide}),
            ],
        ),
        Section("Closed", tables=[Table.of(FRAME, "Two", "Sorted too.", NAMES, folded=True)]),
    ]
    images = images_of(sections)
    record = {"model": LONG, "counts": {"examples": 1}}
    facts = {"Settings": {"a_path": LONG, "seconds": {"first": 1, "second": 2.5}}}
    return rendered("one_study.html.jinja", sections, images, facts, record=record, tokens=3, lead=[])


# --- cells ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "error", "expected"),
    [
        ("word", np.nan, Cell("word")),
        (3, np.nan, Cell("3", 3.0)),
        (np.int64(3), 0.5, Cell("3 ± 0.500", 3.0)),
        (1.0, np.nan, Cell("1.000", 1.0)),
        (0.12345, 0.01, Cell("0.123 ± 0.010", 0.12345)),
        (np.nan, 0.01, Cell("-")),
        (np.inf, np.nan, Cell("-")),
    ],
    ids=["word", "integer", "count", "one", "error", "nan", "infinite"],
)
def test_cells(value: object, error: float, expected: Cell) -> None:
    """Words as they are, numbers to three places with what is known of their error."""
    assert cell(value, error) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, "yes"),
        (None, "none"),
        (0, "0"),
        ([], "none"),
        ([1, None], "1, none"),
        ({"a": 1.5, "b": False}, "a 1.5; b no"),
        ({}, "none"),
    ],
    ids=["yes", "none", "zero", "no-list", "list", "parts", "no-parts"],
)
def test_plain_words(value: object, expected: str) -> None:
    """Values of a record as a reader would write them."""
    assert plain(value) == expected


def test_tables_of_frames() -> None:
    """Named columns alone, in the order of the names; errors stand behind their values."""
    table = Table.of(FRAME, "title", "sentence", {"value": "Value", "name": "Name"})
    assert table.columns == ["Value", "Name"]
    texts = [one.text for one, _ in table.rows]
    assert texts == ["10.000 ± 0.250", "9.000", "-", "-0.500 ± 0.125", "11.000 ± 0.500"]
    assert table.words == [False, True]


# --- in a browser ---------------------------------------------------------------------------------

SORT = """() => {
  const found = {};
  const [first, , second] = document.querySelectorAll("table");
  const column = (table, number) => [...table.tBodies[0].rows].map((row) => row.cells[number].textContent);
  const heads = first.tHead.rows[0].cells;
  const click = (number) => heads[number].querySelector("button").click();
  const state = () => [column(first, 0), [...heads].map((head) => head.getAttribute("aria-sort"))];
  found.before = state();
  click(1);
  found.up = state();
  click(1);
  found.down = state();
  click(2);
  found.counts = state();
  click(0);
  found.words = state();
  found.other = column(second, 0);
  found.focus = [...heads].map((head) => head.querySelector("button").tabIndex);
  return found;
}"""


@needs_browser
def test_a_click_sorts(page: str, tmp_path: Path) -> None:
    """Numbers as numbers, dashes last both modes, words as words; only that table; and it is told."""
    visited = visit(page, tmp_path, SORT)
    up, down = "ascending", "descending"
    assert visited.found == {
        "before": [list(FRAME["name"]), [None] * 3],
        "up": [["minus", "nine", "ten", "eleven", "none"], [None, up, None]],
        "down": [["eleven", "ten", "nine", "minus", "none"], [None, down, None]],
        "counts": [["eleven", "minus", "ten", "none", "nine"], [None, None, up]],
        "words": [["eleven", "minus", "nine", "none", "ten"], [up, None, None]],
        "other": list(FRAME["name"]),
        "focus": [0, 0, 0],
    }
    assert visited.console == []


LAYOUT = """() => {
  document.querySelectorAll("details").forEach((one) => { one.open = true; });
  const root = document.documentElement;
  const wide = document.querySelectorAll("table")[1];
  wide.closest(".scroll").scrollLeft = 200;
  const [first, next] = [...wide.tBodies[0].rows[0].cells].map((one) => one.getBoundingClientRect().left);
  return {
    overflow: root.scrollWidth - root.clientWidth,
    first: first - wide.closest(".scroll").getBoundingClientRect().left,
    images: [...document.images].map((image) => image.naturalWidth),
    links: [...document.querySelectorAll("nav a")].map((one) => document.querySelector(one.hash) !== null),
    width: innerWidth,
  };
}"""


@needs_browser
@pytest.mark.parametrize("width", [PHONE, SCREEN], ids=["phone", "screen"])
def test_nothing_overflows(page: str, tmp_path: Path, width: int) -> None:
    """Wide tables and figures scroll by themselves, first columns stay; figures are there, links lead on."""
    visited = visit(page, tmp_path, LAYOUT, width)
    assert visited.found == {
        "overflow": 0, "first": 0, "images": [750, 1800], "links": [True] * 4, "width": width,
    }  # fmt: skip
    assert visited.console == []


@needs_browser
def test_complaints_are_heard(page: str, tmp_path: Path) -> None:
    """The browser's console is really read."""
    broken = page.replace("</body>", "<script>nothing.at.all();</script></body>")
    assert "nothing is not defined" in " ".join(visit(broken, tmp_path, "() => 1").console)
