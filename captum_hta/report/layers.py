"""The table of layers."""

from __future__ import annotations

from collections.abc import Sequence

from captum_hta.report.labelled_study import LabelledStudy, stacked
from captum_hta.report.page import Section, Table
from captum_hta.study.run import Study

COLUMNS = {
    "layer": "layer",
    "pearson_previous_layer_median": "previous layer, Pearson",
    "spearman_previous_layer_median": "previous layer, Spearman",
    "pearson_input_median": "input, Pearson",
    "spearman_input_median": "input, Spearman",
    "centre_of_mass_attention": "centre of attention",
    "centre_of_mass_input": "centre of input contribution",
}
NOTE = (
    "Correlations of attention with both contributions, from -1 to 1: medians over the heads of a layer. "
    "Centres of mass are in tokens, means over its heads: below zero they lie before the query."
)


def by_layer(study: Study) -> Section:
    """The section with a row for each layer."""
    table = study.tables()["layers"]
    return Section(
        "By layer", tables=[Table.of(table, "Correlations and centres of mass by layer", NOTE, COLUMNS)]
    )


def layers_of_studies(studies: Sequence[LabelledStudy]) -> Section:
    """The section with a row for each study and layer."""
    columns = {"label": "study"} | COLUMNS
    title = "Correlations and centres of mass by study and layer"
    return Section("By layer", tables=[Table.of(stacked(studies, "layers"), title, NOTE, columns)])
