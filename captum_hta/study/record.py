"""What ``run.json`` says about a run before the results are added."""

from __future__ import annotations

from typing import TypedDict


class RunRecord(TypedDict, total=False):
    """The circumstances of a study.

    Attributes:
        model: Name of the model.
        label: What the study is called among several, if there are several.
        several: Whether it is one of several.
        arguments: The options of the command, and the data.
        seed: Names the random numbers.
        counts: Numbers of texts and tokens, and of those left out.
        seconds: How long each step took.
        bad_lines: Lines of the data that could not be read, with the reasons.
    """

    model: str
    label: str | None
    several: bool
    arguments: dict[str, object]
    seed: int
    counts: dict[str, int]
    seconds: dict[str, float]
    bad_lines: list[str]
