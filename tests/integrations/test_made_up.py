"""Models of no family: they load by their structure, or are refused with the lines that name modules."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
import transformers as hf
from conftest import WordTokenizer
from made_up import MadeUpModel, made_up
from reference import jacobian, norms, shares
from tokenizing import byte_level
from torch import Tensor

from captum_hta import cli, contributions, load_model
from captum_hta.integrations.transformers.families import OVERRIDES

TEXT, OTHER = "one two three", "five"


def tokenizer() -> WordTokenizer:
    return WordTokenizer(60)


def by_autograd(model: MadeUpModel, ids: Tensor, source: int, layer: int) -> Tensor:
    """Shares of the tokens that enter a block in the heads of another, ``[head, query, key]``."""

    def enter(x: Tensor) -> Tensor:
        for step in model.steps[source:layer]:
            x = step(x)
        heads: list[Tensor] = []
        handle = model.steps[layer].mix.out.register_forward_pre_hook(
            lambda module, args: heads.append(args[0])
        )
        model.steps[layer](x)
        handle.remove()
        return heads[0]

    x = model.words(ids) + model.places(torch.arange(ids.shape[1]))
    for step in model.steps[:source]:
        x = step(x)
    return shares(norms(jacobian(enter, x, range(ids.shape[1])), 4, "frobenius"))


@pytest.mark.parametrize("source", ["input", "previous_layer"])
@pytest.mark.parametrize("kind", ["fused", "interface", "both sides"])
def test_a_class_of_the_user(kind: str, source: str) -> None:
    """It loads without an entry anywhere, though it reads no mask; texts of a batch are as they are alone.

    The eager attention of the file of ``"interface"`` is not causal, as its fused attention is.
    """
    plain = made_up(kind)
    model = load_model(plain, tokenizer())
    assert "made_up" not in OVERRIDES
    assert model.size.causal == (kind != "both sides")
    ids = torch.tensor([model.encode(TEXT).ids])
    found = contributions(model, [TEXT, OTHER], source=source)
    expected = by_autograd(plain, ids, 0 if source == "input" else 1, 1)
    torch.testing.assert_close(found.example(0).values[0, 1], expected, rtol=1e-9, atol=1e-12)
    for index, text in enumerate((TEXT, OTHER)):
        alone = contributions(model, text, source=source)
        torch.testing.assert_close(found.example(index).values, alone.values, rtol=1e-9, atol=1e-12)


def test_padding_that_is_seen() -> None:
    """Without a mask, later tokens of a batch would change a text: texts of other lengths are read apart."""
    model = load_model(made_up("both sides"), tokenizer())
    assert not model.hides_padding
    with pytest.raises(ValueError, match="call it once for each"):
        model.batch([model.encode(TEXT), model.encode(OTHER)])
    assert load_model(made_up(), tokenizer()).hides_padding


def test_refused_with_the_lines_by_hand() -> None:
    """Blocks that read the words beside the hidden embeddings: the lines that the error gives are right."""
    model = made_up("bypass")
    with pytest.raises(ValueError, match="blocks read more of a text than the model's input") as caught:
        load_model(model, tokenizer())
    message = str(caught.value)
    assert "attention in 2 places, first in steps.0.mix (4 heads, 6 queries, 6 keys)" in message
    names: dict[str, object] = {"model": model, "inputs": torch.tensor([[3, 4, 5]])}
    exec(textwrap.dedent(message[message.index("    from captum_hta") :]), names)
    found = names["contributions"]
    assert isinstance(found, Tensor)
    assert found.shape == (1, 4, 3, 3)
    assert "model.steps[1].mix.out, source_layer=model.words, num_heads=4" in message


@pytest.mark.parametrize("kind", ["mixed", "mixed interface"])
def test_heads_that_are_mixed(kind: str) -> None:
    """No module reads the pattern times the values, or these times a gate."""
    with pytest.raises(ValueError, match="no module reads the outputs of the heads that Mixer computes"):
        load_model(made_up(kind), tokenizer())


def test_doctor_prints_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was found, what did not fit and the lines by hand, without a traceback."""
    words = byte_level(pad="<|end|>")
    config = hf.XLNetConfig(d_model=16, n_layer=1, n_head=4, vocab_size=len(words), d_inner=32)
    hf.XLNetModel(config).save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    assert cli.main(["doctor", str(tmp_path)]) != 0
    shown = " ".join(capsys.readouterr().err.split())
    assert "no module reads the outputs of the heads" in shown
    assert "from captum_hta import HiddenTokenAttribution" in shown
    assert "Traceback" not in shown


def test_a_part_for_each_medium() -> None:
    """CLIP is two models: each is named by what it reads, and gives what it does alone."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16}
    config = hf.CLIPConfig(
        text_config=sizes | {"vocab_size": 60}, vision_config=sizes | {"image_size": 8, "patch_size": 4}
    )
    model = hf.CLIPModel(config).eval()
    with pytest.raises(ValueError, match="name one, --part or part='text' or 'image'"):
        load_model(model, tokenizer())
    found = contributions(load_model(model, tokenizer(), part="text"), TEXT)
    torch.testing.assert_close(
        found.values, contributions(load_model(model.text_model, tokenizer()), TEXT).values
    )
    assert load_model(model, part="image").encode(torch.zeros(3, 8, 8)).tokens[:2] == ["[CLS]", "(0, 0)"]
    with pytest.raises(ValueError, match="has no part 'audio'"):
        load_model(model, part="audio")
