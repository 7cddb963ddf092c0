"""Models of ``transformers`` of every family, against plain autograd."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch
import transformers as hf
from conftest import WordTokenizer
from families import FAMILIES, tiny, tiny_with_head
from reference import jacobian, norms, shares
from torch import Tensor
from torch.nn import Module

from captum_hta import HiddenTokenAttribution, contributions, load_model
from captum_hta.integrations import TransformerLensModel, TransformersModel

TEXT, OTHER = "one two three four", "five six"


def tokenizer() -> WordTokenizer:
    return WordTokenizer(60)


@functools.cache
def adapter(name: str) -> TransformersModel:
    return TransformersModel(tiny(name), tokenizer())


def passed(name: str, model: Module, ids: Tensor) -> Callable[..., tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Functions from what enters one block to a target of another, by hooks of the test's own."""
    family = FAMILIES[name]
    shared = "{}" not in family.block

    def block(layer: int) -> Module:
        return model.get_submodule(family.block.format(layer))

    def function(source: int, layer: int, kind: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        seen: dict[str, Tensor] = {}

        def run(x: Tensor | None) -> Tensor:
            count = {"enter": 0, "read": 0}

            def at(which: str, wanted: int) -> bool:
                count[which] += 1
                return not shared or count[which] == wanted + 1

            def enter(module: Module, args: tuple) -> tuple | None:
                if not at("enter", source):
                    return None
                seen["x"] = args[0]
                return None if x is None else (x, *args[1:])

            def read(value: object) -> None:
                if at("read", layer):
                    seen["y"] = value if isinstance(value, Tensor) else value[0]

            handles = [block(source).register_forward_pre_hook(enter)]
            if kind == "head":
                projection = block(layer).get_submodule(family.projection)
                handles.append(projection.register_forward_pre_hook(lambda module, args: read(args[0])))
            else:
                handles.append(block(layer).register_forward_hook(lambda module, args, out: read(out)))
            model(ids)
            for handle in handles:
                handle.remove()
            return seen["y"]

        run(None)
        return run, seen["x"].detach()

    return function


@pytest.mark.parametrize("kind", ["head", "layer"])
@pytest.mark.parametrize("source", ["input", "previous_layer"])
@pytest.mark.parametrize("name", FAMILIES)
def test_contributions_equal_autograd(name: str, source: str, kind: str) -> None:
    """Every layer, head and query; exactly zero above the diagonal of causal models."""
    family = FAMILIES[name]
    model = adapter(name)
    found = contributions(model, TEXT, source=source, target=kind).values[0]
    encoding = model.encode(TEXT)
    function = passed(name, model.model, torch.tensor([encoding.ids]))
    for layer in (0, 2):
        run, x = function(0 if source == "input" else layer, layer, kind)
        heads = 4 if kind == "head" else 1
        expected = shares(norms(jacobian(run, x, range(len(encoding))), heads, "frobenius"))
        expected = expected if kind == "head" else expected[0]
        rtol = 1e-9 if family.exact else 2e-5
        torch.testing.assert_close(found[layer], expected, rtol=rtol, atol=1e-12 if family.exact else 1e-7)
    if family.causal:
        assert not found.triu(1).any()


@pytest.mark.parametrize("name", FAMILIES)
def test_closed_form(name: str) -> None:
    """It is used where it should hold; elsewhere the general modes are used without a warning."""
    model = adapter(name)
    result = contributions(model, TEXT, source="previous_layer")
    assert ({plan.mode for plan in result.plans} == {"closed form"}) == FAMILIES[name].closed_form
    assert model.size.closed_form == FAMILIES[name].closed_form
    general = contributions(model, TEXT, source="previous_layer", mode="forward")
    close = {"rtol": 1e-9, "atol": 1e-12} if FAMILIES[name].exact else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(result.values, general.values, **close)


@pytest.mark.parametrize("source", ["input", "previous_layer"])
@pytest.mark.parametrize("name", FAMILIES)
def test_batches_equal_single_texts(name: str, source: str) -> None:
    """Padding changes nothing."""
    model = adapter(name)
    together = contributions(model, [TEXT, OTHER], source=source)
    for index, text in enumerate([TEXT, OTHER]):
        alone = contributions(model, text, source=source)
        close = {"rtol": 1e-8, "atol": 1e-12} if FAMILIES[name].exact else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(together.example(index).values, alone.values, **close)
        torch.testing.assert_close(together.example(index).attention, alone.attention, **close)


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_is_the_models_own(name: str) -> None:
    """The patterns that the model hands out in eager attention."""
    model = adapter(name)
    result = contributions(model, TEXT, source="previous_layer")
    plain = tiny(name)
    plain.set_attn_implementation("eager")
    ids = torch.tensor([model.encode(TEXT).ids])
    with torch.no_grad():
        expected = plain(ids, output_attentions=True).attentions
    torch.testing.assert_close(
        result.attention[0], torch.cat(expected).to(result.attention), rtol=1e-6, atol=1e-8
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_is_not_changed(name: str) -> None:
    """Neither its attention implementation nor its hooks, gradients and mode."""
    model = tiny(name)
    before = model.config._attn_implementation
    contributions(TransformersModel(model, tokenizer()), TEXT, n_probes=2)
    assert model.config._attn_implementation == before
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", FAMILIES)
def test_load_model_picks_an_adapter(name: str) -> None:
    """Whatever the adapter, the numbers are the same."""
    model = load_model(tiny(name), tokenizer=tokenizer())
    expected = contributions(adapter(name), TEXT, layers=[1])
    found = contributions(model, TEXT, layers=[1])
    close = {"rtol": 1e-8, "atol": 1e-12} if FAMILIES[name].exact else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(found.values, expected.values, **close)
    torch.testing.assert_close(found.attention, expected.attention, **close)


BRIDGED = [name for name, family in FAMILIES.items() if family.bridge]


@pytest.mark.parametrize("source", ["input", "previous_layer"])
@pytest.mark.parametrize("name", BRIDGED)
def test_transformer_lens_gives_the_same(name: str, source: str) -> None:
    """Through its hook points, which are other modules, the contributions are the same."""
    model = tiny_with_head(name)
    plain, lens = (
        load_model(model, tokenizer=tokenizer(), adapter=adapter)
        for adapter in ("transformers", "transformer_lens")
    )
    assert isinstance(lens, TransformerLensModel)
    assert isinstance(plain, TransformersModel)
    expected, found = (contributions(each, [TEXT, OTHER], source=source) for each in (plain, lens))
    close = {"rtol": 1e-8, "atol": 1e-12} if FAMILIES[name].exact else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(found.values, expected.values, equal_nan=True, **close)
    torch.testing.assert_close(found.attention, expected.attention, equal_nan=True, **close)
    assert lens.size.causal == plain.size.causal == FAMILIES[name].causal
    assert lens.size.inner == plain.size.inner
    assert lens.size.gated == plain.size.gated


def test_adapter_is_checked() -> None:
    """An unknown one, and a class that TransformerLens does not bridge."""
    with pytest.raises(ValueError, match="adapter must be"):
        load_model(tiny("GPT-2"), tokenizer=tokenizer(), adapter="lens")
    with pytest.raises(ValueError, match="does not bridge GPT2Model"):
        load_model(tiny("GPT-2"), tokenizer=tokenizer(), adapter="transformer_lens")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: hf.T5Model(hf.T5Config(d_model=8, d_kv=4, num_heads=2, num_layers=1)),
            "name the part",
        ),
        (lambda: hf.BartModel(hf.BartConfig(d_model=16, vocab_size=9)), "name the part"),
        (
            lambda: hf.MambaModel(hf.MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=60)),
            "no attention over the tokens was seen",
        ),
    ],
    ids=["T5", "BART", "Mamba"],
)
def test_refused(make: Callable[[], Module], words: str) -> None:
    """With the reason."""
    with pytest.raises(ValueError, match=words):
        TransformersModel(make().eval(), tokenizer())


def test_no_model_of_transformers() -> None:
    """A plain module is told what would do."""
    with pytest.raises(TypeError, match="a model of transformers"):
        TransformersModel(torch.nn.Linear(2, 2), tokenizer())


UNREAD = {
    "ViT": (
        lambda: hf.ViTModel(
            hf.ViTConfig(
                hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
                image_size=8, patch_size=4,
            )
        ),
        lambda model: (model.embeddings, [layer.attention.o_proj for layer in model.layers]),
        (1, 3, 8, 8),
    ),
    "Whisper, its encoder": (
        lambda: hf.WhisperModel(
            hf.WhisperConfig(
                d_model=16, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=32, num_mel_bins=4,
                max_source_positions=6, decoder_layers=1, decoder_attention_heads=4, vocab_size=60,
                decoder_start_token_id=0, pad_token_id=0, bos_token_id=0, eos_token_id=0,
            )
        ).encoder,
        lambda model: (model.layers[0].self_attn_layer_norm, [model.layers[1].self_attn.out_proj]),
        (1, 4, 12),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_the_class_takes_what_is_no_text(name: str) -> None:
    """Patches of an image and frames of audio are tokens to the Captum class."""
    make, parts, shape = UNREAD[name]
    torch.manual_seed(0)
    model = make().double().eval()
    source, targets = parts(model)
    hta = HiddenTokenAttribution(model, targets[-1], source, num_heads=4)
    x = torch.randn(shape, dtype=torch.float64)
    forward, reverse = (
        hta.attribute(x, attribute_to_neuron_input=True, mode=mode) for mode in ("forward", "reverse")
    )
    torch.testing.assert_close(forward, reverse, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(forward.sum(-1), torch.ones_like(forward[..., 0]))


class LowRank(torch.nn.Module):
    """A projection with a low-rank update beside it, as adapters for fine-tuning put it."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.base = linear
        self.down = torch.nn.Linear(linear.in_features, 2, bias=False).double()
        self.up = torch.nn.Linear(2, linear.out_features, bias=False).double()

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def wrapped(model: Module) -> None:
    attention = model.encoder.layer[2].attention.self
    attention.query = LowRank(attention.query)


def patched(model: Module) -> None:
    query = model.encoder.layer[0].attention.self.query
    forward = query.forward
    query.forward = lambda x: 2 * forward(x)


@pytest.mark.parametrize("change", [wrapped, patched])
@pytest.mark.parametrize("before", [True, False])
def test_changed_projections_take_the_general_mode(change: Callable[[Module], None], before: bool) -> None:
    """Whether they are changed before the adapter is made or after: the result is autograd's."""
    model = tiny("BERT")
    if before:
        change(model)
        made = TransformersModel(model, tokenizer())
    else:
        made = TransformersModel(model, tokenizer())
        change(model)
    found = contributions(made, TEXT, source="previous_layer")
    expected = contributions(made, TEXT, source="previous_layer", mode="reverse")
    torch.testing.assert_close(found.values, expected.values, rtol=1e-9, atol=1e-12)


def test_global_hooks_take_the_general_mode() -> None:
    """Global hooks of PyTorch are respected too."""
    model = TransformersModel(tiny("BERT"), tokenizer())

    def scaled(module: Module, args: tuple, out: Tensor) -> Tensor | None:
        return 2 * out if module is model.places[1].attention.query else None

    handle = torch.nn.modules.module.register_module_forward_hook(scaled)
    try:
        found = contributions(model, TEXT, source="previous_layer")
        expected = contributions(model, TEXT, source="previous_layer", mode="reverse")
    finally:
        handle.remove()
    torch.testing.assert_close(found.values, expected.values, rtol=1e-9, atol=1e-12)


def test_attention_of_a_subclass() -> None:
    """A class of the user's own, that derives from the model's, is followed to where that is written."""
    model = tiny("BERT")
    kind = type(model.encoder.layer[0].attention.self)
    model.encoder.layer[0].attention.self.__class__ = type("Mine", (kind,), {"__module__": __name__})
    found = contributions(TransformersModel(model, tokenizer()), TEXT, source="previous_layer")
    expected = contributions(adapter("BERT"), TEXT, source="previous_layer")
    torch.testing.assert_close(found.values, expected.values)


def test_tokenizer_of_another_model() -> None:
    """Tokens beyond the model's vocabulary are an error."""
    model = TransformersModel(tiny("GPT-2"), WordTokenizer(500))
    with pytest.raises(ValueError, match=r"the model knows 60: pass the tokenizer that belongs"):
        contributions(model, "many words of a large vocabulary")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_fork_while_another_thread_attributes() -> None:
    """The child process can attribute as well, and its model has the attention that it was loaded with."""
    inside, done = threading.Event(), threading.Event()
    plain = tiny("Llama")
    model = TransformersModel(plain, tokenizer())
    expected, implementation = (
        contributions(model, TEXT, source="previous_layer"),
        plain.config._attn_implementation,
    )
    block = model.places[0].block
    hook = block.register_forward_hook(lambda *args: inside.set() or (done.wait(60) and None))
    thread = threading.Thread(target=lambda: contributions(model, OTHER))
    thread.start()
    assert inside.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(60)
        hook.remove()
        right = plain.config._attn_implementation == implementation
        right = right and contributions(model, TEXT, source="previous_layer").values.equal(expected.values)
        os._exit(0 if right else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
