"""The error for a model whose structure cannot be proven: what was found, and how to name modules by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor
from torch.nn import Module

from captum_hta.integrations.transformers.trace import Heads, Trace


def refusal(model: Module, trace: Trace, reason: str) -> str:
    """The error, with what was found, what did not fit, and the lines that name the modules by hand.

    Args:
        model: The model.
        trace: A trace of one forward pass.
        reason: What did not fit.
    """
    names = {module: name for name, module in model.named_modules()}
    kind = type(model).__name__
    return (
        f"{kind} cannot be loaded, since what was found in it does not fit: {reason}\n"
        f"Found in one forward pass: {_found(trace.heads, names)}.\n"
        "The Captum class takes any PyTorch model; name the modules by hand:\n\n" + by_hand(model, trace)
    )


def by_hand(model: Module, trace: Trace) -> str:
    """The lines of Python that attribute to the heads of a model by the Captum class, as far as was found."""
    names = {module: name for name, module in model.named_modules()}
    read = [one for one in trace.heads if one.reader is not None]
    layer, heads = "model.path.to.the.output_projection", "the number of heads"
    source = _path(names.get(_embedding(model), "path.to.the.embedding"))
    if read and read[-1].reader is not None:
        layer = _path(names[read[-1].reader.module])
        heads = str(read[-1].attention.pattern.shape[1])
    return (
        "    from captum_hta import HiddenTokenAttribution\n"
        f"    hta = HiddenTokenAttribution(model, {layer}, source_layer={source}, num_heads={heads})\n"
        "    contributions = hta.attribute(inputs, attribute_to_neuron_input=True)\n"
    )


def _embedding(model: Module) -> Module | None:
    """The module that embeds the tokens."""
    get = getattr(model, "get_input_embeddings", None)
    try:
        return None if get is None else get()
    except NotImplementedError:
        return None


def _path(name: str) -> str:
    """The Python of a module's path, with list items in brackets."""
    return "model." + re.sub(r"\.(\d+)", r"[\1]", name) if name else "model"


def _found(heads: Sequence[Heads], names: dict[Module, str]) -> str:
    if not heads:
        return "no attention"
    first, count = heads[0], len(heads)
    reader = "no module" if first.reader is None else names[first.reader.module]
    pattern: Tensor = first.attention.pattern
    return (
        f"attention in {count} place{'s' * (count > 1)}, first in "
        f"{names[first.call.module] or 'the model itself'} ({pattern.shape[1]} heads, {pattern.shape[2]} "
        f"queries, {pattern.shape[3]} keys), whose heads' outputs {reader} reads"
    )
