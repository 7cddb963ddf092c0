"""A study among several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from captum_hta.study.record import RunRecord
from captum_hta.study.run import Study


@dataclass(frozen=True)
class LabelledStudy:
    """A study with its label.

    Attributes:
        label: The label.
        folder: Its folder, relative to the common one.
        study: The study.
        record: The record of its run.
    """

    label: str
    folder: str
    study: Study
    record: RunRecord


def stacked(studies: Sequence[LabelledStudy], table: str) -> pd.DataFrame:
    """A table of every study, one below the other, with a first column ``label``."""
    tables = [one.study.tables()[table].assign(label=one.label) for one in studies]
    every = pd.concat(tables, ignore_index=True)
    return every[["label", *every.columns.drop("label")]]
