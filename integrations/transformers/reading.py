"""The reader of a model of ``transformers``: what it reads, and how much of it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from captum_hta.integrations.readers.audio import AudioReader
from captum_hta.integrations.readers.images import ImageReader
from captum_hta.integrations.readers.pairs import PairReader
from captum_hta.integrations.readers.texts import TextReader
from captum_hta.integrations.readers.waves import WaveReader
from captum_hta.integrations.transformers.parts import medium_of, named_parts
from captum_hta.integrations.weights import weight_of
from captum_hta.model.protocol import Reader


def reader_for(base: PreTrainedModel, tokenizer: Any, part: str | None, name: str) -> Reader:
    """The reader of a model, or of a part of it.

    Args:
        base: The base model.
        tokenizer: Its tokenizer; for vision models the image processor, or ``None``; for audio models the
            processor, or what the part needs of it.
        part: The part of an encoder-decoder model.
        name: What to call the model.

    Raises:
        ValueError: If a tokenizer is needed and there is none, or the first token of a decoder is unknown.
        TypeError: If there is a tokenizer where an image processor is needed.
    """
    config: Any = base.config
    medium = medium_of(base)
    if medium == "image":
        return _image_reader(config, tokenizer, name)
    context: AudioReader | WaveReader | None = None
    if medium == "audio":
        extractor, tokenizer = _split_processor(tokenizer)
        context = _audio_reader(config, extractor, name)
        if part in ("encoder", None):
            return context
    if tokenizer is None:
        raise ValueError(f"{name} carries no tokenizer: pass tokenizer=")
    texts = TextReader(tokenizer, vocabulary_of(base))
    if part in ("decoder", "cross"):
        return PairReader(context or texts, texts, _start_token(config, name), part == "cross")
    return texts


def vocabulary_of(model: PreTrainedModel) -> int:
    """The number of token ids that a model embeds.

    Raises:
        ValueError: If it has no embedding of tokens of its own.
    """
    try:
        return weight_of(model.get_input_embeddings()).shape[0]
    except NotImplementedError as error:
        raise ValueError(
            f"{type(model).__name__} has no embedding of tokens of its own. {named_parts(model)}The class "
            "HiddenTokenAttribution takes any PyTorch model"
        ) from error


def longest_text(base: PreTrainedModel) -> int | None:
    """The length of the longest text that the positions of a model allow."""
    if not getattr(base.config, "position_biased_input", True):
        return None  # DeBERTa without absolute positions
    names = ("max_target_positions", "max_position_embeddings")
    config = base.config.get_text_config()
    lengths = (getattr(config, name) for name in names if hasattr(config, name))
    longest: int | None = next(lengths, None)
    table = getattr(getattr(base, "embeddings", None), "position_embeddings", None)
    padding: int | None = getattr(table, "padding_idx", None)
    return longest if longest is None or padding is None else longest - padding - 1


def model_arguments(
    base: PreTrainedModel, ids: Tensor | None, mask: Tensor | None, segments: Tensor | None = None
) -> dict[str, Any]:
    """The keyword arguments of a model, as its user would pass them: segments if it has several."""
    parameters = inspect.signature(base.forward).parameters
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments: dict[str, Any] = {base.main_input_name: ids, "attention_mask": mask}
    if "attention_mask" not in parameters and not takes_any:
        del arguments["attention_mask"]
    if "use_cache" in parameters:
        arguments["use_cache"] = False
    if "token_type_ids" in parameters and getattr(base.config, "type_vocab_size", 0) > 1:
        arguments["token_type_ids"] = segments
    return arguments


_WINDOWS = (
    "sliding_window",
    "attention_window",
    "attention_chunk_size",
    "chunk_size_feed_forward",
    "original_max_position_embeddings",
)
"""Names in configurations of lengths at which a model's behaviour changes."""


def longest_window(config: Any) -> int:
    """The largest length at which the behaviour of a model changes, or 0."""
    lengths = (getattr(config, name, None) for name in _WINDOWS)
    return max((length for length in lengths if isinstance(length, int)), default=0)


def rope_thresholds(config: Any) -> list[int]:
    """The lengths of a batch beyond which its rotary embedding takes other frequencies (``longrope``)."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    found = set()
    for kind in kinds:
        if "longrope" in (kind.get("rope_type"), kind.get("type")):
            known = kind.get("original_max_position_embeddings")
            found.add(known or getattr(config, "original_max_position_embeddings", None))
    return sorted(length for length in found if length)


def _image_reader(config: Any, processor: Any, name: str) -> ImageReader:
    if not all(hasattr(config, one) for one in ("image_size", "patch_size", "num_channels")):
        raise ValueError(
            f"{name} reads images whose size, patches or channels its configuration does not name: use the "
            "class HiddenTokenAttribution, which takes any PyTorch model"
        )
    if hasattr(processor, "convert_ids_to_tokens"):
        raise TypeError(f"{name} reads images: pass an image processor, got {type(processor).__name__}")
    return ImageReader(
        processor,
        (config.num_channels, *_height_and_width(config.image_size)),
        _height_and_width(config.patch_size),
        (),
    )


def _audio_reader(config: Any, extractor: Any, name: str) -> AudioReader | WaveReader:
    """The reader of audio, as features of fixed length or as a wave.

    Raises:
        ValueError: If the configuration names neither.
    """
    if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        return AudioReader(extractor, config.num_mel_bins, config.max_source_positions)
    if hasattr(config, "conv_kernel") and hasattr(config, "conv_stride"):
        return WaveReader(extractor, config.conv_kernel, config.conv_stride)
    raise ValueError(
        f"{name} reads audio neither as features of a fixed length nor by convolutions that its "
        "configuration names: use the class HiddenTokenAttribution, which takes any PyTorch model"
    )


def _split_processor(processor: Any) -> tuple[Any, Any]:
    """The feature extractor and the tokenizer of a processor, or of an object that is one of them."""
    if hasattr(processor, "feature_extractor"):
        return processor.feature_extractor, processor.tokenizer
    return (processor, None) if hasattr(processor, "hop_length") else (None, processor)


def _height_and_width(size: Any) -> tuple[int, int]:
    """Height and width of a size in a configuration, where one number stands for a square."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _start_token(config: Any, name: str) -> int:
    """The token that a decoder starts with."""
    for key in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        token: int | None = getattr(config, key, None)
        if token is not None:
            return token
    raise ValueError(
        f"the first token of the decoder of {name} is not known: set decoder_start_token_id in its config"
    )
