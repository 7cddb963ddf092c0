"""The slow, obvious reference for every number: plain autograd, one component at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def jacobian(function: Callable[[Tensor], Tensor], x: Tensor, positions: Sequence[int]) -> Tensor:
    """The Jacobian of one example, a backward pass for each component.

    Args:
        function: Maps ``[1, key, width]`` to ``[1, query, component]``.
        x: ``[1, key, width]``.
        positions: Queries.

    Returns:
        ``[query, component, key, width]``.
    """
    x = x.detach().clone().requires_grad_()
    y = function(x)
    rows = []
    for position in positions:
        for component in range(y.shape[2]):
            (gradient,) = torch.autograd.grad(y[0, position, component], x, retain_graph=True)
            rows.append(gradient[0])
    return torch.stack(rows).unflatten(0, (len(positions), y.shape[2]))


def norms(blocks: Tensor, heads: int, norm: str) -> Tensor:
    """``r`` as ``[head, query, key]`` from a Jacobian ``[query, component, key, width]``."""
    split = blocks.unflatten(1, (heads, -1)).permute(1, 0, 3, 2, 4)  # head query key d_head width
    if norm == "frobenius":
        return split.square().sum((-1, -2)).sqrt()
    if norm == "sum":
        return split.sum(-2).square().sum(-1).sqrt()
    if norm == "spectral":
        return torch.linalg.svdvals(split)[..., 0]
    raise ValueError(f"the norm {norm!r} has no reference yet: define it here")


def shares(r: Tensor) -> Tensor:
    """Rows that sum to 1."""
    return r / r.sum(-1, keepdim=True)


def hooked(
    forward: Callable[[], object], source: torch.nn.Module, target: torch.nn.Module
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The target module's output as a function of the source module's, and the source's value."""
    seen: dict[str, Tensor] = {}

    def run(x: Tensor | None) -> Tensor:
        def enter(module: object, args: object, out: Tensor) -> Tensor:
            seen["x"] = out
            return out if x is None else x

        handles = [
            source.register_forward_hook(enter),
            target.register_forward_hook(lambda module, args, out: seen.update(y=out)),
        ]
        try:
            forward()
        finally:
            for handle in handles:
                handle.remove()
        return seen["y"]

    run(None)
    return run, seen["x"].detach()
