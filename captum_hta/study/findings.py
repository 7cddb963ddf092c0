"""What the papers report of BERT, and whether it holds in a study.

Layers are counted from 1 in the papers and from 0 here. A statement about some of BERT-base's twelve layers
is read as one about the layers of the same relative depth: its "last four layers" are the last third of any
model's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from captum_hta.study.mixing import by_distance
from captum_hta.study.run import Study, finite

BERT_LAYERS, BERT_HEADS = 12, 144
FIGURE_1, FIGURE_6 = "Pascual et al. 2021, Figure 1", "Pascual et al. 2021, Figure 6"
FIRST_VERSION = "Brunner et al. 2019, abstract of arXiv:1908.04211v1"
SECTION_5 = "Brunner et al. 2020, section 5"
RELATIONS = {"at least": operator.ge, "above": operator.gt, "below": operator.lt}

Measure = Callable[[Study, int], float]
"""A number of a study of a model with that many layers; NaN where it was not measured."""


@dataclass(frozen=True)
class Finding:
    """A finding of a paper as a number that is held against a bound.

    Attributes:
        key: A short name.
        sentence: What the number is, for a model of any depth.
        paper: The paper's statement.
        source: Where the paper makes it.
        measure: The number in a study.
        relation: How the number has to lie to the bound, one of :data:`RELATIONS`.
        bound: What it is held against: a number, or one that the same study gives.
        form: Format of the number.
    """

    key: str
    sentence: str
    paper: str
    source: str
    measure: Measure
    relation: str
    bound: float | Measure
    form: str = ".2f"


@dataclass(frozen=True)
class Found:
    """What a study says about a finding.

    Attributes:
        finding: The finding.
        number: The number in the study; NaN where it was not measured.
        bound: What it is held against; NaN likewise.
    """

    finding: Finding
    number: float
    bound: float

    @property
    def holds(self) -> bool | None:
        """Whether the finding holds in the study; ``None`` where it was not measured."""
        if np.isnan(self.number) or np.isnan(self.bound):
            return None
        return bool(RELATIONS[self.finding.relation](self.number, self.bound))

    @property
    def verdict(self) -> str:
        """The same in words."""
        return {True: "yes", False: "no", None: "not measured"}[self.holds]

    def record(self) -> dict[str, Any]:
        """The same as JSON can hold it."""
        finding = self.finding
        return {
            "key": finding.key, "sentence": finding.sentence, "number": finite(self.number),
            "relation": finding.relation, "bound": finite(self.bound), "holds": self.holds,
            "paper": finding.paper, "source": finding.source,
        }  # fmt: skip


def findings(study: Study, num_layers: int | None = None) -> list[Found]:
    """Each of :data:`FINDINGS` in a study.

    Args:
        study: The study.
        num_layers: Layers of the model. Default: ``None``, those of the study are all. What is said of layers
            that were not studied is not measured.
    """
    depth = len(study.layers) if num_layers is None else num_layers
    return [
        Found(one, one.measure(study, depth), one.bound(study, depth) if callable(one.bound) else one.bound)
        for one in FINDINGS
    ]


# --- correlations ----------------------------------------------------------------------------------


def _heads(study: Study, num_layers: int, source: str, after: int) -> pd.DataFrame:
    """Correlations of the heads that lie deeper than that layer of BERT; none if any was not studied."""
    deep = [layer for layer in range(num_layers) if (layer + 1) * BERT_LAYERS > after * num_layers]
    table = study.correlations()
    studied = set(deep) <= set(study.layers)
    return table[(table["source"] == source) & table["layer"].isin(deep if studied else [])]


def _share_over(measure: str, bound: float) -> Measure:
    """The share of heads whose correlation with the previous-layer contribution is over a bound."""

    def share(study: Study, num_layers: int) -> float:
        values = _heads(study, num_layers, "previous_layer", after=0)[measure].dropna()
        return float((values > bound).mean())

    return share


def _share_of_input_below(measure: str, bound: float, after: int) -> Measure:
    """The share of the deeper heads whose correlation with the input contribution is below a bound."""

    def share(study: Study, num_layers: int) -> float:
        values = _heads(study, num_layers, "input", after)[measure].dropna()
        return float((values < bound).mean())

    return share


def _largest_of_input(measure: str, after: int) -> Measure:
    """Of the deeper layers the largest median over heads of the correlation with the input contribution."""

    def largest(study: Study, num_layers: int) -> float:
        heads = _heads(study, num_layers, "input", after)
        return float(heads.groupby("layer")[measure].median().max(skipna=False))

    return largest


def _last_of_input(measure: str) -> Measure:
    """Of the last layer the median over heads of the correlation with the input contribution."""

    def last(study: Study, num_layers: int) -> float:
        table = study.correlations()
        heads = table[(table["source"] == "input") & (table["layer"] == num_layers - 1)]
        return float(heads[measure].median())

    return last


# --- hidden tokens ---------------------------------------------------------------------------------


def _mixing(study: Study, layers: list[int]) -> pd.DataFrame:
    """What is known of hidden tokens after these layers; a row of NaN each, if it was not studied."""
    if study.mixing is None:
        return pd.DataFrame({"own_median": np.nan, "own_is_largest": np.nan}, index=layers)
    return study.mixing.table().set_index("layer").reindex(layers)


def _distances(study: Study, layers: list[int]) -> pd.DataFrame:
    """What the pairs of tokens at each distance give to hidden tokens after these layers."""
    return by_distance(_mixing(study, layers))


def _first_own_share(study: Study, num_layers: int) -> float:
    return float(_mixing(study, [0])["own_median"].item())


def _last_own_share(study: Study, num_layers: int) -> float:
    if num_layers == 1:  # which is the first
        return np.nan
    return float(_mixing(study, [num_layers - 1])["own_median"].item())


def _least_largest(study: Study, num_layers: int) -> float:
    """The least share, over layers, of tokens whose own input is the largest contribution."""
    return float(_mixing(study, list(range(num_layers)))["own_is_largest"].min(skipna=False))


def _nearest_first(study: Study, num_layers: int) -> float:
    """The share of layers in which the nearest pair of tokens gives more than any other pair."""
    given = _distances(study, list(range(num_layers)))
    if given.shape[1] < 2 or given.isna().any(axis=None):
        return np.nan
    return float((given.iloc[:, 0] > given.iloc[:, 1:].max(axis=1)).mean())


def _locality(study: Study, layer: int) -> float:
    """How many times as much the nearest pair of tokens gives as the mean pair within ten tokens."""
    given = _distances(study, [layer])
    if given.shape[1] < 2:
        return np.nan
    return float((given.iloc[:, 0] / given.mean(axis=1)).item())


def _first_locality(study: Study, num_layers: int) -> float:
    return _locality(study, 0)


def _last_locality(study: Study, num_layers: int) -> float:
    if num_layers == 1:
        return np.nan
    return _locality(study, num_layers - 1)


# --- the findings ----------------------------------------------------------------------------------

PREVIOUS = "Heads whose attention has a {} correlation over {} with their previous-layer contribution"
FINDINGS = (
    Finding(
        "previous_layer_pearson_over_0.7", PREVIOUS.format("Pearson", 0.7), "all but two of 144 heads",
        FIGURE_1, _share_over("pearson", 0.7), "at least", (BERT_HEADS - 2) / BERT_HEADS, ".1%",
    ),
    Finding(
        "previous_layer_pearson_over_0.85", PREVIOUS.format("Pearson", 0.85), "90% of the heads",
        FIGURE_1, _share_over("pearson", 0.85), "at least", 0.9, ".1%",
    ),
    Finding(
        "previous_layer_spearman_over_0.9", PREVIOUS.format("Spearman", 0.9), "all but four of 144 heads",
        FIGURE_1, _share_over("spearman", 0.9), "at least", (BERT_HEADS - 4) / BERT_HEADS, ".1%",
    ),
    Finding(
        "previous_layer_spearman_over_0.95", PREVIOUS.format("Spearman", 0.95), "75% of the heads",
        FIGURE_1, _share_over("spearman", 0.95), "at least", 0.75, ".1%",
    ),
    Finding(
        "input_pearson_below_0.5_later",
        "In the last two thirds of the layers, heads whose attention has a Pearson correlation below 0.5 "
        "with their input contribution",
        "median below 0.5 for most heads after four layers",
        FIGURE_6, _share_of_input_below("pearson", 0.5, after=4), "above", 0.5, ".1%",
    ),
    Finding(
        "input_pearson_last_third",
        "In the last third of the layers, the largest median over heads of the Pearson correlation of "
        "attention with the input contribution",
        "below 0.25 in the last four layers",
        FIGURE_6, _largest_of_input("pearson", after=8), "below", 0.25,
    ),
    Finding(
        "input_spearman_after_first_sixth",
        "After the first sixth of the layers, the largest median over heads of the Spearman correlation of "
        "attention with the input contribution",
        "below 0.7 from layer 3 on",
        FIGURE_6, _largest_of_input("spearman", after=2), "below", 0.7,
    ),
    Finding(
        "input_spearman_last_layer",
        "In the last layer, the median over heads of the Spearman correlation of attention with the input "
        "contribution",
        "below 0.25 at the last layer",
        FIGURE_6, _last_of_input("spearman"), "below", 0.25,
    ),
    Finding(
        "own_share_first_layer",
        "Median share of a token's own input in its hidden embedding after the first layer",
        "less than 50%",
        FIRST_VERSION, _first_own_share, "below", 0.5, ".1%",
    ),
    Finding(
        "own_share_last_layer",
        "Median share of a token's own input after the last layer, held against that after the first",
        "declines to a median of 7.5%",
        FIRST_VERSION, _last_own_share, "below", _first_own_share, ".1%",
    ),
    Finding(
        "own_is_largest",
        "Tokens whose own input gives the most to their hidden embedding, in the layer where they are fewest",
        "the underlying word contributes most throughout the layers",
        FIRST_VERSION, _least_largest, "above", 0.5, ".1%",
    ),
    Finding(
        "nearest_give_most",
        "Layers in which the two nearest tokens give more to a hidden token than the two at any other "
        "distance",
        "near tokens give more than far ones",
        SECTION_5, _nearest_first, "at least", 1.0, ".1%",
    ),
    Finding(
        "later_layers_less_local",
        "How many times as much the two nearest tokens give as the mean pair within ten tokens, after the "
        "last layer, held against that after the first",
        "later layers are less local",
        SECTION_5, _last_locality, "below", _first_locality,
    ),
)  # fmt: skip
"""What the papers report of BERT-base (12 layers of 12 heads)."""
