"""A forward pass as a list of the operators that depend on a source.

A :class:`Recorder` sees the ATen operators below autograd, so it works for any model in eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from captum_hta.jacobian.torch_internals import (
    BATCH_NORM_OPERATORS,
    Arguments,
    Keywords,
    Operator,
    TorchDispatchMode,
    TreeSpec,
    functional_variant,
    is_batch_norm,
    operator_name,
    storage_identity,
    tree_flatten,
    tree_unflatten,
    version_of,
    writes_to_arguments,
)

aten = torch.ops.aten
Output = Tensor | tuple[Tensor, ...] | list[Tensor]
"""What an operator that depends on a source returns."""
Push = Callable[..., Output]
"""Maps stacks of tangents of an operator's arguments to those of its output, or of its outputs."""
_RANDOM = (aten.bernoulli, aten.bernoulli_, aten.native_dropout, aten.rrelu_with_noise)
BATCH_STATISTICS = (
    "a batch normalisation takes the statistics of the batch, so the model is in training mode and its "
    "examples influence each other: call model.eval() first"
)


class NotLinearizableError(RuntimeError):
    """An operator of the forward pass has no forward derivative, or cannot be recorded."""


@dataclass
class Call:
    """One operator of the forward pass that depends on a source.

    Attributes:
        function: The ATen operator.
        flat: All its arguments, in the order of the pytree ``spec``.
        spec: The structure of the arguments.
        argument_indices: The indices in ``flat`` of the arguments that carry a tangent.
        inputs: The variable of each of those arguments.
        outputs: The variable of each output tensor.
        shape, dtype: Shape and dtype of the first output.
        versions: Tensors among the arguments with their version counters, which show later changes in place.
        rule: Replaces the operator's own JVP rule.
        flops: Replaces the operator's own count of operations.
    """

    function: Operator
    flat: list[Any]
    spec: TreeSpec
    argument_indices: list[int]
    inputs: list[int]
    outputs: list[int]
    shape: tuple[int, ...]
    dtype: torch.dtype
    versions: list[tuple[Tensor, int]]
    rule: Callable[[Call], Push] | None = None
    flops: int | None = None

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments."""
        return tuple(tree_unflatten(self.flat, self.spec)[0])

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments."""
        return dict(tree_unflatten(self.flat, self.spec)[1])

    @property
    def primals(self) -> tuple[Tensor, ...]:
        """The values of the arguments that carry a tangent."""
        return tuple(self.flat[index] for index in self.argument_indices)

    @property
    def name(self) -> str:
        """The operator's name in ATen, such as ``addmm``; other libraries' with their namespace."""
        return operator_name(self.function)

    def apply(self, *values: Tensor) -> Output:
        """The operator as a function of those of its arguments that carry a tangent."""
        flat = list(self.flat)
        for index, value in zip(self.argument_indices, values, strict=True):
            flat[index] = value
        args, kwargs = tree_unflatten(flat, self.spec)
        out: Output = self.function(*args, **kwargs)
        return out


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch gives it no types
    """Records the operators that depend on tensors marked with :meth:`mark_source`.

    Use as a context manager around a forward pass under ``torch.no_grad()``. Tensors are identified by their
    Python objects, which the recorder keeps alive.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._variable: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._mutated: dict[int, set[int]] = {}
        self.shapes: list[tuple[int, ...]] = []

    def mark_source(self, tensor: Tensor) -> int:
        """Make ``tensor`` a variable at which tangents enter."""
        return self._bind(tensor)

    def variable(self, tensor: Tensor) -> int | None:
        """The variable of ``tensor``, or ``None`` if it depends on no source.

        Raises:
            NotLinearizableError: If the variable is unknown, because ``tensor`` was changed in place.
        """
        self._refuse_stale("the target", [tensor])
        return self._variable.get(id(tensor))

    def _bind(self, tensor: Tensor) -> int:
        """A new variable. Integers, such as the indices of ``topk``, have one too, but carry no tangent."""
        self._alive.append(tensor)
        if tensor.is_floating_point() or tensor.is_complex():
            self._variable[id(tensor)] = len(self.shapes)
        self.shapes.append(tuple(tensor.shape))
        return len(self.shapes) - 1

    def __torch_dispatch__(
        self, function: Operator, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        refuse_training(function, args)
        flat, spec = tree_flatten((args, kwargs or {}))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        self._refuse_stale(function, tensors)
        tracked = [index for index, value in enumerate(flat) if self._is_tracked(value)]
        if not tracked or operator_name(function) == "detach":
            out = function(*args, **(kwargs or {}))
        else:
            out = self._record(function, flat, spec, tracked)
        self._keep_aliases(out)
        return out

    def _is_tracked(self, value: object) -> bool:
        return isinstance(value, Tensor) and id(value) in self._variable

    def _record(
        self, function: Operator, flat: list[Any], spec: TreeSpec, argument_indices: list[int]
    ) -> object:
        """Run and record an operator that depends on a source."""
        args, kwargs = tree_unflatten(flat, spec)
        inputs = [self._variable[id(flat[index])] for index in argument_indices]
        writes = writes_to_arguments(function)
        recorded = _functional(function) if writes else function
        if writes:
            flat = [flat[0].clone(), *flat[1:]]
        versions = [
            (value, version_of(value))
            for value in flat
            if isinstance(value, Tensor) and not value.is_inference()
        ]
        out = function(*args, **kwargs)
        outputs = [value for value in tree_flatten(out)[0] if isinstance(value, Tensor)]
        if not any(value.is_floating_point() or value.is_complex() for value in outputs):
            return out
        if writes:
            self._note_mutation(args[0])
        bound = [self._bind(value) for value in outputs]
        shape, dtype = tuple(outputs[0].shape), outputs[0].dtype
        self.calls.append(Call(recorded, flat, spec, argument_indices, inputs, bound, shape, dtype, versions))
        return out

    def _note_mutation(self, tensor: Tensor) -> None:
        self._alive.append(tensor)
        self._mutated[storage_identity(tensor)] = {id(tensor)}

    def _keep_aliases(self, out: object) -> None:
        """A view made after a change in place is up to date, like the tensor that was changed."""
        if not self._mutated:
            return
        for value in tree_flatten(out)[0]:
            if isinstance(value, Tensor):
                valid = self._mutated.get(storage_identity(value))
                if valid is not None:
                    self._alive.append(value)
                    valid.add(id(value))

    def _refuse_stale(self, reader: object, tensors: Sequence[Tensor]) -> None:
        if not self._mutated:
            return
        for value in tensors:
            valid = self._mutated.get(storage_identity(value))
            if valid is not None and id(value) not in valid:
                raise NotLinearizableError(
                    f"{reader} reads a tensor through an alias of one that was changed in place"
                )


def refuse_batch_statistics(model: Module) -> None:
    """Check that a forward pass would not change running statistics.

    Raises:
        ValueError: If a batch normalisation is in training mode.
    """
    for module in model.modules():
        if is_batch_norm(module) and module.training:
            raise ValueError(BATCH_STATISTICS)


def refuse_training(function: Operator, args: Arguments) -> None:
    """Check that an operator does not belong to training mode.

    Raises:
        ValueError: If it belongs to an active dropout, or to a batch normalisation that takes the statistics
            of the batch.
    """
    if function.overloadpacket in BATCH_NORM_OPERATORS and any(value is True for value in args):
        raise ValueError(BATCH_STATISTICS)
    if function.overloadpacket in _RANDOM:
        raise ValueError(
            "a dropout is active, so the model is in training mode and its derivative random: call "
            "model.eval() first"
        )


def _functional(function: Operator) -> Operator:
    """The operator that returns what an in-place operator writes to its first argument."""
    variant = functional_variant(function)
    if variant is None:
        raise NotLinearizableError(f"{function} writes to its arguments")
    return variant
