"""JVP rules: the derivative of each operator as a linear map whose coefficients are computed once.

A rule takes a recorded call and returns a function that maps a stack of tangents ``[n, *shape]`` for each
argument with a tangent to a stack of tangents of the output. Operators without a rule of their own use
``vmap`` of PyTorch's forward derivative.

Rules return stacks stored in memory as ``[*shape[:-1], n, shape[-1]]``: the tangents of one token are then
the rows of one matrix, so that a product per token, or per head and query, reads and writes contiguous
blocks. Other layouts are also correct, but are copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from captum_hta.jacobian.linearize.recorder import Call, NotLinearizableError, Output, Push

aten = torch.ops.aten
Rule = Callable[[Call], Push]


def push_of(call: Call, read: set[int]) -> Push:
    """The push function of an operator.

    Args:
        call: The operator.
        read: The variables that are read later. A rule gives the tangent of the first output alone, so the
            general rule is used where others are read.

    Raises:
        NotLinearizableError: If the operator has no forward derivative.
    """
    if call.rule is not None:
        return call.rule(call)
    rule = _RULES.get(call.name, _generic)
    if read.intersection(call.outputs[1:]) and call.name not in _LINEAR:
        rule = _generic
    try:
        return rule(call)
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, NotLinearizableError | torch.OutOfMemoryError):
            raise
        reason = str(error).partition("\n")[0]
        raise NotLinearizableError(f"{call.name} has no forward derivative: {reason}") from error


def _generic(call: Call) -> Push:
    """Any operator with a forward derivative in PyTorch: ``vmap`` of its ``jvp``."""
    primals = call.primals

    def push(*tangents: Tensor | None) -> Output:
        filled = _filled(tangents, primals)
        out: Output = torch.func.vmap(lambda *t: torch.func.jvp(call.apply, primals, t)[1])(*filled)
        return out

    with torch.no_grad():  # raises now if there is no derivative
        push(*(primal.new_zeros(1, *primal.shape) for primal in primals))
    return push


def _filled(tangents: Sequence[Tensor | None], primals: Sequence[Tensor]) -> list[Tensor]:
    """The tangents, with zeros for arguments that have none."""
    count = next(len(tangent) for tangent in tangents if tangent is not None)
    return [
        primal.new_zeros(count, *primal.shape) if tangent is None else tangent
        for tangent, primal in zip(tangents, primals, strict=True)
    ]


def _linear(call: Call) -> Push:
    """Operators that are linear in all their tensors jointly, such as ``cat``: fixed tensors become zero."""
    primals = call.primals
    fixed = replace(call, flat=[_without_value(value) for value in call.flat])
    mapped = torch.func.vmap(fixed.apply)
    return lambda *tangents: mapped(*_filled(tangents, primals))


def _without_value(value: object) -> object:
    return torch.zeros_like(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def _identity(call: Call) -> Push:
    return lambda tangent: tangent


def _cast(call: Call) -> Push:
    return lambda tangent: tangent.to(call.dtype)


def inner(stack: Tensor) -> Tensor:
    """A stack ``[n, *shape]`` with its axes in the order of memory: ``[*shape[:-1], n, shape[-1]]``."""
    return stack.movedim(0, -2)


def outer(rows: Tensor) -> Tensor:
    """The inverse of :func:`inner`: ``[n, *shape]`` from ``[*shape[:-1], n, shape[-1]]``."""
    return rows.movedim(-2, 0)


def _view(call: Call) -> Push:
    """Reshape; the trailing axes that hold equally many elements before and after stay after ``n``."""
    if isinstance(call.args[1], torch.dtype):
        return _generic(call)
    before, shape = call.args[0].shape, call.shape
    old, new = _common_tail(before, shape)
    if not new:
        return lambda tangent: tangent.reshape(len(tangent), *shape)

    def push(tangent: Tensor) -> Tensor:
        rows = tangent.movedim(0, len(before) - old)
        cut = len(shape) - new
        return rows.reshape(*shape[:cut], len(tangent), *shape[cut:]).movedim(cut, 0)

    return push


def _common_tail(before: Sequence[int], after: Sequence[int]) -> tuple[int, int]:
    """The smallest numbers of trailing axes, at least one each, with equally many elements."""
    for old in range(1, len(before) + 1):
        for new in range(1, len(after) + 1):
            if math.prod(before[-old:]) == math.prod(after[-new:]):
                return old, new
    return 0, 0


def _dims(call: Call) -> list[int]:
    """The dimensions of a transposition, counted from the end, which a leading stack axis does not shift."""
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
    """Insert axes after the stack axis, so that the rest broadcasts as the primal did."""
    missing = rank + 1 - tangent.dim()
    return tangent.reshape(len(tangent), *(1,) * missing, *tangent.shape[1:]) if missing else tangent


def _weighted_sum(call: Call, weights: Sequence[Tensor | float | None]) -> Push:
    """``sum_k weights[k] * tangent[k]``, broadcast to the output; ``None`` means a weight of one."""
    shape, dtype = call.shape, call.dtype

    def push(*tangents: Tensor | None) -> Tensor:
        total: Tensor | None = None
        for tangent, weight in zip(tangents, weights, strict=True):
            if tangent is not None:
                total = _plus_weighted(total, _aligned(tangent, len(shape)), weight)
        assert total is not None  # a push gets one tangent at least
        if total.shape[1:] != torch.Size(shape):
            total = total.expand(len(total), *shape)
        return total.to(dtype)

    return push


def _plus_weighted(total: Tensor | None, term: Tensor, weight: Tensor | float | None) -> Tensor:
    if total is not None and isinstance(weight, Tensor):
        return torch.addcmul(total, term, weight)
    weighted: Tensor = term if weight is None else term * weight
    return weighted if total is None else total + weighted


def _add(call: Call) -> Push:
    sign = -1 if call.name == "sub" else 1
    alpha = sign * call.kwargs.get("alpha", 1)
    weights = [None if index == 0 or alpha == 1 else alpha for index in call.argument_indices]
    return _weighted_sum(call, weights)


def _multiply(call: Call) -> Push:
    args = call.args
    return _weighted_sum(call, [args[1 - index] for index in call.argument_indices])


def _divide(call: Call) -> Push:
    args = call.args
    if len(args) != 2 or call.argument_indices != [0] or len(call.flat) != 2:
        return _elementwise(call)
    divisor = args[1]
    return _weighted_sum(call, [1 / divisor])


def _elementwise(call: Call) -> Push:
    """Elementwise operators: the weights are the derivatives, found with tangents of ones."""
    primals = call.primals
    weights = []
    for moved in range(len(primals)):
        ones = tuple(torch.full_like(primal, float(index == moved)) for index, primal in enumerate(primals))
        weights.append(torch.func.jvp(call.apply, primals, ones)[1])
    return _weighted_sum(call, weights)


def _matrix_product(call: Call) -> Push:
    """``mm``: with a fixed matrix on one side, one product for the whole stack."""
    left, right = (value[None] for value in call.args)

    def lifted(tangent: Tensor | None) -> Tensor | None:
        return None if tangent is None else tangent[:, None]

    push = product_push(call, left, right)
    return lambda *tangents: push(*map(lifted, tangents))[:, 0]


def _affine_product(call: Call) -> Push:
    """``addmm`` with a fixed bias, a fixed matrix and factors of one: a linear layer."""
    if call.kwargs or call.argument_indices != [1]:
        return _generic(call)
    _, left, right = call.args
    width = left.shape[1]

    def push(tangent: Tensor) -> Tensor:
        product = inner(tangent).reshape(-1, width).mm(right)
        return outer(product.view(-1, len(tangent), right.shape[1]))

    return push


def _batched_product(call: Call) -> Push:
    return product_push(call, *call.args)


def product_push(
    call: Call, left: Tensor, right: Tensor, place: Callable[[Tensor], Tensor] = lambda term: term
) -> Callable[..., Tensor]:
    r"""``bmm``: :math:`d(AB) = dA\,B + A\,dB`, each as one product per matrix of the batch.

    Args:
        call: The operator, which tells which of the two have tangents.
        left: ``A``, as it is multiplied by the tangents of ``B``.
        right: ``B``.
        place: Puts :math:`A\,dB` in its place in the result.
    """

    def push(*tangents: Tensor | None) -> Tensor:
        moved = dict(zip(call.argument_indices, tangents, strict=True))
        d_left, d_right = moved.get(0), moved.get(1)
        total = None if d_right is None else place(_fixed_left(left, d_right))
        total = total if d_left is None else _fixed_right(d_left, right, total)
        assert total is not None  # a push gets one tangent at least
        return total

    return push


def _fixed_right(stack: Tensor, fixed: Tensor, total: Tensor | None) -> Tensor:
    """``total + [n, batch, rows, inner] @ [batch, inner, columns]``, rows and stack merged into one axis."""
    count, batch, rows, depth = stack.shape
    tall = inner(stack).reshape(batch, rows * count, depth)
    if total is not None and inner(total).is_contiguous():
        out = inner(total).view(batch, rows * count, -1).baddbmm_(tall, fixed)
        return outer(out.view(batch, rows, count, -1))
    out = outer(tall.bmm(fixed).view(batch, rows, count, -1))
    return out if total is None else out + total


def _fixed_left(fixed: Tensor, stack: Tensor) -> Tensor:
    """``[batch, rows, inner] @ [n, batch, inner, columns]``, stack and columns merged into one axis."""
    count, batch, depth, columns = stack.shape
    if stack.stride(-1) > stack.stride(-2):  # transposed matrices, such as keys
        wide = stack.mT.movedim(0, 1).reshape(batch, count * columns, depth).mT
    else:
        wide = inner(stack).reshape(batch, depth, count * columns)
    return outer(fixed.bmm(wide).view(batch, -1, count, columns))


def _softmax(call: Call) -> Push:
    r"""Softmax: :math:`dp = p \odot (dz - \langle p, dz \rangle)`."""
    scores, dim = call.args[0], call.args[1]
    dim = dim if dim < 0 else dim - scores.dim()
    probabilities = call.apply(scores)
    assert isinstance(probabilities, Tensor)

    def push(tangent: Tensor) -> Tensor:
        weighted = tangent * probabilities
        total = weighted.sum(dim, keepdim=True)
        return torch.addcmul(weighted, total, probabilities, value=-1)

    return push


def _layer_norm(call: Call) -> Push:
    r"""LayerNorm: :math:`dy = \gamma\,(dx - \overline{dx} - \hat x\,\overline{\hat x\,dx})\,/\,\sigma`.

    Without :math:`\gamma` the Jacobian is symmetric, so PyTorch's fused backward kernel applies it.
    """
    if call.argument_indices != [0]:
        return _generic(call)
    x, shape, weight, _, eps = call.args
    _, mean, inverse = torch.native_layer_norm(x, shape, None, None, eps)
    place = x.dim() - len(shape)
    copies: dict[int, tuple[Tensor, ...]] = {}

    def push(tangent: Tensor) -> tuple[Tensor]:
        count = len(tangent)
        if count not in copies:
            copies.clear()
            copies[count] = tuple(_copies(value, count, place) for value in (x, mean, inverse))
        x_copies, *statistics = copies[count]
        rows = tangent.movedim(0, place).contiguous()
        out, _, _ = aten.native_layer_norm_backward(
            rows, x_copies, shape, *statistics, None, None, [True, False, False]
        )
        return ((out if weight is None else out.mul_(weight)).movedim(place, 0),)

    return push


def _copies(value: Tensor, count: int, place: int) -> Tensor:
    """``count`` copies along a new axis at ``place``."""
    shape = list(value.shape)
    return value.unsqueeze(place).expand(*shape[:place], count, *shape[place:]).contiguous()


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


ELEMENTWISE = _names(
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
SHAPE_ONLY = _names(
    """
    _to_copy _unsafe_view add alias clone contiguous expand permute reshape sub t transpose view
    """
)
_RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
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
    "_safe_softmax": _softmax,
    "native_layer_norm": _layer_norm,
}
