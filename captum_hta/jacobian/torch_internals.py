"""All that the core takes from PyTorch beyond its public interface, each with the reason.

No other module of the core imports a private module of PyTorch or reads a private attribute of its objects.
``tests/jacobian/test_torch_internals.py`` fails by name where a release of PyTorch changes one of them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

__all__ = [
    "BATCH_NORM_OPERATORS",
    "Arguments",
    "Keywords",
    "Operator",
    "StorageWeakRef",  # keeps the number of a storage from being given to another, and no memory
    "TorchDispatchMode",  # the only view of operators below autograd, of which a recording consists
    "TreeSpec",
    "functional_variant",
    "is_batch_norm",
    "operator_name",
    "seeded_variant",
    "storage_identity",
    "tree_flatten",  # leaves of nested arguments, in the order that PyTorch takes them
    "tree_map",
    "tree_unflatten",
    "uncompiled",
    "version_of",
    "writes_to_arguments",
]

Arguments = tuple[object, ...]
Keywords = dict[str, object]


class Operator(Protocol):
    """An ATen operator with one signature, as a dispatch mode gets it: PyTorch's class is untyped."""

    tags: Collection[object]
    overloadpacket: object
    _schema: torch._C.FunctionSchema
    _overloadname: str

    def name(self) -> str:
        """The operator's name, such as ``aten::add.Tensor``."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the operator: a tensor, several of them, a number, or nothing."""


_aten = torch.ops.aten
BATCH_NORM_OPERATORS = (
    _aten.native_batch_norm,
    _aten._native_batch_norm_legit,
    _aten._batch_norm_with_update,
)
"""The operators that a batch normalisation can become; two have private names and no public counterpart."""


def is_batch_norm(module: Module) -> bool:
    """Whether a module is a batch normalisation; its public classes share a private base alone."""
    return isinstance(module, _BatchNorm)


def operator_name(operator: Operator) -> str:
    """The name of an ATen operator without its overload, such as ``addmm``."""
    return operator.name().partition(".")[0].removeprefix("aten::")


def writes_to_arguments(operator: Operator) -> bool:
    """Whether an operator changes an argument; nothing public tells this before it runs."""
    return operator._schema.is_mutable


def functional_variant(operator: Operator) -> Operator | None:
    """The operator that returns what an in-place operator writes to its first argument, if there is one.

    Overloads are found by the names in their schemas, for which there is no public look-up.
    """
    namespace, _, name = operator._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    variant: Operator | None = getattr(packet, operator._overloadname, None)
    if not name.endswith("_") or variant is None or writes_to_arguments(variant):
        return None
    return variant


def seeded_variant(operator: Operator) -> Operator | None:
    """The overload of an operator that draws from a generator, if there is one; nothing public lists them."""
    names = {argument.name for argument in operator._schema.arguments}
    if "generator" in names:
        return operator
    overload = f"{operator._overloadname.removesuffix('default')}_generator".removeprefix("_")
    variant: Operator | None = getattr(operator.overloadpacket, overload, None)
    return variant


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to in place; autograd's own guard against stale values."""
    return tensor._version


def storage_identity(tensor: Tensor) -> int:
    """A number that tensors share if they share memory; data pointers do not tell empty ones apart."""
    return int(tensor.untyped_storage()._cdata)


def uncompiled(module: Module) -> Module:
    """The module that ``torch.compile`` was called with; any other module as it is.

    The class of compiled modules takes seconds to import, so it is told by its attribute ``_orig_mod``.
    """
    inner: object = module._modules.get("_orig_mod")
    return inner if isinstance(inner, Module) else module
