"""What the blocks of a model compute when it is called as its user would call it."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from captum_hta.integrations.adapter import long_sample
from captum_hta.integrations.readers.texts import TextReader
from captum_hta.integrations.transformers.reading import longest_window, model_arguments, vocabulary_of
from captum_hta.integrations.transformers.structure import Structure, structure_of
from captum_hta.integrations.transformers.trace import traced
from captum_hta.integrations.transformers.wrappers import unwrapped
from captum_hta.model.sites import Site, observed


class GivenModel:
    """A text model before TransformerLens changes it: the outputs of its blocks on a few tokens.

    Args:
        model: The model.
        tokenizer: Its tokenizer.

    Attributes:
        model: The model.
        batch: The tokens.
        values: Targets of every block, as :meth:`captum_hta.integrations.proof.Proof.sites_of_blocks` names
            them.
    """

    def __init__(self, model: Module, tokenizer: Any) -> None:
        self.model = model
        inner = unwrapped(model)
        base = cast(PreTrainedModel, inner.base_model)
        reader = TextReader(tokenizer, vocabulary_of(base))
        sample = long_sample(reader, longest_window(base.config), None)
        self.batch = reader.batch([sample], inner.device)
        arguments = model_arguments(base, *self.batch.inputs, *self.batch.extra)
        trace = traced(base, lambda: base(**arguments))
        sites = _sites(structure_of(base, trace, None, None))
        self.values: dict[str, Tensor] = observed(sites, lambda: model(**arguments))


def _sites(structure: Structure) -> dict[str, Module | Site]:
    sites: dict[str, Module | Site] = {}
    for layer, place in enumerate(structure.places):
        sites[f"head {layer}"] = Site(place.projection, at_input=True, call=place.inner_call)
        sites[f"layer {layer}"] = Site(place.block, call=place.call, item=0)
    return sites
