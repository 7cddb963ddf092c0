"""The studies of "Telling BERT's Full Story" (Pascual et al. 2021) and "On Identifiability in Transformers"
(Brunner et al. 2020) on any model and corpus.

For every example both contributions of every head and those to hidden embeddings, from one sweep; then, per
head, how well attention agrees with them and where, relative to the query, both lie. What else is looked at
has a module of its own beside this one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from captum_hta.baselines.attention import effective_attention
from captum_hta.computation import jointly
from captum_hta.jacobian.forecast import in_all
from captum_hta.jacobian.plan import Plan
from captum_hta.model.activations import promoted
from captum_hta.model.attention import Attention
from captum_hta.model.encoding import Encoding, Text
from captum_hta.model.protocol import Model
from captum_hta.result import Contributions
from captum_hta.statistics.accumulators import Distribution, Mean, RelativePosition
from captum_hta.statistics.correlations import StandardRows, is_causal
from captum_hta.study.checkpoint import Shards
from captum_hta.study.effective import EffectiveAgreement
from captum_hta.study.folder import keep
from captum_hta.study.identifiability import SENTENCES, Identifiability, identify
from captum_hta.study.mixing import Mixing
from captum_hta.study.patterns import (
    Candidate,
    PatternExamples,
    Patterns,
    delimiters,
    pattern_examples,
    text_to_show,
)
from captum_hta.study.stopwatch import Stopwatch
from captum_hta.texts import encoded, groups

Matrices = dict[str, NDArray]
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
        exclude_special: Leave special tokens out of all statistics, as if they were not there: rows of the
            others are scaled to sum to 1 again. Patterns then know no delimiters. Effective attention, which
            is of whole matrices, and identifiability, which compares all tokens of a text, keep them.
    """

    layers: list[int] | None = None
    norm: str = "frobenius"
    multiply_by_inputs: bool = False
    n_probes: int | None = DEFAULT_PROBES
    tolerance: float | None = None
    seed: int = 0
    truncation: bool = False
    exclude_special: bool = False


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
        modes: For each source the modes that were taken, each with its operations in all.
        watch: Where the time went.
        exclude_special: As of :class:`Setting`.
        mixing: What contributions to hidden embeddings tell; ``None`` where they are not asked for.
        patterns: Of which simple patterns heads are; ``None`` for cross attention.
        effective: How far attention agrees with effective attention; ``None`` where the model does not show
            what that takes.
        identifiability: How well hidden tokens tell their input tokens; ``None`` until it is measured.
        shown: A text that shows heads of simple patterns; ``None`` until one is chosen.
    """

    layers: list[int]
    heads: int
    pearson: dict[str, Mean]
    spearman: dict[str, Mean]
    positions: dict[str, RelativePosition]
    errors: dict[str, Mean]
    largest_errors: dict[str, float] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    modes: dict[str, list[Plan]] = field(default_factory=dict)
    watch: Stopwatch = field(default_factory=Stopwatch)
    exclude_special: bool = False
    mixing: Mixing | None = None
    patterns: Patterns | None = None
    effective: EffectiveAgreement | None = None
    identifiability: Identifiability | None = None
    shown: PatternExamples | None = None

    @classmethod
    def empty(cls, layers: Sequence[int], heads: int, longest: int, **analyses: Any) -> Study:
        """A study of no example, for texts of at most ``longest`` tokens, with what else it holds by name."""
        shape = (len(layers), heads)
        return cls(
            **analyses,
            layers=list(layers),
            heads=heads,
            pearson={source: Mean.zero(*shape) for source in SOURCES},
            spearman={source: Mean.zero(*shape) for source in SOURCES},
            positions={name: RelativePosition.zero(*shape, longest) for name in ("attention", *SOURCES)},
            errors={source: Mean.zero(*shape) for source in SOURCES},
        )

    def add(self, results: Mapping[str, Contributions], effective: NDArray | None = None) -> None:
        """Add one example.

        Args:
            results: Its contributions by source, each of a single text without padding.
            effective: Its effective attention ``[layer, head, query, key]``, where that is looked at.
        """
        whole = _array(results["input"].attention)
        self.tokens.append(whole.shape[-2])
        if self.effective is not None:
            self.effective.add(whole, effective)
        special = _special(results["input"], whole.shape[-1])
        kept = ~special if self.exclude_special else np.ones_like(special)
        attention = _among(whole, kept)
        self.positions["attention"].add(attention)
        causal = is_causal(attention)
        rows = StandardRows.of(attention, causal)
        contributed = {source: _among(_array(results[source].values), kept) for source in SOURCES}
        for source, values in contributed.items():
            pearson, spearman = rows.correlations(StandardRows.of(values, causal))
            self.pearson[source].add(pearson)
            self.spearman[source].add(spearman)
            self.positions[source].add(values)
            self._add_errors(source, results[source])
        if self.mixing is not None:
            self.mixing.add(_among(_array(results[HIDDEN].values), kept))
        if self.patterns is not None:
            self.patterns.add(attention, contributed["input"], special[kept])

    def add_group(self, model: Model, encodings: Sequence[Encoding], setting: Setting) -> list[Matrices]:
        """Add a few texts, and give the matrices of each."""
        effective: dict[int, NDArray] = {}

        def look(rows: list[int], attention: list[Attention]) -> None:
            if self.effective is not None:
                effective.update(_effective(model, self.layers, encodings, rows, attention))

        asked = _asked(setting, self.mixing is not None)
        results = jointly(model, encodings, asked, look, self.watch)
        examples = [
            {name: result.example(row) for name, result in results.items()} for row in range(len(encodings))
        ]
        with self.watch("statistics"):
            for row, example in enumerate(examples):
                self.add(example, effective.get(row))
        for source in SOURCES:
            self.note_plans(source, results[source].plans)
        return [_matrices(example) for example in examples]

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
            "patterns": {} if self.patterns is None else self.patterns.parts,
            "effective": {} if self.effective is None else self.effective.parts,
        }
        return {f"{group}/{name}": one for group, parts in groups.items() for name, one in parts.items()}

    def merge(self, other: Study) -> None:
        """Add what another study of the same layers and heads has seen."""
        for mine, others in zip(self._accumulators.values(), other._accumulators.values(), strict=True):
            mine.merge(others)
        self.tokens += other.tokens
        self.watch.merge(other.watch)
        for source, largest in other.largest_errors.items():
            self.largest_errors[source] = max(self.largest_errors.get(source, 0.0), largest)
        for source, plans in other.modes.items():
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
            "modes": {source: [asdict(plan) for plan in plans] for source, plans in self.modes.items()},
        }
        return arrays | {"rest": _packed(rest), "seconds": _packed(self.watch.seconds)}

    def restore(self, arrays: Mapping[str, NDArray]) -> Study:
        """This empty study with what :meth:`arrays` of another have held."""
        for name, one in self._accumulators.items():
            one.merge(type(one).of({part: arrays[f"{name}/{part}"] for part in one.arrays()}))
        rest, seconds = (json.loads(arrays[name].tobytes()) for name in ("rest", "seconds"))
        self.tokens, self.largest_errors = rest["tokens"], rest["largest_errors"]
        self.watch = Stopwatch(seconds)
        self.modes = {source: [Plan(**plan) for plan in plans] for source, plans in rest["modes"].items()}
        return self

    def note_plans(self, source: str, plans: Sequence[Plan]) -> None:
        """Keep what modes were taken to a source's contributions, and what they cost."""
        self.modes[source] = in_all([*self.modes.get(source, []), *plans])

    @property
    def plans(self) -> dict[str, str]:
        """For each source a line that says how its contributions were found."""
        return {source: "; ".join(map(str, modes)) for source, modes in self.modes.items()}

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
        """A row for each quantity, layer, head and offset that occurs: the mean value there and its error by
        example.
        """
        frames = []
        for name in ("attention", "input"):
            position = self.positions[name]
            seen = position.counts > 0
            values = {"value": position.histogram(), "value_error": position.standard_error()}
            index = pd.MultiIndex.from_product(
                [[name], self.layers, range(self.heads), position.offsets[seen]],
                names=["quantity", "layer", "head", "offset"],
            )
            columns = {name: numbers[..., seen].ravel() for name, numbers in values.items()}
            frames.append(pd.DataFrame(columns, index).reset_index())
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
    kept_in: Path | None = None,
    advance_maps: Callable[[float], object] = lambda share: None,
) -> Study:
    """Do the study.

    Args:
        model: The model.
        texts: The corpus.
        setting: How.
        advance: Called with the share of the whole cost that has been done.
        shards: Where parts that are done are kept, and are taken from: the numbers are the same. Default:
            ``None``, nowhere.
        kept_in: A folder where every matrix is kept too; see :func:`captum_hta.open_study`. Default:
            ``None``, nowhere.
        advance_maps: Called with the share of the maps of hidden tokens, which come last, that has been done.

    Raises:
        ValueError: As :func:`captum_hta.contributions`; or if special tokens are to be left out and none is
            known, or the keys are of another text.
        OSError: If a part cannot be written or read.
    """
    corpus = _Corpus(model, texts, setting)
    parts = {} if shards is None else shards
    study = corpus.empty()
    for number, rows_of_part in enumerate(_parts(corpus.lengths)):
        if number in parts:
            part = corpus.empty().restore(parts.read(number))
            advance(corpus.share(rows_of_part))
        else:
            part = _part(corpus, number, rows_of_part, advance, kept_in)
            if shards is not None:
                shards.write(number, part.arrays())
        study.merge(part)
    if corpus.is_selfattention:
        study.identifiability = _identifiability(corpus, study.watch, shards, advance_maps)
        study.shown = _example(corpus, study)
    return study


class _Corpus:
    """Texts with their lengths; they are read again whenever they are needed."""

    def __init__(self, model: Model, texts: Sequence[Text], setting: Setting) -> None:
        if not texts:
            raise ValueError("there is no text to study")
        named = range(model.num_layers) if setting.layers is None else setting.layers
        self.layers = list(dict.fromkeys(layer % model.num_layers for layer in named))
        self.model, self.texts, self.setting = model, texts, replace(setting, layers=self.layers)
        lengths, self.longest = [], 0
        for row in range(len(texts)):
            one = self.read(row)
            lengths.append(len(one))
            self.longest = max(self.longest, len(one), len(one.context or ()))
        self.lengths: list[int] = lengths
        self._cost = sum(length**2 for length in lengths)
        if setting.exclude_special:
            self._check_special()

    def _check_special(self) -> None:
        if not self.is_selfattention:
            raise ValueError(
                "special tokens can be left out of self-attention only: its keys are its queries"
            )
        if not any(delimiters(self.read(row)).any() for row in range(len(self.texts))):
            raise ValueError(
                f"{self.model.name} adds no special token to these texts, or its tokenizer does not tell "
                "them: there is none to be left out"
            )

    def read(self, row: int) -> Encoding:
        return encoded(self.model, self.texts[row], row, self.setting.truncation)

    def some(self, count: int) -> list[Encoding]:
        """That many of the texts, or all, at random."""
        rows = random.Random(self.setting.seed).sample(range(len(self.texts)), min(count, len(self.texts)))
        return [self.read(row) for row in sorted(rows)]

    def share(self, rows: Sequence[Sequence[int]]) -> float:
        """The share of the whole cost that groups of texts have."""
        return sum(self.lengths[row] ** 2 for group in rows for row in group) / self._cost

    @property
    def is_selfattention(self) -> bool:
        return self.model.key_layers is None

    def empty(self) -> Study:
        """A study that can hold them."""
        model, layers = self.model, self.layers
        analyses: dict[str, Any] = {"exclude_special": self.setting.exclude_special}
        if self.is_selfattention:
            analyses["patterns"] = Patterns.empty(layers, model.num_heads)
            if self.setting.norm != "spectral":  # which is dear for a target as wide as the model
                analyses["mixing"] = Mixing.empty(layers)
            if self._shows_values:
                analyses["effective"] = EffectiveAgreement.empty(layers, self.longest, model.d_head)
        return Study.empty(layers, model.num_heads, self.longest, **analyses)

    @cached_property
    def _shows_values(self) -> bool:
        """Whether the model shows what its attention weighs, and what becomes of it."""
        try:
            for layer in self.layers:
                self.model.output_projection(layer)
        except ValueError:
            return False
        shortest = self.read(min(range(len(self.lengths)), key=self.lengths.__getitem__))
        return all(one.value is not None for one in self.model.attention(self.model.batch([shortest])))


def _parts(lengths: Sequence[int]) -> Iterator[list[list[int]]]:
    """Texts in groups of like lengths, some groups a part."""
    few = list(groups(lengths))
    for start in range(0, len(few), PART):
        yield few[start : start + PART]


def _part(
    corpus: _Corpus,
    number: int,
    rows_of_part: list[list[int]],
    advance: Callable[[float], object],
    kept_in: Path | None,
) -> Study:
    """The study of the texts of one part."""
    part = corpus.empty()
    kept: dict[int, Matrices] = {}
    for rows in rows_of_part:
        matrices = part.add_group(corpus.model, [corpus.read(row) for row in rows], corpus.setting)
        if kept_in is not None:
            kept |= dict(zip(rows, matrices, strict=True))
        for row in rows:
            advance(corpus.share([[row]]))
    if kept_in is not None:
        with part.watch("keeping contributions"):
            keep(kept_in, number, kept)
    return part


def _identifiability(
    corpus: _Corpus, watch: Stopwatch, shards: Shards | None, advance: Callable[[float], object]
) -> Identifiability:
    """How well hidden tokens of some texts tell their input tokens."""
    name = "identifiability"
    if shards is not None and name in shards:
        arrays = shards.read(name)
        watch.merge(Stopwatch({name: float(arrays["seconds"][0])}))
        return Identifiability.of(arrays)
    with watch(name):
        found = identify(corpus.model, corpus.some(SENTENCES), corpus.layers, corpus.setting.seed, advance)
    if shards is not None:
        shards.write(name, found.arrays() | {"seconds": np.array([watch.seconds[name]])})
    return found


def _example(corpus: _Corpus, study: Study) -> PatternExamples | None:
    """A text that shows the heads of simple patterns, where there are any."""
    chosen = study.patterns.chosen()
    if chosen.empty:
        return None
    row = text_to_show(corpus.lengths)
    results = jointly(corpus.model, [corpus.read(row)], _asked(corpus.setting, hidden=False))
    return pattern_examples([Candidate.of(results)], chosen, corpus.layers)


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


# --- matrices of one text --------------------------------------------------------------------------


def _array(values: Tensor) -> NDArray[np.float64]:
    """The matrices of the only text of a batch."""
    return values[0].double().numpy()


def _special(result: Contributions, count: int) -> NDArray[np.bool_]:
    """Which of the tokens of the only text are special, as far as that is known."""
    return np.zeros(count, dtype=bool) if result.encodings is None else delimiters(result.encodings[0])


def _among(values: NDArray, kept: NDArray[np.bool_]) -> NDArray:
    """Rows ``[..., query, key]`` among the tokens that are kept, scaled to sum to 1 again."""
    if kept.all():
        return values
    rest = values[..., kept, :][..., kept]
    total = rest.sum(-1, keepdims=True)
    return np.divide(rest, total, out=np.zeros_like(rest), where=total > 0)


def _effective(
    model: Model,
    layers: Sequence[int],
    encodings: Sequence[Encoding],
    rows: Sequence[int],
    attention: Sequence[Attention],
) -> dict[int, NDArray]:
    """The effective attention ``[layer, head, query, key]`` of each text of a batch."""
    found = {}
    weights = promoted(torch.stack([model.output_projection(layer).weight for layer in layers]))
    for index, row in enumerate(rows):
        length = len(encodings[row])
        pattern = torch.stack([attention[layer].pattern[index, :, :length, :length] for layer in layers])
        value = torch.stack([attention[layer].value[index, :, :length] for layer in layers])
        if not (pattern.isfinite().all() and value.isfinite().all()):
            raise ValueError(
                f"{model.name} gives attention that is not finite: check its weights, or load it in float32"
            )
        found[row] = effective_attention(promoted(pattern), promoted(value), weights).double().cpu().numpy()
    return found


def _matrices(example: Mapping[str, Contributions]) -> Matrices:
    """What is kept of a text."""
    found = {name: result.values[0].numpy() for name, result in example.items()}
    tokens = {"tokens": np.array(example["input"].tokens[0])}
    if example["input"].keys is not None:
        tokens["keys"] = np.array(example["input"].keys[0])
    return {"attention": example["input"].attention[0].numpy(), **found, **tokens}


def _packed(value: Any) -> NDArray[np.uint8]:
    """As JSON, in an array."""
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


def finite(value: float) -> float | None:
    """A number that JSON can hold."""
    return float(value) if np.isfinite(value) else None
