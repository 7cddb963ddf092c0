"""The share of the first token: on rows whose answer is known, and in a study of a decoder."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import WordTokenizer, tiny_bert
from families import tiny
from studies import dimensions, text_result

from captum_hta import contributions, load_model
from captum_hta.report.sinks import sinks, sinks_figure
from captum_hta.study.run import run
from captum_hta.study.settings import StudySettings
from captum_hta.study.sinks import MEASURES, Sinks

SETTINGS = StudySettings(n_probes=None)


def causal(share: float, tokens: int) -> np.ndarray:
    """Rows in which the first token has a given share, and the query's own token the rest."""
    rows = (1 - share) * np.eye(tokens)
    rows[:, 0] += share
    return rows[None, None]


def test_known_shares() -> None:
    """The first query, which sees nothing else, does not count; a text of one token has no row."""
    analysis = Sinks(dimensions([3]))
    for tokens in (1, 4, 6):
        analysis.add(text_result(causal(0.75, tokens), causal(0.25, tokens)))
    (row,) = analysis.table().to_dict("records")
    assert (row["layer"], row["head"], row["texts"]) == (3, 0, 2)
    assert [row[measure] for measure in MEASURES] == pytest.approx([0.75, 0.25, 0.25])
    assert [row[f"{measure}_error"] for measure in MEASURES] == pytest.approx([0, 0, 0], abs=1e-12)
    assert analysis.by_layer().loc[3, "first_token_attention_mean"] == pytest.approx(0.75)


def test_a_study_of_a_decoder() -> None:
    """Its shares are those of the matrices, text by text; the section says so in words."""
    model = load_model(tiny("GPT-2"), WordTokenizer(60))
    texts = ["a b c d", "e f g", "h i j k l"]
    study = run(model, texts, SETTINGS)
    table = study[Sinks].table()
    results = {
        source: [contributions(model, text, source=source) for text in texts] for source in MEASURES[1:]
    }
    for source, found in results.items():
        expected = np.concatenate([one.values[0, ..., 1:, 0].numpy() for one in found], axis=-1).mean(-1)
        np.testing.assert_allclose(table[source], expected.ravel())
    looked = [one.attention[0, ..., 1:, 0].numpy() for one in results["input"]]
    np.testing.assert_allclose(table["attention"], np.concatenate(looked, axis=-1).mean(-1).ravel())
    section = sinks(study)
    assert section is not None
    assert f"{table['attention'].mean():.0%} of the attention" in section.figures[0].caption


def test_where_it_does_not_apply() -> None:
    """Encoders see all tokens from the first query on."""
    study = run(load_model(tiny_bert(), WordTokenizer()), ["a b c"], SETTINGS)
    assert study.find(Sinks) is None
    assert sinks(study) is None


def test_figure() -> None:
    """Three lines over the layers, and two dots for each head."""
    analysis = Sinks(dimensions([0, 1], heads=2))
    rows = np.broadcast_to(causal(0.6, 4), (2, 2, 4, 4))
    analysis.add(text_result(rows, rows))
    over_layers, heads = sinks_figure(analysis.table()).axes
    assert [line.get_ydata().tolist() for line in over_layers.lines] == [pytest.approx([0.6, 0.6])] * 3
    assert [len(dots.get_offsets()) for dots in heads.collections] == [4, 4]
