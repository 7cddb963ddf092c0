"""What heads do when a token changes, and which methods tell so."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as hf
from circuits import circuit, induction, looking_back, silent
from conftest import WordTokenizer, tiny_bert
from families import GROUPED, tiny, tiny_with_head
from scipy import stats

from captum_hta import baselines, contributions, load_model
from captum_hta.evaluation import (
    Faithfulness,
    HtaMethod,
    MaskToken,
    MeanVector,
    Noise,
    OtherToken,
    ZeroVector,
    default_interventions,
    faithfulness,
)
from captum_hta.evaluation.interventions import responses
from captum_hta.evaluation.methods import HTA
from captum_hta.integrations import TransformerLensModel, TransformersModel
from captum_hta.model.activations import Activations

TEXT = "one two three"


def moved(model, text: str, intervention, seed: int = 0) -> torch.Tensor:
    encoding = model.encode(text)
    activations = Activations(model, model.batch([encoding]))
    generator = torch.Generator().manual_seed(seed)
    return responses(activations, encoding, intervention, range(model.num_layers), generator)


def test_small_noise_is_what_contributions_are_made_of(bert: TransformerLensModel) -> None:
    r"""``E |dy|^2 = s^2 |J|_F^2``: the relative error falls as samples grow, and is that of the sampling."""
    exact = contributions(bert, TEXT).values[0]
    for samples, bound in ((25, 0.24), (400, 0.06)):
        found = moved(bert, TEXT, Noise(1e-4, samples))
        ratio = found / found.sum(-1, keepdim=True) / exact
        assert (ratio - 1).abs().mean() < bound
    ranks = stats.spearmanr(found[1, 0, 2], exact[1, 0, 2]).statistic
    assert ranks > 0.95


@pytest.mark.parametrize("intervention", [MeanVector(), ZeroVector()])
def test_vectors_in_the_place_of_one(bert: TransformerLensModel, intervention) -> None:
    """By hand: one forward pass with one row of the embedding changed."""
    found = moved(bert, TEXT, intervention)
    batch = bert.batch([bert.encode(TEXT)])
    seen = {}
    bert.target(1).register_forward_hook(lambda module, args, out: seen.__setitem__("z", out.detach()))
    bert.source(0).register_forward_hook(lambda module, args, out: seen.__setitem__("x", out.detach()))
    bert.forward(*batch.inputs, *batch.extra)
    usual, x = seen["z"], seen["x"].clone()
    changed = x.clone()
    changed[0, 2] = x[0].mean(0) if isinstance(intervention, MeanVector) else 0
    handle = bert.source(0).register_forward_hook(lambda module, args, out: changed)
    bert.forward(*batch.inputs, *batch.extra)
    handle.remove()
    distance = (seen["z"] - usual)[0].reshape(5, 2, 4).norm(dim=-1).T
    torch.testing.assert_close(found[1, :, :, 2], distance)


def test_tokens_in_the_place_of_one() -> None:
    """By hand: the forward pass of another text."""
    model = load_model(tiny_with_head("GPT-2"), tokenizer=WordTokenizer(60))
    found = moved(model, TEXT, MaskToken(9))
    encoding = model.encode(TEXT)
    activations = Activations(model, model.batch([encoding]))
    other = Activations(model, model.batch([type(encoding)([*encoding.ids[:2], 9, *encoding.ids[3:]],
                                                       encoding.segments, encoding.tokens)]))  # fmt: skip
    distance = (other.pattern @ other.value - activations.pattern @ activations.value).norm(dim=-1)
    torch.testing.assert_close(found[..., 2], distance, rtol=1e-6, atol=1e-9, check_dtype=False)
    assert not found.triu(1).any()  # nothing looks ahead


def test_special_tokens_are_left_alone(minilm: TransformerLensModel) -> None:
    """Changes of words do not touch them, and their keys hold no number."""
    for intervention in (MaskToken(minilm.mask_token), OtherToken((2000, 3000), samples=2)):
        found = moved(minilm, "The cat sat.", intervention)
        assert found[..., [0, 5]].isnan().all()
        assert found[..., 1:5].isfinite().all()
        assert (found[..., 1:5] >= 0).all()
        # In every layer some head responds at every query to every word. Not every head does: a saturated
        # one may underflow to exactly zero, on some processors and not on others.
        assert (found[..., 1:5].amax(dim=1) > 1e-6).all()


def test_many_copies(bert: TransformerLensModel) -> None:
    """Texts longer than one batch of copies give every key once."""
    long = " ".join(f"w{number}" for number in range(36))
    found = moved(bert, long, ZeroVector())
    assert found.shape == (2, 2, 38, 38)
    assert (found.diagonal(dim1=-2, dim2=-1) > 0).all()


def test_known_circuits() -> None:
    """Where attention is fooled, contributions put the tokens in the order of what they really do."""
    model = circuit(looking_back(1), induction("written"))
    found = faithfulness(
        model, ["DABCA"], [HtaMethod(model), baselines.AttentionWeights(model)], [ZeroVector()], layers=[1]
    )
    measured = moved(model, "DABCA", ZeroVector())[1, 0, 4]
    assert measured.argmax() == 1  # the A, and not the B that attention looks at
    exact = contributions(model, "DABCA").values[0, 1, 0, 4]
    assert exact.argmax() == 1
    assert set(found.summary()["method"]) == {HTA["input"], "attention"}
    fooled = silent()
    response = moved(fooled, "ABCD", Noise(1e-3, 4))[1, 0, 3]
    assert response[0] < 1e-4 * response[1:].min()


def test_ranking_by_hand() -> None:
    """The mean over queries of Spearman's correlation, over the keys that were changed."""
    generator = np.random.default_rng(0)
    measured, method = generator.random((1, 2, 4, 5)), generator.random((1, 1, 4, 5))
    measured[..., 0] = np.nan
    found = Faithfulness([3])
    found.add("change", measured, {"method": method})
    expected = [
        np.mean([
            stats.spearmanr(measured[0, head, query, 1:], method[0, 0, query, 1:]).statistic
            for query in range(4)
        ])
        for head in range(2)
    ]  # fmt: skip
    table = found.table()
    np.testing.assert_allclose(table["spearman"], expected, atol=1e-12)
    assert table["layer"].tolist() == [3, 3]
    assert table["low"].isna().all()  # of one activations there is no interval
    assert found.summary()["spearman"].item() == pytest.approx(np.mean(expected))


def test_intervals_cover_the_mean_of_examples() -> None:
    """The bootstrap's interval of a mean whose spread is known: 95% within twice its standard error."""
    generator = np.random.default_rng(0)
    found = Faithfulness([0])
    found.values["change", "method"] = [generator.normal(0.5, 0.1, (1, 1)) for _ in range(100)]
    found.rows["change", "method"] = 100
    row = found.summary().iloc[0]
    assert row["low"] < 0.5 < row["high"]
    assert row["high"] - row["low"] == pytest.approx(2 * 1.96 * 0.1 / 10, rel=0.25)


def test_the_same_seed_gives_the_same_numbers(bert: TransformerLensModel) -> None:
    """And other texts do not change those of one."""
    methods = [HtaMethod(bert), baselines.AttentionWeights(bert)]
    one = faithfulness(bert, [TEXT, "four five"], methods, layers=[1])
    two = faithfulness(bert, [TEXT, "four five"], methods, layers=[1])
    np.testing.assert_array_equal(one.table()["spearman"], two.table()["spearman"])
    assert set(one.table()["layer"]) == {1}


def test_default_interventions(minilm: TransformerLensModel) -> None:
    """The mask token where there is one; words are drawn from the corpus without special tokens."""
    encoding = minilm.encode("The cat sat.")
    found = {one.name: one for one in default_interventions(minilm, [encoding])}
    assert list(found) == ["noise 0.01", "noise 1", "mean vector", "zero vector", "mask token", "other word"]
    assert found["other word"].corpus == tuple(encoding.ids[1:-1])
    decoder = load_model(tiny("Llama"), tokenizer=WordTokenizer(60))
    names = [one.name for one in default_interventions(decoder, [decoder.encode("a b")])]
    assert "mask token" not in names


def test_cross_attention_is_refused() -> None:
    """By name."""
    model = TransformersModel(tiny("T5"), WordTokenizer(60), part="cross")
    with pytest.raises(ValueError, match="not for cross attention"):
        faithfulness(model, [("a", "b")], [])


# --- what must not count ---------------------------------------------------------------------------


def test_causal_noise_tells_nothing() -> None:
    """Rows are ranked among the keys that their query can see."""
    model = load_model(tiny_with_head("GPT-2"), tokenizer=WordTokenizer(60))

    class Noise_:  # noqa: N801
        name = "noise"

        def attribute(self, texts: list[str]) -> torch.Tensor:
            lengths = [len(model.encode(text)) for text in texts]
            generator = torch.Generator().manual_seed(0)
            return torch.rand(len(texts), 3, 4, *[max(lengths)] * 2, generator=generator).tril()

    text = " ".join("abcdefghijklmnopqrstuvwxyz")
    found = faithfulness(model, [text], [Noise_(), HtaMethod(model)], [ZeroVector()])
    table = found.summary().set_index("method")["spearman"]
    assert abs(table["noise"]) < 0.1


def test_texts_that_are_too_short(bert: TransformerLensModel, recwarn: pytest.WarningsRecorder) -> None:
    """They have no rank, are not counted, and leave the intervals of the others."""
    bare = load_model(tiny_with_head("Llama"), tokenizer=Bare(60))
    methods = [HtaMethod(bare), baselines.AttentionWeights(bare)]
    found = faithfulness(
        bare, (text for text in ["a", "b c d e", "f g h", "i j k l"]), methods, [ZeroVector()]
    )
    table = found.summary()
    assert table[["spearman", "low", "high"]].notna().all(None)
    assert set(found.table()["examples"]) == {3}
    assert not [warning for warning in recwarn if "empty slice" in str(warning.message)]
    with pytest.raises(ValueError, match="there is no text"):
        faithfulness(bare, [], methods)
    with pytest.raises(ValueError, match="layers names"):
        faithfulness(bare, ["a b c"], methods, layers=[9])
    last = faithfulness(bare, ["a b c d"], methods, [ZeroVector()], layers=[-1])
    assert set(last.table()["layer"]) == {2}


class Bare(WordTokenizer):
    """Without special tokens."""

    def __call__(self, text: str, pair: str | None = None, **options: object) -> dict[str, list[int]]:
        return {"input_ids": [self._id(word) for word in text.split()]}


def test_another_word_is_another(bert: TransformerLensModel) -> None:
    """Unless the corpus has no other."""
    encoding = bert.encode(" ".join("abcdefgh" * 4))
    words, x = torch.tensor(encoding.ids), torch.zeros(len(encoding), 8)
    generator = torch.Generator().manual_seed(0)
    corpus = sorted(set(words.tolist()))
    for change in OtherToken(tuple(corpus), samples=3).changes(encoding, x, generator):
        assert change.keys.tolist() == list(range(len(encoding)))  # its words are not known
        assert (change.new != words).all()
        assert set(change.new.tolist()) <= set(corpus)
    (change,) = OtherToken((corpus[0],)).changes(encoding, x, generator)
    assert (change.new == corpus[0]).all()


@pytest.mark.parametrize("make", [lambda: Noise(0.0), lambda: Noise(1, 0), lambda: OtherToken(())])
def test_interventions_that_are_none(make) -> None:
    """Refused when they are made."""
    with pytest.raises(ValueError, match="at least one sample"):
        make()


# --- what must not give numbers --------------------------------------------------------------------


def test_nothing_moves_before_a_change() -> None:
    """In single precision and in several batches of copies too, exactly: there is no rounding to rank."""
    model = load_model(tiny_with_head("GPT-2").float(), tokenizer=WordTokenizer(60))
    found = moved(model, " ".join(f"w{number}" for number in range(36)), ZeroVector())
    assert not found.triu(1).any()
    assert found.diagonal(dim1=-2, dim2=-1).amin((0, 1)).min() > 0


def test_windows_are_respected() -> None:
    """Tokens that no path through the layers reaches do not count."""
    torch.manual_seed(0)
    config = hf.MistralConfig(sliding_window=4, initializer_range=0.5, **GROUPED)
    plain = hf.MistralForCausalLM(config).double().eval()
    model = load_model(plain, tokenizer=WordTokenizer(60), adapter="transformers")
    text = "a b c d e f g h i j"
    measured = moved(model, text, ZeroVector()).numpy()
    attention = baselines.AttentionWeights(model).attribute(text)[0].numpy()
    window = np.tri(12, dtype=bool) & ~np.tri(12, k=-4, dtype=bool)
    rows = [
        stats.spearmanr(measured[0, head, query, window[query]], attention[0, head, query, window[query]])
        for head in range(4)
        for query in range(2, 12)
    ]
    methods = [baselines.AttentionWeights(model)]
    found = faithfulness(model, [text], methods, [ZeroVector()], layers=[0]).summary()
    assert found["spearman"].item() == pytest.approx(np.mean([row.statistic for row in rows]))


def test_responses_that_are_not_finite() -> None:
    """The error names the text and the intervention."""
    model = load_model(tiny_bert().half(), tokenizer=WordTokenizer(), adapter="transformers")
    methods = [baselines.AttentionWeights(model)]
    with pytest.raises(ValueError, match=r"text 0: responses to 'noise 1e\+06' .* not finite"):
        faithfulness(model, ["a b c", "d e f g"], methods, [Noise(1e6)])


def test_images_have_no_token_ids() -> None:
    """Interventions on ids would write into pixels."""
    model = TransformersModel(tiny("ViT"), None)
    with pytest.raises(ValueError, match="reads no token ids"):
        moved(model, torch.rand(model.reader.shape), MaskToken(3))


def test_noise_that_is_lost_in_rounding() -> None:
    """Is refused in half precision, and not among the interventions by default."""
    model = load_model(tiny_bert().bfloat16(), tokenizer=WordTokenizer(), adapter="transformers")
    with pytest.raises(ValueError, match=r"'noise 0.01' are lost in the rounding of torch.bfloat16: load"):
        moved(model, TEXT, Noise(0.01))
    names = [one.name for one in default_interventions(model, [model.encode(TEXT)])]
    assert names[:2] == ["noise 1", "mean vector"]
