"""Contributions of texts: axes, batches, padding, settings, estimates and errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import reference
import torch
from conftest import WordTokenizer, tiny_bert, tiny_roberta
from torch import Tensor
from torch.nn import LayerNorm, Module
from transformers import BertForMaskedLM, BertLMHeadModel

from captum_hta import Contributions, HiddenTokenAttribution, contributions, load_model
from captum_hta.batching import batches
from captum_hta.computation import Question, jointly
from captum_hta.integrations import TransformerLensModel
from captum_hta.jacobian.endpoints import endpoints_of
from captum_hta.jacobian.norms import NORMS
from captum_hta.jacobian.query import Query
from captum_hta.model.encoding import Encoding

SOURCES = ("input", "previous_layer")
TARGETS = ("head", "layer")
REAL = "Dogs bark"
PAIR = ("one two three", "four five")
TEXTS = ["a b c d e f g", "h i j k l m", PAIR, "n", "o p q r s t u"]
"""Texts of 3 to 9 tokens; some share a padded batch, and one is alone."""
LENGTHS = [9, 8, 8, 3, 9]


@pytest.fixture(scope="module")
def plain_deep() -> Module:
    """A tiny random BERT of 3 layers with uneven LayerNorms, in transformers."""
    config = tiny_bert().config
    config.num_hidden_layers = 3
    torch.manual_seed(1)
    model = BertForMaskedLM(config).double().eval()
    for module in model.modules():
        if isinstance(module, LayerNorm):  # else sums over a hidden embedding are constant
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def deep(plain_deep: Module) -> TransformerLensModel:
    """The same model in TransformerLens."""
    return load_model(plain_deep, tokenizer=WordTokenizer())


def blocks(model: TransformerLensModel, source: Module, target: Module) -> tuple[Tensor, Tensor]:
    """The Jacobian ``[query, component, key, width]`` for the pair by autograd, and its source."""
    batch = model.batch([model.encode(PAIR)])
    arguments = (*batch.inputs, *batch.extra)
    function, x = reference.hooked(lambda: model.forward(*arguments), source, target)
    jacobian = reference.jacobian(lambda value: function(value).flatten(2), x, range(x.shape[1]))
    return jacobian, x


def real_tokens(result: Contributions) -> Tensor:
    """``[batch, query, key]``, true where both are tokens."""
    size = result.values.shape[-1]
    real = torch.arange(size) < torch.tensor(list(map(len, result.tokens)))[:, None]
    return real[:, :, None] & real[:, None, :]


# --- the result ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n_probes", [None, 4])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", [*SOURCES, 1])
def test_rows_sum_to_one_and_padding_is_nan(
    deep: TransformerLensModel, source: str | int, target: str, n_probes: int | None
) -> None:
    """Rows of tokens sum to 1; queries and keys of padding are NaN, and nothing else is."""
    result = contributions(deep, TEXTS, source=source, target=target, n_probes=n_probes)
    real = real_tokens(result)
    for row, length in enumerate(LENGTHS):
        sums = result.values[row, ..., :length, :length].sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))
    for values in (result.values, result.standard_error, result.attention):
        if values is not None:
            expected = ~real.reshape(5, *(1,) * (values.dim() - 3), 9, 9).expand(values.shape)
            assert torch.equal(values.isnan(), expected)


def test_tokens(model: TransformerLensModel) -> None:
    """Tokens have the tokenizer's labels, special tokens included."""
    result = contributions(model, ["aa bb", PAIR])
    assert result.tokens[0] == ["t1", f"t{4 + 2 * 97 % 60}", f"t{4 + 2 * 98 % 60}", "t2"]
    assert result.tokens[1].count("t2") == 2


def test_tokens_of_a_real_bert(minilm: TransformerLensModel) -> None:
    """Tokens of a pair are labelled as in the text, with BERT's separators."""
    tokens = contributions(minilm, [("Dogs bark.", "Loud!")], source="previous_layer").tokens
    assert tokens == [["[CLS]", "Dogs", "bark", ".", "[SEP]", "Loud", "!", "[SEP]"]]


def test_attention_is_that_of_transformers(deep: TransformerLensModel, plain_deep: Module) -> None:
    """Attention equals transformers' ``output_attentions``, for padded texts and segments."""
    result = contributions(deep, TEXTS, source="previous_layer")
    plain_deep.set_attn_implementation("eager")
    for row, text in enumerate(TEXTS):
        encoding = deep.encode(text)
        out = plain_deep(
            input_ids=torch.tensor([encoding.ids]),
            token_type_ids=torch.tensor([encoding.segments]),
            output_attentions=True,
        )
        expected = torch.cat(out.attentions)
        found = result.example(row).attention[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layers", [[1], [-1, 0]])
def test_attention_of_the_chosen_layers(deep: TransformerLensModel, layers: list[int]) -> None:
    """Attention has the layers of the values."""
    whole = contributions(deep, TEXTS[:2], source="previous_layer").attention
    part = contributions(deep, TEXTS[:2], source="previous_layer", layers=layers).attention
    assert part.allclose(whole[:, layers], equal_nan=True)


# --- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("n_probes", [None, 3])
@pytest.mark.parametrize("source", [*SOURCES, 1])
def test_a_batch_equals_its_single_rows(
    deep: TransformerLensModel, source: str | int, n_probes: int | None, target: str
) -> None:
    """A text has the same contributions and errors alone and in a batch, estimated or exact."""
    assert any(len({LENGTHS[row] for row in rows}) > 1 for rows in batches(LENGTHS))
    options = {"source": source, "n_probes": n_probes, "target": target}
    result = contributions(deep, TEXTS, **options)
    for row, text in enumerate(TEXTS):
        alone, among = contributions(deep, [text], **options), result.example(row)
        torch.testing.assert_close(among.values, alone.values, rtol=0, atol=1e-10)
        torch.testing.assert_close(among.attention, alone.attention, rtol=0, atol=1e-12)
        if among.standard_error is not None:
            assert among.standard_error.allclose(alone.standard_error, rtol=0, atol=1e-10)


def test_order_of_texts(model: TransformerLensModel) -> None:
    """Results are in the order of the texts, although batches are sorted by length."""
    forwards = contributions(model, TEXTS).values
    assert forwards.allclose(contributions(model, TEXTS[::-1]).values.flip(0), equal_nan=True)


def test_real_batch_with_probes(minilm: TransformerLensModel) -> None:
    """A text has the same probes alone and in a padded batch, also in the real model."""
    texts = ["Dogs bark at the moon.", "Dogs bark at the moon every night."]
    together = contributions(minilm, texts, layers=[2], n_probes=3)
    alone = contributions(minilm, texts[:1], layers=[2], n_probes=3)
    torch.testing.assert_close(together.example(0).values, alone.values, rtol=0, atol=1e-5)


# --- texts ---------------------------------------------------------------------------------------


def test_pairs_use_segments(model: TransformerLensModel) -> None:
    """A pair and the same tokens of one segment have different contributions."""
    encoding = model.encode(PAIR)
    assert encoding.segments == [0] * 5 + [1] * 3
    flat = model.batch([Encoding(encoding.ids, [0] * 8, encoding.tokens)])
    attention = contributions(model, [PAIR]).attention[0, 0]
    assert not attention.allclose(model.attention(flat)[0].pattern[0], atol=1e-3)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_causal_rows_look_back(source: str, target: str) -> None:
    """A causal BERT's rows are zero above the diagonal, in a padded batch too."""
    causal = load_model(tiny_bert(BertLMHeadModel, is_decoder=True), tokenizer=WordTokenizer())
    result = contributions(causal, TEXTS, source=source, target=target)
    for row in range(len(TEXTS)):
        values = result.example(row).values
        assert not values.triu(1).any()
        torch.testing.assert_close(values[..., 0, 0], torch.ones_like(values[..., 0, 0]))


# --- sources, targets, layers, norms -------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("entry", [0, 1, 2])
def test_source_in_between(deep: TransformerLensModel, entry: int, target: str) -> None:
    """An int as source is the input of that block; all layers from there on match autograd."""
    result = contributions(deep, [PAIR], source=entry, target=target)
    assert result.layers == list(range(entry, 3))
    for index, layer in enumerate(result.layers):
        jacobian, _ = blocks(deep, deep.source(entry), deep.target(layer, target))
        heads = 2 if target == "head" else 1
        expected = reference.shares(reference.norms(jacobian, heads, "frobenius"))
        found = result.values[0, index].reshape(expected.shape)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("target", TARGETS)
def test_named_sources_are_ints(deep: TransformerLensModel, target: str) -> None:
    """The source "input" is block 0, and "previous_layer" is the target's own block."""
    whole = contributions(deep, [PAIR], source="input", target=target)
    assert torch.equal(contributions(deep, [PAIR], source=0, target=target).values, whole.values)
    own = contributions(deep, [PAIR], source="previous_layer", target=target).values
    for layer in range(3):
        one = contributions(deep, [PAIR], source=layer, layers=layer, target=target).values
        torch.testing.assert_close(one[:, 0], own[:, layer], rtol=0, atol=1e-12)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("layers", "expected"),
    [(None, [0, 1, 2]), (1, [1]), (-1, [2]), ([2, 0], [2, 0]), ([-2, 0], [1, 0]), ((1,), [1])],
)
def test_layers(
    deep: TransformerLensModel,
    source: str,
    layers: object,
    expected: list[int],
) -> None:
    """Layers are in the order of the argument, negative ones counted from the end."""
    result = contributions(deep, TEXTS[:2], source=source, layers=layers)
    whole = contributions(deep, TEXTS[:2], source=source)
    assert result.layers == expected
    assert result.values.allclose(whole.values[:, expected], equal_nan=True)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("model", ["bert", "causal", "roberta"])
def test_three_modes_to_the_previous_layer(model: str, scaled: bool) -> None:
    """Closed form, forward and reverse mode give the same numbers in a padded batch."""
    plain = {
        "bert": tiny_bert,
        "causal": lambda: tiny_bert(BertLMHeadModel, is_decoder=True),
        "roberta": tiny_roberta,
    }[model]()
    loaded = load_model(plain, tokenizer=WordTokenizer(segments=model != "roberta"))
    results = [
        contributions(loaded, TEXTS, source="previous_layer", multiply_by_inputs=scaled, mode=mode)
        for mode in (None, "closed form", "forward", "reverse")
    ]
    assert [{plan.mode for plan in result.plans} for result in results] == [
        {"closed form"}, {"closed form"}, {"forward"}, {"reverse"},
    ]  # fmt: skip
    for result in results[1:]:
        assert result.values.allclose(results[0].values, rtol=0, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("norm", NORMS)
def test_forward_equals_reverse(deep: TransformerLensModel, norm: str, target: str) -> None:
    """Forward and reverse mode give the same input contribution in every norm."""
    first, second = (
        contributions(deep, TEXTS[:3], norm=norm, target=target, mode=mode).values
        for mode in ("forward", "reverse")
    )
    torch.testing.assert_close(first, second, rtol=0, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("source", SOURCES)
def test_norms(deep: TransformerLensModel, source: str, norm: str, scaled: bool) -> None:
    """Each norm, with and without multiplication by the inputs, equals that of the dense Jacobian."""
    result = contributions(deep, [PAIR], source=source, norm=norm, multiply_by_inputs=scaled)
    for layer in (1, 2):
        entry = 0 if source == "input" else layer
        jacobian, x = blocks(deep, deep.source(entry), deep.target(layer))
        norms = reference.norms(jacobian * x[0] if scaled else jacobian, 2, norm)
        expected = reference.shares(norms)
        torch.testing.assert_close(result.values[0, layer], expected, rtol=0, atol=1e-7)


# --- estimates -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact(minilm: TransformerLensModel) -> Tensor:
    """Exact input contributions of the real model for a short text, in its first three layers."""
    return contributions(minilm, [REAL], layers=[0, 1, 2]).values


@pytest.mark.parametrize("seed", range(3))
def test_errors_are_honest(minilm: TransformerLensModel, exact: Tensor, seed: int) -> None:
    """99% of the estimates are within four standard errors of the exact values, and most within one."""
    result = contributions(minilm, [REAL], layers=[0, 1, 2], n_probes=24, seed=seed)
    assert result.standard_error.shape == result.values.shape
    away = (result.values - exact).abs() / result.standard_error
    assert (away < 4).float().mean() > 0.99
    assert 0.55 < (away < 1).float().mean() < 0.8


def test_all_probes_are_exact(deep: TransformerLensModel) -> None:
    """As many probes as dimensions give the exact values, with errors of zero."""
    result = contributions(deep, TEXTS, n_probes=8)
    assert not result.standard_error.nan_to_num(0).any()
    torch.testing.assert_close(
        result.values, contributions(deep, TEXTS).values, rtol=0, atol=1e-10, equal_nan=True
    )


def test_one_probe_has_an_infinite_error(model: TransformerLensModel) -> None:
    """The error of a single probe is unknown and therefore infinite; NaN means padding."""
    result = contributions(model, TEXTS, n_probes=1)
    real = real_tokens(result)[:, None, None].expand_as(result.values)
    assert result.standard_error[real].isposinf().all()


@pytest.mark.parametrize("options", [{"n_probes": 4}, {"n_probes": 4, "tolerance": 9.0}], ids=str)
def test_seeds(deep: TransformerLensModel, options: dict) -> None:
    """The same seed gives the same numbers, and another seed other ones."""
    results = [contributions(deep, TEXTS, seed=seed, **options) for seed in (3, 3, 4)]
    first, again, other = (result.values for result in results)
    assert torch.equal(first.nan_to_num(0), again.nan_to_num(0))
    assert not first.allclose(other, equal_nan=True)


def test_global_random_state_is_kept(model: TransformerLensModel) -> None:
    """Probes neither read nor advance the global random state."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = contributions(model, [PAIR], n_probes=3).values
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(contributions(model, [PAIR], n_probes=3).values, first)


@pytest.mark.parametrize("start", [None, 4])
def test_tolerance_is_met(minilm: TransformerLensModel, exact: Tensor, start: int | None) -> None:
    """Probes are added until every standard error is at most the tolerance."""
    result = contributions(minilm, [REAL], layers=[0, 1, 2], tolerance=0.02, n_probes=start, seed=1)
    few = contributions(minilm, [REAL], layers=[0, 1, 2], n_probes=start or 8, seed=1)
    assert few.standard_error.max() > 0.02 >= result.standard_error.max() > 0
    assert (result.values - exact).abs().max() < 5 * 0.02


@pytest.mark.parametrize("target", TARGETS)
def test_tiny_tolerance_is_met_by_all_probes(deep: TransformerLensModel, target: str) -> None:
    """A tolerance that only exact values meet uses all probes."""
    result = contributions(deep, TEXTS, tolerance=1e-12, target=target)
    assert not result.standard_error.nan_to_num(0).any()


def test_closed_form_needs_no_probes(model: TransformerLensModel) -> None:
    """Where the closed form holds, it replaces an estimate and is exact."""
    result = contributions(model, TEXTS, source="previous_layer", n_probes=2)
    assert result.standard_error is None
    assert {plan.mode for plan in result.plans} == {"closed form"}


def test_estimated_previous_layer(model: TransformerLensModel) -> None:
    """Probes can be forced for the previous layer; they agree with the closed form."""
    options = {"source": "previous_layer", "layers": [0, 1]}
    found = contributions(model, [PAIR], n_probes=6, mode="probes", **options)
    expected = contributions(model, [PAIR], **options).values
    assert ((found.values - expected).abs() <= 8 * found.standard_error).float().mean() > 0.95


def test_plans(model: TransformerLensModel) -> None:
    """Each batch has a plan, and with the source "previous_layer" of hidden embeddings each layer."""
    modes = [plan.mode for plan in contributions(model, TEXTS, n_probes=2).plans]
    assert modes == ["probes"] * len(list(batches(LENGTHS)))
    layers = contributions(model, [PAIR], source="previous_layer", target="layer")
    assert [plan.mode for plan in layers.plans] == ["forward", "forward"]


# --- behaviour -----------------------------------------------------------------------------------


def test_show_progress(model: TransformerLensModel, capsys: pytest.CaptureFixture) -> None:
    """A progress bar is shown on stderr, if asked for."""
    contributions(model, TEXTS)
    assert capsys.readouterr() == ("", "")
    contributions(model, TEXTS, show_progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Contributions" in shown.err
    assert "100%" in shown.err


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=str)
@pytest.mark.parametrize("mode", ["forward", "reverse", "closed form"])
def test_under_no_grad(model: TransformerLensModel, context: type, mode: str) -> None:
    """Contributions are the same with gradients off, and are ordinary tensors."""
    options = {"source": "previous_layer", "mode": mode}
    with context():
        found = contributions(model, [PAIR], **options).values
    assert torch.equal(found, contributions(model, [PAIR], **options).values)
    assert not found.requires_grad


def test_precision_is_restored(model: TransformerLensModel) -> None:
    """A lower precision of float32 products lasts for the call alone."""
    before = torch.get_float32_matmul_precision()
    for source in SOURCES:
        contributions(model, [PAIR], source=source, precision="medium")
        assert torch.get_float32_matmul_precision() == before


# --- errors --------------------------------------------------------------------------------------

BAD_OPTIONS: list[tuple[dict, str]] = [
    ({"source": "hidden"}, "source must be 'input', 'previous_layer' or an int, got 'hidden'"),
    ({"source": None}, "source"),
    ({"source": 1.5}, "source must be 'input', 'previous_layer' or an int, got 1.5"),
    ({"source": -1}, "source -1 is no block: BertForMaskedLM has 0 to 1"),
    ({"source": 2}, "source 2 is no block"),
    ({"source": 1, "layers": [0, 1]}, "layer 0 comes before the source, block 1"),
    ({"target": "token"}, "target must be 'head' or 'layer', got 'token'"),
    ({"target": None}, "target"),
    ({"layers": [5]}, r"layers names \[5\], but BertForMaskedLM has layers 0 to 1"),
    ({"layers": 2}, "layers 0 to 1"),
    ({"layers": [0, -3]}, r"layers names \[-3\]"),
    ({"layers": []}, "layers names none"),
    ({"layers": "all"}, "layers"),
    ({"layers": 1.5}, "layers"),
    ({"norm": "l2"}, "norm must be one of 'frobenius', .*, got 'l2'"),
    ({"norm": None}, "norm must be one of"),
    ({"n_probes": 0}, "n_probes must be a positive int or None, got 0"),
    ({"n_probes": -3}, "n_probes must be"),
    ({"n_probes": 2.5}, "n_probes must be"),
    ({"tolerance": 0}, "tolerance must be positive or None, got 0"),
    ({"tolerance": -0.1}, "tolerance must be positive"),
    ({"tolerance": float("nan")}, "tolerance must be positive"),
    ({"n_probes": 1, "tolerance": 0.1}, "at least two"),
    ({"n_probes": 4, "norm": "spectral"}, "do not estimate a spectral norm"),
    ({"tolerance": 0.1, "norm": "spectral"}, "do not estimate a spectral norm"),
    ({"mode": "backward"}, "mode must be one of 'closed form', 'forward', 'reverse', 'probes'"),
    ({"mode": "backward", "source": "previous_layer"}, "mode must be one of"),
    ({"mode": "closed form"}, "the closed form gives the previous-layer contribution of heads"),
    ({"mode": "closed form", "source": 0, "layers": [0, 1]}, "closed form"),
    ({"mode": "closed form", "source": "previous_layer", "norm": "sum"}, "closed form"),
    ({"mode": "closed form", "source": "previous_layer", "target": "layer"}, "closed form"),
    ({"mode": "probes"}, "the mode 'probes' cannot give this result; valid here: forward, reverse"),
    ({"mode": "forward", "n_probes": 4}, "the mode 'forward' cannot give this result"),
    ({"mode": "reverse", "tolerance": 0.1}, "the mode 'reverse' cannot give this result"),
    ({"precision": "low"}, "precision must be one of"),
    ({"precision": "low", "source": "previous_layer"}, "precision must be one of"),
]


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS, ids=str)
def test_bad_options(model: TransformerLensModel, options: dict, words: str) -> None:
    """An argument out of its range is an error that names it and the valid values."""
    with pytest.raises((ValueError, TypeError), match=words):
        contributions(model, "a b", **options)


def test_the_plan_of_a_tolerance_is_what_was_done(minilm: TransformerLensModel) -> None:
    """The plan counts the probes that were used in the end."""
    result = contributions(minilm, "Go", layers=[1], tolerance=0.005)
    width = minilm.d_model
    (plan,) = result.plans
    assert plan.reason == f"{plan.probes} a token"
    assert 8 < plan.probes <= width
    few = contributions(minilm, "Go", layers=[1], n_probes=8).plans[0]
    assert plan.flops > few.flops


@pytest.mark.parametrize("options", [{"source": True}, {"layers": [True]}, {"seed": "x"}], ids=str)
def test_arguments_of_a_wrong_type(model: TransformerLensModel, options: dict) -> None:
    """A truth value is not a number, and a word is not a seed."""
    with pytest.raises(TypeError):
        contributions(model, "a b", **options)


WRONG_TYPES: list[tuple[dict, str]] = [
    ({"seed": 1.0}, "seed must be an int, got 1.0"),
    ({"seed": True}, "seed must be an int, got True"),
    ({"seed": None}, "seed must be an int, got None"),
    ({"n_probes": True}, "n_probes must be a positive int or None, got True"),
    ({"n_probes": "4"}, "n_probes must be a positive int or None, got '4'"),
    ({"tolerance": True}, "tolerance must be a positive number or None, got True"),
    ({"tolerance": "0.1"}, "tolerance must be a positive number or None, got '0.1'"),
    ({"multiply_by_inputs": "false"}, "multiply_by_inputs must be True or False, got 'false'"),
    ({"multiply_by_inputs": 1}, "multiply_by_inputs must be True or False, got 1"),
    ({"show_progress": "no"}, "show_progress must be True or False, got 'no'"),
    ({"truncation": "longest"}, "truncation must be True or False, got 'longest'"),
    ({"source": True}, "source must be 'input', 'previous_layer' or an int, got True"),
    ({"layers": True}, "layers must be an int, a list of ints or None, got True"),
    ({"layers": [0, "1"]}, "layers must be an int, a list of ints or None"),
    ({"layers": {0}}, "layers must be an int, a list of ints or None"),
    ({"direction": [1.0]}, "direction must be a tensor or None, got list"),
]
WRONG_VALUES: list[tuple[dict, str]] = [
    ({"layers": [1, 1]}, r"layers names \[1\] more than once: name each layer once"),
    ({"layers": [1, -1], "source": "previous_layer"}, r"layers names \[1\] more than once"),
    ({"norm": torch.ones(2)}, "norm must be one of"),
    ({"mode": ["forward"]}, "mode must be one of"),
]


@pytest.mark.parametrize(("options", "words"), WRONG_TYPES, ids=str)
def test_wrong_types(model: TransformerLensModel, options: dict, words: str) -> None:
    """The error names the argument, its valid types and the value."""
    with pytest.raises(TypeError, match=words):
        contributions(model, "a b", **options)


@pytest.mark.parametrize(("options", "words"), WRONG_VALUES, ids=str)
def test_wrong_values(model: TransformerLensModel, options: dict, words: str) -> None:
    """The error names the argument and the remedy."""
    with pytest.raises(ValueError, match=words):
        contributions(model, "a b", **options)


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"layers": np.int64(1)}, {"layers": 1}),
        ({"layers": np.arange(2)}, {"layers": [0, 1]}),
        ({"layers": torch.tensor([1, 0])}, {"layers": [1, 0]}),
        ({"layers": [np.int32(1)]}, {"layers": [1]}),
        ({"source": np.int64(1)}, {"source": 1}),
        ({"n_probes": np.int64(3)}, {"n_probes": 3}),
        ({"n_probes": 3, "seed": np.int64(5)}, {"n_probes": 3, "seed": 5}),
        ({"tolerance": np.float32(0.5)}, {"tolerance": 0.5}),
        ({"multiply_by_inputs": np.True_}, {"multiply_by_inputs": True}),
    ],
    ids=str,
)
def test_numbers_of_other_libraries(model: TransformerLensModel, options: dict, plain: dict) -> None:
    """They give the same as Python's numbers, and the same random numbers."""
    found, expected = contributions(model, "a b", **options), contributions(model, "a b", **plain)
    assert found.layers == expected.layers
    assert torch.equal(found.values, expected.values)


@pytest.mark.parametrize(
    "model", ["bert", None, tiny_bert(), WordTokenizer()], ids=lambda m: type(m).__name__
)
def test_other_objects_in_the_place_of_a_model(model: object) -> None:
    """The error names the function that makes an adapter."""
    with pytest.raises(TypeError, match=r"model must be an adapter, as captum_hta\.load_model returns it"):
        contributions(model, "a b")


@pytest.mark.parametrize(
    "options",
    [{}, {"n_probes": 3}, {"source": "previous_layer"}, {"mode": "reverse"}, {"target": "layer"}],
    ids=str,
)
@pytest.mark.parametrize("adapter", ["transformers", "transformer_lens"])
def test_default_device(adapter: str, options: dict) -> None:
    """The default device does not matter: everything is created on the model's device."""
    plain = tiny_bert()
    expected = contributions(load_model(plain, tokenizer=WordTokenizer(), adapter=adapter), TEXTS, **options)
    with torch.device("meta"):
        model = load_model(plain, tokenizer=WordTokenizer(), adapter=adapter)
        found = contributions(model, TEXTS, **options)
    assert found.values.device.type == "cpu"
    torch.testing.assert_close(found.values, expected.values, equal_nan=True)


# --- several questions about the same texts --------------------------------------------------------


def question(
    model: TransformerLensModel, source: str = "input", target: str = "head", **options: object
) -> Question:
    return Question(Query(**options), endpoints_of(model, source, target, None))


def test_directions_that_print_alike_are_kept_apart(model: TransformerLensModel) -> None:
    """PyTorch abbreviates long tensors when it prints them; directions are compared in full."""
    directions = torch.ones(2, 2, 2, 4, dtype=torch.float64)
    directions[1, ..., 1] = -2
    with printing_only_the_edges():
        assert repr(directions[0]) == repr(directions[1])
        asked = {
            name: question(model, direction=direction)
            for name, direction in zip("ab", directions, strict=True)
        }
        found = jointly(model, [model.encode(PAIR)], asked)
    for name, direction in zip("ab", directions, strict=True):
        expected = contributions(model, [PAIR], direction=direction)
        torch.testing.assert_close(found[name].values, expected.values, equal_nan=True)
    assert not found["a"].values.allclose(found["b"].values, equal_nan=True)


@contextmanager
def printing_only_the_edges() -> Iterator[None]:
    """Let PyTorch abbreviate even these small tensors when it prints them."""
    before = torch._tensor_str.PRINT_OPTS
    torch.set_printoptions(threshold=4, edgeitems=1)
    try:
        yield
    finally:
        torch.set_printoptions(threshold=before.threshold, edgeitems=before.edgeitems)


def test_targets_share_a_sweep(model: TransformerLensModel) -> None:
    """Questions that differ only in their targets are answered together; each part of the work has a name."""
    names: list[str] = []

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        names.append(name)
        yield

    asked = {"heads": {}, "hidden": {"target": "layer"}, "own": {"source": "previous_layer"}}
    questions = {name: question(model, **options) for name, options in asked.items()}
    found = jointly(model, [model.encode(PAIR)], questions, timed=timed)
    assert names == ["attention", "heads and hidden", "own"]
    for name, options in asked.items():
        expected = contributions(model, [PAIR], **options).values
        torch.testing.assert_close(found[name].values, expected, equal_nan=True)


def test_the_core_does_not_import_captum() -> None:
    """Captum imports matplotlib, scipy and pandas, which contributions do not need."""
    code = "import sys, captum_hta.computation, captum_hta.jacobian.engine; print('captum' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "forward"}, {"mode": "reverse"}, {"n_probes": 4}, {"tolerance": 0.1}, {"target": "layer"}],
    ids=str,
)
def test_activations_that_are_not_a_number(options: dict, source: str) -> None:
    """The error names the text whose activations are NaN, in every mode, also in a batch with others."""
    plain = tiny_bert()
    tokenizer = WordTokenizer()
    with torch.no_grad():
        plain.bert.embeddings.word_embeddings.weight[tokenizer("zebra")["input_ids"][1]] = torch.nan
    model = load_model(plain, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"text 2: .* are infinite or NaN: check the inputs and the weights"):
        contributions(model, ["a b c d", "b c", "zebra c", "c d"], source=source, **options)
    assert not contributions(model, ["b c", "c d"], source=source, **options).values.isnan().any()


@pytest.mark.parametrize("split", [None, 1])
@pytest.mark.parametrize("mode", [None, "reverse"])
def test_examples_that_are_not_a_number(mode: str | None, split: int | None) -> None:
    """The class names the example of the batch, however the batch is split."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    x = torch.randn(3, 5, 4)
    x[1, 2, 0] = torch.nan
    hta = HiddenTokenAttribution(model, model[1])
    with pytest.raises(ValueError, match="example 1: activations are infinite or NaN"):
        hta.attribute(x, mode=mode, internal_batch_size=split)
