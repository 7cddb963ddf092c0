"""Heads whose attention follows a simple pattern, and whether their input contributions follow it too.

After Pascual et al., "Telling BERT's Full Story", EACL 2021, Figure 7; the patterns are those of Clark et
al., "What Does BERT Look At?", BlackboxNLP 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import entr

from captum_hta.computation import jointly
from captum_hta.model.head_names import head_name
from captum_hta.statistics.accumulators import RowMean
from captum_hta.statistics.correlations import attended, carried
from captum_hta.study.analysis import Analysis, Once, TextResult
from captum_hta.study.encoded_corpus import Dimensions
from captum_hta.study.questions import questions_of

if TYPE_CHECKING:
    from captum_hta.study.encoded_corpus import EncodedCorpus

Array = NDArray[np.float64]
BROAD = "broad"
"""The pattern of a head that attends to all tokens alike."""
PATTERNS = ("previous token", "next token", "itself", "delimiters", BROAD)
QUANTITIES = ("attention", "input")
SHORTEST_EXAMPLE = 8
"""Tokens of the shortest text on which patterns can be seen."""


@dataclass(frozen=True)
class PatternExample:
    """Heads of simple patterns in one text.

    Attributes:
        tokens: Labels of its tokens.
        titles: The pattern and the place of each head.
        maps: ``"attention"``, ``"previous_layer"`` and ``"input"`` contributions, ``[pattern, query, key]``.
    """

    tokens: list[str]
    titles: list[str]
    maps: dict[str, Array]


class Patterns(Analysis):
    """How far the rows of each head follow each of :data:`PATTERNS`.

    Attributes:
        means: Scores of attention and of the input contribution, ``[layer, head, pattern]``.
        example: One text with a head of each pattern; ``None`` until :meth:`finish`, or if there is no such
            head.
    """

    name = "patterns"

    def __init__(self, size: Dimensions) -> None:
        super().__init__(size)
        shape = (len(size.layers), size.heads, len(PATTERNS))
        self.means = {quantity: RowMean.zero(*shape) for quantity in QUANTITIES}
        self.example: PatternExample | None = None

    @classmethod
    def applies(cls, corpus: EncodedCorpus) -> bool:
        """To self-attention."""
        return corpus.is_self_attention

    @property
    def accumulators(self) -> dict[str, RowMean]:
        """The means."""
        return self.means

    def add(self, text: TextResult) -> None:
        """Add one text.

        Raises:
            ValueError: If queries and keys are not the same tokens.
        """
        queries, keys = text.attention.shape[-2:]
        if not queries == keys == len(text.special):
            raise ValueError(
                f"patterns are of texts that attend to themselves, got {queries} queries, {keys} keys and "
                f"{len(text.special)} marks of special tokens: leave cross attention out"
            )
        window, values = attended(text.attention), text.contributions["input"]
        self.means["attention"].add(row_patterns(text.attention, text.special, window))
        self.means["input"].add(row_patterns(values, text.special, carried(values, window)))

    def finish(self, corpus: EncodedCorpus, once: Once) -> None:
        """Choose a short text and compute its contributions, for a figure."""
        chosen = self.chosen()
        if chosen.empty:
            return
        encoding = corpus.encoding(example_text(corpus.lengths))
        results = jointly(corpus.model, [encoding], questions_of(corpus.model, corpus.settings, hidden=False))
        values = {"attention": results["input"].attention} | {
            name: one.values for name, one in results.items()
        }
        maps = {name: one[0].double().numpy() for name, one in values.items()}
        self.example = pattern_example(results["input"].tokens[0], maps, chosen, corpus.layers)

    def tables(self) -> dict[str, pd.DataFrame]:
        """``patterns``: see :meth:`table`."""
        return {"patterns": self.table()}

    def table(self) -> pd.DataFrame:
        """A row for each layer, head and pattern: the scores of attention and of the input contribution,
        means over rows with their standard errors by example.
        """
        index = pd.MultiIndex.from_product(
            [self.size.layers, range(self.size.heads), PATTERNS], names=["layer", "head", "pattern"]
        )
        columns = {}
        for name, mean in self.means.items():
            columns[name] = mean.mean().ravel()
            columns[f"{name}_error"] = mean.standard_error().ravel()
        return pd.DataFrame(columns, index).reset_index()

    def chosen(self) -> pd.DataFrame:
        """A row for each pattern that occurs: the head whose attention has the highest score, with both
        scores.
        """
        known = self.table().dropna(subset="attention")
        best = known.groupby("pattern")["attention"].idxmax()
        rows = known.loc[[best[pattern] for pattern in PATTERNS if pattern in best]]
        return rows[["pattern", "layer", "head", *QUANTITIES]].reset_index(drop=True)


def row_patterns(values: Array, special: NDArray[np.bool_], seen: NDArray[np.bool_] | None = None) -> Array:
    r"""Scores of each row for each pattern.

    For the first four of :data:`PATTERNS` the score is the share of the pattern's keys. For ``"broad"`` it is
    the entropy of the row divided by that of an even row over the :math:`n` keys that the query sees,
    :math:`-\sum_i c_{ji} \log c_{ji} / \log n`: 1 for an even row, 0 for a row that is all on one token.

    Args:
        values: ``[layer, head, query, key]``, with rows that sum to 1.
        special: Whether each token is a delimiter, ``[key]``.
        seen: The keys that each query sees, ``[layer, query, key]``. Default: ``None``, all.

    Returns:
        ``[layer, head, pattern, query]``; NaN where a query sees no key of the pattern, and for the entropy
        where a query sees a single key or its row is zero.
    """
    tokens = len(special)
    seen = np.ones((1, tokens, tokens), dtype=bool) if seen is None else seen
    before, behind = np.eye(tokens, k=-1, dtype=bool), np.eye(tokens, k=1, dtype=bool)
    kinds = np.stack([before, behind, np.eye(tokens, dtype=bool), np.tile(special, (tokens, 1))])
    keys = kinds & seen[:, None]
    shares = np.where(np.asarray(keys.any(-1))[:, None], np.einsum("lhqk,lpqk->lhpq", values, keys), np.nan)
    return np.concatenate([shares, _breadth(values, seen.sum(-1)[:, None])[:, :, None]], axis=2)


def _breadth(values: Array, visible: NDArray[np.int64]) -> Array:
    """The entropy of rows divided by that of even rows, ``[layer, head, query]``."""
    defined = (visible > 1) & values.any(-1)
    even = np.log(np.maximum(visible, 2))
    return np.where(defined, entr(values).sum(-1) / even, np.nan)


# --- an example -----------------------------------------------------------------------------------


def example_text(lengths: Sequence[int]) -> int:
    """The number of the text to show, given the number of tokens of each: the shortest with at least
    :data:`SHORTEST_EXAMPLE` tokens, or the longest if there is none.
    """
    long = [number for number, length in enumerate(lengths) if length >= SHORTEST_EXAMPLE]
    if long:
        return min(long, key=lengths.__getitem__)
    return max(range(len(lengths)), key=lengths.__getitem__)


def pattern_example(
    tokens: list[str], maps: dict[str, Array], chosen: pd.DataFrame, layers: Sequence[int]
) -> PatternExample:
    """The chosen heads in one text.

    Args:
        tokens: Labels of its tokens.
        maps: Attention and contributions by name, ``[layer, head, query, key]``.
        chosen: Heads, as :meth:`Patterns.chosen` returns.
        layers: Numbers of the layers on the layer axis.
    """
    rows = list(zip(chosen["pattern"], chosen["layer"], chosen["head"], strict=True))
    places = [list(layers).index(layer) for _, layer, _ in rows]
    return PatternExample(
        tokens=tokens,
        titles=[f"{pattern}: {head_name(layer, head)}" for pattern, layer, head in rows],
        maps={name: values[places, chosen["head"]] for name, values in maps.items()},
    )
