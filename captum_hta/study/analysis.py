"""What an analysis of a study is: something measured for every text, merged, and written as tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from captum_hta.statistics.accumulators import Accumulator
from captum_hta.statistics.correlations import Array

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from captum_hta.study.encoded_corpus import Dimensions, EncodedCorpus

Advance = Callable[[float], object]
"""Called with a share of the work that has been done."""
Once = Callable[[Callable[[Advance], Mapping[str, Array]]], Mapping[str, Array]]
"""Calls a function and keeps the arrays that it returns in the checkpoint, or reads them from there."""


@dataclass(frozen=True)
class TextResult:
    """What was computed for one text. Special tokens are left out if the study excludes them.

    Attributes:
        attention: ``[layer, head, query, key]``.
        contributions: Contributions to heads by source, of the same shape.
        standard_errors: Standard errors by source, of the same shape; only of estimates, and of all tokens.
        special: Whether each token is special, ``[key]``.
        hidden: Contributions to hidden embeddings, ``[layer, query, key]``, if an analysis needs them.
        whole_attention: Attention of all tokens.
        effective_attention: Effective attention of all tokens, if an analysis needs it.
    """

    attention: Array
    contributions: Mapping[str, Array]
    standard_errors: Mapping[str, Array]
    special: NDArray[np.bool_]
    hidden: Array | None
    whole_attention: Array
    effective_attention: Array | None


class Analysis(ABC):
    """Something that a study measures.

    A subclass makes its accumulators in ``__init__`` and returns them from :attr:`accumulators`. Most add one
    text at a time; those that look at the whole corpus at the end override :meth:`finish`.

    Args:
        size: Sizes of the arrays.
    """

    name: ClassVar[str]
    """What its arrays are called in the checkpoint of a study; no other analysis has the same."""
    needs: ClassVar[frozenset[Literal["hidden", "effective_attention"]]] = frozenset()
    """Optional fields of :class:`TextResult` that :meth:`add` reads."""
    layer_columns: ClassVar[Mapping[str, str]] = {}
    """Columns of :meth:`by_layer`, with their titles on the page, in order."""
    layer_note: ClassVar[str] = ""
    """How to read those columns, and their units."""

    def __init__(self, size: Dimensions) -> None:
        self.size = size

    @classmethod
    def applies(cls, corpus: EncodedCorpus) -> bool:
        """Whether it can be measured for this model, these texts and settings."""
        return True

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """Its accumulators by name, which the study merges, keeps and restores. Default: none."""
        return {}

    def add(self, text: TextResult) -> None:  # noqa: B027 (optional)
        """Add one text. Default: nothing."""

    def finish(self, corpus: EncodedCorpus, once: Once) -> None:  # noqa: B027 (optional)
        """Look at the whole corpus, after all texts were added. Default: nothing.

        Args:
            corpus: The corpus.
            once: Keeps the result of slow work, so that a study that is repeated does not do it again.
        """

    @abstractmethod
    def tables(self) -> Mapping[str, pd.DataFrame]:
        """Its tables, by the names of their files without ``.csv``."""

    def by_layer(self) -> pd.DataFrame | None:
        """Its columns of the table ``layers.csv``, indexed by ``layer``. Default: ``None``."""
        return None

    def record(self) -> Mapping[str, object]:
        """What it adds to ``run.json``. Default: nothing."""
        return {}

    def merge(self, other: Analysis) -> None:
        """Add what another analysis of the same kind and sizes has measured."""
        for name, accumulator in self.accumulators.items():
            accumulator.merge(other.accumulators[name])

    def arrays(self) -> dict[str, Array]:
        """The arrays of its accumulators, by name."""
        return {
            f"{name}/{field}": array
            for name, accumulator in self.accumulators.items()
            for field, array in accumulator.arrays().items()
        }

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Take over what :meth:`arrays` returned.

        Raises:
            ValueError: If an array is missing or of another shape.
        """
        for name, accumulator in self.accumulators.items():
            prefix = f"{name}/"
            own = {key.removeprefix(prefix): one for key, one in arrays.items() if key.startswith(prefix)}
            accumulator.restore(own)


def finite(value: float) -> float | None:
    """A number as JSON can hold it: ``None`` if it is not finite."""
    return float(value) if np.isfinite(value) else None
