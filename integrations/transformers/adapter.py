"""Models of ``transformers`` as the core's model, without TransformerLens."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from captum_hta.integrations.adapter import Adapter
from captum_hta.integrations.proof import Proof, encoder_logits, is_untouched, no_logits, require_weights
from captum_hta.integrations.readers.choose import reader_for
from captum_hta.integrations.transformers.layouts import (
    PARTS,
    Layout,
    Place,
    inner_width,
    knows_projections,
    layout_for,
    linear_map,
    repeated,
    split_weights,
    sum_norm,
    token_norm,
)
from captum_hta.model.attention import Attention, AttentionFactors, OutputProjection, Unembedding
from captum_hta.model.encoding import Batch, Encoding
from captum_hta.model.protocol import Check
from captum_hta.model.sites import Site, hook_site, without_autocast
from captum_hta.model.size import Size

OBSERVED = "captum_hta_observed"
"""Name of the attention function that keeps what it is called with."""


class TransformersModel(Adapter):
    """A model of ``transformers`` as the model that the core works with.

    Sources are what enters a block, head targets what its output projection reads. The model is neither
    changed nor copied; hooks that are active on it act on the result. While its attention is observed its
    attention implementation is another, so other threads must not run the same object then (they may use
    what ``load_model`` gives, which works on a copy). On creation the adapter proves itself on a few tokens,
    as :class:`captum_hta.integrations.transformer_lens.adapter.TransformerLensModel` does.

    Args:
        model: An encoder or a decoder in eval mode, with or without a head.
        tokenizer: Its tokenizer; of a model of images its image processor, or ``None``: then arrays of
            pixel values ``[channel, height, width]`` are read as they are. Of a model of audio its
            processor; a feature extractor or ``None`` does for the encoder, a tokenizer where the encoder is
            given features.
        name: What to call the model. Default: ``None``, the name that it was loaded by.
        part: Of an encoder-decoder, ``"encoder"``; ``"decoder"``, the self-attention of its decoder; or
            ``"cross"``, the attention of its decoder to what the encoder gives: queries are the decoder's
            tokens, keys and sources the encoder's. The last two read pairs of texts, what the encoder reads
            and what the decoder has said.

    Raises:
        ValueError: If the kind of model is not supported, a part is not named, or the proof fails.
        TypeError: If ``model`` is no model of ``transformers``.
    """

    def __init__(
        self, model: Module, tokenizer: Any, name: str | None = None, part: str | None = None
    ) -> None:
        self.model = self.module = model
        self.layout = layout_of(model, part)
        self.base = model.base_model
        config = self.base.config
        self.part = part if config.model_type in PARTS else None
        self.architecture = type(model).__name__
        self.name = name or Path(getattr(model, "name_or_path", "") or self.architecture).name
        self.places = self.layout.places(self.base)
        self.num_layers = len(self.places)
        self.num_heads = config.num_attention_heads
        if self.part in ("decoder", "cross"):
            self.num_heads = getattr(config, "decoder_attention_heads", self.num_heads)
        self.d_model = config.hidden_size
        self.d_head = inner_width(self.places[0].projection, config) // self.num_heads
        grouped = None if self.part else getattr(config, "num_key_value_heads", None)
        self.key_heads = grouped or self.num_heads
        self.reader = reader_for(self.base, tokenizer, self.part, self.name)
        self.max_length = self.reader.longest or _longest(self.base)
        self._memory = self._encoder_sites() if self.part == "cross" else None
        self.key_layers = None if self._memory is None else len(self._memory) - 1
        self._parameters = inspect.signature(self.base.forward).parameters
        self._closed_form = bool(self.layout.projections)
        require_weights(self.name, model)
        self._require_eval()
        self.checks = self._proven()

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
            gated=self.layout.gated or bool(getattr(config, "is_gated_act", False)),
            causal=self.layout.causal,
            closed_form=self._closed_form,
        )

    def forward(self, ids: Tensor, mask: Tensor | None = None, *others: Tensor | None) -> Any:
        """Run the model, without its head where that can be left out, on token ids ``[batch, position]`` or
        pixel values ``[batch, channel, height, width]`` or features ``[batch, feature, frame]``.

        ``others`` are segments, or what the encoder of a decoder reads and its mask.
        """
        with _SWITCH:
            return self._run(self.base, *map(self._cast, (ids, mask, *others)))

    def _cast(self, value: Tensor | None) -> Tensor | None:
        """Pixels and features as the weights are."""
        return value.to(self.dtype) if value is not None and value.is_floating_point() else value

    def _run(self, model: Module, ids: Tensor, mask: Tensor | None = None, *others: Tensor | None) -> Any:
        """Run the base model, or the one around it that has a head."""
        if self.part == "encoder" and hasattr(self.base, "decoder"):
            return self.base.encoder(attention_mask=mask, **{self.base.main_input_name: ids})
        options: dict[str, Any] = {"attention_mask": mask}
        if "use_cache" in self._parameters:
            options["use_cache"] = False
        if self.part in ("decoder", "cross"):
            read, read_mask = others
            options |= {"attention_mask": read_mask, self.base.main_input_name: read}
            return model(decoder_input_ids=ids, decoder_attention_mask=mask, **options)
        if "token_type_ids" in self._parameters and getattr(self.base.config, "type_vocab_size", 0) > 1:
            (options["token_type_ids"],) = others or (None,)
        return model(**{self.base.main_input_name: ids}, **options)

    def source(self, layer: int) -> Site:
        """What enters block ``layer``; of cross attention, that of the encoder, or what it gives."""
        if self._memory is not None:
            return self._memory[layer]
        place = self.places[layer]
        return Site(place.block, at_input=True, call=place.call)

    def _encoder_sites(self) -> list[Site]:
        """What enters each block of the encoder, and what it gives."""
        layout = PARTS[self.base.config.model_type]["encoder"]
        blocks = [place.block for place in layout.places(self.base)]
        last = blocks[-1] if layout.memory is None else self.base.get_submodule(layout.memory)
        return [*(Site(block, at_input=True) for block in blocks), Site(last, item=0)]

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
        known = known and knows_projections(self.layout, place.attention)
        value = None if seen.value is None else repeated(seen.value, self.num_heads, 1)
        return Attention(seen.pattern, self._factors(place, seen, x) if known else None, value)

    def _factors(self, place: Place, seen: _Seen, x: Tensor) -> AttentionFactors:
        query_weight, key_weight, value_weight = split_weights(
            self.layout, place.attention, self.num_heads, self.key_heads, self.d_head
        )
        rotation = None
        if seen.position_embeddings is not None:
            rotation = _rotation(place.attention, seen.position_embeddings, self.d_head)
        query_map = rotation
        if self.layout.scales_queries:
            query_map = place.attention.scaling * torch.eye(self.d_head).to(x)[None, None, None]
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
            query_map=query_map,
            key_map=rotation,
        )

    def output_projection(self, layer: int) -> OutputProjection:
        """What becomes of the heads' outputs of block ``layer``."""
        place, norm = self.places[layer], self.layout.sum_norm
        weight, bias = linear_map(place.projection, self.num_heads * self.d_head, self.device, self.dtype)
        weight = weight.unflatten(0, (self.num_heads, self.d_head))
        norm = None if norm is None else sum_norm(place.block.get_submodule(norm))
        return OutputProjection(weight, bias, norm, self.layout.residual)

    @property
    def unembedding(self) -> Unembedding:
        """How the last hidden embedding becomes logits.

        Raises:
            ValueError: If the model has no logits of tokens, or more than a norm lies before them.
        """
        head = self.model.get_output_embeddings()
        if head is None or self.part == "encoder":
            raise ValueError(no_logits(self.name, self.architecture))
        if not self.layout.causal and self.part != "cross":
            raise ValueError(encoder_logits(self.name))
        norm = self.layout.final_norm
        return Unembedding(head.weight.detach(), None if norm is None else self.base.get_submodule(norm))

    def logits(self, *args: Any) -> Tensor:
        """What the model's head gives for ``(*batch.inputs, *batch.extra)``.

        Raises:
            ValueError: If it has none.
        """
        with _SWITCH:
            found = getattr(self._run(self.model, *map(self._cast, args)), "logits", None)
        if found is None:
            raise ValueError(no_logits(self.name, self.architecture))
        return found

    def _observe(self, batch: Batch) -> tuple[list[_Seen], list[Tensor]]:
        """What the attention of each block was called with, and what entered the block."""
        seen: dict[Module, list[_Seen]] = {}
        entered: dict[int, Tensor] = {}
        rotary: dict[Module, list[Any]] = {}
        thread = threading.get_ident()

        def note_rotary(module: Module, args: Any, kwargs: dict[str, Any]) -> None:
            if threading.get_ident() == thread:
                rotary.setdefault(module, []).append(kwargs.get("position_embeddings"))

        def note_entered(layer: int) -> Callable[[Tensor], None]:
            return lambda value: entered.__setitem__(layer, value.detach())

        handles = [
            hook_site(Site(place.block, at_input=True, call=place.call), note_entered(layer))
            for layer, place in enumerate(self.places)
        ]
        handles += [
            module.register_forward_pre_hook(note_rotary, with_kwargs=True)
            for module in dict.fromkeys(place.attention for place in self.places)
        ]
        try:
            with (
                observed_attention(self.base, lambda module, one: seen.setdefault(module, []).append(one)),
                torch.inference_mode(),
                without_autocast(),
            ):
                out = self._run_with_patterns(batch)
        finally:
            for handle in handles:
                handle.remove()
        found = []
        for layer, place in enumerate(self.places):
            heard = seen.get(place.attention, [None])
            # attention of the model's own hands out its patterns
            one = heard[place.call or 0] if seen else _Seen(out.attentions[layer])
            if one is None:
                raise ValueError(
                    f"{self.architecture} shows no attention pattern in block {layer}: its attention must go "
                    "through the attention interface of transformers"
                )
            one.position_embeddings = rotary[place.attention][place.call or 0]
            found.append(one)
        return found, [entered[layer] for layer in range(self.num_layers)]

    def _run_with_patterns(self, batch: Batch) -> Any:
        if self.base._can_set_attn_implementation():
            return self.forward(*batch.inputs, *batch.extra)
        return self.base(input_ids=batch.inputs[0], attention_mask=batch.extra[0], output_attentions=True)

    def _proven(self) -> list[Check]:
        """Check the adapter; give up the closed form if that alone does not hold."""
        sample = self.reader.sample()
        with self._shortened(sample):
            proof = Proof(self, self.architecture, sample)
            proof.run({})
            if self._closed_form:
                self._closed_form = proof.closed_form_holds()
        return proof.checks

    @contextmanager
    def _shortened(self, sample: Encoding) -> Iterator[None]:
        """Within, blocks see the first tokens of an image or audio, which cannot be short itself."""
        read = sample.context or sample
        if read.content is None:
            yield
            return
        parts = PARTS.get(self.base.config.model_type)
        first = self.places[0] if parts is None else parts["encoder"].places(self.base)[0]
        handle = first.block.register_forward_pre_hook(
            lambda module, args: (args[0][:, : len(read)], *args[1:])
        )
        try:
            yield
        finally:
            handle.remove()


def layout_of(model: Any, part: str | None = None) -> Layout:
    """The layout of a model, or of a part of it.

    Raises:
        TypeError: If it is no model of ``transformers``.
        ValueError: If its kind is not supported.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, Module) or not hasattr(model, "base_model") or config is None:
        raise TypeError(f"model must be a model of transformers, got {type(model).__name__}")
    return layout_for(config, type(model).__name__, part)


def _longest(base: Module) -> int | None:
    """The longest text that the positions of a model hold."""
    names = ("max_target_positions", "max_position_embeddings")
    longest = next((getattr(base.config, name) for name in names if hasattr(base.config, name)), None)
    table = getattr(getattr(base, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return longest if longest is None or padding is None else longest - padding - 1


def _unhooked(block: Module) -> bool:
    """Whether no hook may change what a block's attention computes."""
    return is_untouched(block.modules(), ("captum_hta",))


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
def observed_attention(model: Module, listen: Callable[[Module, _Seen], object]) -> Iterator[None]:
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
    eager = _own(module, "eager_attention_forward")
    out, pattern = eager(module, query, key, value, attention_mask, **kwargs)
    listen = getattr(_LISTENER, "listen", None)
    if listen is not None:
        scale = kwargs.get("scaling")
        plain = all(kwargs.get(name) is None for name in ("softcap", "s_aux", "sinks"))
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        listen(module, _Seen(*(t.detach() for t in (pattern, query, key, value)), scale, plain))
    return out, pattern


def _own(module: Module, name: str) -> Callable[..., Any]:
    """A function of the file that defines a module's class, or one that it derives from."""
    files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    return next(getattr(file, name) for file in files if hasattr(file, name))


ALL_ATTENTION_FUNCTIONS.register(OBSERVED, _observed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(OBSERVED, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def _rotation(attention: Module, position_embeddings: tuple[Tensor, Tensor], width: int) -> Tensor:
    """A rotary embedding as matrices ``[1, 1, token, d_head, d_head]``, by the model's own function."""
    rotate = _own(attention, "apply_rotary_pos_emb")
    cos, sin = (part[:1] for part in position_embeddings)
    tokens, rotary = cos.shape[1:]
    basis = torch.eye(rotary, dtype=cos.dtype, device=cos.device)
    directions = basis[:, None, None].expand(rotary, 1, tokens, rotary)
    turned, _ = rotate(directions, directions, cos, sin)
    matrices = torch.eye(width, dtype=cos.dtype, device=cos.device).repeat(tokens, 1, 1)
    matrices[:, :rotary, :rotary] = turned[:, 0].permute(1, 2, 0)
    return matrices[None, None]
