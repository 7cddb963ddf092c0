"""What an attention layer computes, as needed by the closed form and by the baselines."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import Module


@dataclass(frozen=True)
class Attention:
    """The attention of one layer in a forward pass.

    Attributes:
        pattern: ``[batch, head, query, key]``, after the softmax.
        factors: The factors of the closed form, or ``None`` where it does not hold.
        value: The values ``[batch, head, key, d_head]``, or ``None`` where the model does not expose them.
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
    """How a block adds the outputs of its heads to its input: ``norm(x + sum_h z_h W_h + b)``.

    Attributes:
        weight: ``[head, d_head, width]``.
        bias: ``[width]``, or ``None``.
        norm: The LayerNorm of the sum, in a post-LN block; ``None`` in a pre-LN block.
        residual: Whether the formula holds; it does not where the heads' outputs are normalised before they
            are added.
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
        norm: The final norm, or ``None`` without one.
        head: The module that multiplies by the weight, and adds a bias if there is one.
    """

    weight: Tensor
    norm: Module | None = None
    head: Module | None = None


@dataclass(frozen=True)
class TokenNorm:
    r"""The normalisation before the projections of a pre-LN block, at one forward pass.

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
    r"""The factors of one layer of scaled dot-product attention, at one forward pass.

    Attributes:
        pattern: ``[batch, head, query, key]``, after the softmax.
        query, key, value: ``[batch, head, token, d_head]``, as used in the scores and the output.
        scale: The factor of the scores, such as ``d_head ** -0.5``.
        x: The block's input, ``[batch, token, width]``.
        query_weight, key_weight, value_weight: ``[head, d_head, width]``, repeated for grouped heads.
        norm: The normalisation between ``x`` and the projections; ``None`` in a post-LN block.
        bias: What is added to the scores, such as position biases; broadcasts to the pattern. ``None``
            if that is nothing except masks of the keys that are not seen.
        query_map, key_map: The Jacobians ``[batch or 1, head or 1, token, d_head, row]`` of the maps that
            follow the query and key projections, such as rotary embeddings and norms; ``None`` without one.
            There are ``d_head`` rows, and one more with ``query_row`` or ``key_row``.
        query_row, key_row: Further rows ``[batch, token, width]`` of the query and key projections, which
            all heads share, where a norm of all heads follows; ``None`` without one.
        cap: Scores ``s`` become ``cap * tanh(s / cap)``, before anything is added; ``None`` without a cap.
        has_sinks: Whether a part of the softmax goes to a sink, so that rows of ``pattern`` do not sum to 1.
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
    bias: Tensor | None = None
    query_row: Tensor | None = None
    key_row: Tensor | None = None
    cap: float | None = None
    has_sinks: bool = False

    @property
    def shares_jacobians(self) -> bool:
        """Whether all tokens have the same Jacobians of values and keys, which are the weights."""
        return self.norm is None and self.key_map is None
