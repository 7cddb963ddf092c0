"""How a norm is added, step by step as in CONTRIBUTING, with the nuclear norm as the example."""

from __future__ import annotations

import pytest
import reference
import torch
from conftest import WordTokenizer, tiny_bert
from torch import Tensor

from captum_hta import contributions, load_model
from captum_hta.jacobian import norms


# 1. A function from the Gram matrix of a Jacobian to the squared norm, in captum_hta/jacobian/norms.py.
def squared_nuclear_norm(gram: Tensor) -> Tensor:
    """The square of the sum of singular values, from a Gram matrix ``[..., d_head, d_head]``."""
    return torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().sum(-1).square()


# 2. An entry in NORMS of the same file: from then on the class, contributions() and the commands take it.
# 3. Its dense counterpart in norms() of tests/reference.py, with which tests compare every mode.
# 4. Its line in the docstrings of HiddenTokenAttribution and contributions().


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_a_norm_that_is_added(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes with whole Jacobians give the new norm; modes that cannot estimate it say so."""
    monkeypatch.setitem(norms.NORMS, "nuclear", squared_nuclear_norm)
    model = load_model(tiny_bert(), tokenizer=WordTokenizer(), adapter="transformers")
    embeddings, attention = model.base.embeddings, model.base.encoder.layer[0].attention.self
    x = embeddings(torch.tensor([model.encode("a b c").ids])).detach()
    blocks = reference.jacobian(lambda x: attention(x)[0], x, range(x.shape[1]))
    split = blocks.unflatten(1, (2, -1)).permute(1, 0, 3, 2, 4)
    expected = reference.shares(torch.linalg.svdvals(split).sum(-1))
    found = contributions(model, "a b c", layers=0, norm="nuclear", mode=mode).values[0, 0]
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    with pytest.raises(ValueError, match="probes do not estimate a nuclear norm"):
        contributions(model, "a b c", norm="nuclear", n_probes=4)
