"""Loading of any model by name, folder or object, with the adapter that fits it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from captum_hta.integrations.transformer_lens.adapter import (
    _POST_NORM,
    TransformerLensModel,
    _bridges,
    has_bridges,
    is_bridge,
)
from captum_hta.integrations.transformer_lens.hooked import HookedModel
from captum_hta.integrations.transformers.adapter import TransformersModel
from captum_hta.integrations.transformers.layouts import AUDIO, IMAGES, layout_for
from captum_hta.integrations.transformers.loading import (
    demo_path,
    load_pretrained,
    load_processor,
    load_tokenizer,
)

_BY_BRIDGE = (*_POST_NORM, "BertModel", "RobertaModel")
"""Classes that are bridged by default; those with other heads would lose them."""


def load_model(
    model: str | Path | Module | None = None,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    adapter: str | None = None,
    part: str | None = None,
    **options: Any,
) -> TransformerLensModel | HookedModel | TransformersModel:
    """Load a model: a BERT or RoBERTa, bare or a masked language model, through TransformerLens; others as
    ``transformers`` has them.

    Args:
        model: A name on the Hugging Face hub, a folder, a model of ``transformers`` (with its
            ``tokenizer``), or one of TransformerLens, which is used as it is: a ``TransformerBridge``, a
            ``HookedTransformer`` or a ``HookedEncoder``. Default: ``None``, the demo model (a real 6-layer
            BERT, all-MiniLM-L6-v2) of the extra ``captum-hta[demo]``. A model of ``transformers`` is not
            changed: what is used is a copy in eval mode that shares its weights.
        tokenizer: Its tokenizer, or for a model of images or audio its processor. Default: ``None``, the
            one saved with the model. Without a processor, images are arrays of pixel values.
        device: Where to run. Default: ``None``, where the model is.
        dtype: Of the weights. Default: ``None``, as they are.
        adapter: Force ``"transformer_lens"``, for its hook points, or ``"transformers"``, which knows the
            closed form of more families. Default: ``None``, as above; with TransformerLens before its
            version 4, whose bridges are not used, always ``"transformers"``.
        part: Of an encoder-decoder, ``"encoder"``, ``"decoder"`` or ``"cross"``; see
            :class:`captum_hta.integrations.transformers.adapter.TransformersModel`.
        options: Passed to ``from_pretrained``, such as ``revision``, ``gguf_file`` or ``device_map``.

    Returns:
        The model, ready for :func:`captum_hta.contributions`.

    Raises:
        ValueError: If the model cannot be found, is of an architecture that is not supported, lacks a
            tokenizer, or fails the checks of :class:`TransformerLensModel`.
        ModuleNotFoundError: If the demo model is asked for and not installed, or a bridge of a
            TransformerLens that has none.

    Example:
        >>> load_model().num_layers
        6
    """
    if adapter not in (None, "transformer_lens", "transformers"):
        raise ValueError(f"adapter must be 'transformer_lens', 'transformers' or None, got {adapter!r}")
    if hasattr(model, "hook_dict"):
        _refuse_changes(device, dtype)
        return TransformerLensModel(model, tokenizer) if is_bridge(model) else HookedModel(model, tokenizer)
    if not isinstance(model, Module):
        path = demo_path() if model is None else str(model)
        loaded = load_pretrained(path, lambda config: layout_for(config, part=part), **options)
        if tokenizer is None:
            medium = medium_of(loaded)
            if medium == "text":
                tokenizer = load_tokenizer(path, **options)
            else:
                tokenizer = load_processor(path, medium, **options)
        name = "all-MiniLM-L6-v2" if model is None else Path(options.get("gguf_file") or path).name
    else:
        if options:
            raise ValueError(f"a model object is loaded already: leave out {', '.join(options)}")
        layout_for(getattr(model, "config", None), type(model).__name__, part)
        loaded = _copy(model, shares_weights=device is None and dtype is None)
        name = Path(getattr(model, "name_or_path", "") or type(model).__name__).name
    if tokenizer is None and medium_of(loaded) == "text":
        raise ValueError("a model object carries no tokenizer: pass tokenizer=")
    loaded = loaded.to(device=device, dtype=dtype).eval()
    if adapter is None and type(loaded).__name__ in _BY_BRIDGE and has_bridges():
        adapter = "transformer_lens"
    if adapter == "transformer_lens":
        if part is not None:
            raise ValueError("the adapter of TransformerLens knows no parts: leave out adapter")
        if medium_of(loaded) != "text":
            raise ValueError(
                f"the adapter of TransformerLens reads texts, and {type(loaded).__name__} "
                f"{medium_of(loaded)}s: leave out adapter"
            )
        return TransformerLensModel(_bridges().bridge(loaded, name), tokenizer, name)
    return TransformersModel(loaded, tokenizer, name, part)


def medium_of(model: Module) -> str:
    """What it reads; but for texts, a processor is optional."""
    kind = model.config.model_type
    return "image" if kind in IMAGES else "audio" if kind in AUDIO else "text"


def _refuse_changes(device: Any, dtype: Any) -> None:
    if device is not None or dtype is not None:
        raise ValueError(
            "a model of TransformerLens is used as it is: move or cast it before, without device or dtype"
        )


def _copy(model: Module, shares_weights: bool) -> Module:
    """A copy of the modules and the configuration, on the same parameters where they are to stay."""
    tensors = (*model.parameters(), *model.buffers()) if shares_weights else ()
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
