r"""The derivative of one forward pass, as a list of linear maps that tangents are pushed through.

:class:`Linearization` turns each recorded operator into the linear map of its derivative at the recorded
point, with every coefficient (softmax rows, normalised activations, derivatives of activation functions)
computed once. Pushing a tangent then costs the matrix products of a forward pass and little else; no primal
value is computed again.

Forward-mode differentiation as in Griewank and Walther, *Evaluating Derivatives*, 2nd ed., section 3.1;
the separation of linearisation from evaluation as in ``jax.linearize``. ``torch.func.linearize`` does
the same by tracing through AOTAutograd, which takes seconds per example; recording takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from captum_hta.jacobian.linearize.jvp_rules import SHAPE_ONLY, push_of
from captum_hta.jacobian.linearize.recorder import Call, NotLinearizableError
from captum_hta.jacobian.torch_internals import version_of


class Linearization:
    r"""The derivative of the recorded targets with respect to the recorded sources.

    Args:
        calls: The recorded operators of a complete forward pass.
        shapes: The shape of every variable.
        sources: The variables at which tangents enter.
        targets: The variables whose tangents are wanted.

    Raises:
        NotLinearizableError: If an operator between a source and a target has no forward derivative, or an
            argument of it was changed in place later.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        shapes: Sequence[tuple[int, ...]],
        sources: Sequence[int],
        targets: Sequence[int],
    ) -> None:
        self.sources = tuple(sources)
        self.targets = tuple(targets)
        self.calls = between(calls, self.sources, self.targets)
        self._check_versions()
        read = {variable for call in self.calls for variable in call.inputs} | set(targets)
        self._pushes = [push_of(call, read) for call in self.calls]
        self._dies = self._last_uses()
        self.shapes = shapes

    def reached(self) -> set[int]:
        """The variables on a path from a source to a target."""
        return set(self.sources).union(*(call.outputs for call in self.calls))

    def widest(self) -> int:
        """Elements of the largest intermediate tangent, for a stack of one."""
        return max((numel(call.shape) for call in self.calls), default=0)

    def flops(self, target: int | None = None) -> int:
        """Floating-point operations of the matrix products for one tangent; with ``target``, up to it."""
        calls = self.calls if target is None else between(self.calls, self.sources, (target,))
        return sum(flops_of(call) for call in calls)

    def push(self, tangents: dict[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        r"""Push a stack of tangents through the model.

        Args:
            tangents: For each source variable a tensor ``[n, *source shape]``; the tangents of sources that
                are left out are zero.

        Yields:
            ``(target, tangent)`` with the tangent ``[n, *target shape]``, in the order in which the
            model computes the targets. Targets that none of the given sources reach are left out.
        """
        live = dict(tangents)
        yield from ((target, live[target]) for target in self.targets if target in live)
        for call, push, dies in zip(self.calls, self._pushes, self._dies, strict=True):
            moved = [live.get(variable) for variable in call.inputs]
            if any(tangent is not None for tangent in moved):
                out = push(*moved)
                outs = out if isinstance(out, tuple | list) else (out,)
                for variable, tangent in zip(call.outputs, outs, strict=False):
                    live[variable] = tangent
                    if variable in self.targets:
                        yield variable, tangent
                del out, outs
            del moved
            for variable in dies:
                live.pop(variable, None)

    def _check_versions(self) -> None:
        for call in self.calls:
            moving = () if call.name not in SHAPE_ONLY else tuple(map(id, call.primals))
            for tensor, version in call.versions:
                if version_of(tensor) != version and id(tensor) not in moving:
                    raise NotLinearizableError(f"an argument of {call.name} was changed in place later")

    def _last_uses(self) -> list[list[int]]:
        seen: set[int] = set()
        dies = []
        for call in reversed(self.calls):
            variables = [*call.inputs, *call.outputs]
            dies.append([variable for variable in variables if variable not in seen])
            seen.update(variables)
        return dies[::-1]


def between(calls: Sequence[Call], sources: Sequence[int], targets: Sequence[int]) -> list[Call]:
    """The calls on a path from a source to a target."""
    needed, kept = set(targets), []
    for call in reversed(calls):
        if needed.intersection(call.outputs):
            needed.update(call.inputs)
            kept.append(call)
    reached, path = set(sources), []
    for call in reversed(kept):
        if reached.intersection(call.inputs):
            reached.update(call.outputs)
            path.append(call)
    return path


def numel(shape: Sequence[int]) -> int:
    """The number of elements of a shape."""
    return int(torch.Size(shape).numel())


def flops_of(call: Call) -> int:
    """Floating-point operations of a matrix product for one tangent of each argument; zero for other
    operators. A multiply-add is two.
    """
    if call.flops is not None:
        return call.flops
    if call.name not in ("mm", "addmm", "bmm", "baddbmm"):
        return 0
    left, right = call.args[-2:]
    shared = left.shape[-1]
    return sum(2 * numel(call.shape) * shared for primal in call.primals if primal is left or primal is right)
