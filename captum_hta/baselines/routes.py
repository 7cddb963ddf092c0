"""Attention rollout, attention flow and ALTI: single layers combined into routes through all layers."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from captum_hta.baselines.base import Baseline
from captum_hta.baselines.norms import decomposed_block
from captum_hta.model.activations import Activations
from captum_hta.model.protocol import Model

if TYPE_CHECKING:
    from scipy.sparse import csr_array

RESIDUAL = 0.5
"""Share of the residual connection in a layer."""
FLOW_UNITS = 1 << 24
"""Integer units in a capacity of 1: flows are computed in integers."""


class AttentionRollout(Baseline):
    r"""Attention multiplied through the layers, :math:`\tilde A_l = \hat A_l \tilde A_{l-1}` with
    :math:`\hat A = (\bar A + I) / 2`: the mean over heads and the residual connection.

    References:
        Abnar and Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020.
    """

    name = "attention rollout"
    axes = "batch layer query key"

    def values(self, activations: Activations) -> Tensor:
        """``[layer, query, key]``."""
        return rolled_out(with_residual(activations.pattern))


class AttentionFlow(Baseline):
    """The maximum flow from a token of a layer down to a token of the input, with attention and the residual
    connection (as in attention rollout) as capacities between layers.

    It solves a flow problem for each layer, query and key, so it is slow.

    References:
        Abnar and Zuidema 2020.
    """

    name = "attention flow"
    axes = "batch layer query key"

    def values(self, activations: Activations) -> Tensor:
        """``[layer, query, key]``."""
        steps = with_residual(activations.pattern)
        flows = [_flows(steps[: layer + 1]) for layer in range(len(steps))]
        return torch.stack(flows).to(steps)


class Alti(Baseline):
    r"""How close what a key adds comes to the whole of a block's sum of attention and residual, in the
    :math:`L_1` norm: :math:`\max(0, \|y_j\|_1 - \|y_j - T_j(x_i)\|_1)`, scaled so that rows sum to 1.

    Args:
        model: An adapter around a model.
        rollout: Whether to multiply the layers up to each (the default) or give each alone.

    References:
        Ferrando et al., "Measuring the Mixing of Contextual Information in the Transformer", EMNLP 2022.
    """

    axes = "batch layer query key"

    def __init__(self, model: Model, rollout: bool = True) -> None:
        super().__init__(model)
        self.rollout = rollout
        self.name = "ALTI" if rollout else "ALTI of the layer"

    def values(self, activations: Activations) -> Tensor:
        """``[layer, query, key]``."""
        layers = range(len(activations.hidden))
        steps = torch.stack([_closeness(*decomposed_block(activations, layer)) for layer in layers])
        return rolled_out(steps) if self.rollout else steps


def with_residual(pattern: Tensor) -> Tensor:
    """The mean of patterns over heads mixed with the residual connection, ``[layer, query, key]``."""
    identity = torch.eye(pattern.shape[-1], dtype=pattern.dtype, device=pattern.device)
    return RESIDUAL * identity + (1 - RESIDUAL) * pattern.mean(1)


def rolled_out(steps: Tensor) -> Tensor:
    """For each layer the product of the steps up to it, ``[layer, query, key]``."""
    return torch.stack(list(accumulate(steps, lambda below, step: step @ below)))


def _closeness(added: Tensor, whole: Tensor) -> Tensor:
    near = (whole.abs().sum(-1)[:, None] - (whole[:, None] - added).abs().sum(-1)).clamp_min(0)
    return near / near.sum(-1, keepdim=True).clamp_min(torch.finfo(near.dtype).tiny)


def _flows(steps: Tensor) -> Tensor:
    """Maximum flows from the tokens of the last layer to those of the input, ``[query, key]``."""
    from scipy.sparse.csgraph import maximum_flow  # scipy is slow to import

    layers, tokens = steps.shape[0], steps.shape[-1]
    graph = _capacities(steps)
    top = layers * tokens
    flows = [
        [maximum_flow(graph, top + query, key).flow_value for key in range(tokens)] for query in range(tokens)
    ]
    return torch.tensor(np.array(flows) / FLOW_UNITS, device="cpu")


def _capacities(steps: Tensor) -> csr_array:
    """The graph of capacities. Token ``t`` that enters layer ``l`` is node ``l * tokens + t``."""
    from scipy.sparse import coo_array

    tokens = steps.shape[-1]
    layer, query, key = np.indices(steps.shape).reshape(3, -1)
    units = np.round(steps.cpu().double().numpy() * FLOW_UNITS).astype(np.int32).ravel()
    nodes = (len(steps) + 1) * tokens
    edges = ((layer + 1) * tokens + query, layer * tokens + key)
    return coo_array((units, edges), shape=(nodes, nodes)).tocsr()
