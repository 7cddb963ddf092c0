"""The papers' findings, in studies whose numbers are known by construction."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from studies import dimensions, text_result

from captum_hta.study.correlations import Correlations
from captum_hta.study.findings import FINDINGS, Found, findings
from captum_hta.study.hidden_tokens import Mixing
from captum_hta.study.settings import SOURCES

LENGTH = 6


Tables = dict[str, pd.DataFrame]


def made_up(
    layers: list[int], correlations: dict[str, np.ndarray], own: list[float] | None = None, far: float = 0.0
) -> Tables:
    """The tables of a study of one text.

    Args:
        layers: The layers.
        correlations: ``[layer, head]`` by measure and source, such as ``"pearson input"``; 0 elsewhere.
        own: The share of the own input in each layer's hidden tokens; the rest comes from the nearest tokens,
            except for a part to which all tokens contribute equally.
        far: That part in the last layer.
    """
    heads = next(iter(correlations.values())).shape[1]
    analysis = Correlations(dimensions(layers, heads, LENGTH))
    for name, accumulator in analysis.accumulators.items():
        values = correlations.get(name.replace("/", " "), np.zeros((len(layers), heads)))
        accumulator.add(values[..., None])
    if own is None:
        return analysis.tables()
    values = [hidden(share, far * (n == len(own) - 1)) for n, share in enumerate(own)]
    return analysis.tables() | mixed(layers, values)


def mixed(layers: list[int], values: list[np.ndarray]) -> Tables:
    """The table of mixing, given contributions to the hidden tokens of each layer."""
    mixing = Mixing(dimensions(layers, longest=LENGTH))
    mixing.add(text_result(hidden=np.stack(values)))
    return mixing.tables()


def hidden(own: float, far: float, distance: int = 1) -> np.ndarray:
    """Contributions to hidden tokens ``[query, key]``: of the own, of those at a distance, and of all."""
    place = np.arange(LENGTH)
    there = (np.abs(place[:, None] - place) == distance).astype(float)
    there /= there.sum(-1, keepdims=True)
    return own * np.eye(LENGTH) + (1 - own - far) * there + far / LENGTH


def found(tables: Tables, num_layers: int | None = None) -> list[Found]:
    """The findings, by default of a study of all layers."""
    return findings(tables, num_layers or tables["correlations"]["layer"].nunique())


def held(tables: Tables, num_layers: int | None = None) -> dict[str, tuple[float, bool | None]]:
    """Each finding's number, and whether it holds, by its key."""
    return {one.finding.key: (one.number, one.holds) for one in found(tables, num_layers)}


@pytest.mark.parametrize(
    ("measure", "bound", "outside"),
    [("pearson", 0.7, 2), ("pearson", 0.85, 14), ("spearman", 0.9, 4), ("spearman", 0.95, 36)],
    ids=["pearson-0.7", "pearson-0.85", "spearman-0.9", "spearman-0.95"],
)
def test_heads_of_the_previous_layer(measure: str, bound: float, outside: int) -> None:
    """As many heads of 144 as the paper allows may lie at the bound or below; with one more it fails."""
    for more, expected in ((0, True), (1, False)):
        values = np.full(144, bound + 0.01)
        values[: outside + more] = bound
        study = made_up(list(range(12)), {f"{measure} previous_layer": values.reshape(12, 12)})
        number, holds = held(study)[f"previous_layer_{measure}_over_{bound}"]
        assert number == pytest.approx(1 - (outside + more) / 144)
        assert holds is expected


LAYERS = {
    "input_pearson_below_0.5_later": (
        "pearson",
        0.5,
        {12: range(4, 12), 6: range(2, 6), 2: range(2), 1: [0]},
    ),
    "input_pearson_last_third": ("pearson", 0.25, {12: range(8, 12), 6: [4, 5], 2: [1], 1: [0]}),
    "input_spearman_after_first_sixth": (
        "spearman",
        0.7,
        {12: range(2, 12), 6: range(1, 6), 2: range(2), 1: [0]},
    ),
    "input_spearman_last_layer": ("spearman", 0.25, {12: [11], 6: [5], 2: [1], 1: [0]}),
}
"""The layers that a finding is about, in models of different depths, with measure and bound."""


@pytest.mark.parametrize("depth", [12, 6, 2, 1])
@pytest.mark.parametrize("key", LAYERS)
def test_layers_of_the_same_depth(key: str, depth: int) -> None:
    """A finding looks at its layers, all of them, and at no other."""
    measure, bound, by_depth = LAYERS[key]
    deep = list(by_depth[depth])
    values = np.ones((depth, 3))
    values[deep] = bound - 0.01
    assert held(made_up(list(range(depth)), {f"{measure} input": values}))[key][1] is True
    values[deep] = 1
    assert held(made_up(list(range(depth)), {f"{measure} input": values}))[key][1] is False
    if key != "input_pearson_below_0.5_later":
        for layer in deep:
            values[deep] = bound - 0.01
            values[layer] = bound
            number, holds = held(made_up(list(range(depth)), {f"{measure} input": values}))[key]
            assert (number, holds) == (bound, False)


def test_the_last_layer_of_a_deep_model() -> None:
    """Is one layer, whatever its depth."""
    values = np.ones((24, 3))
    values[23] = 0.2
    number = held(made_up(list(range(24)), {"spearman input": values}))["input_spearman_last_layer"]
    assert number == (0.2, True)


def test_a_single_layer_is_not_held_against_itself() -> None:
    """What is said of the last layer beside the first is not measured."""
    numbers = held(made_up([0], {"pearson input": np.ones((1, 3))}, own=[0.4]))
    for key in ("own_share_last_layer", "later_layers_less_local"):
        assert numbers[key][1] is None


def test_the_median_of_a_layer_counts() -> None:
    """Two of three heads below the bound are enough."""
    values = np.array([[0.1, 0.2, 0.9]])
    assert held(made_up([0], {"pearson input": values}))["input_pearson_last_third"] == (0.2, True)


def test_most_heads_are_more_than_half() -> None:
    """Half of them are not most."""
    for heads, expected in (([0.4, 0.6], False), ([0.4, 0.4, 0.6], True)):
        number, holds = held(made_up([0], {"pearson input": np.array([heads])}))[
            "input_pearson_below_0.5_later"
        ]
        assert number == pytest.approx(np.mean(np.array(heads) < 0.5))
        assert holds is expected


def test_what_hidden_tokens_keep() -> None:
    """Medians of the first and of the last layer; how many are their own largest, where they are fewest."""
    numbers = held(made_up([0, 1, 2], {"pearson input": np.ones((3, 1))}, own=[0.4505, 0.7005, 0.3005]))
    assert numbers["own_share_first_layer"] == (pytest.approx(0.4505), True)
    assert numbers["own_share_last_layer"] == (pytest.approx(0.3005), True)
    # In the last layer the two nearest give 0.35 each, or the only one 0.7.
    assert numbers["own_is_largest"] == (pytest.approx(0), False)
    numbers = held(made_up([0, 1, 2], {"pearson input": np.ones((3, 1))}, own=[0.5505, 0.7005, 0.6005]))
    assert numbers["own_share_first_layer"][1] is False
    assert numbers["own_share_last_layer"][1] is False
    assert numbers["own_is_largest"] == (1.0, True)


def test_where_hidden_tokens_take_the_rest() -> None:
    """All from the nearest at first; at last a part from all alike, or all of it."""
    ones = {"pearson input": np.ones((2, 1))}
    numbers = held(made_up([0, 1], ones, own=[0.5, 0.5], far=0.3))
    assert numbers["nearest_give_most"] == (1.0, True)
    number, holds = numbers["later_layers_less_local"]
    assert holds is True
    mixing = made_up([0, 1], ones, own=[0.5, 0.5], far=0.3)["mixing"].iloc[1]
    given = [mixing[f"at_distance_{distance}"] for distance in range(1, 6)]
    assert number == pytest.approx(given[0] / (sum(given) / 5))
    assert held(made_up([0, 1], ones, own=[0.5, 0.5]))["later_layers_less_local"] == (pytest.approx(5), False)


def test_layers_in_which_others_give_more() -> None:
    """In one of two layers those two places away do: the nearest do not give most throughout."""
    study = made_up([0, 1], {"pearson input": np.ones((2, 1))})
    tables = study | mixed([0, 1], [hidden(0.5, 0), hidden(0.5, 0, distance=2)])
    assert held(tables)["nearest_give_most"] == (0.5, False)


@pytest.mark.parametrize("own", [None, [0.4, 0.3]], ids=["heads", "hidden"])
def test_what_was_not_studied_is_not_measured(own: list[float] | None) -> None:
    """With two of three layers, only findings about the first; without hidden tokens, none about them."""
    values = {
        f"{measure} {source}": np.full((2, 2), 0.99)
        for measure in ("pearson", "spearman")
        for source in SOURCES
    }
    numbers = held(made_up([0, 1], values, own), num_layers=3)
    measured = {key for key, (_, holds) in numbers.items() if holds is not None}
    assert measured == (set() if own is None else {"own_share_first_layer"})


def test_undefined_correlations_are_not_measured() -> None:
    """One layer without a correlation is enough for a largest of layers not to be known."""
    values = np.zeros((2, 2))
    values[0] = np.nan
    numbers = held(made_up([0, 1], {"spearman input": values}))
    assert numbers["input_spearman_after_first_sixth"][1] is None
    assert numbers["input_spearman_last_layer"] == (0.0, True)


def test_findings_can_be_recorded() -> None:
    """As JSON, with ``null`` for what was not measured; each under its own key."""
    records = [one.record() for one in found(made_up([0], {"pearson input": np.ones((1, 1))}))]
    assert json.loads(json.dumps(records, allow_nan=False)) == records
    assert len({one["key"] for one in records}) == len(FINDINGS)
    assert {one["holds"] for one in records} == {True, False, None}
    assert all(one["holds"] is None for one in records if one["number"] is None)
