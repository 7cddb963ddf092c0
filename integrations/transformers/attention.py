"""Observation of patterns, queries, keys and values, by an attention function that records them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from captum_hta.integrations.transformers.internals import (
    attention_implementation,
    eager_attention,
    registered_attention,
    registered_mask,
    rotary_function,
    uses_attention_interface,
)
from captum_hta.integrations.transformers.products import Product, ProductObserver
from captum_hta.model.process_settings import Turn
from captum_hta.model.sites import Site, hook_site

if TYPE_CHECKING:
    from captum_hta.integrations.transformers.structure import Place

OBSERVED = "captum_hta_observed"
"""Name of the attention function that records its arguments."""
RECORDED = "captum_hta_recorded"
"""Name of the attention function that calls the user's own and records its outputs."""
SWITCH = Turn()
"""The turn to switch the attention implementation, which belongs to the model, not to a thread."""
DIFFERENTIABLE = ("eager", "sdpa", OBSERVED, RECORDED)
"""Attention implementations whose derivatives exist on every device."""
POSITION_BIASES = ("position_bias", "relative_position_bias")
"""Arguments of attention functions that are added to the scores."""
_RECORDER = threading.local()
Key = TypeVar("Key")


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function.

    Attributes:
        pattern: ``[batch, head, query, key]``.
        query, key, value: ``[batch, head, token, d_head]``, with keys and values of grouped heads once.
        scale: Factor of the scores.
        bias: The mask or bias that is added to the scores, if there is one.
        cap: The cap of the scores; ``None`` without one.
        has_sinks: Whether a part of the softmax goes to sinks.
    """

    pattern: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    bias: Tensor | None = None
    cap: float | None = None
    has_sinks: bool = False


@dataclass
class Recording:
    """The attention of one forward pass, and its inputs.

    Attributes:
        places: The blocks.
        written_out: Whether attention is computed by functions of PyTorch, not by ``AttentionInterface``.
        calls: For each attention module the attention that it computes, call by call.
        rotary: For each attention module and call the cosines and sines of its rotary embedding.
        inputs: For each block of ``places`` its input ``[batch, token, width]``.
        projected: What each module returns that computes queries, keys or values, by the number of its block
            and its path in that.
        outputs: For each block the outputs of its heads ``[batch, token, head * d_head]``, as its output
            projection reads them.
    """

    places: Sequence[Place]
    written_out: bool = False
    calls: dict[Module, list[AttentionCall | Product]] = field(default_factory=dict)
    rotary: dict[Module, list[Any]] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    projected: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def call(self, layer: int) -> AttentionCall | Product | None:
        """The attention of a block; ``None`` if none was seen."""
        place = self.places[layer]
        calls = self.calls.get(place.attention, [])
        number = place.inner_call or 0
        return calls[number] if number < len(calls) else None

    def position_embeddings(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of a block's rotary embedding."""
        place = self.places[layer]
        found: tuple[Tensor, Tensor] | None = self.rotary[place.attention][place.inner_call or 0]
        return found

    @contextmanager
    def of(self, model: PreTrainedModel, batch: int) -> Iterator[None]:
        """Record the forward passes of this thread, of so many examples, within the context."""
        with ExitStack() as stack:
            for layer, place in enumerate(self.places):
                inputs = Site(place.block, at_input=True, call=place.call)
                outputs = Site(place.projection, at_input=True, call=place.inner_call)
                for site, values in ((inputs, self.inputs), (outputs, self.outputs)):
                    stack.callback(hook_site(site, _recorder(values, layer)).remove)
                for name in () if place.layout is None else place.layout.names:
                    projection = Site(place.block.get_submodule(name), call=place.inner_call)
                    stack.callback(hook_site(projection, _recorder(self.projected, (layer, name))).remove)
            for module in dict.fromkeys(place.attention for place in self.places):
                hook = module.register_forward_pre_hook(self._rotary_recorder(), with_kwargs=True)
                stack.callback(hook.remove)
            if self.written_out:
                stack.enter_context(self._observed_products(batch))
            else:
                stack.enter_context(observed_attention(model, self._record))
            yield

    def _record(self, module: Module, call: AttentionCall | Product) -> None:
        self.calls.setdefault(module, []).append(call)

    @contextmanager
    def _observed_products(self, batch: int) -> Iterator[None]:
        """Record the products of attention modules within the context."""
        running: list[Module] = []
        with ExitStack() as stack:
            for module in dict.fromkeys(place.attention for place in self.places):
                before = module.register_forward_pre_hook(lambda module, args: running.append(module))
                after = module.register_forward_hook(
                    lambda module, args, out: running.remove(module), always_call=True
                )
                stack.callback(before.remove)
                stack.callback(after.remove)

            def record(product: Product) -> None:
                if running:
                    self._record(running[-1], product)

            stack.enter_context(ProductObserver(record, batch))
            yield

    def _rotary_recorder(self) -> Callable[..., None]:
        thread = threading.get_ident()

        def record(module: Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            if threading.get_ident() == thread:
                self.rotary.setdefault(module, []).append(kwargs.get("position_embeddings"))

        return record


def _recorder(values: dict[Key, Tensor], key: Key) -> Callable[[Tensor], None]:
    return lambda value: values.__setitem__(key, value.detach())


@contextmanager
def observed_attention(
    model: PreTrainedModel, record: Callable[[Module, AttentionCall], object]
) -> Iterator[None]:
    """Run eager attention and pass every call in this thread to ``record``.

    The attention implementation is restored on any exit. Models whose attention does not go through
    ``AttentionInterface`` are left alone.
    """
    if not uses_attention_interface(model):
        yield
        return
    with _switched(model, OBSERVED):
        _RECORDER.record = record
        try:
            yield
        finally:
            _RECORDER.record = None


@contextmanager
def _switched(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    with SWITCH.taken():
        before = attention_implementation(model)
        with SWITCH.changed(
            lambda: model.set_attn_implementation(implementation),
            lambda: model.set_attn_implementation(before),
        ):
            yield


def _observed_attention(
    module: Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """The model's own eager attention, recorded."""
    out, pattern = eager_attention(module)(module, query, key, value, attention_mask, **kwargs)
    scaled = getattr(_RECORDER, "scaled", None)
    if scaled is not None and scaled[0] is module:
        out = out * scaled[1].to(out)[:, None]
    record = getattr(_RECORDER, "record", None)
    if record is not None:
        scale = kwargs.get("scaling")
        cap = kwargs.get("softcap")
        sinks = any(kwargs.get(name) is not None for name in ("s_aux", "sinks"))
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        tensors = (pattern.detach(), query.detach(), key.detach(), value.detach())
        record(module, AttentionCall(*tensors, scale, _bias(attention_mask, kwargs), cap, sinks))
    return out, pattern


@contextmanager
def scaled_heads(module: Module, factors: Tensor) -> Iterator[None]:
    """Within the context, multiply the heads of an observed attention module by factors ``[head]``."""
    _RECORDER.scaled = module, factors
    try:
        yield
    finally:
        _RECORDER.scaled = None


def _bias(mask: Tensor | None, kwargs: Mapping[str, Any]) -> Tensor | None:
    """What is added to the scores: the mask, and position biases that are passed beside it."""
    added = [mask, *(kwargs.get(name) for name in POSITION_BIASES)]
    present = [value.detach() for value in added if isinstance(value, Tensor)]
    return sum(present[1:], start=present[0]) if present else None


@contextmanager
def differentiable_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within the context, compute attention eagerly where the model's own kernel may have no derivatives.

    These are the kernels of ``transformers`` other than PyTorch's, such as ``"flex_attention"``. That eager
    attention computes the same is checked when a model is loaded.
    """
    own = uses_attention_interface(model) and foreign_attention(model) is None
    if own and attention_implementation(model) not in DIFFERENTIABLE:
        with _switched(model, "eager"):
            yield
    else:
        yield


def foreign_attention(model: PreTrainedModel) -> str | None:
    """The name of a model's attention function, if it is not one of ``transformers``."""
    if not uses_attention_interface(model):
        return None
    name = attention_implementation(model)
    function = registered_attention(model, name)
    is_own = function is None or function.__module__.partition(".")[0] == "transformers"
    return None if is_own else name


@contextmanager
def recorded_outputs(model: PreTrainedModel, name: str) -> Iterator[dict[Module, list[Tensor]]]:
    """Within the context, what the attention function ``name`` returns in this thread, by attention module.

    The function is called as it would be without this, with the masks that are registered for it.
    """
    outputs: dict[Module, list[Tensor]] = {}
    with _switched(model, RECORDED):
        _RECORDER.name, _RECORDER.outputs = name, outputs
        try:
            yield outputs
        finally:
            _RECORDER.name = _RECORDER.outputs = None


def _recorded_attention(module: Module, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
    """The attention function of the user, recorded."""
    function = registered_attention(module, _RECORDER.name) or eager_attention(module)
    found = function(module, *args, **kwargs)
    _RECORDER.outputs.setdefault(module, []).append(found[0].detach())
    return found


def _recorded_mask(*args: object, **kwargs: object) -> object:
    """The mask that is registered for the attention function of the user."""
    return registered_mask(_RECORDER.name)(*args, **kwargs)


AttentionInterface.register(OBSERVED, _observed_attention)
AttentionMaskInterface.register(OBSERVED, registered_mask("eager"))
AttentionInterface.register(RECORDED, _recorded_attention)
AttentionMaskInterface.register(RECORDED, _recorded_mask)


def rotation(attention: Module, position_embeddings: tuple[Tensor, Tensor], width: int) -> Tensor:
    """A rotary embedding as matrices ``[1, 1, token, d_head, d_head]``, by the model's own function.

    Cosines and sines are those of all rotated components, or of each pair of them once.
    """
    cos, sin = (part[:1] for part in position_embeddings)
    rotary = cos.shape[-1]
    try:
        found = _rotated_basis(attention, cos, sin, rotary)
    except RuntimeError:  # shapes do not fit
        found = _rotated_basis(attention, cos, sin, 2 * rotary)
    if len(found) != found.shape[-1]:
        found = _rotated_basis(attention, cos, sin, 2 * rotary)
    rotary = len(found)
    matrices = torch.eye(width, dtype=cos.dtype, device=cos.device).repeat(cos.shape[1], 1, 1)
    matrices[:, :rotary, :rotary] = found.permute(1, 2, 0)
    return matrices[None, None]


def _rotated_basis(attention: Module, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    """The unit vectors of the first components after rotation, ``[rotary, token, rotary]``."""
    basis = torch.eye(rotary, dtype=cos.dtype, device=cos.device)
    directions = basis[:, None, None].expand(rotary, 1, cos.shape[1], rotary)
    rotated, _ = rotary_function(attention)(directions, directions, cos, sin)
    return rotated[:, 0]
