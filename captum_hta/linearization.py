r"""The derivative of one forward pass, as a list of linear maps that tangents are pushed through.

A :class:`Recorder` watches the ATen operators of a forward pass (below autograd, so any model in eager
PyTorch) and notes those that depend on a source. :class:`Linearization` turns each into the linear map
of its derivative at the recorded point, with every coefficient (softmax rows, normalised activations,
derivatives of activation functions) computed once. Pushing tangents then costs the matrix products of a
forward pass and little else; nothing of the primal is computed again.

Forward-mode differentiation as in Griewank and Walther, *Evaluating Derivatives*, 2nd ed., section 3.1;
the separation of linearisation from evaluation as in ``jax.linearize``. ``torch.func.linearize`` does
the same by tracing through AOTAutograd, which takes seconds per example; recording takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

aten = torch.ops.aten
_RANDOM = (aten.bernoulli, aten.bernoulli_, aten.native_dropout)

Push = Callable[..., Any]
Rule = Callable[["Call"], Push]


class NotLinearizableError(RuntimeError):
    """The forward pass holds something whose forward derivative cannot be recorded."""


@dataclass
class Call:
    """One operator of the forward pass that depends on a source.

    ``flat`` holds all its arguments in the order of the pytree ``spec``; ``positions`` says which of
    them carry a tangent and ``inputs`` which variable each of those is. ``outputs`` names the variable
    of each output tensor.
    """

    function: Any
    flat: list[Any]
    spec: Any
    positions: list[int]
    inputs: list[int]
    outputs: list[int]
    shape: tuple[int, ...]
    dtype: torch.dtype
    versions: list[tuple[Tensor, int]]

    @property
    def args(self) -> Any:
        """The positional arguments."""
        return tree_unflatten(self.flat, self.spec)[0]

    @property
    def primals(self) -> tuple[Tensor, ...]:
        """The values of the arguments that carry a tangent."""
        return tuple(self.flat[position] for position in self.positions)

    @property
    def name(self) -> str:
        """The operator's name in ATen, such as ``addmm``."""
        return self.function.overloadpacket._qualified_op_name.removeprefix("aten::")

    def apply(self, *values: Tensor) -> Any:
        """The operator as a function of those of its arguments that carry a tangent."""
        flat = list(self.flat)
        for position, value in zip(self.positions, values, strict=True):
            flat[position] = value
        args, kwargs = tree_unflatten(flat, self.spec)
        return self.function(*args, **kwargs)


class Recorder(TorchDispatchMode):
    """Records the operators that depend on tensors marked with :meth:`mark_source`.

    Use as a context manager around a forward pass under ``torch.no_grad()``. Python objects of tensors
    are kept alive until the recorder is dropped, so that identity names a variable.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._variable: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._mutated: dict[int, set[int]] = {}
        self.random = False
        self.shapes: list[tuple[int, ...]] = []

    def mark_source(self, tensor: Tensor) -> int:
        """Make ``tensor`` a variable that tangents enter at."""
        return self._bind(tensor)

    def variable(self, tensor: Tensor) -> int | None:
        """The variable of ``tensor``, or ``None`` if it depends on no source.

        Raises:
            NotLinearizableError: If that cannot be told, because ``tensor`` was written to in place.
        """
        self._refuse_stale("the target", [tensor])
        return self._variable.get(id(tensor))

    def _bind(self, tensor: Tensor) -> int:
        self._alive.append(tensor)
        self._variable[id(tensor)] = len(self.shapes)
        self.shapes.append(tuple(tensor.shape))
        return len(self.shapes) - 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.random |= function.overloadpacket in _RANDOM
        flat, spec = tree_flatten((args, kwargs or {}))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        self._refuse_stale(function, tensors)
        positions = [index for index, value in enumerate(flat) if self._moves(value)]
        if not positions or function is aten.detach.default:
            out = function(*args, **(kwargs or {}))
        else:
            out = self._record(function, flat, spec, positions)
        self._keep_aliases(out)
        return out

    def _moves(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self._variable

    def _record(self, function: Any, flat: list[Any], spec: Any, positions: list[int]) -> Any:
        """Run an operator that depends on a source, and note it."""
        args, kwargs = tree_unflatten(flat, spec)
        inputs = [self._variable[id(flat[position])] for position in positions]
        writes = function._schema.is_mutable
        recorded = _functional(function) if writes else function
        if writes:
            flat = [flat[0].clone(), *flat[1:]]
        versions = [(value, value._version) for value in flat if isinstance(value, Tensor)]
        out = function(*args, **kwargs)
        outputs = [value for value in tree_flatten(out)[0] if isinstance(value, Tensor)]
        if not any(value.is_floating_point() for value in outputs):
            return out
        if writes:
            self._note_mutation(args[0])
        bound = [self._bind(value) for value in outputs]
        shape, dtype = tuple(outputs[0].shape), outputs[0].dtype
        self.calls.append(Call(recorded, flat, spec, positions, inputs, bound, shape, dtype, versions))
        return out

    def _note_mutation(self, tensor: Tensor) -> None:
        self._alive.append(tensor)
        self._mutated[tensor.untyped_storage()._cdata] = {id(tensor)}

    def _keep_aliases(self, out: Any) -> None:
        """Let views of a tensor that was changed in place be used as that tensor is."""
        if not self._mutated:
            return
        for value in tree_flatten(out)[0]:
            if isinstance(value, Tensor):
                valid = self._mutated.get(value.untyped_storage()._cdata)
                if valid is not None:
                    self._alive.append(value)
                    valid.add(id(value))

    def _refuse_stale(self, function: Any, tensors: Sequence[Tensor]) -> None:
        if not self._mutated:
            return
        for value in tensors:
            valid = self._mutated.get(value.untyped_storage()._cdata)
            if valid is not None and id(value) not in valid:
                raise NotLinearizableError(
                    f"{function} reads a tensor through an alias of one that was changed in place"
                )


def _functional(function: Any) -> Any:
    """The operator that returns what an in-place operator writes to its first argument."""
    namespace, _, name = function._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    overload = getattr(packet, function._overloadname, None)
    if not name.endswith("_") or overload is None or overload._schema.is_mutable:
        raise NotLinearizableError(f"{function} writes to its arguments")
    return overload


class Linearization:
    r"""The derivative of the recorded targets with respect to the recorded sources.

    Args:
        recorder: A recorder whose forward pass has ended.
        sources: The variables that tangents enter at.
        targets: The variables whose tangents are asked for.

    Raises:
        NotLinearizableError: If an operator between a source and a target was changed in place later, or
            has no forward derivative.
    """

    def __init__(self, recorder: Recorder, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.sources = tuple(sources)
        self.targets = tuple(targets)
        self._calls = _between(recorder.calls, self.sources, self.targets)
        self._check_versions()
        read = {variable for call in self._calls for variable in call.inputs} | set(targets)
        self._pushes = [_build(call, read) for call in self._calls]
        self._dies = self._last_uses()
        self._shapes = recorder.shapes

    def reached(self) -> set[int]:
        """The variables that some source can change."""
        return set(self.sources).union(*(call.outputs for call in self._calls))

    def shape(self, variable: int) -> tuple[int, ...]:
        """The shape of a target's value."""
        return self._shapes[variable]

    def widest(self) -> int:
        """Elements of the largest tangent on the way, for one tangent."""
        return max((_numel(call.shape) for call in self._calls), default=0)

    def flops(self, target: int | None = None) -> int:
        """Floating-point operations of the matrix products for one tangent, up to ``target``."""
        calls = self._calls if target is None else _between(self._calls, self.sources, (target,))
        return sum(_flops(call) for call in calls)

    def push(self, tangents: dict[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        r"""Push a stack of tangents through the model.

        Args:
            tangents: For each source variable a tensor ``[n, *source shape]``; sources that are left
                out do not move.

        Yields:
            ``(target, tangent)`` with the tangent ``[n, *target shape]``, in the order in which the
            model computes the targets. Targets that none of the given sources reach are left out.
        """
        live = dict(tangents)
        yield from ((target, live[target]) for target in self.targets if target in live)
        for call, push, dies in zip(self._calls, self._pushes, self._dies, strict=True):
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
        for call in self._calls:
            moving = () if call.name not in _SHAPE_ONLY else tuple(map(id, call.primals))
            for tensor, version in call.versions:
                if tensor._version != version and id(tensor) not in moving:
                    raise NotLinearizableError(f"an argument of {call.name} was changed in place later")

    def _last_uses(self) -> list[list[int]]:
        seen: set[int] = set()
        dies = []
        for call in reversed(self._calls):
            variables = [*call.inputs, *call.outputs]
            dies.append([variable for variable in variables if variable not in seen])
            seen.update(variables)
        return dies[::-1]


def _between(calls: Sequence[Call], sources: Sequence[int], targets: Sequence[int]) -> list[Call]:
    """The calls that lie on a path from a source to a target."""
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


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _flops(call: Call) -> int:
    """Multiply-adds, as two operations each, of a matrix product for one tangent of each argument."""
    if call.name not in ("mm", "addmm", "bmm", "baddbmm"):
        return 0
    left, right = call.args[-2:]
    shared = left.shape[-1]
    return sum(
        2 * _numel(call.shape) * shared
        for position in call.positions
        if call.flat[position] is left or call.flat[position] is right
    )


# --- rules: one a kind of operator -----------------------------------------------------------------


def _build(call: Call, read: set[int]) -> Push:
    """The rule of an operator; rules give the first output, so where others are read: the general one."""
    if read.intersection(call.outputs[1:]) and call.name not in _LINEAR:
        return _generic(call)
    return _RULES.get(call.name, _generic)(call)


def _generic(call: Call) -> Push:
    """Any operator with a forward derivative in PyTorch: ``vmap`` of its ``jvp``."""
    primals = call.primals

    def push(*tangents: Tensor | None) -> Any:
        filled = _filled(tangents, primals)
        return torch.func.vmap(lambda *t: torch.func.jvp(call.apply, primals, t)[1])(*filled)

    try:
        with torch.no_grad():
            push(*(primal.new_zeros(1, *primal.shape) for primal in primals))
    except (RuntimeError, NotImplementedError) as error:
        raise NotLinearizableError(
            f"{call.name} has no forward derivative that vectorises: {error}"
        ) from error
    return push


def _filled(tangents: Sequence[Tensor | None], primals: Sequence[Tensor]) -> list[Tensor]:
    """Zeros where an argument does not move."""
    count = next(len(tangent) for tangent in tangents if tangent is not None)
    return [
        primal.new_zeros(count, *primal.shape) if tangent is None else tangent
        for tangent, primal in zip(tangents, primals, strict=True)
    ]


def _linear(call: Call) -> Push:
    """Operators that are linear in all their tensors together, such as ``cat``: fixed ones are zero."""
    primals = call.primals
    fixed = replace(call, flat=[_without_value(value) for value in call.flat])
    mapped = torch.func.vmap(fixed.apply)
    return lambda *tangents: mapped(*_filled(tangents, primals))


def _without_value(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return torch.zeros_like(value) if floating else value


def _identity(call: Call) -> Push:
    return lambda tangent: tangent


def _cast(call: Call) -> Push:
    return lambda tangent: tangent.to(call.dtype)


def _view(call: Call) -> Push:
    if isinstance(call.args[1], torch.dtype):
        return _generic(call)
    shape = call.shape
    return lambda tangent: tangent.reshape(len(tangent), *shape)


def _dims(call: Call) -> list[int]:
    """The dimensions that a transposition names, counted from the end so that a stack may lead."""
    dims = call.args[1:] if call.name == "transpose" else call.args[1]
    rank = call.args[0].dim()
    return [dim if dim < 0 else dim - rank for dim in dims]


def _transpose(call: Call) -> Push:
    if call.args[0].dim() < 2:
        return _identity(call)
    first, second = (-2, -1) if call.name == "t" else _dims(call)
    return lambda tangent: tangent.transpose(first, second)


def _permute(call: Call) -> Push:
    order = [0, *(dim + len(call.shape) + 1 for dim in _dims(call))]
    return lambda tangent: tangent.permute(order)


def _expand(call: Call) -> Push:
    shape = call.shape
    return lambda tangent: _aligned(tangent, len(shape)).expand(len(tangent), *shape)


def _aligned(tangent: Tensor, rank: int) -> Tensor:
    """Insert dimensions behind the stack, so that the rest broadcasts as the primal did."""
    missing = rank + 1 - tangent.dim()
    return tangent.reshape(len(tangent), *(1,) * missing, *tangent.shape[1:]) if missing else tangent


def _weighted_sum(call: Call, weights: Sequence[Any]) -> Push:
    """``sum_k weights[k] * tangent[k]``, broadcast to the output; a weight of ``None`` stands for one."""
    shape, dtype = call.shape, call.dtype

    def push(*tangents: Tensor | None) -> Tensor:
        total = None
        for tangent, weight in zip(tangents, weights, strict=True):
            if tangent is None:
                continue
            term = _aligned(tangent, len(shape))
            if total is not None and isinstance(weight, Tensor):
                total = torch.addcmul(total, term, weight)
                continue
            term = term if weight is None else term * weight
            total = term if total is None else total + term
        if total.shape[1:] != torch.Size(shape):
            total = total.expand(len(total), *shape)
        return total.to(dtype)

    return push


def _add(call: Call) -> Push:
    sign = -1 if call.name == "sub" else 1
    alpha = sign * tree_unflatten(call.flat, call.spec)[1].get("alpha", 1)
    weights = [None if position == 0 or alpha == 1 else alpha for position in call.positions]
    return _weighted_sum(call, weights)


def _multiply(call: Call) -> Push:
    args = call.args
    return _weighted_sum(call, [args[1 - position] for position in call.positions])


def _divide(call: Call) -> Push:
    args = call.args
    if len(args) != 2 or call.positions != [0] or len(call.flat) != 2:
        return _elementwise(call)
    divisor = args[1]
    return _weighted_sum(call, [1 / divisor])


def _elementwise(call: Call) -> Push:
    """Operators that act on each element: the weight is the derivative there, by a tangent of ones."""
    primals = call.primals
    weights = []
    for moved in range(len(primals)):
        ones = tuple(torch.full_like(primal, float(index == moved)) for index, primal in enumerate(primals))
        weights.append(torch.func.jvp(call.apply, primals, ones)[1])
    return _weighted_sum(call, weights)


def _matrix_product(call: Call) -> Push:
    """``mm``: a fixed matrix on one side makes a single product of the whole stack."""
    left, right = call.args

    def push(*tangents: Tensor | None) -> Tensor:
        moved = dict(zip(call.positions, tangents, strict=True))
        terms = []
        if moved.get(0) is not None:
            terms.append(moved[0].reshape(-1, left.shape[1]).mm(right).view(-1, *call.shape))
        if moved.get(1) is not None:
            terms.append(left.matmul(moved[1]))
        return _total(terms)

    return push


def _total(terms: Sequence[Tensor]) -> Tensor:
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _affine_product(call: Call) -> Push:
    """``addmm`` with a bias and a matrix that do not move and unit factors: a linear layer."""
    kwargs = tree_unflatten(call.flat, call.spec)[1]
    if kwargs or call.positions != [1]:
        return _generic(call)
    _, left, right = call.args
    width, shape = left.shape[1], call.shape
    return lambda tangent: tangent.reshape(-1, width).mm(right).view(-1, *shape)


def _batched_product(call: Call) -> Push:
    r"""``bmm``: :math:`d(AB) = dA\,B + A\,dB`, each as one product per matrix of the batch."""
    left, right = call.args

    def push(*tangents: Tensor | None) -> Tensor:
        moved = dict(zip(call.positions, tangents, strict=True))
        terms = []
        if moved.get(0) is not None:
            terms.append(_stacked_product(moved[0], right))
        if moved.get(1) is not None:
            terms.append(_stacked_product(moved[1].mT, left.mT).mT)
        return _total(terms)

    return push


def _stacked_product(stack: Tensor, fixed: Tensor) -> Tensor:
    """``[n, batch, rows, inner] @ [batch, inner, columns]`` with the stack and the rows as one axis."""
    count, batch, rows, inner = stack.shape
    tall = stack.transpose(0, 1).reshape(batch, count * rows, inner)
    return tall.bmm(fixed).view(batch, count, rows, -1).transpose(0, 1)


def _softmax(call: Call) -> Push:
    r"""Softmax: :math:`dp = p \odot (dz - \langle p, dz \rangle)`."""
    scores, dim = call.args[0], call.args[1]
    dim = dim if dim < 0 else dim - scores.dim()
    probabilities = call.apply(scores)

    def push(tangent: Tensor) -> Tensor:
        weighted = tangent * probabilities
        total = weighted.sum(dim, keepdim=True)
        return torch.addcmul(weighted, total, probabilities, value=-1)

    return push


def _layer_norm(call: Call) -> Push:
    r"""LayerNorm: :math:`dy = \gamma\,(dx - \overline{dx} - \hat x\,\overline{\hat x\,dx})\,/\,\sigma`.

    Without :math:`\gamma` the Jacobian is symmetric, so PyTorch's fused backward kernel applies it.
    """
    if call.positions != [0]:
        return _generic(call)
    x, shape, weight, _, eps = call.args
    _, mean, inverse = torch.native_layer_norm(x, shape, None, None, eps)
    copies: dict[int, tuple[Tensor, ...]] = {}

    def push(tangent: Tensor) -> tuple[Tensor]:
        count = len(tangent)
        if count not in copies:
            copies.clear()
            copies[count] = tuple(_copies(value, count) for value in (x, mean, inverse))
        x_copies, *statistics = copies[count]
        out, _, _ = aten.native_layer_norm_backward(
            tangent.contiguous(), x_copies, shape, *statistics, None, None, [True, False, False]
        )
        return (out if weight is None else out.mul_(weight),)

    return push


def _copies(value: Tensor, count: int) -> Tensor:
    return value.expand(count, *value.shape).contiguous()


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


_ELEMENTWISE = _names(
    """
    abs acos acosh asin asinh atan atan2 atanh celu clamp clamp_max clamp_min cos cosh elu erf erfc exp
    exp2 expm1 gelu hardsigmoid hardswish hardtanh leaky_relu log log10 log1p log2 log_sigmoid_forward
    masked_fill maximum minimum mish neg pow prelu reciprocal relu rsqrt rsub sigmoid silu sin sinh
    softplus sqrt square tan tanh threshold where
    """
)
_LINEAR = _names(
    """
    cat chunk cumsum diagonal flip gather index index_select masked_scatter mean movedim narrow repeat
    roll select slice split split_with_sizes squeeze stack sum tril triu unbind unfold unsqueeze
    """
)
_SHAPE_ONLY = _names(
    """
    _to_copy _unsafe_view add alias clone contiguous expand permute reshape sub t transpose view
    """
)
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_LINEAR, _linear),
    **dict.fromkeys(("alias", "clone", "contiguous", "lift_fresh"), _identity),
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _view),
    "_to_copy": _cast,
    "t": _transpose,
    "transpose": _transpose,
    "permute": _permute,
    "expand": _expand,
    "add": _add,
    "sub": _add,
    "mul": _multiply,
    "div": _divide,
    "mm": _matrix_product,
    "addmm": _affine_product,
    "bmm": _batched_product,
    "_softmax": _softmax,
    "native_layer_norm": _layer_norm,
}
