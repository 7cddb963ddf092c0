"""Places in a forward pass: tensors that a module returns or reads, and the hooks that reach them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module


@dataclass(frozen=True)
class Site:
    """A tensor that a module gives or reads in a forward pass.

    Attributes:
        module: The module.
        at_input: Its first argument instead of its output.
        call: Which of its calls, counted from 0, where a model runs one module several times; ``None``
            for a module that is called once.
        item: Which item of a tuple; ``None`` for its only float tensor.
    """

    module: Module
    at_input: bool = False
    call: int | None = None
    item: int | None = None

    def pick(self, value: Any) -> Any:
        """The item of a value."""
        return value[self.item] if self.item is not None and isinstance(value, tuple | list) else value


class LastTarget(BaseException):
    """Ends a forward pass early. Not an ``Exception``, so that no model swallows it."""


def observed(sites: dict[str, Module | Site], run: Callable[[], Any]) -> dict[str, Tensor]:
    """The tensors at sites in a forward pass, which ends as soon as all are there.

    Args:
        sites: Sites, or modules whose outputs are meant, by name. Their order does not matter.
        run: Runs the model.

    Returns:
        For each site that was reached its last tensor, detached.
    """
    found: dict[str, Tensor] = {}

    def keep(name: str, site: Site) -> Callable[[Any], None]:
        def note(value: Any) -> None:
            found[name] = only_tensor(site.pick(value), name).detach()
            if len(found) == len(sites):
                raise LastTarget

        return note

    with ExitStack() as hooks:
        for name, place in sites.items():
            site = as_site(place)
            hooks.callback(hook_site(site, keep(name, site)).remove)
        with suppress(LastTarget), torch.inference_mode(), without_autocast():
            run()
    return found


def hook_site(site: Site, action: Callable[[Any], Any]) -> Any:
    """Call ``action`` with what is at the site; what it returns, unless ``None``, takes the place of that.

    Forward passes of other threads are left alone.

    Returns:
        A handle with a method ``remove``.
    """
    thread = threading.get_ident()
    calls = itertools.count()

    def concerned() -> bool:
        return threading.get_ident() == thread and (site.call is None or next(calls) == site.call)

    def before(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not concerned():
            return None
        name = None if args else main_keyword(kwargs)
        new = action(args[0] if args else kwargs.get(name))
        if new is None:
            return None
        return ((new, *args[1:]), kwargs) if args else (args, kwargs | {name: new})

    def after(module: Module, args: Any, out: Any) -> Any:
        return action(out) if concerned() else None

    if site.at_input:
        return site.module.register_forward_pre_hook(before, with_kwargs=True)
    return site.module.register_forward_hook(after)


@contextmanager
def replaced(place: Module | Site, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within the context the tensor at a place is changed."""
    site = as_site(place)

    def act(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        tensor = only_tensor(site.pick(value), "what is to be replaced")
        items = [change(item) if item is tensor else item for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

    handle = hook_site(site, act)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def without_autocast() -> Iterator[None]:
    """Arithmetic in the types of the weights."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def main_keyword(kwargs: dict[str, Any]) -> str | None:
    """The keyword that carries the hidden states: the only float tensor, or the first."""
    floats = [
        name for name, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point()
    ]
    return "hidden_states" if "hidden_states" in floats else next(iter(floats), None)


def as_site(layer: Module | Site, at_input: bool = False) -> Site:
    """A site as it is; for a module the site of its output or input."""
    return layer if isinstance(layer, Site) else Site(layer, at_input)


def only_tensor(value: Any, what: str) -> Tensor:
    """The only floating-point tensor of what a module returns or reads.

    Raises:
        ValueError: If it holds none, or several.
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
