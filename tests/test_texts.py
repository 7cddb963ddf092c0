"""Texts: how they may be passed, which are refused, and how they are cut."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import BatchEncoding

from captum_hta import contributions
from captum_hta.integrations import TransformerLensModel
from captum_hta.model.encoding import Encoding


@pytest.mark.parametrize("text", ["a b", ["a b"], ("a b",)])
def test_one_text(model: TransformerLensModel, text: object) -> None:
    """A single string is a list of one; a list may be a tuple."""
    assert contributions(model, text).values.shape == (1, 2, 2, 4, 4)


@pytest.mark.parametrize(
    "texts",
    [pd.Series(["a b", "c"]), np.array(["a b", "c"]), (text for text in ("a b", "c"))],
    ids=["series", "array", "generator"],
)
def test_iterables_of_texts(model: TransformerLensModel, texts: object) -> None:
    """Columns of tables, arrays and generators give their texts in order."""
    assert contributions(model, texts).tokens == contributions(model, ["a b", "c"]).tokens


def test_a_giant_text_is_not_tokenised(model: TransformerLensModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its characters are counted first, also with truncation."""
    monkeypatch.setattr(type(model), "encode", lambda *args: pytest.fail("tokenised"))
    for truncation in (False, True):
        with pytest.raises(ValueError, match=r"text 0 has 3000 characters.*at most 40 tokens.*cut"):
            contributions(model, "w " * 1500, truncation=truncation)


@pytest.mark.parametrize("pair", [("a b", "c"), ["a b", "c"]])
def test_pair_as_tuple_or_list(model: TransformerLensModel, pair: object) -> None:
    """A pair may be a tuple or, as JSON has it, a list."""
    expected = contributions(model, [("a b", "c")]).values
    assert torch.equal(contributions(model, [pair]).values, expected)


@pytest.mark.parametrize("words", [38, 36])
def test_longest_text(model: TransformerLensModel, words: int) -> None:
    """A text of as many tokens as the model reads is accepted."""
    assert contributions(model, "w " * words, n_probes=2).values.shape[-1] == words + 2


def test_long_text(minilm) -> None:
    """A longer one is an error that names length and limit, or is cut to the first 512 tokens."""
    text = "word " * 600
    with pytest.raises(ValueError, match=r"text 1 has 602 tokens.*at most 512.*truncation=True"):
        contributions(minilm, ["short", text])
    result = contributions(minilm, ["short", text], source="previous_layer", layers=[0], truncation=True)
    assert result.cut == [0, 90]
    assert len(result.tokens[1]) == 512
    assert result.tokens[1][-1] == "[SEP]"
    assert contributions(minilm, "short", source="previous_layer").cut is None


BAD_TEXTS: list[tuple[object, type[Exception], str]] = [
    ([], ValueError, "no text"),
    ((), ValueError, "no text"),
    ([5.0], TypeError, "text 0 must be a string, a pair of strings, token ids or chat messages, got 5.0"),
    ([True], TypeError, "text 0 must be a string"),
    (["a", None], TypeError, "text 1"),
    (["a", b"b"], TypeError, "text 1"),
    ([("a",)], TypeError, "text 0"),
    ([("a", "b", "c")], TypeError, "text 0"),
    ([("a", 1)], TypeError, "text 0"),
    (5, TypeError, "string"),
    ({"premise": "a", "hypothesis": "b"}, TypeError, "got a dict, which is a table.*pass its rows"),
    (
        BatchEncoding({"input_ids": [[1, 2]]}),
        TypeError,
        "got a BatchEncoding.*pass its rows",
    ),
    (pd.DataFrame({"premise": ["a"], "hypothesis": ["b"]}), TypeError, "got a DataFrame.*pass its rows"),
    ({"a", "b"}, TypeError, "must be a list.*got a set"),
    (b"a b", TypeError, "must be a list.*got a bytes"),
    (bytearray(b"a"), TypeError, "must be a list.*got a bytearray"),
    ([{"text": "a"}], TypeError, "text 0 must be a string"),
    (None, TypeError, "string"),
    ("w " * 39, ValueError, "text 0 has 41 tokens, but BertForMaskedLM reads at most 40"),
    (["w", "w " * 60], ValueError, "text 1 has 62 tokens, but .* reads at most 40"),
    ([("w " * 30, "w " * 30)], ValueError, "text 0 has 63 tokens, but .* reads at most 40"),
]


@pytest.mark.parametrize(("texts", "error", "words"), BAD_TEXTS)
def test_bad_texts(
    model: TransformerLensModel,
    texts: object,
    error: type[Exception],
    words: str,
) -> None:
    """Empty lists, wrong types and texts that are too long are errors that name the text and the limit."""
    with pytest.raises(error, match=words):
        contributions(model, texts)


def test_text_without_token(model: TransformerLensModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty text has no token without special tokens, which is an error."""
    right = model.encode
    monkeypatch.setattr(model, "encode", lambda text: right(text) if text else Encoding([], [], []))
    with pytest.raises(ValueError, match="text 1 has no token"):
        contributions(model, ["a", ""])
