"""Several studies side by side: the table, the figures and the page that compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from captum_hta.report import descriptions
from captum_hta.report.figures import (
    centres_together_figure,
)
from captum_hta.report.one_study import png, versions, write_files
from captum_hta.report.page import DASH, Cell, Section, Shown, Table, rendered
from captum_hta.report.sections import LAYER_COLUMNS, error_sentences
from captum_hta.study.findings import Found, findings
from captum_hta.study.run import Study
from captum_hta.views.names import QUANTITY_NAMES

QUANTITIES = ("attention", "input")


@dataclass(frozen=True)
class Part:
    """One of the studies.

    Attributes:
        label: What to call it.
        folder: Where its own results are, in that of all.
        study: What was found.
        record: Of its run.
        num_layers: Layers of its model.
    """

    label: str
    folder: str
    study: Study
    record: dict[str, Any]
    num_layers: int

    def findings(self) -> list[Found]:
        """What the papers report, in this study."""
        return findings(self.study, self.num_layers)


def write(folder: Path, parts: Sequence[Part]) -> list[Path]:
    """Write tables, figures and ``report.html`` of several studies.

    Args:
        folder: That of all studies.
        parts: The studies.

    Returns:
        The files.

    Raises:
        OSError: If the folder cannot be written.
    """
    centres = _labelled(parts, Study.centres_of_mass)
    layers = _labelled(parts, Study.layer_summary)
    sections = [_centres(centres), _beside_the_papers(parts), _by_layer(layers)]
    images = {item.file: png(item.figure) for section in sections for item in section.shown}
    page = rendered("several_studies.html.jinja", sections, images, _facts(parts), parts=parts)
    texts = {
        "centres_of_mass.csv": centres.to_csv(index=False),
        "layers.csv": layers.to_csv(index=False),
        "report.html": page,
    }
    return write_files(folder, images, texts)


def _facts(parts: Sequence[Part]) -> dict[str, dict[str, Any]]:
    """How the studies came about: what they share, and what each is of."""
    own = ("data", "fields")
    shared = {name: value for name, value in parts[0].record["arguments"].items() if name not in own}
    data = {part.label: " ".join(str(part.record["arguments"][name] or "") for name in own) for part in parts}
    errors = {part.label: " ".join(error_sentences(part.study)) for part in parts}
    return {"Data": data, "Contributions": errors, "Settings": shared, "Versions": versions()}


def _labelled(parts: Sequence[Part], table: Any) -> pd.DataFrame:
    """A table of every study, one below the other."""
    return pd.concat([table(part.study).assign(label=part.label) for part in parts], ignore_index=True)[
        lambda every: ["label", *every.columns.drop("label")]
    ]


def _centres(centres: pd.DataFrame) -> Section:
    """After Figure 4 of Pascual et al. 2021."""
    return Section(
        "Centre of mass",
        "After Figure 4 of Pascual et al. 2021: the mean over heads of the centre of mass of the histogram "
        "over relative positions. Below zero heads look back, above zero ahead. Texts are read in logical "
        "order, also where they are written from right to left.",
        [
            Shown(
                f"centre_of_{quantity}.png",
                f"Centre of mass of {QUANTITY_NAMES[quantity]}",
                "A line for each study, over its layers.",
                centres_together_figure(centres, quantity),
                descriptions.centres_together(centres, quantity),
            )
            for quantity in QUANTITIES
        ],
    )


def _beside_the_papers(parts: Sequence[Part]) -> Section:
    found = [part.findings() for part in parts]
    return Section(
        "Beside the paper",
        "What the papers report of BERT-base, and the same number of each study; whether the finding holds "
        "there stands behind it. The page of each study tells how statements "
        "about some of twelve layers are read.",
        tables=[
            Table(
                "Findings of the papers",
                "“-” are numbers that were not measured.",
                ["finding", "in the paper", *(part.label for part in parts)],
                [_finding_row(one) for one in zip(*found, strict=True)],
            )
        ],
    )


def _finding_row(found: Sequence[Found]) -> list[Cell]:
    finding = found[0].finding
    return [Cell(finding.sentence), Cell(finding.paper), *map(_verdict, found)]


def _verdict(one: Found) -> Cell:
    if one.holds is None:
        return Cell(DASH)
    return Cell(f"{format(one.number, one.finding.form)} ({one.verdict})", one.number)


def _by_layer(layers: pd.DataFrame) -> Section:
    return Section(
        "By layer",
        tables=[
            Table.of(
                layers,
                "Correlations and centres of mass by study and layer",
                "Correlations of attention with both contributions, from -1 to 1: medians over the heads of "
                "a layer. Centres of mass are in tokens, means over its heads.",
                {"label": "study"} | LAYER_COLUMNS,
            )
        ],
    )
