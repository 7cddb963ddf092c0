"""What the papers report about BERT, and whether it holds in a study.

The papers count layers from 1, this package from 0. A statement about some of BERT-base's twelve layers is
read as a statement about layers of the same relative depth: its "last four layers" are the last third of the
layers of any model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from captum_hta.study.analysis import finite
from captum_hta.study.correlations import share_over
from captum_hta.study.hidden_tokens import by_distance

BERT_LAYERS, BERT_HEADS = 12, 144
FIGURE_1, FIGURE_6 = "Pascual et al. 2021, Figure 1", "Pascual et al. 2021, Figure 6"
FIRST_VERSION = "Brunner et al. 2019, abstract of arXiv:1908.04211v1"
SECTION_5 = "Brunner et al. 2020, section 5"
RELATIONS = {"at least": operator.ge, "above": operator.gt, "below": operator.lt}


@dataclass(frozen=True)
class Measured:
    """The tables of a study.

    Attributes:
        tables: By the names of their files without ``.csv``, such as :attr:`StudyFolder.tables`.
        num_layers: Number of layers of the model, studied or not.
    """

    tables: Mapping[str, pd.DataFrame]
    num_layers: int


Measure = Callable[[Measured], float]
"""Returns a number of a study; NaN if it was not measured."""


@dataclass(frozen=True)
class Finding:
    """A finding of a paper as a number that is compared with a bound.

    Attributes:
        key: A short name.
        sentence: What the number is, for a model of any depth.
        paper: The paper's statement.
        source: Where the paper makes it.
        measure: The number in a study.
        relation: How the number must compare with the bound, one of :data:`RELATIONS`.
        bound: The bound: a number, or a measure of the same study.
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
    """A finding in a study.

    Attributes:
        finding: The finding.
        number: The number in the study; NaN if it was not measured.
        bound: The bound that it is compared with; NaN likewise.
    """

    finding: Finding
    number: float
    bound: float

    @property
    def holds(self) -> bool | None:
        """Whether the finding holds in the study; ``None`` if it was not measured."""
        if np.isnan(self.number) or np.isnan(self.bound):
            return None
        return bool(RELATIONS[self.finding.relation](self.number, self.bound))

    @property
    def verdict(self) -> str:
        """The same in words."""
        if self.holds is None:
            return "not measured"
        return "yes" if self.holds else "no"

    def record(self) -> dict[str, object]:
        """The same as a dictionary that JSON can hold."""
        finding = self.finding
        return {
            "key": finding.key, "sentence": finding.sentence, "number": finite(self.number),
            "relation": finding.relation, "bound": finite(self.bound), "holds": self.holds,
            "paper": finding.paper, "source": finding.source,
        }  # fmt: skip


def findings(tables: Mapping[str, pd.DataFrame], num_layers: int) -> list[Found]:
    """Check each of :data:`FINDINGS` in a study.

    Args:
        tables: The tables of the study, as :meth:`Study.tables` returns them or :attr:`StudyFolder.tables`
            reads them. Findings about tables that are not there are not measured.
        num_layers: Number of layers of the model. Findings about layers that were not studied are not
            measured.
    """
    measured = Measured(tables, num_layers)
    return [
        Found(one, one.measure(measured), one.bound(measured) if callable(one.bound) else one.bound)
        for one in FINDINGS
    ]


# --- correlations ----------------------------------------------------------------------------------


def _correlations(study: Measured, source: str, after: int = 0) -> pd.DataFrame:
    """Correlations of the heads that lie deeper than that layer of BERT; empty if any was not studied."""
    num_layers = study.num_layers
    deep = [layer for layer in range(num_layers) if (layer + 1) * BERT_LAYERS > after * num_layers]
    table = study.tables["correlations"]
    studied = set(deep) <= set(table["layer"])
    return table[(table["source"] == source) & table["layer"].isin(deep if studied else [])]


def _share_over(measure: str, bound: float) -> Measure:
    """The share of heads whose correlation with the previous-layer contribution is over a bound."""

    def share(study: Measured) -> float:
        return share_over(_correlations(study, "previous_layer"), measure, bound)

    return share


def _share_of_input_below(measure: str, bound: float, after: int) -> Measure:
    """The share of the deeper heads whose correlation with the input contribution is below a bound."""

    def share(study: Measured) -> float:
        values = _correlations(study, "input", after)[measure].dropna()
        return float((values < bound).mean())

    return share


def _largest_of_input(measure: str, after: int) -> Measure:
    """The largest median over heads, among the deeper layers, of the correlation with the input
    contribution.
    """

    def largest(study: Measured) -> float:
        heads = _correlations(study, "input", after)
        return float(heads.groupby("layer")[measure].median().max(skipna=False))

    return largest


def _last_of_input(measure: str) -> Measure:
    """The median over heads of the correlation with the input contribution in the last layer."""

    def last(study: Measured) -> float:
        table = study.tables["correlations"]
        heads = table[(table["source"] == "input") & (table["layer"] == study.num_layers - 1)]
        return float(heads[measure].median())

    return last


# --- hidden tokens ---------------------------------------------------------------------------------


def _mixing(study: Measured, column: str, layers: list[int]) -> pd.Series:
    """A column of the mixing table at these layers; NaN if it was not measured."""
    if "mixing" not in study.tables:
        return pd.Series(np.nan, index=layers)
    return study.tables["mixing"].set_index("layer")[column].reindex(layers)


def _neighbours(study: Measured, layers: list[int]) -> pd.DataFrame | None:
    """What the pairs of tokens at each distance contribute after these layers; ``None`` if it was not
    measured, or at fewer than two distances.
    """
    if "mixing" not in study.tables:
        return None
    table = by_distance(study.tables["mixing"].set_index("layer").reindex(layers))
    return None if table.shape[1] < 2 else table


def _own_share(study: Measured, layer: int) -> float:
    return float(_mixing(study, "own_median", [layer]).item())


def _first_own_share(study: Measured) -> float:
    return _own_share(study, 0)


def _last_own_share(study: Measured) -> float:
    return np.nan if study.num_layers == 1 else _own_share(study, study.num_layers - 1)


def _least_largest(study: Measured) -> float:
    """The smallest share, over layers, of tokens whose own input is the largest contribution."""
    return float(_mixing(study, "own_is_largest", list(range(study.num_layers))).min(skipna=False))


def _nearest_first(study: Measured) -> float:
    """The share of layers in which the nearest pair of tokens contributes more than any other pair."""
    table = _neighbours(study, list(range(study.num_layers)))
    if table is None or table.isna().any(axis=None):
        return np.nan
    return float((table.iloc[:, 0] > table.iloc[:, 1:].max(axis=1)).mean())


def _locality(study: Measured, layer: int) -> float:
    """The contribution of the nearest pair of tokens divided by that of the mean pair within ten tokens."""
    table = _neighbours(study, [layer])
    return np.nan if table is None else float((table.iloc[:, 0] / table.mean(axis=1)).item())


def _first_locality(study: Measured) -> float:
    return _locality(study, 0)


def _last_locality(study: Measured) -> float:
    return np.nan if study.num_layers == 1 else _locality(study, study.num_layers - 1)


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
        "Median share of a token's own input after the last layer, compared with that after the first",
        "declines to a median of 7.5%",
        FIRST_VERSION, _last_own_share, "below", _first_own_share, ".1%",
    ),
    Finding(
        "own_is_largest",
        "Tokens whose own input contributes most to their hidden embedding, in the layer where they are "
        "fewest",
        "the underlying word contributes most throughout the layers",
        FIRST_VERSION, _least_largest, "above", 0.5, ".1%",
    ),
    Finding(
        "nearest_give_most",
        "Layers in which the two nearest tokens contribute more to a hidden token than the two at any other "
        "distance",
        "near tokens contribute more than far ones",
        SECTION_5, _nearest_first, "at least", 1.0, ".1%",
    ),
    Finding(
        "later_layers_less_local",
        "Contribution of the two nearest tokens divided by that of the mean pair within ten tokens, after "
        "the last layer, compared with that after the first",
        "later layers are less local",
        SECTION_5, _last_locality, "below", _first_locality,
    ),
)  # fmt: skip
"""What the papers report about BERT-base, which has 12 layers of 12 heads."""
