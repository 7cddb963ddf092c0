"""The parts of a model: encoder, decoder and cross attention of encoder-decoder models, towers of others."""

from __future__ import annotations

import inspect
from typing import Any, cast

from torch.nn import Module
from transformers import PreTrainedModel

MEDIA = {
    "input_ids": "text",
    "pixel_values": "image",
    "input_features": "audio",
    "input_values": "audio",
}
"""What a model reads, by the name of its main input."""
PARTS = ("encoder", "decoder", "cross")
"""The parts of encoder-decoder models."""
TOWERS = ("text", "image", "audio")
"""The parts of models that read several media, each by a model of its own."""


def medium_of(model: PreTrainedModel, part: str | None = None) -> str:
    """What a model, or a part of it, reads: ``"text"``, ``"image"`` or ``"audio"``.

    Raises:
        ValueError: If it is none of them.
    """
    base: Any = base_of(model, part)
    medium = MEDIA.get(base.main_input_name)
    if medium is None:
        raise ValueError(
            f"{type(model).__name__} reads {base.main_input_name}, which this package does not: use the "
            "class HiddenTokenAttribution, which takes any PyTorch model"
        )
    return medium


def base_of(model: PreTrainedModel, part: str | None = None) -> PreTrainedModel:
    """The model without its head, or the tower that a part names.

    Raises:
        ValueError: If there is no such tower.
    """
    base = cast(PreTrainedModel, model.base_model)
    if base.main_input_name not in inspect.signature(base.forward).parameters:
        base = model  # what is called its base is a module within it
    if part not in TOWERS:
        return base
    found = _towers(base).get(part)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} has no part {part!r}: leave out --part, or part=. {named_parts(base)}"
        )
    return found


def _towers(base: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """The models within a model, by what they read; the outermost of each kind."""
    towers: dict[str, PreTrainedModel] = {}
    for module in base.modules():
        if module is not base and isinstance(module, PreTrainedModel) and module.main_input_name in MEDIA:
            towers.setdefault(MEDIA[module.main_input_name], module)
    return towers


def named_parts(base: PreTrainedModel) -> str:
    """The parts of a model that reads several media, in a sentence for errors; empty if it has none."""
    towers = _towers(base)
    named = " or ".join(map(repr, towers))
    return f"It has parts: name one, --part or part={named}. " if len(towers) > 1 else ""


def has_both(base: Module) -> bool:
    """Whether a model is an encoder and a decoder."""
    return isinstance(getattr(base, "encoder", None), Module) and isinstance(
        getattr(base, "decoder", None), Module
    )


def part_of_model(model: PreTrainedModel, part: str | None) -> str | None:
    """The part of a model that is meant, as :func:`part_of` tells it.

    Raises:
        ValueError: If a part is missing, or unknown.
    """
    return part_of(model.config, type(model).__name__, part, has_both(model.base_model))


def part_of(
    config: Any, architecture: str | None = None, part: str | None = None, is_pair: bool = False
) -> str | None:
    """The part that is meant: the encoder where a class is one, and otherwise the one that is named.

    Args:
        config: The configuration.
        architecture: Name of the model's class. Default: ``None``, the class that the configuration names.
        part: The part that is named.
        is_pair: Whether it is known to be an encoder and a decoder. Default: ``False``, the configuration
            tells it.

    Raises:
        ValueError: If a part is missing, or unknown.
    """
    if not is_pair and not getattr(config, "is_encoder_decoder", False):
        if part in PARTS:
            raise ValueError(f"{config.model_type!r} has no parts: leave out --part, or part=")
        return _checked(part)
    if "EncoderModel" in (architecture or _named_class(config)) and part is None:
        return "encoder"
    if part not in PARTS:
        raise ValueError(
            f"{config.model_type!r} is an encoder and a decoder: name the part (--part, or part=), encoder, "
            f"decoder (its self-attention) or cross (its attention to the encoder), got {part}"
        )
    return part


def _checked(part: str | None) -> str | None:
    if part not in (None, *TOWERS):
        raise ValueError(f"part must be one of {', '.join((*PARTS, *TOWERS))} or None, got {part!r}")
    return part


def _named_class(config: object) -> str:
    names: list[str] = getattr(config, "architectures", None) or [""]
    return names[0]


def encoder_of(base: PreTrainedModel) -> Module | None:
    """The encoder of an encoder-decoder model; ``None`` for a model that is one part only."""
    if not has_both(base):
        return None
    return cast(Module, base.get_encoder())
