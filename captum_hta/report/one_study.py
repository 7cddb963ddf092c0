"""The output folder of a study: tables, figures, the run's record, and a page that shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from captum_hta.report.contents import FACTS, SECTIONS, SectionOf, lead
from captum_hta.report.files import csv_text, images_of, versions, write_files
from captum_hta.report.findings import found_in
from captum_hta.report.page import Section, rendered
from captum_hta.study.record import RunRecord
from captum_hta.study.run import Study
from captum_hta.views.names import QUANTITY_NAMES


def write(
    folder: Path, study: Study, record: RunRecord, sections: Sequence[SectionOf] = SECTIONS
) -> list[Path]:
    """Write the tables, the figures, ``run.json`` and ``report.html`` of a study.

    Args:
        folder: The folder; made if it is missing.
        study: A study of at least one text.
        record: Model, ``"arguments"``, ``"counts"`` and ``"seconds"`` of the run; results and versions are
            added.
        sections: What is on the page.

    Returns:
        The files.

    Raises:
        OSError: If the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = [section for make in sections if (section := make(study)) is not None]
    images = images_of(made)
    texts = {f"{name}.csv": csv_text(table) for name, table in study.tables().items()} | {
        "run.json": json.dumps({**record, **_results(study)}, indent=2) + "\n",
        "report.html": _page(study, made, images, record),
    }
    return write_files(folder, images, texts)


def _results(study: Study) -> dict[str, object]:
    """What is added to the record of a run."""
    return study.record() | {
        "findings_of_papers": [one.record() for one in found_in(study)],
        "modes": study.plans,
        "versions": versions(),
    }


def _page(study: Study, sections: Sequence[Section], images: Mapping[str, bytes], record: RunRecord) -> str:
    return rendered(
        "one_study.html.jinja",
        sections,
        images,
        _facts(study, record),
        record=record,
        lead=lead(study),
        tokens=sum(study.tokens),
    )


def _facts(study: Study, record: RunRecord) -> dict[str, Mapping[str, object]]:
    """Settings and circumstances of the study in groups; empty groups are left out."""
    groups: dict[str, Mapping[str, object]] = {
        "Settings": record["arguments"],
        "Counts": record["counts"],
        **{title: facts(study) for title, facts in FACTS.items()},
        "Seconds": record.get("seconds", {}),
        "Modes": {QUANTITY_NAMES[source]: modes for source, modes in study.plans.items()},
        "Versions": versions(),
    }
    return {title: values for title, values in groups.items() if values}
