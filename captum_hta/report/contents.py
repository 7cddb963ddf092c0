"""What is on the pages, in order. A new analysis adds its sections here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from captum_hta.report import (
    correlations,
    effective_attention,
    errors,
    findings,
    hidden_tokens,
    identifiability,
    layers,
    patterns,
    positions,
    sinks,
)
from captum_hta.report.labelled_study import LabelledStudy
from captum_hta.report.page import Section
from captum_hta.study.run import Study

SectionOf = Callable[[Study], Section | None]
"""Makes a section of the page of a study; ``None`` if the study has nothing to show there."""

SECTIONS: Sequence[SectionOf] = (
    findings.findings_of_papers,
    correlations.within_a_block,
    positions.relative_positions,
    correlations.from_the_input,
    patterns.simple_patterns,
    sinks.sinks,
    hidden_tokens.hidden_tokens,
    identifiability.identified_tokens,
    effective_attention.effective_attention,
    layers.by_layer,
    correlations.by_head,
)
"""Sections of the page of one study."""

COMPARISONS: Sequence[Callable[[Sequence[LabelledStudy]], Section]] = (
    positions.centres_of_studies,
    findings.findings_of_studies,
    layers.layers_of_studies,
)
"""Sections of the page of several studies."""

LEAD: Sequence[Callable[[Study], list[str]]] = (errors.accuracy,)
"""Sentences at the top of the page of one study."""

FACTS: Mapping[str, Callable[[Study], Mapping[str, str]]] = {
    "Rows without a correlation": correlations.rows_left_out,
}
"""Groups of names and values at the end of the page of one study."""


def lead(study: Study) -> list[str]:
    """The sentences of :data:`LEAD`."""
    return [sentence for sentences in LEAD for sentence in sentences(study)]
