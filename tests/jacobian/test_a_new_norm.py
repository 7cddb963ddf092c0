"""How a norm is added, step by step as in CONTRIBUTING, with one of each kind as the examples."""

from __future__ import annotations

import pytest
import reference
import torch
from conftest import WordTokenizer, tiny_bert
from torch import Tensor

import captum_hta
from captum_hta import HiddenTokenAttribution, contributions, load_model
from captum_hta.cli import options
from captum_hta.jacobian import norms
from captum_hta.jacobian.norms import NORMS, Norm


def squared_nuclear_norm(gram: Tensor) -> Tensor:
    """The square of the sum of singular values, from a Gram matrix ``[..., d_head, d_head]``."""
    return torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().sum(-1).square()


def alternating(numbers: Tensor) -> Tensor:
    """Weights +1, -1, +1, ... of the components of a head."""
    return 1 - 2 * (numbers % 2)


# 1. An entry in NORMS of captum_hta/jacobian/norms.py: of_gram, if the norm needs the whole Jacobian, or the
#    weights of a sum of components, whose gradient adds up over tangents.
NEW = {"nuclear": Norm(of_gram=squared_nuclear_norm), "alternating": Norm(weights=alternating)}


# 2. Its definition in norms() of tests/reference.py.
def new_reference(blocks: Tensor, norm: str) -> Tensor:
    """``[head, query, key]`` from a Jacobian ``[query, component, key, width]`` of two heads."""
    split = blocks.unflatten(1, (2, -1)).permute(1, 0, 3, 2, 4)
    if norm == "nuclear":
        return torch.linalg.svdvals(split).sum(-1)
    return (split[..., ::2, :].sum(-2) - split[..., 1::2, :].sum(-2)).norm(dim=-1)


# 3. Its name in the docstrings of captum_hta/attribution.py, captum_hta/computation.py and
#    captum_hta/jacobian/forecast.py, in the help of captum_hta/cli/options.py, and in README.md.


@pytest.mark.parametrize(
    ("norm", "options"),
    [
        ("nuclear", {"mode": "forward"}),
        ("nuclear", {"mode": "reverse"}),
        ("alternating", {"mode": "forward"}),
        ("alternating", {"mode": "reverse"}),
        ("alternating", {"n_probes": 1000}),
    ],
)
def test_a_norm_that_is_added(norm: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """All modes give the new norm; as many probes as a token has components are exact."""
    monkeypatch.setitem(norms.NORMS, norm, NEW[norm])
    model = load_model(tiny_bert(), tokenizer=WordTokenizer(), adapter="transformers")
    embeddings, attention = model.base.embeddings, model.base.encoder.layer[0].attention.self
    x = embeddings(torch.tensor([model.encode("a b c").ids])).detach()
    blocks = reference.jacobian(lambda x: attention(x)[0], x, range(x.shape[1]))
    expected = reference.shares(new_reference(blocks, norm))
    found = contributions(model, "a b c", layers=0, norm=norm, **options).values[0, 0]
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_what_probes_cannot_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of the whole Jacobian are refused."""
    monkeypatch.setitem(norms.NORMS, "nuclear", NEW["nuclear"])
    model = load_model(tiny_bert(), tokenizer=WordTokenizer())
    with pytest.raises(ValueError, match="probes do not estimate a nuclear norm"):
        contributions(model, "a b c", norm="nuclear", n_probes=4)


@pytest.mark.parametrize("norm", NORMS)
def test_where_norms_are_named(norm: str) -> None:
    """Docstrings and help name every norm."""
    for described in (HiddenTokenAttribution, contributions, captum_hta.forecast):
        assert f'``"{norm}"``' in str(described.__doc__)
    (option,) = options.Norm.__metadata__
    assert norm in option.help
