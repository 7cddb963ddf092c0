"""Models that are loaded by their structure alone, against plain autograd."""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import WordTokenizer
from families import SINGLE, STRUCTURED, STRUCTURED_IMAGES, Family, tiny
from reference import norms, shares
from torch import Tensor
from torch.nn import Module

from captum_hta import contributions
from captum_hta.integrations import TransformersModel

TEXT, OTHER = "one two", "five"


@functools.cache
def adapter(name: str) -> TransformersModel:
    return TransformersModel(tiny(name), WordTokenizer(60) if name in STRUCTURED else None)


def contents(name: str) -> list[Tensor]:
    """Two images or two pieces of audio."""
    shape = (3, 12, 12) if name in STRUCTURED_IMAGES else (55,)
    return list(torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


def texts(name: str) -> list[str] | list[Tensor]:
    return [TEXT, OTHER] if name in STRUCTURED else contents(name)


@functools.cache
def plain(name: str) -> Module:
    """The same model, with experts that are computed one by one."""
    model = tiny(name)
    if "grouped_mm" in model.get_experts_implementation().values():
        model.set_experts_implementation("eager")
    return model


def by_autograd(family: Family, model: Module, ids: Tensor, source: int, layer: int) -> dict[str, Tensor]:
    """Jacobians ``[query, component, key, width]`` of the heads and the output of a block, by hooks of the
    test's own, from one graph.
    """
    blocks = [model.get_submodule(family.block.format(number)) for number in (source, layer)]
    seen: dict[str, Tensor] = {}

    def enter(module: Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        x = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_()
        seen["x"] = x
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

    def leave(module: Module, args: tuple, out: Tensor | tuple) -> None:
        seen["layer"] = out if isinstance(out, Tensor) else out[0]

    projection = blocks[1].get_submodule(family.projection)
    handles = [
        blocks[0].register_forward_pre_hook(enter, with_kwargs=True),
        projection.register_forward_pre_hook(lambda module, args: seen.update(head=args[0])),
        blocks[1].register_forward_hook(leave),
    ]
    model(ids)
    for handle in handles:
        handle.remove()
    return {kind: rows_of(seen[kind].flatten(2), seen["x"]) for kind in ("head", "layer")}


def rows_of(y: Tensor, x: Tensor) -> Tensor:
    rows = [torch.autograd.grad(one, x, retain_graph=True)[0][0] for one in y[0].flatten()]
    return torch.stack(rows).unflatten(0, y.shape[1:])


@pytest.mark.parametrize("source", ["input", "previous_layer"])
@pytest.mark.parametrize("name", SINGLE)
def test_contributions_equal_autograd(name: str, source: str) -> None:
    """Heads and hidden embeddings of the last block with attention."""
    family, model = SINGLE[name], adapter(name)
    assert (model.num_layers, model.num_heads) == (len(family.layers), 4)
    text = texts(name)[0]
    ids = torch.tensor([model.encode(text).ids]) if name in STRUCTURED else text[None]
    layer = family.layers[-1]
    start = family.start if source == "input" else layer
    expected = by_autograd(family, plain(name), ids, start, layer)
    close = {"rtol": 1e-9, "atol": 1e-12} if family.exact else {"rtol": 2e-5, "atol": 1e-7}
    for kind, heads in (("head", 4), ("layer", 1)):
        found = contributions(model, [text], source=source, target=kind, layers=[-1]).values[0, 0]
        wanted = shares(norms(expected[kind], heads, "frobenius"))
        torch.testing.assert_close(found, wanted if heads > 1 else wanted[0], **close)
        assert not family.causal or not found.triu(1).any()


@pytest.mark.parametrize("source", ["input", "previous_layer"])
@pytest.mark.parametrize("name", SINGLE)
def test_batches_equal_single_texts(name: str, source: str) -> None:
    """Padding changes nothing."""
    family, model = SINGLE[name], adapter(name)
    together = contributions(model, texts(name), source=source, layers=[-1])
    close = {"rtol": 1e-8, "atol": 1e-12} if family.exact else {"rtol": 1e-4, "atol": 1e-6}
    for index, text in enumerate(texts(name)):
        alone = contributions(model, [text], source=source, layers=[-1])
        torch.testing.assert_close(together.example(index).values, alone.values, **close)
        torch.testing.assert_close(together.example(index).attention, alone.attention, **close)


@pytest.mark.parametrize("name", SINGLE)
def test_what_is_found(name: str) -> None:
    """Blocks and projections as the table names them, whether queries see later keys, and the closed form."""
    family, model = SINGLE[name], adapter(name)
    paths = {module: path for path, module in model.model.named_modules()}
    blocks = [family.block.format(number) for number in family.layers]
    assert [paths[place.block] for place in model.places] == blocks
    projections = [f"{block}.{family.projection}" for block in blocks]
    assert [paths[place.projection] for place in model.places] == projections
    assert model.size.causal == family.causal
    assert model.size.closed_form == family.closed_form
