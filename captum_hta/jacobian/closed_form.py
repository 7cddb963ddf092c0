r"""The previous-layer contribution in closed form.

For one head with pattern :math:`a`, scale :math:`s`, queries, keys and values :math:`q, k, v` and output
:math:`o_j = \sum_i a_{ji} v_i`, the derivative of a softmax gives

.. math::
    \frac{\partial o_j}{\partial x_i}
      = a_{ji} \big[ G_i + s\,(v_i - o_j)(q_j^\top K_i) \big] + [i = j]\; s\, M_j Q_j, \qquad
    M_j = \sum_m a_{jm} (v_m - o_j)\, k_m^\top ,

where :math:`G_i, K_i, Q_j` are the Jacobians of :math:`v_i, k_i, q_j` with respect to their own token's
:math:`x`. Its squared Frobenius norm depends on them only through their products, ``d_head x d_head``
matrices:

.. math::
    i \ne j:\quad r^2 &= a_{ji}^2 \big[ |G_i|^2 + 2s\,(v_i - o_j)^\top G_i K_i^\top q_j
                         + s^2 |v_i - o_j|^2\; q_j^\top K_i K_i^\top q_j \big] \\
    i = j:\quad r^2 &= \text{that} + s^2 \operatorname{tr}(M_j Q_j Q_j^\top M_j^\top)
                         + 2 s\, a_{jj} \big\langle M_j,
                           (G_j + s (v_j - o_j) q_j^\top K_j) Q_j^\top \big\rangle .

All heads of a layer cost about as much as the layer itself. Masks and additive position biases act
through :math:`a` alone, and so does a sink, which takes a share of the softmax and has no value. Where scores
are capped, :math:`s` becomes :math:`s\, c_{ji}` with the slope of the cap :math:`c_{ji}`, also for each
:math:`m` in the sum of :math:`M_j`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from captum_hta.jacobian.endpoints import Endpoints
from captum_hta.jacobian.plan import CACHE, memory_budget
from captum_hta.jacobian.query import Query
from captum_hta.model.attention import AttentionFactors, TokenNorm


@dataclass(frozen=True)
class _Grams:
    """Products of token-wise Jacobians, ``[batch or 1, head, token or 1, d_head, d_head]`` each."""

    gg: Tensor  # trace only: [batch or 1, head, token or 1]
    gk: Tensor
    kk: Tensor
    gq: Tensor
    kq: Tensor
    qq: Tensor
    root: Tensor | None = None  # L with L L^T = qq, where qq is the same for all tokens

    def of_heads(self, heads: slice) -> _Grams:
        """The products for some of the heads."""
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        return replace(self, **{name: part[:, heads] for name, part in parts.items() if part is not None})


def has_closed_form(query: Query, endpoints: Endpoints, knows_factors: bool) -> bool:
    """Whether the closed form gives the result; where it does, nothing else is as cheap or as exact.

    Args:
        query: The query.
        endpoints: The source and the targets.
        knows_factors: Whether the factors of attention are known in all layers.

    Raises:
        ValueError: If the query forces the closed form, and it does not give the result.
    """
    gives_it = (
        knows_factors
        and endpoints.target == "head"
        and endpoints.is_own_block
        and query.norm == "frobenius"
        and query.direction is None
        and query.neuron_selector is None
    )
    if query.mode == "closed form" and not gives_it:
        raise ValueError(
            "the closed form gives the previous-layer contribution of heads in the Frobenius norm, for "
            "models whose attention the adapter knows: leave out mode to take another one"
        )
    return gives_it and query.mode in (None, "closed form")


def closed_form_flops(batch: int, heads: int, tokens: int, width: int) -> float:
    """Approximate operations of the matrix products of :func:`attention_energies`."""
    moments = 2 * tokens**2 * min(width**2, 4 * tokens)
    return float(batch * heads * (moments + 12 * tokens**2 * width + 8 * tokens * width**2))


def attention_energies(
    factors: AttentionFactors, multiply_by_inputs: bool = False, positions: list[int] | None = None
) -> Tensor:
    """Squared Frobenius norms of the Jacobian blocks of all heads of a layer.

    Args:
        factors: The factors of the layer's attention.
        multiply_by_inputs: Scale column ``d`` of each block by ``x_i[d]``.
        positions: Positions of the queries. Default: ``None``, all.

    Returns:
        ``[batch, head, query, key]`` in at least float32.
    """
    dtype = torch.promote_types(factors.pattern.dtype, torch.float32)
    batch, head_count, tokens, keys = factors.pattern.shape
    queries = slice(None) if positions is None else positions
    shape = (batch, head_count, tokens if positions is None else len(positions), keys)
    out = torch.empty(shape, dtype=dtype, device=factors.pattern.device)
    fixed = None
    if factors.shares_jacobians and not multiply_by_inputs:
        fixed = _grams(_part(factors, slice(0, 1), slice(None), dtype), False)
    for rows, heads in _parts(factors, multiply_by_inputs):
        part = _part(factors, rows, heads, dtype)
        grams = _grams(part, multiply_by_inputs) if fixed is None else fixed.of_heads(heads)
        out[rows, heads] = _energies(part, grams)[:, :, queries]
    return out


def _parts(factors: AttentionFactors, scaled: bool) -> Iterator[tuple[slice, slice]]:
    """Parts of the batch and of the heads whose intermediate results fit the caches of a CPU, or the
    memory budget of a device.
    """
    batch, heads, tokens, width = factors.query.shape
    per_head = tokens * ((0 if _is_short(factors.pattern, width) else 2 * width**2) + 12 * tokens)
    if not factors.shares_jacobians or scaled:
        per_head += 6 * tokens * width**2
    if scaled:
        per_head += 6 * tokens * width * factors.x.shape[-1]
    limit = memory_budget(factors.x.device)
    if factors.x.device.type == "cpu":
        limit = min(limit, CACHE)
    fit = max(1, int(limit // (factors.x.element_size() * per_head)))
    head_step = min(heads, fit)
    row_step = max(1, fit // heads)
    for row in range(0, batch, row_step):
        for head in range(0, heads, head_step):
            yield slice(row, row + row_step), slice(head, head + head_step)


def _part(factors: AttentionFactors, rows: slice, heads: slice, dtype: torch.dtype) -> AttentionFactors:
    def cut(value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        value = value if len(value) == 1 else value[rows]
        return (value if value.dim() == 3 or value.shape[1] == 1 else value[:, heads]).to(dtype)

    norm = factors.norm
    if norm is not None:
        norm = TokenNorm(
            norm.normalised[rows].to(dtype),
            norm.inverse[rows].to(dtype),
            norm.weight.to(dtype),
            norm.centred,
        )
    return AttentionFactors(
        pattern=factors.pattern[rows, heads].to(dtype),
        query=factors.query[rows, heads].to(dtype),
        key=factors.key[rows, heads].to(dtype),
        value=factors.value[rows, heads].to(dtype),
        scale=factors.scale,
        x=factors.x[rows].to(dtype),
        query_weight=factors.query_weight[heads].to(dtype),
        key_weight=factors.key_weight[heads].to(dtype),
        value_weight=factors.value_weight[heads].to(dtype),
        norm=norm,
        query_map=cut(factors.query_map),
        key_map=cut(factors.key_map),
        query_row=cut(factors.query_row),
        key_row=cut(factors.key_row),
        cap=factors.cap,
        has_sinks=factors.has_sinks,
    )


# --- products of token-wise Jacobians --------------------------------------------------------------


def _grams(factors: AttentionFactors, multiply_by_inputs: bool) -> _Grams:
    product = _products(factors, multiply_by_inputs)
    key_map, query_map = factors.key_map, factors.query_map
    gg, gk, kk = product("g", "g"), product("g", "k"), product("k", "k")
    trace = gg.diagonal(dim1=-2, dim2=-1).sum(-1)
    gk, kk = _mapped(None, gk, key_map), _mapped(key_map, kk, key_map)
    qq = _mapped(query_map, product("q", "q"), query_map)
    centred = factors.cap is None and not factors.has_sinks
    return _Grams(
        trace,
        gk,
        kk,
        gq=_mapped(None, product("g", "q"), query_map),
        kq=_mapped(key_map, product("k", "q"), query_map),
        qq=qq,
        root=_root(qq.squeeze(2)) if qq.shape[2] == 1 and centred else None,
    )


def _mapped(left: Tensor | None, product: Tensor, right: Tensor | None) -> Tensor:
    product = product if left is None else left @ product
    return product if right is None else product @ right.mT


def _products(factors: AttentionFactors, multiply_by_inputs: bool) -> Callable[[str, str], Tensor]:
    """Products of the Jacobians of values ``"g"``, keys ``"k"`` and queries ``"q"``, before their maps."""
    weights = {"g": factors.value_weight, "k": factors.key_weight, "q": factors.query_weight}
    further = {"g": None, "k": factors.key_row, "q": factors.query_row}
    rows = {name: _Rows(weight, further[name]) for name, weight in weights.items()}
    if multiply_by_inputs:
        scaled = {name: _scaled_rows(one.dense(), factors) for name, one in rows.items()}
        return lambda a, b: scaled[a] @ scaled[b].mT
    if factors.norm is not None:
        return _normed_products(rows, factors.norm)
    return lambda a, b: rows[a] @ rows[b]


@dataclass(frozen=True)
class _Rows:
    """The rows of a projection, and perhaps one more, which each token has for all heads.

    Attributes:
        weight: ``[head, d_head, width]``.
        further: ``[batch, token, width]``, or ``None``.
    """

    weight: Tensor
    further: Tensor | None

    def each(self, function: Callable[[Tensor], Tensor]) -> _Rows:
        """A function of rows, for all of them."""
        return _Rows(function(self.weight), None if self.further is None else function(self.further))

    def dense(self) -> Tensor:
        """``[batch or 1, head, token or 1, row, width]``."""
        weight = self.weight[None, :, None]
        if self.further is None:
            return weight
        further = self.further[:, None, :, None]
        shape = [len(further), weight.shape[1], further.shape[2], -1, -1]
        return torch.cat([weight.expand(shape), further.expand(shape)], -2)

    def along(self, vectors: Tensor) -> Tensor:
        """The rows times vectors ``[batch, token, width]``: ``[batch, head, token, row]``."""
        found = torch.einsum("hcd,btd->bhtc", self.weight, vectors)
        if self.further is None:
            return found
        further = (self.further * vectors).sum(-1)[:, None, :, None]
        return torch.cat([found, further.expand_as(found[..., :1])], -1)

    def __matmul__(self, other: _Rows) -> Tensor:
        """The products of all rows: ``[batch or 1, head, token or 1, row, row]``."""
        product = (self.weight @ other.weight.mT)[None, :, None]
        if self.further is None and other.further is None:
            return product
        if other.further is None:
            return (other @ self).mT
        column = self.along(other.further)[..., None]
        if self.further is None:
            return torch.cat([product.expand(*column.shape[:-1], -1), column], -1)
        below = _Rows(other.weight, None).along(self.further)[..., None, :]
        left = torch.cat([product.expand(*below.shape[:3], *product.shape[3:]), below], -2)
        return torch.cat([left, column], -1)


def _normed_products(rows: dict[str, _Rows], norm: TokenNorm) -> Callable[[str, str], Tensor]:
    r"""Products of token-wise Jacobians behind a normalisation.

    With :math:`A = W \Gamma` and :math:`\alpha_i = A \hat x_i`, the product of two is

    .. math:: \sigma_i^{-2} \big[ A P A'^\top - (2 / D - |\hat x_i|^2 / D^2)\, \alpha_i \alpha_i'^\top \big] .
    """
    width = norm.normalised.shape[-1]
    scaled = {name: one.each(norm.weight.mul) for name, one in rows.items()}
    along = {name: one.along(norm.normalised) for name, one in scaled.items()}
    if norm.centred:
        scaled = {name: one.each(lambda a: a - a.mean(-1, keepdim=True)) for name, one in scaled.items()}
    factor = 2 / width - norm.normalised.square().sum(-1) / width**2
    inverse = norm.inverse.square()[:, None, :, None, None]

    def product(a: str, b: str) -> Tensor:
        outer = along[a][..., :, None] * along[b][..., None, :]
        return inverse * (scaled[a] @ scaled[b] - factor[:, None, :, None, None] * outer)

    return product


def _scaled_rows(weight: Tensor, factors: AttentionFactors) -> Tensor:
    """A projection's Jacobian with columns scaled by ``x``: ``[batch, head, token, row, width]``.

    Args:
        weight: ``[batch or 1, head, token or 1, row, width]``.
        factors: The factors.
    """
    norm = factors.norm
    if norm is None:
        return weight * factors.x[:, None, :, None]
    normalised = norm.normalised[:, None, :, None]
    scaled = weight * norm.weight
    along = (scaled * normalised).sum(-1, keepdim=True)
    centred = scaled - scaled.mean(-1, keepdim=True) if norm.centred else scaled
    rows = centred - along * normalised / normalised.shape[-1]
    return rows * (norm.inverse[..., None] * factors.x)[:, None, :, None]


# --- the formula -----------------------------------------------------------------------------------


def _energies(factors: AttentionFactors, grams: _Grams) -> Tensor:
    a, o, slope = factors.pattern, factors.pattern @ factors.value, _slope(factors)
    if grams.kk.shape[2] == 1 and slope is None:
        energy = _with_fixed_grams(factors, grams, o)
    else:
        energy = _with_token_grams(factors, grams, o, slope)
    energy.mul_(a).mul_(a)
    energy.diagonal(dim1=-2, dim2=-1).add_(_own_token(factors, grams, o, slope))
    return energy.clamp_min_(0)


def _slope(factors: AttentionFactors) -> Tensor | None:
    r"""The derivatives :math:`c_{ji}` of capped scores by scores; ``None`` where they are not capped."""
    if factors.cap is None:
        return None
    scores = (factors.query @ factors.key.mT).mul_(factors.scale / factors.cap)
    return 1 - scores.tanh_().square_()


def _with_token_grams(factors: AttentionFactors, grams: _Grams, o: Tensor, slope: Tensor | None) -> Tensor:
    """The bracket of the formula, where each token has its own Jacobians or scores are capped."""
    q, v, s = factors.query, factors.value, factors.scale
    cross = q @ _apply(grams.gk.mT, v).mT - _forms(o, grams.gk, q)
    bracket = _distances(o, v).mul_(_forms(q, grams.kk, q)).mul_(s**2)
    if slope is not None:
        cross = cross * slope
        bracket.mul_(slope).mul_(slope)
    return bracket.add_(cross, alpha=2 * s).add_(grams.gg[..., None, :])


def _with_fixed_grams(factors: AttentionFactors, grams: _Grams, o: Tensor) -> Tensor:
    r"""The bracket of the formula, where all tokens share their Jacobians, which are the weights alone.

    With :math:`\kappa_j = s^2 q_j^\top K K^\top q_j` and :math:`u_j = s\, G K^\top q_j` it is one product:

    .. math:: \begin{pmatrix} 2 u_j - 2 \kappa_j o_j \\ \kappa_j \\
        |G|^2 + \kappa_j |o_j|^2 - 2 o_j^\top u_j \end{pmatrix}^{\!\top}
        \begin{pmatrix} v_i \\ |v_i|^2 \\ 1 \end{pmatrix} .
    """
    q, v, s = factors.query, factors.value, factors.scale
    mean = v.mean(-2, keepdim=True)
    v, o = v - mean, o - mean  # only their differences matter; centred, they lose less to rounding
    kappa: Tensor = s**2 * _forms(q, grams.kk, q)
    u = s * _apply(grams.gk, q)
    rest = grams.gg[..., None] + kappa * _dots(o, o) - 2 * _dots(o, u)
    by_query = torch.cat([2 * (u - kappa * o), kappa, rest], dim=-1)
    by_key = torch.cat([v, _dots(v, v), torch.ones_like(v[..., :1])], dim=-1)
    return by_query @ by_key.mT


def _dots(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(-1, keepdim=True)


def _distances(o: Tensor, v: Tensor) -> Tensor:
    """``|v_i - o_j|^2``, ``[batch, head, j, i]``; both are centred first, which loses less to rounding."""
    mean = v.mean(-2, keepdim=True)
    o, v = o - mean, v - mean
    squares = _square_norms(o)[..., :, None] + _square_norms(v)[..., None, :]
    return squares.sub_(o @ v.mT, alpha=2).clamp_min_(0)


def _square_norms(vectors: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return norms.square_()


def _own_token(factors: AttentionFactors, grams: _Grams, o: Tensor, slope: Tensor | None) -> Tensor:
    r"""What the query of a token adds to the energy of its own input: ``[batch, head, token]``.

    The inner products with :math:`M_j` are sums over keys, so only the norm needs ``M_j`` itself.
    """
    q, k, v, s = factors.query, factors.key, factors.value, factors.scale
    own = factors.pattern.diagonal(dim1=-2, dim2=-1)
    a = factors.pattern if slope is None else factors.pattern * slope
    by_query = _query_energy(a, k, v, o, grams)
    if grams.gq.shape[2] == 1:
        products = (v * _apply(grams.gq, k)).sum(-1, keepdim=True)
        by_value = (a @ products).squeeze(-1) - (o * _apply(grams.gq, a @ k)).sum(-1)
    else:
        by_value = (_moment(a, k, v, o) * grams.gq).sum((-2, -1))
    offset = v - o
    along_value = offset @ v.mT - (offset * o).sum(-1, keepdim=True)
    along_key = _apply(grams.kq.mT, q) @ k.mT
    by_key = (a * along_value * along_key).sum(-1)
    if slope is not None:
        by_key = by_key * slope.diagonal(dim1=-2, dim2=-1)
    return s**2 * by_query + 2 * s * own * (by_value + s * by_key)


def _query_energy(a: Tensor, k: Tensor, v: Tensor, o: Tensor, grams: _Grams) -> Tensor:
    r""":math:`\operatorname{tr}(M_j Q_j Q_j^\top M_j^\top)`, ``[batch, head, token]``.

    Where :math:`Q Q^\top = L L^\top` is the same for all tokens it is :math:`|M_j L|^2`, and ``M_j L`` is
    ``M_j`` with the keys :math:`L^\top k`.
    """
    if grams.root is None:
        moment = _moment(a, k, v, o)
        return ((moment @ grams.qq) * moment).sum((-2, -1))
    keys = k @ grams.root
    if _is_short(a, v.shape[-1]):
        return _moment_energy(a, keys, v).to(a.dtype)
    return _square_norms(_moment(a, keys, v, o).flatten(-2))


def _is_short(a: Tensor, width: int) -> bool:
    """Whether token-by-token products are cheaper than moments, and as exact."""
    return a.dtype == torch.float32 and a.device.type != "mps" and a.shape[-1] < width**2 / 4


def _moment_energy(a: Tensor, k: Tensor, v: Tensor) -> Tensor:
    r""":math:`|M_j|^2` by token-by-token products, in float64 since nearly all may cancel:

    .. math:: \sum_{m, n} a_{jm} a_{jn} \big[v_m^\top v_n - 2\, o_j^\top v_m + |o_j|^2\big]\, k_m^\top k_n .
    """
    a, k, v = a.double(), k.double(), v.double()
    v, k = v - v.mean(-2, keepdim=True), k - k.mean(-2, keepdim=True)
    o, keys = a @ v, k @ k.mT
    terms = (o @ v.mT).mul_(-2).add_(_dots(o, o)).mul_(a @ keys)
    terms.add_(a @ (v @ v.mT).mul_(keys))
    return terms.mul_(a).sum(-1)


def _root(gram: Tensor) -> Tensor:
    """``L`` with ``L L^T`` a positive semi-definite matrix."""
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(gram)
    if failed.any():
        values, vectors = torch.linalg.eigh(gram)
        root = vectors * values.clamp_min(0).sqrt()[..., None, :]
    return root


def _moment(a: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
    """``M_j``, the covariance of values and keys under a row: ``[batch, head, token, d_head, d_head]``."""
    width = v.shape[-1]
    outer = (v[..., :, None] * k[..., None, :]).flatten(-2)
    moment = (a @ outer).view(-1, width, width)
    means = o.reshape(-1, width, 1), (a @ k).view(-1, 1, width)
    return moment.baddbmm_(*means, alpha=-1).view(*o.shape[:3], width, width)


# A matrix whose token axis has length 1 is shared by all tokens, which are then the rows of one product.


def _apply(matrix: Tensor, vectors: Tensor) -> Tensor:
    """``matrix_i vectors_i``: ``[batch, head, token, d_head]``."""
    if matrix.shape[2] == 1:
        return vectors @ matrix.squeeze(2).mT
    return (matrix @ vectors[..., None]).squeeze(-1)


def _forms(left: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
    """``left_j^T matrix_i right_j``: ``[batch, head, j, i]``; ``i`` has length 1 for a shared matrix."""
    if matrix.shape[2] == 1:
        return ((left @ matrix.squeeze(2)) * right).sum(-1, keepdim=True)
    outer = (left[..., :, None] * right[..., None, :]).flatten(-2)
    return outer @ matrix.flatten(-2).mT
