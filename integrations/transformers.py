"""Models of ``transformers`` as the core's model, without TransformerLens."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from captum_hta.attention_jacobian import AttentionFactors
from captum_hta.forecast import Size
from captum_hta.forward_pass import Site, hook_site
from captum_hta.integrations.layouts import (
    Layout,
    Place,
    layout_for,
    repeated,
    split_weights,
    token_norm,
)
from captum_hta.integrations.proof import Proof, require_eval, require_weights
from captum_hta.integrations.texts import TextReader
from captum_hta.model import Attention, Batch, Encoding, Text

OBSERVED = "captum_hta_observed"
"""Name of the attention function that keeps what it is called with."""


class TransformersModel:
    """A model of ``transformers`` as the model that the core works with.

    Sources are what enters a block, head targets what its output projection reads. The model is neither
    changed nor copied; hooks that are active on it act on the result. On creation the adapter proves
    itself on a few tokens, as :class:`captum_hta.integrations.transformer_lens.TransformerLensModel` does.

    Args:
        model: An encoder or a decoder in eval mode, with or without a head.
        tokenizer: Its tokenizer.
        name: What to call the model. Default: ``None``, the name that it was loaded by.

    Raises:
        ValueError: If the kind of model is not supported, or the proof fails.
        TypeError: If ``model`` is no model of ``transformers``.
    """

    def __init__(self, model: Module, tokenizer: Any, name: str | None = None) -> None:
        self.model, self.layout = model, layout_of(model)
        self.base = model.base_model
        config = self.base.config
        self.architecture = type(model).__name__
        self.name = name or Path(getattr(model, "name_or_path", "") or self.architecture).name
        self.places = self.layout.places(self.base)
        self.num_layers = len(self.places)
        self.num_heads = config.num_attention_heads
        self.d_model = config.hidden_size
        self.d_head = _inputs(self.places[0].projection) // self.num_heads
        self.key_heads = getattr(config, "num_key_value_heads", None) or self.num_heads
        self.max_length = _longest(self.base)
        self.reader = TextReader(tokenizer)
        self._parameters = inspect.signature(self.base.forward).parameters
        self._closed_form = bool(self.layout.projections)
        require_weights(self.name, model)
        proof = Proof(self, self.architecture, config.vocab_size, tokenizer.pad_token_id)
        self._require_eval()
        proof.run({})
        if self._closed_form:
            self._closed_form = proof.closed_form_holds()
        self.checks = proof.checks

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self.reader.tokenizer

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's weights."""
        return next(self.model.parameters()).dtype

    @property
    def size(self) -> Size:
        """The model's dimensions."""
        config = self.base.config
        inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
        return Size(
            layers=self.num_layers,
            heads=self.num_heads,
            width=self.d_model,
            inner=inner or getattr(config, "hidden_dim", None) or 4 * self.d_model,
            d_head=self.d_head,
            key_heads=self.key_heads,
            gated=self.layout.gated,
            causal=self.layout.causal,
            closed_form=self._closed_form,
        )

    def encode(self, text: Text, max_length: int | None = None) -> Encoding:
        """Read a text, or a pair of them; with ``max_length`` the first tokens alone."""
        return self.reader.encode(text, max_length)

    def batch(self, encodings: Sequence[Encoding]) -> Batch:
        """Pad encodings on the right, on the model's device."""
        return self.reader.batch(encodings, self.device)

    def forward(self, ids: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Any:
        """Run the model, without its head, on token ids ``[batch, position]``."""
        options: dict[str, Any] = {"attention_mask": mask}
        if "use_cache" in self._parameters:
            options["use_cache"] = False
        if "token_type_ids" in self._parameters and getattr(self.base.config, "type_vocab_size", 0) > 1:
            options["token_type_ids"] = segments
        return self.base(input_ids=ids, **options)

    def source(self, layer: int) -> Site:
        """What enters block ``layer``."""
        place = self.places[layer]
        return Site(place.block, at_input=True, call=place.call)

    def target(self, layer: int, kind: str = "head") -> Site:
        """The ``"head"`` or ``"layer"`` target of block ``layer``."""
        place = self.places[layer]
        if kind == "head":
            return Site(place.projection, at_input=True, call=place.call)
        return Site(place.block, call=place.call, item=0)

    def attention(self, batch: Batch) -> list[Attention]:
        """What every layer's attention does, from one forward pass."""
        self._require_eval()
        seen, entered = self._observe(batch)
        return [self._attention(*each) for each in zip(self.places, seen, entered, strict=True)]

    def _attention(self, place: Place, seen: _Seen, x: Tensor) -> Attention:
        known = self._closed_form and seen.plain and _unhooked(place.block)
        return Attention(seen.pattern, self._factors(place, seen, x) if known else None)

    def _factors(self, place: Place, seen: _Seen, x: Tensor) -> AttentionFactors:
        query_weight, key_weight, value_weight = split_weights(
            self.layout, place.attention, self.num_heads, self.key_heads, self.d_head
        )
        rotation = None
        if seen.position_embeddings is not None:
            rotation = _rotation(place.attention, seen.position_embeddings, self.d_head)
        return AttentionFactors(
            pattern=seen.pattern,
            query=seen.query,
            key=repeated(seen.key, self.num_heads, 1),
            value=repeated(seen.value, self.num_heads, 1),
            scale=seen.scale,
            x=x,
            query_weight=query_weight,
            key_weight=key_weight,
            value_weight=value_weight,
            norm=token_norm(self.layout, place.block, x),
            query_map=rotation,
            key_map=rotation,
        )

    def _observe(self, batch: Batch) -> tuple[list[_Seen], list[Tensor]]:
        """What the attention of each block was called with, and what entered the block."""
        seen: list[_Seen] = []
        entered: list[Tensor] = []
        rotary: list[Any] = []

        thread = threading.get_ident()

        def note_rotary(module: Module, args: Any, kwargs: dict[str, Any]) -> None:
            if threading.get_ident() == thread:
                rotary.append(kwargs.get("position_embeddings"))

        handles = [
            hook_site(self.source(layer), lambda value: entered.append(value.detach()))
            for layer in range(self.num_layers)
        ]
        handles += [
            module.register_forward_pre_hook(note_rotary, with_kwargs=True)
            for module in dict.fromkeys(place.attention for place in self.places)
        ]
        try:
            with observed_attention(self.base, seen.append), torch.inference_mode():
                out = self._run_with_patterns(batch)
        finally:
            for handle in handles:
                handle.remove()
        if not seen:  # attention of the model's own, which hands out its patterns
            seen = [_Seen(pattern) for pattern in out.attentions or ()]
        if len(seen) != self.num_layers:
            raise ValueError(
                f"{self.architecture} shows {len(seen)} attention patterns, but has {self.num_layers} "
                "blocks: its attention must go through the attention interface of transformers"
            )
        for one, positions in zip(seen, rotary, strict=True):
            one.position_embeddings = positions
        return seen, entered

    def _run_with_patterns(self, batch: Batch) -> Any:
        ids, mask, segments = *batch.inputs, *batch.extra
        if self.base._can_set_attn_implementation():
            return self.forward(ids, mask, segments)
        return self.base(input_ids=ids, attention_mask=mask, output_attentions=True)

    def _require_eval(self) -> None:
        require_eval(self.name, self.model)


def layout_of(model: Any) -> Layout:
    """The layout of a model.

    Raises:
        TypeError: If it is no model of ``transformers``.
        ValueError: If its kind is not supported.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, Module) or not hasattr(model, "base_model") or config is None:
        raise TypeError(f"model must be a model of transformers, got {type(model).__name__}")
    return layout_for(config, type(model).__name__)


def _inputs(projection: Module) -> int:
    """The width that a projection reads."""
    linear = isinstance(projection, torch.nn.Linear)
    return projection.weight.shape[1 if linear else 0]


def _longest(base: Module) -> int | None:
    """The longest text that the positions of a model hold."""
    longest = getattr(base.config, "max_position_embeddings", None)
    table = getattr(getattr(base, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return longest if longest is None or padding is None else longest - padding - 1


def _unhooked(block: Module) -> bool:
    """Whether no hook may change what a block's attention computes."""
    return not any(
        hook.__module__ not in _OWN_HOOKS
        for module in block.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )


_OWN_HOOKS = ("captum_hta.forward_pass", "captum_hta.integrations.transformers")


# --- what attention is called with -----------------------------------------------------------------


@dataclass
class _Seen:
    """One call of an attention function.

    Attributes:
        pattern: ``[batch, head, query, key]``.
        query, key, value: ``[batch, head, token, d_head]``, keys and values of grouped heads once.
        scale: Of the scores.
        plain: Whether the scores are scaled dot products, but for a mask or bias that is added.
        position_embeddings: Cosines and sines of a rotary embedding.
    """

    pattern: Tensor
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    scale: float = 1.0
    plain: bool = False
    position_embeddings: Any = None


_LISTENER = threading.local()
_SWITCH = threading.RLock()
"""The attention implementation is a model's, not a thread's."""


@contextmanager
def observed_attention(model: Module, listen: Callable[[_Seen], object]) -> Iterator[None]:
    """Run attention in elementary operators and hear what it is called with, in this thread.

    The model's attention implementation is as it was on any exit. Models whose attention does not go
    through the interface of ``transformers`` are left alone.
    """
    if not model._can_set_attn_implementation():
        yield
        return
    with _SWITCH:
        before = model.config._attn_implementation
        model.set_attn_implementation(OBSERVED)
        _LISTENER.listen = listen
        try:
            yield
        finally:
            _LISTENER.listen = None
            model.set_attn_implementation(before)


def _observed_attention(
    module: Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """The model's own eager attention, which is listened to."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    out, pattern = eager(module, query, key, value, attention_mask, **kwargs)
    listen = getattr(_LISTENER, "listen", None)
    if listen is not None:
        scale = kwargs.get("scaling")
        plain = all(kwargs.get(name) is None for name in ("softcap", "s_aux", "sinks"))
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        listen(_Seen(*(t.detach() for t in (pattern, query, key, value)), scale, plain))
    return out, pattern


ALL_ATTENTION_FUNCTIONS.register(OBSERVED, _observed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(OBSERVED, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def _rotation(attention: Module, position_embeddings: tuple[Tensor, Tensor], width: int) -> Tensor:
    """A rotary embedding as matrices ``[1, 1, token, d_head, d_head]``, by the model's own function."""
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    cos, sin = (part[:1] for part in position_embeddings)
    tokens, rotary = cos.shape[1:]
    basis = torch.eye(rotary, dtype=cos.dtype, device=cos.device)
    directions = basis[:, None, None].expand(rotary, 1, tokens, rotary)
    turned, _ = rotate(directions, directions, cos, sin)
    matrices = torch.eye(width, dtype=cos.dtype, device=cos.device).repeat(tokens, 1, 1)
    matrices[:, :rotary, :rotary] = turned[:, 0].permute(1, 2, 0)
    return matrices[None, None]
