"""The steps of CONTRIBUTING to add a model family, taken with a class that no library has."""

from __future__ import annotations

import families
import pytest
import torch
import transformers as hf
from conftest import WordTokenizer
from made_up import made_up
from structured import check_contributions, check_structure

from captum_hta import contributions, load_model
from captum_hta.integrations import TransformersModel
from captum_hta.integrations.transformers.families import OVERRIDES, Override


def registers() -> TransformersModel:
    """A vision model with two tokens between that of the class and the patches."""
    torch.manual_seed(0)
    config = hf.Dinov2WithRegistersConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=4,
        num_register_tokens=2,
    )  # fmt: skip
    return TransformersModel(hf.Dinov2WithRegistersModel(config).eval(), None)


# 1. Load it, as integrations/transformers/structure.py finds its structure.
def test_it_loads() -> None:
    """Without an entry in any table."""
    assert "made_up" not in OVERRIDES
    model = load_model(made_up(), tokenizer=WordTokenizer(60))
    assert contributions(model, "one two").values.shape == (1, 2, 4, 4, 4)


# 2. Tell what structure does not in integrations/transformers/families.py.
def test_an_override(monkeypatch: pytest.MonkeyPatch) -> None:
    """Structure tells how many tokens come before the patches, but not what they stand for."""
    image, labels = torch.zeros(3, 8, 8), ("[CLS]", "[ONE]", "[TWO]")
    assert registers().encode(image).tokens[:4] == ["[CLS]", "[REG 1]", "[REG 2]", "(0, 0)"]
    monkeypatch.setitem(OVERRIDES, "dinov2_with_registers", Override(labels=labels))
    assert registers().encode(image).tokens[:4] == [*labels, "(0, 0)"]


# 3. Add a tiny random model to the table in tests/families.py.
# 4. Replace the table in README.md by what tests/families.py prints.
def test_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of families run on it, and the table of the README has its row."""
    family = families.Family(made_up, "steps.{}", "mix.out", causal=True, closed_form=False, layers=(0, 1))
    for table in (families.STRUCTURED, families.SINGLE, families.EVERY):
        monkeypatch.setitem(table, "Made up", family)
    model = TransformersModel(families.tiny("Made up"), WordTokenizer(60))
    check_structure(family, model)
    read = torch.tensor([model.encode("one two").ids])
    for source in ("input", "previous_layer"):
        check_contributions(family, model, families.tiny("Made up"), "one two", read, source)
    assert "| Made up | structure | no | no | tiny random | decoder |" in families.table()
