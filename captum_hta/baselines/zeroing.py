"""What changes when the value of a token is taken away."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from captum_hta.baselines.base import Baseline, Example, replaced, wide
from captum_hta.forward_pass import observed


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
        distances = torch.stack([_distances(example, layer) for layer in range(len(example.pattern))])
        return distances / distances.sum(-1, keepdim=True).clamp_min(torch.finfo(distances.dtype).tiny)


def _distances(example: Example, layer: int) -> Tensor:
    """``[query, key]``, of one copy of the text for each key and one that is left as it is."""
    lost = torch.einsum("hqk,hkc->kqhc", example.pattern[layer], example.value[layer])
    lost = torch.cat([torch.zeros_like(lost[:1]), lost])
    model, arguments = example.model, example.repeated(len(lost))
    with replaced(model.target(layer, "head"), lambda z: z - lost.reshape(z.shape).to(z.dtype)):
        out = observed({"out": model.target(layer, "layer")}, lambda: model.forward(*arguments))["out"]
    whole, changed = wide(out[:1]), wide(out[1:])
    return (1 - cosine_similarity(whole, changed, dim=-1)).clamp_min(0).mT
