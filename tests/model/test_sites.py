"""Sites: which tensor of which call is read or replaced, and that no hook stays behind."""

from __future__ import annotations

import threading
from collections import namedtuple

import pytest
import torch
from torch import Tensor, nn

from captum_hta.model.sites import Site, observed, only_tensor, replaced

Pair = namedtuple("Pair", ["hidden", "ids"])


class Twice(nn.Module):
    """Runs one module twice, another with a keyword argument, and returns a named tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()
        self.end = nn.Identity()

    def forward(self, x: Tensor) -> Pair:
        x = self.scale(hidden_states=self.scale(x).hidden).hidden
        return Pair(self.end(x), torch.zeros(1, dtype=torch.long))


class Scale(nn.Module):
    """Doubles its input."""

    def forward(self, hidden_states: Tensor) -> Pair:
        return Pair(2 * hidden_states, torch.zeros(1, dtype=torch.long))


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_calls_inputs_and_items() -> None:
    """A site names one call, its output or input, and an item of a tuple."""
    model = Twice()
    sites = {
        "first": Site(model.scale, call=0),
        "second": Site(model.scale, call=1, item=0),
        "second input": Site(model.scale, at_input=True, call=1),
        "last input": Site(model.end, at_input=True),
    }
    found = observed(sites, lambda: model(torch.ones(1)))
    assert {name: value.item() for name, value in found.items()} == {
        "first": 2, "second": 4, "second input": 2, "last input": 4,
    }  # fmt: skip
    assert hooks_of(model) == 0


def test_forward_pass_ends_at_the_last_site() -> None:
    """What comes after the sites is not run; a site that is not reached is left out."""
    model, after, unused = Twice(), [], nn.Identity()
    model.end.register_forward_hook(lambda *args: after.append(args))
    assert observed({"scale": Site(model.scale, call=0)}, lambda: model(torch.ones(1))).keys() == {"scale"}
    assert not after
    assert observed({"end": model.end, "unused": unused}, lambda: model(torch.ones(1))).keys() == {"end"}


def test_replaced() -> None:
    """The tensor of a named tuple is changed within the context, in this thread."""
    model = Twice()
    with replaced(Site(model.scale, call=0), lambda x: x + 10):
        assert model(torch.ones(1)).hidden.item() == 24
    with replaced(Site(model.end, at_input=True), lambda x: -x):
        other: list[float] = []
        thread = threading.Thread(target=lambda: other.append(model(torch.ones(1)).hidden.item()))
        thread.start()
        thread.join()
        assert (model(torch.ones(1)).hidden.item(), other) == (-4, [4])
    assert hooks_of(model) == 0


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "out holds a NoneType, but one tensor is needed"),
        ((torch.ones(1), torch.ones(1)), "out holds 2 floating-point tensors"),
        ((torch.zeros(1, dtype=torch.long),), "out holds 0 floating-point tensors"),
        ({"hidden": torch.ones(1)}, "out holds a dict"),
    ],
    ids=["None", "two", "integers", "dict"],
)
def test_one_tensor_is_needed(value: object, words: str) -> None:
    """Where a module returns none or several, the error says which and what to use instead."""
    with pytest.raises(ValueError, match=words):
        only_tensor(value, "out")
