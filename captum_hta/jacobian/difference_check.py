r"""A check that a derivative is that of the numbers.

It is for models whose numbers leave PyTorch, and for models with backward functions of their own.

Autograd takes a number that was read with ``item()``, ``tolist()`` or ``numpy()`` as a constant. Whether it
was only looked at, as in ``if x.max() > 1``, or went on to the target, shows in central differences,
:math:`(y(x + h u) - y(x - h u)) / 2h`, which must be :math:`J u` for random :math:`u`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from captum_hta.jacobian.linearize.tokenwise import noise

STEPS = (1e-2, 1e-3, 1e-4)
"""Lengths ``h`` of the steps, relative to the spread of a source: the first that fits will do."""
TOLERANCE = 5e-3
"""Largest relative difference that curvature and rounding may cause."""
DIRECTIONS = 3
"""Number of random directions: along a single one, a part of the derivative may hardly show."""
COARSE = 1e-4
"""Rounding of a dtype in which differences say nothing."""

Run = Callable[[Callable[[Tensor], Tensor]], list[Tensor]]
"""Runs the model with each source replaced by what the function returns for it; returns the targets."""


def is_measurable(sources: Sequence[Tensor]) -> bool:
    """Whether differences can be told from rounding."""
    return all(torch.finfo(x.dtype).eps < COARSE for x in sources)


def fits(run: Run, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    """Whether the targets move as their derivative says when the sources move a little.

    Args:
        run: Runs the model.
        sources: Leaves of the graph of autograd.
        targets: The targets in that graph.
    """
    draws = [noise(DIRECTIONS, x) * x.detach().std(unbiased=False) for x in sources]
    return all(
        any(_fits(run, sources, targets, directions, step) for step in STEPS)
        for directions in zip(*draws, strict=True)
    )


def custom_functions(targets: Sequence[Tensor]) -> list[str]:
    """Names of the functions with a ``backward`` written in Python that the targets are computed by."""
    names: dict[str, None] = {}
    seen: set[Node] = set()
    left = [target.grad_fn for target in targets]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left.extend(following for following, _ in node.next_functions)
        if BackwardCFunction in type(node).__mro__:
            names[type(node).__name__.removesuffix("Backward")] = None
    return list(names)


def _fits(
    run: Run, sources: Sequence[Tensor], targets: Sequence[Tensor], directions: Sequence[Tensor], step: float
) -> bool:
    ends = [_moved(run, directions, sign * step) for sign in (1, -1)]
    differences = [(ahead - behind) / (2 * step) for ahead, behind in zip(*ends, strict=True)]
    norm = torch.stack([one.double().square().sum() for one in differences]).sum().sqrt().item()
    if not norm:
        return False
    cotangents = [(one / norm).to(target) for one, target in zip(differences, targets, strict=True)]
    gradients = torch.autograd.grad(targets, sources, cotangents, retain_graph=True, allow_unused=True)
    predicted = sum(
        (gradient * direction).sum().item()
        for gradient, direction in zip(gradients, directions, strict=True)
        if gradient is not None
    )
    return abs(predicted - norm) <= TOLERANCE * norm


def _moved(run: Run, directions: Sequence[Tensor], step: float) -> list[Tensor]:
    """The targets with every source moved along its direction."""
    left = iter(directions)
    with torch.no_grad():
        return run(lambda x: x + step * next(left))
