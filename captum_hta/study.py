"""The study of "Telling BERT's Full Story" (Pascual et al. 2021) on any model and corpus.

For every example both contributions of every head; then, per head, how well attention agrees with them
and where, relative to the query, both lie.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from captum_hta.contributions import Contributions, encoded, groups, jointly
from captum_hta.forecast import in_all
from captum_hta.mixing import Mixing
from captum_hta.model import Encoding, Model, Text
from captum_hta.plan import Plan
from captum_hta.shards import Shards
from captum_hta.statistics import Distribution, Mean, RelativePosition, row_correlations

SOURCES = ("previous_layer", "input")
DEFAULT_PROBES = 16
HIDDEN = "hidden"
"""What contributions to hidden embeddings are called beside those to heads."""
PART = 8
"""Groups whose results are kept together."""


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
        mixing: What contributions to hidden embeddings tell; ``None`` where they are not asked for.
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
    mixing: Mixing | None = None

    @classmethod
    def empty(cls, layers: Sequence[int], heads: int, longest: int, hidden: bool = False) -> Study:
        """A study of no example, for texts of at most ``longest`` tokens; of hidden embeddings too."""
        shape = (len(layers), heads)
        return cls(
            mixing=Mixing.empty(list(layers)) if hidden else None,
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
        if self.mixing is not None:
            self.mixing.add(results[HIDDEN].values[0].double().numpy())
        for source in SOURCES:
            result = results[source]
            values = result.values[0].double().numpy()
            pearson, spearman = row_correlations(attention, values)
            self.pearson[source].add(pearson)
            self.spearman[source].add(spearman)
            self.positions[source].add(values)
            self._add_errors(source, result)

    def add_group(self, model: Model, encodings: Sequence[Encoding], setting: Setting) -> None:
        """Add a few texts."""
        results = jointly(model, encodings, _asked(setting, self.mixing is not None))
        for index in range(len(encodings)):
            self.add({name: result.example(index) for name, result in results.items()})
        for source in SOURCES:
            self.note_plans(source, results[source].plans)

    # --- parts of a study

    @property
    def _accumulators(self) -> dict[str, Mean | RelativePosition | Distribution]:
        """All accumulators, by name."""
        groups: dict[str, Mapping[str, Mean | RelativePosition | Distribution]] = {
            "pearson": self.pearson,
            "spearman": self.spearman,
            "positions": self.positions,
            "errors": self.errors,
            "mixing": {} if self.mixing is None else self.mixing.parts,
        }
        return {f"{group}/{name}": one for group, parts in groups.items() for name, one in parts.items()}

    def merge(self, other: Study) -> None:
        """Add what another study of the same layers and heads has seen."""
        for mine, others in zip(self._accumulators.values(), other._accumulators.values(), strict=True):
            mine.merge(others)
        self.tokens += other.tokens
        for source, largest in other.largest_errors.items():
            self.largest_errors[source] = max(self.largest_errors.get(source, 0.0), largest)
        for source, plans in other.ways.items():
            self.note_plans(source, plans)

    def arrays(self) -> dict[str, NDArray]:
        """All that it holds, by name."""
        arrays = {
            f"{name}/{part}": array
            for name, one in self._accumulators.items()
            for part, array in one.arrays().items()
        }
        rest = {
            "tokens": self.tokens,
            "largest_errors": self.largest_errors,
            "ways": {source: [asdict(plan) for plan in plans] for source, plans in self.ways.items()},
        }
        return arrays | {"rest": np.frombuffer(json.dumps(rest).encode(), dtype=np.uint8)}

    def restore(self, arrays: Mapping[str, NDArray]) -> Study:
        """This empty study with what :meth:`arrays` of another have held."""
        for name, one in self._accumulators.items():
            one.merge(type(one).of({part: arrays[f"{name}/{part}"] for part in one.arrays()}))
        rest = json.loads(arrays["rest"].tobytes())
        self.tokens, self.largest_errors = rest["tokens"], rest["largest_errors"]
        self.ways = {source: [Plan(**plan) for plan in plans] for source, plans in rest["ways"].items()}
        return self

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
    shards: Shards | None = None,
) -> Study:
    """Do the study.

    Args:
        model: The model.
        texts: The corpus.
        setting: How.
        advance: Called with the share of the whole cost that has been done.
        shards: Where parts that are done are kept, and are taken from: the numbers are the same. Default:
            ``None``, nowhere.

    Raises:
        ValueError: As :func:`captum_hta.contributions`.
        OSError: If a part cannot be written.
    """
    encodings = [encoded(model, text, number, setting.truncation) for number, text in enumerate(texts)]
    lengths = [len(encoding) for encoding in encodings]
    longest = max((max(len(one), len(one.context or ())) for one in encodings), default=0)
    if not encodings:
        raise ValueError("there is no text to study")
    total = sum(length**2 for length in lengths)
    hidden = setting.norm != "spectral" and model.key_layers is None  # of a wide target that norm is dear
    named = range(model.num_layers) if setting.layers is None else setting.layers
    layers = [layer % model.num_layers for layer in named]

    def empty() -> Study:
        return Study.empty(layers, model.num_heads, longest, hidden)

    study = empty()
    for number, texts_of_part in enumerate(_parts(lengths)):
        if shards is not None and number in shards:
            part = empty().restore(shards.read(number))
            advance(sum(lengths[row] ** 2 for rows in texts_of_part for row in rows) / total)
        else:
            part = empty()
            for rows in texts_of_part:
                part.add_group(model, [encodings[row] for row in rows], setting)
                for row in rows:
                    advance(lengths[row] ** 2 / total)
            if shards is not None:
                shards.write(number, part.arrays())
        study.merge(part)
    return study


def _parts(lengths: Sequence[int]) -> Iterator[list[list[int]]]:
    """Texts in groups of like lengths, some groups a part."""
    few = list(groups(lengths))
    for start in range(0, len(few), PART):
        yield few[start : start + PART]


def _asked(setting: Setting, hidden: bool) -> dict[str, dict[str, Any]]:
    """What is asked of each group of texts, by name."""
    common = {
        "layers": setting.layers,
        "norm": setting.norm,
        "multiply_by_inputs": setting.multiply_by_inputs,
        "n_probes": setting.n_probes,
        "tolerance": setting.tolerance,
        "seed": setting.seed,
    }
    asked = {source: common | {"source": source} for source in SOURCES}
    return asked | ({HIDDEN: common | {"source": "input", "target": "layer"}} if hidden else {})


def finite(value: float) -> float | None:
    """A number that JSON can hold."""
    return float(value) if np.isfinite(value) else None
