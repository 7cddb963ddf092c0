"""What the adapters use of libraries beyond their public interface. A failure here names the change."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers as hf
from conftest import WordTokenizer, tiny_bert
from families import FAMILIES, tiny, tiny_with_head
from torch.nn import Module

from captum_hta.integrations import TransformersModel
from captum_hta.integrations.availability import has_bridges
from captum_hta.integrations.transformers import internals

needs_bridges = pytest.mark.skipif(not has_bridges(), reason="TransformerLens 4 has bridges")


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_tells_whose_attention_is_public(name: str) -> None:
    """Fails if ``PreTrainedModel._can_set_attn_implementation`` is gone or answers otherwise."""
    expected = name != "DeBERTa" and name != "DeBERTa v2"
    assert internals.uses_attention_interface(tiny(name)) == expected


def test_transformers_names_the_attention_implementation() -> None:
    """Fails if ``config._attn_implementation`` is gone or no longer what ``set_attn_implementation`` sets."""
    model = tiny("GPT-2")
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        assert internals.attention_implementation(model) == name


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.startswith("DeBERTa")])
def test_transformers_has_eager_attention_in_each_file(name: str) -> None:
    """Fails if ``eager_attention_forward`` of a modelling file is gone or returns no pattern."""
    attention = TransformersModel(tiny(name), WordTokenizer(60)).places[0].attention
    value = torch.randn(1, 4, 3, 4, dtype=torch.float64)
    attention.num_key_value_groups = 1
    out, pattern = internals.eager_attention(attention)(
        attention, value, value, value, None, scaling=0.5, dropout=0.0
    )
    assert pattern.shape == (1, 4, 3, 3)
    torch.testing.assert_close(out, (pattern @ value).transpose(1, 2))


def test_transformers_has_a_rotation_in_each_file() -> None:
    """Fails if ``apply_rotary_pos_emb`` is gone or no longer takes queries, keys, cosines and sines."""
    attention = tiny("Llama").layers[0].self_attn
    x, angle = torch.randn(1, 1, 3, 4), torch.zeros(1, 3, 4)
    query, key = internals.rotary_function(attention)(x, 2 * x, angle.cos(), angle.sin())
    torch.testing.assert_close((query, key), (x, 2 * x))


@needs_bridges
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.bridge])
def test_transformer_lens_builds_bridges(name: str) -> None:
    """Fails if ``SUPPORTED_ARCHITECTURES`` or ``build_bridge_from_module`` changes."""
    from captum_hta.integrations.transformer_lens.internals import build_bridge, wrapped_model

    model = tiny_with_head(name)
    bridge = build_bridge(model, "tiny", WordTokenizer())
    assert wrapped_model(bridge) is model
    assert (bridge.cfg.n_layers, bridge.cfg.n_heads) == (3, 4)


@needs_bridges
@pytest.mark.parametrize("cls", [hf.BertModel, hf.BertForSequenceClassification])
def test_transformer_lens_lets_its_layout_be_fitted(cls: type[Module]) -> None:
    """Fails if ``component_mapping`` or ``prepare_model`` of an architecture adapter changes."""
    from captum_hta.integrations.transformer_lens.internals import build_bridge, wrapped_module

    model = tiny_bert(cls)
    query = model.base_model.encoder.layer[0].attention.self.query
    bridge = build_bridge(model, "tiny", WordTokenizer())
    assert wrapped_module(bridge.blocks[0].attn.q) is query
    assert not hasattr(bridge, "unembed")


def test_libraries_are_imported_on_use() -> None:
    """Importing the package of adapters imports neither library; a model of transformers needs no other."""
    code = """
import sys
import captum_hta.integrations
assert not {"transformers", "transformer_lens"} & set(sys.modules)
from captum_hta import load_model
assert "transformer_lens" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
