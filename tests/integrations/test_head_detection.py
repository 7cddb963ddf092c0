"""Scores of heads, compared with their definition and with TransformerLens's own."""

from __future__ import annotations

import pytest
import torch
from conftest import WordTokenizer
from families import tiny, tiny_with_head
from transformer_lens.head_detector import detect_head

from captum_hta import contributions, load_model
from captum_hta.integrations import TransformersModel, head_scores
from captum_hta.model.protocol import Model

TEXT = "a b c a b c"


@pytest.fixture(scope="module")
def gpt2() -> Model:
    """A tiny GPT-2 through its bridge."""
    return load_model(tiny_with_head("GPT-2"), tokenizer=WordTokenizer(60), adapter="transformer_lens")


def expected(values: torch.Tensor, ids: list[int], name: str) -> torch.Tensor:
    """``[layer, head]``: for each query with such keys their share, averaged; one query at a time."""
    shares = []
    for query, token in enumerate(ids):
        before = [key for key in range(query) if ids[key] == token]
        keys = {
            "previous token": [query - 1] if query else [],
            "duplicate token": before,
            "induction": [key + 1 for key in before],
            "sink": [0] if query else [],
        }[name]
        if keys:
            shares.append(values[..., query, keys].sum(-1))
    return torch.stack(shares).mean(0)


def test_scores_are_mean_shares(gpt2: Model) -> None:
    """Of attention and of both contributions, for each kind of head."""
    found = head_scores(gpt2, TEXT, n_probes=None)
    assert len(found) == 4 * 3 * 4
    local, total = (contributions(gpt2, TEXT, source=source) for source in ("previous_layer", "input"))
    maps = {"attention": total.attention, "previous_layer": local.values, "input": total.values}
    ids = gpt2.encode(TEXT).ids
    for name, rows in found.groupby("pattern"):
        assert list(rows["name"][:5]) == ["L0H0", "L0H1", "L0H2", "L0H3", "L1H0"]
        for kind, values in maps.items():
            scores = torch.tensor(rows[kind].to_numpy()).reshape(3, 4)
            torch.testing.assert_close(
                scores, expected(values[0], ids, name).to(scores), rtol=1e-5, atol=1e-7
            )


def test_attention_is_scored_as_transformer_lens_does(gpt2: Model) -> None:
    """Its own score counts the queries that have no previous token too."""
    found = head_scores(gpt2, TEXT, n_probes=2)
    ids = gpt2.encode(TEXT).ids
    _, cache = gpt2.bridge.run_with_cache(torch.tensor([ids]), remove_batch_dim=True)
    model = type("Tokens", (), {"cfg": gpt2.bridge.cfg, "to_tokens": lambda self, seq: torch.tensor([ids])})()
    theirs = detect_head(model, TEXT, "previous_token_head", cache=cache)
    ours = found[found["pattern"] == "previous token"]["attention"].to_numpy().reshape(3, 4)
    torch.testing.assert_close(torch.tensor(ours) * (len(ids) - 1) / len(ids), theirs.double())


def test_a_text_without_repetition(gpt2: Model) -> None:
    """There are no duplicates to take in, so there are no scores; the other scores have numbers."""
    found = head_scores(gpt2, "a b c", n_probes=2).set_index("pattern")[["attention", "input"]]
    assert found.loc[["duplicate token", "induction"]].isna().all(axis=None)
    assert found.loc[["previous token", "sink"]].notna().all(axis=None)


def test_other_attention_is_refused() -> None:
    """Cross attention is to another text."""
    model = TransformersModel(tiny("BART"), WordTokenizer(60), part="cross")
    with pytest.raises(ValueError, match="own text"):
        head_scores(model, ("a b", "c"))
