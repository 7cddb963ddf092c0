"""Which reader makes the tokens of a model of ``transformers``."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from captum_hta.integrations.readers.audio import AudioReader
from captum_hta.integrations.readers.images import ImageReader
from captum_hta.integrations.readers.texts import PairReader, TextReader
from captum_hta.integrations.transformers.layouts import ANY_SIZE, AUDIO, IMAGES


def reader_for(
    base: Module, tokenizer: Any, part: str | None, name: str
) -> TextReader | PairReader | ImageReader | AudioReader:
    """The reader of a model, or of a part of it.

    Args:
        base: The base model.
        tokenizer: Its tokenizer; of a model of images its image processor, or ``None``; of one of audio
            its processor, or what of it the part needs.
        part: Which part of an encoder-decoder is meant.
        name: What to call the model.

    Raises:
        ValueError: If there is no tokenizer and one is needed, or a decoder's first token is not known.
        TypeError: If there is a tokenizer where an image processor is needed.
    """
    config = base.config
    if config.model_type in IMAGES:
        if hasattr(tokenizer, "convert_ids_to_tokens"):
            raise TypeError(f"{name} reads images: pass an image processor, got {type(tokenizer).__name__}")
        return ImageReader(
            tokenizer,
            (config.num_channels, *_both_sides(config.image_size)),
            _both_sides(config.patch_size),
            IMAGES[config.model_type],
            any_size=config.model_type in ANY_SIZE,
        )
    context = None
    if config.model_type in AUDIO:
        extractor, tokenizer = _halves(tokenizer)
        context = AudioReader(extractor, config.num_mel_bins, config.max_source_positions)
        if part == "encoder":
            return context
    if tokenizer is None:
        raise ValueError(f"{name} carries no tokenizer: pass tokenizer=")
    texts = TextReader(tokenizer, base.get_input_embeddings().weight.shape[0])
    if part in ("decoder", "cross"):
        return PairReader(context or texts, texts, _start(config, name), part == "cross")
    return texts


def _halves(processor: Any) -> tuple[Any, Any]:
    """The feature extractor and the tokenizer of a processor, or of what is one of them."""
    if hasattr(processor, "feature_extractor"):
        return processor.feature_extractor, processor.tokenizer
    return (processor, None) if hasattr(processor, "hop_length") else (None, processor)


def _both_sides(size: Any) -> tuple[int, int]:
    """Height and width of a size in a configuration, where one number stands for a square."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _start(config: Any, name: str) -> int:
    """The token that a decoder starts from."""
    for token in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        if getattr(config, token, None) is not None:
            return getattr(config, token)
    raise ValueError(f"{name} does not tell what its decoder starts from: set decoder_start_token_id")
