"""Layers and heads of a model from its configuration alone, before any weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import transformers

from captum_hta.integrations.transformers.pretrained import located


@dataclass(frozen=True)
class Dimensions:
    """Layers and heads, as a configuration names them.

    Attributes:
        name: What the model will be called.
        layers: Number of blocks.
        heads: Query heads of a block.
    """

    name: str
    layers: int
    heads: int


def configured_dimensions(model: str | None, part: str | None = None) -> Dimensions | None:
    """Layers and heads of a model, or ``None`` where its configuration does not say.

    Args:
        model: A folder, a ``.gguf`` file or a name on the Hugging Face hub; ``None`` for the demo model.
        part: Part of an encoder-decoder model, as in :func:`captum_hta.load_model`.
    """
    path, file = located(model)
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, **file)
    except (OSError, ValueError):  # loading the model raises the error that explains it
        return None
    decoder = part in ("decoder", "cross")
    layers = ("decoder_layers", "num_decoder_layers") if decoder else ()
    heads = ("decoder_attention_heads",) if decoder else ()
    counts = (_first(config, *layers, "num_hidden_layers"), _first(config, *heads, "num_attention_heads"))
    if counts[0] is None or counts[1] is None:
        return None
    return Dimensions(
        "all-MiniLM-L6-v2" if model is None else Path(file.get("gguf_file", path)).name, counts[0], counts[1]
    )


def _first(config: transformers.PretrainedConfig, *names: str) -> int | None:
    """The first of these attributes that is a number."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)
