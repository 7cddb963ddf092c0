"""Value zeroing: how hidden embeddings move when a token's value is removed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn.functional import normalize

from captum_hta.baselines.base import Baseline
from captum_hta.model.activations import Activations, promoted
from captum_hta.model.sites import replaced


class ValueZeroing(Baseline):
    """The cosine distance by which each hidden embedding after a block moves when the value vectors of one
    token are set to zero in all heads of the block; rows sum to 1.

    References:
        Mohebbi et al., "Quantifying Context Mixing in Transformers", EACL 2023.
    """

    name = "value zeroing"
    axes = "batch layer query key"

    def values(self, activations: Activations) -> Tensor:
        """``[layer, query, key]``."""
        distances = torch.stack(_distances(activations))
        return distances / distances.sum(-1, keepdim=True).clamp_min(torch.finfo(distances.dtype).tiny)


def cosine_distance(first: Tensor, second: Tensor) -> Tensor:
    """One minus the cosine of vectors, as half the squared distance of their directions: small distances
    would otherwise be lost in rounding.
    """
    return (normalize(first, dim=-1) - normalize(second, dim=-1)).square().sum(-1) / 2


def _distances(activations: Activations) -> list[Tensor]:
    """Cosine distances ``[query, key]`` for each layer, from a single forward pass.

    The pass runs one copy of the text for each key, and one that is left as it is. After each block all
    copies are set to the one that was left as it is.
    """
    model = activations.model
    found: list[Tensor] = []
    lost = torch.einsum("lhqk,lhkc->lkqhc", activations.pattern, activations.value)
    lost = torch.cat([torch.zeros_like(lost[:, :1]), lost], dim=1)

    def without(layer: int) -> Callable[[Tensor], Tensor]:
        return lambda z: z - lost[layer].reshape(z.shape).to(z.dtype)

    def reset(out: Tensor) -> Tensor:
        whole, changed = promoted(out[:1]).double(), promoted(out[1:]).double()
        found.append(cosine_distance(whole, changed).mT.to(lost))
        return out[:1].expand_as(out).contiguous()

    with ExitStack() as stack, torch.no_grad():
        for layer in range(model.num_layers):
            stack.enter_context(replaced(model.target(layer, "head"), without(layer)))
            stack.enter_context(replaced(model.target(layer, "layer"), reset))
        model.forward(*activations.repeated(len(lost[0])))
    return found
