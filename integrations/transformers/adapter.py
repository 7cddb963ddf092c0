"""Models of ``transformers`` as the core's model, without TransformerLens."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from captum_hta.integrations.adapter import Adapter
from captum_hta.integrations.conditions import encoder_logits, is_untouched, no_logits
from captum_hta.integrations.proof import Proof
from captum_hta.integrations.transformers.attention import SWITCH, AttentionCall, Recording, rotation
from captum_hta.integrations.transformers.families import PARTS, layout_for
from captum_hta.integrations.transformers.internals import uses_attention_interface
from captum_hta.integrations.transformers.layouts import Layout, Place
from captum_hta.integrations.transformers.projections import (
    input_norm,
    knows_projections,
    projection_width,
    split_weights,
)
from captum_hta.integrations.transformers.reading import longest_text, reader_for
from captum_hta.integrations.weights import linear_map, repeated, sum_norm
from captum_hta.model.attention import Attention, AttentionFactors, OutputProjection, Unembedding
from captum_hta.model.encoding import Batch
from captum_hta.model.sites import Site, without_autocast
from captum_hta.model.size import Size


class TransformersModel(Adapter):
    """A model of ``transformers`` as the core's model.

    Sources are the inputs of blocks, head targets the inputs of their output projections. The model is
    neither changed nor copied, and hooks that are active on it act on the result. While its attention is
    observed its attention implementation is switched, so other threads must not run the same object
    meanwhile (they may use the result of ``load_model``, which works on a copy). When it is made the adapter
    proves itself on a few tokens, as
    :class:`captum_hta.integrations.transformer_lens.adapter.TransformerLensModel` does.

    Args:
        model: An encoder or a decoder in eval mode, with or without a head.
        tokenizer: Its tokenizer. For vision models its image processor, or ``None`` to read arrays of pixel
            values ``[channel, height, width]`` as they are. For audio models its processor; for the encoder
            alone a feature extractor or ``None``, and a tokenizer where the encoder is given features.
        name: What to call the model. Default: ``None``, the name that it was loaded by.
        part: For encoder-decoder models ``"encoder"``, ``"decoder"`` (the self-attention of the decoder) or
            ``"cross"`` (the attention of the decoder to the encoder's output: queries are the decoder's
            tokens, keys and sources the encoder's). The last two read pairs: what the encoder reads, and the
            text of the decoder.

    Raises:
        ValueError: If the model type is not supported, a part is missing, or the proof fails.
        TypeError: If ``model`` is no model of ``transformers``.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, name: str | None = None, part: str | None = None
    ) -> None:
        self.model = self.module = model
        self.layout = layout_of(model, part)
        self.base = cast(PreTrainedModel, model.base_model)
        self.part = part if self._config.model_type in PARTS else None
        self.architecture = type(model).__name__
        self.name = name or Path(getattr(model, "name_or_path", "") or self.architecture).name
        self.places = self.layout.places(self.base)
        self._read_dimensions()
        self.reader = reader_for(self.base, tokenizer, self.part, self.name)
        self.max_length = self.reader.longest or longest_text(self.base)
        self._memory = self._encoder_sites() if self.part == "cross" else None
        self.key_layers = None if self._memory is None else len(self._memory) - 1
        self._parameters = inspect.signature(self.base.forward).parameters
        self._closed_form = bool(self.layout.projections)
        self.prove()

    @property
    def _config(self) -> Any:
        return self.base.config

    def _read_dimensions(self) -> None:
        config = self._config
        self.num_layers = len(self.places)
        self.num_heads = config.num_attention_heads
        if self.part in ("decoder", "cross"):
            self.num_heads = getattr(config, "decoder_attention_heads", self.num_heads)
        self.d_model = config.hidden_size
        self.d_head = projection_width(self.places[0].projection, config) // self.num_heads
        grouped = None if self.part else getattr(config, "num_key_value_heads", None)
        self.key_heads: int = grouped or self.num_heads

    @property
    def size(self) -> Size:
        """The model's dimensions."""
        config = self._config
        inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
        return Size(
            layers=self.num_layers,
            heads=self.num_heads,
            width=self.d_model,
            inner=inner or getattr(config, "hidden_dim", None) or 4 * self.d_model,
            d_head=self.d_head,
            key_heads=self.key_heads,
            gated=self.layout.gated or bool(getattr(config, "is_gated_act", False)),
            causal=self._causal,
            closed_form=self._closed_form,
        )

    def forward(self, ids: Tensor, mask: Tensor | None = None, *others: Tensor | None) -> Any:
        """Run the model, without its head where that can be left out.

        Args:
            ids: Token ids ``[batch, position]``, pixel values ``[batch, channel, height, width]`` or features
                ``[batch, feature, frame]``.
            mask: ``[batch, position]``, 1 for real tokens.
            others: Segments; for a decoder, what the encoder reads and its mask.
        """
        with SWITCH:
            return self._run(self.base, ids, mask, *others)

    def _run(self, model: Module, *inputs: Tensor | None) -> Any:
        """Run the base model, or the model with its head, on what ``forward`` takes."""
        ids, mask, *others = map(self._cast, inputs)
        if self.part == "encoder" and hasattr(self.base, "decoder"):
            model = self.base.get_submodule("encoder")
        options: dict[str, Any] = {self.base.main_input_name: ids, "attention_mask": mask}
        if "use_cache" in self._parameters and self.part != "encoder":
            options["use_cache"] = False
        if self.part in ("decoder", "cross"):
            options |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
            options[self.base.main_input_name], options["attention_mask"] = others
        elif "token_type_ids" in self._parameters and getattr(self._config, "type_vocab_size", 0) > 1:
            (options["token_type_ids"],) = others or (None,)
        return model(**options)

    def _cast(self, value: Tensor | None) -> Tensor | None:
        """Pixels and features in the dtype of the weights."""
        return value.to(self.dtype) if value is not None and value.is_floating_point() else value

    def source(self, layer: int) -> Site:
        """The input of block ``layer``; for cross attention, of that block of the encoder, or its output."""
        if self._memory is not None:
            return self._memory[layer]
        place = self.places[layer]
        return Site(place.block, at_input=True, call=place.call)

    def _encoder_sites(self) -> list[Site]:
        """The input of each block of the encoder, and its output."""
        layout = PARTS[self._config.model_type]["encoder"]
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
        """The attention of every layer, from one forward pass."""
        self.require_eval()
        recording = Recording(self.places)
        with recording.of(self.base), torch.inference_mode(), without_autocast():
            out = self._run_with_patterns(batch)
        if recording.calls:
            return [self._attention(recording, layer) for layer in range(self.num_layers)]
        patterns = out.attentions  # of models whose attention does not go through the interface
        return [Attention(self._require_pattern(pattern, layer)) for layer, pattern in enumerate(patterns)]

    def _run_with_patterns(self, batch: Batch) -> Any:
        if uses_attention_interface(self.base):
            return self.forward(*batch.inputs, *batch.extra)
        return self.base(input_ids=batch.inputs[0], attention_mask=batch.extra[0], output_attentions=True)

    def _attention(self, recording: Recording, layer: int) -> Attention:
        place, call = self.places[layer], recording.call(layer)
        self._require_pattern(None if call is None else call.pattern, layer)
        assert call is not None
        known = self._closed_form and call.plain and is_untouched(place.block.modules(), ("captum_hta",))
        known = known and knows_projections(self.layout, place.attention)
        factors = self._factors(place, call, recording, layer) if known else None
        return Attention(call.pattern, factors, repeated(call.value, self.num_heads, 1))

    def _require_pattern(self, pattern: Tensor | None, layer: int) -> Tensor:
        if pattern is None:
            raise ValueError(
                f"{self.architecture} shows no attention pattern in block {layer}: its attention must go "
                "through the attention interface of transformers"
            )
        return pattern

    def _factors(
        self, place: Place, call: AttentionCall, recording: Recording, layer: int
    ) -> AttentionFactors:
        x = recording.inputs[layer]
        weights = split_weights(self.layout, place.attention, self.num_heads, self.key_heads, self.d_head)
        query_weight, key_weight, value_weight = weights
        angles = recording.position_embeddings(layer)
        rotary = None if angles is None else rotation(place.attention, angles, self.d_head)
        query_map = rotary
        if self.layout.scales_queries:
            scaling: Any = place.attention.scaling
            query_map = float(scaling) * torch.eye(self.d_head).to(x)[None, None, None]
        return AttentionFactors(
            pattern=call.pattern,
            query=call.query,
            key=repeated(call.key, self.num_heads, 1),
            value=repeated(call.value, self.num_heads, 1),
            scale=call.scale,
            x=x,
            query_weight=query_weight,
            key_weight=key_weight,
            value_weight=value_weight,
            norm=input_norm(self.layout, place.block, x),
            query_map=query_map,
            key_map=rotary,
        )

    def output_projection(self, layer: int) -> OutputProjection:
        """How block ``layer`` adds the outputs of its heads to its input."""
        place, norm = self.places[layer], self.layout.sum_norm
        weight, bias = linear_map(place.projection, self.num_heads * self.d_head, self.device, self.dtype)
        return OutputProjection(
            torch.unflatten(weight, 0, (self.num_heads, self.d_head)),
            bias,
            None if norm is None else sum_norm(place.block.get_submodule(norm)),
            self.layout.residual,
        )

    @property
    def unembedding(self) -> Unembedding:
        """How the last hidden embedding becomes logits.

        Raises:
            ValueError: If the model has no logits of tokens, or more than a norm lies before them.
        """
        head: Module | None = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if head is None or self.part == "encoder":
            raise ValueError(no_logits(self.name, self.architecture))
        if not self.layout.direct_head:
            raise ValueError(encoder_logits(self.name))
        norm = self.layout.final_norm
        return Unembedding(
            head.get_parameter("weight").detach(), None if norm is None else self.base.get_submodule(norm)
        )

    def logits(self, *args: Any) -> Tensor:
        """The logits for ``(*batch.inputs, *batch.extra)``.

        Raises:
            ValueError: If the model has no head.
        """
        with SWITCH:
            found: Tensor | None = getattr(self._run(self.model, *args), "logits", None)
        if found is None:
            raise ValueError(no_logits(self.name, self.architecture))
        return found

    def prove(self) -> None:
        """Check the adapter on a few tokens; give up the closed form if only that does not hold."""
        with self._shortened():
            super().prove()

    def _run_proof(self, proof: Proof) -> None:
        proof.run({})

    @contextmanager
    def _shortened(self) -> Iterator[None]:
        """Within the context, blocks read the first tokens of an image or audio, which have one length."""
        sample = self.reader.sample()
        read = sample.context or sample
        if read.content is None:
            yield
            return
        parts = PARTS.get(self._config.model_type)
        first = self.places[0] if parts is None else parts["encoder"].places(self.base)[0]
        handle = first.block.register_forward_pre_hook(
            lambda module, args: (args[0][:, : len(read)], *args[1:])
        )
        try:
            yield
        finally:
            handle.remove()


def layout_of(model: PreTrainedModel, part: str | None = None) -> Layout:
    """The layout of a model, or of a part of it.

    Raises:
        TypeError: If it is no model of ``transformers``.
        ValueError: If its type is not supported.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a model of transformers, got {type(model).__name__}")
    return layout_for(model.config, type(model).__name__, part)
