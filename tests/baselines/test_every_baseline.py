"""Every baseline on every kind of model gives numbers, or the reason why it is not defined."""

from __future__ import annotations

import pytest
import torch
import transformers
from conftest import WordTokenizer, tiny_bert
from families import FAMILIES, IMAGES, PAIRS, tiny

from captum_hta import baselines, contributions
from captum_hta.baselines.logits import LogitBaseline
from captum_hta.evaluation import Noise, ZeroVector, faithfulness, methods_for
from captum_hta.integrations import TransformersModel

METHODS = [getattr(baselines, name) for name in baselines.__all__ if name != "Baseline"]
CASES = [(name, None) for name in FAMILIES | IMAGES]
CASES += [(name, part) for name in PAIRS for part in ("encoder", "decoder", "cross")]


def adapter(name: str, part: str | None) -> tuple[TransformersModel, object]:
    """The adapter of a tiny model of a family, or of one part, and a text for it."""
    reads_texts = name not in IMAGES and (name, part) != ("Whisper", "encoder")
    tokenizer = WordTokenizer(60) if reads_texts else None
    model = TransformersModel(tiny(name), tokenizer, part=part)
    if name in IMAGES:
        return model, torch.rand(model.reader.shape)
    reader = getattr(model.reader, "context", model.reader)
    read = torch.rand(reader.shape) if name == "Whisper" else "one two three"
    return model, (read if part in (None, "encoder") else (read, "four five"))


@pytest.mark.parametrize(("name", "part"), CASES)
def test_numbers_or_a_reason(name: str, part: str | None) -> None:
    """Results have the named axes and finite numbers; refusals say why or what to do."""
    model, text = adapter(name, part)
    given, reasons = [], []
    for method in METHODS:
        one = method(model)
        try:
            values = one.attribute([text])
        except ValueError as error:
            reasons.append(str(error))
            continue
        assert values.dim() == len(one.axes.split())
        assert values.isfinite().any()
        given.append(method)
    assert all(len(reason) > 30 for reason in reasons)
    assert baselines.AttentionWeights in given
    if not name.startswith("DeBERTa"):
        assert baselines.ValueWeightedNorm in given
    if part != "cross":
        assert baselines.AttentionRollout in given


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", ["query", "intermediate.dense", "cls.predictions.decoder"])
def test_quantised_models_have_no_gradients(name: str) -> None:
    """Attributions of a logit would lack every path through a quantised layer, be it one of many."""
    model = tiny_bert().float()
    quantised = torch.ao.quantization.quantize_dynamic(
        model, {inner for inner, _ in model.named_modules() if inner.endswith(name)}
    )
    loaded = TransformersModel(quantised, WordTokenizer())
    for method in METHODS:
        if issubclass(method, LogitBaseline):
            with pytest.raises(ValueError, match="the derivative is lost in the operator quantized::linear"):
                method(loaded).attribute("one two three")
    assert baselines.AttentionRollout(loaded).attribute("one two three").isfinite().all()


@pytest.mark.parametrize(("name", "part"), [case for case in CASES if case[1] != "cross"])
def test_faithfulness_of_every_model(name: str, part: str | None) -> None:
    """Changes of source vectors reach the heads, and exact input contributions rank small ones well."""
    model, text = adapter(name, part)
    methods, _ = methods_for(model, text, n_probes=None, with_logits=False)
    found = faithfulness(model, [text], methods[:3], [Noise(1e-4, samples=40), ZeroVector()], layers=[-1])
    table = found.summary().set_index(["intervention", "method"])["spearman"]
    assert table["noise 0.0001", "HTA, input"] > 0.6
    assert table.notna().all()


def test_the_default_device_does_not_matter() -> None:
    """Another default device than the model's breaks no method or comparison, and changes no number."""
    decoder = transformers.GPT2LMHeadModel(tiny("GPT-2").config).double().eval()
    model, texts = TransformersModel(decoder, WordTokenizer(60)), ["one two three", "four five"]

    def found() -> list[torch.Tensor]:
        values = [method(model).attribute(texts) for method in METHODS]
        methods, _ = methods_for(model, texts[0], n_probes=2)
        ranks = faithfulness(model, texts, methods).summary()["spearman"]
        estimate = contributions(model, texts, n_probes=4)
        return [*values, torch.tensor(ranks.to_numpy(), device="cpu"), estimate.values, *estimate.interval()]

    expected = found()
    with torch.device("meta"):
        shifted = found()
    assert all(one.allclose(other, equal_nan=True) for one, other in zip(shifted, expected, strict=True))
