"""The studies of "Telling BERT's Full Story" (Pascual et al. 2021) and "On Identifiability in Transformers"
(Brunner et al. 2020) on any model and corpus.

For every text, both contributions of every head and those to hidden embeddings are computed in one sweep.
What is measured on them is up to the analyses, each of which has a module of its own in this folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from captum_hta.baselines.attention import effective_attention
from captum_hta.computation import jointly
from captum_hta.jacobian.forecast import in_all
from captum_hta.jacobian.norms import NotFiniteError
from captum_hta.jacobian.plan import Plan
from captum_hta.model.activations import promoted
from captum_hta.model.attention import Attention
from captum_hta.model.encoding import Encoding, Text
from captum_hta.model.protocol import Model
from captum_hta.result import Contributions
from captum_hta.statistics.correlations import Array
from captum_hta.storage import StoredArray
from captum_hta.study.analyses import ANALYSES
from captum_hta.study.analysis import Advance, Analysis, TextResult
from captum_hta.study.checkpoint import OtherRunError, Shards
from captum_hta.study.encoded_corpus import Dimensions, EncodedCorpus, special_tokens
from captum_hta.study.folder import Matrices, is_kept, keep
from captum_hta.study.questions import questions_of
from captum_hta.study.settings import HIDDEN, SOURCES, StudySettings
from captum_hta.study.stopwatch import Stopwatch

if TYPE_CHECKING:
    import pandas as pd

Kind = TypeVar("Kind", bound=Analysis)
SHARD = 8
"""Groups of texts that are kept together in a checkpoint."""


class Study:
    """The analyses of any number of texts.

    Args:
        size: Sizes of the arrays.
        kinds: The analyses.
        exclude_special: Leave special tokens out; see :class:`StudySettings`.

    Attributes:
        analyses: The analyses by their classes.
        tokens: Number of tokens of each text.
        modes: The modes that were used for each source, each with its total number of operations.
        watch: Time spent on each step.
    """

    def __init__(
        self, size: Dimensions, kinds: Sequence[type[Analysis]] = ANALYSES, exclude_special: bool = False
    ) -> None:
        self.size, self.exclude_special = size, exclude_special
        self.analyses: dict[type[Analysis], Analysis] = {kind: kind(size) for kind in kinds}
        self.tokens: list[int] = []
        self.modes: dict[str, list[Plan]] = {}
        self.watch = Stopwatch()

    def find(self, kind: type[Kind]) -> Kind | None:
        """The analysis of that class; ``None`` if it does not apply to this study."""
        found = self.analyses.get(kind)
        return found if isinstance(found, kind) else None

    def __getitem__(self, kind: type[Kind]) -> Kind:
        found = self.find(kind)
        if found is None:
            raise KeyError(f"{kind.__name__} does not apply to this study")
        return found

    def needs(self, field: str) -> bool:
        """Whether an analysis needs an optional field of :class:`TextResult`."""
        return any(field in analysis.needs for analysis in self.analyses.values())

    # --- adding texts

    def add(self, results: Mapping[str, Contributions], effective: Array | None = None) -> None:
        """Add one text.

        Args:
            results: Contributions of a single text without padding, by source.
            effective: Its effective attention ``[layer, head, query, key]``, if an analysis needs it.
        """
        text = text_result(results, effective, self.exclude_special)
        self.tokens.append(text.whole_attention.shape[-2])
        for analysis in self.analyses.values():
            analysis.add(text)

    def add_group(
        self, model: Model, encodings: Sequence[Encoding], settings: StudySettings
    ) -> list[Matrices]:
        """Compute the contributions of a few texts and add them; returns the matrices of each text."""
        effective: dict[int, Array] = {}

        def look(rows: list[int], attention: list[Attention]) -> None:
            if self.needs("effective_attention"):
                effective.update(_effective(model, self.size.layers, encodings, rows, attention))

        questions = questions_of(model, settings, self.needs("hidden"))
        results = jointly(model, encodings, questions, look, self.watch)
        examples = [
            {name: result.example(row) for name, result in results.items()} for row in range(len(encodings))
        ]
        with self.watch("statistics"):
            for row, example in enumerate(examples):
                self.add(example, effective.get(row))
        for source in SOURCES:
            self._note_plans(source, results[source].plans)
        return [_matrices(example) for example in examples]

    def _note_plans(self, source: str, plans: Sequence[Plan]) -> None:
        self.modes[source] = in_all([*self.modes.get(source, []), *plans])

    @property
    def plans(self) -> dict[str, str]:
        """For each source a line about the modes that were used."""
        return {source: "; ".join(map(str, modes)) for source, modes in self.modes.items()}

    # --- merging and checkpoints

    def merge(self, other: Study) -> None:
        """Add the texts of another study with the same analyses and sizes."""
        for kind, analysis in self.analyses.items():
            analysis.merge(other.analyses[kind])
        self.tokens += other.tokens
        self.watch.merge(other.watch)
        for source, plans in other.modes.items():
            self._note_plans(source, plans)

    def arrays(self) -> dict[str, StoredArray]:
        """Everything but the results of :meth:`Analysis.finish`, as arrays by name."""
        rest = {
            "tokens": self.tokens,
            "modes": {source: [asdict(plan) for plan in plans] for source, plans in self.modes.items()},
        }
        arrays = {
            f"{analysis.name}/{name}": array
            for analysis in self.analyses.values()
            for name, array in analysis.arrays().items()
        }
        return arrays | {"rest": _packed(rest), "seconds": _packed(self.watch.seconds)}

    def restore(self, arrays: Mapping[str, StoredArray]) -> Study:
        """Take over what :meth:`arrays` of another study returned; returns itself.

        Raises:
            ValueError: If an array is missing or of another shape.
        """
        for analysis in self.analyses.values():
            prefix = f"{analysis.name}/"
            analysis.restore(
                {name.removeprefix(prefix): one for name, one in arrays.items() if name.startswith(prefix)}
            )
        rest = _unpacked(arrays["rest"])
        self.tokens = rest["tokens"]
        self.watch = Stopwatch(_unpacked(arrays["seconds"]))
        self.modes = {source: [Plan(**plan) for plan in plans] for source, plans in rest["modes"].items()}
        return self

    # --- results

    def tables(self) -> dict[str, pd.DataFrame]:
        """All tables, by the names of their files without ``.csv``."""
        tables = {
            name: table for analysis in self.analyses.values() for name, table in analysis.tables().items()
        }
        layers = self.layer_summary()
        return tables if layers is None else tables | {"layers": layers}

    def layer_summary(self) -> pd.DataFrame | None:
        """A row for each layer, with the columns that analyses have for it; ``None`` without such columns."""
        columns = [table for one in self.analyses.values() if (table := one.by_layer()) is not None]
        return reduce(lambda left, right: left.join(right), columns).reset_index() if columns else None

    def record(self) -> dict[str, object]:
        """What the analyses add to ``run.json``."""
        return {name: value for one in self.analyses.values() for name, value in one.record().items()}


# --- running ---------------------------------------------------------------------------------------


def run(
    model: Model,
    texts: Sequence[Text],
    settings: StudySettings,
    advance: Advance = lambda share: None,
    shards: Shards | None = None,
    kept_in: Path | None = None,
    advance_last: Advance = lambda share: None,
    analyses: Sequence[type[Analysis]] = ANALYSES,
) -> Study:
    """Do a study.

    Args:
        model: The model.
        texts: The corpus.
        settings: How it is done.
        advance: Called with the share of the texts' cost that has been done.
        shards: Checkpoint: results of finished texts are kept there, and are read if they are there, with the
            same numbers. Default: ``None``, none.
        kept_in: A folder where every matrix is kept too; see :func:`captum_hta.open_study`. Default:
            ``None``, none.
        advance_last: Called with the share that has been done of what follows the last text, the maps of
            hidden tokens.
        analyses: What is measured.

    Raises:
        ValueError: As :func:`captum_hta.contributions`; or if special tokens are to be excluded and none is
            known, or keys are of another text.
        OSError: If a file cannot be written or read.
    """
    corpus = EncodedCorpus(model, texts, settings)
    kinds = [kind for kind in analyses if kind.applies(corpus)]
    empty = partial(Study, corpus.dimensions, kinds, settings.exclude_special)
    study = empty()
    for number, groups in enumerate(corpus.shards(SHARD)):
        kept = kept_in is None or (shards is not None and is_kept(kept_in, number, shards.digest))
        rows = np.array([row for group in groups for row in group])
        if shards is not None and number in shards and kept:
            some = empty().restore(_read_shard(shards, number, rows))
            advance(corpus.share(rows.tolist()))
        else:
            some = empty()
            matrices = _add_groups(some, corpus, groups, advance, keep=kept_in is not None)
            if kept_in is not None:
                with some.watch("keeping contributions"):
                    keep(kept_in, number, matrices, "" if shards is None else shards.digest)
            if shards is not None:
                shards.write(number, some.arrays() | {"rows": rows})
        study.merge(some)
    for analysis in study.analyses.values():
        analysis.finish(corpus, partial(_once, analysis.name, study.watch, shards, advance_last))
    return study


def _read_shard(shards: Shards, number: int, rows: NDArray[np.int64]) -> dict[str, StoredArray]:
    """The arrays of a shard, which must be of these texts."""
    arrays = shards.read(number)
    if not np.array_equal(arrays["rows"], rows):
        raise OtherRunError(
            f"part {number} in {shards.folder} has other texts, since texts were grouped otherwise: delete "
            "that folder, and all is computed again"
        )
    return arrays


def _add_groups(
    study: Study, corpus: EncodedCorpus, groups: Sequence[Sequence[int]], advance: Advance, keep: bool
) -> dict[int, Matrices]:
    """Add groups of texts; returns their matrices by the numbers of the texts, if they are to be kept."""
    kept: dict[int, Matrices] = {}
    for rows in groups:
        try:
            matrices = study.add_group(corpus.model, [corpus.encoding(row) for row in rows], corpus.settings)
        except NotFiniteError as error:
            raise error.renumbered(rows, "text") from error
        if keep:
            kept |= dict(zip(rows, matrices, strict=True))
        for row in rows:
            advance(corpus.share([row]))
    return kept


def _once(
    name: str,
    watch: Stopwatch,
    shards: Shards | None,
    advance: Advance,
    compute: Callable[[Advance], Mapping[str, Array]],
) -> Mapping[str, Array]:
    """Arrays from the checkpoint, or computed and written there, with the seconds that they took."""
    if shards is not None and name in shards:
        arrays = shards.read(name)
        watch.merge(Stopwatch({name: float(arrays["seconds"][0])}))
        return arrays
    with watch(name):
        arrays = dict(compute(advance))
    if shards is not None:
        shards.write(name, arrays | {"seconds": np.array([watch.seconds[name]])})
    return arrays


# --- matrices of one text --------------------------------------------------------------------------


def text_result(
    results: Mapping[str, Contributions], effective: Array | None, exclude_special: bool
) -> TextResult:
    """What analyses read of a single text without padding; see :meth:`Study.add`."""
    whole = _array(results["input"].attention)
    special = _special(results["input"], whole.shape[-1])
    kept = ~special if exclude_special else np.ones_like(special)
    errors = {source: results[source].standard_error for source in SOURCES}
    return TextResult(
        attention=_among(whole, kept),
        contributions={source: _among(_array(results[source].values), kept) for source in SOURCES},
        standard_errors={source: _array(one) for source, one in errors.items() if one is not None},
        special=special[kept],
        hidden=_among(_array(results[HIDDEN].values), kept) if HIDDEN in results else None,
        whole_attention=whole,
        effective_attention=effective,
    )


def _array(values: Tensor) -> Array:
    """The matrices of the only text of a batch."""
    return values[0].double().numpy()


def _special(result: Contributions, count: int) -> NDArray[np.bool_]:
    """Which tokens of the only text are special, as far as it is known."""
    if result.encodings is None or result.keys is not None:
        return np.zeros(count, dtype=bool)
    return special_tokens(result.encodings[0])


def _among(values: Array, kept: NDArray[np.bool_]) -> Array:
    """Rows ``[..., query, key]`` among some of the tokens, scaled to sum to 1 again."""
    if kept.all():
        return values
    rest = values[..., kept, :][..., kept]
    total = rest.sum(-1, keepdims=True)
    out: Array = np.divide(rest, total, out=np.zeros_like(rest), where=total > 0)
    return out


def _effective(
    model: Model,
    layers: Sequence[int],
    encodings: Sequence[Encoding],
    rows: Sequence[int],
    attention: Sequence[Attention],
) -> dict[int, Array]:
    """The effective attention ``[layer, head, query, key]`` of each text of a batch."""
    found = {}
    weights = promoted(torch.stack([model.output_projection(layer).weight for layer in layers]))
    for index, row in enumerate(rows):
        length = len(encodings[row])
        pattern = torch.stack([attention[layer].pattern[index, :, :length, :length] for layer in layers])
        value = torch.stack([_value(attention[layer])[index, :, :length] for layer in layers])
        if not (pattern.isfinite().all() and value.isfinite().all()):
            raise NotFiniteError(f"attention patterns or values of {model.name}", [row], "text")
        found[row] = effective_attention(promoted(pattern), promoted(value), weights).double().cpu().numpy()
    return found


def _value(attention: Attention) -> Tensor:
    if attention.value is None:
        raise ValueError("effective attention takes the values that attention weighs, got none")
    return attention.value


def _matrices(example: Mapping[str, Contributions]) -> Matrices:
    """The matrices of a text that are kept in a folder."""
    found = {name: result.values[0].numpy() for name, result in example.items()}
    tokens = {"tokens": np.array(example["input"].tokens[0])}
    if example["input"].keys is not None:
        tokens["keys"] = np.array(example["input"].keys[0])
    return {"attention": example["input"].attention[0].numpy(), **found, **tokens}


def _packed(value: object) -> NDArray[np.uint8]:
    """A value as JSON in an array."""
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


def _unpacked(array: StoredArray) -> Any:
    return json.loads(array.tobytes())
