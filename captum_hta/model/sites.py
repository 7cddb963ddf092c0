"""Sites in a forward pass: tensors that a module returns or reads, and the hooks that access them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from captum_hta.model.precision import full_precision


@dataclass(frozen=True)
class Site:
    """A tensor that a module returns or reads in a forward pass.

    Attributes:
        module: The module.
        at_input: Whether it is the module's first argument instead of its output.
        call: Which call of the module, counted from 0, if the model calls it several times; ``None`` for a
            module that is called once.
        item: Which item of a tuple; ``None`` for the only floating-point tensor.
    """

    module: Module
    at_input: bool = False
    call: int | None = None
    item: int | None = None

    def pick(self, value: object) -> object:
        """The item of what the module returns or reads."""
        return value[self.item] if self.item is not None and isinstance(value, tuple | list) else value


class LastTarget(BaseException):
    """Ends a forward pass early. It is no ``Exception``, so that no model catches it."""


def observed(sites: dict[str, Module | Site], run: Callable[[], object]) -> dict[str, Tensor]:
    """The tensors at some sites in a forward pass, which ends as soon as all are found.

    Args:
        sites: Sites by name; a module stands for its output.
        run: Runs the model.

    Returns:
        The last tensor at each site that was reached, detached.
    """
    found: dict[str, Tensor] = {}

    def keep(name: str, site: Site) -> Callable[[object], None]:
        def note(value: object) -> None:
            found[name] = only_tensor(site.pick(value), name).detach()
            if len(found) == len(sites):
                raise LastTarget

        return note

    with ExitStack() as hooks:
        for name, place in sites.items():
            site = as_site(place)
            hooks.callback(hook_site(site, keep(name, site)).remove)
        with suppress(LastTarget), torch.inference_mode(), full_precision():
            run()
    return found


def hook_site(site: Site, action: Callable[[Any], object]) -> RemovableHandle:
    """Call ``action`` with the value at the site; its result, unless ``None``, replaces the value.

    Forward passes of other threads are not affected.
    """
    thread = threading.get_ident()
    calls = itertools.count()

    def concerned() -> bool:
        return threading.get_ident() == thread and (site.call is None or next(calls) == site.call)

    def before(
        module: Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[object, dict[str, object]] | None:
        if not concerned():
            return None
        name = main_keyword(kwargs) or ""
        new = action(args[0] if args else kwargs.get(name))
        if new is None:
            return None
        return ((new, *args[1:]), kwargs) if args else (args, kwargs | {name: new})

    def after(module: Module, args: object, out: object) -> object:
        return action(out) if concerned() else None

    if site.at_input:
        return site.module.register_forward_pre_hook(before, with_kwargs=True)
    return site.module.register_forward_hook(after)


@contextmanager
def replaced(place: Module | Site, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change the tensor at a site within the context."""
    site = as_site(place)

    def act(value: object) -> object:
        tensor = only_tensor(site.pick(value), "the value to be replaced")
        return with_replaced(value, tensor, change(tensor))

    handle = hook_site(site, act)
    try:
        yield
    finally:
        handle.remove()


def with_replaced(value: object, old: Tensor, new: Tensor) -> object:
    """What a module returns or reads, a tensor or a tuple with tensors, with one of the tensors replaced."""
    if not isinstance(value, tuple | list):
        return new
    items = [new if item is old else item for item in value]
    build: Callable[..., object] = type(value)
    return build(*items) if hasattr(value, "_fields") else build(items)


def main_keyword(kwargs: Mapping[str, object]) -> str | None:
    """The name of the keyword argument that holds the hidden states, or else the first float tensor."""
    floats = [
        name for name, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point()
    ]
    return "hidden_states" if "hidden_states" in floats else next(iter(floats), None)


def as_site(layer: Module | Site, at_input: bool = False) -> Site:
    """The site of a module's output, or of its input; a site is returned as it is."""
    return layer if isinstance(layer, Site) else Site(layer, at_input)


def only_tensor(value: object, what: str) -> Tensor:
    """The only floating-point tensor in what a module returns or reads.

    Raises:
        ValueError: If there is none, or several.
    """
    if isinstance(value, Tensor):
        return value
    tensors = [item for item in value if isinstance(item, Tensor)] if isinstance(value, tuple | list) else []
    floats = [item for item in tensors if item.is_floating_point()]
    if len(floats) == 1:
        return floats[0]
    found = f"{len(floats)} floating-point tensors" if tensors else f"a {type(value).__name__}"
    raise ValueError(
        f"{what} holds {found}, but one tensor is needed: choose a module that "
        "passes one tensor [batch, position, width], such as a hook point or a projection"
    )
