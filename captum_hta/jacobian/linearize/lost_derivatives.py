"""Operators in which autograd silently loses the derivative on the way from a source to a target.

Contributions would lack every path through such an operator, without an error. A :class:`DerivativeWatch`
follows the values that depend on a source through a forward pass and names the operator. Four kinds of
operators stop a derivative, and they are treated differently:

- **Losses are refused**: operators without a derivative whose results are floating-point or quantised
  numbers, such as int8 linear layers and custom operators, and rounding (``round``, ``floor``, ``ceil``,
  ``trunc``, casts to integers), if the numbers go on to the target.
- **Selections are right as they are**: comparisons, ``argmax``, the indices of ``topk`` or ``sort``. They are
  constant almost everywhere, and their results are used as masks or indices, as in the routing to experts.
- **Numbers that leave PyTorch** (``item()``, ``numpy()``) are noted: they may only be looked at, or come back
  as constants, which :mod:`captum_hta.jacobian.difference_check` tells.
- **Explicit stops are respected**, with a warning: ``detach`` and ``no_grad`` hold a value fixed on purpose,
  such as a frozen attention pattern. A custom backward function takes the place of what is inside.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from captum_hta.jacobian.linearize.recorder import refuse_training
from captum_hta.jacobian.torch_internals import (
    Arguments,
    Keywords,
    Operator,
    StorageWeakRef,
    TorchDispatchMode,
    operator_name,
    storage_identity,
    tree_flatten,
    writes_to_arguments,
)

ROUNDING = ("round", "floor", "ceil", "trunc", "fix")
CASTS = ("_to_copy", "copy", "copy_")
INDEXING = (
    "embedding", "gather", "index", "index_add", "index_copy", "index_fill", "index_put", "index_select",
    "masked_fill", "masked_scatter", "repeat_interleave", "scatter", "scatter_add", "scatter_reduce", "take",
    "where",
)  # fmt: skip
"""Operators whose integers are indices or masks, in place or not."""
EXITS = {
    getattr(Tensor, name): name.strip("_")
    for name in ("item", "tolist", "numpy", "__array__", "__float__", "__int__", "__dlpack__")
}
"""How numbers leave PyTorch."""
WITHOUT_DERIVATIVE = ("WarnNotImplemented", "NotImplemented")
"""Nodes of autograd's graph that stand for an operator without a derivative; the first gives zeros."""


MISSING_FORMULAS = ("no autograd formula was registered", "is not implemented", "is not differentiable")
"""How autograd's errors describe an operator without a derivative."""


class LostDerivativeError(ValueError):
    """The derivative is lost on the way from a source to a target."""


@contextmanager
def named_losses() -> Iterator[None]:
    """Raise a :class:`LostDerivativeError` where autograd finds an operator without a derivative."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if not any(words in reason for words in MISSING_FORMULAS):
            raise
        raise LostDerivativeError(
            f"an operator on the way from the source has no derivative ({reason}): give it one, or choose a "
            "source or a target that it does not lie between"
        ) from error


@dataclass(frozen=True)
class Loss:
    """Where a derivative is lost.

    Attributes:
        operator: The operator's name.
        module: The module that called it, if it is known.
    """

    operator: str
    module: Module | None = None


def refuse_loss(loss: Loss, where: str, target: str) -> NoReturn:
    """Raise a :class:`LostDerivativeError` that names the operator in which a derivative is lost.

    Args:
        loss: The loss.
        where: The module of the operator, as ``" of module 'x'"``, or an empty string.
        target: What depends on the source through the operator.
    """
    raise LostDerivativeError(
        f"the derivative is lost in the operator {loss.operator}{where}, through which {target} depends on "
        "the source: load the model in floating point, without quantisation, or choose a source or a target "
        "that it does not lie between"
    )


@dataclass(frozen=True)
class Dependence:
    """How a value depends on a source.

    Attributes:
        producer: The operator that computed it.
        recorded: Whether autograd should have attached a graph to it.
        attached: Whether it has been seen with an autograd graph.
        lost: The first loss on the way.
        pending: A loss while autograd was not recording: a custom backward function may make up for it.
        stopped: Whether a value on the way was detached from the graph on purpose.
    """

    producer: Loss
    recorded: bool = True
    attached: bool = False
    lost: Loss | None = None
    pending: Loss | None = None
    stopped: bool = False


class DerivativeWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch gives it no types
    """Follows the values that depend on sources, and refuses a model in training mode.

    Use as a context manager around a forward pass with gradients enabled. Values are identified by their
    storage, since autograd gives views new Python objects.

    Attributes:
        exits: Where numbers that depend on a source left PyTorch, as far as :class:`ExitWatch` saw it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.exits: list[Loss] = []
        self._known: dict[int, Dependence] = {}
        self._references: list[StorageWeakRef] = []

    def mark_source(self, tensor: Tensor) -> None:
        """Follow the values that depend on ``tensor``."""
        self._note(tensor, Dependence(Loss("source"), attached=True))

    def dependence(self, tensor: Tensor) -> Dependence | None:
        """How ``tensor`` depends on the sources; ``None`` if it does not."""
        return self._read(tensor, recording=True)

    def note_exit(self, function: str, tensor: Tensor) -> None:
        """Note that numbers leave PyTorch, if they depend on a source."""
        if _has_storage(tensor) and _is_real(tensor) and storage_identity(tensor) in self._known:
            self.exits.append(Loss(function, _calling_module()))

    def __torch_dispatch__(
        self, function: Operator, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        refuse_training(function, args)
        leaves = tree_flatten((args, kwargs or {}))[0]
        tensors = [value for value in leaves if isinstance(value, Tensor)]
        out = function(*args, **(kwargs or {}))
        outputs = [value for value in tree_flatten(out)[0] if isinstance(value, Tensor)]
        self._follow(function, tensors, outputs)
        return out

    def _follow(self, function: Operator, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Note how the outputs of an operator depend on the sources."""
        name, recording = operator_name(function), torch.is_grad_enabled()
        read = [] if _reads_no_values(name) else list(self._dependences(tensors, recording))
        given = {storage_identity(tensor) for tensor in tensors if _has_storage(tensor)}
        writes = writes_to_arguments(function)
        for out in filter(_has_storage, outputs):
            where = storage_identity(out)
            if where in given and not writes:
                continue  # a view
            found = _combined(name, recording, out, _numbers(name, out, read))
            if found is not None:
                self._note(out, found)

    def _note(self, tensor: Tensor, found: Dependence) -> None:
        """Remember how a value depends on the sources."""
        where = storage_identity(tensor)
        if where not in self._known:
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._references.append(reference)
        self._known[where] = found

    def _dependences(self, tensors: Iterable[Tensor], recording: bool) -> Iterator[tuple[Tensor, Dependence]]:
        for tensor in tensors:
            found = self._read(tensor, recording)
            if found is not None:
                yield tensor, found

    def _read(self, tensor: Tensor, recording: bool) -> Dependence | None:
        """The dependence of a value that is read, updated from its autograd graph."""
        where = storage_identity(tensor) if _has_storage(tensor) else None
        if where is None or where not in self._known:
            return None
        found = self._known[where]
        if tensor.requires_grad:
            found = _attached(tensor, found, recording)
            self._known[where] = found
        elif recording and _is_real(tensor):
            return _detached(found)
        return found


class ExitWatch(TorchFunctionMode):
    """Notes numbers that leave PyTorch, in which no operator takes part.

    Args:
        watch: Told of them.
    """

    def __init__(self, watch: DerivativeWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        if func in EXITS and isinstance(args[0], Tensor):
            self.watch.note_exit(EXITS[func], args[0])
        return func(*args, **(kwargs or {}))


def _attached(tensor: Tensor, found: Dependence, recording: bool) -> Dependence:
    """The dependence of a value with a graph, in which operators without a derivative leave special nodes."""
    node = "" if tensor.grad_fn is None else tensor.grad_fn.name()
    if node.rpartition("::")[2].startswith(WITHOUT_DERIVATIVE):
        found = replace(found, lost=found.lost or found.producer)
    if recording and not found.recorded:  # a custom backward function
        found = replace(found, pending=None)
    return replace(found, attached=True)


def _detached(found: Dependence) -> Dependence:
    """The dependence of a value without a graph, read where autograd is recording."""
    if found.pending is not None:
        return replace(found, lost=found.lost or found.pending)
    if found.attached:
        return replace(found, lost=None, stopped=True)
    if not found.recorded:
        return replace(found, stopped=True)
    return replace(found, lost=found.lost or found.producer)


def _combined(
    name: str, recording: bool, out: Tensor, data: Sequence[tuple[Tensor, Dependence]]
) -> Dependence | None:
    """The dependence of an output on the numbers that an operator computes it from."""
    if not data:
        return None
    own = Loss(name, _calling_module()) if _rounds(name, out, data) else None
    lost = [found.lost for _, found in data if found.lost is not None]
    pending = [found.pending for _, found in data if found.pending is not None]
    if own is not None:
        (lost if recording else pending).append(own)
    return Dependence(
        producer=own or Loss(name, _calling_module() if ":" in name else None),
        recorded=(recording or ":" in name) and any(tensor.requires_grad for tensor, _ in data),
        lost=next(iter(lost), None),
        pending=next(iter(pending), None),
        stopped=any(found.stopped for _, found in data),
    )


def _numbers(
    name: str, out: Tensor, read: Sequence[tuple[Tensor, Dependence]]
) -> list[tuple[Tensor, Dependence]]:
    """The values that enter an output as numbers, not as masks, as indices or in a comparison."""
    if out.dtype == torch.bool:
        return []
    if not _is_real(out) and not out.is_quantized and name not in CASTS:
        return [(tensor, found) for tensor, found in read if not _is_real(tensor)]
    if name.removesuffix("_") in INDEXING:
        return [(tensor, found) for tensor, found in read if _is_real(tensor)]
    return list(read)


def _rounds(name: str, out: Tensor, data: Sequence[tuple[Tensor, Dependence]]) -> bool:
    """Whether an operator rounds real numbers, or turns them to integers or quantised numbers."""
    reads_real = any(_is_real(tensor) for tensor, _ in data)
    return reads_real and (name.removesuffix("_") in ROUNDING or not _is_real(out))


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _reads_no_values(name: str) -> bool:
    """Whether an operator reads only the shape and dtype of a tensor."""
    return name.endswith("_like") or name.startswith("new_")


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided


def _calling_module() -> Module | None:
    """The module whose ``forward`` is running, as far as the call stack shows."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Module):
            return caller
        frame = frame.f_back
    return None
