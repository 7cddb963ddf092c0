"""Heads whose attention is of a simple pattern, and what such heads take in of the input.

After Pascual et al., "Telling BERT's Full Story", EACL 2021, Figure 7; the patterns are those of Clark et
al., "What Does BERT Look At?", BlackboxNLP 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import entr

from captum_hta.model.encoding import Encoding
from captum_hta.result import Contributions
from captum_hta.statistics.accumulators import Mean
from captum_hta.statistics.correlations import is_causal

Array = NDArray[np.float64]
BROAD = "broad"
"""The pattern of a head that attends to all tokens alike."""
PATTERNS = ("previous token", "next token", "itself", "delimiters", BROAD)
QUANTITIES = ("attention", "input")
SHORTEST_SHOWN = 8
"""A text of fewer tokens than these shows no pattern."""


@dataclass
class Patterns:
    """How much the rows of each head are of each of :data:`PATTERNS`.

    Attributes:
        layers: The layers of the layer axis.
        heads: Number of heads.
        attention: What rows of attention say.
        input: What rows of the input contribution say.
    """

    layers: list[int]
    heads: int
    attention: Mean
    input: Mean

    @classmethod
    def empty(cls, layers: Sequence[int], heads: int) -> Patterns:
        """Of no example."""
        shape = (len(layers), heads, len(PATTERNS))
        return cls(list(layers), heads, Mean.zero(*shape), Mean.zero(*shape))

    def add(self, attention: Array, input_values: Array, special: NDArray[np.bool_]) -> None:
        """Add one example.

        Args:
            attention: ``[layer, head, query, key]``, without padding.
            input_values: Input contributions, of the same shape.
            special: ``[key]``, whether a token is a delimiter; see :func:`delimiters`.

        Raises:
            ValueError: If queries and keys are not the same tokens.
        """
        queries, keys = attention.shape[-2:]
        if not queries == keys == len(special):
            raise ValueError(
                f"patterns are of texts that attend to themselves, got {queries} queries, {keys} keys and "
                f"{len(special)} marks of delimiters: leave cross attention out"
            )
        causal = is_causal(attention)
        self.attention.add(row_patterns(attention, special, causal))
        self.input.add(row_patterns(input_values, special, causal))

    @property
    def parts(self) -> dict[str, Mean]:
        """Its accumulators, by name."""
        return {name: getattr(self, name) for name in QUANTITIES}

    def table(self) -> pd.DataFrame:
        """A row for each layer, head and pattern: how much attention and the input contribution are of it,
        the mean over rows and its error by example.
        """
        index = pd.MultiIndex.from_product(
            [self.layers, range(self.heads), PATTERNS], names=["layer", "head", "pattern"]
        )
        columns = {}
        for name, part in self.parts.items():
            columns[name] = part.mean().ravel()
            columns[f"{name}_error"] = part.standard_error().ravel()
        return pd.DataFrame(columns, index).reset_index()

    def chosen(self) -> pd.DataFrame:
        """A row for each pattern that occurs: the head whose attention is most of it, with both scores."""
        known = self.table().dropna(subset="attention")
        most = known.groupby("pattern")["attention"].idxmax()
        rows = known.loc[[most[pattern] for pattern in PATTERNS if pattern in most]]
        return rows[["pattern", "layer", "head", *QUANTITIES]].reset_index(drop=True)


def row_patterns(values: Array, special: NDArray[np.bool_], causal: bool = False) -> Array:
    r"""How much each row is of each pattern.

    Of the first four of :data:`PATTERNS` it is the share of their keys. A row is broad by its entropy over
    that of a row which is even over the :math:`n` keys that the query sees,
    :math:`-\sum_i c_{ji} \log c_{ji} / \log n`: 1 of an even row, 0 of one that is all on one token.

    Args:
        values: ``[layer, head, query, key]``, the rows of which sum to 1.
        special: ``[key]``, whether a token is a delimiter.
        causal: Whether queries see no later keys.

    Returns:
        ``[layer, head, pattern, query]``; NaN where a query sees no key of the pattern, and for the entropy
        where it sees a single key, or nothing reaches it.
    """
    tokens = len(special)
    seen = np.tri(tokens, dtype=bool) if causal else np.ones((tokens, tokens), dtype=bool)
    before, behind = np.eye(tokens, k=-1, dtype=bool), np.eye(tokens, k=1, dtype=bool)
    keys = np.stack([before, behind, np.eye(tokens, dtype=bool), np.tile(special, (tokens, 1))]) & seen
    shares = np.where(keys.any(-1), np.einsum("lhqk,pqk->lhpq", values, keys), np.nan)
    return np.concatenate([shares, _breadth(values, seen.sum(-1))[:, :, None]], axis=2)


def _breadth(values: Array, visible: NDArray[np.int64]) -> Array:
    """The entropy of rows over that of even ones, ``[layer, head, query]``."""
    defined = (visible > 1) & values.any(-1)
    even = np.log(np.maximum(visible, 2))
    return np.where(defined, entr(values).sum(-1) / even, np.nan)


def delimiters(encoding: Encoding) -> NDArray[np.bool_]:
    """Whether each token is a delimiter, ``[token]``: a special token, such as ``[CLS]``, ``[SEP]`` or one
    that begins a text, which is of no word. Full stops and commas are words. Where the tokenizer does not
    tell words, no token is known to be one.
    """
    if encoding.words is None:
        return np.zeros(len(encoding), dtype=bool)
    return np.array([word is None for word in encoding.words])


# --- a text to show -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A text that may be shown.

    Attributes:
        tokens: Labels of its tokens.
        maps: Arrays ``[layer, head, query, key]`` of ``"attention"``, ``"previous_layer"`` and ``"input"``.
    """

    tokens: list[str]
    maps: dict[str, Array]

    @classmethod
    def of(cls, results: Mapping[str, Contributions]) -> Candidate:
        """Of the contributions of one text, by source, the input among them."""
        sources = [name for name in ("previous_layer", "input") if name in results]
        maps = {"attention": results["input"].attention} | {name: results[name].values for name in sources}
        arrays = {name: values[0].double().numpy() for name, values in maps.items()}
        return cls(results["input"].tokens[0], arrays)


@dataclass(frozen=True)
class PatternExamples:
    """What heads of simple patterns do in one text.

    Attributes:
        tokens: Labels of its tokens.
        titles: For each head its pattern and its place.
        maps: Arrays ``[pattern, query, key]`` of ``"attention"``, ``"previous_layer"`` and ``"input"``.
    """

    tokens: list[str]
    titles: list[str]
    maps: dict[str, Array]


def text_to_show(lengths: Sequence[int]) -> int:
    """The number of the text to show, by the number of tokens of each: the shortest of at least
    :data:`SHORTEST_SHOWN`, or the longest where there is none.
    """
    long = [number for number, length in enumerate(lengths) if length >= SHORTEST_SHOWN]
    if long:
        return min(long, key=lengths.__getitem__)
    return max(range(len(lengths)), key=lengths.__getitem__)


def pattern_examples(
    candidates: Sequence[Candidate], chosen: pd.DataFrame, layers: Sequence[int]
) -> PatternExamples:
    """What is shown of each pattern.

    Args:
        candidates: Texts, of which :func:`text_to_show` is shown.
        chosen: Heads, as :meth:`Patterns.chosen` gives.
        layers: The layers of the layer axis of the candidates.

    Raises:
        ValueError: If there is no candidate.
    """
    if not candidates:
        raise ValueError("there is no text to show: pass at least one candidate")
    shown = candidates[text_to_show([len(candidate.tokens) for candidate in candidates])]
    rows = list(zip(chosen["pattern"], chosen["layer"], chosen["head"], strict=True))
    places = [list(layers).index(layer) for _, layer, _ in rows]
    return PatternExamples(
        tokens=shown.tokens,
        titles=[f"{pattern}: layer {layer}, head {head}" for pattern, layer, head in rows],
        maps={name: values[places, chosen["head"]] for name, values in shown.maps.items()},
    )
