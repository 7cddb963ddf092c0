"""One forward pass as it is seen from outside: which modules are called, and where attention is computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from captum_hta.integrations.transformers.attention import AttentionCall, observed_attention
from captum_hta.integrations.transformers.internals import uses_attention_interface
from captum_hta.integrations.transformers.products import Product, ProductObserver
from captum_hta.integrations.weights import is_affine
from captum_hta.model.precision import full_precision
from captum_hta.model.sites import main_keyword

KEPT_TOKENS = 6
"""Tokens of which the values of modules are kept: enough to tell tensors apart."""


@dataclass(eq=False)
class ModuleCall:
    """One call of a module.

    Attributes:
        module: The module.
        number: The number of this call among those of the module.
        parent: The call within which it is called; ``None`` for the model.
        x: What it reads: its first argument or the hidden states, the first tokens; ``None`` if that is no
            tensor of numbers.
        out: What it returns, or the first item of it, the first tokens.
        length: Number of tokens that it reads.
        order: How many calls began before it.
        angles: Cosines and sines of the rotary embedding that it is given, first tokens.
    """

    module: Module
    number: int
    parent: ModuleCall | None
    x: Tensor | None
    length: int
    order: int
    angles: tuple[Tensor, Tensor] | None = None
    out: Tensor | None = None

    @property
    def ancestors(self) -> list[ModuleCall]:
        """The calls within which it is made, outermost first, and itself."""
        return [*([] if self.parent is None else self.parent.ancestors), self]


@dataclass(eq=False)
class Heads:
    """Where the heads of one attention are computed.

    Attributes:
        call: The call of the module that computes them.
        attention: What is computed.
        outputs: The pattern times the values, heads side by side, first tokens:
            ``[batch, query, head * d_head]``.
        readers: The calls, one after the other or within each other, of modules that read the outputs of all
            heads, side by side.
        gated_reader: The call of the module that reads something else of their shape within the attention:
            their product with a gate, if there is one.
    """

    call: ModuleCall
    attention: AttentionCall | Product
    outputs: Tensor
    readers: list[ModuleCall] = field(default_factory=list)
    gated_reader: ModuleCall | None = None

    @cached_property
    def reader(self) -> ModuleCall | None:
        """The call of the output projection: the first reader that is an affine map of the heads' outputs, or
        else the last; ``None`` if there is none. A projection that an adapter wraps is within its wrapper.
        """
        maps = (one for one in self.readers if one.x is not None and is_affine(one.module, one.x))
        return next(maps, self.readers[-1] if self.readers else None)

    @property
    def lengths(self) -> tuple[int, int]:
        """Number of queries and of keys."""
        queries, keys = self.attention.pattern.shape[2:]
        return queries, keys


@dataclass
class Trace:
    """What is seen of one forward pass.

    Attributes:
        calls: The calls of all modules, in the order in which they begin.
        heads: Where attention is computed, in order.
        written_out: Whether attention is computed by functions of PyTorch, not by the attention interface of
            ``transformers``.
    """

    calls: list[ModuleCall] = field(default_factory=list)
    heads: list[Heads] = field(default_factory=list)
    written_out: bool = False

    def within(self, call: ModuleCall) -> list[ModuleCall]:
        """The calls that are made within a call."""
        return [other for other in self.calls if call in other.ancestors[:-1]]


def traced(model: PreTrainedModel, run: Callable[[], object], as_it_is: bool = False) -> Trace:
    """Watch a forward pass of one example.

    Args:
        model: The model.
        run: Runs it.
        as_it_is: Whether its own implementation of attention is observed, also if it could be switched.
    """
    if uses_attention_interface(model) and not as_it_is:
        found = _tried(model, run)
        if found is not None and found.heads:
            return found
    watcher = _Watcher(Trace(written_out=True))
    with watcher.of(model), ProductObserver(watcher.attended, batch=1):
        _run(run)
    return watcher.trace


def _tried(model: PreTrainedModel, run: Callable[[], object]) -> Trace | None:
    """The trace of a model whose attention goes through the interface; ``None`` if it cannot be run so."""
    watcher = _Watcher(Trace())
    try:
        with watcher.of(model), observed_attention(model, watcher.attended_by):
            _run(run)
    except Exception:  # whatever the model raises for an implementation that it does not know
        return None
    return watcher.trace


def _run(run: Callable[[], object]) -> None:
    """Run a model. Not in inference mode: some models cast their weights when they run."""
    with torch.no_grad(), full_precision():
        run()


class _Watcher:
    """Hooks that write a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._stack: list[ModuleCall] = []
        self._counts: dict[Module, int] = {}
        self._waiting: Heads | None = None
        self._thread = threading.get_ident()

    @contextmanager
    def of(self, model: Module) -> Iterator[None]:
        """Watch every module of a model within the context."""
        with ExitStack() as hooks:
            for module in model.modules():
                before = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                after = module.register_forward_hook(self._leave, always_call=True)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            yield

    def attended(self, attention: AttentionCall | Product) -> None:
        """Note attention that is computed now."""
        self._note(self._stack[-1], attention)

    def attended_by(self, module: Module, attention: AttentionCall) -> None:
        """Note attention that a module computes."""
        call = next((one for one in reversed(self._stack) if one.module is module), self._stack[-1])
        self._note(call, attention)

    def _note(self, call: ModuleCall, attention: AttentionCall | Product) -> None:
        self._waiting = Heads(call, attention, _outputs(attention))
        self.trace.heads.append(self._waiting)

    def _enter(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        value = args[0] if args else kwargs.get(main_keyword(kwargs) or "")
        number = self._counts.get(module, 0)
        self._counts[module] = number + 1
        call = ModuleCall(
            module, number, self._stack[-1] if self._stack else None, _first_tokens(value), _length(value),
            len(self.trace.calls), _angles(kwargs.get("position_embeddings")),
        )  # fmt: skip
        self.trace.calls.append(call)
        self._stack.append(call)
        if self._waiting is not None:
            self._read(self._waiting, call)

    def _read(self, heads: Heads, call: ModuleCall) -> None:
        """Note the modules, called one after the other, that read the outputs of heads."""
        if _equal(heads.outputs, call.x):
            heads.readers.append(call)
        elif heads.readers:
            self._waiting = None
        elif heads.gated_reader is None and call.x is not None and call.x.shape == heads.outputs.shape:
            heads.gated_reader = call if heads.call in call.ancestors else None

    def _leave(self, module: Module, args: object, out: object) -> None:
        if threading.get_ident() != self._thread:
            return
        call = self._stack.pop()
        call.out = _first_tokens(out[0] if isinstance(out, tuple | list) and out else out)


def _outputs(attention: AttentionCall | Product) -> Tensor:
    """The pattern times the values, heads side by side."""
    pattern, value = attention.pattern[:, :, :KEPT_TOKENS], attention.value
    repeats = pattern.shape[1] // value.shape[1]
    product = pattern.to(value.dtype) @ value.repeat_interleave(repeats, 1)
    return product.transpose(1, 2).flatten(2)


def _angles(given: object) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines ``[batch, token, width]`` of the first tokens."""
    if not isinstance(given, tuple) or len(given) != 2 or not all(isinstance(one, Tensor) for one in given):
        return None
    cos, sin = (one.detach()[:, :KEPT_TOKENS].clone() for one in given)
    return cos, sin


def is_norm(call: ModuleCall) -> bool:
    """Whether a call normalises: a leaf with weights of one axis that returns other numbers than it reads."""
    is_leaf = not any(True for _ in call.module.children())
    weights = [parameter for parameter in call.module.parameters() if parameter.dim() != 1]
    if not is_leaf or weights or call.x is None or call.out is None:
        return False
    return call.x.shape == call.out.shape and not same(call.x, call.out)


def same(value: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are the same up to rounding."""
    if value is None or other is None or value.shape != other.shape:
        return False
    scale = other.abs().max().clamp_min(torch.finfo(other.dtype).tiny)
    return bool((value - other).abs().max() <= max(1e-5, 8 * torch.finfo(other.dtype).eps) * scale)


def _length(value: object) -> int:
    return value.shape[1] if isinstance(value, Tensor) and value.dim() > 1 else 0


def _first_tokens(value: object) -> Tensor | None:
    """A copy of the first tokens of a tensor ``[batch, token, ...]`` of numbers; that of one example may lack
    the axis of the batch.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
        return None
    value = value[None] if value.dim() == 2 else value
    return value.detach()[:, :KEPT_TOKENS].clone()


def _equal(outputs: Tensor, x: Tensor | None) -> bool:
    """Whether a module reads the outputs of heads, side by side, up to rounding."""
    if x is None or x.shape[:2] != outputs.shape[:2] or x.numel() != outputs.numel():
        return False
    scale = x.abs().max().clamp_min(torch.finfo(x.dtype).tiny)
    rounding = max(1e-3, 8 * torch.finfo(x.dtype).eps)
    return bool((outputs.to(x) - x.flatten(2)).abs().max() <= rounding * scale)
