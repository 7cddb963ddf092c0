"""The layout of model classes: where their blocks, heads and projections are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch.nn import Module, ModuleList
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Layout:
    """The layout of one kind of model, with module names relative to the base model or to a block.

    Attributes:
        blocks: The list of blocks.
        attention: The module of a block that computes attention.
        projection: The module of a block that mixes the outputs of its heads.
        projections: Within ``attention``, the modules that compute queries, keys and values, or the single
            module that computes all three; empty if the closed form is not known.
        joined: How a single module computes all three: ``"parts"``, one after the other; ``"heads"``, the
            three of each head together.
        norm: The module of a block that normalises the input of the projections; ``None`` for post-LN blocks.
        unit_offset: Whether the norm's weight is stored as its difference from one.
        gated: Whether the feed-forward layer has a gate.
        scales_queries: Whether queries are multiplied by the ``scaling`` of ``attention`` when they are
            computed, instead of the scores.
        memory: For encoders, the module whose output a decoder attends to; ``None`` for the last block.
        sum_norm: The module of a post-LN block that normalises the sum of its input and its heads' outputs;
            ``None`` for pre-LN blocks.
        residual: Whether the projected outputs of heads are added to the block's input without a norm or
            scale of their own.
        final_norm: The module of the base model after its last block; ``None`` if there is none.
        direct_head: Whether only ``final_norm`` lies between the last block and the logits of tokens.
    """

    blocks: str
    attention: str
    projection: str
    projections: tuple[str, ...] = ()
    joined: Literal["", "parts", "heads"] = ""
    norm: str | None = None
    unit_offset: bool = False
    gated: bool = False
    scales_queries: bool = False
    memory: str | None = None
    sum_norm: str | None = None
    residual: bool = True
    final_norm: str | None = None
    direct_head: bool = False

    def places(self, base: PreTrainedModel) -> list[Place]:
        """The blocks of a model, in the order in which they run."""
        return [self._place(block) for block in _listed(base, self.blocks)]

    def _place(self, block: Module, call: int | None = None) -> Place:
        try:
            attention, projection = map(block.get_submodule, (self.attention, self.projection))
        except AttributeError as error:
            raise ValueError(
                f"a {type(block).__name__} is not laid out as transformers has it ({error}): something wraps "
                "or replaces its modules, so undo that, as merge_and_unload() of PEFT does for its adapters"
            ) from error
        return Place(block, attention, projection, call)


@dataclass(frozen=True)
class SharedLayout(Layout):
    """ALBERT: groups of blocks that run several times."""

    def places(self, base: PreTrainedModel) -> list[Place]:
        """The blocks of a model, once for each time that they run."""
        return list(self._calls(base))

    def _calls(self, base: PreTrainedModel) -> Iterator[Place]:
        groups = _listed(base, self.blocks)
        layers = int(base.config.num_hidden_layers)
        calls: dict[Module, int] = {}
        for layer in range(layers):
            for block in _listed(groups[layer * len(groups) // layers], "albert_layers"):
                call = calls.get(block, 0)
                calls[block] = call + 1
                yield self._place(block, call)


@dataclass(frozen=True)
class Place:
    """One block as a model runs it.

    Attributes:
        block: The block.
        attention: Its attention.
        projection: Its output projection.
        call: The number of this call, for blocks that run several times.
    """

    block: Module
    attention: Module
    projection: Module
    call: int | None = None


def _listed(parent: Module, name: str) -> ModuleList:
    blocks = parent.get_submodule(name)
    assert isinstance(blocks, ModuleList)
    return blocks
