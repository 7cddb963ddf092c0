"""One forward pass with hooks at its source and its targets, which are removed afterwards."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from captum_hta.jacobian.difference_check import custom_functions, fits, is_measurable
from captum_hta.jacobian.heads import HeadOutputs, known_heads, refuse_mixed_heads, refuse_unknown_heads
from captum_hta.jacobian.linearize.linearization import Linearization
from captum_hta.jacobian.linearize.lost_derivatives import (
    Dependence,
    DerivativeWatch,
    ExitWatch,
    Loss,
    LostDerivativeError,
    named_losses,
    refuse_loss,
)
from captum_hta.jacobian.linearize.recorder import Recorder, refuse_batch_statistics
from captum_hta.jacobian.random_state import IsolatedRandomState
from captum_hta.jacobian.torch_internals import tree_map
from captum_hta.model.precision import PRECISION, full_precision
from captum_hta.model.sites import (
    LastTarget,
    Site,
    as_site,
    hook_site,
    only_tensor,
    with_replaced,
)

logger = logging.getLogger(__name__)
Enter = Callable[[Tensor], Tensor]
"""Called with the value of a source, batch first; returns the tensor that takes its place."""


SWITCHES: list[tuple[Callable[[], bool], Callable[[bool], None]]] = [
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
]
"""Kernels of attention: how to ask whether each is on, and how to turn it on or off."""


class NoPathError(ValueError):
    """No source reaches a target."""


class _Found(dict[Site, Tensor]):
    """The targets that a forward pass has reached.

    Args:
        count: The number of targets.
        to_end: Go on after the last of them.
    """

    def __init__(self, count: int, to_end: bool) -> None:
        super().__init__()
        self.count, self.to_end = count, to_end

    def keep(self, site: Site, target: Tensor) -> None:
        """Keep a target at its first call, and end the forward pass at the last target."""
        self.setdefault(site, target)
        if len(self) == self.count and not self.to_end:
            raise LastTarget

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Let the forward pass end at its last target, or let it fail after it."""
        try:
            yield
        except LastTarget:
            pass
        except Exception:
            if len(self) < self.count:
                raise


class ForwardPass:
    """A model's forward pass on fixed inputs, with its source and its targets.

    Args:
        forward_func: The model, or a function that runs it.
        inputs: Tensors passed first, each ``[batch, ...]``.
        extra: Further arguments of ``forward_func``.
        layers: The targets: sites, or modules whose outputs they are.
        source: The source: a site, or a module whose output it is; ``None``: the inputs are.
        at_input: Take the inputs of the targets' modules instead of their outputs.
        num_heads: The number of equal parts that a target ``[batch, position, width]`` is split into, or a
            list with one number for each target; ``None`` for no head axis. Heads that are known, as those
            of a ``MultiheadAttention``, are split in any case.
        batch_dim: The axis of sources and targets that is the batch: 0, or 1 for modules that take
            ``[position, batch, width]``. Sources and targets are returned with the batch first.
    """

    def __init__(
        self,
        forward_func: Callable[..., object],
        inputs: tuple[Tensor, ...],
        extra: tuple[object, ...],
        layers: Sequence[Module | Site],
        source: Module | Site | None = None,
        at_input: bool = False,
        num_heads: int | Sequence[int | None] | None = None,
        batch_dim: int = 0,
    ) -> None:
        self.forward_func = forward_func
        self.inputs = inputs
        self.extra = extra
        self.layers = tuple(as_site(layer, at_input) for layer in layers)
        self.source = None if source is None else as_site(source)
        each = num_heads if isinstance(num_heads, Sequence) else [num_heads] * len(self.layers)
        self.num_heads = tuple(each)
        self.batch_dim = batch_dim

    def heads_of(self, targets: Sequence[Tensor]) -> list[int | None]:
        """For each target its number of heads, ``None`` for one without a head axis.

        Raises:
            ValueError: If ``num_heads`` does not divide the width of a target, differs from its heads, or is
                given for a target that mixes heads; or if a target has heads whose number is not known.
        """
        found = []
        for layer, target, count in zip(self.layers, targets, self.num_heads, strict=True):
            known = None if layer.at_input else known_heads(self.forward_func, layer.module)
            if count is not None and target.dim() == 3:
                refuse_mixed_heads(self.name(layer), layer.module)
            if count is known is None and target.dim() == 3 and not layer.at_input:
                refuse_unknown_heads(layer.module)
            found.append(_heads(self.name(layer), target, count or known))
        return found

    def linearize(self) -> tuple[Linearization, list[Tensor], list[Tensor]]:
        """The derivative of the targets, and the values of sources and targets.

        Raises:
            NotLinearizableError: If an operator on the way has no forward derivative.
            NoPathError: If no source reaches a target.
            ValueError: As :meth:`differentiable`, and if a dropout is active.
        """
        with _undisturbed(), torch.no_grad():
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
                tensor ``[batch, position, width]``; or if the derivative is lost on the way.
        """
        with _undisturbed(), torch.enable_grad():
            entered: list[Tensor] = []
            watch = DerivativeWatch()

            def enter(x: Tensor) -> Tensor:
                entered.append(x.detach().clone().requires_grad_())
                watch.mark_source(entered[-1])
                return entered[-1].clone()  # a copy, since the model may write to it

            with watch, ExitWatch(watch):
                targets = self._run(enter)
            for layer, target in zip(self.layers, targets, strict=True):
                self._check_dependence(layer, watch.dependence(target))
                if not target.requires_grad:
                    raise self.no_path(layer)
            with named_losses():
                self._check_exits(watch.exits, entered, targets)
                self._check_custom_functions(entered, targets)
                yield entered, targets

    def _check_exits(self, exits: Sequence[Loss], entered: list[Tensor], targets: list[Tensor]) -> None:
        """Raise a :class:`LostDerivativeError` if numbers left PyTorch and came back on the way."""
        if not exits:
            return
        how = f"{exits[0].operator}{self._where(exits[0])}"
        if not is_measurable(entered):
            logger.warning("numbers that leave PyTorch by %s are taken as constant", how)
        elif not fits(self._run, entered, targets):
            raise LostDerivativeError(
                f"numbers leave PyTorch by {how} and come back on the way from the source, which autograd "
                "takes as constants: compute with tensors there, or choose a source or a target that it does "
                "not lie between"
            )

    def _check_custom_functions(self, entered: list[Tensor], targets: list[Tensor]) -> None:
        """Warn if a backward function that the model defines itself does not fit how the targets move."""
        names = custom_functions(targets)
        if names and is_measurable(entered) and not fits(self._run, entered, targets):
            logger.warning(
                "the targets do not move as the model's own backward functions say (%s; a straight-through "
                "estimator?): contributions are those of these functions",
                ", ".join(names),
            )

    def _where(self, loss: Loss) -> str:
        """The module of a loss, as error messages name it."""
        if loss.module is None:
            return ""
        kind = f"{type(loss.module).__module__}.{type(loss.module).__qualname__}"
        return f" of {self.name(Site(loss.module))} ({kind})"

    def _check_dependence(self, layer: Site, found: Dependence | None) -> None:
        """Raise a :class:`LostDerivativeError` if the derivative is lost on the way to a target."""
        if found is not None and found.lost is not None:
            refuse_loss(found.lost, self._where(found.lost), self.name(layer))
        if found is not None and found.stopped:
            logger.warning(
                "values on the way to %s are detached or computed under no_grad: they are taken as constant",
                self.name(layer),
            )

    def values(self, to_end: bool = False) -> list[Tensor]:
        """The targets.

        Args:
            to_end: Let the forward pass go on after its last target. What the model does there may fail, for
                want of arguments.
        """
        with _undisturbed(), torch.no_grad():
            return self._run(torch.clone, to_end)

    def _run(self, enter: Enter, to_end: bool = False) -> list[Tensor]:
        """Run the model up to its last target, with each source replaced by what ``enter`` returns."""
        if isinstance(self.forward_func, Module):
            refuse_batch_statistics(self.forward_func)
        found = _Found(len(set(self.layers)), to_end)
        sources: list[Tensor] = []
        inputs, extra = tree_map(_plain, (self.inputs, self.extra))
        with ExitStack() as hooks:
            if self.source is None:
                inputs = tuple(self._entered(x, enter, sources) for x in inputs)
            else:
                hooks.callback(self._hook_source(self.source, enter, sources).remove)
            hooks.callback(self._hook_sequence_first(sources).remove)
            hooks.callback(_hook_batch_statistics().remove)
            self._hook_targets(found, sources, hooks)
            hooks.enter_context(IsolatedRandomState())
            with found.ending():
                self.forward_func(*inputs, *extra)
        for site in self.layers:
            if site not in found:
                raise ValueError(
                    f"{self.name(site)} is not called in the forward pass: pass a module that forward_func "
                    "runs on these inputs (of a MultiheadAttention the module itself, which gives its heads)"
                )
        return [found[site] for site in self.layers]

    def _entered(self, x: Tensor, enter: Enter, sources: list[Tensor]) -> Tensor:
        """The tensor that takes the place of a source."""
        source = x.transpose(0, self.batch_dim)
        sources.append(source)
        return enter(source).transpose(0, self.batch_dim) if self.batch_dim else enter(source)

    def _hook_source(self, site: Site, enter: Enter, sources: list[Tensor]) -> RemovableHandle:
        def replaced(value: object) -> object:
            if sources and site.call is None:
                raise ValueError(
                    f"{self.name(site)} is called more than once before the target: choose a module "
                    "that is called once"
                )
            what = self._what(site)
            x = only_tensor(value, what)
            _check_sequence(x, what)
            self._check_batch(x.shape, self.inputs[0], what)
            return with_replaced(value, x, self._entered(x, enter, sources))

        return hook_site(site, replaced)

    def _check_batch(self, shape: Sequence[int], inputs: object, what: str) -> None:
        """Raise if a source does not have as many examples as the inputs, unless those have no batch axis."""
        if not isinstance(inputs, Tensor) or inputs.dim() < 2:
            return
        if shape[self.batch_dim] not in (inputs.shape[0], inputs.shape[self.batch_dim]):
            raise ValueError(self._other_batch(shape, inputs.shape[0], what))

    def _other_batch(self, shape: Sequence[int], examples: int, what: str) -> str:
        remedy = "batch_dim=1 where modules take [position, batch, width]"
        if self.batch_dim:
            remedy = "batch_dim=0 where modules take [batch, position, width]"
        return (
            f"{what} is {list(shape)}, so axis {self.batch_dim} is not the batch of {examples} "
            "(windows or beams, or the sequence comes first): choose a module whose tensor has the batch "
            f"there, or pass {remedy}"
        )

    def _hook_sequence_first(self, sources: list[Tensor]) -> RemovableHandle:
        """Refuse modules that would read the batch axis of the source as the sequence.

        With a single example, no mixing of examples would show it.
        """
        thread = threading.get_ident()

        def check(module: Module, args: tuple[object, ...]) -> None:
            if not isinstance(module, nn.MultiheadAttention | nn.RNNBase) or module.batch_first:
                return
            x = args[0] if args else None
            if threading.get_ident() != thread or not sources or not isinstance(x, Tensor) or x.dim() != 3:
                return
            batch, tokens = sources[-1].shape[:2]
            if x.shape[:2] == (batch, tokens) and batch != tokens:
                raise ValueError(
                    f"{self.name(Site(module))} takes [position, batch, width] (batch_first=False), but gets "
                    f"{list(x.shape)} with a batch of {batch} first: pass batch_dim=1 with inputs "
                    "[position, batch, ...], or build it with batch_first=True"
                )

        return register_module_forward_pre_hook(check)

    def _hook_targets(self, found: _Found, sources: list[Tensor], hooks: ExitStack) -> None:
        attention: dict[nn.MultiheadAttention, Site] = {}
        for site in dict.fromkeys(self.layers):
            if isinstance(site.module, nn.MultiheadAttention) and not site.at_input:
                attention[site.module] = site
            else:
                hooks.callback(self._hook_target(site, found, sources).remove)

        def keep(module: nn.MultiheadAttention, heads: Tensor) -> None:
            self._keep(attention[module], heads, found, sources, batch_dim=0)

        if attention:
            hooks.enter_context(HeadOutputs(keep, list(attention)))

    def _hook_target(self, site: Site, found: _Found, sources: list[Tensor]) -> RemovableHandle:
        def keep(value: object) -> None:
            target = only_tensor(site.pick(value), self._what(site))
            self._keep(site, target, found, sources, self.batch_dim)

        return hook_site(site, keep)

    def _keep(self, site: Site, target: Tensor, found: _Found, sources: list[Tensor], batch_dim: int) -> None:
        """Check a target and keep a copy of it, which no later write changes, with the batch first."""
        what = self._what(site)
        if not sources:
            raise ValueError(
                f"{self.name(site)} is called before the source {self.name(self.source)}, if that is "
                "called at all: choose a source that the forward pass reaches first"
            )
        _check_sequence(target, what, heads=True)
        examples = len(sources[-1])
        if target.shape[batch_dim] != examples:
            raise ValueError(self._other_batch(target.shape, examples, what))
        kept = target.clone()
        kept = kept.transpose(0, batch_dim) if batch_dim else kept
        count = self.num_heads[self.layers.index(site)]
        tokens = sum(source.shape[1] for source in sources)
        found.keep(site, _positions_first(kept, count, tokens, what))

    def _what(self, site: Site) -> str:
        return f"the {'input' if site.at_input else 'output'} of {self.name(site)}"

    def name(self, site: Site | None) -> str:
        """The site's module, as error messages name it."""
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


def _hook_batch_statistics() -> RemovableHandle:
    """Refuse batch normalisations in training mode before they change, whatever function calls them."""
    thread = threading.get_ident()

    def check(module: Module, args: tuple[object, ...]) -> None:
        if threading.get_ident() == thread and next(module.children(), None) is None:
            refuse_batch_statistics(module)

    return register_module_forward_pre_hook(check)


def _positions_first(target: Tensor, num_heads: int | None, tokens: int, what: str) -> Tensor:
    """A target whose heads come after its positions.

    Args:
        target: ``[batch, position, head, d_head]`` or ``[batch, head, position, d_head]``; others stay as
            they are.
        num_heads: The number of heads, if it is given.
        tokens: The number of source tokens.
        what: What the target is, for errors.

    Raises:
        ValueError: If the number of heads is not given, and lengths suggest that heads come first.
    """
    if target.dim() != 4 or not target.shape[1] != tokens == target.shape[2] or num_heads == tokens:
        return target
    if num_heads is None:
        raise ValueError(
            f"{what} is {list(target.shape)} with {tokens} source tokens, so its heads seem to come before "
            f"its positions: pass num_heads={target.shape[1]}, or num_heads={target.shape[2]} if it is "
            "[batch, position, head, d_head]"
        )
    return target.transpose(1, 2) if target.shape[1] == num_heads else target


def _heads(name: str, target: Tensor, num_heads: int | None) -> int | None:
    if target.dim() == 4:
        if num_heads not in (None, target.shape[2]):
            raise ValueError(f"{name} has {target.shape[2]} heads, but num_heads is {num_heads}")
        return target.shape[2]
    if num_heads is not None and target.shape[2] % num_heads:
        raise ValueError(
            f"{name} is {target.shape[2]} wide, which num_heads={num_heads} does not divide: pass the "
            "model's number of attention heads"
        )
    return num_heads


def _plain(value: object) -> object:
    """The value, or a copy of a tensor made under ``inference_mode``, which cannot be differentiated."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _check_sequence(value: Tensor, what: str, heads: bool = False) -> None:
    if value.dim() == 3 or (heads and value.dim() == 4):
        return
    raise ValueError(
        f"{what} is {list(value.shape)}, but [batch, position, width]"
        f"{' or [batch, position, head, d_head]' if heads else ''} is needed: choose a module whose "
        "tensor has these axes, or insert the missing one"
    )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Settings under which derivatives exist, restored on any exit.

    Fused attention kernels have no forward derivative and their backward does not vectorise, so
    attention runs in PyTorch's elementary operators.
    """
    with torch.inference_mode(False), full_precision():
        switches = [(enabled(), enable) for enabled, enable in SWITCHES]

        def elementary() -> None:
            for _, enable in SWITCHES:
                enable(enable is torch.backends.cuda.enable_math_sdp)

        def restore() -> None:
            for was_enabled, enable in switches:
                enable(was_enabled)

        with PRECISION.changed(elementary, restore):
            yield
