"""What contributions will cost, from a transformer's dimensions alone, before anything is run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from captum_hta.jacobian.closed_form import closed_form_flops
from captum_hta.jacobian.linearize.tokenwise import COLLAPSED_MEMORY, Segment, worthwhile
from captum_hta.jacobian.linearize.windowed import causal_share
from captum_hta.jacobian.norms import check_norm
from captum_hta.jacobian.plan import Plan, Work, chunk_size, memory_budget, plan
from captum_hta.jacobian.query import check_probes
from captum_hta.model.size import Size


def forecast(
    size: Size,
    tokens: int,
    source: str | int = "input",
    target: str = "head",
    layers: Sequence[int] | None = None,
    queries: int | None = None,
    norm: str = "frobenius",
    n_probes: int | None = None,
    batch: int = 1,
    mode: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Plan:
    """The mode that will be taken and what it will cost.

    Args:
        size: The model.
        tokens: Tokens of the longest text, ``T``.
        source: As in :func:`captum_hta.contributions`.
        target: ``"head"`` or ``"layer"``.
        layers: Layers of the targets. Default: ``None``, all.
        queries: Number of query positions. Default: ``None``, all.
        norm: ``"frobenius"``, ``"spectral"`` or ``"sum"``.
        n_probes: Probes of each source token; ``None`` for an exact result.
        batch: Texts at once.
        mode: Force one of :data:`captum_hta.jacobian.plan.MODES`.
        dtype: Of the weights.
        device: Where the model runs.

    Returns:
        The plan; where every layer has a source of its own, of all of them together.

    Raises:
        ValueError: If ``mode`` is not valid for what is asked, or an argument is out of its range.
        TypeError: If ``size`` is no :class:`Size`; an adapter has one, ``model.size``.

    Example:
        >>> bert = Size(layers=12, heads=12, width=768, inner=3072)
        >>> print(forecast(bert, tokens=64, source="previous_layer"))
        closed form (no tangents): 1.06 GFLOP in about 2.36 MB
        >>> forecast(bert, tokens=64).mode, forecast(bert, tokens=64, queries=1).mode
        ('forward', 'reverse')
        >>> exact, probes = forecast(bert, tokens=64), forecast(bert, tokens=64, n_probes=16)
        >>> exact.flops > 20 * probes.flops
        True
    """
    _check(size, tokens, source, target, norm, n_probes, batch)
    first = source if isinstance(source, int) else 0
    if layers is not None and any(not -size.layers <= layer < size.layers for layer in layers):
        raise ValueError(f"layers must be in 0 to {size.layers - 1}, got {list(layers)}")
    named = range(first, size.layers) if layers is None else layers
    chosen = sorted({layer % size.layers for layer in named})
    place = torch.device(device)
    asked = _Asked(size, tokens, target, queries or tokens, norm, n_probes, batch, dtype, place)
    own = source == "previous_layer" or all(layer == source for layer in chosen)
    known = size.closed_form and own and target == "head" and norm == "frobenius"
    if known and queries is None and mode in (None, "closed form"):
        return asked.closed_form(len(chosen))
    if source == "previous_layer":
        one = plan(asked.work(0, [0]), mode)
        return replace(one, flops=one.flops * len(chosen))
    return plan(asked.work(first, chosen), mode)


def _check(
    size: Size, tokens: int, source: str | int, target: str, norm: str, n_probes: int | None, batch: int
) -> None:
    if not isinstance(size, Size):
        raise TypeError(f"size must be a Size, such as model.size, got {type(size).__name__}")
    if size.d_head is None and size.width % size.heads:
        raise ValueError(f"{size.heads} heads do not divide a width of {size.width}: pass d_head")
    for name, value in {"tokens": tokens, "batch": batch}.items():
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
    known = ("input", "previous_layer", *range(size.layers))
    if source not in known:
        raise ValueError(f"source must be 'input', 'previous_layer' or a block, got {source!r}")
    if target not in ("head", "layer"):
        raise ValueError(f"target must be 'head' or 'layer', got {target!r}")
    check_norm(norm)
    check_probes(n_probes, None, norm)


def in_all(plans: Iterable[Plan]) -> list[Plan]:
    """The plans of several runs as one for each mode: operations add up, memory does not."""
    total: dict[tuple[str, str], Plan] = {}
    for one in plans:
        key = (one.mode, one.reason if one.mode == "probes" else "")
        known = total.get(key)
        if known is not None:
            chunk = None if one.chunk is None else max(one.chunk, known.chunk)
            flops = None if None in (one.flops, known.flops) else one.flops + known.flops
            one = Plan(one.mode, flops, max(one.memory, known.memory), chunk, known.reason)
        total[key] = one
    return list(total.values())


@dataclass(frozen=True)
class _Asked:
    """What is asked of a model, for any source."""

    size: Size
    tokens: int
    target: str
    queries: int
    norm: str
    n_probes: int | None
    batch: int
    dtype: torch.dtype
    device: torch.device

    def closed_form(self, layers: int) -> Plan:
        heads, width = self.size.heads, self.size._d_head
        flops = layers * closed_form_flops(self.batch, heads, self.tokens, width)
        memory = layers * self.batch * heads * self.tokens**2 * self.dtype.itemsize
        return Plan("closed form", flops, memory, None, "no tangents")

    def work(self, entry: int, layers: Sequence[int]) -> Work:
        """For targets in these layers and the source that enters one block."""
        size, tokens = self.size, self.tokens
        blocks = max(layers) - entry + (self.target == "layer")
        collapsed = self._collapsed(blocks)
        feed_forward = size.feed_forward(tokens) * self.batch
        product = collapsed[0].product_flops if collapsed else feed_forward
        share = causal_share(tokens) if size.causal else 1.0
        push = [self._path(layer - entry, product, share, 1 / tokens) for layer in layers]
        pull = [self._path(layer - entry, feed_forward, 1.0, 1.0) for layer in layers]
        heads = size.heads if self.target == "head" else 1
        return Work(
            tokens=tokens,
            width=size.width,
            queries=self.queries,
            heads=heads,
            target_widths=[self._target_width] * len(layers),
            push_flops=push,
            pull_flops=pull,
            tangent_bytes=self._widest(bool(blocks) and not collapsed) * self.dtype.itemsize,
            preparation_flops=sum(segment.preparation_flops for segment in collapsed),
            preparation_bytes=sum(segment.elements for segment in collapsed) * self.dtype.itemsize,
            norm=self.norm,
            n_probes=self.n_probes,
            device=self.device,
        )

    @property
    def _target_width(self) -> int:
        return self.size._d_head * self.size.heads if self.target == "head" else self.size.width

    def _path(self, before: int, feed_forward: float, share: float, first: float) -> float:
        """Operations of a tangent through whole blocks and up to the target of the one after them; of the
        first block's projections only a part.
        """
        size, tokens, batch = self.size, self.tokens, self.batch
        head = batch * (size.projections(tokens) + size.attention(tokens))
        rest = batch * size.output(tokens) + feed_forward
        whole = before + (self.target == "layer")
        saved = batch * size.projections(tokens)
        return share * ((before + 1) * head + whole * rest - saved) + first * saved

    def _widest(self, with_inner: bool) -> int:
        """Elements of the widest tangent."""
        size, tokens = self.size, self.tokens
        widths = [tokens * size.width, tokens * size._d_head * size.heads, size.heads * tokens**2]
        if with_inner:
            widths.append(tokens * size.inner)
        return self.batch * max(widths)

    def _collapsed(self, blocks: int) -> list[Segment]:
        """The feed-forward parts that are worth collapsing."""
        size = self.size
        shape = (self.batch, self.tokens, size.width, size.width)
        flops = int(self.batch * size.feed_forward(self.tokens))
        first = flops * (1 + size.gated) // (2 + size.gated)
        part = Segment((), 0, 0, shape, flops, first)
        share = causal_share(self.tokens) if size.causal else 1.0
        count = self.tokens * (self.n_probes or size.width) * share
        chunk = chunk_size(self._widest(False) * self.dtype.itemsize, self.device)
        room = COLLAPSED_MEMORY * memory_budget(self.device) / self.dtype.itemsize
        return worthwhile([part] * blocks, count, chunk, room)
