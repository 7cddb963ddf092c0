"""Figures: what is on them, that all of it can be read, and that nothing else is changed."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text

from captum_hta.report import figures as study_figures
from captum_hta.report import methods as method_figures
from captum_hta.report import one_study as report
from captum_hta.study.effective import EffectiveAgreement
from captum_hta.study.identifiability import DISTANCES, MAPS
from captum_hta.study.mixing import Mixing
from captum_hta.study.patterns import PATTERNS, PatternExamples
from captum_hta.views import heatmaps
from captum_hta.views.names import QUANTITY_NAMES

WORDS = [
    "[CLS]", "the", "ladder", "is", "in", "Ġgarage", "##ing", ",", "é", "ß", "Ω", "я", "$", "50%",
    "<s>", "▁of", "\\n", "_", "^", "#", "&", "{", "unbelievable", "[SEP]",
]  # fmt: skip


def maps(tokens: int, rows: int = 1) -> dict[str, np.ndarray]:
    """Random attention and contributions ``[row, query, key]``."""
    rng = np.random.default_rng(0)
    return {name: rng.dirichlet(np.full(tokens, 0.3), (rows, tokens)) for name in QUANTITY_NAMES}


def heatmap(tokens: int, rows: int = 1) -> Figure:
    """Heatmaps of so many tokens."""
    labels = list(itertools.islice(itertools.cycle(WORDS), tokens))
    titles = [f"layer {row}, head 11" for row in range(rows)]
    return heatmaps.heatmaps(maps(tokens, rows), labels, titles)


def crossed(queries: int, keys: int) -> Figure:
    """Heatmaps of cross attention."""
    values = {name: array[:, :queries] for name, array in maps(max(queries, keys)).items()}
    values = {name: array[..., :keys] for name, array in values.items()}
    labels = list(itertools.islice(itertools.cycle(WORDS), max(queries, keys)))
    return heatmaps.heatmaps(values, labels[:queries], ["layer 3, head 11"], labels[:keys])


def overlay(
    grid: tuple[int, int], rows: int = 1, marks: tuple[str, ...] = ("[CLS]",), query: int = 0
) -> Figure:
    """A image of noise, 6 x 8 pixels a patch, under random values."""
    tokens = [*marks, *(f"({row}, {column})" for row, column in np.ndindex(grid))]
    image = np.random.default_rng(0).random((6 * grid[0], 8 * grid[1], 3))
    values = {name: array[:, query] for name, array in maps(len(tokens), rows).items()}
    titles = [f"layer {row}, head 11" for row in range(rows)]
    return heatmaps.overlays(values, image, grid, tokens, query, titles)


def tidy(**keys: Any) -> pd.DataFrame:
    """A table with a row for each combination of keys."""
    return pd.MultiIndex.from_product(keys.values(), names=list(keys)).to_frame(index=False)


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
        "correlation": lambda: study_figures.correlation_figure(agreement, "previous_layer"),
        "positions": lambda: study_figures.histogram_figure(places, "attention"),
        "short_texts": lambda: study_figures.histogram_figure(positions(layers, heads, 3), "input"),
        "centre": lambda: study_figures.centre_figure(middles, ["attention"]),
        "centres": lambda: study_figures.centre_figure(middles, ["attention", "input"]),
    }


def agreement(methods: list[str]) -> Figure:
    """A matrix of methods, one of whose numbers is not known."""
    values = np.linspace(-0.1, 1, len(methods) ** 2).reshape(len(methods), -1)
    values[0, 1] = np.nan
    return method_figures.agreement_figure(pd.DataFrame(values, index=methods, columns=methods))


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
    return method_figures.faithfulness_figure(pd.DataFrame(rows))


def of_hidden_tokens(layers: int, distances: int) -> pd.DataFrame:
    """A table of mixing, of texts so short that some distances do not occur."""
    mixing = Mixing.empty(list(range(layers)))
    values = np.random.default_rng(0).random((layers, distances + 1, distances + 1))
    mixing.add(values / values.sum(-1, keepdims=True))
    return mixing.table()


def of_patterns(tokens: int) -> PatternExamples:
    """A head of each pattern, in a text of so many tokens."""
    titles = [f"{pattern}: layer 11, head {head}" for head, pattern in enumerate(PATTERNS)]
    labels = list(itertools.islice(itertools.cycle(WORDS), tokens))
    return PatternExamples(labels, titles, maps(tokens, len(titles)))


def of_lengths(layers: int, lengths: list[int]) -> pd.DataFrame:
    """A table of agreement, of two texts of each length."""
    agreement = EffectiveAgreement.empty(list(range(layers)), max(lengths), 32)
    rng = np.random.default_rng(0)
    for length in lengths * 2:
        attention = rng.dirichlet(np.full(length, 0.3), (layers, 3, length))
        agreement.add(attention, attention + rng.normal(0, 1e-3 * length, attention.shape))
    return agreement.table()


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


def of_identified_tokens(layers: int, learnt: bool = True) -> pd.DataFrame:
    """A table of identifiability; where no map is learnt, with one text and no errors."""
    table = tidy(layer=range(layers), map=MAPS, distance=DISTANCES)
    shares = np.random.default_rng(0).uniform(0.1, 1, len(table))
    table = table.assign(identified=shares, identified_error=0.01 if learnt else np.nan, chance=0.05)
    return table if learnt else table.assign(identified=table["identified"].where(table["map"] == "none"))


CASES: dict[str, tuple[Any, ...]] = {
    f"heatmap_{tokens}x{rows}": (heatmap, tokens, rows)
    for tokens, rows in ((1, 1), (3, 1), (4, 2), (25, 1), (60, 1))
}
CASES |= {
    f"{name}_{layers}x{heads}": (make,)
    for layers, heads in ((1, 1), (2, 2))
    for name, make in of_study(layers, heads).items()
}
CASES |= {f"{name}_6x12": (of_study(6, 12)[name],) for name in ("correlation", "centres")}
CASES |= {f"{name}_12x1": (of_study(12, 1)[name],) for name in ("correlation", "positions")}
CASES["positions_1x12"] = (of_study(1, 12)["positions"],)
CASES |= {f"crossed_{size[0]}x{size[1]}": (crossed, *size) for size in ((1, 5), (2, 20), (25, 3), (1, 60))}
CASES |= {
    "overlay_3x3": (overlay, (3, 3), 2),
    "overlay_14x14": (overlay, (14, 14), 1, ("[CLS]",), 120),
    "overlay_2x9": (overlay, (2, 9), 2, ("[CLS]", "[DIST]")),
    "overlay_9x2": (overlay, (9, 2), 1),
    "overlay_1x1": (overlay, (1, 1), 1, ()),
}
METHODS = ["HTA, input", "HTA, previous layer", "attention", "value-weighted norm", "attention rollout"]
CASES |= {
    "agreement_5": (agreement, METHODS),
    "agreement_2": (agreement, METHODS[:2]),
    "faithfulness_6x5": (ranking, METHODS, 6, 6),
    "faithfulness_1x1": (ranking, METHODS[:1], 1, 1),
    "faithfulness_4x24": (ranking, METHODS, 4, 24),
}
CASES |= {
    f"{name}_{layers}x{distances}": (make, of_hidden_tokens(layers, distances))
    for name, make in (
        ("own", study_figures.own_share_figure),
        ("neighbours", study_figures.neighbours_figure),
    )
    for layers, distances in ((1, 0), (6, 3), (24, 10))
}
CASES |= {
    f"patterns_{tokens}": (lambda tokens: study_figures.pattern_figure(of_patterns(tokens)), tokens)
    for tokens in (8, 30)
}
CASES |= {
    f"effective_{layers}x{len(lengths)}": (study_figures.effective_figure, of_lengths(layers, lengths), 32)
    for layers, lengths in ((1, [20]), (6, [10, 30, 40, 90]), (24, [8, 50]))
}
CASES |= {
    f"identified_{layers}_{'learnt' if learnt else 'bare'}": (
        study_figures.identifiability_figure,
        of_identified_tokens(layers, learnt),
    )
    for layers, learnt in ((1, True), (6, True), (6, False), (24, True))
}
CASES |= {
    f"together_{labels}x{layers}": (
        study_figures.centres_together_figure,
        of_studies(labels, layers),
        "attention",
    )
    for labels, layers in ((1, 1), (2, 6), (7, 24))
}
SMALL = ["overlay_3x3", "heatmap_3x1", "correlation_2x2", "positions_2x2", "centres_2x2"]


def drawn(figure: Figure) -> Figure:
    """Lay out a figure and all that is on it; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.draw_without_rendering()
    return figure


def panels(figure: Figure) -> list[Axes]:
    """The axes of a figure, without those of colour bars."""
    return [axis for axis in figure.axes if not hasattr(axis, "_colorbar")]


def legend_of(figure: Figure) -> Legend:
    """The legend, within the axes or outside of them."""
    return figure.axes[0].get_legend() or figure.legends[0]


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    """Figures of :data:`CASES` that were made and drawn before."""
    return {}


@pytest.fixture
def figure(figures: dict[str, Figure], request: pytest.FixtureRequest) -> Figure:
    """One of :data:`CASES`, made and drawn."""
    make, *arguments = CASES[request.param]
    if request.param not in figures:
        figures[request.param] = make(*arguments)
        with suppress(Warning, ValueError):  # is tested by itself
            drawn(figures[request.param])
    return figures[request.param]


every_figure = pytest.mark.parametrize("figure", CASES, indirect=True)

# --- what is on them ------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "rows"), [(5, 1), (8, 3)])
def test_heatmaps(tokens: int, rows: int) -> None:
    """A panel for each map and row with its numbers, a title, the tokens, and a colour bar."""
    values, labels = maps(tokens, rows), WORDS[:tokens]
    figure = heatmaps.heatmaps(values, labels, [f"head {row}" for row in range(rows)])
    assert len(panels(figure)) == 3 * rows
    places = itertools.product(range(rows), values)
    for panel, (row, name) in zip(panels(figure), places, strict=True):
        np.testing.assert_array_equal(panel.images[0].get_array(), values[name][row])
        assert panel.images[0].norm.vmin == 0
        assert panel.images[0].norm.vmax == max(array[row].max() for array in values.values())
        assert panel.images[0].colorbar is not None
        assert panel.get_title() == f"head {row}\n{QUANTITY_NAMES[name]}"
        assert [tick.get_text() for tick in panel.get_xticklabels()] == labels
        assert [tick.get_text() for tick in panel.get_yticklabels()] == labels
        assert panel.get_xlabel() == ("key (source token)" if row == rows - 1 else "")
        assert panel.get_ylabel() == ("query (target token)" if name == "attention" else "")


def test_heatmaps_of_some_maps() -> None:
    """Any of the maps may be left out, and an array may be all zeros."""
    figure = heatmaps.heatmaps({"input": np.zeros((1, 3, 3))}, WORDS[:3], ["head 0"])
    assert len(panels(drawn(figure))) == 1


def test_heatmaps_of_cross_attention() -> None:
    """Keys have labels of their own, and every cell its number."""
    values = {name: array[:, :3] for name, array in maps(7).items()}
    figure = heatmaps.heatmaps(values, WORDS[:3], ["head 0"], WORDS[3:10])
    for panel, array in zip(panels(figure), values.values(), strict=True):
        np.testing.assert_array_equal(panel.images[0].get_array(), array[0])
        assert [tick.get_text() for tick in panel.get_xticklabels()] == WORDS[3:10]
        assert [tick.get_text() for tick in panel.get_yticklabels()] == WORDS[:3]


@pytest.mark.parametrize("marks", [("[CLS]",), ("[CLS]", "[DIST]"), ()], ids=len)
def test_overlays(marks: tuple[str, ...]) -> None:
    """The image, then each map over all of it; titles say what has no place in it."""
    tokens = [*marks, *(f"({row}, {column})" for row, column in np.ndindex(2, 3))]
    image = np.random.default_rng(1).random((4, 9, 3))
    values = {name: array[:, 0] for name, array in maps(len(tokens), 2).items()}
    figure = heatmaps.overlays(values, image, (2, 3), tokens, 0, ["head 0", "head 1"])
    assert len(panels(figure)) == 8
    for row in range(2):
        shown, *others = panels(figure)[4 * row : 4 * row + 4]
        np.testing.assert_array_equal(shown.images[0].get_array(), image)
        assert shown.get_title() == f"head {row}\nquery {tokens[0]}"
        for panel, (name, array) in zip(others, values.items(), strict=True):
            under, over = panel.images
            np.testing.assert_array_equal(over.get_array(), array[row, len(marks) :].reshape(2, 3))
            assert over.get_extent() == under.get_extent()
            assert over.colorbar is not None
            assert over.norm.vmax == max(each[row, len(marks) :].max() for each in values.values())
            share = f"\n{array[row, : len(marks)].sum():.0%} from {' and '.join(marks)}"
            assert panel.get_title() == QUANTITY_NAMES[name] + (share if marks else "")


@pytest.mark.parametrize(("query", "corner"), [(0, None), (1, (-0.5, -0.5)), (6, (5.5, 1.5))])
def test_the_query_is_framed(query: int, corner: tuple[float, float] | None) -> None:
    """If it is a patch: of 3 x 2 pixels here."""
    tokens = ["[CLS]", *(f"({row}, {column})" for row, column in np.ndindex(2, 3))]
    values = {"input": maps(7)["input"][:, query]}
    figure = heatmaps.overlays(values, np.zeros((4, 9, 3)), (2, 3), tokens, query, ["head 0"])
    frames = {(*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in figure.axes[0].patches}
    assert frames == (set() if corner is None else {(*corner, 3, 2)})


@pytest.mark.parametrize("source", ["previous_layer", "input"])
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (3, 4)])
def test_correlation_figure(source: str, layers: int, heads: int) -> None:
    """A panel for each measure, with a point for each head at its value."""
    table = correlations(layers, heads)
    figure = study_figures.correlation_figure(table, source)
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
    figure = study_figures.correlation_figure(table, "input")
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["2", "5"]


@pytest.mark.parametrize("every", [False, True])
def test_undefined_correlations_are_left_out(every: bool) -> None:
    """NaN, of some heads, of a whole layer or of all, is not drawn."""
    table = correlations(3, 2)
    table.loc[(table["layer"] == 1) | (table["head"] == 0) | every, ["pearson", "spearman"]] = None
    figure = study_figures.correlation_figure(table, "input")
    points = sum(len(group.get_offsets()) for group in figure.axes[0].collections)
    assert points == (0 if every else 2)
    drawn(figure)


@pytest.mark.parametrize("quantity", ["attention", "input"])
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (3, 4)])
def test_histogram_figure(quantity: str, layers: int, heads: int) -> None:
    """A panel for each head, those of a layer in a row, that shows what is within reach."""
    table = positions(layers, heads)
    figure = study_figures.histogram_figure(table, quantity, reach=5)
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
    (axis,) = study_figures.histogram_figure(positions(1, 1, 3), "input").axes
    assert (axis.dataLim.x0, axis.dataLim.x1) == (-2.5, 2.5)


def test_short_texts_fill_their_panel() -> None:
    """What is within reach but never occurs takes no room."""
    (axis,) = study_figures.histogram_figure(positions(1, 1, 3), "input").axes
    assert axis.dataLim.width > 0.6 * np.ptp(axis.get_xlim())


@pytest.mark.parametrize("quantities", [["attention"], ["input"], ["attention", "input"]])
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (3, 4)])
def test_centre_figure(quantities: list[str], layers: int, heads: int) -> None:
    """A line of means and a point for each head, with a legend of what they are."""
    table = centres(layers, heads)
    figure = study_figures.centre_figure(table, quantities)
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
    figure = study_figures.centre_figure(centres(layers, 2), ["attention", "input"])
    drawn(figure)
    (axis,) = figure.axes
    low, high = axis.get_xlim()
    shown = [tick for tick in axis.get_xticks() if low <= tick <= high]
    assert shown == list(range(layers))


def test_undefined_centres_are_left_out() -> None:
    """A head without a centre does not spoil the figure."""
    table = centres(3, 2)
    table.loc[table["layer"] == 1, "centre_of_mass"] = np.nan
    drawn(study_figures.centre_figure(table, ["attention", "input"]))


def test_pattern_figure() -> None:
    """A row a pattern, titled by it, with all maps that there are."""
    examples = of_patterns(5)
    figure = study_figures.pattern_figure(examples)
    shown = [panel.get_title() for panel in panels(figure)]
    assert shown == [f"{title}\n{name}" for title in examples.titles for name in QUANTITY_NAMES.values()]
    for panel, (row, name) in zip(panels(figure), itertools.product(range(5), QUANTITY_NAMES), strict=True):
        np.testing.assert_array_equal(panel.images[0].get_array(), examples.maps[name][row])
        assert [tick.get_text() for tick in panel.get_xticklabels()] == WORDS[:5]


def test_effective_figure() -> None:
    """A line a layer through the middle of its bins, and one where texts get longer than a head is wide."""
    table = of_lengths(3, [10, 30, 90])
    figure = study_figures.effective_figure(table, 32)
    *lines, width = [line for line in figure.axes[0].lines if line.get_linestyle() != "None"]
    assert set(width.get_xdata()) == {32.5}
    for layer, line in enumerate(lines):
        found = table[table["layer"] == layer]
        np.testing.assert_array_equal(line.get_xdata(), [12.5, 28.5, 92.5])
        np.testing.assert_array_equal(line.get_ydata(), found["correlation"])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["0", "1", "2"]


@pytest.mark.parametrize("quantity", ["attention", "input"])
def test_centres_together_figure(quantity: str) -> None:
    """A line for each study, the mean over its heads, as far as it has layers."""
    table = of_studies(3, 5)
    figure = study_figures.centres_together_figure(table, quantity)
    *lines, _ = figure.axes[0].lines
    assert [line.get_label() for line in lines] == ["study 0", "study 1", "study 2"]
    for number, line in enumerate(lines):
        rows = table.query(f"label == 'study {number}' and quantity == '{quantity}'")
        expected = [rows[rows["layer"] == layer]["centre_of_mass"].mean() for layer in range(5 - number)]
        np.testing.assert_allclose(line.get_ydata(), expected)


@pytest.mark.parametrize("learnt", [True, False], ids=["learnt", "bare"])
def test_identifiability_figure(learnt: bool) -> None:
    """A panel for each distance, a line for each map that there is, and one for chance."""
    table = of_identified_tokens(3, learnt)
    before = table.copy()
    figure = study_figures.identifiability_figure(table)
    pd.testing.assert_frame_equal(table, before)
    assert [axis.get_title() for axis in figure.axes] == ["Cosine distance", "Euclidean distance"]
    names = MAPS if learnt else MAPS[:1]
    assert [text.get_text() for text in legend_of(figure).get_texts()] == [
        study_figures.LEARNT[name] for name in names
    ]
    for axis, distance in zip(figure.axes, DISTANCES, strict=True):
        *lines, chance = axis.lines
        for line, name in zip(lines, names, strict=True):
            rows = table.query(f"map == '{name}' and distance == '{distance}'")
            np.testing.assert_array_equal(line.get_xydata(), rows[["layer", "identified"]])
        assert set(chance.get_ydata()) == {0.05}


# --- that it can be read --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_figures_are_drawn_without_warnings(name: str, figures: dict[str, Figure]) -> None:
    """The layout fits, and the fonts have all glyphs of ordinary text."""
    make, *arguments = CASES[name]
    figures[name] = figures.get(name) or make(*arguments)
    assert isinstance(drawn(figures[name]), Figure)


@every_figure
def test_nothing_is_clipped(figure: Figure) -> None:
    """All that is drawn is within the image."""
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert box.x0 > -0.01
    assert box.y0 > -0.01
    assert box.x1 < width + 0.01
    assert box.y1 < height + 0.01


def assert_apart(labels: list[Text]) -> None:
    """No label is on the next."""
    boxes = [(text.get_text(), text.get_window_extent()) for text in labels if text.get_text()]
    for (first, a), (second, b) in itertools.pairwise(boxes):
        assert not a.padded(-1).overlaps(b.padded(-1)), f"{first!r} is on {second!r}"


@every_figure
def test_labels_do_not_overlap(figure: Figure) -> None:
    """No title is on that of the next panel, and no tick label on the next."""
    assert_apart([panel.title for panel in panels(figure)])
    for axis in panels(figure):
        for number, (line, limits) in enumerate(
            ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim()))
        ):
            low, high = sorted(limits)
            labels = {label.get_position()[number]: label for label in line.get_ticklabels()}
            assert_apart([labels[at] for at in sorted(labels) if low <= at <= high])


@every_figure
def test_panels_have_room(figure: Figure) -> None:
    """The layout leaves every panel a size at which something is seen."""
    for panel in panels(figure):
        box = panel.get_window_extent()
        assert min(box.width, box.height) / figure.dpi > 0.25


@pytest.mark.parametrize(
    "figure", [n for n in CASES if n.startswith(("heatmap", "crossed", "overlay"))], indirect=True
)
def test_colour_bars_are_as_high_as_their_panels(figure: Figure) -> None:
    """From the lower to the upper edge."""
    for panel in [panel for panel in panels(figure) if panel.images[-1].colorbar]:
        bar = panel.images[-1].colorbar.ax.get_window_extent()
        box = panel.get_window_extent()
        assert (bar.y0, bar.y1) == pytest.approx((box.y0, box.y1), abs=2)


@pytest.mark.parametrize("figure", [n for n in CASES if n.startswith("centre")], indirect=True)
def test_the_legend_hides_no_point(figure: Figure) -> None:
    """Wherever the points lie."""
    (axis,) = figure.axes
    box = legend_of(figure).get_window_extent()
    for points in axis.collections:
        for x, y in axis.transData.transform(points.get_offsets()):
            assert not box.contains(x, y)


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


def test_long_texts_make_a_image_that_can_be_opened() -> None:
    """Of 250 tokens, half of what a BERT reads, in fewer than 2**14 pixels a side at 150 dpi."""
    figure = heatmaps.heatmaps(maps(250), [str(number) for number in range(250)], ["head 0"])
    assert 150 * max(figure.get_size_inches()) < 2**14


@pytest.mark.parametrize("token", ["$$", "$x$", "$\\frac$", "a$b$c", "\\$"])
def test_tokens_are_not_mathematics(token: str) -> None:
    """Dollars in a token are shown as they are, and never parsed."""
    figure = heatmaps.heatmaps(maps(2), [token, "b"], ["head 0"])
    drawn(figure)
    labels = [panel.get_xticklabels()[0] for panel in panels(figure)]
    assert [label.get_text() for label in labels] == [token] * 3
    assert not any(label.get_parse_math() for label in labels)


# --- that nothing else is changed -----------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_global_state_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither rcParams nor pyplot's figures change, and pyplot is not even needed."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before, numbers = dict(mpl.rcParams), pyplot.get_fignums()
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    make, *arguments = CASES[name]
    assert report.png(make(*arguments)).startswith(b"\x89PNG")
    assert dict(mpl.rcParams) == before
    assert pyplot.get_fignums() == numbers


@pytest.mark.parametrize("name", ["correlation", "histogram", "centre"])
def test_tables_are_not_changed(name: str) -> None:
    """What is drawn is only read."""
    make = {"correlation": correlations, "histogram": positions, "centre": centres}[name]
    what = {"correlation": "input", "histogram": "input", "centre": ["input"]}[name]
    table = make(2, 2)
    before = table.copy()
    getattr(study_figures, f"{name}_figure")(table, what)
    pd.testing.assert_frame_equal(table, before)


def test_letters_that_the_font_lacks() -> None:
    """They are shown by the number of their token, without a warning; all others as they are."""
    labels = ["[CLS]", "日本", "שלום", "🙂", "a\x00b", "漢字"]
    assert heatmaps.undrawable(labels) == [1, 4, 5] or heatmaps.undrawable(labels) == [1, 3, 4, 5]
    figure = drawn(heatmaps.heatmaps(maps(6), labels, ["head 0"]))
    shown = [label.get_text() for label in panels(figure)[0].get_yticklabels()]
    assert shown[0] == "[CLS]"
    assert shown[2] == "שלום"
    assert (shown[1], shown[5]) == ("#1", "#5")
