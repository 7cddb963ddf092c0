"""Bridges of TransformerLens 4 as the core's model, and loading of any model by name, folder or object."""

from __future__ import annotations

import importlib
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.nn import Linear, Module
from transformer_lens.hook_points import HookPoint

from captum_hta.integrations.proof import Proof, is_untouched
from captum_hta.integrations.transformer_lens.hook_points import HookPointModel
from captum_hta.integrations.transformers.layouts import linear_map, sum_norm
from captum_hta.model.attention import AttentionFactors, OutputProjection
from captum_hta.model.sites import Site

if TYPE_CHECKING:  # TransformerLens has bridges since its version 4
    from transformer_lens.model_bridge import TransformerBridge

HOOKS = {"head": "blocks.{}.attn.hook_z", "layer": "blocks.{}.hook_out"}

_POST_NORM = ("BertForMaskedLM", "BertLMHeadModel", "RobertaForMaskedLM")
"""Architectures whose projections read the block's input itself, so that the closed form is known."""


class TransformerLensModel(HookPointModel):
    """A TransformerLens bridge as the model that the core works with.

    The bridge is used as it is: hooks that are active on it act on the result. On creation the adapter
    proves itself on a few tokens: shapes, that ``hook_z`` is what the output projection reads, that
    patterns sum to 1, that a change at the source changes the target, and that the closed form agrees
    with autograd (else the general modes are taken, with a warning).

    Args:
        bridge: A ``TransformerBridge`` in eval mode, with eager attention.
        tokenizer: Its tokenizer. Default: ``None``, the bridge's own.
        name: What to call the model. Default: ``None``, its name in the bridge's configuration.

    Raises:
        TypeError: If ``bridge`` is no bridge.
        ValueError: If there is no tokenizer, or the proof fails.
    """

    kind = "bridge"
    factor_hooks: ClassVar = {"x": "hook_in", "q": "attn.hook_q", "k": "attn.hook_k", "v": "attn.hook_v"}

    def __init__(self, bridge: TransformerBridge, tokenizer: Any = None, name: str | None = None) -> None:
        if not is_bridge(bridge):
            raise TypeError(
                f"bridge must be a TransformerBridge, got {type(bridge).__name__}: use load_model for "
                "names, folders and transformers models"
            )
        vocabulary = bridge.original_model.get_input_embeddings().weight.shape[0]
        super().__init__(bridge, tokenizer, name, vocabulary)

    @property
    def bridge(self) -> TransformerBridge:
        """The bridge."""
        return self.lens

    def _run(self, wanted: str | None, ids: Tensor, mask: Tensor | None, segments: Tensor | None) -> Any:
        """Run the bridge, for its ``"logits"`` or for nothing."""
        options = {} if segments is None or not self._has_segments else {"token_type_ids": segments}
        return self.bridge(ids, attention_mask=mask, return_type=wanted, **options)

    @property
    def _has_segments(self) -> bool:
        config = getattr(self.bridge.original_model, "config", None)
        return getattr(config, "type_vocab_size", 0) > 1

    def source(self, layer: int) -> Module:
        """The hook point whose value enters block ``layer``."""
        return self.hook_point(f"blocks.{layer}.hook_in")

    def target(self, layer: int, kind: str = "head") -> Module:
        """The hook point of the ``"head"`` or ``"layer"`` target of block ``layer``."""
        return self.hook_point(HOOKS[kind].format(layer))

    def _may_have_closed_form(self) -> bool:
        return self._is_encoder

    def _factors(self, layer: int, pattern: Tensor, seen: dict[str, Tensor]) -> AttentionFactors:
        """The closed form's view of a post-LN block: projections read the block's input itself."""

        def weight(name: str) -> Tensor:
            linear = getattr(self.bridge.blocks[layer].attn, name)
            return linear.weight.detach().unflatten(0, (self.num_heads, self.d_head))

        return AttentionFactors(
            pattern=pattern,
            query=self._split(seen["q"]),
            key=self._split(seen["k"]),
            value=self._split(seen["v"]),
            scale=self.d_head**-0.5,
            x=seen["x"],
            query_weight=weight("q"),
            key_weight=weight("k"),
            value_weight=weight("v"),
        )

    def output_projection(self, layer: int) -> OutputProjection:
        """What becomes of the heads' outputs of block ``layer``."""
        block = self.bridge.blocks[layer]
        width = self.num_heads * self.d_head
        weight, bias = linear_map(block.attn.o.original_component, width, self.device, self.dtype)
        return OutputProjection(
            weight.unflatten(0, (self.num_heads, self.d_head)),
            bias,
            sum_norm(block.ln1.original_component) if self._is_encoder else None,
            not hasattr(block, "ln1_post"),
        )

    @property
    def _is_encoder(self) -> bool:
        return self.architecture in _POST_NORM

    @property
    def _unembedding_weight(self) -> Tensor:
        return self.bridge.unembed.original_component.weight.detach()

    def _unhooked(self, layer: int) -> bool:
        """Whether no hook but the bridge's own may change what a block's attention computes."""
        block = self.bridge.blocks[layer]
        within = (block, block.original_component, block.hook_in, *block.attn.modules())
        points = [module for module in within if isinstance(module, HookPoint)]
        parts = [module for module in within if not isinstance(module, HookPoint)]
        plain = all(type(block.attn.get_submodule(name).original_component) is Linear for name in "qkv")
        return plain and is_untouched(parts, ("transformer_lens",)) and is_untouched(points, ())

    def _run_proof(self, proof: Proof) -> None:
        block = self.bridge.blocks[proof.layer]
        proof.run(
            {
                "source": Site(block.original_component, at_input=True),
                "head": Site(block.attn.o.original_component, at_input=True),
            }
        )


def is_bridge(model: Any) -> bool:
    """Whether a model is a ``TransformerBridge``, by what it has."""
    return all(hasattr(model, name) for name in ("hook_dict", "cfg", "original_model"))


def has_bridges() -> bool:
    """Whether the installed TransformerLens has the bridges that this package works with."""
    return int(metadata.version("transformer-lens").partition(".")[0]) >= 4


def _bridges() -> ModuleType:
    """The module that builds bridges.

    Raises:
        ModuleNotFoundError: If TransformerLens is of a version without them.
    """
    if not has_bridges():
        raise ModuleNotFoundError(
            f"TransformerLens {metadata.version('transformer-lens')} has no bridges that fit: install "
            "transformer-lens>=4.3, leave out adapter, or pass a HookedTransformer"
        )
    return importlib.import_module("captum_hta.integrations.transformer_lens.bridges")
