"""Agreement of methods: measures against scipy, rows that are known, axes that broadcast."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
from conftest import WordTokenizer
from families import ENCODER, GROUPED, tiny, tiny_with_head
from scipy import stats
from scipy.spatial import distance

from captum_hta import baselines, compare, contributions, load_model
from captum_hta.evaluation import Comparison, HtaMethod, RankMatrix, compare_methods, methods_for
from captum_hta.evaluation.methods import HTA
from captum_hta.integrations import TransformerLensModel
from captum_hta.statistics.correlations import MEASURES, row_agreement, standard_ranks


def rows(seed: int, ties: bool = False) -> np.ndarray:
    values = np.random.default_rng(seed).random((2, 3, 5, 6))
    return values.round(1) if ties else values


@pytest.mark.parametrize("ties", [False, True])
def test_measures_equal_scipy(ties: bool) -> None:
    """Each row by scipy's functions for one row."""
    first, second = rows(0, ties), rows(1, ties)
    found = row_agreement(first, second, top=2)
    assert tuple(found) == MEASURES
    for at in np.ndindex(2, 3, 5):
        one, two = first[at], second[at]
        largest = [set(np.argsort(-row, kind="stable")[:2]) for row in (one, two)]
        expected = {
            "pearson": stats.pearsonr(one, two).statistic,
            "spearman": stats.spearmanr(one, two).statistic,
            "kendall": stats.kendalltau(one, two).statistic,
            "top_overlap": len(largest[0] & largest[1]) / 2,
            "jensen_shannon": distance.jensenshannon(one, two, base=2),
        }
        assert {name: values[at] for name, values in found.items()} == pytest.approx(expected, abs=1e-6)
    product = (standard_ranks(first) * standard_ranks(second)).sum(-1)
    np.testing.assert_allclose(product, found["spearman"])


def test_rows_without_an_answer() -> None:
    """Constant rows, rows without numbers and rows of two tokens have no agreement."""
    first, second = rows(0), rows(1)
    first[0, 0, 0], second[0, 0, 1] = 0.5, np.nan
    for values in row_agreement(first, second).values():
        assert np.isnan(values[0, 0, :2]).all()
        assert np.isfinite(values).sum() == 28
    assert np.isnan(standard_ranks(first)[0, 0, 0]).all()
    short = row_agreement(first[..., :2], second[..., :2])
    assert all(np.isnan(values).all() for values in short.values())


def test_a_method_agrees_with_itself_and_not_with_its_opposite(bert: TransformerLensModel) -> None:
    """1 and -1; numbers of rows by text, layer and head."""
    texts = ["a b c d", "e f"]
    result = contributions(bert, texts)
    table = compare(result, {"same": result, "opposite": -result.values}).set_index("method")
    assert isinstance(table, pd.DataFrame)
    assert len(table) == 2 * 2 * 2
    for measure in ("pearson", "spearman", "kendall"):
        np.testing.assert_allclose(table.loc["same", measure], 1)
        np.testing.assert_allclose(table.loc["opposite", measure], -1)
    np.testing.assert_allclose(table.loc["same", "jensen_shannon"], 0, atol=1e-6)
    np.testing.assert_allclose(table.loc["same", "top_overlap"], 1)
    assert (table["rows"] == 6 + 4).all()
    assert (table["rows_left_out"] == 0).all()


def test_axes_broadcast(bert: TransformerLensModel) -> None:
    """A method without heads or layers is compared with each; layers are found by their numbers."""
    texts = ["a b c d", "e f"]
    result = contributions(bert, texts, layers=[1])
    whole = contributions(bert, texts)
    rollout = baselines.AttentionRollout(bert).attribute(texts)
    scope = baselines.JacobianScope(bert, "temperature").attribute(texts)
    table = compare(result, {"whole": whole, "rollout": rollout, "scope": scope}).set_index("method")
    np.testing.assert_allclose(table.loc["whole", "spearman"], 1)
    assert set(table["layer"]) == {1}
    by_hand = [
        stats.spearmanr(rollout[0, 1, query, :6], result.values[0, 0, 0, query, :6]).statistic
        for query in range(6)
    ]
    alone = compare(contributions(bert, texts[:1], layers=[1]), {"rollout": rollout[:1, :, :6, :6]})
    assert alone.loc[0, "spearman"] == pytest.approx(np.mean(by_hand))
    hidden = contributions(bert, texts, target="layer")
    assert len(compare(hidden, {"rollout": rollout})) == 2
    with pytest.raises(ValueError, match="pass \\[batch, layer, head, query, key\\] for the same texts"):
        compare(result, {"bad": torch.zeros(2, 3, 3)})


def test_a_corpus_equals_its_texts_together() -> None:
    """Groups of texts change nothing; rows without numbers are left out and counted."""
    model = load_model(tiny_with_head("GPT-2"), tokenizer=WordTokenizer(60))
    texts = ["a b c d", "e f", "g h i", "j", "k l m n o"]
    methods, refused = methods_for(model, texts[0], n_probes=None)
    assert not refused
    names = [method.name for method in methods]
    assert names[:2] == list(HTA.values())
    assert {"saliency", "gradient x attention", "ALTI", "semantic scope"} < set(names)
    found, ranks = compare_methods(methods, model, texts, [0, 2])
    result = contributions(model, texts, layers=[0, 2])
    expected = compare(result, {m.name: m.attribute(texts) for m in methods[1:]})
    pd.testing.assert_frame_equal(found.table(), expected)
    saliency = expected[expected["method"] == "saliency"]
    assert (saliency["rows"] <= 5).all()
    matrix = ranks.table()
    assert list(matrix.index) == list(matrix.columns) == names
    np.testing.assert_allclose(np.diag(matrix), 1)
    np.testing.assert_allclose(matrix, matrix.T)
    summary = found.summary().set_index("method")
    assert summary.loc["ALTI", "spearman"] == pytest.approx(matrix.loc[names[0], "ALTI"])


def test_methods_that_a_model_does_not_allow(model: TransformerLensModel) -> None:
    """They are named with the reason."""
    _, refused = methods_for(model, "a b", n_probes=4)
    assert refused["semantic scope"].endswith("use a decoder")
    cross = load_model(tiny("BART"), tokenizer=WordTokenizer(60), part="cross")
    methods, refused = methods_for(cross, ("a b", "c d e"), n_probes=4, with_logits=False)
    assert [method.name for method in methods][:3] == [*HTA.values(), "attention"]
    assert "not defined for cross attention" in refused["attention rollout"]


@pytest.mark.parametrize("name", ["DeBERTa", "DeBERTa v2"])
def test_methods_where_attention_is_written_out(name: str) -> None:
    """Values are seen there too, and where there are values, all methods of encoders are defined."""
    deberta = load_model(tiny(name), tokenizer=WordTokenizer(60))
    methods, refused = methods_for(deberta, "a b", n_probes=4, with_logits=False)
    assert {"value-weighted norm", "ALTI", "value zeroing"} <= {method.name for method in methods}
    assert all("decoder" in reason for reason in refused.values())


def test_estimates_are_those_of_contributions(bert: TransformerLensModel) -> None:
    """The method is what the function gives."""
    method = HtaMethod(bert, "input", n_probes=4, seed=3)
    expected = contributions(bert, ["a b"], n_probes=4, seed=3)
    torch.testing.assert_close(method.attribute(["a b"]), expected.values)


def test_no_rows() -> None:
    """Texts too short for a correlation leave a table of undefined numbers."""
    short = Comparison([0])
    short.add(np.random.rand(1, 1, 2, 2), {"method": np.random.rand(1, 1, 2, 2)})
    assert short.table()["rows"].tolist() == [0]
    assert np.isnan(short.table()["spearman"]).all()


# --- what must not count as agreement --------------------------------------------------------------


def test_keys_that_a_query_cannot_see(minilm: TransformerLensModel) -> None:
    """In a causal model, noise below the diagonal agrees with nothing, although both are zero above it."""
    model = load_model(tiny_with_head("GPT-2"), tokenizer=WordTokenizer(60))
    text = " ".join("abcdefghijklmnopqrstuvwxyz")
    result = contributions(model, text)
    length = result.values.shape[-1]
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(1, 3, 4, length, length, generator=generator).tril()
    table = compare(result, {"noise": noise})
    for measure in ("pearson", "spearman", "kendall"):
        assert abs(table[measure].mean()) < 0.1
    assert (table["rows"] == length - 2).all()  # of fewer than three keys there is no correlation
    query = 9
    row = stats.spearmanr(noise[0, 1, 2, query, : query + 1], result.values[0, 1, 2, query, : query + 1])
    values, other = result.values[0].numpy(), noise[0].numpy()
    attended = np.tri(length, dtype=bool)[None].repeat(3, 0)
    comparison, ranks = Comparison([0, 1, 2]), RankMatrix("result")
    comparison.add(values, {"noise": other}, attended)
    ranks.add({"result": values, "noise": other}, attended)
    alone = Comparison([1])
    seen = np.s_[1:2, 2:3, query : query + 1, : query + 1]
    alone.add(values[seen], {"noise": other[seen]})
    assert alone.summary()["spearman"].item() == pytest.approx(row.statistic)
    mean = comparison.summary()["spearman"].item()
    assert ranks.table().loc["result", "noise"] == pytest.approx(mean)


def test_texts_and_layers_are_matched(bert: TransformerLensModel) -> None:
    """Contributions by their layers, whatever the order; tensors by their number; others are refused."""
    texts = ["a b c d", "e f g"]
    whole = contributions(bert, texts)
    table = compare(contributions(bert, texts, layers=[1, 0]), {"same": whole})
    np.testing.assert_allclose(table["spearman"], 1)
    with pytest.raises(ValueError, match="for other texts, queries or layers"):
        compare(contributions(bert, texts, layers=[0]), {"x": contributions(bert, texts, layers=[1])})
    with pytest.raises(ValueError, match="for other texts, queries or layers"):
        compare(whole, {"x": contributions(bert, ["h i j k", "e f g"])})
    with pytest.raises(ValueError, match="pass \\[batch"):
        compare(whole, {"x": baselines.AttentionWeights(bert).attribute(texts[:1])})
    with pytest.raises(TypeError, match="must be a tensor"):
        compare(whole, {"x": whole.values.numpy()})
    with pytest.raises(ValueError, match="top must be"):
        compare(whole, {"x": whole}, top=0)
    assert len(compare(whole, {"contributions": whole})) == 4


def test_nothing_to_compare(bert: TransformerLensModel) -> None:
    """Where no row has three tokens the summary is not a number; names must differ; texts must be some."""
    methods = [baselines.AttentionWeights(bert), baselines.AttentionRollout(bert)]
    short = Comparison([0])
    short.add(np.random.rand(1, 1, 2, 2), {"method": np.random.rand(1, 1, 2, 2)})
    assert short.summary()["jensen_shannon"].isna().all()
    with pytest.raises(ValueError, match="a name of its own"):
        compare_methods([methods[0], methods[0]], bert, ["a b c"], [0])
    with pytest.raises(ValueError, match="there is no text"):
        compare_methods(methods, bert, [], [0])
    found, _ = compare_methods(methods, bert, (text for text in ["a b c", "d e"]), [0])
    assert found.summary()["rows"].item() == 2 * (5 + 4)


TEXT = "a b c d e f g h i j"


def by_hand(first: torch.Tensor, second: torch.Tensor, seen: np.ndarray) -> float:
    """The mean over rows ``[layer, head, query, key]`` of Spearman's correlation among keys that count."""
    found = []
    for layer, head, query in np.ndindex(first.shape[:3]):
        keys = seen[layer, query]
        if keys.sum() >= 3:
            rows = first[layer, head, query, keys], second[layer, head, query, keys]
            found.append(stats.spearmanr(*rows).statistic)
    return float(np.mean(found))


@pytest.mark.parametrize(
    ("cls", "config"),
    [(hf.RobertaForCausalLM, hf.RobertaConfig), (hf.BertLMHeadModel, hf.BertConfig)],
)
def test_decoders_of_encoder_families(cls: type, config: type) -> None:
    """Whether later keys count is asked of the attention, not of the family."""
    torch.manual_seed(0)
    plain = cls(config(is_decoder=True, initializer_range=0.5, pad_token_id=0, **ENCODER)).double().eval()
    model = load_model(plain, tokenizer=WordTokenizer(60), adapter="transformers")
    result = contributions(model, TEXT)
    assert not result.attention.triu(1).any()
    methods = [HtaMethod(model), baselines.AttentionWeights(model)]
    found, ranks = compare_methods(methods, model, [TEXT], range(model.num_layers))
    seen = np.tri(result.values.shape[-1], dtype=bool)[None].repeat(model.num_layers, 0)
    expected = by_hand(result.values[0], result.attention[0], seen)
    assert found.summary()["spearman"].item() == pytest.approx(expected)
    assert ranks.table().loc["HTA, input", "attention"] == pytest.approx(expected)
    assert compare(result, {"attention": result.attention})["spearman"].mean() == pytest.approx(expected)


def test_windows() -> None:
    """Keys outside the window of a layer count only where the contributions reach them."""
    torch.manual_seed(0)
    config = hf.MistralConfig(sliding_window=4, initializer_range=0.5, **GROUPED)
    plain = hf.MistralForCausalLM(config).double().eval()
    model = load_model(plain, tokenizer=WordTokenizer(60), adapter="transformers")
    local = contributions(model, TEXT, source="previous_layer")
    window = np.tri(12, dtype=bool) & ~np.tri(12, k=-4, dtype=bool)
    np.testing.assert_array_equal((local.attention[0] != 0).any(1), window[None].repeat(3, 0))
    expected = by_hand(local.values[0], local.attention[0], window[None].repeat(3, 0))
    assert compare(local, {"attention": local.attention})["spearman"].mean() == pytest.approx(expected)
    methods = [HtaMethod(model), HtaMethod(model, "previous_layer"), baselines.AttentionWeights(model)]
    found, ranks = compare_methods(methods, model, [TEXT], range(3))
    assert ranks.table().loc["HTA, previous layer", "attention"] == pytest.approx(expected)
    whole = contributions(model, TEXT)
    reach = (whole.values[0] != 0).any(1).numpy()
    assert reach[1].sum() > window.sum()
    expected = by_hand(whole.values[0], local.attention[0], reach)
    assert ranks.table().loc["HTA, input", "attention"] == pytest.approx(expected)
    assert found.summary().set_index("method").loc["attention", "spearman"] == pytest.approx(expected)


def test_texts_in_another_order(bert: TransformerLensModel) -> None:
    """Are refused, if their lengths tell."""
    texts = ["a b c d", "e f"]
    reordered = baselines.AttentionWeights(bert).attribute(texts[::-1])
    with pytest.raises(ValueError, match=r"'attention' for text 0 end before its 6 tokens: .* same order"):
        compare(contributions(bert, texts), {"attention": reordered})
