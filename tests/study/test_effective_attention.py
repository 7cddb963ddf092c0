"""Attention and effective attention by length: on matrices whose answer is known, and entry by entry."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import linalg
from studies import dimensions, text_result

from captum_hta.baselines import EffectiveAttention
from captum_hta.baselines.attention import effective_attention
from captum_hta.integrations import TransformerLensModel
from captum_hta.model.activations import Activations
from captum_hta.study.effective_attention import STEP, EffectiveCorrelation, matrix_correlations

TEXTS = [
    "Dogs bark.",
    ("The cat sat on the mat.", "It slept."),
    "The trophy did not fit in the brown suitcase because it was too big. " * 3,
]


def patterns(layers: int, heads: int, tokens: int, seed: int = 0, causal: bool = False) -> np.ndarray:
    values = np.random.default_rng(seed).random((layers, heads, tokens, tokens)) ** 3
    values = np.tril(values) if causal else values
    return values / values.sum(-1, keepdims=True)


def by_hand(first: np.ndarray, second: np.ndarray, causal: bool = False) -> float:
    """Pearson's correlation of the entries that are seen."""
    seen = [(j, i) for j, i in np.ndindex(first.shape) if i <= j or not causal]
    one, two = (np.array([matrix[at] for at in seen]) for matrix in (first, second))
    one, two = one - one.mean(), two - two.mean()
    return one @ two / np.sqrt((one @ one) * (two @ two))


@pytest.mark.parametrize("tokens", [3, 5, 9])
def test_effective_attention_head_by_head(tokens: int) -> None:
    """Attention less its projection on the left null space of the values after the output projection."""
    rng = np.random.default_rng(0)
    pattern = patterns(2, 3, tokens)
    value, weight = rng.normal(size=(2, 3, tokens, 4)), rng.normal(size=(2, 3, 4, 12))
    found = effective_attention(*map(torch.as_tensor, (pattern, value, weight)))
    for at in np.ndindex(2, 3):
        null = linalg.null_space((value[at] @ weight[at]).T)
        assert null.shape[-1] == max(0, tokens - 4)
        np.testing.assert_allclose(found[at], pattern[at] - pattern[at] @ null @ null.T, atol=1e-12)


@pytest.mark.parametrize("repeated", [False, True], ids=["small_values", "repeated_token"])
def test_rank_in_single_precision(repeated: bool) -> None:
    """What is small is let through, as long as single precision tells it from nothing; what is not there is
    not.
    """
    rng = np.random.default_rng(0)
    turns = linalg.qr(rng.normal(size=(32, 32)))[0], linalg.qr(rng.normal(size=(32, 32)))[0]
    value = turns[0] * np.geomspace(1, 7e-6, 32) @ turns[1]  # as some heads of a real BERT have
    weight = linalg.qr(rng.normal(size=(384, 32)), mode="economic")[0].T
    pattern = patterns(1, 1, 32)[0, 0]
    if repeated:
        value = turns[0] @ turns[1]
        value[1] = value[0]
    expected = pattern.copy()
    if repeated:
        expected[:, :2] = pattern[:, :2].mean(-1, keepdims=True)  # less what lies along (1, -1)
    found = effective_attention(*(torch.tensor(array).float() for array in (pattern, value, weight)))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True], ids=["both_modes", "causal"])
def test_entry_by_entry(causal: bool) -> None:
    """Correlations of each head; NaN of a matrix that is constant."""
    first, second = patterns(2, 3, 5, 0, causal), patterns(2, 3, 5, 1)
    first[1, 2] = np.tril(np.ones((5, 5))) if causal else 1 / 5
    found = matrix_correlations(first, second)
    assert found.shape == (2, 3)
    for at in np.ndindex(2, 3):
        expected = np.nan if at == (1, 2) else by_hand(first[at], second[at], causal)
        assert found[at] == pytest.approx(expected, nan_ok=True)


def test_one_text_at_a_time() -> None:
    """Means over heads and examples, with errors by example, in the bins of their lengths."""
    lengths = [5, STEP, STEP + 1, 2 * STEP, 2 * STEP, 5 * STEP]
    texts = [(patterns(2, 3, tokens, n), patterns(2, 3, tokens, 50 + n)) for n, tokens in enumerate(lengths)]
    correlation = EffectiveCorrelation(dimensions([3, 5], 3, max(lengths), 2 * STEP - 1))
    for text in texts:
        correlation.add(text_result(text[0], effective=text[1]))
    bins = {(1, STEP): [0, 1], (STEP + 1, 2 * STEP): [2, 3, 4], (4 * STEP + 1, 5 * STEP): [5]}
    table = correlation.table()
    assert list(zip(table["layer"], table["shortest"], table["longest"], strict=True)) == [
        (layer, *lengths) for layer in (3, 5) for lengths in bins
    ]
    widths = correlation.width_table()
    assert list(zip(widths["layer"], widths["longer_than_d_head"], strict=True)) == [
        (layer, longer) for layer in (3, 5) for longer in (False, True)
    ]
    for found, numbers in ((table, [*bins.values()] * 2), (widths, [[0, 1, 2], [3, 4, 5]] * 2)):
        for (_, row), chosen in zip(found.iterrows(), numbers, strict=True):
            layer = [3, 5].index(row["layer"])
            means = [
                np.mean([by_hand(texts[n][0][layer, head], texts[n][1][layer, head]) for head in range(3)])
                for n in chosen
            ]
            assert row["examples"] == len(chosen)
            assert row["correlation"] == pytest.approx(np.mean(means))
            error = np.std(means, ddof=1) / np.sqrt(len(means)) if len(means) > 1 else np.nan
            assert row["correlation_error"] == pytest.approx(error, nan_ok=True)


def test_parts_merge() -> None:
    """Any split of the texts gives the same tables, also if the parts were written and read."""
    whole, first, second = (EffectiveCorrelation(dimensions([0, 1], 2, 20, 8)) for _ in range(3))
    for number, tokens in enumerate((4, 12, 20)):
        example = patterns(2, 2, tokens, number), patterns(2, 2, tokens, 10 + number)
        text = text_result(example[0], effective=example[1])
        whole.add(text)
        (first if number else second).add(text)
    read = EffectiveCorrelation(whole.size)
    read.restore(second.arrays())
    first.merge(read)
    np.testing.assert_allclose(first.table(), whole.table())
    np.testing.assert_allclose(first.width_table().astype(float), whole.width_table().astype(float))


def test_longer_texts_than_were_said_to_come() -> None:
    """There is no bin for them."""
    correlation = EffectiveCorrelation(dimensions([0], 1, STEP, 4))
    with pytest.raises(
        ValueError, match=f"a text of {STEP + 1} tokens, but there are bins for at most {STEP}"
    ):
        correlation.add(text_result(patterns(1, 1, STEP + 1), effective=patterns(1, 1, STEP + 1)))


def test_of_few_tokens_all_attention_has_an_effect(minilm64: TransformerLensModel) -> None:
    """While they are no more than a head is wide; of one more, not all."""
    correlation = EffectiveCorrelation(dimensions(range(6), 12, 40, minilm64.d_head))
    encoding = minilm64.encode("The trophy did not fit in the brown suitcase because it was too big. " * 3)
    for tokens in (minilm64.d_head, minilm64.d_head + 1):
        activations = Activations(minilm64, minilm64.batch([encoding.first(tokens)]))
        effective = EffectiveAttention(minilm64).values(activations)
        correlation.add(text_result(activations.pattern.numpy(), effective=effective.numpy()))
    table = correlation.width_table().set_index("longer_than_d_head")
    np.testing.assert_allclose(table.loc[False, "correlation"], 1, rtol=0, atol=1e-12)
    assert (table.loc[True, "correlation"] < 1 - 1e-4).all()


def test_effective_attention_of_real_texts(minilm: TransformerLensModel) -> None:
    """In single precision too, it is attention of two short texts, and another thing of a long one."""
    correlation = EffectiveCorrelation(dimensions(range(6), 12, 64, minilm.d_head))
    for text in TEXTS:
        activations = Activations(minilm, minilm.batch([minilm.encode(text)]))
        effective = EffectiveAttention(minilm).values(activations)
        attention = activations.pattern.double().numpy()
        correlation.add(text_result(attention, effective=effective.double().numpy()))
    table = correlation.table().set_index("shortest")
    assert table.index.unique().tolist() == [1, 9, 41]
    np.testing.assert_allclose(table.loc[[1, 9], "correlation"], 1, atol=1e-6)
    assert (table.loc[41, "correlation"] < 0.97).all()
