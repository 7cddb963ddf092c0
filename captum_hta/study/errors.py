"""How large the standard errors of estimated contributions are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from captum_hta.statistics.accumulators import Accumulator, Largest, RowMean
from captum_hta.study.analysis import Analysis, TextResult, finite
from captum_hta.study.encoded_corpus import Dimensions
from captum_hta.study.settings import SOURCES


class ProbeErrors(Analysis):
    """Standard errors of contributions that are estimated from probes.

    Attributes:
        errors: Their means by source, ``[layer, head]``.
        largest: The largest by source.
    """

    name = "errors"

    def __init__(self, size: Dimensions) -> None:
        super().__init__(size)
        self.errors = {source: RowMean.zero(len(size.layers), size.heads) for source in SOURCES}
        self.largest = {source: Largest.zero() for source in SOURCES}

    @property
    def accumulators(self) -> dict[str, Accumulator]:
        """A mean and a maximum for each source."""
        means = {f"mean/{source}": one for source, one in self.errors.items()}
        return means | {f"largest/{source}": one for source, one in self.largest.items()}

    def add(self, text: TextResult) -> None:
        """Add one text."""
        for source, errors in text.standard_errors.items():
            self.errors[source].add(errors.reshape(*errors.shape[:2], -1))
            self.largest[source].add(errors.ravel())

    def tables(self) -> dict[str, pd.DataFrame]:
        """None: two numbers for each source are in ``run.json``."""
        return {}

    def summary(self) -> dict[str, dict[str, float]]:
        """The ``"mean"`` and the ``"largest"`` standard error of each source whose contributions are
        estimates; infinite for a single probe.
        """
        found = {}
        for source, accumulator in self.largest.items():
            largest, errors = float(accumulator.values), self.errors[source]
            if largest == -np.inf:
                continue
            mean = float(errors.sums.sum() / errors.counts.sum()) if np.isfinite(largest) else largest
            found[source] = {"mean": mean, "largest": largest}
        return found

    def record(self) -> Mapping[str, object]:
        """The same, as ``standard_errors``."""
        summary = self.summary()
        errors = {
            source: {name: finite(value) for name, value in one.items()} for source, one in summary.items()
        }
        return {"standard_errors": errors}
