"""The projections and norms of a block, as the closed form needs them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import LayerNorm, Module

from captum_hta.integrations.transformers.layouts import Layout
from captum_hta.integrations.weights import is_plain, matrix, repeated, token_norm, weight_of
from captum_hta.model.attention import TokenNorm


def split_weights(layout: Layout, attention: Module, heads: int, key_heads: int, width: int) -> list[Tensor]:
    """The weights ``[head, d_head, width]`` of queries, keys and values.

    Args:
        layout: The layout.
        attention: A block's attention.
        heads: Number of query heads.
        key_heads: Number of key and value heads, each repeated for its group of query heads.
        width: Width of a head.
    """
    weights = [matrix(attention.get_submodule(name)) for name in layout.projections]
    if layout.joined == "parts":
        sizes = [heads * width, key_heads * width, key_heads * width]
        weights = list(torch.split(weights[0], sizes))
    elif layout.joined == "heads":
        triples = torch.unflatten(weights[0], 0, (heads, 3, width))
        weights = [weight.flatten(0, 1) for weight in triples.unbind(1)]
    return [repeated(torch.unflatten(weight, 0, (-1, width)), heads, 0) for weight in weights]


def knows_projections(layout: Layout, attention: Module) -> bool:
    """Whether queries, keys and values are computed by plain matrices, and not by wrapped ones."""
    return all(is_plain(attention.get_submodule(name)) for name in layout.projections)


def knows_norm(layout: Layout, block: Module) -> bool:
    """Whether the norm before the projections is one of PyTorch or ``transformers``."""
    norm = None if layout.norm is None else block.get_submodule(layout.norm)
    return norm is None or type(norm).__module__.partition(".")[0] in ("torch", "transformers")


def input_norm(layout: Layout, block: Module, x: Tensor) -> TokenNorm | None:
    """The normalisation of a block's input, or ``None`` for post-LN blocks.

    Args:
        layout: The layout.
        block: A block.
        x: Its input, ``[batch, token, width]``.
    """
    if layout.norm is None:
        return None
    norm = block.get_submodule(layout.norm)
    weight = weight_of(norm)
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    assert isinstance(eps, float)
    return token_norm(
        x, 1 + weight if layout.unit_offset else weight, eps, centred=isinstance(norm, LayerNorm)
    )
