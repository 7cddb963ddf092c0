"""Results: their axes, single texts, words, and how they print."""

from __future__ import annotations

import pytest
import torch

from captum_hta import Contributions, contributions
from captum_hta.integrations import TransformerLensModel

SOURCES = ("input", "previous_layer")
TARGETS = ("head", "layer")
PAIR = ("one two three", "four five")
TEXTS = ["a b c d e f g", "h i j k l m", PAIR, "n", "o p q r s t u"]
"""Texts of 3 to 9 tokens; some share a padded batch, and one is alone."""
LENGTHS = [9, 8, 8, 3, 9]
SENTENCES = [
    "Dogs bark.", "The cat sat.", "It rained all night.", "She sold the old car.", "Nobody came.",
    "Birds sing early.", "He lost his keys.", "Snow fell on the hills.", "They left.", "Prices rose again.",
]  # fmt: skip


def rows_sum_to_one(result: Contributions) -> bool:
    return all(
        torch.allclose(result.example(row).values.sum(-1), torch.ones((), dtype=result.values.dtype))
        for row in range(len(result))
    )


@pytest.mark.parametrize("source", SOURCES)
def test_axes_of_heads(model: TransformerLensModel, source: str) -> None:
    """Axes are batch, layer, head, query, key; exact values have no errors."""
    result = contributions(model, TEXTS, source=source)
    assert result.values.shape == result.attention.shape == (5, 2, 2, 9, 9)
    assert result.standard_error is None
    assert result.layers == [0, 1]
    assert len(result) == len(result.tokens) == 5
    assert list(map(len, result.tokens)) == LENGTHS


@pytest.mark.parametrize("source", SOURCES)
def test_axes_of_layers(model: TransformerLensModel, source: str) -> None:
    """With the target "layer", values and errors have no head axis, but attention has."""
    result = contributions(model, TEXTS, source=source, target="layer", n_probes=4)
    assert result.values.shape == result.standard_error.shape == (5, 2, 9, 9)
    assert result.attention.shape == (5, 2, 2, 9, 9)


@pytest.mark.parametrize("target", TARGETS)
def test_example_is_trimmed(model: TransformerLensModel, target: str) -> None:
    """The result for one text has its tokens alone, without padding."""
    result = contributions(model, TEXTS, target=target, n_probes=4)
    for row, length in enumerate(LENGTHS):
        one = result.example(row)
        assert one.tokens == [result.tokens[row]]
        assert one.layers == result.layers
        for part, whole in (
            (one.values, result.values),
            (one.standard_error, result.standard_error),
            (one.attention, result.attention),
        ):
            assert part.shape[-2:] == (length, length)
            assert torch.equal(part[0], whole[row, ..., :length, :length])


def test_example_of_exact_values_has_no_error(model: TransformerLensModel) -> None:
    """The example of an exact result is exact."""
    assert contributions(model, TEXTS).example(3).standard_error is None


def test_results_can_be_changed(model: TransformerLensModel) -> None:
    """No result is an inference tensor or requires gradients."""
    for source in SOURCES:
        result = contributions(model, [PAIR], source=source, n_probes=2)
        for tensor in (result.values, result.attention):
            assert not tensor.is_inference()
            assert not tensor.requires_grad
            assert tensor.device.type == "cpu"


def test_repr_is_short(model: TransformerLensModel) -> None:
    """The repr names what the result holds, without the numbers."""
    assert (
        repr(contributions(model, ["a", "b c"]))
        == "Contributions(source='input', target='head', exact, texts=2, layers=[0, 1], [2, 2, 2, 4, 4])"
    )
    assert repr(model).startswith("TransformerLensModel(")


# --- words ---------------------------------------------------------------------------------------


def test_words(minilm) -> None:
    """Keys of a word's pieces are added, queries averaged, and rows still sum to 1."""
    result = contributions(minilm, ["Hummingbirds sang.", "Go"], source="previous_layer")
    assert result.tokens[0] == ["[CLS]", "Humming", "birds", "sang", ".", "[SEP]"]
    words = result.to_words()
    assert words.tokens == [["[CLS]", "Hummingbirds", "sang", ".", "[SEP]"], ["[CLS]", "Go", "[SEP]"]]
    assert rows_sum_to_one(words)
    values, merged = result.values[0], words.values[0]
    torch.testing.assert_close(merged[..., 2, 1], values[..., 3, 1:3].sum(-1))
    torch.testing.assert_close(merged[..., 1, 2], values[..., 1:3, 3].mean(-1))
    torch.testing.assert_close(merged[..., 1, 1], values[..., 1:3, 1:3].sum(-1).mean(-1))
    torch.testing.assert_close(words.example(0).attention.sum(-1), torch.ones(1, 6, 12, 5))


@pytest.mark.parametrize("reduction", ["max", "mean"])
def test_words_by_another_reduction(reduction: str, minilm) -> None:
    """Rows are scaled to sum to 1 again."""
    result = contributions(minilm, "Hummingbirds sang.", source="previous_layer")
    words = result.to_words(reduction)
    assert rows_sum_to_one(words)
    row = result.values[0, 0, 0, 3]
    pieces = row[1:3].max() if reduction == "max" else row[1:3].mean()
    expected = torch.stack([row[0], pieces, *row[3:]])
    torch.testing.assert_close(words.values[0, 0, 0, 2], expected / expected.sum())


def test_words_of_a_pair_are_apart(minilm) -> None:
    """The last word of the first text and the first of the second do not merge."""
    words = contributions(minilm, [("one two", "two three")], source="previous_layer").to_words()
    assert words.tokens[0] == ["[CLS]", "one", "two", "[SEP]", "two", "three", "[SEP]"]


def test_words_of_estimates(minilm) -> None:
    """The error is at least that of the largest piece."""
    result = contributions(minilm, "Hummingbirds sang.", layers=[1], n_probes=4)
    words = result.to_words()
    assert (words.standard_error[..., 2, 1] >= result.standard_error[..., 3, 1:3].amax(-1)).all()
    assert result.to_words("max").standard_error is None


def test_words_errors(minilm, bert) -> None:
    """Unknown reductions, words of words and tokenizers without words are errors."""
    result = contributions(minilm, "Hummingbirds sang.", source="previous_layer")
    with pytest.raises(ValueError, match="reduction must be one of 'sum', 'max', 'mean'"):
        result.to_words("median")
    with pytest.raises(ValueError, match="not of tokens"):
        result.to_words().to_words()
    with pytest.raises(ValueError, match="fast tokenizer"):
        contributions(bert, "a b").to_words()


# --- intervals -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"target": "layer"}, {"multiply_by_inputs": True}], ids=str)
def test_intervals_hold_the_exact_values(minilm: TransformerLensModel, options: dict) -> None:
    """93 to 97% of the 95% intervals contain the exact value, however few the probes. Many texts and seeds
    are needed, since the entries of a text share their probes.
    """
    options = options | {"layers": [1]}
    exact = contributions(minilm, SENTENCES, **options).values
    real = ~exact.isnan()
    for n_probes in (8, 16, 32):
        held = []
        for seed in range(4):
            found = contributions(minilm, SENTENCES, n_probes=n_probes, seed=seed, **options)
            low, high = found.interval()
            held.append(((low <= exact) & (exact <= high))[real].double().mean())
        assert 0.93 <= torch.stack(held).mean() <= 0.97


def test_intervals_of_other_results(model: TransformerLensModel) -> None:
    """Exact values are their own intervals; one probe gives 0 to 1; padding is NaN; words have intervals."""
    result = contributions(model, TEXTS)
    low, high = result.interval()
    assert low.allclose(result.values, equal_nan=True)
    assert high.allclose(result.values, equal_nan=True)
    one = contributions(model, "a b c", n_probes=1).interval()
    assert [side.unique().tolist() for side in one] == [[0.0], [1.0]]
    few = contributions(model, TEXTS, n_probes=4)
    assert few.probes == [4] * 5
    low, high = few.interval(0.5)
    assert torch.equal(low.isnan(), few.values.isnan())
    assert ((low <= few.values) & (few.values <= high))[~low.isnan()].all()
    wide_low, wide_high = few.example(1).interval(0.99)
    assert (wide_low <= few.example(1).interval(0.5)[0]).all()
    assert (wide_low >= 0).all()
    assert (wide_high <= 1).all()
    assert few.example(1).interval(0.5)[0].equal(low[1:2, ..., :8, :8])


def test_probes_of_a_tolerance(model: TransformerLensModel) -> None:
    """The result keeps the number of probes that were used; with all probes it is exact."""
    result = contributions(model, "a b c", tolerance=1e-12)
    assert result.probes == [8]
    low, high = result.interval()
    torch.testing.assert_close(low, high)


@pytest.mark.parametrize("level", [0, 1, 95, -0.5])
def test_level_of_intervals(model: TransformerLensModel, level: float) -> None:
    """A level must be between 0 and 1."""
    with pytest.raises(ValueError, match="level must be between 0 and 1"):
        contributions(model, "a b").interval(level)
