"""What reaches a token through all layers, by matrices of single layers."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import maximum_flow
from torch import Tensor

from captum_hta.baselines.base import Baseline, Example
from captum_hta.baselines.norms import block_parts
from captum_hta.model.protocol import Model

RESIDUAL = 0.5
"""Share of the residual connection in a layer."""
FLOW_UNITS = 1 << 24
"""Parts of a capacity of one: flows are found in integers."""


class AttentionRollout(Baseline):
    r"""Attention multiplied through the layers, :math:`\tilde A_l = \hat A_l \tilde A_{l-1}` with
    :math:`\hat A = (\bar A + I) / 2`, the mean over heads and the residual connection.

    References:
        Abnar and Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020.
    """

    name = "attention rollout"
    axes = "batch layer query key"

    def of(self, example: Example) -> Tensor:
        """The values of one text, without the batch axis."""
        return rolled_out(with_residual(example.pattern))


class AttentionFlow(Baseline):
    """The most that can flow from a token of a layer down to a token of the input, where attention with the
    residual connection (as in attention rollout) gives the capacities between layers.

    A flow problem for each layer, query and key: slow.

    References:
        Abnar and Zuidema 2020.
    """

    name = "attention flow"
    axes = "batch layer query key"

    def of(self, example: Example) -> Tensor:
        """The values of one text, without the batch axis."""
        steps = with_residual(example.pattern)
        flows = [_flows(steps[: layer + 1]) for layer in range(len(steps))]
        return torch.stack(flows).to(steps)


class Alti(Baseline):
    r"""How near what a key gives comes to what a block's sum of attention and residual is, in the :math:`L_1`
    norm: :math:`\max(0, \|y_j\|_1 - \|y_j - T_j(x_i)\|_1)`, with rows that sum to 1.

    Args:
        model: An adapter around a model.
        rollout: Multiply the layers up to each (the default), or give each alone.

    References:
        Ferrando et al., "Measuring the Mixing of Contextual Information in the Transformer", EMNLP 2022.
    """

    axes = "batch layer query key"

    def __init__(self, model: Model, rollout: bool = True) -> None:
        super().__init__(model)
        self.rollout = rollout

    @property
    def name(self) -> str:
        """What tables call it."""
        return "ALTI" if self.rollout else "ALTI of the layer"

    def of(self, example: Example) -> Tensor:
        """The values of one text, without the batch axis."""
        steps = torch.stack([_nearness(*block_parts(example, layer)) for layer in range(len(example.hidden))])
        return rolled_out(steps) if self.rollout else steps


def with_residual(pattern: Tensor) -> Tensor:
    """``[layer, query, key]``: the mean over heads, and the residual connection."""
    identity = torch.eye(pattern.shape[-1], dtype=pattern.dtype, device=pattern.device)
    return RESIDUAL * identity + (1 - RESIDUAL) * pattern.mean(1)


def rolled_out(steps: Tensor) -> Tensor:
    """``[layer, query, key]``: for each layer the product of the steps up to it."""
    return torch.stack(list(accumulate(steps, lambda below, step: step @ below)))


def _nearness(parts: Tensor, whole: Tensor) -> Tensor:
    near = (whole.abs().sum(-1)[:, None] - (whole[:, None] - parts).abs().sum(-1)).clamp_min(0)
    return near / near.sum(-1, keepdim=True).clamp_min(torch.finfo(near.dtype).tiny)


def _flows(steps: Tensor) -> Tensor:
    """``[query, key]``: the greatest flows from the topmost tokens to those of the input."""
    layers, tokens = steps.shape[0], steps.shape[-1]
    graph = _capacities(steps)
    top = layers * tokens
    flows = [
        [maximum_flow(graph, top + query, key).flow_value for key in range(tokens)] for query in range(tokens)
    ]
    return torch.tensor(np.array(flows) / FLOW_UNITS)


def _capacities(steps: Tensor) -> csr_array:
    """Token ``t`` that enters layer ``l`` is node ``l * tokens + t``; edges lead down."""
    tokens = steps.shape[-1]
    layer, query, key = np.indices(steps.shape).reshape(3, -1)
    units = np.round(steps.cpu().double().numpy() * FLOW_UNITS).astype(np.int32).ravel()
    nodes = (len(steps) + 1) * tokens
    edges = ((layer + 1) * tokens + query, layer * tokens + key)
    return coo_array((units, edges), shape=(nodes, nodes)).tocsr()
