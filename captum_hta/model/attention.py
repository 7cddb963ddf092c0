"""What an attention layer computes, as far as closed forms and baselines need it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import Module


@dataclass(frozen=True)
class Attention:
    """What one layer's attention did in a forward pass.

    Attributes:
        pattern: ``[batch, head, query, key]``, after the softmax.
        factors: What the closed form needs, or ``None`` where it does not hold.
        value: ``[batch, head, key, d_head]``, which the pattern is multiplied by; ``None`` where the model
            does not show it.
    """

    pattern: Tensor
    factors: AttentionFactors | None = None
    value: Tensor | None = None


@dataclass(frozen=True)
class SumNorm:
    """A LayerNorm.

    Attributes:
        weight, bias: ``[width]``.
        eps: Added to the variance.
    """

    weight: Tensor
    bias: Tensor
    eps: float


@dataclass(frozen=True)
class OutputProjection:
    """How a block adds what its heads say to its input: ``norm(x + sum_h z_h W_h + b)``.

    Attributes:
        weight: ``[head, d_head, width]``.
        bias: ``[width]``, or ``None``.
        norm: The LayerNorm of the sum, in a post-LN block; ``None`` in a pre-LN block.
        residual: Whether the sum is as above; not so where heads' outputs are normalised on their own
            before.
    """

    weight: Tensor
    bias: Tensor | None = None
    norm: SumNorm | None = None
    residual: bool = True


@dataclass(frozen=True)
class Unembedding:
    """How the last hidden embedding becomes logits: ``norm(x) W^T``.

    Attributes:
        weight: ``[token, width]``.
        norm: The final norm, or ``None``.
    """

    weight: Tensor
    norm: Module | None = None


@dataclass(frozen=True)
class TokenNorm:
    r"""The normalisation before the projections of a pre-LN block, at the recorded point.

    Its Jacobian for one token is :math:`\Gamma\,(P - \hat x \hat x^\top / D) / \sigma` with
    :math:`P = I - 1 1^\top / D` for LayerNorm and :math:`P = I` for RMSNorm.

    Attributes:
        normalised: :math:`\hat x`, ``[batch, token, width]``, before weight and bias.
        inverse: :math:`1 / \sigma`, ``[batch, token]``.
        weight: :math:`\Gamma`, ``[width]``.
        centred: Whether the mean is removed (LayerNorm).
    """

    normalised: Tensor
    inverse: Tensor
    weight: Tensor
    centred: bool


@dataclass(frozen=True)
class AttentionFactors:
    r"""One layer of scaled dot-product attention at the recorded point.

    Attributes:
        pattern: ``[batch, head, query, key]``, after the softmax.
        query, key, value: ``[batch, head, token, d_head]``, as they enter the scores and the output.
        scale: The factor of the scores, such as ``d_head ** -0.5``.
        x: The block's input, ``[batch, token, width]``.
        query_weight, key_weight, value_weight: ``[head, d_head, width]``; grouped heads repeated.
        norm: The normalisation between ``x`` and the projections; ``None`` in a post-LN block.
        query_map, key_map: The Jacobians ``[batch or 1, head or 1, token, d_head, d_head]`` of what acts
            on each token's query and key after the projection, such as a rotary embedding.
    """

    pattern: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    x: Tensor
    query_weight: Tensor
    key_weight: Tensor
    value_weight: Tensor
    norm: TokenNorm | None = None
    query_map: Tensor | None = None
    key_map: Tensor | None = None
