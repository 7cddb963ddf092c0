"""Whole forward passes before anything is differentiated, which show whether the target is one tensor.

A derivative is computed in several forward passes, each of which ends at the target. So a target that is
called again would not be noticed, nor a model that keeps state between forward passes, such as a cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor

from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.model.sites import Site, hook_site

ROUNDING = 256
"""Two forward passes on the same inputs may differ by this many times the rounding of their dtype."""
MOST = 0.05
"""And by at most this share of the largest value."""


def rehearse(forward_pass: ForwardPass) -> None:
    """Run a model to its end, and once more up to the targets.

    Raises:
        ValueError: If a target is called more than once, or has another value in the second forward pass.
    """
    first, calls = _run_to_end(forward_pass)
    for site in dict.fromkeys(forward_pass.layers):
        if site.call is None and calls[site] > 1:
            raise ValueError(
                f"{forward_pass.name(site)} is called {calls[site]} times in one forward pass, so it is not "
                "clear which of them is the target: choose a module that is called once"
            )
    for site, before, after in zip(forward_pass.layers, first, forward_pass.values(), strict=True):
        if not _equal(before, after):
            raise ValueError(
                f"{forward_pass.name(site)} has another value when forward_func is called again with the "
                "same arguments, so derivatives would belong to no single forward pass: pass a function that "
                "keeps no state, such as a cache, and draws no random numbers of its own, and call eval() on "
                "a model in training mode"
            )


def _run_to_end(forward_pass: ForwardPass) -> tuple[list[Tensor], Counter[Site]]:
    """The targets, and how often the module of each is called in a whole forward pass."""
    calls: Counter[Site] = Counter()

    def counting(site: Site) -> Callable[[object], None]:
        return lambda value: calls.update([site])

    with ExitStack() as hooks:
        for site in dict.fromkeys(forward_pass.layers):
            hooks.callback(hook_site(site, counting(site)).remove)
        return forward_pass.values(to_end=True), calls


def _equal(before: Tensor, after: Tensor) -> bool:
    """Whether two values of a target differ by no more than rounding."""
    if before.shape != after.shape:
        return False
    relative = min(ROUNDING * torch.finfo(before.dtype).eps, MOST)
    largest = before.nan_to_num(posinf=0, neginf=0).abs().max().item() if before.numel() else 0.0
    return torch.allclose(before, after, rtol=0, atol=relative * largest, equal_nan=True)
