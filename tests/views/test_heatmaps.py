"""Heatmaps: what is on them, that all of it can be read, and that nothing else is changed."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial

import matplotlib as mpl
import numpy as np
import pytest
from figures import WORDS, assert_readable, drawn, maps, panels
from matplotlib.figure import Figure

from captum_hta.report.files import png
from captum_hta.views.heatmaps import heatmaps, overlays, undrawable
from captum_hta.views.names import QUANTITY_NAMES


def heatmap(tokens: int, rows: int = 1) -> Figure:
    """Heatmaps of so many tokens."""
    labels = list(itertools.islice(itertools.cycle(WORDS), tokens))
    titles = [f"layer {row}, head 11" for row in range(rows)]
    return heatmaps(maps(tokens, rows), labels, titles)


def crossed(queries: int, keys: int) -> Figure:
    """Heatmaps of cross attention."""
    values = {name: array[:, :queries] for name, array in maps(max(queries, keys)).items()}
    values = {name: array[..., :keys] for name, array in values.items()}
    labels = list(itertools.islice(itertools.cycle(WORDS), max(queries, keys)))
    return heatmaps(values, labels[:queries], ["layer 3, head 11"], labels[:keys])


def overlay(
    grid: tuple[int, int], rows: int = 1, marks: tuple[str, ...] = ("[CLS]",), query: int = 0
) -> Figure:
    """An image of noise, 6 x 8 pixels a patch, under random values."""
    tokens = [*marks, *(f"({row}, {column})" for row, column in np.ndindex(grid))]
    image = np.random.default_rng(0).random((6 * grid[0], 8 * grid[1], 3))
    values = {name: array[:, query] for name, array in maps(len(tokens), rows).items()}
    titles = [f"layer {row}, head 11" for row in range(rows)]
    return overlays(values, image, grid, tokens, query, titles)


CASES: dict[str, Callable[[], Figure]] = {
    **{
        f"heatmap_{tokens}x{rows}": partial(heatmap, tokens, rows)
        for tokens, rows in ((1, 1), (3, 1), (4, 2), (25, 1), (60, 1))
    },
    **{
        f"crossed_{size[0]}x{size[1]}": partial(crossed, *size)
        for size in ((1, 5), (2, 20), (25, 3), (1, 60))
    },
    "overlay_3x3": partial(overlay, (3, 3), 2),
    "overlay_14x14": partial(overlay, (14, 14), 1, ("[CLS]",), 120),
    "overlay_2x9": partial(overlay, (2, 9), 2, ("[CLS]", "[DIST]")),
    "overlay_9x2": partial(overlay, (9, 2), 1),
    "overlay_1x1": partial(overlay, (1, 1), 1, ()),
}

# --- what is on them ------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "rows"), [(5, 1), (8, 3)])
def test_heatmaps(tokens: int, rows: int) -> None:
    """A panel for each map and row with its numbers, a title, the tokens, and a colour bar."""
    values, labels = maps(tokens, rows), WORDS[:tokens]
    figure = heatmaps(values, labels, [f"head {row}" for row in range(rows)])
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
    figure = heatmaps({"input": np.zeros((1, 3, 3))}, WORDS[:3], ["head 0"])
    assert len(panels(drawn(figure))) == 1


def test_heatmaps_of_cross_attention() -> None:
    """Keys have labels of their own, and every cell its number."""
    values = {name: array[:, :3] for name, array in maps(7).items()}
    figure = heatmaps(values, WORDS[:3], ["head 0"], WORDS[3:10])
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
    figure = overlays(values, image, (2, 3), tokens, 0, ["head 0", "head 1"])
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
    figure = overlays(values, np.zeros((4, 9, 3)), (2, 3), tokens, query, ["head 0"])
    frames = {(*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in figure.axes[0].patches}
    assert frames == (set() if corner is None else {(*corner, 3, 2)})


# --- that it can be read --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_heatmaps_can_be_read(name: str) -> None:
    """All labels are seen, and colour bars are as high as their panels."""
    figure = CASES[name]()
    assert_readable(figure)
    for panel in [panel for panel in panels(figure) if panel.images[-1].colorbar]:
        bar = panel.images[-1].colorbar.ax.get_window_extent()
        box = panel.get_window_extent()
        assert (bar.y0, bar.y1) == pytest.approx((box.y0, box.y1), abs=2)


def test_long_texts_make_an_image_that_can_be_opened() -> None:
    """250 tokens, half of what a BERT reads, take fewer than 2**14 pixels a side at 150 dpi."""
    figure = heatmaps(maps(250), [str(number) for number in range(250)], ["head 0"])
    assert 150 * max(figure.get_size_inches()) < 2**14


@pytest.mark.parametrize("token", ["$$", "$x$", "$\\frac$", "a$b$c", "\\$"])
def test_tokens_are_not_mathematics(token: str) -> None:
    """Dollars in a token are shown as they are, and never parsed."""
    figure = heatmaps(maps(2), [token, "b"], ["head 0"])
    drawn(figure)
    labels = [panel.get_xticklabels()[0] for panel in panels(figure)]
    assert [label.get_text() for label in labels] == [token] * 3
    assert not any(label.get_parse_math() for label in labels)


def test_letters_that_the_font_lacks() -> None:
    """They are shown by the number of their token, without a warning; all others as they are."""
    labels = ["[CLS]", "日本", "שלום", "🙂", "a\x00b", "漢字"]
    assert undrawable(labels) == [1, 5] or undrawable(labels) == [1, 3, 5]
    figure = drawn(heatmaps(maps(6), labels, ["head 0"]))
    shown = [label.get_text() for label in panels(figure)[0].get_yticklabels()]
    assert shown[0] == "[CLS]"
    assert shown[2] == "שלום"
    assert (shown[1], shown[4], shown[5]) == ("#1", "a\\x00b", "#5")


CONTROLS = ["\x1b[31mred", "a\nb", "\u202eabc", "\x9b2J", "\u2028x", "\xad"]


def test_controls_are_shown_and_not_obeyed() -> None:
    """Escapes, line breaks and marks of the writing direction, on the axes and in titles."""
    expected = ["\\x1b[31mred", "a\\nb", "\\u202eabc", "\\x9b2J", "\\u2028x", "\\xad"]
    figure = drawn(heatmaps(maps(6), CONTROLS, ["$\\frac$"]))
    assert [label.get_text() for label in panels(figure)[0].get_yticklabels()] == expected
    assert not any(panel.title.get_parse_math() for panel in panels(figure))
    values = {"input": maps(6)["input"][:, 2]}
    figure = drawn(overlays(values, np.zeros((4, 4, 3)), (1, 1), CONTROLS, 2, ["head 0"]))
    first, second = panels(figure)
    assert first.get_title() == "head 0\nquery \\u202eabc"
    assert all(label in second.get_title() for label in expected[:5])


# --- that nothing else is changed -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["overlay_3x3", "heatmap_3x1"])
def test_global_state_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither rcParams nor pyplot's figures change, and pyplot is not even needed."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before, numbers = dict(mpl.rcParams), pyplot.get_fignums()
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert png(CASES[name]()).startswith(b"\x89PNG")
    assert dict(mpl.rcParams) == before
    assert pyplot.get_fignums() == numbers
