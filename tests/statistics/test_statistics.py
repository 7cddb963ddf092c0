"""Statistics compared with slow definitions, and on data whose answer is known by construction."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from captum_hta.statistics.accumulators import OffsetHistogram, RowMean
from captum_hta.statistics.correlations import row_correlations

# --- correlations ---------------------------------------------------------------------------------


def rows_of(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays ``[2, 3, 5, 7]`` that are correlated."""
    rng = np.random.default_rng(0)
    first = rng.dirichlet(np.full(7, 0.3), (2, 3, 5))
    second = 0.5 * first + 0.5 * rng.dirichlet(np.full(7, 0.3), (2, 3, 5))
    if kind == "ties":
        return np.round(5 * first), np.round(5 * second)
    if kind == "small":
        return 1e-9 * first, second
    return first, 1 - second if kind == "opposed" else second


@pytest.mark.parametrize("kind", ["random", "ties", "opposed", "small"])
@pytest.mark.parametrize("number", [0, 1])
def test_correlations_are_those_of_scipy(kind: str, number: int) -> None:
    """Each row equals scipy's result, with ties, and for values of any size."""
    first, second = rows_of(kind)
    found = row_correlations(first, second)[number]
    expected = np.full(first.shape[:-1], np.nan)
    for at in np.ndindex(expected.shape):
        if np.ptp(first[at]) and np.ptp(second[at]):
            slow = (stats.pearsonr, stats.spearmanr)[number]
            expected[at] = slow(first[at], second[at]).statistic
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("swap", [False, True])
def test_constant_rows_are_undefined(swap: bool) -> None:
    """A row that is constant in either array is NaN; the other rows are unaffected."""
    constant = np.array([[1 / 3, 1 / 3, 1 / 3], [0, 0, 0], [0.2, 0.3, 0.5]])
    varied = np.array([[0.2, 0.3, 0.5]] * 3)
    pair = (varied, constant) if swap else (constant, varied)
    for found in row_correlations(*pair):
        np.testing.assert_allclose(found, [np.nan, np.nan, 1])


def test_rows_constant_up_to_rounding_are_undefined() -> None:
    """Uniform attention correlates with nothing, and there is no warning."""
    uniform = np.full((1, 6), 1 / 6)
    uniform[0, 2] = np.nextafter(1 / 6, 1)
    pearson, spearman = row_correlations(uniform, np.arange(6.0)[None])
    assert np.isnan([pearson, spearman]).all()


@pytest.mark.parametrize("length", [1, 2])
def test_short_rows_are_undefined(length: int) -> None:
    """Two points are always on a line."""
    first, second = np.random.default_rng(0).random((2, 4, 3, length))
    for found in row_correlations(first, second):
        assert found.shape == (4, 3)
        assert np.isnan(found).all()


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (2, 1)])
def test_correlations_of_few_rows_keep_their_shape(shape: tuple[int, ...]) -> None:
    """Empty arrays give empty arrays, without an error."""
    assert [r.shape for r in row_correlations(np.zeros(shape), np.zeros(shape))] == 2 * [shape[:-1]]


# --- mean -----------------------------------------------------------------------------------------


def examples(count: int = 9, shape: tuple[int, ...] = (2, 3)) -> list[np.ndarray]:
    """Rows ``[*shape, row]`` of examples of different lengths, some NaN."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(count):
        rows = rng.normal(0.7, 0.2, (*shape, rng.integers(1, 12))) + rng.normal(0, 0.1)
        found.append(np.where(rng.random(rows.shape) < 0.2, np.nan, rows))
    return found


def mean_of(rows: list[np.ndarray], shape: tuple[int, ...] = (2, 3)) -> RowMean:
    """An accumulator that has seen the examples."""
    mean = RowMean.zero(*shape)
    for example in rows:
        mean.add(example)
    return mean


def test_mean_is_the_plain_mean_without_nan_rows() -> None:
    """It is over all rows of all examples, and NaN rows are counted."""
    rows = examples()
    found, together = mean_of(rows), np.concatenate(rows, axis=-1)
    np.testing.assert_allclose(found.mean(), np.nanmean(together, -1), rtol=1e-12)
    np.testing.assert_array_equal(found.left_out, np.isnan(together).sum(-1))
    np.testing.assert_array_equal(found.counts, (~np.isnan(together)).sum(-1))
    np.testing.assert_array_equal(found.examples, sum(~np.isnan(r).all(-1) for r in rows))


def test_standard_error_is_its_formula() -> None:
    """It equals a plain loop over one cell's examples, after Cochran (1977, section 6.4)."""
    rows = examples()
    found = mean_of(rows).standard_error()
    for at in np.ndindex(2, 3):
        cells = [example[at][~np.isnan(example[at])] for example in rows]
        cells = [cell for cell in cells if len(cell)]
        mean = np.concatenate(cells).mean()
        squares = sum((cell.sum() - mean * len(cell)) ** 2 for cell in cells)
        factor = len(cells) / (len(cells) - 1)
        expected = np.sqrt(factor * squares) / sum(map(len, cells))
        assert found[at] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("length", [1, 5])
def test_error_of_equal_examples_is_that_of_their_means(length: int) -> None:
    """For examples of one length it is the deviation of their means over the root of their number."""
    rows = np.random.default_rng(2).normal(size=(20, length)) + np.arange(20)[:, None]
    found = mean_of(list(rows), ()).standard_error()
    assert found == pytest.approx(rows.mean(-1).std(ddof=1) / np.sqrt(20), rel=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_merging_any_split_gives_the_same(seed: int) -> None:
    """Mean, error and counts do not depend on order or split; merging changes only the first accumulator."""
    rng, rows = np.random.default_rng(seed), examples()
    parts = rng.integers(0, 3, len(rows))
    whole, merged = mean_of(rows), RowMean.zero(2, 3)
    for part in rng.permutation(3):
        other = mean_of([rows[i] for i in rng.permutation(len(rows)) if parts[i] == part])
        before = other.sums.copy()
        merged.merge(other)
        merged.mean()
        np.testing.assert_array_equal(other.sums, before)
    np.testing.assert_allclose(merged.mean(), whole.mean(), rtol=0, atol=1e-10)
    np.testing.assert_allclose(merged.standard_error(), whole.standard_error(), rtol=0, atol=1e-10)
    np.testing.assert_array_equal(merged.left_out, whole.left_out)
    np.testing.assert_array_equal(merged.examples, whole.examples)


@pytest.mark.parametrize("cluster", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("trend", [0.0, 0.05])
def test_standard_error_is_the_spread_of_means(cluster: float, trend: float) -> None:
    """For repeated samples of clustered rows, whose values may depend on their number, both agree."""
    rng, repeats, longest = np.random.default_rng(3), 2000, 12
    mean = RowMean.zero(repeats)
    for _ in range(80):
        lengths = rng.integers(1, longest + 1, (repeats, 1))
        common = cluster * rng.normal(size=(repeats, 1)) + trend * lengths
        rows = common + 0.5 * rng.normal(size=(repeats, longest))
        mean.add(np.where(np.arange(longest) < lengths, rows, np.nan))
    reported = np.sqrt(np.square(mean.standard_error()).mean())
    assert reported == pytest.approx(mean.mean().std(ddof=1), rel=0.1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("rows", "mean", "error"),
    [
        ([], np.nan, np.nan),
        ([[np.nan, np.nan], [np.nan]], np.nan, np.nan),
        ([[0.25, 0.75]], 0.5, np.nan),
        ([[0.25, 0.75], [np.nan]], 0.5, np.nan),
        ([[0.1, 0.1], [0.1], [0.1]], 0.1, 0),
        ([[0.0], [1.0]], 0.5, 0.5),
    ],
    ids=["nothing", "all-nan", "one", "one-and-nan", "equal", "two"],
)
def test_mean_of_few_examples(rows: list[list[float]], mean: float, error: float) -> None:
    """It is NaN where undefined, without a warning; equal values have no error."""
    found = mean_of([np.array(row) for row in rows], ())
    np.testing.assert_allclose(found.mean(), mean, rtol=1e-12)
    np.testing.assert_allclose(found.standard_error(), error, atol=1e-8)


# --- relative position ----------------------------------------------------------------------------


def by_definition(values: list[np.ndarray]) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Section 4 of the paper as a double loop: histogram ``{offset: [layer, head]}`` and centre."""
    sums: dict[int, np.ndarray] = {}
    occurs: dict[int, int] = {}
    for example in values:
        for j in range(example.shape[-2]):  # the query is the origin
            for i in range(example.shape[-1]):
                sums[i - j] = sums.get(i - j, 0) + example[:, :, j, i]
                occurs[i - j] = occurs.get(i - j, 0) + 1
    histogram = {offset: sums[offset] / occurs[offset] for offset in sums}
    weight = sum(histogram.values())
    return histogram, sum(offset * value for offset, value in histogram.items()) / weight


def patterns(lengths: list[int]) -> list[np.ndarray]:
    """Random attention ``[2, 3, query, key]`` for texts of these lengths."""
    rng = np.random.default_rng(4)
    return [rng.dirichlet(np.full(n, 0.4), (2, 3, n)) for n in lengths]


def position_of(values: list[np.ndarray], longest: int) -> OffsetHistogram:
    """An accumulator that has seen the examples."""
    position = OffsetHistogram.zero(*values[0].shape[:2], longest)
    for value in values:
        position.add(value)
    return position


@pytest.mark.parametrize(
    ("lengths", "longest"),
    [([5], 5), ([1], 1), ([1, 2], 2), ([3, 6, 4, 6], 6), ([3, 6, 4], 9)],
)
def test_relative_position_is_its_definition(lengths: list[int], longest: int) -> None:
    """Histogram and centre of mass, for texts of different lengths."""
    values = patterns(lengths)
    check_definition(values, longest)


def test_errors_of_relative_positions_are_those_of_means() -> None:
    """At each offset they are those of the values that occur there, by example."""
    values = patterns([3, 6, 4, 6])
    position = position_of(values, 6)
    for place, offset in enumerate(position.offsets):
        mean = RowMean.zero(2, 3)
        for value in values:
            if abs(offset) < value.shape[-1]:
                mean.add(np.diagonal(value, offset, axis1=-2, axis2=-1))
        np.testing.assert_allclose(position.histogram()[..., place], mean.mean(), rtol=1e-12)
        np.testing.assert_allclose(
            position.standard_error()[..., place], mean.standard_error(), rtol=1e-6, atol=1e-9
        )


@pytest.mark.parametrize("shape", [(2, 5), (5, 2), (1, 4), (4, 1)])
def test_relative_position_of_cross_attention(shape: tuple[int, int]) -> None:
    """Keys are of another text than queries, which may be shorter or longer."""
    queries, keys = shape
    crossed = np.random.default_rng(5).dirichlet(np.full(keys, 0.4), (2, 3, queries))
    check_definition([crossed], 5)
    check_definition([*patterns([3]), crossed], 6)


def check_definition(values: list[np.ndarray], longest: int) -> None:
    """Histogram and centre of mass are those of a double loop."""
    found = position_of(values, longest)
    histogram, centre = by_definition(values)
    assert list(found.offsets) == list(range(1 - longest, longest))
    for index, offset in enumerate(found.offsets):
        expected = histogram.get(offset, np.zeros((2, 3)))
        np.testing.assert_allclose(found.histogram()[..., index], expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.centre_of_mass(), centre, rtol=0, atol=1e-12)


def pattern(name: str, length: int) -> np.ndarray:
    """A head ``[1, 1, query, key]`` that attends to one place; queries without it attend to nothing."""
    made = {
        "previous": np.eye(length, k=-1),
        "next": np.eye(length, k=1),
        "self": np.eye(length),
        "uniform": np.full((length, length), 1 / length),
        "first": np.eye(length)[np.zeros(length, dtype=int)],
    }
    return made[name][None, None]


@pytest.mark.parametrize(
    ("name", "histogram", "centre"),
    [
        ("previous", [0, 0, 1, 0, 0, 0, 0], -1),
        ("next", [0, 0, 0, 0, 1, 0, 0], 1),
        ("self", [0, 0, 0, 1, 0, 0, 0], 0),
        ("uniform", [1 / 4] * 7, 0),
        # 4 - d pairs are d apart, and the first token is the key of one of those to the left.
        ("first", [1, 1 / 2, 1 / 3, 1 / 4, 0, 0, 0], (-3 - 2 / 2 - 1 / 3) / (25 / 12)),
    ],
)
def test_heads_of_known_habits(name: str, histogram: list[float], centre: float) -> None:
    """A head that attends to the previous token has all its mass at -1, and so on."""
    found = position_of([pattern(name, 4)], 4)
    np.testing.assert_allclose(found.histogram()[0, 0], histogram, atol=1e-15)
    np.testing.assert_allclose(found.centre_of_mass(), [[centre]], atol=1e-15)


@pytest.mark.parametrize(("name", "centre"), [("previous", -1), ("next", 1), ("self", 0)])
def test_habits_do_not_depend_on_length(name: str, centre: float) -> None:
    """Texts of different lengths agree, and short ones do not dilute long ones."""
    found = position_of([pattern(name, n) for n in (2, 7, 3, 5)], 7)
    assert found.histogram().max() == pytest.approx(1)
    assert found.histogram().sum() == pytest.approx(1)
    assert found.centre_of_mass() == pytest.approx(centre)


@pytest.mark.parametrize("seed", range(3))
def test_histograms_merge(seed: int) -> None:
    """Any split of the examples gives the same histogram."""
    values = patterns([3, 6, 4, 6, 1, 2])
    order, cut = np.random.default_rng(seed).permutation(6), seed + 1
    merged = position_of([values[i] for i in order[:cut]], 6)
    merged.merge(position_of([values[i] for i in order[cut:]], 6))
    whole = position_of(values, 6)
    np.testing.assert_allclose(merged.histogram(), whole.histogram(), rtol=0, atol=1e-10)
    np.testing.assert_allclose(merged.centre_of_mass(), whole.centre_of_mass(), rtol=0, atol=1e-10)
    np.testing.assert_array_equal(merged.counts, whole.counts)


@pytest.mark.filterwarnings("error")
def test_centre_of_mass_of_nothing_is_undefined() -> None:
    """Without mass there is no centre, and no warning."""
    found = OffsetHistogram.zero(1, 2, 3)
    assert (found.histogram() == 0).all()
    assert np.isnan(found.centre_of_mass()).all()


@pytest.mark.parametrize("length", [4, 5, 9])
def test_a_text_longer_than_said_is_refused_and_changes_nothing(length: int) -> None:
    """Its far offsets have no bin, and must not wrap around."""
    found = position_of([pattern("uniform", 3)], 3)
    before = found.sums.copy()
    with pytest.raises((IndexError, ValueError)):
        found.add(pattern("uniform", length))
    np.testing.assert_array_equal(found.sums, before)


@pytest.mark.parametrize("longest", [1, 2, 4])
def test_histograms_of_different_sizes_do_not_merge(longest: int) -> None:
    """They have no common offsets, so nothing is broadcast silently."""
    found = OffsetHistogram.zero(1, 1, 3)
    with pytest.raises(ValueError):  # noqa: PT011
        found.merge(OffsetHistogram.zero(1, 1, longest))
