"""The study of a corpus: what is read, and what is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import TransformerLensModel, WordTokenizer, load_model, tiny_bert
from families import tiny
from scipy import stats
from studies import EXACT, TEXTS, dimensions, text_result

from captum_hta.baselines import EffectiveAttention
from captum_hta.computation import contributions
from captum_hta.integrations import TransformersModel
from captum_hta.model.encoding import Encoding
from captum_hta.result import Contributions
from captum_hta.study.correlations import Correlations
from captum_hta.study.effective_attention import EffectiveCorrelation
from captum_hta.study.encoded_corpus import special_tokens
from captum_hta.study.errors import ProbeErrors
from captum_hta.study.identifiability import Identifiability
from captum_hta.study.patterns import Patterns
from captum_hta.study.positions import RelativePositions
from captum_hta.study.run import Study, run
from captum_hta.study.settings import StudySettings

QUANTITIES = {"attention": "attention", "input": "values"}

# --- the study ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def singles(model: TransformerLensModel) -> list[dict[str, dict[str, np.ndarray]]]:
    """For each text and source the values and the attention ``[layer, head, query, key]``."""

    def of(text: Any, source: str) -> dict[str, np.ndarray]:
        found = contributions(model, [text], source=source)
        return {"values": found.values[0].numpy(), "attention": found.attention[0].numpy()}

    return [{source: of(text, source) for source in ("previous_layer", "input")} for text in TEXTS]


def row(table: pd.DataFrame, **keys: Any) -> Any:
    """The one row of a tidy table that has these keys."""
    chosen = table.loc[np.logical_and.reduce([table[name] == key for name, key in keys.items()])]
    assert len(chosen) == 1
    return chosen.iloc[0]


def test_tables_are_tidy(study: Study) -> None:
    """A row for each combination of keys, none twice, with the documented columns."""
    names = ("correlations", "relative_positions", "centres_of_mass", "layers")
    correlations, positions, centres, layers = (study.tables()[name] for name in names)
    keys = ["source", "layer", "head"]
    measures = ["pearson", "pearson_error", "spearman", "spearman_error"]
    assert list(correlations) == [*keys, *measures, "rows", "rows_left_out", "examples"]
    assert list(positions) == ["quantity", "layer", "head", "offset", "value", "value_error"]
    assert list(centres) == ["quantity", "layer", "head", "centre_of_mass"]
    assert list(map(len, (correlations, positions, centres, layers))) == [8, 2 * 4 * 15, 8, 2]
    assert set(positions["offset"]) == set(range(-7, 8))
    for table, number in ((correlations, 3), (positions, 4), (centres, 3), (layers, 1)):
        assert not table.duplicated(list(table)[:number]).any()
        assert table.drop(columns="value_error", errors="ignore").notna().all(axis=None)


@pytest.mark.parametrize("source", ["previous_layer", "input"])
@pytest.mark.parametrize("measure", ["pearson", "spearman"])
def test_correlations_one_row_at_a_time(
    study: Study,
    singles: list[Any],
    source: str,
    measure: str,
) -> None:
    """Against scipy on every row of every text alone."""
    slow, table = getattr(stats, measure + "r"), study[Correlations].table()
    for layer, head in np.ndindex(2, 2):
        by_text = [
            [
                slow(attention, values).statistic
                for attention, values in zip(
                    single[source]["attention"][layer, head],
                    single[source]["values"][layer, head],
                    strict=True,
                )
            ]
            for single in singles
        ]
        found = row(table, source=source, layer=layer, head=head)
        every = np.concatenate(by_text)
        sums = np.array([np.sum(text) - every.mean() * len(text) for text in by_text])
        assert found[measure] == pytest.approx(every.mean(), abs=1e-10)
        error = np.sqrt(5 / 4 * (sums**2).sum()) / len(every)
        assert found[measure + "_error"] == pytest.approx(error, abs=1e-9)
        assert (found["rows"], found["rows_left_out"], found["examples"]) == (len(every), 0, 5)


@pytest.mark.parametrize("quantity", ["attention", "input"])
def test_positions_one_pair_at_a_time(study: Study, singles: list[Any], quantity: str) -> None:
    """Histogram and centre of mass against a loop over all pairs of tokens."""
    positions, centres = study[RelativePositions].table(), study[RelativePositions].centres_of_mass()
    for layer, head in np.ndindex(2, 2):
        at: dict[int, list[float]] = {}
        for single in singles:
            values = single["input"][QUANTITIES[quantity]][layer, head]
            for j, i in np.ndindex(values.shape):
                at.setdefault(i - j, []).append(values[j, i])
        mean = {offset: np.mean(values) for offset, values in at.items()}
        keys = {"quantity": quantity, "layer": layer, "head": head}
        for offset, value in mean.items():
            found = row(positions, offset=offset, **keys)["value"]
            assert found == pytest.approx(value, abs=1e-10)
        centre = sum(o * value for o, value in mean.items()) / sum(mean.values())
        assert row(centres, **keys)["centre_of_mass"] == pytest.approx(centre, abs=1e-10)


def made_up(heads: int, lengths: list[int], errors: list[float]) -> Study:
    """A study of layers 3 and 5 of no model: random attention, contributions near to it."""
    torch.manual_seed(0)
    study = Study(dimensions([3, 5], heads, max(lengths)), [Correlations, RelativePositions, ProbeErrors])
    for length, error in zip(lengths, errors, strict=True):
        attention, other = torch.randn(2, 1, 2, heads, length, length).softmax(-1)
        mixed = Contributions(
            values=0.5 * attention + 0.5 * other,
            standard_error=torch.full_like(other, error) if error else None,
            attention=attention,
            tokens=[["a"] * length],
            layers=[3, 5],
            source="input",
            target="head",
            norm="frobenius",
            model="made up",
        )
        study.add({"previous_layer": mixed, "input": mixed})
    return study


def test_layer_summary_is_of_the_tables() -> None:
    """Medians of correlations and means of centres over heads."""
    study = made_up(5, [4, 7, 5], [0, 0, 0])
    correlations, centres = study.tables()["correlations"], study.tables()["centres_of_mass"]
    assert study.tables()["layers"]["layer"].tolist() == [3, 5]
    for _, found in study.tables()["layers"].iterrows():
        for source in ("previous_layer", "input"):
            heads = correlations.query("layer == @found.layer and source == @source")
            for measure in ("pearson", "spearman"):
                expected = np.median(heads[measure])
                assert found[f"{measure}_{source}_median"] == pytest.approx(expected)
        for quantity in ("attention", "input"):
            heads = centres.query("layer == @found.layer and quantity == @quantity")
            expected = heads["centre_of_mass"].mean()
            assert found[f"centre_of_mass_{quantity}"] == pytest.approx(expected)


def test_probe_errors_are_over_all_texts() -> None:
    """The mean weighs every entry alike; the largest may be in any text."""
    found = made_up(2, [3, 5, 4], [0.1, 0.3, 0.2])[ProbeErrors].summary()["input"]
    mean = (9 * 0.1 + 25 * 0.3 + 16 * 0.2) / (9 + 25 + 16)
    assert found == pytest.approx({"mean": mean, "largest": 0.3}, rel=1e-6)


def test_shares_of_heads(study: Study) -> None:
    """Shares for the previous-layer contribution, at the bounds of the paper."""
    heads = study[Correlations].table().query("source == 'previous_layer'")
    found = study[Correlations].shares_of_heads()
    assert len(found) == 4
    for measure, bound in (("pearson", 0.7), ("pearson", 0.85), ("spearman", 0.9)):
        expected = sum(heads[measure] > bound) / 4
        assert found[f"share_of_heads_{measure}_over_{bound}"] == expected


def test_shares_of_heads_of_a_single_example(model: TransformerLensModel) -> None:
    """One example has correlations, so shares of heads, though no standard error."""
    found = run(model, TEXTS[:1], EXACT)
    heads = found[Correlations].table().query("source == 'previous_layer'")
    assert heads["pearson"].notna().all()
    expected = (heads["pearson"] > 0.7).mean()
    assert found[Correlations].shares_of_heads()["share_of_heads_pearson_over_0.7"] == expected


def assert_same_tables(first: Study, second: Study) -> None:
    """All numbers to 1e-10; errors to 1e-9, since a root follows their cancellation."""
    for name in ("correlations", "relative_positions", "centres_of_mass", "layers"):
        tables = [study.tables()[name] for study in (first, second)]
        pd.testing.assert_frame_equal(*tables, rtol=0, atol=1e-9)
        exact = [table.loc[:, ~table.columns.str.endswith("error")] for table in tables]
        pd.testing.assert_frame_equal(*exact, rtol=0, atol=1e-10)


def test_the_order_of_the_texts_does_not_matter(model: TransformerLensModel, study: Study) -> None:
    """Sums have no order."""
    assert_same_tables(run(model, [TEXTS[i] for i in (3, 1, 4, 0, 2)], EXACT), study)


def test_the_order_does_not_matter_to_probes(model: TransformerLensModel, estimated: Study) -> None:
    """A text has its own probes, wherever it stands."""
    other = run(model, [TEXTS[i] for i in (2, 0, 1)], StudySettings(n_probes=2))
    assert_same_tables(other, estimated)
    assert other[ProbeErrors].summary()["input"] == pytest.approx(
        estimated[ProbeErrors].summary()["input"], abs=1e-10
    )


@pytest.mark.parametrize("texts", [["a b c d", "a"], ["dogs bark"] * 5])
def test_progress_adds_up(model: TransformerLensModel, texts: list[Any]) -> None:
    """A step for each text, the whole being 1."""
    steps: list[float] = []
    run(model, texts, EXACT, steps.append)
    assert len(steps) == len(texts)
    assert 0 < steps[0] <= steps[-1]
    assert sum(steps) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("layer", "texts"), [(1, TEXTS[:2]), (-1, TEXTS[:1])])
def test_layers_restrict(
    model: TransformerLensModel, singles: list[Any], layer: int, texts: list[Any]
) -> None:
    """Only that layer is in the tables, by its number, with the values it has among all layers."""
    found = run(model, texts, StudySettings(layers=[layer], n_probes=None))
    for table in found.tables().values():
        assert set(table["layer"]) == {1}
    selves = [single["input"]["values"][1].diagonal(0, -2, -1) for single in singles[: len(texts)]]
    positions = found[RelativePositions].table().query("quantity == 'input' and offset == 0")
    expected = np.concatenate(selves, -1).mean(-1)
    np.testing.assert_allclose(positions["value"], expected, rtol=0, atol=1e-10)


def test_setting_reaches_the_contributions(model: TransformerLensModel) -> None:
    """Norm and scaling change the numbers as they change the contributions."""
    options = {"norm": "sum", "multiply_by_inputs": True, "layers": [0]}
    found = run(model, ["a b c"], StudySettings(n_probes=None, **options))[RelativePositions].table()
    values = contributions(model, ["a b c"], **options).values[0]
    histogram = torch.stack([values.diagonal(o, -2, -1).mean(-1) for o in range(-4, 5)], -1)
    inputs = found.query("quantity == 'input'")["value"]
    np.testing.assert_allclose(inputs, histogram.ravel(), rtol=0, atol=1e-12)


def test_study_counts_tokens_and_modes(study: Study) -> None:
    """How long the texts were, and how the contributions were found."""
    assert sorted(study.tokens) == [4, 6, 6, 7, 8]
    assert set(study.plans) == {"previous_layer", "input"}
    assert study.plans["previous_layer"].startswith("closed form (no tangents): ")


def test_exact_studies_have_no_probe_error(study: Study) -> None:
    """There is nothing to say, so nothing is said."""
    assert study[ProbeErrors].summary() == {}


def test_probe_errors_are_of_all_entries(model: TransformerLensModel, estimated: Study) -> None:
    """Mean and largest standard error over all entries of all texts, without padding."""
    errors = contributions(model, TEXTS[:3], n_probes=2).standard_error.numpy()
    expected = {"mean": np.nanmean(errors), "largest": np.nanmax(errors)}
    assert list(estimated[ProbeErrors].summary()) == ["input"]
    assert estimated[ProbeErrors].summary()["input"] == pytest.approx(expected, abs=1e-12)
    assert 0 < expected["mean"] < expected["largest"]


def test_tolerance_bounds_the_largest_error(model: TransformerLensModel, estimated: Study) -> None:
    """Probes are added until it holds."""
    found = run(model, TEXTS[1:2], StudySettings(n_probes=2, tolerance=0.02))[ProbeErrors].summary()["input"]
    assert 0 <= found["largest"] <= 0.02 < estimated[ProbeErrors].summary()["input"]["largest"]


def test_the_seed_decides_about_probes(model: TransformerLensModel) -> None:
    """Equal seeds give equal tables, others do not."""
    first, same, other = (
        run(model, TEXTS[1:2], StudySettings(n_probes=2, seed=seed))[Correlations].table()
        for seed in (1, 1, 2)
    )
    assert first.equals(same)
    assert not first.equals(other)


def test_no_text_is_an_error(model: TransformerLensModel) -> None:
    """It says so."""
    with pytest.raises(ValueError, match="no text"):
        run(model, [], EXACT)


def test_a_long_text_is_named_before_the_work_begins(model: TransformerLensModel) -> None:
    """By its place among the texts of the study, whatever group it is in."""
    steps: list[float] = []
    with pytest.raises(ValueError, match=r"text 2 has 52 tokens.* at most 40"):
        run(model, ["a b", "c", " ".join("a" * 50), "d"], EXACT, steps.append)
    assert steps == []


def test_small_studies_have_all_columns(model: TransformerLensModel, study: Study) -> None:
    """Also with texts of two tokens, so that code which reads the tables finds the documented columns."""
    found = run(model, ["", ""], EXACT)
    assert found[Correlations].table()["rows"].tolist() == [0] * 8
    assert found[Correlations].table()["rows_left_out"].tolist() == [4] * 8
    assert list(found.tables()["layers"]) == list(study.tables()["layers"])


# --- further analyses ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def telling() -> TransformerLensModel:
    """The model with a tokenizer that tells words from special tokens."""
    model = load_model(tiny_bert(), tokenizer=WordTokenizer())
    encode = model.encode

    def told(text: Any, *others: Any) -> Encoding:
        found = encode(text, *others)
        return replace(found, words=[None if one in (1, 2) else at for at, one in enumerate(found.ids)])

    model.encode = told
    return model


def test_patterns_are_of_the_input_contribution(telling: TransformerLensModel, singles: list[Any]) -> None:
    """And of attention, text by text, with the delimiters that the tokenizer tells."""
    study = run(telling, TEXTS, EXACT)
    expected, patterns = Patterns(dimensions([0, 1], 2)), study[Patterns]
    for text, single in zip(TEXTS, singles, strict=True):
        found = single["input"]
        expected.add(text_result(found["attention"], found["values"], special_tokens(telling.encode(text))))
    pd.testing.assert_frame_equal(patterns.table(), expected.table(), rtol=0, atol=1e-10)
    assert {"delimiters", "itself"} <= set(patterns.chosen()["pattern"])
    assert patterns.example is not None
    assert len(patterns.example.titles) == len(patterns.chosen())


def test_effective_attention_is_that_of_the_baseline(model: TransformerLensModel, study: Study) -> None:
    """Text by text."""
    expected = EffectiveCorrelation(dimensions([0, 1], 2, 8, model.d_head))
    for text in TEXTS:
        effective = EffectiveAttention(model).attribute([text])[0].double().numpy()
        attention = contributions(model, [text]).attention[0].double().numpy()
        expected.add(text_result(attention, effective=effective))
    assert (expected.by_width.counts[:, 1] > 0).all() == (model.d_head < 8)
    pd.testing.assert_frame_equal(study[EffectiveCorrelation].table(), expected.table(), rtol=0, atol=1e-6)


def test_identifiability_of_few_texts(study: Study) -> None:
    """All of them are for the test, and nothing is learnt."""
    table = study[Identifiability].table()
    assert (table["test_sentences"] == len(TEXTS)).all()
    assert table.query("map == 'none'")["identified"].notna().all()
    assert table.query("map != 'none'")["identified"].isna().all()


@pytest.mark.parametrize("measure", ["pearson", "spearman"])
@pytest.mark.parametrize("source", ["previous_layer", "input"])
def test_special_tokens_left_out(
    telling: TransformerLensModel, singles: list[Any], source: str, measure: str
) -> None:
    """Correlations are of the other tokens among themselves."""
    table = run(telling, TEXTS, StudySettings(n_probes=None, exclude_special=True))[Correlations].table()
    for layer, head in np.ndindex(2, 2):
        rows = []
        for text, single in zip(TEXTS, singles, strict=True):
            kept = np.flatnonzero(~special_tokens(telling.encode(text)))
            assert 0 < len(kept) < len(telling.encode(text))
            matrices = (single[source][name][layer, head] for name in ("attention", "values"))
            found = [matrix[np.ix_(kept, kept)] for matrix in matrices]
            if len(kept) > 2:
                rows += [getattr(stats, measure + "r")(*pair).statistic for pair in zip(*found, strict=True)]
        entry = row(table, source=source, layer=layer, head=head)
        assert entry[measure] == pytest.approx(np.mean(rows), abs=1e-10)
        assert entry["rows"] == len(rows)


def test_shares_without_special_tokens(telling: TransformerLensModel, singles: list[Any]) -> None:
    """Are shares of the whole that is left; distances count the tokens that are left."""
    found = run(telling, TEXTS, StudySettings(n_probes=None, exclude_special=True))
    own = []
    for text, single in zip(TEXTS, singles, strict=True):
        kept = np.flatnonzero(~special_tokens(telling.encode(text)))
        values = single["input"]["values"][:, :, kept][..., kept]
        own.append((values / values.sum(-1, keepdims=True)).diagonal(0, -2, -1))
    positions = found[RelativePositions].table().query("quantity == 'input' and offset == 0")
    np.testing.assert_allclose(positions["value"], np.concatenate(own, -1).mean(-1).ravel(), atol=1e-10)
    assert "delimiters" not in set(found[Patterns].chosen()["pattern"])


def test_special_tokens_that_are_not_known(model: TransformerLensModel) -> None:
    """Cannot be left out, and that is said; nor can those of other texts."""
    with pytest.raises(ValueError, match="adds no special token to these texts"):
        run(model, TEXTS, StudySettings(exclude_special=True))
    cross = TransformersModel(tiny("T5"), WordTokenizer(), part="cross")
    with pytest.raises(ValueError, match="self-attention only"):
        run(cross, [("a b", "c d")], StudySettings(exclude_special=True))


@pytest.mark.parametrize("source", ["previous_layer", "input"])
def test_keys_outside_of_a_window_do_not_count(source: str) -> None:
    """Queries of a model with a sliding window are compared on the keys that they attend to, or for the input
    contribution also on those that reach them through the layers below.
    """
    model = TransformersModel(tiny("Mistral"), WordTokenizer(60))
    texts = ["a b c d e f g h", "h g f e d c b"]
    table = run(model, texts, StudySettings(n_probes=None))[Correlations].table()
    expected: dict[tuple[int, int], list[float]] = {}
    for text in texts:
        found = contributions(model, [text], source=source)
        window = (found.attention[0] != 0).any(1)
        assert not window.tril()[0].equal(torch.ones_like(window[0]).tril())  # shorter than the text
        for layer, head, query in np.ndindex(found.values.shape[1:4]):
            keys = window[layer, query] | (found.values[0, layer, :, query] != 0).any(0)
            rows = (one[0, layer, head, query][keys].numpy() for one in (found.attention, found.values))
            if keys.sum() >= 3:
                expected.setdefault((layer, head), []).append(np.corrcoef(*rows)[0, 1])
    table = table[table["source"] == source].set_index(["layer", "head"])
    for at, correlations in expected.items():
        assert table.loc[at, "pearson"] == pytest.approx(np.mean(correlations))


@pytest.mark.parametrize("source", ["previous_layer", "input"])
def test_later_keys_of_causal_models_do_not_count(source: str) -> None:
    """Rows are of the keys that their query sees, of which there must be three."""
    causal = TransformersModel(tiny("GPT-2"), WordTokenizer(60))
    texts = ["a b c d e f", "dogs bark at night"]
    table = run(causal, texts, StudySettings(n_probes=None))[Correlations].table()
    rows: dict[tuple[int, int, str], list[float]] = {}
    for text in texts:
        found = contributions(causal, [text], source=source)
        for layer, head, query in np.ndindex(*found.values.shape[1:4]):
            pair = [
                one[0, layer, head, query, : query + 1].numpy() for one in (found.attention, found.values)
            ]
            for measure in ("pearson", "spearman"):
                if query > 1:
                    value = getattr(stats, measure + "r")(*pair).statistic
                    rows.setdefault((layer, head, measure), []).append(value)
    for (layer, head, measure), values in rows.items():
        entry = row(table, source=source, layer=layer, head=head)
        assert entry[measure] == pytest.approx(np.mean(values), abs=1e-6)
        assert entry["rows"] == len(values)


def test_layers_named_twice(model: TransformerLensModel, study: Study) -> None:
    """Count once."""
    found = run(model, TEXTS, StudySettings(layers=[1, -1, 1], n_probes=None))
    assert found.size.layers == [1]
    alone = study[Correlations].table().query("layer == 1").reset_index(drop=True)
    pd.testing.assert_frame_equal(found[Correlations].table(), alone, rtol=0, atol=1e-9)


def test_time_is_counted_by_part(study: Study) -> None:
    """Every part of the run has its seconds."""
    parts = {"attention", "previous_layer", "input and hidden", "statistics", "identifiability"}
    assert set(study.watch.seconds) == parts
    assert min(study.watch.seconds.values()) > 0


def test_a_text_of_special_tokens_alone(telling: TransformerLensModel) -> None:
    """Leaves nothing to study, which is no error."""
    found = run(telling, ["", "a b c"], StudySettings(n_probes=None, exclude_special=True))
    assert found[Correlations].table()["examples"].eq(1).all()
