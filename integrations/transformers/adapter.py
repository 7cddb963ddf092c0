"""Models of ``transformers`` as the core's model, without TransformerLens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module

from captum_hta.integrations.adapter import Adapter, long_sample
from captum_hta.integrations.conditions import (
    encoder_logits,
    heads_error,
    is_scaled,
    is_untouched,
    no_logits,
    relative_error,
    require_weights,
    tolerance,
)
from captum_hta.integrations.proof import Proof, ProofError
from captum_hta.integrations.readers.audio import AudioReader
from captum_hta.integrations.readers.images import ImageReader
from captum_hta.integrations.readers.pairs import PairReader
from captum_hta.integrations.readers.waves import WaveReader
from captum_hta.integrations.transformers.attention import (
    SWITCH,
    AttentionCall,
    Recording,
    differentiable_attention,
    foreign_attention,
    observed_attention,
    recorded_outputs,
    rotation,
    scaled_heads,
)
from captum_hta.integrations.transformers.experts import computable_experts
from captum_hta.integrations.transformers.families import override_for
from captum_hta.integrations.transformers.parts import (
    TOWERS,
    base_of,
    encoder_of,
    named_parts,
    part_of_model,
)
from captum_hta.integrations.transformers.patches import find_patches
from captum_hta.integrations.transformers.products import Product
from captum_hta.integrations.transformers.projections import (
    follows,
    input_norm,
    knows_norm,
    knows_projections,
    later_map,
    split_weights,
)
from captum_hta.integrations.transformers.reading import (
    longest_text,
    longest_window,
    model_arguments,
    reader_for,
    rope_thresholds,
)
from captum_hta.integrations.transformers.refusal import refusal
from captum_hta.integrations.transformers.samples import shortened, turned
from captum_hta.integrations.transformers.structure import Place, Structure, StructureError, structure_of
from captum_hta.integrations.transformers.trace import Trace, traced
from captum_hta.integrations.transformers.wrappers import unwrapped
from captum_hta.integrations.weights import linear_map, repeated, sum_norm, weight_of
from captum_hta.model.attention import Attention, AttentionFactors, OutputProjection, Unembedding
from captum_hta.model.encoding import Batch, Encoding
from captum_hta.model.precision import full_precision
from captum_hta.model.sites import Site, observed, replaced
from captum_hta.model.size import Size

MAX_TOKENS = 1 << 24
"""More tokens than any text has."""


class TransformersModel(Adapter):
    """A model of ``transformers`` as the core's model.

    Sources are the inputs of blocks, head targets the inputs of their output projections. The model is
    neither changed nor copied, and hooks that are active on it act on the result. While its attention is
    observed its attention implementation is switched, so other threads must not run the same object
    meanwhile (they may use the result of ``load_model``, which works on a copy). When it is made the adapter
    proves itself on a few tokens, as
    :class:`captum_hta.integrations.transformer_lens.adapter.TransformerLensModel` does.

    Args:
        model: An encoder or a decoder in eval mode, with or without a head, or a PEFT model around one.
        tokenizer: Its tokenizer. For vision models its image processor, or ``None`` to read arrays of pixel
            values ``[channel, height, width]`` as they are. For audio models its processor; for the encoder
            alone a feature extractor or ``None``, and a tokenizer where the encoder is given features.
        name: What to call the model. Default: ``None``, the name that it was loaded by.
        part: For encoder-decoder models ``"encoder"``, ``"decoder"`` (the self-attention of the decoder) or
            ``"cross"`` (the attention of the decoder to the encoder's output: queries are the decoder's
            tokens, keys and sources the encoder's). The last two read pairs: what the encoder reads, and the
            text of the decoder. For models that have a part for each of several media, such as CLIP,
            ``"text"``, ``"image"`` or ``"audio"``.

    Raises:
        ValueError: If the model type is not supported, a part is missing, or the proof fails.
        TypeError: If ``model`` is no model of ``transformers``.
    """

    hides_padding = True

    def __init__(
        self, model: Module, tokenizer: Any, name: str | None = None, part: str | None = None
    ) -> None:
        self.given = model
        self.model = self.module = unwrapped(model)
        self.part = part_of_model(self.model, part)
        self.base = base_of(self.model, self.part)
        if self.part in TOWERS:
            self.given = self.model = self.module = self.base
        self.architecture = type(self.model).__name__
        self.name = name or Path(getattr(model, "name_or_path", "") or self.architecture).name
        self.require_eval()
        self.reader = reader_for(self.base, tokenizer, self.part, self.name)
        self.thresholds = rope_thresholds(self._config)
        with full_precision():
            try:
                self._understand(as_it_is=False)
            except ProofError:
                if self.structure.written_out:
                    raise
                self._understand(as_it_is=True)  # eager attention of its file is not what it computes

    def _understand(self, as_it_is: bool) -> None:
        """Find the structure of the model and prove it.

        Args:
            as_it_is: Whether its own implementation of attention is observed, also if it could be switched.

        Raises:
            ValueError: If the model does not run, or what is found does not fit.
        """
        trace = self._trace(as_it_is)
        self._take(self._found(trace))
        if isinstance(self.reader, ImageReader):
            labels = override_for(self._config).labels
            find_patches(self.reader, self.source(self.first_entry), self._run_one, labels)
        self.max_length = self.reader.longest or longest_text(self.base)
        layouts = [place.layout for place in self.places]
        self._closed_form = self.part != "cross" and None not in layouts
        try:
            self.prove()
        except ProofError as error:
            raise ProofError(refusal(self.base, trace, str(error))) from error

    @property
    def _config(self) -> Any:
        return self.base.config

    def _trace(self, as_it_is: bool) -> Trace:
        """One forward pass of a few tokens.

        Raises:
            ValueError: If the model does not run.
        """
        require_weights(self.name, self.module)
        batch = self.batch([self.reader.sample()])
        try:
            return traced(self.base, lambda: self.forward(*batch.inputs, *batch.extra), as_it_is)
        except Exception as error:  # whatever the model raises on its own
            raise ValueError(
                f"{self.architecture} does not run on {self.reader.reads} alone ({type(error).__name__}: "
                f"{error}). {named_parts(self.base)}The class HiddenTokenAttribution takes any PyTorch model"
            ) from error

    def _found(self, trace: Trace) -> Structure:
        """The structure of the model.

        Raises:
            ValueError: If what is found does not fit together.
        """
        part = None if self._is_part_of_a_whole else self.part
        try:
            return structure_of(self.base, trace, part, encoder_of(self.base) if part else None)
        except StructureError as error:
            raise ValueError(refusal(self.base, trace, str(error))) from error

    def _take(self, structure: Structure) -> None:
        """Take over what was found."""
        self.structure, self.places = structure, structure.places
        self.num_layers, self.num_heads = len(structure.places), structure.num_heads
        self.key_heads, self.d_head = structure.key_heads, structure.d_head
        self.d_model, self.gaps = structure.d_model, structure.gaps
        self.first_entry = 0 if structure.first is None else -1
        self._memory = structure.memory if self.part == "cross" else None
        self.key_layers = None if self._memory is None else len(self._memory) - 1

    @property
    def size(self) -> Size:
        """The model's dimensions."""
        config = self._config
        inner = getattr(config, "intermediate_size", None)
        return Size(
            layers=self.num_layers,
            heads=self.num_heads,
            width=self.d_model,
            inner=self.structure.inner or inner or 4 * self.d_model,
            d_head=self.d_head,
            key_heads=self.key_heads,
            gated=self.structure.gated,
            causal=self._causal,
            closed_form=self._closed_form,
        )

    def forward(self, ids: Tensor, mask: Tensor | None = None, *others: Tensor | None) -> object:
        """Run the model, without its head where that can be left out.

        Args:
            ids: Token ids ``[batch, position]``, pixel values ``[batch, channel, height, width]`` or features
                ``[batch, feature, frame]``.
            mask: ``[batch, position]``, 1 for real tokens.
            others: Segments; for a decoder, what the encoder reads and its mask.
        """
        with SWITCH.taken(), computable_experts(self.base), differentiable_attention(self.base):
            return self._run(self.base, ids, mask, *others)

    def _run(self, model: Module, *inputs: Tensor | None) -> object:
        """Run the base model, or the model with its head, on what ``forward`` takes."""
        if self._is_part_of_a_whole:
            model = cast(Module, self.base.get_encoder())
        return model(**self._arguments(*inputs))

    def encode(self, text: Any, max_length: int | None = None) -> Encoding:
        """Read a text, an image or audio; with ``max_length``, only the first tokens of a text."""
        encoding = super().encode(text, max_length)
        if self.hides_padding:
            return encoding
        context = 0 if encoding.context is None else len(encoding.context)
        return replace(encoding, regime=1 + len(encoding) + MAX_TOKENS * context)

    @property
    def _is_part_of_a_whole(self) -> bool:
        """Whether only the encoder of an encoder-decoder model runs."""
        return self.part == "encoder" and hasattr(self.base, "decoder")

    def _arguments(self, *inputs: Tensor | None) -> dict[str, Any]:
        """The keyword arguments of the model for what ``forward`` takes."""
        ids, mask, *others = map(self._cast, inputs)
        if self._is_part_of_a_whole:
            return {self.base.main_input_name: ids, "attention_mask": mask}
        if self.part in ("decoder", "cross"):
            read, read_mask = others
            arguments = {self.base.main_input_name: read, "attention_mask": read_mask, "use_cache": False}
            return arguments | {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        return model_arguments(self.base, ids, mask, *others)

    def _cast(self, value: Tensor | None) -> Tensor | None:
        """Pixels and features in the dtype of the weights."""
        return value.to(self.dtype) if value is not None and value.is_floating_point() else value

    def source(self, layer: int) -> Site:
        """The input of block ``layer``, or of the first block of all with -1; for cross attention, of that
        block of the encoder, or its output.
        """
        if layer < 0 and self.structure.first is not None:
            return Site(self.structure.first, at_input=True)
        if self._memory is not None:
            return self._memory[layer]
        place = self.places[layer]
        return Site(place.block, at_input=True, call=place.call)

    def target(self, layer: int, kind: str = "head") -> Site:
        """The ``"head"`` or ``"layer"`` target of block ``layer``."""
        place = self.places[layer]
        if kind == "head":
            return Site(place.projection, at_input=True, call=place.inner_call)
        return Site(place.block, call=place.call, item=0)

    def attention(self, batch: Batch) -> list[Attention]:
        """The attention of every layer, from one forward pass."""
        self.require_eval()
        recording = Recording(self.places, self.structure.written_out)
        with full_precision():
            with recording.of(self.base, len(batch.mask)), torch.inference_mode():
                self.forward(*batch.inputs, *batch.extra)
            self._require_own_attention(batch, recording)
            return [self._attention(recording, layer, batch.mask) for layer in range(self.num_layers)]

    def _require_own_attention(self, batch: Batch, recording: Recording) -> None:
        """Check that an attention function of the user computes what eager attention shows.

        Raises:
            ValueError: If its outputs are not the pattern times the values.
        """
        name = foreign_attention(self.base)
        if name is None or self.structure.written_out:
            return
        with recorded_outputs(self.base, name) as outputs, torch.inference_mode():
            self._run(self.base, *batch.inputs, *batch.extra)
        for layer, place in enumerate(self.places):
            call = recording.call(layer)
            if call is not None:
                found = outputs[place.attention][place.inner_call or 0]
                self._require_heads(call, found, batch.mask, layer, f"the attention function {name!r}")

    def _require_heads(
        self, call: AttentionCall | Product, outputs: Tensor, real: Tensor, layer: int, origin: str
    ) -> None:
        value = repeated(call.value, self.num_heads, 1)
        error = heads_error(call.pattern, value, outputs, real)
        if error > tolerance(self.dtype):
            raise ValueError(
                f"{origin} of {self.name} gives outputs of heads that are off the pattern of eager attention "
                f"times the values by {error:.2g} (block {layer}), so contributions would be of another "
                'model: use attention of transformers, as after model.set_attn_implementation("eager")'
            )

    def _attention(self, recording: Recording, layer: int, real: Tensor) -> Attention:
        place, call = self.places[layer], recording.call(layer)
        if call is None:
            raise ValueError(
                f"{self.architecture} computed no attention in block {layer}, where it did on the tokens of "
                "the proof: its forward pass depends on the text in an unknown way"
            )
        untouched = is_untouched(place.block.modules(), ("captum_hta",))
        if untouched and layer in recording.outputs and not place.gated:
            self._require_heads(call, recording.outputs[layer], real, layer, "the attention")
        factors = None
        if self._closed_form and untouched and isinstance(call, AttentionCall):
            factors = self._factors(place, call, recording, layer)
        return Attention(
            call.pattern, factors, None if place.gated else repeated(call.value, self.num_heads, 1)
        )

    def _factors(
        self, place: Place, call: AttentionCall, recording: Recording, layer: int
    ) -> AttentionFactors | None:
        """The factors of the closed form; ``None`` if the projections are no longer plain matrices."""
        x, layout, block = recording.inputs[layer], place.layout, place.block
        if layout is None or not knows_projections(layout, block) or not knows_norm(layout, block):
            return None
        rotated = layout.query.rotated or layout.key.rotated
        angles = recording.position_embeddings(layer)
        rotary = rotation(place.attention, angles, self.d_head) if rotated and angles is not None else None
        norm, bound = input_norm(layout, block, x), tolerance(self.dtype)
        given = zip((layout.query, layout.key, layout.value), (call.query, call.key, call.value), strict=True)
        for one, found in given:
            if not follows(one, block, recording.projected[layer, one.name], rotary, found, bound):
                return None
        query_map, key_map = (
            later_map(one, block, recording.projected[layer, one.name], rotary, self.num_heads, found)
            for one, found in ((layout.query, call.query), (layout.key, call.key))
        )
        if query_map is None or key_map is None:
            return None
        query_weight, key_weight, value_weight = split_weights(layout, block, self.num_heads, self.d_head)
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
            norm=norm,
            query_map=query_map.jacobian,
            key_map=key_map.jacobian,
            query_row=query_map.row,
            key_row=key_map.row,
            bias=call.bias,
            cap=call.cap,
            has_sinks=call.has_sinks,
        )

    def output_projection(self, layer: int) -> OutputProjection:
        """How block ``layer`` adds the outputs of its heads to its input."""
        place = self.places[layer]
        weight, bias = linear_map(place.projection, self.num_heads * self.d_head, self.device, self.dtype)
        return OutputProjection(
            torch.unflatten(weight, 0, (self.num_heads, self.d_head)),
            bias,
            None if place.sum_norm is None else sum_norm(place.sum_norm),
            place.residual,
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
        if not self._has_direct_head(head):
            raise ValueError(encoder_logits(self.name))
        return Unembedding(weight_of(head), self.structure.final_norm, head)

    def _has_direct_head(self, head: Module) -> bool:
        """Whether only the final norm, and perhaps a scale, lie between the last block and the head."""
        batch = self.batch([self.reader.sample()])
        norm = self.structure.final_norm
        last = self.target(self.num_layers - 1, "layer") if norm is None else Site(norm, item=0)
        sites: dict[str, Module | Site] = {"last": last, "head": Site(head, at_input=True)}
        found = observed(sites, lambda: self.logits(*batch.inputs, *batch.extra))
        if not all(value.isfinite().all() for value in found.values()):
            return len(found) == 2  # what is not finite is named where it is used
        return len(found) == 2 and is_scaled(found["head"], found["last"])

    def logits(self, *args: Any) -> Tensor:
        """The logits for ``(*batch.inputs, *batch.extra)``.

        Raises:
            ValueError: If the model has no head.
        """
        with SWITCH.taken(), computable_experts(self.model), differentiable_attention(self.model):
            out = self.model(**self._arguments(*args), return_dict=True)
        found: Tensor | None = getattr(out, "logits", None)
        if found is None:
            raise ValueError(no_logits(self.name, self.architecture))
        return found

    def prove(self) -> None:
        """Check the adapter on a few tokens; give up the closed form if only that does not hold."""
        self._shorten_sample()
        with self._shortened():
            super().prove()

    def _shorten_sample(self) -> None:
        """Take all tokens of a sample where blocks do not run on the first of them alone, as with a table of
        relative positions.
        """
        reader = self.reader.context if isinstance(self.reader, PairReader) else self.reader
        if isinstance(reader, ImageReader | AudioReader | WaveReader):
            try:
                with self._shortened():
                    self._run_one(self.reader.sample())
            except (RuntimeError, IndexError, ValueError):
                reader.sampled = None

    def _run_one(self, encoding: Encoding) -> object:
        batch = self.batch([encoding])
        return self.forward(*batch.inputs, *batch.extra)

    def _run_proof(self, proof: Proof) -> None:
        proof.run({})
        sample = long_sample(self.reader, longest_window(self._config), self.max_length)
        batch = self.batch([sample])
        proof.require_given(batch, observed(proof.sites_of_blocks(), lambda: self._run_given(batch)))
        self.attention(batch)
        for layer, place in enumerate(self.places):
            if place.gated:
                self._prove_gate(proof, layer)
        sample = self.reader.sample()
        proof.require_only_source(self.batch([turned(sample, self.part)]))
        if sample.ids:
            short = shortened(sample)
            self.hides_padding = proof.hides_padding(self.batch([short]), self.batch([sample, short]))

    def _prove_gate(self, proof: Proof, layer: int) -> None:
        """Check that a gate leaves heads side by side: each times a number makes its part that number larger.

        Raises:
            ProofError: If it does not.
        """
        place, batch = self.places[layer], proof.batch
        factors = torch.linspace(1, 2, self.num_heads, device=self.device)

        def heads() -> Tensor:
            sites: dict[str, Module | Site] = {"heads": self.target(layer)}
            with observed_attention(self.base, lambda module, call: None):
                return observed(sites, lambda: self.forward(*batch.inputs, *batch.extra))["heads"]

        before = torch.unflatten(heads().flatten(2), -1, (self.num_heads, self.d_head))
        with scaled_heads(place.attention, factors):
            after = torch.unflatten(heads().flatten(2), -1, (self.num_heads, self.d_head))
        error = relative_error(before * factors.to(before)[:, None], after)
        what = f"what the output projection reads is not the heads times a gate, by {error:.2g}"
        proof.require(error <= tolerance(self.dtype), f"gate of block {layer}", what, f"off by {error:.1e}")

    def _run_given(self, batch: Batch) -> object:
        """Run the model that was handed in, as its user would call it."""
        arguments = self._arguments(*batch.inputs, *batch.extra)
        if self._is_part_of_a_whole:
            arguments["decoder_input_ids"] = batch.inputs[0].new_zeros((1, 1), dtype=torch.long)
        with computable_experts(self.model):
            return self.given(**arguments)

    @contextmanager
    def _shortened(self) -> Iterator[None]:
        """Within the context, blocks read the first tokens of an image or audio, which have one length."""
        sample = self.reader.sample()
        read = sample.context or sample
        if read.content is None:
            yield
            return
        memory = self.structure.memory
        with replaced(
            self.source(self.first_entry) if memory is None else memory[0], lambda x: x[:, : len(read)]
        ):
            yield
