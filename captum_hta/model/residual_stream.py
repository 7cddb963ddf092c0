"""What the parts of a decoder add to its hidden embeddings, and how the last of these become logits.

A decoder adds the outputs of its heads and of its feed-forward parts (MLPs) to one hidden embedding, the
residual stream. The parts are found among the outputs of the modules that run within each block, not by their
names: the block's output must be its input plus its attention plus one other output, whether the two run one
after the other or in parallel. Attention, or both, may be normalised or scaled before they are added.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook

from captum_hta.model.attention import OutputProjection, Unembedding
from captum_hta.model.encoding import Batch
from captum_hta.model.frozen_norm import FrozenNorm
from captum_hta.model.precision import full_precision
from captum_hta.model.protocol import Model
from captum_hta.model.sites import Site, as_site, hook_site, main_keyword, only_tensor

TOLERANCE = 1e-4
"""Largest relative error of a sum of parts that rounding explains."""


@dataclass(frozen=True)
class AttentionWrite:
    """What the attention of one block adds to the stream: ``factor * norm(sum_h z_h W_h + b)``.

    Attributes:
        z: The outputs of the heads, ``[head, query, d_head]``.
        projection: ``W`` and ``b``.
        factor: The factor.
        norm: The norm, frozen, or ``None`` without one.
    """

    z: Tensor
    projection: OutputProjection
    factor: float
    norm: FrozenNorm | None

    def directions(self, vector: Tensor) -> Tensor:
        """For each head the direction of its effect along vectors ``[query, width]`` of the stream:
        ``[head, query, d_head]``.
        """
        behind = self.factor * vector
        before = behind if self.norm is None else self.norm.pull(behind)
        return torch.einsum("hdw,qw->hqd", self.projection.weight.to(before), before)

    @property
    def bias(self) -> Tensor:
        """What does not depend on the heads' outputs, ``[query, width]``."""
        added = self.z.new_zeros(self.z.shape[1], self.projection.weight.shape[-1])
        if self.projection.bias is not None:
            added = added + self.projection.bias.to(added)
        return self.factor * (added if self.norm is None else self.norm.push(added) + self.norm.bias)


@dataclass(frozen=True)
class Readout:
    """How the last hidden embedding becomes logits: ``factor * (head_factor * norm(x) W^T + b)``.

    Attributes:
        unembedding: ``W``.
        norm: The final norm, frozen, or ``None`` without one.
        head_factor: The factor between the final norm and the unembedding.
        factor: The factor of the logits.
        logits: These logits, ``[query, token]``.
        is_capped: Whether the model's own logits are a function of these, such as a soft cap.
    """

    unembedding: Unembedding
    norm: FrozenNorm | None
    head_factor: float
    factor: float
    logits: Tensor
    is_capped: bool

    def vectors(self, column: Tensor) -> Tensor:
        """The directions ``[query, width]`` that a column ``[width]`` of the unembedding reads."""
        scaled = (self.factor * self.head_factor * column).to(self.logits).expand(len(self.logits), -1)
        return scaled if self.norm is None else self.norm.pull(scaled)

    def constant(self, column: Tensor) -> float:
        """What the bias of the final norm adds along a column ``[width]`` of the unembedding."""
        if self.norm is None:
            return 0.0
        return self.factor * self.head_factor * (column.to(self.norm.bias) @ self.norm.bias).item()

    def bias(self, token: int) -> float:
        """The bias of a token's logit."""
        head = self.unembedding.head
        biases = [getattr(head, name, None) for name in ("bias", "b_U")]
        found = [bias for bias in biases if isinstance(bias, Tensor)]
        return self.factor * found[0][token].item() if found else 0.0


@dataclass(frozen=True)
class ResidualStream:
    """The parts of a decoder's hidden embeddings at some queries of one text.

    Attributes:
        embedding: What enters the first block, ``[query, width]``.
        attention: What the attention of each block adds.
        mlps: What the rest of each block adds, ``[layer, query, width]``.
        others: What is added between the blocks that have heads and after them, ``[query, width]``; zero
            unless the model has other blocks.
        readout: How the sum of all becomes logits.
    """

    embedding: Tensor
    attention: list[AttentionWrite]
    mlps: Tensor
    others: Tensor
    readout: Readout


def residual_stream(model: Model, batch: Batch, queries: Tensor) -> ResidualStream:
    """Observe the parts in one forward pass.

    Args:
        model: An adapter around a decoder.
        batch: One text.
        queries: Positions of its tokens.

    Raises:
        ValueError: If the model has no logits of tokens, or its blocks do not add up parts as above.
    """
    trace = _Trace(model, queries)
    with trace.watching(), torch.inference_mode(), full_precision():
        logits = model.logits(*batch.inputs, *batch.extra)[0, queries]
    blocks = [_block(trace, layer) for layer in range(model.num_layers)]
    entered, left = ([trace.rows[layer, kind] for layer in range(model.num_layers)] for kind in ("in", "out"))
    embedding = trace.rows[model.first_entry, "in"]
    gaps = [
        _wide(after) - _wide(before)
        for before, after in zip([embedding, *left], [*entered, trace.last], strict=True)
    ]
    return ResidualStream(
        embedding=_wide(embedding),
        attention=[attention for attention, _ in blocks],
        mlps=torch.stack([mlp for _, mlp in blocks]),
        others=torch.stack(gaps).sum(0),
        readout=trace.readout(logits),
    )


@dataclass(frozen=True)
class _Call:
    """One call of a module.

    Attributes:
        module: The module.
        x, y: What it read and returned at the queries, ``[query, width]``; ``None`` if of another shape.
    """

    module: Module
    x: Tensor | None
    y: Tensor | None


@dataclass
class _Trace:
    """What modules read and return in a forward pass of one text.

    Attributes:
        model, queries: The model and the positions that are kept.
        rows: Tensors ``[query, width]`` by layer and ``"in"``, ``"out"`` or ``"head"``.
        calls: The calls of modules.
        bounds: For each layer and end the number of calls before it.
        head: What the unembedding reads and returns, ``[query, width or token]``.
    """

    model: Model
    queries: Tensor
    rows: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    calls: list[_Call] = field(default_factory=list)
    bounds: dict[tuple[int, str], int] = field(default_factory=dict)
    head: list[Tensor] = field(default_factory=list)
    tokens: int = 0

    def __post_init__(self) -> None:
        self.unembedding = self.model.unembedding

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep what runs in this thread within the context."""
        head = self.unembedding.head
        if head is None:
            raise ValueError(f"{self.model.name} does not show the module that computes its logits")
        with ExitStack() as hooks:
            for (layer, end), site in self._sites():
                hooks.callback(hook_site(site, self._keeper(site, layer, end)).remove)
            for site in (Site(head, at_input=True), Site(head)):
                hooks.callback(hook_site(site, self._keep_head).remove)
            hooks.callback(self._hook_modules().remove)
            yield

    def _sites(self) -> Iterator[tuple[tuple[int, str], Site]]:
        """The ends of blocks and the outputs of their heads, by layer and name."""
        model = self.model
        for layer in sorted({model.first_entry, *range(model.num_layers)}):
            yield (layer, "in"), as_site(model.source(layer))
        for layer in range(model.num_layers):
            yield (layer, "head"), as_site(model.target(layer, "head"))
            yield (layer, "out"), as_site(model.target(layer, "layer"))

    def _keeper(self, site: Site, layer: int, end: str) -> Callable[[object], None]:
        def keep(value: object) -> None:
            tensor = only_tensor(site.pick(value), f"the {end} of block {layer}")
            self.tokens = tensor.shape[1]
            self.rows[layer, end] = tensor.detach()[0, self.queries].flatten(1).clone()
            self.bounds[layer, end] = len(self.calls)

        return keep

    def _keep_head(self, value: object) -> None:
        self.head.append(only_tensor(value, "the unembedding").detach()[0, self.queries].clone())

    def _hook_modules(self) -> torch.utils.hooks.RemovableHandle:
        """Keep the rows of every module that reads or returns a hidden embedding of all tokens."""
        thread, width = threading.get_ident(), self.model.d_model

        def rows(value: object) -> Tensor | None:
            parts = value if isinstance(value, tuple | list) else [value]
            for part in parts:
                if isinstance(part, Tensor) and part.is_floating_point() and self._is_hidden(part):
                    return part.detach().reshape(-1, width)[self.queries].clone()
            return None

        def keep(module: Module, args: tuple[object, ...], kwargs: dict[str, object], out: object) -> None:
            if threading.get_ident() == thread:
                x = args[0] if args else kwargs.get(main_keyword(kwargs) or "")
                self.calls.append(_Call(module, rows(x), rows(out)))

        return register_module_forward_hook(keep, with_kwargs=True)

    def _is_hidden(self, value: Tensor) -> bool:
        """Whether this is one hidden embedding for each token."""
        width = self.model.d_model
        return value.shape[-1:] == (width,) and value.numel() == self.tokens * width

    def within(self, layer: int) -> list[_Call]:
        """The calls between the two ends of a block."""
        return self.calls[self.bounds[layer, "in"] : self.bounds[layer, "out"]]

    @property
    def last(self) -> Tensor:
        """What the final norm reads, or without one the unembedding, ``[query, width]``."""
        norm = self._norm
        return self.head[0] if norm is None or norm.x is None else norm.x

    @property
    def _norm(self) -> _Call | None:
        """The call of the final norm."""
        calls = [one for one in self.calls if one.module is self.unembedding.norm]
        return calls[-1] if calls else None

    def readout(self, logits: Tensor) -> Readout:
        """How the last hidden embedding became these logits of the model, ``[query, token]``."""
        norm, name = self._norm, self.model.name
        frozen = None
        before = self.head[0]
        if norm is not None and norm.x is not None and norm.y is not None:
            assert self.unembedding.norm is not None
            frozen, before = FrozenNorm.at(self.unembedding.norm, norm.x, norm.y), norm.y
        head_factor = _ratio(self.head[0], before)
        if head_factor is None:
            raise ValueError(
                f"more than a factor lies between the final norm of {name} and its unembedding, so heads "
                "have no direct effects on logits"
            )
        factor = _ratio(logits, self.head[1])
        scaled = _wide(self.head[1]) * (1.0 if factor is None else factor)
        return Readout(self.unembedding, frozen, head_factor, factor or 1.0, scaled, factor is None)


def _block(trace: _Trace, layer: int) -> tuple[AttentionWrite, Tensor]:
    """What attention and what the rest of a block add.

    Raises:
        ValueError: If these are not found.
    """
    model = trace.model
    x, out = trace.rows[layer, "in"], trace.rows[layer, "out"]
    z = torch.unflatten(_wide(trace.rows[layer, "head"]), 1, (model.num_heads, -1)).transpose(0, 1)
    projection = model.output_projection(layer)
    plain = AttentionWrite(z, projection, 1.0, None)
    projected = torch.einsum("hqd,hdw->qw", z, projection.weight.to(z)) + plain.bias
    calls = trace.within(layer)
    added = _Sum(_wide(out) - _wide(x), x)
    for norm, attention in _attention_outputs(projected, calls, x):
        found = added.split(attention, [call.y for call in calls if call.y is not None])
        if found is not None:
            factor, mlp = found
            return AttentionWrite(z, projection, factor, norm), mlp
    raise ValueError(
        f"block {layer} of {model.name} does not add its attention and one feed-forward part to its input "
        "(it may normalise their sum, or have more parts), so its heads have no direct effects on logits; "
        "contributions do not need this"
    )


def _attention_outputs(
    projected: Tensor, calls: Sequence[_Call], x: Tensor
) -> Iterator[tuple[FrozenNorm | None, Tensor]]:
    """What attention may add: the projected outputs of heads, as they are or behind a norm."""
    yield None, projected
    for call in calls:
        if call.x is None or call.y is None or not _is_close(projected, _wide(call.x), call.x.dtype):
            continue
        try:
            yield FrozenNorm.at(call.module, call.x, call.y), _wide(call.y)
        except (ValueError, TypeError, RuntimeError):  # no norm, or called in another way
            continue


@dataclass(frozen=True)
class _Sum:
    """What a block adds to its input.

    Attributes:
        added: ``[query, width]``.
        x: The block's input of the same shape, in the model's dtype.
    """

    added: Tensor
    x: Tensor

    def split(self, attention: Tensor, outputs: Sequence[Tensor]) -> tuple[float, Tensor] | None:
        """The factor of attention and of one output of a module, and that output times the factor."""
        others = [torch.zeros_like(attention), *map(_wide, outputs)]
        for factor_of in (_one, _best_factor):
            factors = [factor_of(self.added, attention + other) for other in others]
            parts = [factor * (attention + other) for factor, other in zip(factors, others, strict=True)]
            errors = [float((self.added - one).norm()) for one in parts]
            best = min(range(len(errors)), key=errors.__getitem__)
            if errors[best] <= self._rounding:
                return factors[best], factors[best] * others[best]
        return None

    @property
    def _rounding(self) -> float:
        """The largest error of rounding, which is that of the stream to which the parts are added."""
        eps = torch.finfo(self.x.dtype).eps
        return float(TOLERANCE * self.added.norm() + 8 * eps * (self.x.norm() + self.added.norm()))


def _one(added: Tensor, parts: Tensor) -> float:
    """The factor of parts that are added as they are."""
    return 1.0


def _best_factor(added: Tensor, parts: Tensor) -> float:
    """The factor of the parts that comes nearest to what is added."""
    square = parts.square().sum()
    return float((added * parts).sum() / square) if square > 0 else 1.0


def _is_close(expected: Tensor, found: Tensor, dtype: torch.dtype) -> bool:
    limit = max(10 * TOLERANCE, 32 * torch.finfo(dtype).eps)
    return bool((expected - found).norm() <= limit * found.norm())


def _ratio(found: Tensor, before: Tensor) -> float | None:
    """The factor between two tensors, 1 exactly where they are as good as equal, or ``None`` without one."""
    wide, dtype = (_wide(found), _wide(before)), found.dtype
    if _is_close(wide[1], wide[0], dtype):
        return 1.0
    factor = _best_factor(*wide)
    return factor if _is_close(factor * wide[1], wide[0], dtype) else None


def _wide(value: Tensor) -> Tensor:
    """In at least single precision, outside inference mode."""
    return value.clone().to(torch.promote_types(value.dtype, torch.float32))
