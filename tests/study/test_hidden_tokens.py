"""Shares of the own input in hidden tokens: on rows whose answer is known, and one token at a time."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import WordTokenizer, tiny_bert
from studies import dimensions, text_result

from captum_hta import contributions, load_model
from captum_hta.statistics.accumulators import BINS, Distribution
from captum_hta.study.hidden_tokens import NEIGHBOURS, Mixing, by_distance
from captum_hta.study.run import run
from captum_hta.study.settings import StudySettings


def rows(layers: int, tokens: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).random((layers, tokens, tokens))
    return values / values.sum(-1, keepdims=True)


def test_one_token_at_a_time() -> None:
    """Shares, ranks and neighbours by loops over two texts."""
    texts = [rows(2, 5), rows(2, 13, seed=1)]
    mixing = Mixing(dimensions([3, 4]))
    for values in texts:
        mixing.add(text_result(hidden=values))
    table = mixing.table()
    assert table["layer"].tolist() == [3, 4]
    for layer in range(2):
        own, largest, rank = [], [], []
        near: dict[int, list[float]] = {step: [] for step in range(1, NEIGHBOURS + 1)}
        for values in texts:
            for query, row in enumerate(values[layer]):
                own.append(row[query])
                largest.append(row.argmax() == query)
                rank.append(1 + sum(other > row[query] for other in row))
                for step, seen in near.items():
                    at = [key for key in (query - step, query + step) if 0 <= key < len(row)]
                    if at:
                        seen.append(sum(row[key] for key in at))
        found = table.loc[layer]
        assert found["own_mean"] == pytest.approx(np.mean(own))
        assert found["own_is_largest"] == pytest.approx(np.mean(largest))
        assert found["own_rank"] == pytest.approx(np.mean(rank))
        for name, share in (("lower_quartile", 0.25), ("median", 0.5), ("upper_quartile", 0.75)):
            expected = np.quantile(own, share, method="inverted_cdf")
            assert found[f"own_{name}"] == pytest.approx(expected, abs=1 / BINS)
        for step, seen in near.items():
            assert found[f"at_distance_{step}"] == pytest.approx(np.mean(seen))
        assert by_distance(table).loc[layer].tolist() == pytest.approx([np.mean(near[step]) for step in near])


def test_a_model_that_mixes_nothing() -> None:
    """All of a token is its own input."""
    mixing = Mixing(dimensions([0]))
    mixing.add(text_result(hidden=np.eye(4)[None]))
    table = mixing.table().iloc[0]
    assert "at_distance_4" not in table
    assert (table["own_mean"], table["own_is_largest"], table["own_rank"]) == (1, 1, 1)
    assert table["own_median"] == pytest.approx(1, abs=1 / BINS)
    assert table["at_distance_1"] == 0


def test_distributions_merge() -> None:
    """Quantiles of any split are the same; without values they are not defined."""
    values = np.random.default_rng(0).random((2, 100))
    whole, first, second = (Distribution.zero(2) for _ in range(3))
    whole.add(values)
    first.add(values[:, :30])
    second.add(values[:, 30:])
    first.merge(second)
    np.testing.assert_array_equal(first.counts, whole.counts)
    assert np.isnan(Distribution.zero(2).quantile(0.5)).all()


def test_a_study_of_hidden_tokens() -> None:
    """A study measures contributions to hidden embeddings, from the same sweep as those to heads."""
    model = load_model(tiny_bert(), tokenizer=WordTokenizer())
    texts = ["a b c d", "e f"]
    found = run(model, texts, StudySettings(n_probes=None))[Mixing].table()
    expected = Mixing(dimensions([0, 1]))
    for text in texts:
        hidden = contributions(model, text, target="layer").values[0].numpy()
        expected.add(text_result(hidden=hidden))
    for name in found:
        np.testing.assert_allclose(found[name], expected.table()[name], rtol=1e-9)
    spectral = run(model, texts, StudySettings(norm="spectral", n_probes=None))
    assert spectral.find(Mixing) is None
