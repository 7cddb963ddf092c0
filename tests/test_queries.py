"""Contributions to some queries equal the rows of contributions to all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import TransformerLensModel, WordTokenizer
from families import tiny

from captum_hta import Contributions, compare, contributions
from captum_hta.baselines import AttentionWeights
from captum_hta.integrations import TransformersModel

TEXTS = ["one two three", "four five six seven eight", ("nine ten", "one"), "two"]
SELECTORS: dict[str, Any] = {
    "first": 0,
    "last": -1,
    "slice": slice(1, None, 2),
    "negative slice": slice(-2, None),
    "list": [2, 0],
    "negative list": [-1, -2],
    "tensor": torch.tensor([1, -1]),
}
QUESTIONS: dict[str, dict[str, Any]] = {
    "input": {},
    "closed form": {"source": "previous_layer"},
    "reverse": {"mode": "reverse"},
    "forward": {"source": "previous_layer", "mode": "forward"},
    "hidden": {"target": "layer"},
    "block": {"source": 1},
    "spectral": {"norm": "spectral"},
    "sum": {"norm": "sum"},
    "inputs": {"multiply_by_inputs": True},
    "inputs in closed form": {"multiply_by_inputs": True, "source": "previous_layer"},
    "probes": {"n_probes": 3},
    "direction": {"direction": torch.arange(1.0, 5.0).double()},
}


def rows(whole: Contributions, part: Contributions, tolerance: float = 1e-9) -> None:
    """Check the rows of every text, without padding."""
    assert part.queries is not None
    assert part.tokens == whole.tokens
    for row, positions in enumerate(part.queries):
        one, other = whole.example(row), part.example(row)
        assert other.values.shape[-2:] == (len(positions), one.values.shape[-1])
        torch.testing.assert_close(other.values, one.values[..., positions, :], rtol=0, atol=tolerance)
        torch.testing.assert_close(other.attention, one.attention[..., positions, :])
        if one.standard_error is not None:
            torch.testing.assert_close(other.standard_error, one.standard_error[..., positions, :])
        assert part.values[row, ..., len(positions) :, :].isnan().all()


@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
@pytest.mark.parametrize("options", QUESTIONS.values(), ids=QUESTIONS)
def test_queries_are_rows(model: TransformerLensModel, options: dict, selector: Any) -> None:
    """In every mode, norm, source and target; negative positions are counted from the end of each text."""
    part = contributions(model, TEXTS, queries=selector, **options)
    rows(contributions(model, TEXTS, **options), part)


@pytest.mark.parametrize("name", ["GPT-2", "Mistral", "Gemma 2", "ALBERT", "DeBERTa"])
@pytest.mark.parametrize("options", [{}, {"source": "previous_layer"}, {"target": "layer"}], ids=str)
def test_queries_of_families(name: str, options: dict[str, Any]) -> None:
    """With windows, grouped heads, shared blocks and without a closed form, in a batch and alone."""
    model = TransformersModel(tiny(name), WordTokenizer(60))
    texts = ["one two three four five", "six seven"]
    tolerance = 1e-9 if name in ("GPT-2", "ALBERT") else 2e-5  # norms of the others are in float32
    whole = contributions(model, texts, **options)
    for selector in (-1, [0, 2]):
        part = contributions(model, texts, queries=selector, **options)
        rows(whole, part, tolerance)
    alone = contributions(model, texts[1], queries=[0, 2], **options).values
    torch.testing.assert_close(part.example(1).values, alone, rtol=0, atol=tolerance)


def test_queries_of_cross_attention() -> None:
    """Queries are tokens of the decoder."""
    model = TransformersModel(tiny("BART"), WordTokenizer(60), part="cross")
    pairs = [("one two three four", "five six"), ("one", "two three")]
    rows(contributions(model, pairs), contributions(model, pairs, queries=-1))


def test_one_query_takes_less_work() -> None:
    """The plan counts what one query of a deep layer costs, and picks the reverse mode."""
    model = TransformersModel(tiny("Llama"), WordTokenizer(60))
    text = " ".join(f"w{number}" for number in range(30))
    whole, part = (contributions(model, text, layers=-1, queries=asked).plans[0] for asked in (None, -1))
    assert (whole.mode, part.mode) == ("forward", "reverse")


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        (4, r"text 3 has 3 tokens: queries names \[4\], but the target has positions 0 to 2"),
        ([0, -4], r"text 3 has 3 tokens: queries names \[-4\]"),
        (slice(4, 5), "text 3 has 3 tokens: queries .* is empty"),
        ([], "text 0 has 5 tokens: queries names no positions"),
    ],
)
def test_queries_outside_a_text(model: TransformerLensModel, selector: Any, message: str) -> None:
    """The error names the text, before the model runs."""
    with pytest.raises(ValueError, match=message):
        contributions(model, TEXTS, queries=selector)


@pytest.mark.parametrize("selector", ["one", 1.0, True, [True]])
def test_queries_of_a_wrong_type(model: TransformerLensModel, selector: Any) -> None:
    """The error names the argument."""
    with pytest.raises(TypeError, match="queries names query positions"):
        contributions(model, TEXTS, queries=selector)


def test_what_needs_all_queries(model: TransformerLensModel) -> None:
    """Words do, since the queries of a word are averaged; results of other queries are not compared."""
    last, first = (contributions(model, TEXTS, queries=query) for query in (-1, 0))
    with pytest.raises(ValueError, match="leave out queries"):
        last.to_words()
    with pytest.raises(ValueError, match="other texts, queries or layers"):
        compare(last, {"first": first})
    with pytest.raises(ValueError, match="for the same texts, or without the head axis"):
        compare(last, {"attention": AttentionWeights(model).attribute(TEXTS)})
    assert (compare(last, {"itself": last})["pearson"].dropna() > 0.999).all()
    assert "queries=[[4], [6], [5], [2]]" in repr(last)
