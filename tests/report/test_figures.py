"""Figures of reports: what is on them, that all of it can be read, and that nothing else is changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
import pytest
from figures import WORDS, assert_readable, drawn, legend_of, maps, panels, tidy
from matplotlib.figure import Figure
from studies import dimensions, text_result

from captum_hta.report.correlations import correlation_figure
from captum_hta.report.effective_attention import effective_figure
from captum_hta.report.hidden_tokens import neighbours_figure, own_share_figure
from captum_hta.report.identifiability import MAP_NAMES, identifiability_figure
from captum_hta.report.methods import agreement_figure, faithfulness_figure
from captum_hta.report.patterns import pattern_figure
from captum_hta.report.positions import centre_figure, centres_of_studies_figure, histogram_figure
from captum_hta.study.effective_attention import EffectiveCorrelation
from captum_hta.study.hidden_tokens import Mixing
from captum_hta.study.identifiability import DISTANCES, MAPS
from captum_hta.study.patterns import PATTERNS, PatternExample
from captum_hta.views.names import QUANTITY_NAMES


def correlations(layers: int, heads: int) -> pd.DataFrame:
    """Random correlations."""
    table = tidy(source=["previous_layer", "input"], layer=range(layers), head=range(heads))
    rng = np.random.default_rng(0)
    values = {name: rng.uniform(-0.2, 1, len(table)) for name in ("pearson", "spearman")}
    return table.assign(**values)


def positions(layers: int, heads: int, longest: int = 20) -> pd.DataFrame:
    """Random relative positions."""
    offsets = range(1 - longest, longest)
    quantities = ["attention", "input"]
    table = tidy(quantity=quantities, layer=range(layers), head=range(heads), offset=offsets)
    return table.assign(value=np.random.default_rng(0).random(len(table)))


def centres(layers: int, heads: int) -> pd.DataFrame:
    """Random centres of mass."""
    table = tidy(quantity=["attention", "input"], layer=range(layers), head=range(heads))
    return table.assign(centre_of_mass=np.random.default_rng(0).normal(size=len(table)))


def of_study(layers: int, heads: int) -> dict[str, Callable[[], Figure]]:
    """Every figure of a study."""
    agreement, places = correlations(layers, heads), positions(layers, heads)
    middles = centres(layers, heads)
    return {
        "correlation": lambda: correlation_figure(agreement, "previous_layer"),
        "positions": lambda: histogram_figure(places, "attention"),
        "short_texts": lambda: histogram_figure(positions(layers, heads, 3), "input"),
        "centre": lambda: centre_figure(middles, ["attention"]),
        "centres": lambda: centre_figure(middles, ["attention", "input"]),
    }


def agreement(methods: list[str]) -> Figure:
    """A matrix of methods, one of whose numbers is not known."""
    values = np.linspace(-0.1, 1, len(methods) ** 2).reshape(len(methods), -1)
    values[0, 1] = np.nan
    return agreement_figure(pd.DataFrame(values, index=methods, columns=methods))


def ranking(methods: list[str], interventions: int, layers: int) -> Figure:
    """Rank correlations of methods, without an interval where there is one text."""
    names = ["noise 0.01", "noise 1", "mean vector", "zero vector", "mask token", "other word"]
    rows = [
        {"intervention": name, "method": method, "layer": layer, "spearman": 0.9 - 0.1 * number,
         "low": np.nan if layers == 1 else 0.8 - 0.1 * number, "high": 0.95 - 0.1 * number}
        for name in names[:interventions]
        for number, method in enumerate(methods)
        for layer in range(layers)
    ]  # fmt: skip
    return faithfulness_figure(pd.DataFrame(rows))


def of_hidden_tokens(layers: int, distances: int) -> pd.DataFrame:
    """A table of mixing, of texts so short that some distances do not occur."""
    mixing = Mixing(dimensions(range(layers)))
    values = np.random.default_rng(0).random((layers, distances + 1, distances + 1))
    mixing.add(text_result(hidden=values / values.sum(-1, keepdims=True)))
    return mixing.table()


def of_patterns(tokens: int) -> PatternExample:
    """A head of each pattern, in a text of so many tokens."""
    titles = [f"{pattern}: L11H{head}" for head, pattern in enumerate(PATTERNS)]
    labels = list(itertools.islice(itertools.cycle(WORDS), tokens))
    return PatternExample(labels, titles, maps(tokens, len(titles)))


def of_lengths(layers: int, lengths: list[int]) -> pd.DataFrame:
    """A table of agreement, of two texts of each length."""
    correlation = EffectiveCorrelation(dimensions(range(layers), 3, max(lengths), 32))
    rng = np.random.default_rng(0)
    for length in lengths * 2:
        attention = rng.dirichlet(np.full(length, 0.3), (layers, 3, length))
        effective = attention + rng.normal(0, 1e-3 * length, attention.shape)
        correlation.add(text_result(attention, effective=effective))
    return correlation.table()


def of_studies(labels: int, layers: int) -> pd.DataFrame:
    """Centres of mass of several studies, the later ones of fewer layers."""
    tables = [
        tidy(quantity=["attention", "input"], layer=range(max(1, layers - label)), head=range(3)).assign(
            label=f"study {label}"
        )
        for label in range(labels)
    ]
    every = pd.concat(tables, ignore_index=True)
    return every.assign(centre_of_mass=np.random.default_rng(0).normal(0, 2, len(every)))


def of_identified_tokens(layers: int, trained: bool = True) -> pd.DataFrame:
    """A table of identifiability; where no map is trained, with one text and no errors."""
    table = tidy(layer=range(layers), map=MAPS, distance=DISTANCES)
    shares = np.random.default_rng(0).uniform(0.1, 1, len(table))
    table = table.assign(identified=shares, identified_error=0.01 if trained else np.nan, chance=0.05)
    return table if trained else table.assign(identified=table["identified"].where(table["map"] == "none"))


METHODS = ["HTA, input", "HTA, previous layer", "attention", "value-weighted norm", "attention rollout"]
CASES: dict[str, Callable[[], Figure]] = {
    **{
        f"{name}_{layers}x{heads}": make
        for layers, heads in ((1, 1), (2, 2))
        for name, make in of_study(layers, heads).items()
    },
    **{f"{name}_6x12": of_study(6, 12)[name] for name in ("correlation", "centres")},
    **{f"{name}_12x1": of_study(12, 1)[name] for name in ("correlation", "positions")},
    "positions_1x12": of_study(1, 12)["positions"],
    "agreement_5": partial(agreement, METHODS),
    "agreement_2": partial(agreement, METHODS[:2]),
    "faithfulness_6x5": partial(ranking, METHODS, 6, 6),
    "faithfulness_1x1": partial(ranking, METHODS[:1], 1, 1),
    "faithfulness_4x24": partial(ranking, METHODS, 4, 24),
    **{
        f"{name}_{layers}x{distances}": partial(make, of_hidden_tokens(layers, distances))
        for name, make in (("own", own_share_figure), ("neighbours", neighbours_figure))
        for layers, distances in ((1, 0), (6, 3), (24, 10))
    },
    **{f"patterns_{tokens}": partial(pattern_figure, of_patterns(tokens)) for tokens in (8, 30)},
    **{
        f"effective_{layers}x{len(lengths)}": partial(effective_figure, of_lengths(layers, lengths), 32)
        for layers, lengths in ((1, [20]), (6, [10, 30, 40, 90]), (24, [8, 50]))
    },
    **{
        f"identified_{layers}_{'trained' if trained else 'bare'}": partial(
            identifiability_figure, of_identified_tokens(layers, trained)
        )
        for layers, trained in ((1, True), (6, True), (6, False), (24, True))
    },
    **{
        f"compared_{labels}x{layers}": partial(
            centres_of_studies_figure, of_studies(labels, layers), "attention"
        )
        for labels, layers in ((1, 1), (2, 6), (7, 24))
    },
}

# --- what is on them ------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["previous_layer", "input"])
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (3, 4)])
def test_correlation_figure(source: str, layers: int, heads: int) -> None:
    """A panel for each measure, with a point for each head at its value."""
    table = correlations(layers, heads)
    figure = correlation_figure(table, source)
    assert [axis.get_title() for axis in figure.axes] == [
        "Pearson correlation",
        "Spearman correlation",
    ]
    assert figure.axes[0].get_ylabel() == f"attention and {QUANTITY_NAMES[source]}"
    for axis, measure in zip(figure.axes, ("pearson", "spearman"), strict=True):
        heights = np.concatenate([points.get_offsets()[:, 1] for points in axis.collections])
        assert sorted(heights) == sorted(table[table["source"] == source][measure])
        assert axis.get_xlabel() == "layer"
        assert [tick.get_text() for tick in axis.get_xticklabels()] == list(map(str, range(layers)))
        low, high = axis.get_ylim()
        assert low < heights.min()
        assert heights.max() < high


def test_correlation_figure_names_the_layers_it_has() -> None:
    """Not all from zero on, and in their order."""
    table = correlations(6, 2).query("layer in (5, 2)")
    figure = correlation_figure(table, "input")
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["2", "5"]


@pytest.mark.parametrize("every", [False, True])
def test_undefined_correlations_are_left_out(every: bool) -> None:
    """NaN, of some heads, of a whole layer or of all, is not drawn."""
    table = correlations(3, 2)
    table.loc[(table["layer"] == 1) | (table["head"] == 0) | every, ["pearson", "spearman"]] = None
    figure = correlation_figure(table, "input")
    points = sum(len(group.get_offsets()) for group in figure.axes[0].collections)
    assert points == (0 if every else 2)
    drawn(figure)


@pytest.mark.parametrize("quantity", ["attention", "input"])
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (3, 4)])
def test_histogram_figure(quantity: str, layers: int, heads: int) -> None:
    """A panel for each head, those of a layer in a row, that shows what is within reach."""
    table = positions(layers, heads)
    figure = histogram_figure(table, quantity, reach=5)
    assert len(figure.axes) == layers * heads
    titles = [axis.get_title() for axis in figure.axes[:heads]]
    assert titles == [f"head {head}" for head in range(heads)]
    assert [axis.get_ylabel() for axis in figure.axes[::heads]] == [
        f"layer {layer}" for layer in range(layers)
    ]
    assert "position" in figure.get_supxlabel()
    for axis, (layer, head) in zip(figure.axes, np.ndindex(layers, heads), strict=True):
        keys = f"quantity == '{quantity}' and layer == {layer} and head == {head}"
        within = table.query(f"{keys} and abs(offset) <= 5")
        assert axis.dataLim.y1 == within["value"].max()
        assert np.abs([axis.dataLim.x0, axis.dataLim.x1]).max() <= 5.5
        assert axis.get_xlim()[0] <= -5
        assert axis.get_ylim()[0] == 0


def test_every_bar_of_a_histogram_is_of_one_width() -> None:
    """Also the outermost: each offset is drawn half a token to either side."""
    (axis,) = histogram_figure(positions(1, 1, 3), "input").axes
    assert (axis.dataLim.x0, axis.dataLim.x1) == (-2.5, 2.5)


def test_short_texts_fill_their_panel() -> None:
    """What is within reach but never occurs takes no room."""
    (axis,) = histogram_figure(positions(1, 1, 3), "input").axes
    assert axis.dataLim.width > 0.6 * np.ptp(axis.get_xlim())


@pytest.mark.parametrize("quantities", [["attention"], ["input"], ["attention", "input"]])
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (3, 4)])
def test_centre_figure(quantities: list[str], layers: int, heads: int) -> None:
    """A line of means and a point for each head, with a legend of what they are."""
    table = centres(layers, heads)
    figure = centre_figure(table, quantities)
    (axis,), legend = figure.axes, legend_of(figure)
    assert [text.get_text() for text in legend.get_texts()] == [QUANTITY_NAMES[q] for q in quantities]
    assert (axis.get_xlabel(), "centre of mass" in axis.get_ylabel()) == ("layer", True)
    for quantity, line, points in zip(quantities, axis.lines, axis.collections, strict=False):
        chosen = table[table["quantity"] == quantity]
        mean = chosen.groupby("layer")["centre_of_mass"].mean()
        np.testing.assert_allclose(line.get_xydata(), np.stack([mean.index, mean], 1))
        np.testing.assert_array_equal(points.get_offsets()[:, 1], chosen["centre_of_mass"])


@pytest.mark.parametrize("layers", [1, 2, 6])
def test_layers_are_whole_numbers(layers: int) -> None:
    """A tick of the centre figure is a layer, and every one is a layer that exists or none."""
    figure = centre_figure(centres(layers, 2), ["attention", "input"])
    drawn(figure)
    (axis,) = figure.axes
    low, high = axis.get_xlim()
    shown = [tick for tick in axis.get_xticks() if low <= tick <= high]
    assert shown == list(range(layers))


def test_undefined_centres_are_left_out() -> None:
    """A head without a centre does not spoil the figure."""
    table = centres(3, 2)
    table.loc[table["layer"] == 1, "centre_of_mass"] = np.nan
    drawn(centre_figure(table, ["attention", "input"]))


def test_pattern_figure() -> None:
    """A row a pattern, titled by it, with all maps that there are."""
    examples = of_patterns(5)
    figure = pattern_figure(examples)
    shown = [panel.get_title() for panel in panels(figure)]
    assert shown == [f"{title}\n{name}" for title in examples.titles for name in QUANTITY_NAMES.values()]
    for panel, (row, name) in zip(panels(figure), itertools.product(range(5), QUANTITY_NAMES), strict=True):
        np.testing.assert_array_equal(panel.images[0].get_array(), examples.maps[name][row])
        assert [tick.get_text() for tick in panel.get_xticklabels()] == WORDS[:5]


def test_effective_figure() -> None:
    """A line a layer through the middle of its bins, and one where texts get longer than a head is wide."""
    table = of_lengths(3, [10, 30, 90])
    figure = effective_figure(table, 32)
    *lines, width = [line for line in figure.axes[0].lines if line.get_linestyle() != "None"]
    assert set(width.get_xdata()) == {32.5}
    for layer, line in enumerate(lines):
        found = table[table["layer"] == layer]
        np.testing.assert_array_equal(line.get_xdata(), [12.5, 28.5, 92.5])
        np.testing.assert_array_equal(line.get_ydata(), found["correlation"])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["0", "1", "2"]


@pytest.mark.parametrize("quantity", ["attention", "input"])
def test_centres_of_studies_figure(quantity: str) -> None:
    """A line for each study, the mean over its heads, as far as it has layers."""
    table = of_studies(3, 5)
    figure = centres_of_studies_figure(table, quantity)
    *lines, _ = figure.axes[0].lines
    shown = [text.get_text() for text in legend_of(figure).get_texts()]
    assert shown == ["study 0", "study 1", "study 2"]
    for number, line in enumerate(lines):
        rows = table.query(f"label == 'study {number}' and quantity == '{quantity}'")
        expected = [rows[rows["layer"] == layer]["centre_of_mass"].mean() for layer in range(5 - number)]
        np.testing.assert_allclose(line.get_ydata(), expected)


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "bare"])
def test_identifiability_figure(trained: bool) -> None:
    """A panel for each distance, a line for each map that there is, and one for chance."""
    table = of_identified_tokens(3, trained)
    before = table.copy()
    figure = identifiability_figure(table)
    pd.testing.assert_frame_equal(table, before)
    assert [axis.get_title() for axis in figure.axes] == ["Cosine distance", "Euclidean distance"]
    names = MAPS if trained else MAPS[:1]
    assert [text.get_text() for text in legend_of(figure).get_texts()] == [MAP_NAMES[name] for name in names]
    for axis, distance in zip(figure.axes, DISTANCES, strict=True):
        *lines, chance = axis.lines
        for line, name in zip(lines, names, strict=True):
            rows = table.query(f"map == '{name}' and distance == '{distance}'")
            np.testing.assert_array_equal(line.get_xydata(), rows[["layer", "identified"]])
        assert set(chance.get_ydata()) == {0.05}


def test_numbers_of_the_matrix_and_lines_of_methods() -> None:
    """Each cell says its number, in a colour that is seen on it; each panel has a line a method."""
    figure = agreement(METHODS)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts[:3] == ["-0.10", "-", "-0.01"]
    assert texts[-1] == "1.00"
    assert figure.axes[0].texts[-1].get_color() == "white"
    assert figure.axes[0].texts[0].get_color() == "black"
    figure = ranking(METHODS, 4, 3)
    shown = [axis for axis in panels(figure) if axis.axison]
    assert [axis.get_title() for axis in shown] == ["noise 0.01", "noise 1", "mean vector", "zero vector"]
    for axis in shown:
        assert [list(line.get_ydata()) for line in axis.lines] == [
            pytest.approx([0.9 - 0.1 * number] * 3) for number in range(5)
        ]
    assert [text.get_text() for text in legend_of(figure).get_texts()] == METHODS


LABELS = ["_hidden", r"b $\frac{$", "日本語", "$x$", "a" * 60, "plain"]


def test_any_label_is_in_the_legend() -> None:
    """As it is, not hidden or read as mathematics; letters that the font lacks by number, long ones cut."""
    table = tidy(quantity=["attention"], layer=range(2), head=range(2), label=LABELS)
    figure = centres_of_studies_figure(table.assign(centre_of_mass=1.0), "attention")
    assert_readable(figure)
    texts = [text.get_text() for text in legend_of(figure).get_texts()]
    assert texts == ["_hidden", r"b $\frac{$", "#2", "$x$", "a" * 31 + "…", "plain"]
    assert figure.axes[0].get_window_extent().width > 200


# --- that it can be read --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_figures_can_be_read(name: str) -> None:
    """All labels are seen, and the legend of centres of mass hides no point."""
    figure = CASES[name]()
    assert_readable(figure)
    if name.startswith("centre"):
        (axis,) = figure.axes
        box = legend_of(figure).get_window_extent()
        for points in axis.collections:
            for x, y in axis.transData.transform(points.get_offsets()):
                assert not box.contains(x, y)


# --- that nothing else is changed -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "table", "what"),
    [
        (correlation_figure, correlations(2, 2), "input"),
        (histogram_figure, positions(2, 2), "input"),
        (centre_figure, centres(2, 2), ["input"]),
    ],
    ids=["correlation", "histogram", "centre"],
)
def test_tables_are_not_changed(make: Callable[..., Figure], table: pd.DataFrame, what: object) -> None:
    """Drawing only reads them."""
    before = table.copy()
    make(table, what)
    pd.testing.assert_frame_equal(table, before)
