"""Encoder-decoders, part by part, against plain autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as hf
from conftest import WordTokenizer
from families import PAIRS, STRUCTURED_PAIRS, tiny
from reference import jacobian, norms, shares
from torch import Tensor
from torch.nn import Module

from captum_hta import contributions, load_model
from captum_hta.integrations import TransformersModel

READ, SAID = "one two three four", "five six seven"
OTHER = ("eight nine", "ten")
AUDIO = torch.randn(2, 4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PARTS = ("encoder", "decoder", "cross")
ALL = PAIRS | STRUCTURED_PAIRS


class Words(WordTokenizer):
    """Without its special tokens, where that is asked for."""

    def __call__(self, text: str, pair: str | None = None, **options: object) -> dict[str, list[int]]:
        encoded = super().__call__(text, pair, **options)
        if not options.get("add_special_tokens", True):
            return {name: values[1:-1] for name, values in encoded.items()}
        return encoded


def adapter(name: str, part: str) -> TransformersModel:
    return TransformersModel(tiny(name), Words(60), part=part)


def read(name: str) -> str | Tensor:
    """What the encoder reads."""
    return AUDIO[0] if name == "Whisper" else READ


def other(name: str) -> tuple[str | Tensor, str]:
    """Another pair, shorter except for audio, which has one length."""
    return (AUDIO[1] if name == "Whisper" else OTHER[0], OTHER[1])


def text(name: str, part: str) -> str | Tensor | tuple[str | Tensor, str]:
    return read(name) if part == "encoder" else (read(name), SAID)


def inputs(name: str) -> dict[str, Tensor]:
    """The same as the model takes it."""
    if name == "Whisper":
        return {"input_features": AUDIO[:1]}
    return {"input_ids": torch.tensor([Words(60)(READ)["input_ids"]])}


def function(
    name: str, model: TransformersModel, part: str, source: str, layer: int, kind: str
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """From a source to a target of one part, by hooks of the test's own."""
    pair, base = ALL[name], model.model
    encoder, decoder = pair.blocks
    saying = [base.config.decoder_start_token_id, *Words(60)(SAID, add_special_tokens=False)["input_ids"]]
    target = base.get_submodule((encoder if part == "encoder" else decoder).format(layer))
    if part == "cross" and source == "previous_layer":
        start, at_input = base.get_submodule(pair.memory), False
    else:
        path = decoder if part == "decoder" else encoder
        start, at_input = base.get_submodule(path.format(0 if source == "input" else layer)), True
    seen: dict[str, Tensor] = {}

    def run(x: Tensor | None) -> Tensor:
        def enter(module: Module, args: tuple) -> tuple | None:
            seen["x"] = args[0]
            return None if x is None else (x, *args[1:])

        def leave(module: Module, args: tuple, out: Tensor | tuple) -> Tensor | tuple:
            seen["x"] = out if isinstance(out, Tensor) else out[0]
            if x is None:
                return out
            return x if isinstance(out, Tensor) else (x, *out[1:])

        def read(value: Tensor | tuple) -> None:
            seen["y"] = value if isinstance(value, Tensor) else value[0]

        handles = [start.register_forward_pre_hook(enter) if at_input else start.register_forward_hook(leave)]
        if kind == "head":
            projection = target.get_submodule(pair.projections[part])
            handles.append(projection.register_forward_pre_hook(lambda module, args: read(args[0])))
        else:
            handles.append(target.register_forward_hook(lambda module, args, out: read(out)))
        base(**inputs(name), decoder_input_ids=torch.tensor([saying]), use_cache=False)
        for handle in handles:
            handle.remove()
        return seen["y"]

    run(None)
    return run, seen["x"].detach()


@pytest.mark.parametrize("kind", ["head", "layer"])
@pytest.mark.parametrize("source", ["input", "previous_layer"])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ALL)
def test_contributions_equal_autograd(name: str, part: str, source: str, kind: str) -> None:
    """Queries of the decoder and keys of the encoder in cross attention."""
    model = adapter(name, part)
    result = contributions(model, [text(name, part)], source=source, target=kind)
    heads = 4 if kind == "head" else 1
    for layer in (0, model.num_layers - 1) if name in PAIRS else (model.num_layers - 1,):
        run, x = function(name, model, part, source, layer, kind)
        queries = len(result.tokens[0])
        expected = shares(norms(jacobian(run, x, range(queries)), heads, "frobenius"))
        expected = expected if kind == "head" else expected[0]
        close = {"rtol": 1e-9, "atol": 1e-12} if ALL[name].exact else {"rtol": 2e-5, "atol": 1e-7}
        torch.testing.assert_close(result.values[0, layer], expected, **close)
    if part == "decoder":
        assert not result.values.triu(1).any()


@pytest.mark.parametrize("name", ALL)
def test_cross_attention_is_not_square(name: str) -> None:
    """Its labels, its patterns, and several texts at once."""
    model = adapter(name, "cross")
    texts = [(read(name), SAID), other(name)]
    together = contributions(model, texts)
    assert together.values.shape == (2, 3, 4, 4, 6)
    assert [len(tokens) for tokens in together.tokens] == [4, 2]
    assert [len(keys) for keys in together.keys] == [6, 6 if name == "Whisper" else 4]
    close = {"rtol": 1e-8, "atol": 1e-12} if ALL[name].exact else {"rtol": 1e-4, "atol": 1e-6}
    for index, one in enumerate(texts):
        alone, among = contributions(model, [one]), together.example(index)
        torch.testing.assert_close(among.values, alone.values, **close)
        torch.testing.assert_close(among.attention, alone.attention, **close)
        torch.testing.assert_close(alone.values.sum(-1), torch.ones(1, 3, 4, len(alone.tokens[0])).double())
        torch.testing.assert_close(
            alone.attention.sum(-1), torch.ones(1, 3, 4, len(alone.tokens[0])).double()
        )


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", PAIRS)
def test_attention_is_the_models_own(name: str, part: str) -> None:
    """The patterns that the model hands out in eager attention."""
    model = adapter(name, part)
    result = contributions(model, [text(name, part)], source="previous_layer")
    plain = tiny(name)
    plain.set_attn_implementation("eager")
    words = Words(60)
    said = [plain.config.decoder_start_token_id, *words(SAID, add_special_tokens=False)["input_ids"]]
    with torch.no_grad():
        out = plain(
            **inputs(name), decoder_input_ids=torch.tensor([said]), output_attentions=True,
        )  # fmt: skip
    patterns = {
        "encoder": out.encoder_attentions, "decoder": out.decoder_attentions, "cross": out.cross_attentions
    }  # fmt: skip
    torch.testing.assert_close(result.attention[0], torch.cat(patterns[part]), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
@pytest.mark.parametrize("name", PAIRS)
def test_closed_form(name: str, part: str) -> None:
    """It holds in self-attention."""
    model = adapter(name, part)
    found = contributions(model, [text(name, part)], source="previous_layer")
    assert {plan.mode for plan in found.plans} == {"closed form"}
    general = contributions(model, [text(name, part)], source="previous_layer", mode="forward")
    close = {"rtol": 1e-9, "atol": 1e-12} if ALL[name].exact else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(found.values, general.values, **close)


def test_sources_within_the_encoder() -> None:
    """Cross attention may start from any block of the encoder, or from what it gives."""
    model = adapter("BART", "cross")
    first, last = (contributions(model, [(READ, SAID)], source=source).values for source in (0, 2))
    torch.testing.assert_close(first, contributions(model, [(READ, SAID)]).values)
    local = contributions(model, [(READ, SAID)], source="previous_layer").values
    torch.testing.assert_close(last, local)
    with pytest.raises(ValueError, match="source 3 is no block"):
        contributions(model, [(READ, SAID)], source=3)


def test_parts_are_named() -> None:
    """Not guessed; and models without parts take none."""
    for part in (None, "middle"):
        with pytest.raises(ValueError, match="name the part"):
            load_model(tiny("BART"), tokenizer=Words(60), part=part)
    with pytest.raises(ValueError, match="has no parts"):
        load_model(tiny("GPT-2"), tokenizer=Words(60), part="decoder")
    with pytest.raises(ValueError, match="knows no parts: leave out adapter"):
        load_model(tiny("BART"), tokenizer=Words(60), part="encoder", adapter="transformer_lens")
    assert load_model(tiny("BART"), tokenizer=Words(60), part="cross").key_layers == 2


def test_a_decoder_needs_a_pair() -> None:
    """The error names what is read."""
    with pytest.raises(TypeError, match=r"what the encoder reads .* and the text of the decoder, got 'one"):
        contributions(adapter("T5", "decoder"), "one two")


def test_probes_of_cross_attention() -> None:
    """Estimates with errors, and the same alone and among others."""
    model = adapter("T5", "cross")
    exact = contributions(model, [(READ, SAID)])
    found = contributions(model, [(READ, SAID), OTHER], n_probes=8)
    errors = found.example(0).standard_error
    within = (found.example(0).values - exact.values).abs() < 2 * errors + 1e-9
    assert within.double().mean() > 0.85
    alone = contributions(model, [(READ, SAID)], n_probes=8)
    torch.testing.assert_close(found.example(0).values, alone.values, rtol=1e-4, atol=1e-6)


def test_an_encoder_alone() -> None:
    """The class that holds no decoder needs no part, and gives the same."""
    whole = tiny("T5")
    alone = hf.T5EncoderModel(whole.config).double().eval()
    alone.load_state_dict(whole.state_dict(), strict=False)
    found = contributions(TransformersModel(alone, Words(60)), READ)
    expected = contributions(TransformersModel(whole, Words(60), part="encoder"), READ)
    torch.testing.assert_close(found.values, expected.values)
