"""Loading of any model by name, folder or object, with the adapter that fits it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from transformers import PreTrainedModel

from captum_hta.integrations.transformer_lens.availability import (
    BRIDGED_BY_DEFAULT,
    has_bridges,
    is_bridge,
    require_bridges,
)
from captum_hta.integrations.transformers.adapter import TransformersModel
from captum_hta.integrations.transformers.families import layout_for, medium_of
from captum_hta.integrations.transformers.pretrained import (
    demo_path,
    load_pretrained,
    load_processor,
    load_tokenizer,
)

if TYPE_CHECKING:
    from captum_hta.integrations.transformer_lens.adapter import TransformerLensModel
    from captum_hta.integrations.transformer_lens.hooked import HookedModel


def load_model(
    model: str | Path | Module | None = None,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    adapter: str | None = None,
    part: str | None = None,
    **options: Any,
) -> TransformerLensModel | HookedModel | TransformersModel:
    """Load a model: a BERT or RoBERTa, bare or a masked language model, through TransformerLens, any other
    through ``transformers``.

    Args:
        model: A name on the Hugging Face hub, a folder, a model of ``transformers`` (with its
            ``tokenizer``), or one of TransformerLens, which is used as it is: a ``TransformerBridge``, a
            ``HookedTransformer`` or a ``HookedEncoder``. Default: ``None``, the demo model (a real 6-layer
            BERT, all-MiniLM-L6-v2) of the extra ``captum-hta[demo]``. A model of ``transformers`` is not
            changed: the adapter uses a copy in eval mode that shares its weights.
        tokenizer: Its tokenizer; for vision and audio models its processor. Default: ``None``, the one saved
            with the model. Without a processor, images are arrays of pixel values.
        device: Where to run. Default: ``None``, where the model is.
        dtype: Dtype of the weights. Default: ``None``, as they are.
        adapter: ``"transformer_lens"``, for its hook points, or ``"transformers"``, which has the closed form
            for more families. Default: ``None``, as above; with TransformerLens before version 4, whose
            bridges are not supported, always ``"transformers"``.
        part: For encoder-decoder models ``"encoder"``, ``"decoder"`` or ``"cross"``; see
            :class:`captum_hta.integrations.transformers.adapter.TransformersModel`.
        options: Passed to ``from_pretrained``, such as ``revision``, ``gguf_file`` or ``device_map``.

    Returns:
        The model, ready for :func:`captum_hta.contributions`.

    Raises:
        ValueError: If the model cannot be found, its architecture is not supported, it lacks a tokenizer, or
            the adapter does not fit it.
        ModuleNotFoundError: If the demo model or a bridge is asked for, and the demo package or a
            TransformerLens that has bridges is not installed.

    Example:
        >>> load_model().num_layers
        6
    """
    if adapter not in (None, "transformer_lens", "transformers"):
        raise ValueError(f"adapter must be 'transformer_lens', 'transformers' or None, got {adapter!r}")
    if isinstance(model, Module) and hasattr(model, "hook_dict"):
        return _of_transformer_lens(model, tokenizer, device, dtype)
    if isinstance(model, Module):
        loaded, name = _copied(model, options, part, shares_weights=device is None and dtype is None)
    else:
        loaded, tokenizer, name = _from_files(model, tokenizer, options, part)
    if tokenizer is None and medium_of(loaded.config) == "text":
        raise ValueError("a model object carries no tokenizer: pass tokenizer=")
    module: Module = loaded
    module.to(device=device, dtype=dtype).eval()
    if adapter is None and type(loaded).__name__ in BRIDGED_BY_DEFAULT and has_bridges():
        adapter = "transformer_lens"
    if adapter == "transformer_lens":
        return _bridged(loaded, tokenizer, name, part)
    return TransformersModel(loaded, tokenizer, name, part)


def _of_transformer_lens(
    model: Module, tokenizer: Any, device: Any, dtype: Any
) -> TransformerLensModel | HookedModel:
    """An adapter on a model of TransformerLens."""
    if device is not None or dtype is not None:
        raise ValueError(
            "a model of TransformerLens is used as it is: move or cast it before, without device or dtype"
        )
    if is_bridge(model):
        from captum_hta.integrations.transformer_lens.adapter import TransformerLensModel

        return TransformerLensModel(model, tokenizer)
    from captum_hta.integrations.transformer_lens.hooked import HookedModel

    return HookedModel(model, tokenizer)


def _copied(
    model: Module, options: dict[str, Any], part: str | None, shares_weights: bool
) -> tuple[PreTrainedModel, str]:
    """A copy of a model of ``transformers``, and its name."""
    if options:
        raise ValueError(f"a model object is loaded already: leave out {', '.join(options)}")
    layout_for(getattr(model, "config", None), type(model).__name__, part)
    assert isinstance(model, PreTrainedModel)
    tensors = (*model.parameters(), *model.buffers()) if shares_weights else ()
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    return copied, Path(getattr(model, "name_or_path", "") or type(model).__name__).name


def _from_files(
    model: str | Path | None, tokenizer: Any, options: dict[str, Any], part: str | None
) -> tuple[PreTrainedModel, Any, str]:
    """A model from a folder or the hub, with its tokenizer or processor, and its name."""
    path = demo_path() if model is None else str(model)
    loaded = load_pretrained(path, lambda config: layout_for(config, part=part), **options)
    if tokenizer is None:
        medium = medium_of(loaded.config)
        text = medium == "text"
        tokenizer = load_tokenizer(path, **options) if text else load_processor(path, medium, **options)
    name = "all-MiniLM-L6-v2" if model is None else Path(options.get("gguf_file") or path).name
    return loaded, tokenizer, name


def _bridged(model: PreTrainedModel, tokenizer: Any, name: str, part: str | None) -> TransformerLensModel:
    """An adapter on a new bridge of TransformerLens."""
    if part is not None:
        raise ValueError("the adapter of TransformerLens knows no parts: leave out adapter")
    medium = medium_of(model.config)
    if medium != "text":
        raise ValueError(
            f"the adapter of TransformerLens reads texts, and {type(model).__name__} {medium}s: leave out "
            "adapter"
        )
    require_bridges()
    from captum_hta.integrations.transformer_lens.adapter import TransformerLensModel
    from captum_hta.integrations.transformer_lens.internals import build_bridge

    return TransformerLensModel(build_bridge(model, name), tokenizer, name)
