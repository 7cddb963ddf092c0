"""What the user of a study sets."""

from __future__ import annotations

from dataclasses import dataclass

SOURCES = ("previous_layer", "input")
"""The sources of the contributions to heads, as in :func:`captum_hta.contributions`."""
HIDDEN = "hidden"
"""The name of the contributions to hidden embeddings, next to those to heads."""
DEFAULT_PROBES = 16


@dataclass(frozen=True)
class StudySettings:
    """How a study is done.

    Attributes:
        layers: Layers to study. Default: ``None``, all.
        norm: Norm of the Jacobian.
        multiply_by_inputs: Scale column ``d`` of each Jacobian by ``x_i[d]``.
        n_probes: Probes of each source token for the input contribution; ``None`` for exact contributions.
        tolerance: Standard error at which to stop adding probes.
        seed: Seed of the probes, of the texts that identifiability samples, and of the maps that it trains.
        truncation: Cut texts that are longer than the model reads.
        exclude_special: Leave special tokens out of all statistics, as if they were not there: the rows of
            the other tokens are scaled to sum to 1 again, and no head attends to delimiters. Effective
            attention, which is defined for whole matrices, and identifiability, which compares all tokens of
            a text, keep them.
    """

    layers: list[int] | None = None
    norm: str = "frobenius"
    multiply_by_inputs: bool = False
    n_probes: int | None = DEFAULT_PROBES
    tolerance: float | None = None
    seed: int = 0
    truncation: bool = False
    exclude_special: bool = False
