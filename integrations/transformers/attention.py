"""Observation of patterns, queries, keys and values, by an attention function that records them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from captum_hta.integrations.transformers.internals import (
    attention_implementation,
    eager_attention,
    rotary_function,
    uses_attention_interface,
)
from captum_hta.integrations.transformers.layouts import Place
from captum_hta.model.sites import Site, hook_site

OBSERVED = "captum_hta_observed"
"""Name of the attention function that records its arguments."""
SWITCH = threading.RLock()
"""Held while the attention implementation is switched: it belongs to the model, not to a thread."""
_RECORDER = threading.local()


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function.

    Attributes:
        pattern: ``[batch, head, query, key]``.
        query, key, value: ``[batch, head, token, d_head]``, with keys and values of grouped heads once.
        scale: Factor of the scores.
        plain: Whether the scores are scaled dot products, up to a mask or bias that is added.
    """

    pattern: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    plain: bool


@dataclass
class Recording:
    """The attention of one forward pass, and its inputs.

    Attributes:
        places: The blocks.
        calls: For each attention module the calls of its attention function.
        rotary: For each attention module and call the cosines and sines of its rotary embedding.
        inputs: For each block of ``places`` its input ``[batch, token, width]``.
    """

    places: Sequence[Place]
    calls: dict[Module, list[AttentionCall]] = field(default_factory=dict)
    rotary: dict[Module, list[Any]] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)

    def call(self, layer: int) -> AttentionCall | None:
        """The attention of a block; ``None`` if it does not go through ``AttentionInterface``."""
        place = self.places[layer]
        calls = self.calls.get(place.attention)
        return None if calls is None else calls[place.call or 0]

    def position_embeddings(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of a block's rotary embedding."""
        place = self.places[layer]
        found: tuple[Tensor, Tensor] | None = self.rotary[place.attention][place.call or 0]
        return found

    @contextmanager
    def of(self, model: PreTrainedModel) -> Iterator[None]:
        """Record the forward passes of this thread within the context."""
        with ExitStack() as stack:
            for layer, place in enumerate(self.places):
                site = Site(place.block, at_input=True, call=place.call)
                stack.callback(hook_site(site, self._input_recorder(layer)).remove)
            for module in dict.fromkeys(place.attention for place in self.places):
                hook = module.register_forward_pre_hook(self._rotary_recorder(), with_kwargs=True)
                stack.callback(hook.remove)
            stack.enter_context(observed_attention(model, self._record))
            yield

    def _record(self, module: Module, call: AttentionCall) -> None:
        self.calls.setdefault(module, []).append(call)

    def _input_recorder(self, layer: int) -> Callable[[Tensor], None]:
        return lambda value: self.inputs.__setitem__(layer, value.detach())

    def _rotary_recorder(self) -> Callable[..., None]:
        thread = threading.get_ident()

        def record(module: Module, args: Any, kwargs: dict[str, Any]) -> None:
            if threading.get_ident() == thread:
                self.rotary.setdefault(module, []).append(kwargs.get("position_embeddings"))

        return record


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
    with SWITCH:
        before = attention_implementation(model)
        model.set_attn_implementation(OBSERVED)
        _RECORDER.record = record
        try:
            yield
        finally:
            _RECORDER.record = None
            model.set_attn_implementation(before)


def _observed_attention(
    module: Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """The model's own eager attention, recorded."""
    out, pattern = eager_attention(module)(module, query, key, value, attention_mask, **kwargs)
    record = getattr(_RECORDER, "record", None)
    if record is not None:
        scale = kwargs.get("scaling")
        plain = all(kwargs.get(name) is None for name in ("softcap", "s_aux", "sinks"))
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        tensors = (pattern.detach(), query.detach(), key.detach(), value.detach())
        record(module, AttentionCall(*tensors, scale, plain))
    return out, pattern


AttentionInterface.register(OBSERVED, _observed_attention)
AttentionMaskInterface.register(OBSERVED, AttentionMaskInterface()["eager"])  # type: ignore[no-untyped-call]


def rotation(attention: Module, position_embeddings: tuple[Tensor, Tensor], width: int) -> Tensor:
    """A rotary embedding as matrices ``[1, 1, token, d_head, d_head]``, by the model's own function."""
    cos, sin = (part[:1] for part in position_embeddings)
    tokens, rotary = cos.shape[1:]
    basis = torch.eye(rotary, dtype=cos.dtype, device=cos.device)
    directions = basis[:, None, None].expand(rotary, 1, tokens, rotary)
    rotated, _ = rotary_function(attention)(directions, directions, cos, sin)
    matrices = torch.eye(width, dtype=cos.dtype, device=cos.device).repeat(tokens, 1, 1)
    matrices[:, :rotary, :rotary] = rotated[:, 0].permute(1, 2, 0)
    return matrices[None, None]
