"""A check that the examples of a batch are independent, since all are carried at once.

The batch is halved in a few ways, so that any two examples are in different halves at least once. A change
of one half must have exactly no effect on the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from captum_hta.jacobian.linearize.linearization import Linearization
from captum_hta.jacobian.linearize.tokenwise import halves, noise

MIXED = (
    "examples of the batch influence each other in this model: pass them one at a time, or batch_dim=1 if "
    "its modules take [position, batch, width]"
)


def refuse_mixed_examples(derivative: Linearization, sources: Sequence[Tensor]) -> None:
    """Check a recorded derivative with random tangents.

    Raises:
        ValueError: If an example reaches another.
    """
    for moves in _halves(sources):
        tangents = {
            variable: noise(1, x) * moves[:, None, None]
            for variable, x in zip(derivative.sources, sources, strict=True)
        }
        with torch.no_grad():
            if any(image[:, ~moves].any() for _, image in derivative.push(tangents)):
                raise ValueError(MIXED)


def refuse_mixed_gradients(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Check a graph of autograd with random cotangents.

    Args:
        sources: Leaves of the graph, each ``[batch, key, width]``.
        targets: Each ``[batch, position, width]`` or with a head axis.

    Raises:
        ValueError: If an example reaches another.
    """
    for moves in _halves(sources):
        cotangents = [noise(1, y)[0] * moves.reshape(-1, *[1] * (y.dim() - 1)) for y in targets]
        gradients = torch.autograd.grad(targets, sources, cotangents, retain_graph=True, allow_unused=True)
        if any(gradient is not None and gradient[~moves].any() for gradient in gradients):
            raise ValueError(MIXED)


def _halves(sources: Sequence[Tensor]) -> Sequence[Tensor]:
    batch = len(sources[0])
    return [] if batch == 1 else list(halves(batch, sources[0].device))
