"""The structure of a model, found in the trace of one forward pass: blocks, heads, projections and norms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor
from torch.nn import LayerNorm, Module, ModuleDict, ModuleList, Sequential

from captum_hta.integrations.transformers.attention import AttentionCall
from captum_hta.integrations.transformers.layouts import Layout, layout_of
from captum_hta.integrations.transformers.trace import Heads, ModuleCall, Trace, is_norm, same
from captum_hta.model.sites import Site


@dataclass(frozen=True)
class Place:
    """One block as a model runs it.

    Attributes:
        block: The block.
        attention: The module that computes its attention.
        projection: The module that reads the outputs of its heads, side by side.
        call: The number of this call, for blocks that run several times; ``None`` for the others.
        inner_call: The same for ``attention`` and ``projection``.
        sum_norm: For post-LN blocks the module that normalises the sum of the block's input and its heads'
            outputs; ``None`` for pre-LN blocks.
        residual: Whether the projected outputs of heads are added to the block's input without a norm or
            scale of their own.
        gated: Whether ``projection`` reads the outputs of heads multiplied by a gate.
        layout: How queries, keys and values are computed; ``None`` if the closed form does not know it.
    """

    block: Module
    attention: Module
    projection: Module
    call: int | None = None
    inner_call: int | None = None
    sum_norm: Module | None = None
    residual: bool = True
    gated: bool = False
    layout: Layout | None = None


@dataclass(frozen=True)
class Structure:
    """What was found in a model.

    Attributes:
        places: The blocks with attention, in the order in which they run.
        num_heads, key_heads, d_head, d_model: Their dimensions.
        inner: Inner width of the feed-forward part; ``None`` if it is not known.
        gated: Whether that has a gate.
        gaps: Numbers of blocks after which blocks without attention run.
        first: The first block of all, if it is one without attention.
        final_norm: The module that normalises the output of the last block, or ``None``.
        memory: For cross attention the inputs of the encoder's blocks, and what the decoder reads of it.
        written_out: Whether attention is computed by functions of PyTorch, not by the attention interface of
            ``transformers``.
    """

    places: Sequence[Place]
    num_heads: int
    key_heads: int
    d_head: int
    d_model: int
    inner: int | None
    gated: bool
    gaps: frozenset[int]
    first: Module | None
    final_norm: Module | None
    memory: Sequence[Site] | None
    written_out: bool


class StructureError(ValueError):
    """What was found in a model does not fit together."""


def structure_of(model: Module, trace: Trace, part: str | None, encoder: Module | None) -> Structure:
    """Find the structure of a model, or of one part of an encoder-decoder model.

    Args:
        model: The model.
        trace: The trace of a forward pass, with different numbers of tokens for encoder and decoder.
        part: ``"decoder"`` or ``"cross"`` for these parts; ``None`` for all attention that is not cross
            attention.
        encoder: The encoder, for these parts; ``None`` for others.

    Raises:
        StructureError: If the parts do not fit together.
    """
    _require_every_attention(trace)
    heads = _chosen(trace, part, encoder)
    blocks = _blocks(model, heads)
    _require_hidden(blocks)
    pattern, value = heads[0].attention.pattern, heads[0].attention.value
    inner, gated = _feed_forward(trace, blocks[0], heads[0])
    return Structure(
        places=[_place(trace, block, one) for block, one in zip(blocks, heads, strict=True)],
        num_heads=pattern.shape[1],
        key_heads=value.shape[1],
        d_head=_one_width(heads),
        d_model=_width(blocks[0]),
        inner=inner,
        gated=gated,
        gaps=_gaps(model, blocks),
        first=_first(model, trace, blocks[0]),
        final_norm=_final_norm(trace, blocks[-1]),
        memory=_memory(model, trace, encoder) if part == "cross" and encoder is not None else None,
        written_out=trace.written_out,
    )


def _require_every_attention(trace: Trace) -> None:
    """Check that attention was seen in every call of the modules that compute it elsewhere.

    It is not where a ``forward`` was replaced by a function that keeps the module of another model.

    Raises:
        StructureError: If it was not; names the module.
    """
    kinds = {type(one.call.module) for one in trace.heads}
    seen = {one.call for one in trace.heads}
    for number, call in enumerate(call for call in trace.calls if type(call.module) in kinds):
        if call not in seen:
            raise StructureError(
                f"call {number} of {type(call.module).__name__} computes no attention that can be seen, "
                "where others do: its forward was replaced, or depends on the text"
            )


def _chosen(trace: Trace, part: str | None, encoder: Module | None) -> list[Heads]:
    """The attention of a part, of one number of tokens.

    Raises:
        StructureError: If there is none, or no module reads the outputs of heads.
    """
    outside = [one for one in trace.heads if encoder is None or not _is_within(one.call, encoder)]
    if part == "cross":
        found = [one for one in outside if one.lengths[0] != one.lengths[1]]
    else:
        own = [one for one in outside if one.lengths[0] == one.lengths[1] > 1]
        usual = Counter(one.lengths for one in own).most_common(1)
        found = [one for one in own if one.lengths == usual[0][0]]
    if not found:
        raise StructureError("no attention over the tokens was seen: no softmax of scores multiplies values")
    unread = [one for one in found if _reader(one) is None]
    if unread:
        kind = type(unread[0].call.module).__name__
        raise StructureError(
            f"no module reads the outputs of the heads that {kind} computes, side by side and as they are: "
            "the pattern times the values is not the input of any module that follows"
        )
    return found


def _reader(heads: Heads) -> ModuleCall | None:
    """The call of the module that reads the outputs of heads, perhaps behind a gate."""
    return heads.reader or (heads.gated_reader if isinstance(heads.attention, AttentionCall) else None)


def _is_within(call: ModuleCall, module: Module) -> bool:
    return any(one.module is module for one in call.ancestors)


def _blocks(model: Module, heads: Sequence[Heads]) -> list[ModuleCall]:
    """For each attention the call of its block: the outermost item of a list that holds no other attention.

    Without such a list it is the outermost module that holds no other attention.
    """
    counts = Counter(call for one in heads for call in one.call.ancestors)
    items = {item for modules in _lists(model) for item in modules}
    found = []
    for one in heads:
        alone = [call for call in one.call.ancestors[1:] if counts[call] == 1]
        listed = [call for call in alone if call.module in items]
        if not alone:
            raise StructureError(f"{type(one.call.module).__name__} computes attention outside any block")
        found.append((listed or alone)[0])
    return found


def _lists(model: Module) -> Iterable[Sequence[Module]]:
    for module in model.modules():
        if isinstance(module, ModuleList | Sequential):
            yield list(module)
        elif isinstance(module, ModuleDict):
            yield list(module.values())


def _require_hidden(blocks: Sequence[ModuleCall]) -> None:
    """Check that blocks read and return hidden embeddings ``[batch, token, width]`` of one width."""
    for block in blocks:
        name = type(block.module).__name__
        if block.x is None or block.x.dim() != 3:
            raise StructureError(f"the first argument of {name} is no hidden embedding [batch, token, width]")
        if block.out is None or block.out.shape != block.x.shape:
            found = None if block.out is None else list(block.out.shape)
            raise StructureError(
                f"{name} reads hidden embeddings {list(block.x.shape)} but returns {found} in the first place"
            )
    widths = sorted({_width(block) for block in blocks})
    if len(widths) > 1:
        raise StructureError(f"blocks have hidden embeddings of different widths: {widths}")


def _width(block: ModuleCall) -> int:
    assert block.x is not None
    return block.x.shape[-1]


def _one_width(heads: Sequence[Heads]) -> int:
    """The width of a head, the same in every block."""
    found = {(one.attention.pattern.shape[1], one.outputs.shape[-1]) for one in heads}
    if len(found) > 1:
        shapes = ", ".join(f"{count} heads, {width} wide together" for count, width in sorted(found))
        raise StructureError(f"blocks have different heads: {shapes}")
    count, width = found.pop()
    return width // count


def _place(trace: Trace, block: ModuleCall, heads: Heads) -> Place:
    reader = _reader(heads)
    assert reader is not None
    sum_norm, residual = _residual(trace, block, reader)
    counts = Counter(call.module for call in trace.calls)
    repeated = counts[heads.call.module] > 1
    return Place(
        block=block.module,
        attention=heads.call.module,
        projection=reader.module,
        call=block.number if counts[block.module] > 1 else None,
        inner_call=heads.call.number if repeated else None,
        sum_norm=sum_norm,
        residual=residual,
        gated=heads.reader is None,
        layout=None if heads.reader is None else layout_of(trace.within(block), block, heads),
    )


def _residual(trace: Trace, block: ModuleCall, reader: ModuleCall) -> tuple[Module | None, bool]:
    """The norm of the sum of a post-LN block, and whether the outputs of heads are added as they are."""
    calls = [block, *trace.within(block)]
    streams = [
        value + reader.out
        for call in calls
        if call.order <= reader.order
        for value in (call.x, call.out)
        if value is not None and reader.out is not None and value.shape == reader.out.shape
    ]
    for call in calls:
        if call.order > reader.order and any(same(call.x, stream) for stream in streams):
            later = [block.out, *(one.x for one in calls if one.order > call.order)]
            goes_on = any(_is_rest(value, call.x, other.out) for value in later for other in calls)
            is_post = isinstance(call.module, LayerNorm) and not goes_on
            return (call.module if is_post else None), True
    parallel = block.x is not None and reader.out is not None and block.x.shape == reader.out.shape
    added = block.x + reader.out if parallel else None  # type: ignore[operator]
    return None, same(block.out, added) or any(_is_rest(block.out, added, call.out) for call in calls)


def _is_rest(value: Tensor | None, first: Tensor | None, second: Tensor | None) -> bool:
    """Whether a tensor is the sum of two others."""
    if value is None or first is None or second is None or not value.shape == first.shape == second.shape:
        return False
    return same(value, first + second)


def _feed_forward(trace: Trace, block: ModuleCall, heads: Heads) -> tuple[int | None, bool]:
    """Inner width of the feed-forward part of a block, and whether it has a gate."""
    width = _width(block)
    calls = [
        one for one in trace.within(block) if heads.call not in one.ancestors and one is not _reader(heads)
    ]
    maps = [_widths(one) for one in calls if _has_matrix(one)]
    inner = [read for read, written in maps if written == width != read]
    if not inner:
        return None, False
    return inner[-1], sum(written for read, written in maps if read == width) >= 2 * inner[-1]


def _has_matrix(call: ModuleCall) -> bool:
    return any(parameter.dim() == 2 for parameter in call.module.parameters(recurse=False))


def _widths(call: ModuleCall) -> tuple[int, int]:
    """The widths of what a call reads and returns."""
    return (0 if call.x is None else call.x.shape[-1], 0 if call.out is None else call.out.shape[-1])


def _gaps(model: Module, blocks: Sequence[ModuleCall]) -> frozenset[int]:
    """Numbers of blocks that other items of the same list follow before the next block."""
    found = []
    for number, (block, following) in enumerate(pairwise(blocks)):
        for modules in _lists(model):
            if block.module in modules and following.module in modules:
                found += [number] * (modules.index(following.module) - modules.index(block.module) > 1)
    return frozenset(found)


def _first(model: Module, trace: Trace, block: ModuleCall) -> Module | None:
    """The item that runs first of the list of a block, if it is another one."""
    modules = {item for items in _lists(model) if block.module in items for item in items}
    before = [call for call in trace.calls if call.module in modules and call.parent is block.parent]
    first = before[0] if before else block
    if first is block:
        return None
    _require_hidden([first])
    return first.module


def _final_norm(trace: Trace, block: ModuleCall) -> Module | None:
    """The module that normalises what the last block returns."""
    readers = [call for call in trace.calls if call.order > block.order and same(call.x, block.out)]
    norms = [call for call in readers if block not in call.ancestors and is_norm(call)]
    return norms[-1].module if norms else None


def _memory(model: Module, trace: Trace, encoder: Module) -> list[Site]:
    """The inputs of the encoder's blocks, and what cross attention reads.

    Raises:
        StructureError: If no module of the encoder returns what the decoder reads.
    """
    own = [one for one in trace.heads if _is_within(one.call, encoder)]
    if not own:
        raise StructureError("no attention over the tokens was seen in the encoder")
    blocks = _blocks(model, own)
    _require_hidden(blocks)
    within = [call for call in trace.calls if _is_within(call, encoder) and call.order >= blocks[-1].order]
    outside = [call for call in trace.calls if not _is_within(call, encoder)]
    counts = Counter(call.module for call in trace.calls)
    ends = [
        call
        for call in within
        if counts[call.module] == 1 and any(same(call.out, other.x) for other in outside)
    ]
    if not ends:
        raise StructureError("no module of the encoder returns what the decoder's cross attention reads")
    return [*(Site(block.module, at_input=True) for block in blocks), Site(ends[-1].module, item=0)]
