"""Circuits built by hand, whose known routes contributions find, also where attention does not show them."""

from __future__ import annotations

import torch
from circuits import (
    LETTERS,
    WIDTH,
    Block,
    circuit,
    induction,
    looking_back,
    silent,
    spaces,
    transcript,
)

from captum_hta import contributions, logit_direction


def row(result, query: int, layer: int = 0, head: int = 0) -> torch.Tensor:
    return result.values[0, layer, head, query]


def test_a_head_that_copies_the_previous_token() -> None:
    """All of its output comes from that token."""
    result = contributions(circuit(looking_back(1)), "ABCD")
    for query in range(1, 4):
        assert row(result, query)[query - 1] > 1 - 1e-9


def test_a_head_that_copies_the_first_token() -> None:
    """All of its output comes from that token."""
    result = contributions(circuit(looking_back(None)), "ABCD")
    assert (result.values[0, 0, 0, :, 0] > 1 - 1e-9).all()


def test_an_induction_head() -> None:
    """In "DABCA" the last A looks for what followed the first A, and reads that B."""
    model = circuit(looking_back(1), induction("letter"))
    result = contributions(model, "DABCA")
    assert result.attention[0, 1, 0, 4].argmax() == 2
    assert row(result, 4, layer=1)[2] > 1 - 1e-5


def test_attention_is_fooled_by_a_mixture() -> None:
    """The same head attends to B, but reads the A before it from what the first layer wrote."""
    model = circuit(looking_back(1), induction("written"))
    result = contributions(model, "DABCA")
    assert result.attention[0, 1, 0, 4].argmax() == 2
    assert row(result, 4, layer=1)[1] > 1 - 1e-5
    local = contributions(model, "DABCA", source="previous_layer")
    assert row(local, 4, layer=1)[2] > 1 - 1e-5


def test_attention_is_fooled_by_a_silent_token() -> None:
    """A token whose value stays zero contributes nothing, however much attention it gets."""
    model = silent()
    result = contributions(model, "ABCD")
    value = model.attention(model.batch([model.encode("ABCD")]))[1].value
    assert not value[0, 0, 0].any()
    assert abs(result.attention[0, 1, 0, 3, 0] - 0.9) < 1e-9
    expected = torch.tensor([0, 1 / 3, 1 / 3, 1 / 3]).double()
    torch.testing.assert_close(row(result, 3, layer=1), expected, rtol=0, atol=1e-5)


def test_attention_is_fooled_by_values_that_cancel() -> None:
    """Two heads attend to the first token and write opposite vectors, which cancel."""
    one = looking_back(None)
    both = Block(
        *(torch.cat([w, w]) for w in (one.query, one.key, one.value)), torch.cat([one.out, -one.out])
    )
    model = circuit(both)
    result = contributions(model, "ABCD", target="layer")
    assert (result.attention[0, 0, :, 3, 0] > 1 - 1e-9).all()
    assert result.values[0, 0, 3, 0] < 1e-9
    assert result.values[0, 0, 3, 3] > 1 - 1e-9


def test_a_head_along_the_logit_of_a_letter() -> None:
    """A head reads two tokens equally; along the logit of one letter only that token contributes."""
    s = spaces()
    nothing = torch.zeros(1, WIDTH, LETTERS)
    model = circuit(transcript(0.5), Block(nothing, nothing, s.written[None], s.letter.T[None]))
    whole = contributions(model, "BC", layers=[1])
    torch.testing.assert_close(whole.values[0, 0, 0, 1], torch.tensor([0.5, 0.5]).double())
    about_b = contributions(model, "BC", layers=[1], direction=logit_direction(model, 1))
    torch.testing.assert_close(about_b.values[0, 0, 0, 1], torch.tensor([1.0, 0]).double(), rtol=0, atol=1e-5)
    against = contributions(model, "BC", layers=[1], direction=logit_direction(model, 1, against=2))
    torch.testing.assert_close(against.values[0, 0, 0, 1], torch.tensor([0.5, 0.5]).double())
