"""The table of layers."""

from __future__ import annotations

from collections.abc import Sequence

from captum_hta.report.labelled_study import LabelledStudy, stacked
from captum_hta.report.page import Section, Table
from captum_hta.study.run import Study


def by_layer(study: Study) -> Section:
    """The section with a row for each layer."""
    columns, note = _columns([study])
    return Section("By layer", tables=[Table.of(study.tables()["layers"], "Results by layer", note, columns)])


def layers_of_studies(studies: Sequence[LabelledStudy]) -> Section:
    """The section with a row for each study and layer."""
    columns, note = _columns([one.study for one in studies])
    table = Table.of(
        stacked(studies, "layers"), "Results by study and layer", note, {"label": "study"} | columns
    )
    return Section("By layer", tables=[table])


def _columns(studies: Sequence[Study]) -> tuple[dict[str, str], str]:
    """Columns that an analysis of one of the studies adds, with their titles, and how to read them."""
    analyses = {kind: one for study in studies for kind, one in study.analyses.items()}.values()
    columns = {column: title for one in analyses for column, title in one.layer_columns.items()}
    return {"layer": "layer"} | columns, " ".join(one.layer_note for one in analyses if one.layer_note)
