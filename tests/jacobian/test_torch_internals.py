"""PyTorch's private names that the core uses still mean what they meant."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import captum_hta
from captum_hta.jacobian import torch_internals as internals

PRIVATE = re.compile(
    r"torch\.(\w+\.)*_[a-z]|torch\._C|\._schema|\._version\b|\._cdata|\._overloadname|aten\._"
)
CHANGED = "this release of PyTorch has changed {}: adapt captum_hta/jacobian/torch_internals.py"
aten = torch.ops.aten


def test_dispatch_modes_see_the_operators_below_autograd():
    seen = []

    class Watch(internals.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Watch():
        nn.Linear(2, 3)(torch.ones(4, 2, requires_grad=True))
    changed = CHANGED.format("torch.utils._python_dispatch.TorchDispatchMode")
    assert aten.addmm.default in seen, changed


def test_trees_are_flattened_in_order():
    tree = ((1, {"b": 2, "a": [3]}), None)
    flat, spec = internals.tree_flatten(tree)
    changed = CHANGED.format("torch.utils._pytree")
    assert flat == [1, 2, 3, None], changed
    assert internals.tree_unflatten(flat, spec) == tree, changed
    assert internals.tree_map(lambda leaf: leaf and -leaf, tree) == ((-1, {"b": -2, "a": [-3]}), None), (
        changed
    )


def test_operators_tell_their_names_and_what_they_write():
    changed = CHANGED.format("the schemas of operators")
    assert internals.operator_name(aten.addmm.default) == "addmm", changed
    assert internals.operator_name(aten.add_.Tensor) == "add_", changed
    assert internals.writes_to_arguments(aten.add_.Tensor), changed
    assert not internals.writes_to_arguments(aten.add.Tensor), changed
    assert internals.functional_variant(aten.add_.Tensor) is aten.add.Tensor, changed
    assert internals.functional_variant(aten.add.out) is None, changed


def test_operators_that_draw_take_generators():
    changed = CHANGED.format("the overloads with generators")
    assert internals.seeded_variant(aten.rand.default) is aten.rand.generator, changed
    assert internals.seeded_variant(aten.normal_.default) is aten.normal_.default, changed
    assert internals.seeded_variant(aten.native_dropout.default) is None, changed
    assert torch.Tag.nondeterministic_seeded in aten.rand.default.tags, changed


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_batch_normalisations_are_known(norm: type[nn.Module]):
    assert internals.is_batch_norm(norm(2)), CHANGED.format("torch.nn.modules.batchnorm._BatchNorm")
    assert not internals.is_batch_norm(nn.LayerNorm(2))


def test_a_batch_normalisation_becomes_one_of_the_operators():
    seen = []

    class Watch(internals.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function.overloadpacket)
            return function(*args, **(kwargs or {}))

    with Watch():
        nn.BatchNorm1d(2)(torch.ones(4, 2))
    assert set(seen) & set(internals.BATCH_NORM_OPERATORS), CHANGED.format("the batch norm operators")


def test_tensors_count_what_is_written_to_them():
    tensor = torch.zeros(2)
    before = internals.version_of(tensor)
    tensor[0] = 1
    assert internals.version_of(tensor) == before + 1, CHANGED.format("Tensor._version")


def test_views_share_a_storage():
    tensor = torch.zeros(2)
    changed = CHANGED.format("UntypedStorage._cdata")
    assert internals.storage_identity(tensor) == internals.storage_identity(tensor[1:]), changed
    assert internals.storage_identity(tensor) != internals.storage_identity(tensor.clone()), changed
    assert internals.storage_identity(torch.empty(0)) != internals.storage_identity(tensor), changed


def test_a_weak_reference_keeps_the_number_of_a_storage():
    tensor = torch.zeros(8)
    number, reference = (
        internals.storage_identity(tensor),
        internals.StorageWeakRef(tensor.untyped_storage()),
    )
    del tensor
    changed = CHANGED.format("torch.multiprocessing.reductions.StorageWeakRef")
    assert reference.expired(), changed
    assert number not in {internals.storage_identity(torch.zeros(8)) for _ in range(100)}, changed


def test_no_other_module_of_the_core_uses_them():
    package = Path(captum_hta.__file__).parent
    found = [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in package.rglob("*.py")
        if path.name != "torch_internals.py" and "integrations" not in path.parts
        for line in path.read_text().splitlines()
        if PRIVATE.search(line)
    ]
    assert not found
