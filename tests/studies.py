"""Texts and settings of small studies, and studies without a model, for which matrices are given."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from captum_hta.study.analysis import TextResult
from captum_hta.study.encoded_corpus import Dimensions
from captum_hta.study.settings import StudySettings

Array = np.ndarray
TEXTS = ["a b c d e", "dogs bark", ("the cat sat", "it slept"), "x y z x", ("one", "two three")]
"""Texts and pairs of different lengths."""
EXACT = StudySettings(n_probes=None)


def dimensions(
    layers: Sequence[int], heads: int = 1, longest: int = 8, d_head: int = 4, num_layers: int | None = None
) -> Dimensions:
    """Sizes of a study of those layers, by default all layers of the model."""
    return Dimensions(list(layers), heads, d_head, longest, num_layers or len(layers))


def text_result(
    attention: Array | None = None,
    contributions: Array | None = None,
    special: Array | None = None,
    hidden: Array | None = None,
    effective: Array | None = None,
) -> TextResult:
    """A text with this attention, by default even, and these contributions of both sources.

    Args:
        attention: ``[layer, head, query, key]``. Default: even, with the layers and tokens of ``hidden``.
        contributions: Of the same shape. Default: as attention.
        special: ``[key]``. Default: no token is special.
        hidden: ``[layer, query, key]``.
        effective: Effective attention, of the same shape as attention.
    """
    if attention is None:
        attention = np.full((hidden.shape[0], 1, *hidden.shape[1:]), 1 / hidden.shape[-1])
    values = attention if contributions is None else contributions
    return TextResult(
        attention=attention,
        contributions={"previous_layer": values, "input": values},
        standard_errors={},
        special=np.zeros(attention.shape[-1], dtype=bool) if special is None else special,
        hidden=hidden,
        whole_attention=attention,
        effective_attention=effective,
    )
