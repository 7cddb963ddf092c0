"""The output folder of a study: tables, figures, the run's record, and a page that shows them."""

from __future__ import annotations

import io
import json
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from captum_hta.report.page import Section, rendered
from captum_hta.report.sections import beside_the_paper, error_sentences, figures, numbers, rows_left_out
from captum_hta.study.findings import Found, findings
from captum_hta.study.outputs import write_outputs
from captum_hta.study.run import Study, finite
from captum_hta.views.names import QUANTITY_NAMES

PACKAGES = ("captum-hta", "torch", "transformers", "captum", "transformer-lens", "numpy", "scipy")


def write(
    folder: Path,
    study: Study,
    record: dict[str, Any],
    num_layers: int | None = None,
) -> list[Path]:
    """Write the tables, the figures, ``run.json`` and ``report.html`` of a study.

    Args:
        folder: Made if it is missing.
        study: A study of at least one example.
        record: Model, arguments and counts of the run; findings and versions are added. ``"seconds"``, in it
            or in its counts, is a number or one for each part of the run.
        num_layers: Layers of the model. Default: ``None``, those of the study are all.

    Returns:
        The files.

    Raises:
        OSError: If the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = findings(study, num_layers)
    sections = [beside_the_paper(found), *figures(study), *numbers(study)]
    record = record | _results(study, found)
    images = {item.file: png(item.figure) for section in sections for item in section.shown}
    texts = {name: table.to_csv(index=False) for name, table in _tables(study).items()} | {
        "run.json": json.dumps(record, indent=2) + "\n",
        "report.html": _page(study, sections, images, record),
    }
    return write_files(folder, images, texts)


def write_files(folder: Path, images: Mapping[str, bytes], texts: Mapping[str, str]) -> list[Path]:
    """Write files by their names, as :func:`captum_hta.study.outputs.write_outputs` does."""
    return write_outputs(folder, {**images, **{name: text.encode() for name, text in texts.items()}})


def _results(study: Study, found: Sequence[Found]) -> dict[str, Any]:
    """What is added to the record of a run."""
    return {
        "findings": {name: finite(value) for name, value in study.findings().items()},
        "beside_the_paper": [one.record() for one in found],
        "standard_errors": _finite_errors(study),
        "modes": study.plans,
        "versions": versions(),
    }


def _tables(study: Study) -> dict[str, pd.DataFrame]:
    """The tables, by the names of their files."""
    tables = {
        "correlations.csv": study.correlations(),
        "relative_positions.csv": study.relative_positions(),
        "centres_of_mass.csv": study.centres_of_mass(),
        "layers.csv": study.layer_summary(),
    }
    further = {
        "mixing.csv": study.mixing,
        "patterns.csv": study.patterns,
        "effective_attention.csv": study.effective,
        "identifiability.csv": study.identifiability,
    }
    return tables | {name: one.table() for name, one in further.items() if one is not None}


def _finite_errors(study: Study) -> dict[str, dict[str, float | None]]:
    errors = study.probe_errors()
    return {
        source: {name: finite(value) for name, value in found.items()} for source, found in errors.items()
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def png(figure: Figure) -> bytes:
    """A figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


# --- the page --------------------------------------------------------------------------------------


def _page(study: Study, sections: Sequence[Section], images: dict[str, bytes], record: dict[str, Any]) -> str:
    return rendered(
        "one_study.html.jinja",
        sections,
        images,
        _facts(study, record),
        record=record,
        errors=error_sentences(study),
        tokens=sum(study.tokens),
    )


def _facts(study: Study, record: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """How the study came about, in groups; those without anything are left out."""
    counts = dict(record["counts"])
    seconds = counts.pop("seconds", record.get("seconds", {}))
    groups = {
        "Settings": record["arguments"],
        "Counts": counts,
        "Rows without a correlation": rows_left_out(study),
        "Seconds": seconds if isinstance(seconds, Mapping) else {"in all": seconds},
        "Modes": {QUANTITY_NAMES[source]: mode for source, mode in study.plans.items()},
        "Versions": record["versions"],
    }
    return {title: values for title, values in groups.items() if values}
