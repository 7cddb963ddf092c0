"""The study of "Telling BERT's Full Story" (Pascual et al. 2021) on any model and corpus.

For every example both contributions of every head; then, per head, how well attention agrees with them
and where, relative to the query, both lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from captum_hta.contributions import Contributions, batches, contributions, encoded
from captum_hta.forecast import in_all
from captum_hta.model import Model, Text
from captum_hta.plan import Plan
from captum_hta.statistics import Mean, RelativePosition, row_correlations

SOURCES = ("previous_layer", "input")
DEFAULT_PROBES = 16
GROUP = 4
"""Examples whose contributions are found together, of like lengths: few, for an even progress."""


@dataclass(frozen=True)
class Setting:
    """How the study is to be done.

    Attributes:
        layers: Layers to study, ``None`` for all.
        norm: Norm of the Jacobian.
        multiply_by_inputs: Scale column ``d`` of each Jacobian by ``x_i[d]``.
        n_probes: Probes of each source token for the input contribution; ``None``: exact.
        tolerance: Standard error at which to stop adding probes.
        seed: Seed of the probes.
        truncation: Cut texts that are longer than the model reads.
    """

    layers: list[int] | None = None
    norm: str = "frobenius"
    multiply_by_inputs: bool = False
    n_probes: int | None = DEFAULT_PROBES
    tolerance: float | None = None
    seed: int = 0
    truncation: bool = False


# --- accumulation ----------------------------------------------------------------------------------


@dataclass
class Study:
    """What has been found so far, of any number of examples.

    Attributes:
        layers: The layers of the layer axis.
        heads: Number of heads.
        pearson, spearman: For each source the correlation of attention rows with contribution rows.
        positions: Relative positions of ``"attention"`` and of each source's contribution.
        errors: For each source the standard errors of its contributions, where they are estimates.
        largest_errors: For each such source the largest of them.
        tokens: Number of tokens of each example.
        ways: For each source the ways that were taken, each with its operations in all.
    """

    layers: list[int]
    heads: int
    pearson: dict[str, Mean]
    spearman: dict[str, Mean]
    positions: dict[str, RelativePosition]
    errors: dict[str, Mean]
    largest_errors: dict[str, float] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    ways: dict[str, list[Plan]] = field(default_factory=dict)

    @classmethod
    def empty(cls, layers: Sequence[int], heads: int, longest: int) -> Study:
        """A study of no example, for texts of at most ``longest`` tokens."""
        shape = (len(layers), heads)
        return cls(
            layers=list(layers),
            heads=heads,
            pearson={source: Mean.zero(*shape) for source in SOURCES},
            spearman={source: Mean.zero(*shape) for source in SOURCES},
            positions={name: RelativePosition.zero(*shape, longest) for name in ("attention", *SOURCES)},
            errors={source: Mean.zero(*shape) for source in SOURCES},
        )

    def add(self, results: dict[str, Contributions]) -> None:
        """Add one example's contributions by source, each of a single text without padding."""
        attention = results["input"].attention[0].double().numpy()
        self.positions["attention"].add(attention)
        self.tokens.append(attention.shape[-2])
        for source, result in results.items():
            values = result.values[0].double().numpy()
            pearson, spearman = row_correlations(attention, values)
            self.pearson[source].add(pearson)
            self.spearman[source].add(spearman)
            self.positions[source].add(values)
            self._add_errors(source, result)

    def note_plans(self, source: str, plans: Sequence[Plan]) -> None:
        """Keep what ways were taken to a source's contributions, and what they cost."""
        self.ways[source] = in_all([*self.ways.get(source, []), *plans])

    @property
    def plans(self) -> dict[str, str]:
        """For each source a line that says how its contributions were found."""
        return {source: "; ".join(map(str, ways)) for source, ways in self.ways.items()}

    def _add_errors(self, source: str, result: Contributions) -> None:
        if result.standard_error is None:
            return
        errors = result.standard_error[0].double().numpy()
        self.errors[source].add(errors.reshape(*errors.shape[:2], -1))
        self.largest_errors[source] = max(self.largest_errors.get(source, 0.0), float(errors.max()))

    # --- tables

    def correlations(self) -> pd.DataFrame:
        """A row for each source, layer and head: correlations with attention and their errors."""
        rows = []
        for source in SOURCES:
            pearson, spearman = self.pearson[source], self.spearman[source]
            for index, layer in enumerate(self.layers):
                for head in range(self.heads):
                    at = (index, head)
                    rows.append(
                        {
                            "source": source,
                            "layer": layer,
                            "head": head,
                            "pearson": pearson.mean()[at],
                            "pearson_error": pearson.standard_error()[at],
                            "spearman": spearman.mean()[at],
                            "spearman_error": spearman.standard_error()[at],
                            "rows": int(pearson.counts[at]),
                            "rows_left_out": int(pearson.left_out[at]),
                            "examples": int(pearson.examples[at]),
                        }
                    )
        return pd.DataFrame(rows)

    def relative_positions(self) -> pd.DataFrame:
        """A row for each quantity, layer, head and offset that occurs: the mean value there."""
        frames = []
        for name in ("attention", "input"):
            position = self.positions[name]
            seen = position.counts > 0
            histogram = position.histogram()[..., seen]
            index = pd.MultiIndex.from_product(
                [[name], self.layers, range(self.heads), position.offsets[seen]],
                names=["quantity", "layer", "head", "offset"],
            )
            frames.append(pd.Series(histogram.ravel(), index, name="value").reset_index())
        return pd.concat(frames, ignore_index=True)

    def centres_of_mass(self) -> pd.DataFrame:
        """A row for each quantity, layer and head: the mean offset of its histogram."""
        frames = []
        for name in ("attention", "input"):
            centre = self.positions[name].centre_of_mass()
            index = pd.MultiIndex.from_product(
                [[name], self.layers, range(self.heads)], names=["quantity", "layer", "head"]
            )
            frames.append(pd.Series(centre.ravel(), index, name="centre_of_mass").reset_index())
        return pd.concat(frames, ignore_index=True)

    def layer_summary(self) -> pd.DataFrame:
        """A row for each layer: medians over heads of the correlations, means of the centres of mass."""
        by_layer = self.correlations().groupby(["layer", "source"])[["pearson", "spearman"]]
        table = by_layer.median().unstack("source")
        table.columns = [f"{measure}_{source}_median" for measure, source in table.columns]
        centre = self.centres_of_mass().pivot_table(
            index="layer", columns="quantity", values="centre_of_mass", aggfunc="mean"
        )
        centre.columns = [f"centre_of_mass_{quantity}" for quantity in centre.columns]
        return table.join(centre).reset_index()

    def findings(self) -> dict[str, float]:
        """Shares of heads whose attention agrees with the previous-layer contribution."""
        table = self.correlations().query("source == 'previous_layer'")
        return {
            f"share_of_heads_{measure}_over_{bound}": float((table[measure].dropna() > bound).mean())
            for measure, bounds in (("pearson", (0.7, 0.85)), ("spearman", (0.9, 0.95)))
            for bound in bounds
        }

    def probe_errors(self) -> dict[str, dict[str, float]]:
        """For each source whose contributions are estimates their standard error, ``"mean"`` and
        ``"largest"``: infinite for a single probe.
        """
        found = {}
        for source, largest in self.largest_errors.items():
            errors = self.errors[source]
            mean = float(errors.sums.sum() / errors.counts.sum()) if np.isfinite(largest) else largest
            found[source] = {"mean": mean, "largest": largest}
        return found


def run(
    model: Model,
    texts: Sequence[Text],
    setting: Setting,
    advance: Callable[[float], object] = lambda cost: None,
) -> Study:
    """Do the study.

    Args:
        model: The model.
        texts: The corpus.
        setting: How.
        advance: Called with the share of the whole cost that has been done.

    Raises:
        ValueError: As :func:`captum_hta.contributions`.
    """
    encodings = [encoded(model, text, number, setting.truncation) for number, text in enumerate(texts)]
    lengths = [len(encoding) for encoding in encodings]
    longest = max((max(len(one), len(one.context or ())) for one in encodings), default=0)
    total = sum(length**2 for length in lengths)
    study = None
    for rows in _groups(lengths):
        results = _both(model, [texts[row] for row in rows], setting)
        if study is None:
            study = Study.empty(results["input"].layers, model.num_heads, longest)
        for index, row in enumerate(rows):
            study.add({source: result.example(index) for source, result in results.items()})
            advance(lengths[row] ** 2 / total)
        for source, result in results.items():
            study.note_plans(source, result.plans)
    if study is None:
        raise ValueError("there is no text to study")
    return study


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    for rows in batches(lengths):
        for start in range(0, len(rows), GROUP):
            yield rows[start : start + GROUP]


def _both(model: Model, texts: Sequence[Text], setting: Setting) -> dict[str, Contributions]:
    common = {
        "layers": setting.layers,
        "norm": setting.norm,
        "multiply_by_inputs": setting.multiply_by_inputs,
        "n_probes": setting.n_probes,
        "tolerance": setting.tolerance,
        "seed": setting.seed,
        "truncation": setting.truncation,
    }
    return {source: contributions(model, texts, source=source, **common) for source in SOURCES}


def finite(value: float) -> float | None:
    """A number that JSON can hold."""
    return float(value) if np.isfinite(value) else None
