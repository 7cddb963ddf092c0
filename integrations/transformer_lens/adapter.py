"""Bridges of TransformerLens 4 as the core's model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module
from transformer_lens.hook_points import HookPoint

from captum_hta.integrations.availability import BRIDGED, is_bridge
from captum_hta.integrations.conditions import is_untouched
from captum_hta.integrations.proof import Proof
from captum_hta.integrations.transformer_lens.hook_points import HookPointModel
from captum_hta.integrations.transformer_lens.internals import wrapped_model, wrapped_module
from captum_hta.integrations.transformers.given import GivenModel
from captum_hta.integrations.transformers.reading import rope_thresholds, vocabulary_of
from captum_hta.integrations.weights import linear_map, sum_norm
from captum_hta.model.attention import AttentionFactors, OutputProjection
from captum_hta.model.sites import Site

HOOKS = {"head": "blocks.{}.attn.hook_z", "layer": "blocks.{}.hook_out"}
"""The hook points of the targets."""


class TransformerLensModel(HookPointModel):
    """A bridge of TransformerLens as the core's model.

    The bridge is used as it is, and hooks that are active on it act on the result. When it is made the
    adapter proves itself on a few tokens: shapes, that ``hook_z`` is the input of the output projection, that
    patterns sum to 1, that a change at the source changes the target, and that the closed form equals
    autograd (otherwise the general modes are used, with a warning).

    Args:
        bridge: A ``TransformerBridge`` in eval mode, with eager attention.
        tokenizer: Its tokenizer. Default: ``None``, the bridge's own: then tokens are those of
            ``bridge.to_tokens``, with BOS if that puts one first.
        name: What to call the model. Default: ``None``, its name in the bridge's configuration.
        given: What the blocks of the model computed before it was bridged, to compare the bridge with.
            Default: ``None``, nothing is compared.

    Raises:
        TypeError: If ``bridge`` is no bridge.
        ValueError: If there is no tokenizer, or the proof fails.
    """

    kind = "bridge"

    def __init__(
        self,
        bridge: Any,
        tokenizer: Any = None,
        name: str | None = None,
        given: GivenModel | None = None,
    ) -> None:
        if not is_bridge(bridge):
            raise TypeError(
                f"bridge must be a TransformerBridge, got {type(bridge).__name__}: use load_model for "
                "names, folders and transformers models"
            )
        self.factor_hooks = {"x": "hook_in", "q": "attn.hook_q", "k": "attn.hook_k", "v": "attn.hook_v"}
        self._given = given
        self.thresholds = rope_thresholds(wrapped_model(bridge).config)
        super().__init__(bridge, tokenizer, name, vocabulary_of(wrapped_model(bridge)))

    @property
    def bridge(self) -> Any:
        """The ``TransformerBridge``."""
        return self.lens

    def _run(self, wanted: str | None, ids: Tensor, mask: Tensor | None, segments: Tensor | None) -> Any:
        """Run the bridge, and return its ``"logits"`` or nothing."""
        options = {} if segments is None or not self._has_segments else {"token_type_ids": segments}
        return self.bridge(ids, attention_mask=mask, return_type=wanted, **options)

    @property
    def _has_segments(self) -> bool:
        config = getattr(wrapped_model(self.bridge), "config", None)
        return getattr(config, "type_vocab_size", 0) > 1

    def source(self, layer: int) -> Module:
        """The hook point of the input of block ``layer``."""
        return self.hook_point(f"blocks.{layer}.hook_in")

    def target(self, layer: int, kind: str = "head") -> Module:
        """The hook point of the ``"head"`` or ``"layer"`` target of block ``layer``."""
        return self.hook_point(HOOKS[kind].format(layer))

    def _may_have_closed_form(self) -> bool:
        return self._is_encoder

    def _factors(self, layer: int, pattern: Tensor, seen: Mapping[str, Tensor]) -> AttentionFactors:
        """The factors of a post-LN block, whose projections read the block's input itself."""

        def weight(name: str) -> Tensor:
            linear: Linear = getattr(self.bridge.blocks[layer].attn, name)
            return torch.unflatten(linear.weight.detach(), 0, (self.num_heads, self.d_head))

        return AttentionFactors(
            pattern=pattern,
            query=self._split(seen["q"]),
            key=self._split(seen["k"]),
            value=self._split(seen["v"]),
            scale=float(self.d_head**-0.5),
            x=seen["x"],
            query_weight=weight("q"),
            key_weight=weight("k"),
            value_weight=weight("v"),
        )

    def output_projection(self, layer: int) -> OutputProjection:
        """How block ``layer`` adds the outputs of its heads to its input."""
        block = self.bridge.blocks[layer]
        width = self.num_heads * self.d_head
        weight, bias = linear_map(wrapped_module(block.attn.o), width, self.device, self.dtype)
        return OutputProjection(
            torch.unflatten(weight, 0, (self.num_heads, self.d_head)),
            bias,
            sum_norm(wrapped_module(block.ln1)) if self._is_encoder else None,
            not hasattr(block, "ln1_post"),
        )

    @property
    def _is_encoder(self) -> bool:
        return self.architecture in BRIDGED

    @property
    def _unembedding_weight(self) -> Tensor:
        return wrapped_module(self.bridge.unembed).get_parameter("weight").detach()

    def _is_unhooked(self, layer: int) -> bool:
        """Whether no hook but the bridge's own may change what a block's attention computes."""
        block = self.bridge.blocks[layer]
        within = (block, wrapped_module(block), block.hook_in, *block.attn.modules())
        points = [module for module in within if isinstance(module, HookPoint)]
        others = [module for module in within if not isinstance(module, HookPoint)]
        projections = (wrapped_module(block.attn.get_submodule(name)) for name in "qkv")
        plain = all(type(projection) is Linear for projection in projections)
        return plain and is_untouched(others, ("transformer_lens",)) and is_untouched(points, ())

    def _run_proof(self, proof: Proof) -> None:
        block = self.bridge.blocks[proof.layer]
        proof.run(
            {
                "source": Site(wrapped_module(block), at_input=True),
                "head": Site(wrapped_module(block.attn.o), at_input=True),
            }
        )
        if self._given is not None:
            proof.require_given(self._given.batch, self._given.values)
            self.attention(self._given.batch)

    def __deepcopy__(self, memo: dict[int, object]) -> TransformerLensModel:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the model that was bridged, without hooks: bridges themselves cannot be pickled."""
        if self._given is None:
            raise TypeError(
                "a bridge cannot be pickled: pickle the model of transformers and its tokenizer, and call "
                'load_model(model, tokenizer, adapter="transformer_lens") where it is unpickled'
            )
        return _bridged_again, (self._given.model, self.tokenizer, self.name)


def _bridged_again(model: Any, tokenizer: Any, name: str) -> TransformerLensModel:
    from captum_hta.integrations.loading import load_model

    loaded = load_model(model, tokenizer, adapter="transformer_lens")
    assert isinstance(loaded, TransformerLensModel)
    loaded.name = name
    return loaded
