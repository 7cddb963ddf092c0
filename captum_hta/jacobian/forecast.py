"""What contributions will cost, from a transformer's dimensions alone, before the model is run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from captum_hta.jacobian.closed_form import closed_form_flops, has_closed_form
from captum_hta.jacobian.endpoints import Endpoints, endpoints
from captum_hta.jacobian.linearize.tokenwise import COLLAPSED_MEMORY, Segment, worthwhile
from captum_hta.jacobian.linearize.windowed import causal_share
from captum_hta.jacobian.plan import Costs, Plan, chunk_size, memory_budget, plan
from captum_hta.jacobian.query import Query
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
    """The mode that will be used and what it will cost.

    Args:
        size: The model's dimensions.
        tokens: Tokens of the longest text, ``T``.
        source: As in :func:`captum_hta.contributions`.
        target: ``"head"`` or ``"layer"``.
        layers: Layers of the targets. Default: ``None``, all.
        queries: Number of query positions. Default: ``None``, all.
        norm: ``"frobenius"``, ``"spectral"`` or ``"sum"``.
        n_probes: Probes of each source token; ``None`` for an exact result.
        batch: Texts at once.
        mode: Force one of :data:`captum_hta.jacobian.plan.MODES`.
        dtype: Dtype of the weights.
        device: Where the model runs.

    Returns:
        The plan; where every layer has its own source, one plan for all of them together.

    Raises:
        ValueError: If ``mode`` cannot give the result, or an argument is out of its range.
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
    _check(size, tokens, batch)
    selected = None if queries is None else range(queries)
    query = Query(norm=norm, n_probes=n_probes, mode=mode, neuron_selector=selected)
    ends = endpoints(size.layers, source, target, layers)
    run = _Run(size, tokens, batch, dtype, torch.device(device), query, ends)
    if has_closed_form(query, ends, size.closed_form):
        return run.closed_form()
    plans = [plan(run.costs(entry), mode) for entry in ends.entries]
    return _in_sequence(plans)


def _check(size: object, tokens: int, batch: int) -> None:
    if not isinstance(size, Size):
        raise TypeError(f"size must be a Size, such as model.size, got {type(size).__name__}")
    if size.d_head is None and size.width % size.heads:
        raise ValueError(f"{size.heads} heads do not divide a width of {size.width}: pass d_head")
    for name, value in {"tokens": tokens, "batch": batch}.items():
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")


def _in_sequence(plans: Sequence[Plan]) -> Plan:
    """The plans of several sources, one after the other, as one: all are of one mode."""
    flops = [one.flops for one in plans if one.flops is not None]
    widest = max(plans, key=lambda one: one.memory)
    return replace(widest, flops=sum(flops) if flops else None)


def in_all(plans: Iterable[Plan]) -> list[Plan]:
    """The plans of several runs as one for each mode: operations add up, memory does not."""
    total: dict[tuple[str, str], Plan] = {}
    for one in plans:
        key = (one.mode, one.reason if one.mode == "probes" else "")
        total[key] = _merged(total[key], one) if key in total else one
    return list(total.values())


def _merged(first: Plan, second: Plan) -> Plan:
    chunks = [one.chunk for one in (first, second) if one.chunk is not None]
    known = first.flops is not None and second.flops is not None
    return Plan(
        mode=first.mode,
        flops=(first.flops or 0) + (second.flops or 0) if known else None,
        memory=max(first.memory, second.memory),
        chunk=max(chunks, default=None),
        reason=first.reason,
    )


@dataclass(frozen=True)
class _Run:
    """A query for a model of a certain size and a batch of texts."""

    size: Size
    tokens: int
    batch: int
    dtype: torch.dtype
    device: torch.device
    query: Query
    ends: Endpoints

    def closed_form(self) -> Plan:
        heads, layers = self.size.heads, len(self.ends.layers)
        flops = layers * closed_form_flops(self.batch, heads, self.tokens, self._d_head)
        memory = layers * self.batch * heads * self.tokens**2 * self.dtype.itemsize
        return Plan("closed form", flops, memory, None, "no tangents")

    def costs(self, entry: int) -> Costs:
        """The costs for the source that enters one block, and its targets."""
        size, tokens = self.size, self.tokens
        layers = [layer for layer in self.ends.layers if self.ends.entry(layer) == entry]
        blocks = max(layers) - entry + (not self._to_heads)
        collapsed = self._collapsed(blocks)
        feed_forward = size.feed_forward(tokens) * self.batch
        product = collapsed[0].product_flops if collapsed else feed_forward
        share = causal_share(tokens) if size.causal else 1.0
        cotangents = self.query.cotangents(self._queries, size.heads if self._to_heads else 1, self._width)
        return Costs(
            tokens=tokens,
            directions=self._directions,
            cotangents=[cotangents] * len(layers),
            push_flops=[self._path(layer - entry, product, share, 1 / tokens) for layer in layers],
            pull_flops=[self._path(layer - entry, feed_forward, 1.0, 1.0) for layer in layers],
            tangent_bytes=self._widest(bool(blocks) and not collapsed) * self.dtype.itemsize,
            preparation_flops=sum(segment.preparation_flops for segment in collapsed),
            preparation_bytes=sum(segment.elements for segment in collapsed) * self.dtype.itemsize,
            is_estimate=self.query.is_estimate,
            device=self.device,
        )

    @property
    def _to_heads(self) -> bool:
        return self.ends.target == "head"

    @property
    def _d_head(self) -> int:
        return self.size.d_head or self.size.width // self.size.heads

    @property
    def _width(self) -> int:
        """The width of a target."""
        return self._d_head * self.size.heads if self._to_heads else self.size.width

    @property
    def _queries(self) -> int:
        selected = self.query.neuron_selector
        return len(selected) if isinstance(selected, range) else self.tokens

    @property
    def _directions(self) -> int:
        return self.query.n_probes or self.size.width

    def _path(self, before: int, feed_forward: float, share: float, first: float) -> float:
        """Operations of a tangent through whole blocks and up to the target of the next one; only a part of
        the first block's projections is counted.
        """
        size, tokens, batch = self.size, self.tokens, self.batch
        head = batch * (size.projections(tokens) + size.attention(tokens))
        rest = batch * size.output(tokens) + feed_forward
        whole = before + (not self._to_heads)
        saved = batch * size.projections(tokens)
        return share * ((before + 1) * head + whole * rest - saved) + first * saved

    def _widest(self, with_inner: bool) -> int:
        """Elements of the widest tangent."""
        size, tokens = self.size, self.tokens
        widths = [tokens * size.width, tokens * self._d_head * size.heads, size.heads * tokens**2]
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
        count = self.tokens * self._directions * share
        chunk = chunk_size(self._widest(False) * self.dtype.itemsize, self.device)
        room = COLLAPSED_MEMORY * memory_budget(self.device) / self.dtype.itemsize
        return worthwhile([part] * blocks, count, chunk, room)
