"""Several studies compared: the tables, the figures and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from captum_hta.report.contents import COMPARISONS, lead
from captum_hta.report.files import csv_text, images_of, versions, write_files
from captum_hta.report.labelled_study import LabelledStudy, stacked
from captum_hta.report.page import rendered

TABLES = ("centres_of_mass", "layers")
"""Tables of all studies in one file."""


def write(folder: Path, studies: Sequence[LabelledStudy]) -> list[Path]:
    """Write tables, figures and ``report.html`` of several studies.

    Args:
        folder: The folder that has the folders of the studies.
        studies: The studies.

    Returns:
        The files.

    Raises:
        OSError: If the folder cannot be written.
    """
    sections = [make(studies) for make in COMPARISONS]
    images = images_of(sections)
    page = rendered("several_studies.html.jinja", sections, images, _facts(studies), studies=studies)
    tables = {f"{name}.csv": csv_text(stacked(studies, name)) for name in TABLES}
    return write_files(folder, images, tables | {"report.html": page})


def _facts(studies: Sequence[LabelledStudy]) -> dict[str, Mapping[str, object]]:
    """The settings that the studies share, and the data and accuracy of each."""
    own = ("data", "fields")
    shared = {name: value for name, value in studies[0].record["arguments"].items() if name not in own}
    data = {one.label: " ".join(str(one.record["arguments"][name] or "") for name in own) for one in studies}
    accuracy = {one.label: " ".join(lead(one.study)) for one in studies}
    return {"Data": data, "Contributions": accuracy, "Settings": shared, "Versions": versions()}
