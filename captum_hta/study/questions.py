"""The contributions that a study computes for every text."""

from __future__ import annotations

from captum_hta.computation import Question
from captum_hta.jacobian.endpoints import endpoints_of
from captum_hta.jacobian.query import Query
from captum_hta.model.protocol import Model
from captum_hta.study.settings import HIDDEN, SOURCES, StudySettings


def questions_of(model: Model, settings: StudySettings, hidden: bool) -> dict[str, Question]:
    """Contributions to heads by source, for :func:`captum_hta.computation.jointly`.

    Args:
        model: The model.
        settings: Settings of the study.
        hidden: Ask for the contributions of the input to hidden embeddings too, as :data:`HIDDEN`.
    """
    query = Query(
        norm=settings.norm,
        multiply_by_inputs=settings.multiply_by_inputs,
        n_probes=settings.n_probes,
        tolerance=settings.tolerance,
        seed=settings.seed,
    )
    ends = {source: endpoints_of(model, source, "head", settings.layers) for source in SOURCES}
    if hidden:
        ends[HIDDEN] = endpoints_of(model, "input", "layer", settings.layers)
    return {name: Question(query, one) for name, one in ends.items()}
