"""What every model that is loaded by its structure must meet, against plain autograd."""

from __future__ import annotations

import torch
from families import Family
from reference import norms, shares
from torch import Tensor
from torch.nn import Module

from captum_hta import contributions
from captum_hta.integrations import TransformersModel


def check_contributions(
    family: Family, model: TransformersModel, plain: Module, text: object, read: Tensor, source: str
) -> None:
    """Contributions to the heads and the output of the last block with attention are those of autograd.

    Args:
        family: The row of the table.
        model: The adapter.
        plain: The same model, for autograd.
        text: What the adapter reads.
        read: The same as the model takes it.
        source: The source.
    """
    assert (model.num_layers, model.num_heads) == (len(family.layers), 4)
    layer = family.layers[-1]
    start = family.start if source == "input" else layer
    expected = by_autograd(family, plain, read, start, layer)
    close = {"rtol": 1e-9, "atol": 1e-12} if family.exact else {"rtol": 2e-5, "atol": 1e-7}
    for kind, heads in (("head", 4), ("layer", 1)):
        found = contributions(model, [text], source=source, target=kind, layers=[-1]).values[0, 0]
        wanted = shares(norms(expected[kind], heads, "frobenius"))
        torch.testing.assert_close(found, wanted if heads > 1 else wanted[0], **close)
        assert not family.causal or not found.triu(1).any()


def check_structure(family: Family, model: TransformersModel) -> None:
    """Blocks and projections are those that the table names, and so are causality and the closed form."""
    paths = {module: path for path, module in model.model.named_modules()}
    blocks = [family.block.format(number) for number in family.layers]
    assert [paths[place.block] for place in model.places] == blocks
    projections = [f"{block}.{family.projection}" for block in blocks]
    assert [paths[place.projection] for place in model.places] == projections
    assert model.size.causal == family.causal
    assert model.size.closed_form == family.closed_form


def by_autograd(family: Family, model: Module, ids: Tensor, source: int, layer: int) -> dict[str, Tensor]:
    """Jacobians ``[query, component, key, width]`` of the heads and the output of a block, by hooks of the
    test's own, from one graph.
    """
    blocks = [model.get_submodule(family.block.format(number)) for number in (source, layer)]
    seen: dict[str, Tensor] = {}

    def enter(module: Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        x = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_()
        seen["x"] = x
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

    def leave(module: Module, args: tuple, out: Tensor | tuple) -> None:
        seen["layer"] = out if isinstance(out, Tensor) else out[0]

    projection = blocks[1].get_submodule(family.projection)
    handles = [
        blocks[0].register_forward_pre_hook(enter, with_kwargs=True),
        projection.register_forward_pre_hook(lambda module, args: seen.update(head=args[0])),
        blocks[1].register_forward_hook(leave),
    ]
    model(ids)
    for handle in handles:
        handle.remove()
    return {kind: rows_of(seen[kind].flatten(2), seen["x"]) for kind in ("head", "layer")}


def rows_of(y: Tensor, x: Tensor) -> Tensor:
    rows = [torch.autograd.grad(one, x, retain_graph=True)[0][0] for one in y[0].flatten()]
    return torch.stack(rows).unflatten(0, y.shape[1:])
