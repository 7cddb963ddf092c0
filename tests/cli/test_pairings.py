"""Which models are studied on which corpora, and what the results are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from captum_hta.cli.errors import UserError
from captum_hta.cli.pairings import Pairing, pairings

A, B = Path("data/a.jsonl"), Path("b.jsonl")


def of(
    models: tuple[str, ...] = (),
    files: tuple[Path, ...] = (),
    datasets: tuple[str, ...] = (),
    fields: tuple[str, ...] = (),
    labels: tuple[str, ...] = (),
) -> list[tuple[str | None, Path | str | None, str | None]]:
    """Model, source and label of each run."""
    return [(run.model, run.source, run.label) for run in pairings(models, files, datasets, fields, labels)]


def test_one_run_needs_no_label() -> None:
    """The model and data are the defaults, or those that are named."""
    assert of() == [(None, None, None)]
    assert of(("m",), (A,)) == [("m", A, None)]
    assert of((), (), ("hub:set",)) == [(None, "hub:set", None)]


def test_one_of_a_kind_goes_with_all() -> None:
    """Runs are labelled by what they do not share."""
    assert of(("m",), (A, B)) == [("m", A, "a"), ("m", B, "b")]
    assert of(("m", "n"), (A,)) == [("m", A, "m"), ("n", A, "n")]
    assert of(("m", "n"), (A, B)) == [("m", A, "m, a"), ("n", B, "n, b")]
    assert of((), (A,), ("set",)) == [(None, A, "a"), (None, "set", "set")]


def test_fields_tell_runs_apart() -> None:
    """Languages of one file, for example."""
    runs = pairings((), (A,), (), ("en.p, en.h", "ar.text"), ())
    assert [run.fields for run in runs] == [("en.p", "en.h"), ("ar.text",)]
    assert [run.label for run in runs] == ["en.p en.h", "ar.text"]


def test_labels_are_those_given() -> None:
    """Their folders have names that every system takes."""
    runs = pairings((), (A, B), (), (), ("English", "العربية / 2"))
    assert [run.label for run in runs] == ["English", "العربية / 2"]
    assert [run.folder for run in runs] == ["English", "العربية-2"]
    assert Pairing(None, None, None, "../..").folder == "run"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"models": ("m", "n"), "files": (A, B, A)}, "--model is given 2 times for 3 studies"),
        ({"files": (A, B), "labels": ("x",)}, "--label is given 1 times for 2 studies"),
        ({"files": (A, B), "fields": ("a", "b", "c")}, "--data is given 2 times for 3 studies"),
        ({"files": (A, A)}, "give each its own --label"),
        ({"files": (A, B), "labels": ("x/y", "x y")}, "two studies would be called 'x-y'"),
        ({"models": ("m", "n"), "files": (Path("-"),)}, "standard input can be read only once"),
        ({"files": (Path("-"), A, Path("-")), "labels": ("x", "y", "z")}, "only once"),
        ({"fields": ("a,b,c",)}, "must name one field or two"),
        ({"fields": ("a,",)}, "must name one field or two"),
        ({"files": (A, B), "labels": ("x", "layers.csv")}, "'layers.csv' is the name of a result"),
        ({"files": (A, B), "labels": ("x", "y\udcff")}, r"--label 'y\\udcff' is not UTF-8"),
        ({"files": (A, Path("b\udcff"))}, r"--data 'b\\udcff' is not UTF-8"),
        ({"models": ("m\udcff",)}, "--model"),
    ],
    ids=[
        "models",
        "labels",
        "fields",
        "twice",
        "alike",
        "stdin",
        "stdin twice",
        "three",
        "empty",
        "result",
        "label not UTF-8",
        "file not UTF-8",
        "model not UTF-8",
    ],
)
def test_what_does_not_fit(asked: dict, words: str) -> None:
    """The option and the numbers are named."""
    with pytest.raises(UserError, match=words):
        of(**asked)
