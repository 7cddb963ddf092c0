"""The layout of attention: which modules compute queries, keys and values, as the closed form needs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn import Module

from captum_hta.integrations.transformers.attention import AttentionCall, rotation
from captum_hta.integrations.transformers.trace import KEPT_TOKENS, Heads, ModuleCall, is_norm, same
from captum_hta.integrations.weights import is_plain, token_norm, weight_of
from captum_hta.model.attention import TokenNorm


@dataclass(frozen=True)
class Projection:
    """How queries, keys or values are computed: ``factor`` times some outputs of a plain matrix.

    Attributes:
        name: The module, by its path in the block.
        rows: Numbers of its outputs, ``[head * d_head]``; ``None`` for all in order.
        factor: What they are multiplied by.
        rotated: Whether a rotary embedding follows.
        norm: The module that normalises the outputs before that, by its path in the block; ``None`` without.
    """

    name: str
    rows: Tensor | None = None
    factor: float = 1.0
    rotated: bool = False
    norm: str | None = None


@dataclass(frozen=True)
class Norm:
    """The norm before the projections of a pre-LN block.

    Attributes:
        name: The module, by its path in the block.
        centred: Whether it removes the mean.
        unit_offset: Whether its weight is stored as its difference from one.
    """

    name: str
    centred: bool
    unit_offset: bool


@dataclass(frozen=True)
class Layout:
    """The layout of the attention of a block.

    Attributes:
        query, key, value: How these are computed.
        norm: The norm of their input; ``None`` for post-LN blocks.
    """

    query: Projection
    key: Projection
    value: Projection
    norm: Norm | None

    @property
    def names(self) -> list[str]:
        """The modules that compute queries, keys and values, each once."""
        return list(dict.fromkeys((self.query.name, self.key.name, self.value.name)))


def layout_of(calls: Sequence[ModuleCall], block: ModuleCall, heads: Heads) -> Layout | None:
    """Find the layout of a block by the numbers that its modules returned.

    Args:
        calls: The calls within the block.
        block: The call of the block.
        heads: Its attention.

    Returns:
        The layout; ``None`` for cross attention, if scores are no scaled dot products, or if queries, keys
        and values are not computed by plain matrices, a factor and a rotary embedding from the block's input
        or its norm.
    """
    attention = heads.attention
    is_self = heads.lengths[0] == heads.lengths[1]
    if not isinstance(attention, AttentionCall) or not is_self:
        return None
    names = {module: name for name, module in block.module.named_modules()}
    maps = [one for one in calls if is_plain(one.module) and one.out is not None and one.order < _end(heads)]
    sizes = attention.query.shape[1], attention.key.shape[1], attention.query.shape[-1]
    found = []
    for part, wanted in enumerate((attention.query, attention.key, attention.value)):
        match = _projection(maps, names, part, _tokens_first(wanted), sizes, heads)
        if match is None:
            return None
        found.append(match)
    inputs = [call.x for call, _ in found]
    if not all(same(x, inputs[0]) for x in inputs):
        return None
    norm = _norm(calls, names, block, inputs[0])
    if norm is None and not same(inputs[0], block.x):
        return None
    return Layout(found[0][1], found[1][1], found[2][1], norm)


def _end(heads: Heads) -> int:
    return heads.call.order if heads.reader is None else heads.reader.order


def _tokens_first(value: Tensor) -> Tensor:
    """Queries, keys or values of the first tokens, ``[token, head, d_head]``."""
    return value[0, :, :KEPT_TOKENS].transpose(0, 1)


def _projection(
    maps: Sequence[ModuleCall], names: dict[Module, str], part: int, wanted: Tensor,
    sizes: tuple[int, int, int], heads: Heads,
) -> tuple[ModuleCall, Projection] | None:  # fmt: skip
    """The matrix that gives queries (part 0), keys (1) or values (2)."""
    turn = None if part == 2 else _rotation(heads, wanted)
    turns = [None] if turn is None else [None, turn]
    norms = [None] if part == 2 else [None, *_later_norms(heads.call.module, names)]
    for call, norm, later in product(maps, norms, turns):
        if call.out is None or call.module not in names:
            continue
        for rows in _rows(part, call.out.shape[-1], sizes):
            value = taken(call.out[0], rows, wanted)
            value = value if norm is None else normalised_heads(norm, value)[1]
            factor = _factor(wanted, turned(value, later))
            if factor is not None:
                name = None if norm is None else names[norm]
                return call, Projection(names[call.module], rows, factor, later is not None, name)
    return None


def _later_norms(attention: Module, names: dict[Module, str]) -> list[Module]:
    """The modules of attention that may normalise queries or keys: their weights have one axis."""
    found = []
    for module in attention.modules():
        weights = list(module.parameters())
        if module in names and weights and all(weight.dim() == 1 for weight in weights):
            found += [module] if all(norm_eps(leaf) is not None for leaf in _leaves(module)) else []
    return found


def _leaves(norm: Module) -> list[Module]:
    """The norms of which a norm is made: itself, or one for each head."""
    return [module for module in norm.modules() if isinstance(getattr(module, "weight", None), Tensor)]


def normalised_heads(norm: Module, value: Tensor) -> tuple[TokenNorm, Tensor]:
    """The normalisation of queries or keys ``[..., head, d_head]``, and what it returns, of that shape.

    Its ``normalised`` is ``[..., head, d_head]`` if each head is normalised, and ``[..., head * d_head]`` if
    all are together.
    """
    leaves = _leaves(norm)
    is_whole = len(leaves) == 1 and leaves[0].get_parameter("weight").numel() > value.shape[-1]
    read = value.flatten(-2) if is_whole else value
    sizes = {leaf.get_parameter("weight").numel() for leaf in leaves}
    if sizes != {read.shape[-1]} or len(leaves) not in (1, value.shape[-2]):
        at = token_norm(read, torch.full_like(read[..., 0, :], torch.nan), 1.0, centred=False)
        return at, torch.full_like(value, torch.nan)
    found = [_affine(leaf) for leaf in leaves]
    weight, bias = torch.stack([one[0] for one in found]), torch.stack([one[1] for one in found])
    weight, bias = (weight[0], bias[0]) if len(found) == 1 else (weight, bias)
    at = token_norm(read, weight, norm_eps(leaves[0]) or 0.0, centred=found[0][2])
    return at, (at.normalised * weight + bias).to(value).reshape(value.shape)


def _affine(norm: Module) -> tuple[Tensor, Tensor, bool]:
    """The weight and bias of a norm as it applies them, and whether it removes the mean."""
    stored = norm.get_parameter("weight").detach()
    signs = torch.ones_like(stored)
    signs[::2] = -1
    eps = norm_eps(norm) or 0.0
    with torch.no_grad():
        up, down, moved = (norm(value[None])[0] for value in (signs, -signs, signs + 1))
    weight = (up - down) * signs * (0.5 * (1 + eps) ** 0.5)
    return weight, (up + down) / 2, bool((moved - up).abs().max() < 0.1 * weight.abs().max())


def taken(out: Tensor, rows: Tensor | None, wanted: Tensor) -> Tensor:
    """Some outputs of a matrix ``[..., width]`` as heads ``[..., head, d_head]``, as many as are wanted."""
    chosen = out if rows is None else out[..., rows.to(out.device)]
    return torch.unflatten(chosen, -1, tuple(wanted.shape[-2:]))


def turned(value: Tensor, rotary: Tensor | None) -> Tensor:
    """Vectors ``[..., token, head, d_head]`` after a rotary embedding ``[token, d_head, d_head]``."""
    return value if rotary is None else torch.einsum("tij,...thj->...thi", rotary.to(value), value)


def _rotation(heads: Heads, wanted: Tensor) -> Tensor | None:
    """The rotary embedding of the first tokens as matrices ``[token, d_head, d_head]``."""
    angles = heads.call.angles
    if angles is None:
        return None
    try:
        return rotation(heads.call.module, angles, wanted.shape[-1])[0, 0]
    except Exception:  # whatever a function of another signature raises
        return None


def _factor(wanted: Tensor, found: Tensor) -> float | None:
    """The number that one tensor is times another; ``None`` if it is no multiple."""
    scale = found.square().sum()
    factor = ((wanted * found).sum() / scale.clamp_min(torch.finfo(scale.dtype).tiny)).item()
    if abs(factor - 1) < 1e-5:
        factor = 1.0
    return factor if same(factor * found, wanted) else None


def _rows(part: int, width: int, sizes: tuple[int, int, int]) -> Iterator[Tensor | None]:
    """Where queries, keys or values may be among the outputs of a matrix: alone, or beside the others."""
    heads, key_heads, d = sizes
    count = heads if part == 0 else key_heads
    if width == count * d:
        yield None
    if width != (heads + 2 * key_heads) * d:
        return
    numbers = torch.arange(width, device="cpu")
    yield torch.split(numbers, [heads * d, key_heads * d, key_heads * d])[part]
    groups = numbers.view(key_heads, -1, d)
    each = torch.split(groups, [heads // key_heads, 1, 1], dim=1)[part]
    yield each.flatten()


def _norm(
    calls: Sequence[ModuleCall], names: dict[Module, str], block: ModuleCall, x: Tensor | None
) -> Norm | None:
    """The norm that reads the block's input and returns ``x``."""
    for call in calls:
        if call.module in names and is_norm(call) and same(call.x, block.x) and same(call.out, x):
            for centred, unit_offset in product((True, False), (False, True)):
                norm = Norm(names[call.module], centred, unit_offset)
                if same(_normalised(call.module, norm, call.x), call.out):
                    return norm
    return None


def _normalised(module: Module, norm: Norm, x: Tensor | None) -> Tensor | None:
    """What a norm of this kind returns."""
    eps = norm_eps(module)
    if x is None or eps is None:
        return None
    weight = norm_weight(module, norm, x)
    out = token_norm(x, weight, eps, norm.centred).normalised * weight
    bias = getattr(module, "bias", None)
    return (out if not isinstance(bias, Tensor) else out + bias.detach()).to(x)


def norm_weight(module: Module, norm: Norm, x: Tensor) -> Tensor:
    """The weight of a norm, ``[width]``; ones where it has none."""
    if not isinstance(getattr(module, "weight", None), Tensor):
        return torch.ones_like(x[0, 0])
    weight = weight_of(module)
    return 1 + weight if norm.unit_offset else weight


def norm_eps(module: Module) -> float | None:
    """What a norm adds to the variance, under one of the names that ``transformers`` has for it."""
    for name in ("eps", "variance_epsilon", "epsilon", "norm_eps"):
        if isinstance(getattr(module, name, None), float):
            return float(getattr(module, name))
    return None
