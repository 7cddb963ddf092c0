"""Tables as files that spreadsheets open."""

from __future__ import annotations

import csv
import io

import pandas as pd
import pytest

from captum_hta.report.files import csv_text


@pytest.mark.parametrize("word", ["=1+1", '=HYPERLINK("a")', "+1", "-1", "@a", "\t=1"])
def test_words_are_no_formulas(word: str) -> None:
    """A label that a spreadsheet would compute begins with an apostrophe; the rest is as it was."""
    rows = list(csv.reader(io.StringIO(csv_text(pd.DataFrame({"label": [word, "a=b"], "n": [-1.5, 2]})))))
    assert rows == [["label", "n"], [f"'{word}", "-1.5"], ["a=b", "2.0"]]


def test_carriage_returns_split_no_row() -> None:
    """Pandas does not quote them."""
    rows = list(csv.reader(io.StringIO(csv_text(pd.DataFrame({"label": ["a\rb", "c\nd"]})))))
    assert rows == [["label"], [r"a\rb"], ["c\nd"]]


def test_numbers_are_as_before() -> None:
    """Negative, missing and whole numbers keep their form."""
    table = pd.DataFrame({"a": [-1, 2], "b": [float("nan"), -0.125], "c": ["x", None]})
    assert csv_text(table) == table.to_csv(index=False)
