"""The two ends of contributions in a model: the source that enters a block, and targets in some layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from captum_hta.jacobian.arguments import as_int, choice, is_integer
from captum_hta.model.protocol import Model

SOURCES = ("input", "previous_layer")
TARGETS = ("head", "layer")


@dataclass(frozen=True)
class Endpoints:
    """A source and targets, checked against a model by :func:`endpoints` or :func:`endpoints_of`.

    Attributes:
        source: One of :data:`SOURCES`, or the number of the block that the source enters.
        target: One of :data:`TARGETS`.
        layers: The layers of the targets.
        key_layers: For cross attention the number of encoder blocks; ``None`` for self-attention.
        first_entry: The number of the source ``"input"``, as :class:`captum_hta.model.protocol.Model` has it.
    """

    source: str | int
    target: str
    layers: tuple[int, ...]
    key_layers: int | None = None
    first_entry: int = 0

    def entry(self, layer: int) -> int:
        """The block that the source of a layer's target enters; for cross attention, of the encoder."""
        if isinstance(self.source, int):
            return self.source
        if self.source == "input":
            return self.first_entry
        return layer if self.key_layers is None else self.key_layers

    @property
    def entries(self) -> list[int]:
        """The blocks that sources enter, in order."""
        return sorted(set(map(self.entry, self.layers)))

    @property
    def is_own_block(self) -> bool:
        """Whether the source of every target enters the target's own block."""
        return self.key_layers is None and all(self.entry(layer) == layer for layer in self.layers)


def endpoints_of(model: Model, source: object, target: object, layers: object) -> Endpoints:
    """The endpoints in a model.

    Raises:
        ValueError: If there is no such source, target or layer, or a layer comes before the source.
        TypeError: If an argument is of a wrong type.
    """
    ends = endpoints(model.num_layers, source, target, layers, model.key_layers, model.name)
    return replace(ends, first_entry=model.first_entry)


def endpoints(
    num_layers: int,
    source: object,
    target: object,
    layers: object,
    key_layers: int | None = None,
    name: str = "the model",
) -> Endpoints:
    """The endpoints in a model of ``num_layers`` blocks; see :func:`endpoints_of`."""
    entry = _source(source, num_layers - 1 if key_layers is None else key_layers, name)
    first = entry if isinstance(entry, int) and key_layers is None else 0
    named = _layers(num_layers, layers, first, name)
    if min(named) < first:
        raise ValueError(f"layer {min(named)} comes before the source, block {first}: leave it out of layers")
    return Endpoints(entry, choice("target", target, TARGETS), named, key_layers)


def layers_of(model: Model, layers: object) -> list[int]:
    """The numbers of layers, negative ones from the end; ``None`` for all.

    Raises:
        ValueError: If the model has no such layer, none is named, or one is named twice.
        TypeError: If they are not ints.
    """
    return list(_layers(model.num_layers, layers, 0, model.name))


def _source(source: object, last: int, name: str) -> str | int:
    if is_integer(source):
        block = as_int(source)
        if not 0 <= block <= last:
            raise ValueError(f"source {block} is no block: {name} has 0 to {last}")
        return block
    if isinstance(source, str) and source in SOURCES:
        return source
    wrong = ValueError if isinstance(source, str) else TypeError
    raise wrong(f"source must be 'input', 'previous_layer' or an int, got {source!r}")


def _layers(num_layers: int, layers: object, first: int, name: str) -> tuple[int, ...]:
    if layers is None:
        return tuple(range(first, num_layers))
    several = layers.tolist() if isinstance(layers, np.ndarray | Tensor) else layers
    several = [several] if is_integer(several) else several
    if not isinstance(several, Sequence) or isinstance(several, str) or not all(map(is_integer, several)):
        raise TypeError(f"layers must be an int, a list of ints or None, got {layers!r}")
    named = [as_int(layer) for layer in several]
    outside = [layer for layer in named if not -num_layers <= layer < num_layers]
    if outside or not named:
        raise ValueError(f"layers names {outside or 'none'}, but {name} has layers 0 to {num_layers - 1}")
    counted = [layer % num_layers for layer in named]
    twice = sorted({layer for layer in counted if counted.count(layer) > 1})
    if twice:
        raise ValueError(f"layers names {twice} more than once: name each layer once")
    return tuple(counted)
