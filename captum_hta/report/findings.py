"""The findings of the papers, and whether they hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from captum_hta.report.labelled_study import LabelledStudy
from captum_hta.report.page import DASH, Cell, Section, Table
from captum_hta.study.analysis import finite
from captum_hta.study.findings import Found, findings
from captum_hta.study.run import Study

TITLE = "Findings of the papers"


def found_in(study: Study) -> list[Found]:
    """The findings in a study."""
    return findings(study.tables(), study.size.num_layers)


def findings_of_papers(study: Study) -> Section:
    """The section with the findings of the papers."""
    found = found_in(study)
    verdicts = [one.verdict for one in found]
    return Section(
        "Compared with the papers",
        f"Of {len(found)} findings of the papers {verdicts.count('yes')} hold here and "
        f"{verdicts.count('no')} do not; {verdicts.count('not measured')} were not measured. The table shows "
        "what the papers report about BERT-base, which has 12 layers of 12 heads, next to the same number "
        "here. Where the papers name some of the twelve layers, layers of the same relative depth are "
        "meant. A head's correlation is its mean over rows.",
        tables=[
            Table(
                TITLE,
                "A finding holds if the number compares with the bound as stated. Findings are “not "
                "measured” if they are about layers that were not studied, or their numbers are not defined.",
                ["finding", "holds here", "this run", "in the paper", "holds if", "source"],
                [_row(one) for one in found],
            )
        ],
    )


def _row(one: Found) -> list[Cell]:
    finding = one.finding
    number, bound = (
        DASH if np.isnan(value) else format(value, finding.form) for value in (one.number, one.bound)
    )
    return [
        Cell(finding.sentence),
        Cell(one.verdict),
        Cell(number, finite(one.number)),
        Cell(finding.paper),
        Cell(f"{finding.relation} {bound}"),
        Cell(finding.source),
    ]


def findings_of_studies(studies: Sequence[LabelledStudy]) -> Section:
    """The section with the findings of the papers in several studies."""
    found = [found_in(one.study) for one in studies]
    return Section(
        "Compared with the papers",
        "What the papers report about BERT-base, and the same number in each study, followed by whether the "
        "finding holds there. The page of each study explains how statements about some of twelve layers are "
        "read.",
        tables=[
            Table(
                TITLE,
                "“-” are numbers that were not measured.",
                ["finding", "in the paper", *(one.label for one in studies)],
                [_row_of_studies(row) for row in zip(*found, strict=True)],
            )
        ],
    )


def _row_of_studies(found: Sequence[Found]) -> list[Cell]:
    finding = found[0].finding
    return [Cell(finding.sentence), Cell(finding.paper), *map(_verdict, found)]


def _verdict(one: Found) -> Cell:
    if one.holds is None:
        return Cell(DASH)
    return Cell(f"{format(one.number, one.finding.form)} ({one.verdict})", one.number)
