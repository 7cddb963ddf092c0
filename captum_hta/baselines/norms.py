"""The lengths of what tokens give, after Kobayashi et al. 2020 and 2021."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_hta.baselines.base import Baseline, Example, wide
from captum_hta.model.attention import OutputProjection
from captum_hta.model.protocol import Model


class ValueWeightedNorm(Baseline):
    r"""The length of what a head takes from a token: :math:`\| \alpha_{ji} f(x_i) \|`, with :math:`f(x)` the
    value of a token after the output projection, or for the whole layer
    :math:`\| \sum_h \alpha_{ji}^h f^h(x_i) \|`.

    Args:
        model: An adapter around a model.
        heads: Whether each head is taken alone (the default), or all of a layer together.

    References:
        Kobayashi et al., "Attention is Not Only a Weight: Analyzing Transformers with Vector Norms", EMNLP
        2020; Captum's tutorial "Interpreting BERT Models (Part 2)".
    """

    crosses = True

    def __init__(self, model: Model, heads: bool = True) -> None:
        super().__init__(model)
        self.heads = heads

    @property
    def name(self) -> str:
        """What tables call it."""
        return "value-weighted norm" if self.heads else "value-weighted norm of the layer"

    @property
    def axes(self) -> str:
        """The axes of the result."""
        return "batch layer head query key" if self.heads else "batch layer query key"

    def of(self, example: Example) -> Tensor:
        """The values of one text, without the batch axis."""
        if self.heads:
            return example.pattern * example.projected.norm(dim=-1)[..., None, :]
        return mixed(example).norm(dim=-1)


class ValueNorm(Baseline):
    r"""The length of a token's value after the output projection, :math:`\| f(x_i) \|`, the same for every
    query.

    References:
        Kobayashi et al. 2020.
    """

    name = "value norm"
    crosses = True

    def of(self, example: Example) -> Tensor:
        """The values of one text, without the batch axis."""
        return example.projected.norm(dim=-1)[..., None, :].expand_as(example.pattern)


class BlockNorm(Baseline):
    """The length of what a token gives to a block's sum of attention and residual, behind the norm of a
    post-LN block.

    References:
        Kobayashi et al., "Incorporating Residual and Normalization Layers into Analysis of Masked Language
        Models", EMNLP 2021 (there "AttnResLn-N"; of a pre-LN block "AttnRes-N").
    """

    name = "block norm"
    axes = "batch layer query key"

    def of(self, example: Example) -> Tensor:
        """The values of one text, without the batch axis."""
        return torch.stack(
            [block_parts(example, layer)[0].norm(dim=-1) for layer in range(len(example.projections))]
        )


def mixed(example: Example) -> Tensor:
    """What each key gives to each query through all heads: ``[layer, query, key, width]``."""
    return torch.einsum("lhqk,lhkd->lqkd", example.pattern, example.projected)


def block_parts(example: Example, layer: int) -> tuple[Tensor, Tensor]:
    """A block's sum of attention and residual taken apart by keys, through its norm where it has one there.

    Returns:
        The parts ``[query, key, width]``, and the whole ``[query, width]``: the parts with what belongs to no
        key, which are biases. It is what the second half of the block reads.

    Raises:
        ValueError: If what heads say is not added to the residual as it is.
    """
    projection = example.projections[layer]
    if not projection.residual:
        raise ValueError(
            f"{example.model.name} normalises or scales what its heads say before it is added, which this "
            "method does not know"
        )
    parts = torch.einsum("hqk,hkd->qkd", example.pattern[layer], example.projected[layer])
    parts = parts + torch.diag_embed(example.hidden[layer].mT).permute(1, 2, 0)
    whole = parts.sum(1)
    if projection.bias is not None:
        whole = whole + wide(projection.bias)
    return (parts, whole) if projection.norm is None else _normalised(projection, parts, whole)


def _normalised(projection: OutputProjection, parts: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Through a LayerNorm whose scale is that of the whole."""
    norm = projection.norm
    scale = (whole.var(-1, unbiased=False) + norm.eps).rsqrt()
    weight = wide(norm.weight)

    def through(vectors: Tensor, by: Tensor) -> Tensor:
        return (vectors - vectors.mean(-1, keepdim=True)) * weight * by

    return through(parts, scale[:, None, None]), through(whole, scale[:, None]) + wide(norm.bias)
