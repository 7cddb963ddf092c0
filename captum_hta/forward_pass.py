"""One forward pass with a hook at the source and hooks at the targets, that leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from captum_hta.linearization import Linearization
from captum_hta.recorder import DropoutWatch, Recorder

Enter = Callable[[Tensor], Tensor]


class NoPathError(ValueError):
    """No source reaches a target."""


class _LastTarget(BaseException):
    """Ends a forward pass early. Not an ``Exception``, so that no model swallows it."""


class ForwardPass:
    """A model's forward pass on fixed inputs, with its source and its targets.

    Args:
        forward_func: The model, or a function that runs it.
        inputs: Tensors passed first, each ``[batch, ...]``.
        extra: Further arguments of ``forward_func``.
        layers: Modules whose outputs are the targets.
        source: Module whose output is the source; ``None``: the inputs are.
        at_input: Take the targets' inputs instead of their outputs.
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        inputs: tuple[Tensor, ...],
        extra: tuple[Any, ...],
        layers: Sequence[Module],
        source: Module | None = None,
        at_input: bool = False,
    ) -> None:
        self.forward_func = forward_func
        self.inputs = inputs
        self.extra = extra
        self.layers = tuple(layers)
        self.source = source
        self.at_input = at_input

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

            with DropoutWatch():
                targets = self._run(enter)
            for layer, target in zip(self.layers, targets, strict=True):
                if not target.requires_grad:
                    raise self.no_path(layer)
            yield entered, targets

    def _run(self, enter: Enter) -> list[Tensor]:
        """Run up to the last target; ``enter`` replaces each source by a tensor of the caller's."""
        found: dict[Module, Tensor] = {}
        inputs = tuple(_plain(value) for value in self.inputs)
        extra = tree_map(_plain, self.extra)
        with ExitStack() as hooks:
            if self.source is None:
                inputs = tuple(enter(x) for x in inputs)
                source_seen = [True]
            else:
                source_seen = []
                hooks.callback(self._hook_source(enter, source_seen).remove)
            for layer in dict.fromkeys(self.layers):
                hooks.callback(self._hook_target(layer, found, source_seen).remove)
            with suppress(_LastTarget):
                self.forward_func(*inputs, *extra)
        for layer in self.layers:
            if layer not in found:
                raise ValueError(
                    f"{self.name(layer)} is not called in the forward pass: pass a module that "
                    "forward_func runs on these inputs"
                )
        return [found[layer] for layer in self.layers]

    def _hook_source(self, enter: Enter, seen: list[bool]) -> Any:
        def hook(module: Module, args: Any, out: Any) -> Any:
            if seen:
                raise ValueError(
                    f"{self.name(module)} is called more than once before the target: choose a module "
                    "that is called once"
                )
            x = _only_tensor(out, f"the output of {self.name(module)}")
            _check_sequence(x, f"the output of {self.name(module)}")
            seen.append(True)
            entered = enter(x)
            if isinstance(out, Tensor):
                return entered
            items = [entered if item is x else item for item in out]
            return type(out)(*items) if hasattr(out, "_fields") else type(out)(items)

        return self.source.register_forward_hook(hook)

    def _hook_target(self, layer: Module, found: dict[Module, Tensor], source_seen: list[bool]) -> Any:
        def keep(module: Module, value: Any) -> None:
            what = f"the {'input' if self.at_input else 'output'} of {self.name(module)}"
            if not source_seen:
                raise ValueError(
                    f"{self.name(module)} is called before the source {self.name(self.source)}, if that is "
                    "called at all: choose a source that the forward pass reaches first"
                )
            target = _only_tensor(value, what)
            _check_sequence(target, what, heads=True)
            found[module] = target.clone()  # as it is now, whatever is written to it later
            if len(found) == len(set(self.layers)):
                raise _LastTarget

        if self.at_input:
            return layer.register_forward_pre_hook(
                lambda module, args, kwargs: keep(module, args[:1] or tuple(kwargs.values())),
                with_kwargs=True,
            )
        return layer.register_forward_hook(lambda module, args, out: keep(module, out))

    def name(self, module: Module | None) -> str:
        """How the module is called within the model, for messages."""
        if isinstance(self.forward_func, Module):
            for name, candidate in self.forward_func.named_modules():
                if candidate is module:
                    return f"module {name!r}" if name else "the model itself"
        return f"module {type(module).__name__}"

    def no_path(self, layer: Module) -> NoPathError:
        """The error that no source reaches the target of a layer."""
        source = "the inputs" if self.source is None else self.name(self.source)
        return NoPathError(
            f"no path leads from {source} to {self.name(layer)}: choose a source that the target is "
            "computed from"
        )


def observed(modules: dict[str, Module], run: Callable[[], Any]) -> dict[str, Tensor]:
    """The outputs of modules in a forward pass, which ends as soon as all are there.

    Args:
        modules: Modules whose outputs are tensors, by name. Their order does not matter.
        run: Runs the model.

    Returns:
        For each module that was called its last output, detached.
    """
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Module, args: Any, out: Tensor) -> None:
            found[name] = out.detach()
            if len(found) == len(modules):
                raise _LastTarget

        return hook

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.callback(module.register_forward_hook(keep(name)).remove)
        with suppress(_LastTarget), torch.inference_mode():
            run()
    return found


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
    ):
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
