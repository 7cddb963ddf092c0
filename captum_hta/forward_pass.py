"""One forward pass with a hook at the source and hooks at the targets, that leaves nothing behind."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from captum_hta.linearization import Linearization
from captum_hta.recorder import Recorder, TrainingWatch, refuse_batch_statistics

Enter = Callable[[Tensor], Tensor]


class NoPathError(ValueError):
    """No source reaches a target."""


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


class _LastTarget(BaseException):
    """Ends a forward pass early. Not an ``Exception``, so that no model swallows it."""


class ForwardPass:
    """A model's forward pass on fixed inputs, with its source and its targets.

    Args:
        forward_func: The model, or a function that runs it.
        inputs: Tensors passed first, each ``[batch, ...]``.
        extra: Further arguments of ``forward_func``.
        layers: The targets: sites, or modules whose outputs they are.
        source: The source: a site, or a module whose output it is; ``None``: the inputs are.
        at_input: Take the inputs of the targets' modules instead of their outputs.
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        inputs: tuple[Tensor, ...],
        extra: tuple[Any, ...],
        layers: Sequence[Module | Site],
        source: Module | Site | None = None,
        at_input: bool = False,
    ) -> None:
        self.forward_func = forward_func
        self.inputs = inputs
        self.extra = extra
        self.layers = tuple(_as_site(layer, at_input) for layer in layers)
        self.source = None if source is None else _as_site(source)

    def linearize(self) -> tuple[Linearization, list[Tensor], list[Tensor]]:
        """The derivative of the targets, and the values of sources and targets.

        Raises:
            NotLinearizableError: If an operator on the way has no forward derivative.
            NoPathError: If no source reaches a target.
            ValueError: As :meth:`differentiable`, and if a dropout is active.
        """
        with _undisturbed(self.inputs), torch.no_grad():
            recorder = Recorder()
            entered: list[tuple[int, Tensor]] = []

            def enter(x: Tensor) -> Tensor:
                handed = x.detach().clone()
                entered.append((recorder.mark_source(handed), x.detach().clone()))
                return handed

            with recorder:
                targets = self._run(enter)
            variables = [recorder.variable(target) for target in targets]
            derivative = Linearization(
                recorder.calls,
                recorder.shapes,
                [variable for variable, _ in entered],
                [variable for variable in variables if variable is not None],
            )
            reached = derivative.reached()
            for layer, variable in zip(self.layers, variables, strict=True):
                if variable not in reached:
                    raise self.no_path(layer)
            return derivative, [x for _, x in entered], targets

    @contextmanager
    def differentiable(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Sources and targets joined by an autograd graph, in the settings to differentiate them in.

        Raises:
            ValueError: If a module is not called, is called before the source, or does not hold one
                tensor ``[batch, position, width]``.
        """
        with _undisturbed(self.inputs), torch.enable_grad():
            entered: list[Tensor] = []

            def enter(x: Tensor) -> Tensor:
                entered.append(x.detach().clone().requires_grad_())
                return entered[-1].clone()  # which the model may write to

            with TrainingWatch():
                targets = self._run(enter)
            for layer, target in zip(self.layers, targets, strict=True):
                if not target.requires_grad:
                    raise self.no_path(layer)
            yield entered, targets

    def _run(self, enter: Enter) -> list[Tensor]:
        """Run up to the last target; ``enter`` replaces each source by a tensor of the caller's."""
        if isinstance(self.forward_func, Module):
            refuse_batch_statistics(self.forward_func)
        found: dict[Site, Tensor] = {}
        inputs = tuple(_plain(value) for value in self.inputs)
        extra = tree_map(_plain, self.extra)
        with ExitStack() as hooks:
            if self.source is None:
                inputs = tuple(enter(x) for x in inputs)
                source_seen = [True]
            else:
                source_seen = []
                hooks.callback(self._hook_source(enter, source_seen).remove)
            for site in dict.fromkeys(self.layers):
                hooks.callback(self._hook_target(site, found, source_seen).remove)
            with suppress(_LastTarget):
                self.forward_func(*inputs, *extra)
        for site in self.layers:
            if site not in found:
                raise ValueError(
                    f"{self.name(site)} is not called in the forward pass: pass a module that "
                    "forward_func runs on these inputs"
                )
        return [found[site] for site in self.layers]

    def _hook_source(self, enter: Enter, seen: list[bool]) -> Any:
        site = self.source

        def replaced(value: Any) -> Any:
            if seen and site.call is None:
                raise ValueError(
                    f"{self.name(site)} is called more than once before the target: choose a module "
                    "that is called once"
                )
            what = self._what(site)
            x = _only_tensor(value, what)
            _check_sequence(x, what)
            seen.append(True)
            entered = enter(x)
            if isinstance(value, Tensor):
                return entered
            items = [entered if item is x else item for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

        return hook_site(site, replaced)

    def _hook_target(self, site: Site, found: dict[Site, Tensor], source_seen: list[bool]) -> Any:
        def keep(value: Any) -> None:
            what = self._what(site)
            if not source_seen:
                raise ValueError(
                    f"{self.name(site)} is called before the source {self.name(self.source)}, if that is "
                    "called at all: choose a source that the forward pass reaches first"
                )
            target = _only_tensor(site.pick(value), what)
            _check_sequence(target, what, heads=True)
            found[site] = target.clone()  # as it is now, whatever is written to it later
            if len(found) == len(set(self.layers)):
                raise _LastTarget

        return hook_site(site, keep)

    def _what(self, site: Site) -> str:
        return f"the {'input' if site.at_input else 'output'} of {self.name(site)}"

    def name(self, site: Site | None) -> str:
        """How the site's module is called within the model, for messages."""
        module = None if site is None else site.module
        if isinstance(self.forward_func, Module):
            for name, candidate in self.forward_func.named_modules():
                if candidate is module:
                    return f"module {name!r}" if name else "the model itself"
        return f"module {type(module).__name__}"

    def no_path(self, layer: Site) -> NoPathError:
        """The error that no source reaches the target of a layer."""
        source = "the inputs" if self.source is None else self.name(self.source)
        return NoPathError(
            f"no path leads from {source} to {self.name(layer)}: choose a source that the target is "
            "computed from"
        )


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
            found[name] = _only_tensor(site.pick(value), name).detach()
            if len(found) == len(sites):
                raise _LastTarget

        return note

    with ExitStack() as hooks:
        for name, place in sites.items():
            site = _as_site(place)
            hooks.callback(hook_site(site, keep(name, site)).remove)
        with suppress(_LastTarget), torch.inference_mode(), without_autocast():
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
        name = None if args else _main_keyword(kwargs)
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
    site = _as_site(place)

    def act(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        tensor = _only_tensor(site.pick(value), "what is to be replaced")
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


def _main_keyword(kwargs: dict[str, Any]) -> str | None:
    """The keyword that carries the hidden states: the only float tensor, or the first."""
    floats = [
        name for name, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point()
    ]
    return "hidden_states" if "hidden_states" in floats else next(iter(floats), None)


def _as_site(layer: Module | Site, at_input: bool = False) -> Site:
    return layer if isinstance(layer, Site) else Site(layer, at_input)


def _plain(value: Any) -> Any:
    """A tensor made under ``inference_mode`` cannot be differentiated; its copy can."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _only_tensor(value: Any, what: str) -> Tensor:
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


def _check_sequence(value: Tensor, what: str, heads: bool = False) -> None:
    if value.dim() == 3 or (heads and value.dim() == 4):
        return
    raise ValueError(
        f"{what} is {list(value.shape)}, but [batch, position, width]"
        f"{' or [batch, position, head, d_head]' if heads else ''} is needed: choose a module whose "
        "tensor has these axes, or insert the missing one"
    )


@contextmanager
def _undisturbed(inputs: Sequence[Tensor]) -> Iterator[None]:
    """Settings under which derivatives exist, restored on any exit; random states are kept.

    Fused attention kernels have no forward derivative and their backward does not vectorise, so
    attention runs in PyTorch's elementary operators.
    """
    devices = {x.device for x in inputs if isinstance(x, Tensor) and x.device.type == "cuda"}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with (
        torch.inference_mode(False),
        torch.random.fork_rng(devices=sorted(devices, key=str)),
        sdpa_kernel(SDPBackend.MATH),
        without_autocast(),
    ):
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
