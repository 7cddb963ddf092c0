"""The linear map that each operator's derivative is, with its coefficients computed once.

A rule takes a recorded call and gives the function that pushes a stack of tangents ``[n, *shape]`` of
the arguments that move to a stack of tangents of the output. Operators without a rule of their own take
``vmap`` of PyTorch's forward derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from captum_hta.recorder import Call, NotLinearizableError

aten = torch.ops.aten
Push = Callable[..., Any]
Rule = Callable[[Call], Push]


def push_of(call: Call, read: set[int]) -> Push:
    """The rule of an operator; rules give the first output, so where others are read: the general one."""
    if call.rule is not None:
        return call.rule(call)
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
        reason = str(error).partition("\n")[0]
        raise NotLinearizableError(f"{call.name} has no forward derivative: {reason}") from error
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
    return product_push(call, *call.args)


def product_push(
    call: Call, left: Tensor, right: Tensor, place: Callable[[Tensor], Tensor] = lambda term: term
) -> Push:
    r"""``bmm``: :math:`d(AB) = dA\,B + A\,dB`, each as one product per matrix of the batch.

    Args:
        call: Which of the two move.
        left: ``A``, as the tangents of ``B`` meet it.
        right: ``B``.
        place: Puts :math:`A\,dB` where it belongs in the result.
    """

    def push(*tangents: Tensor | None) -> Tensor:
        moved = dict(zip(call.positions, tangents, strict=True))
        terms = []
        if moved.get(0) is not None:
            terms.append(stacked_product(moved[0], right))
        if moved.get(1) is not None:
            terms.append(place(stacked_product(moved[1].mT, left.mT).mT))
        return _total(terms)

    return push


def stacked_product(stack: Tensor, fixed: Tensor) -> Tensor:
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
