"""What changes when the value of a token is taken away."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from captum_hta.baselines.base import Baseline, Example, wide
from captum_hta.model.sites import replaced


class ValueZeroing(Baseline):
    """How far, by the cosine, each hidden embedding that a block gives moves when the value vectors of one
    token are zero in all its heads; rows sum to 1.

    References:
        Mohebbi et al., "Quantifying Context Mixing in Transformers", EACL 2023.
    """

    name = "value zeroing"
    axes = "batch layer query key"

    def of(self, example: Example) -> Tensor:
        """The values of one text, without the batch axis."""
        distances = torch.stack(_distances(example))
        return distances / distances.sum(-1, keepdim=True).clamp_min(torch.finfo(distances.dtype).tiny)


def _distances(example: Example) -> list[Tensor]:
    """For each layer ``[query, key]``, from one forward pass of a copy of the text for each key and one that
    is left as it is. Behind each block all copies are made alike again.
    """
    model, found = example.model, []
    lost = torch.einsum("lhqk,lhkc->lkqhc", example.pattern, example.value)
    lost = torch.cat([torch.zeros_like(lost[:, :1]), lost], dim=1)

    def without(layer: int) -> Callable[[Tensor], Tensor]:
        return lambda z: z - lost[layer].reshape(z.shape).to(z.dtype)

    def alike_again(out: Tensor) -> Tensor:
        whole, changed = wide(out[:1]), wide(out[1:])
        found.append((1 - cosine_similarity(whole, changed, dim=-1)).clamp_min(0).mT)
        return out[:1].expand_as(out).contiguous()

    with ExitStack() as stack, torch.no_grad():
        for layer in range(model.num_layers):
            stack.enter_context(replaced(model.target(layer, "head"), without(layer)))
            stack.enter_context(replaced(model.target(layer, "layer"), alike_again))
        model.forward(*example.repeated(len(lost[0])))
    return found
