"""What models of every version of TransformerLens have in common: named hook points and a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from captum_hta.integrations.adapter import Adapter
from captum_hta.integrations.proof import Proof, encoder_logits, no_logits, require_weights
from captum_hta.integrations.readers.texts import TextReader
from captum_hta.integrations.transformers.layouts import repeated
from captum_hta.model.attention import Attention, AttentionFactors, OutputProjection, Unembedding
from captum_hta.model.encoding import Batch
from captum_hta.model.protocol import Check
from captum_hta.model.sites import observed
from captum_hta.model.size import Size


class HookPointModel(Adapter):
    """A model with hook points as the model that the core works with.

    Args:
        lens: The model, with ``hook_dict`` and ``cfg``.
        tokenizer: Its tokenizer. Default: ``None``, the model's own.
        name: What to call the model. Default: ``None``, its name in its configuration.
        vocabulary: The number of token ids that it embeds.

    Raises:
        ValueError: If there is no tokenizer, or the proof fails.
    """

    key_layers: int | None = None

    def __init__(self, lens: Module, tokenizer: Any, name: str | None, vocabulary: int) -> None:
        tokenizer = tokenizer if tokenizer is not None else getattr(lens, "tokenizer", None)
        if tokenizer is None:
            raise ValueError(f"the {self.kind} has no tokenizer: pass tokenizer=")
        self.lens = self.module = lens
        self.reader = TextReader(tokenizer, vocabulary)
        config = lens.cfg
        self.architecture = str(getattr(config, "architecture", None) or type(lens).__name__)
        self.name = name or getattr(config, "model_name", self.architecture)
        self.num_layers, self.num_heads = config.n_layers, config.n_heads
        self.d_head, self.d_model = config.d_head, config.d_model
        self.max_length = getattr(config, "n_ctx", None)
        self._closed_form = self._may_have_closed_form()
        require_weights(self.name, lens)
        self._require_eval()
        self.checks = self._proven()

    @property
    def size(self) -> Size:
        """The model's dimensions."""
        config = self.lens.cfg
        return Size(
            layers=self.num_layers,
            heads=self.num_heads,
            width=self.d_model,
            inner=getattr(config, "d_mlp", None) or 4 * self.d_model,
            d_head=self.d_head,
            key_heads=getattr(config, "n_key_value_heads", None),
            gated=bool(getattr(config, "gated_mlp", False)),
            causal=self._causal,
            closed_form=self._closed_form,
        )

    # --- the model

    def forward(self, ids: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Any:
        """Run the model on token ids ``[batch, position]``."""
        return self._run(None, ids, mask, segments)

    def hook_point(self, name: str) -> Module:
        """The hook point of that name, such as ``"blocks.3.attn.hook_z"``."""
        return self.lens.hook_dict[name]

    def attention(self, batch: Batch) -> list[Attention]:
        """What every layer's attention does, from one forward pass."""
        self._require_eval()
        closed = [self._closed_form and self._unhooked(layer) for layer in range(self.num_layers)]
        points = self.factor_hooks.values() if any(closed) else (self.factor_hooks["v"],)
        wanted = ["attn.hook_pattern", *points]
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
        seen = {name: kept.get(f"blocks.{layer}.{point}") for name, point in self.factor_hooks.items()}
        value = None if seen["v"] is None else repeated(self._split(seen["v"]), self.num_heads, 1)
        return Attention(pattern, self._factors(layer, pattern, seen) if closed else None, value)

    def _split(self, value: Tensor) -> Tensor:
        """``[batch, head, token, d_head]`` of what hook points of queries, keys and values give."""
        return value.reshape(*value.shape[:2], -1, self.d_head).transpose(1, 2)

    def _observe(self, names: Sequence[str], batch: Batch) -> dict[str, Tensor]:
        """The values of hook points in a forward pass."""
        modules = {name: self.hook_point(name) for name in names}
        return observed(modules, lambda: self.forward(*batch.inputs, *batch.extra))

    def _proven(self) -> list[Check]:
        """Check the adapter; give up the closed form if that alone does not hold."""
        proof = Proof(self, self.architecture, self.reader.sample())
        self._run_proof(proof)
        if self._closed_form:
            self._closed_form = proof.closed_form_holds()
        self._causal = proof.is_causal()
        return proof.checks

    def logits(self, ids: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """What the model's head gives for token ids ``[batch, position]``.

        Raises:
            ValueError: If it has none.
        """
        if not hasattr(self.lens, "unembed"):
            raise ValueError(no_logits(self.name, self.architecture))
        return self._run("logits", ids, mask, segments)

    @property
    def unembedding(self) -> Unembedding:
        """How the last hidden embedding becomes logits.

        Raises:
            ValueError: If the model has no logits of tokens, or more than a norm lies before them.
        """
        if not hasattr(self.lens, "unembed"):
            raise ValueError(no_logits(self.name, self.architecture))
        if self._is_encoder:
            raise ValueError(encoder_logits(self.name))
        return Unembedding(self._unembedding_weight, getattr(self.lens, "ln_final", None))

    # --- what each kind has of its own

    kind: str
    """What a user calls the kind of object."""
    factor_hooks: dict[str, str]
    """Where in a block the input ``"x"`` and ``"q"``, ``"k"`` and ``"v"`` of the closed form are."""

    def _run(self, wanted: str | None, ids: Tensor, mask: Tensor | None, segments: Tensor | None) -> Any:
        """Run the model, for its ``"logits"`` or for nothing."""
        raise NotImplementedError

    def output_projection(self, layer: int) -> OutputProjection:
        """What becomes of the heads' outputs of block ``layer``."""
        raise NotImplementedError

    @property
    def _is_encoder(self) -> bool:
        raise NotImplementedError

    @property
    def _unembedding_weight(self) -> Tensor:
        raise NotImplementedError

    def source(self, layer: int) -> Module:
        """The hook point whose value enters block ``layer``."""
        raise NotImplementedError

    def target(self, layer: int, kind: str = "head") -> Module:
        """The hook point of the ``"head"`` or ``"layer"`` target of block ``layer``."""
        raise NotImplementedError

    def _may_have_closed_form(self) -> bool:
        raise NotImplementedError

    def _factors(self, layer: int, pattern: Tensor, seen: dict[str, Tensor]) -> AttentionFactors:
        raise NotImplementedError

    def _unhooked(self, layer: int) -> bool:
        raise NotImplementedError

    def _run_proof(self, proof: Proof) -> None:
        raise NotImplementedError
