"""``HookedTransformer`` and ``HookedEncoder`` of TransformerLens 2 and 3 as the core's model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from captum_hta.integrations.conditions import is_untouched
from captum_hta.integrations.proof import Proof
from captum_hta.integrations.transformer_lens.hook_points import HookPointModel
from captum_hta.integrations.weights import repeated, token_norm
from captum_hta.model.attention import AttentionFactors, OutputProjection, SumNorm, TokenNorm
from captum_hta.model.sites import Site

_NEEDED = ("blocks.0.hook_resid_pre", "blocks.0.attn.hook_z", "blocks.0.attn.hook_pattern")
_POST_NORM = "hook_normalized_resid_post"
"""The hook point that only post-LN blocks have: their output; ``hook_resid_post`` lies before the norm."""


class HookedModel(HookPointModel):
    """A ``HookedTransformer`` or ``HookedEncoder`` as the core's model.

    The model is used as it is, and hooks that are active on it act on the result. The tokenizer's padding
    side does not matter. The adapter proves itself as
    :class:`captum_hta.integrations.transformer_lens.adapter.TransformerLensModel` does.

    Args:
        model: The model.
        tokenizer: Its tokenizer. Default: ``None``, the model's own: then tokens are those of its
            ``to_tokens``, with BOS if that puts one first.
        name: What to call the model. Default: ``None``, its name in its configuration.

    Raises:
        TypeError: If ``model`` lacks the hook points of a ``HookedTransformer``.
        ValueError: If there is no tokenizer, its weights are in 4 bits, or the proof fails.
    """

    def __init__(self, model: Any, tokenizer: Any = None, name: str | None = None) -> None:
        self.kind = type(model).__name__
        missing = [point for point in _NEEDED if point not in getattr(model, "hook_dict", ())]
        if missing:
            raise TypeError(
                f"model must be a HookedTransformer or a HookedEncoder, got {self.kind}, which has no "
                f"{missing[0]}: the class HiddenTokenAttribution takes its hook points"
            )
        if getattr(model.cfg, "load_in_4bit", False):
            raise ValueError(f"this {self.kind} has weights in 4 bits: load it in float16 or wider")
        self._parameters = inspect.signature(model.forward).parameters
        self._has_post_norm = f"blocks.0.{_POST_NORM}" in model.hook_dict
        rotary = "rot_" if "blocks.0.attn.hook_rot_q" in model.hook_dict else ""
        self.factor_hooks = {
            "x": "hook_resid_pre",
            "q": f"attn.hook_{rotary}q",
            "k": f"attn.hook_{rotary}k",
            "v": "attn.hook_v",
        }
        super().__init__(model, tokenizer, name, model.cfg.d_vocab)

    def _run(self, wanted: str | None, ids: Tensor, mask: Tensor | None, segments: Tensor | None) -> Any:
        """Run the model, and return its ``"logits"`` or nothing.

        The mask is always passed. Otherwise a ``HookedTransformer`` whose tokenizer pads on the left makes
        its own, and takes a first token for padding if the two have one id.
        """
        if "one_zero_attention_mask" in self._parameters:
            return self.lens(ids, return_type=wanted, token_type_ids=segments, one_zero_attention_mask=mask)
        with _linearizable_rotation(self.lens.blocks):
            return self.lens(ids, return_type=wanted, attention_mask=mask)

    def source(self, layer: int) -> Module:
        """The hook point of the input of block ``layer``."""
        return self.hook_point(f"blocks.{layer}.hook_resid_pre")

    def target(self, layer: int, kind: str = "head") -> Module:
        """The hook point of the ``"head"`` or ``"layer"`` target of block ``layer``."""
        last = _POST_NORM if self._has_post_norm else "hook_resid_post"
        return self.hook_point(f"blocks.{layer}.{'attn.hook_z' if kind == 'head' else last}")

    def _may_have_closed_form(self) -> bool:
        """Capped scores and normalised queries and keys have no closed form here."""
        config = self.lens.cfg
        capped = getattr(config, "attn_scores_soft_cap", -1) > 0
        return not capped and not getattr(config, "use_qk_norm", False)

    def _factors(self, layer: int, pattern: Tensor, seen: Mapping[str, Tensor]) -> AttentionFactors:
        block = self.lens.blocks[layer]
        rotation = self._rotation(block.attn, pattern.shape[-1])
        query, key, value = (repeated(seen[name].transpose(1, 2), self.num_heads, 1) for name in "qkv")
        weights = (getattr(block.attn, name).detach().mT for name in ("W_Q", "W_K", "W_V"))
        query_weight, key_weight, value_weight = weights
        return AttentionFactors(
            pattern=pattern,
            query=query,
            key=key,
            value=value,
            scale=1 / float(block.attn.attn_scale),
            x=seen["x"],
            query_weight=query_weight,
            key_weight=key_weight,
            value_weight=value_weight,
            norm=None if self._has_post_norm else _input_norm(block.ln1, seen["x"]),
            query_map=rotation,
            key_map=rotation,
        )

    def output_projection(self, layer: int) -> OutputProjection:
        """How block ``layer`` adds the outputs of its heads to its input."""
        block, norm = self.lens.blocks[layer], None
        if self._has_post_norm:
            norm = SumNorm(block.ln1.w.detach(), block.ln1.b.detach(), float(block.ln1.eps))
        residual = not hasattr(block, "ln1_post")
        return OutputProjection(block.attn.W_O.detach(), block.attn.b_O.detach(), norm, residual)

    @property
    def _is_encoder(self) -> bool:
        return self._has_post_norm

    @property
    def _unembedding_weight(self) -> Tensor:
        weight: Tensor = self.lens.unembed.W_U
        return weight.detach().mT

    def _rotation(self, attention: Any, tokens: int) -> Tensor | None:
        """A rotary embedding as matrices ``[1, 1, token, d_head, d_head]``, by the model's own function."""
        if "attn.hook_rot_q" not in self.factor_hooks.values():
            return None
        basis = torch.eye(self.d_head, dtype=self.dtype, device=self.device)
        directions = basis[:, None, None].expand(-1, tokens, 1, -1)
        rotated: Tensor = attention.apply_rotary(directions)
        return rotated[:, :, 0].permute(1, 2, 0)[None, None]

    def _is_unhooked(self, layer: int) -> bool:
        """Whether no hook may change what a block's attention computes."""
        return is_untouched(self.lens.blocks[layer].modules(), ())

    def _run_proof(self, proof: Proof) -> None:
        block = self.lens.blocks[proof.layer]
        proof.run({"source": Site(block, at_input=True)})
        values = proof.values({"mixed": Site(block.attn)})
        out = values["mixed read"].double()
        mixed = torch.einsum("bphd,hdm->bpm", values["head"].double(), block.attn.W_O.detach().double())
        error = ((mixed + block.attn.b_O.detach() - out).abs().max() / out.abs().max()).item()
        fits = error < max(1e-3, 16 * torch.finfo(self.dtype).eps)
        what = "the head target is not what the output projection reads"
        proof.require(fits, "place of the head", what, f"off by {error:.1e}")


@contextmanager
def _linearizable_rotation(blocks: Iterable[Any]) -> Iterator[None]:
    """Replace the rotary embeddings by ones that write nothing in place, which has no forward derivative."""
    attentions = [block.attn for block in blocks if hasattr(block.attn, "rotary_sin")]
    for attention in attentions:
        adjacent = getattr(attention.cfg, "rotary_adjacent_pairs", False)
        attention.rotate_every_two = _rotated_pairs if adjacent else _rotated_halves
    try:
        yield
    finally:
        for attention in attentions:
            vars(attention).pop("rotate_every_two", None)


def _rotated_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _rotated_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _input_norm(norm: Any, x: Tensor) -> TokenNorm | None:
    """The normalisation before the projections; its weight and bias may be folded into the projections."""
    if not hasattr(norm, "eps"):
        return None  # the identity of a configuration without norms
    weight: Tensor | None = getattr(norm, "w", None)
    weight = x.new_ones(x.shape[-1]) if weight is None else weight.detach()
    return token_norm(x, weight, float(norm.eps), centred=type(norm).__name__.startswith("Layer"))
