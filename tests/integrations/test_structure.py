"""Models that are loaded by their structure alone, against plain autograd."""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import WordTokenizer
from families import SINGLE, STRUCTURED, STRUCTURED_IMAGES, tiny
from structured import check_contributions, check_structure
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


@pytest.mark.parametrize("source", ["input", "previous_layer"])
@pytest.mark.parametrize("name", SINGLE)
def test_contributions_equal_autograd(name: str, source: str) -> None:
    """Heads and hidden embeddings of the last block with attention."""
    text = texts(name)[0]
    model = adapter(name)
    read = torch.tensor([model.encode(text).ids]) if name in STRUCTURED else text[None]
    check_contributions(SINGLE[name], model, plain(name), text, read, source)


@pytest.mark.slow
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
    check_structure(SINGLE[name], adapter(name))
