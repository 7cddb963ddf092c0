"""The common base of the adapters of TransformerLens: models with named hook points and a configuration."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from captum_hta.integrations.adapter import Adapter
from captum_hta.integrations.conditions import encoder_logits, heads_error, no_logits, tolerance
from captum_hta.integrations.readers.texts import TextReader
from captum_hta.integrations.transformer_lens.tokens import LensTextReader
from captum_hta.integrations.weights import repeated
from captum_hta.model.attention import Attention, AttentionFactors, Unembedding
from captum_hta.model.encoding import Batch
from captum_hta.model.sites import Site, observed
from captum_hta.model.size import Size


class HookPointModel(Adapter):
    """A model with hook points as the core's model.

    Args:
        lens: The model, with ``hook_dict`` and ``cfg``.
        tokenizer: Its tokenizer. Default: ``None``, the model's own: then tokens are those of its
            ``to_tokens``, with BOS if that puts one first.
        name: What to call the model. Default: ``None``, its name in its configuration.
        vocabulary: The number of token ids that it embeds.

    Attributes:
        kind: What a user calls this kind of object.
        factor_hooks: The hook points of a block that the closed form needs: its input ``"x"``, and queries
            ``"q"``, keys ``"k"`` and values ``"v"``.

    Raises:
        ValueError: If there is no tokenizer, or the proof fails.
    """

    kind: str
    factor_hooks: Mapping[str, str]

    def __init__(self, lens: Any, tokenizer: Any, name: str | None, vocabulary: int) -> None:
        if tokenizer is None and getattr(lens, "tokenizer", None) is None:
            raise ValueError(f"the {self.kind} has no tokenizer: pass tokenizer=")
        self.lens = self.module = lens
        self.reader = (
            LensTextReader(lens, vocabulary) if tokenizer is None else TextReader(tokenizer, vocabulary)
        )
        config = lens.cfg
        self.architecture = str(getattr(config, "architecture", None) or type(lens).__name__)
        self.name = name or str(getattr(config, "model_name", None) or self.architecture)
        self.num_layers, self.num_heads = config.n_layers, config.n_heads
        self.d_head, self.d_model = config.d_head, config.d_model
        self.max_length = getattr(config, "n_ctx", None)
        self._closed_form = self._may_have_closed_form()
        self.prove()

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

    def forward(self, ids: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> object:
        """Run the model on token ids ``[batch, position]``."""
        return self._run(None, ids, mask, segments)

    def hook_point(self, name: str) -> Module:
        """The hook point of that name, such as ``"blocks.3.attn.hook_z"``."""
        point: Module = self.lens.hook_dict[name]
        return point

    def attention(self, batch: Batch) -> list[Attention]:
        """The attention of every layer, from one forward pass."""
        self.require_eval()
        closed = [self._closed_form and self._is_unhooked(layer) for layer in range(self.num_layers)]
        points = self.factor_hooks.values() if any(closed) else (self.factor_hooks["v"],)
        wanted = ["attn.hook_pattern", "attn.hook_z", *points]
        names = [f"blocks.{layer}.{name}" for layer in range(self.num_layers) for name in wanted]
        seen = self._observe(names, batch)
        found = [self._attention(layer, seen, closed[layer]) for layer in range(self.num_layers)]
        for layer, one in enumerate(found):
            if one.value is not None and self._is_unhooked(layer):
                outputs = seen[f"blocks.{layer}.attn.hook_z"]
                self._require_heads(layer, heads_error(one.pattern, one.value, outputs, batch.mask))
        return found

    def _require_heads(self, layer: int, error: float) -> None:
        if error > tolerance(self.dtype):
            raise ValueError(
                f"the outputs of heads of {self.name} are off its patterns times its values by {error:.2g} "
                f"(block {layer}), so contributions would be of another model"
            )

    def _attention(self, layer: int, values: Mapping[str, Tensor], closed: bool) -> Attention:
        pattern = values.get(f"blocks.{layer}.attn.hook_pattern")
        if pattern is None or pattern.dim() != 4:
            raise ValueError(
                f"{self.architecture} gives no attention pattern in block {layer}: it must run eager "
                'attention, as after model.set_attn_implementation("eager")'
            )
        names = {name: f"blocks.{layer}.{point}" for name, point in self.factor_hooks.items()}
        seen = {name: values[point] for name, point in names.items() if point in values}
        value = repeated(self._split(seen["v"]), self.num_heads, 1) if "v" in seen else None
        return Attention(pattern, self._factors(layer, pattern, seen) if closed else None, value)

    def _split(self, value: Tensor) -> Tensor:
        """Queries, keys or values of a hook point as ``[batch, head, token, d_head]``."""
        return value.reshape(*value.shape[:2], -1, self.d_head).transpose(1, 2)

    def _observe(self, names: Sequence[str], batch: Batch) -> dict[str, Tensor]:
        """The values of hook points in a forward pass."""
        points: dict[str, Module | Site] = {name: self.hook_point(name) for name in names}
        return observed(points, lambda: self.forward(*batch.inputs, *batch.extra))

    def logits(self, ids: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """The logits for token ids ``[batch, position]``.

        Raises:
            ValueError: If the model has no head.
        """
        self._require_head()
        found: Tensor = self._run("logits", ids, mask, segments)
        return found

    @property
    def unembedding(self) -> Unembedding:
        """How the last hidden embedding becomes logits.

        Raises:
            ValueError: If the model has no logits of tokens, or more than a norm lies before them.
        """
        self._require_head()
        if self._is_encoder:
            raise ValueError(encoder_logits(self.name))
        return Unembedding(self._unembedding_weight, getattr(self.lens, "ln_final", None), self.lens.unembed)

    def _require_head(self) -> None:
        if not hasattr(self.lens, "unembed"):
            raise ValueError(no_logits(self.name, self.architecture))

    @abstractmethod
    def _run(self, wanted: str | None, ids: Tensor, mask: Tensor | None, segments: Tensor | None) -> Any:
        """Run the model, and return its ``"logits"`` or nothing."""

    @property
    @abstractmethod
    def _is_encoder(self) -> bool:
        """Whether more than a norm lies between the last block and the logits."""

    @property
    @abstractmethod
    def _unembedding_weight(self) -> Tensor:
        """``[token, width]``."""

    @abstractmethod
    def _may_have_closed_form(self) -> bool:
        """Whether the closed form is known for this kind of model."""

    @abstractmethod
    def _factors(self, layer: int, pattern: Tensor, seen: Mapping[str, Tensor]) -> AttentionFactors:
        """The factors of the closed form, from the values of ``factor_hooks``."""

    @abstractmethod
    def _is_unhooked(self, layer: int) -> bool:
        """Whether no hook may change what a block's attention computes."""

    @abstractmethod
    def source(self, layer: int) -> Module:
        """The hook point of the input of block ``layer``."""

    @abstractmethod
    def target(self, layer: int, kind: str = "head") -> Module:
        """The hook point of the ``"head"`` or ``"layer"`` target of block ``layer``."""
