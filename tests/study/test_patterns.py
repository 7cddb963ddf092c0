"""Heads of simple patterns: on rows whose answer is known, and one row at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from studies import dimensions, text_result

from captum_hta.integrations import TransformerLensModel
from captum_hta.model.encoding import Encoding
from captum_hta.study.encoded_corpus import special_tokens
from captum_hta.study.patterns import (
    PATTERNS,
    Patterns,
    example_text,
    pattern_example,
    row_patterns,
)
from captum_hta.study.run import run
from captum_hta.study.settings import StudySettings

TEXTS = [
    ("The cat sat on the mat.", "It slept."),
    "Dogs bark.",
    "The trophy did not fit in the brown suitcase because it was too big.",
]


def rows(layers: int, heads: int, tokens: int, seed: int = 0, causal: bool = False) -> np.ndarray:
    values = np.random.default_rng(seed).random((layers, heads, tokens, tokens)) ** 3
    values = np.tril(values) if causal else values
    return values / values.sum(-1, keepdims=True)


def marked(tokens: int) -> np.ndarray:
    """Delimiters at the second and the last place, so that the first query of a causal model sees none."""
    special = np.zeros(tokens, dtype=bool)
    special[[1, -1]] = True
    return special


def by_hand(row: np.ndarray, query: int, special: np.ndarray, causal: bool) -> dict[str, float]:
    """What one row says of each pattern that exists for its query."""
    seen = range(query + 1) if causal else range(len(row))
    found = {"itself": row[query]}
    if query > 0:
        found["previous token"] = row[query - 1]
    if query + 1 in seen:
        found["next token"] = row[query + 1]
    if any(special[key] for key in seen):
        found["delimiters"] = sum(row[key] for key in seen if special[key])
    if len(seen) > 1:
        found["broad"] = -sum(row[key] * math.log(row[key]) for key in seen) / math.log(len(seen))
    return found


@pytest.mark.parametrize("causal", [False, True], ids=["both_modes", "causal"])
def test_one_row_at_a_time(causal: bool) -> None:
    """Means, and errors of the mean by example, by loops over three texts."""
    texts = [
        {
            name: rows(2, 3, tokens, 2 * tokens + shift, causal)
            for shift, name in enumerate(("attention", "input"))
        }
        for tokens in (4, 7, 9)
    ]
    patterns = Patterns(dimensions([3, 5], 3))
    for text in texts:
        special = marked(text["attention"].shape[-1])
        patterns.add(text_result(text["attention"], text["input"], special))
    table = patterns.table().set_index(["layer", "head", "pattern"])
    assert len(table) == 2 * 3 * len(PATTERNS)
    for (layer, head, pattern), found in table.iterrows():
        for name in ("attention", "input"):
            values = [text[name][[3, 5].index(layer), head] for text in texts]
            scores = [
                [
                    by_hand(row, query, marked(len(row)), causal).get(pattern)
                    for query, row in enumerate(matrix)
                ]
                for matrix in values
            ]
            known = [[score for score in text if score is not None] for text in scores]
            if not any(known):
                assert (causal, pattern) == (True, "next token")
                assert np.isnan(found[[name, f"{name}_error"]].astype(float)).all()
                continue
            mean = sum(map(sum, known)) / sum(map(len, known))
            spread = sum((sum(text) - mean * len(text)) ** 2 for text in known)
            error = math.sqrt(len(known) / (len(known) - 1) * spread) / sum(map(len, known))
            assert found[name] == pytest.approx(mean)
            assert found[f"{name}_error"] == pytest.approx(error)


def test_heads_of_one_pattern() -> None:
    """Each is chosen for its own, with the score of its input contribution beside that of attention."""
    tokens, special = 6, np.array([True, False, False, False, False, True])
    before = np.roll(np.eye(tokens), -1, axis=1)
    pure = {
        "delimiters": np.tile(special / 2, (tokens, 1)),
        "next token": np.roll(np.eye(tokens), 1, axis=1),
        "broad": np.full((tokens, tokens), 1 / tokens),
        "previous token": before,
        "itself": np.eye(tokens),
    }
    attention = np.stack(list(pure.values()))[None]
    patterns = Patterns(dimensions([7], len(pure)))
    patterns.add(text_result(attention, np.broadcast_to(before, attention.shape), special))
    chosen = patterns.chosen()
    assert list(chosen.columns) == ["pattern", "layer", "head", "attention", "input"]
    assert chosen["pattern"].tolist() == list(PATTERNS)
    assert chosen["head"].tolist() == [list(pure).index(pattern) for pattern in PATTERNS]
    assert set(chosen["layer"]) == {7}
    np.testing.assert_allclose(chosen["attention"], 1)
    np.testing.assert_allclose(chosen["input"], [1, 0, 0, 2 / 6, 0], atol=1e-15)


def test_patterns_that_do_not_occur() -> None:
    """Without delimiters, and with no later key, no head is chosen for them; of one token, "itself" is."""
    patterns = Patterns(dimensions([0], 2))
    patterns.add(text_result(rows(1, 2, 5, causal=True)))
    assert patterns.chosen()["pattern"].tolist() == ["previous token", "itself", "broad"]
    single = Patterns(dimensions([0], 2))
    single.add(text_result(np.ones((1, 2, 1, 1))))
    assert single.chosen()["pattern"].tolist() == ["itself"]


def test_rows_that_nothing_reaches() -> None:
    """They are on no key, and neither broad nor narrow."""
    found = row_patterns(np.zeros((1, 1, 3, 3)), np.array([True, False, False]))[0, 0]
    assert np.nansum(found[:-1]) == 0
    assert np.isnan(found[-1]).all()


def test_cross_attention_is_refused() -> None:
    """Its queries have no place among the keys."""
    with pytest.raises(ValueError, match="3 queries, 4 keys and 4 marks"):
        Patterns(dimensions([0])).add(text_result(np.ones((1, 1, 3, 4)) / 4, special=marked(4)))


def test_parts_merge() -> None:
    """Any split of the texts gives the same table, also if the parts were written and read."""
    whole, first, second = (Patterns(dimensions([0, 1], 2)) for _ in range(3))
    for number, tokens in enumerate((4, 6, 9)):
        text = text_result(rows(2, 2, tokens, number), rows(2, 2, tokens, 10 + number), marked(tokens))
        whole.add(text)
        (first if number else second).add(text)
    read = Patterns(whole.size)
    read.restore(second.arrays())
    first.merge(read)
    np.testing.assert_allclose(first.table().iloc[:, 3:], whole.table().iloc[:, 3:])


def test_delimiters(minilm: TransformerLensModel) -> None:
    """Special tokens and no others; none where words are not known."""
    encoding = minilm.encode(("A cat, a dog.", "Yes."))
    marked = [token for token, one in zip(encoding.tokens, special_tokens(encoding), strict=True) if one]
    assert marked == ["[CLS]", "[SEP]", "[SEP]"]
    assert special_tokens(minilm.encode("\u200b")).all()  # nothing but special tokens
    assert not special_tokens(Encoding([1, 2], [0, 0], ["a", "b"])).any()


@pytest.mark.parametrize(
    ("lengths", "number"), [([30, 9, 3, 12], 1), ([3, 7, 5], 1), ([8], 0), ([9, 8, 8], 1)], ids=str
)
def test_the_text_to_show(lengths: list[int], number: int) -> None:
    """The shortest of those that are long enough."""
    assert example_text(lengths) == number


def test_an_example_of_patterns() -> None:
    """The maps of the chosen heads, with their titles."""
    patterns = Patterns(dimensions([3, 5], 2))
    patterns.add(text_result(rows(2, 2, 9), rows(2, 2, 9, 1), marked(9)))
    maps = {name: rows(2, 2, 9, seed) for seed, name in enumerate(("attention", "input"))}
    chosen = patterns.chosen()
    found = pattern_example(list("abcdefghi"), maps, chosen, [3, 5])
    assert found.tokens == list("abcdefghi")
    for number, row in chosen.iterrows():
        assert found.titles[number] == f"{row['pattern']}: L{row['layer']}H{row['head']}"
        for name, values in maps.items():
            expected = values[[3, 5].index(row["layer"]), row["head"]]
            np.testing.assert_array_equal(found.maps[name][number], expected)


def test_patterns_of_real_heads(minilm: TransformerLensModel) -> None:
    """A real BERT has a head for each pattern, and the example is a short text."""
    study = run(minilm, TEXTS, StudySettings(n_probes=4), analyses=[Patterns])
    chosen = study[Patterns].chosen()
    assert chosen["pattern"].tolist() == list(PATTERNS)
    scores = chosen.set_index("pattern")["attention"]
    assert scores["previous token"] > 0.95
    assert scores.drop("itself").min() > 0.5
    assert 0.2 < scores["itself"] < 0.3  # no head attends mostly to its own token
    example = study[Patterns].example
    assert example is not None
    assert example.tokens == minilm.encode(TEXTS[0]).tokens
    assert list(example.maps) == ["attention", "previous_layer", "input"]
    for values in example.maps.values():
        np.testing.assert_allclose(values.sum(-1), 1, atol=1e-5)
