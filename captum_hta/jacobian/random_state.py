"""The random state of the process, kept as it is while a model's forward pass draws random numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from captum_hta.jacobian.torch_internals import (
    Arguments,
    Keywords,
    Operator,
    TorchDispatchMode,
    seeded_variant,
    tree_flatten,
)


class IsolatedRandomState(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch gives it no types
    """Lets a forward pass draw from its own generators, which start in the state of those of the process.

    Rewinding those of the process afterwards would also take back what other threads have drawn in the
    meantime, so that they would draw it again.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators: dict[torch.device, Generator] = {}

    def __torch_dispatch__(
        self, function: Operator, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in function.tags or kwargs.get("generator") is not None:
            return function(*args, **kwargs)
        generator = self._generator(_device(args, kwargs))
        variant = seeded_variant(function)
        if variant is not None:
            return variant(*args, **kwargs, generator=generator)
        return _swapped(generator, lambda: function(*args, **kwargs))

    def _generator(self, device: torch.device) -> Generator:
        if device not in self._generators:
            generator = self._generators[device] = Generator(device)
            generator.set_state(_state(device))
        return self._generators[device]


def _device(args: Arguments, kwargs: Keywords) -> torch.device:
    """The device that an operator draws on."""
    found = [value.device for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    device = found[0] if found else kwargs.get("device")
    return device if isinstance(device, torch.device) and device.type == "cuda" else torch.device("cpu")


def _state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(state: Tensor, device: torch.device) -> None:
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)


def _swapped(generator: Generator, run: Callable[[], object]) -> object:
    """Run an operator that takes no generator, such as a dropout, with the state of this one."""
    before = _state(generator.device)
    _set_state(generator.get_state(), generator.device)
    try:
        return run()
    finally:
        generator.set_state(_state(generator.device))
        _set_state(before, generator.device)
