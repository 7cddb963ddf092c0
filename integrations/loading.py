"""Loading of any model by name, folder or object, with the adapter that fits it."""

from __future__ import annotations

import copy
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from captum_hta.integrations.availability import (
    BRIDGED_BY_DEFAULT,
    has_bridges,
    is_bridge,
    require_bridges,
)
from captum_hta.integrations.readers.pairs import PairReader
from captum_hta.integrations.readers.texts import TextReader
from captum_hta.integrations.state import unchanged_state
from captum_hta.integrations.transformers.adapter import TransformersModel
from captum_hta.integrations.transformers.attention import foreign_attention
from captum_hta.integrations.transformers.given import GivenModel
from captum_hta.integrations.transformers.parts import medium_of, part_of, part_of_model
from captum_hta.integrations.transformers.pretrained import (
    load_pretrained,
    load_processor,
    load_tokenizer,
    located,
)
from captum_hta.integrations.transformers.wrappers import no_model, unwrapped
from captum_hta.model.protocol import Reader

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
    add_special_tokens: bool | None = None,
    **options: Any,
) -> TransformerLensModel | HookedModel | TransformersModel:
    """Load a model: a BERT or RoBERTa, bare or a masked language model, through TransformerLens, any other
    through ``transformers``.

    Args:
        model: A name on the Hugging Face hub, a folder, a ``.gguf`` file, a model of ``transformers`` (with
            its ``tokenizer``), or one of TransformerLens, which is used as it is: a ``TransformerBridge``, a
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
        part: For encoder-decoder models ``"encoder"``, ``"decoder"`` or ``"cross"``; for models that have a
            part for each of several media, such as CLIP, ``"text"``, ``"image"`` or ``"audio"``; see
            :class:`captum_hta.integrations.transformers.adapter.TransformersModel`.
        add_special_tokens: Whether the tokenizer adds its special tokens to strings, such as ``[CLS]`` or
            BOS. Default: ``None``, as it does by itself. Token ids and chat messages never get any.
        options: Passed to ``from_pretrained``, such as ``revision``, ``gguf_file`` or ``device_map``.

    Returns:
        The model, ready for :func:`captum_hta.contributions`.

    Raises:
        ValueError: If the model cannot be found, its architecture is not supported, it lacks a tokenizer, or
            the adapter does not fit it.
        TypeError: If ``model`` or ``tokenizer`` is no model or tokenizer.
        ModuleNotFoundError: If the demo model or a bridge is asked for, and the demo package or a
            TransformerLens that has bridges is not installed.

    Example:
        >>> load_model().num_layers
        6
    """
    if adapter not in (None, "transformer_lens", "transformers"):
        raise ValueError(f"adapter must be 'transformer_lens', 'transformers' or None, got {adapter!r}")
    if model is not None and not isinstance(model, str | PathLike | Module):
        raise TypeError(no_model(model))
    _require_tokenizer(tokenizer)
    with unchanged_state():
        adapted: TransformerLensModel | HookedModel | TransformersModel
        if isinstance(model, Module) and hasattr(model, "hook_dict"):
            adapted = _of_transformer_lens(model, tokenizer, device, dtype)
        else:
            if isinstance(model, Module):
                loaded, name = _copied(model, options, part, shares_weights=device is None and dtype is None)
            else:
                loaded, tokenizer, name = _from_files(model, tokenizer, options, part)
            loaded.to(device=device, dtype=dtype).eval()
            adapted = _adapted(loaded, tokenizer, name, adapter, part)
    _set_special_tokens(adapted.reader, add_special_tokens)
    return adapted


def _set_special_tokens(reader: Reader, add_special_tokens: bool | None) -> None:
    """Tell the reader of a model whether the tokenizer adds special tokens.

    Raises:
        ValueError: If there is no tokenizer that could.
    """
    if add_special_tokens is None:
        return
    if isinstance(reader, PairReader) and isinstance(reader.context, TextReader):
        reader = reader.context
    if not isinstance(reader, TextReader):
        raise ValueError(
            f"the model reads {reader.medium}s, which have no special tokens: leave out add_special_tokens"
        )
    reader.add_special_tokens = add_special_tokens


def _adapted(
    model: Module, tokenizer: Any, name: str, adapter: str | None, part: str | None
) -> TransformerLensModel | TransformersModel:
    """The adapter that fits a model of ``transformers``, or the one that is asked for."""
    inner = unwrapped(model)
    if tokenizer is None and medium_of(inner, part) == "text":
        raise ValueError("a model object carries no tokenizer: pass tokenizer=")
    if adapter is None and type(model).__name__ in BRIDGED_BY_DEFAULT and has_bridges():
        adapter = "transformers" if foreign_attention(inner) else "transformer_lens"
    if adapter == "transformer_lens":
        return _bridged(model, tokenizer, name, part)
    return TransformersModel(model, tokenizer, name, part)


def _require_tokenizer(tokenizer: object) -> None:
    """Raise a ``TypeError`` if an argument can be no tokenizer or processor."""
    is_bare = type(tokenizer).__module__.partition(".")[0] == "tokenizers"
    if isinstance(tokenizer, str | PathLike) or is_bare:
        raise TypeError(
            f"tokenizer must be a tokenizer or processor of transformers, got a {type(tokenizer).__name__}: "
            "load it, as by AutoTokenizer.from_pretrained(...), or wrap it, as in "
            "PreTrainedTokenizerFast(tokenizer_object=...)"
        )


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
) -> tuple[Module, str]:
    """A copy of a model of ``transformers``, and its name."""
    if options:
        raise ValueError(f"a model object is loaded already: leave out {', '.join(options)}")
    inner = unwrapped(model)
    part_of_model(inner, part)
    name = getattr(inner, "name_or_path", "") or type(inner).__name__
    return copy.deepcopy(model, _kept(model, shares_weights)), Path(name).name


def _kept(model: Module, shares_weights: bool) -> dict[int, Tensor]:
    """The tensors that a copy of a model takes as they are, by their identity.

    Beside shared weights these are tensors that cannot be copied: results of operations, such as the weights
    of ``torch.nn.utils.prune``, and weights made under ``torch.inference_mode``, which have no derivatives.
    """
    tensors = [*model.parameters(), *model.buffers()]
    derived = [value for module in model.modules() for value in vars(module).values()]
    kept = {id(value): value.detach() for value in derived if isinstance(value, Tensor) and value.grad_fn}
    with torch.inference_mode(False):
        for tensor in tensors:
            if tensor.is_inference():
                kept[id(tensor)] = _usable(tensor)
            elif shares_weights:
                kept[id(tensor)] = tensor
    return kept


def _usable(tensor: Tensor) -> Tensor:
    """A copy of a tensor that was made under inference mode."""
    copied = tensor.clone()
    return Parameter(copied, tensor.requires_grad) if isinstance(tensor, Parameter) else copied


def _from_files(
    model: str | Path | None, tokenizer: Any, options: dict[str, Any], part: str | None
) -> tuple[PreTrainedModel, Any, str]:
    """A model from a folder or the hub, with its tokenizer or processor, and its name."""
    path, file = located(model)
    options = options | file
    loaded = load_pretrained(path, lambda config: part_of(config, part=part), **options)
    if tokenizer is None:
        medium = medium_of(loaded, part)
        text = medium == "text"
        tokenizer = load_tokenizer(path, **options) if text else load_processor(path, medium, **options)
    name = "all-MiniLM-L6-v2" if model is None else Path(options.get("gguf_file") or path).name
    return loaded, tokenizer, name


def _bridged(model: Module, tokenizer: Any, name: str, part: str | None) -> TransformerLensModel:
    """An adapter on a new bridge of TransformerLens, compared with the model that is bridged."""
    inner = unwrapped(model)
    if part is not None:
        raise ValueError("the adapter of TransformerLens knows no parts: leave out adapter")
    medium = medium_of(inner, part)
    if medium != "text":
        raise ValueError(
            f"the adapter of TransformerLens reads texts, and {type(inner).__name__} {medium}s: leave out "
            "adapter"
        )
    foreign = foreign_attention(inner)
    if foreign is not None:
        raise ValueError(
            f"a bridge of TransformerLens has eager attention in the place of the attention function "
            f"{foreign!r}: leave out adapter, or call set_attn_implementation with one of transformers' own"
        )
    require_bridges()
    from captum_hta.integrations.transformer_lens.adapter import TransformerLensModel
    from captum_hta.integrations.transformer_lens.internals import build_bridge

    given = GivenModel(copy.deepcopy(model, _kept(model, shares_weights=True)), tokenizer)
    try:
        return TransformerLensModel(build_bridge(inner, name, tokenizer), tokenizer, name, given)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"TransformerLens does not bridge this {type(inner).__name__} ({type(error).__name__}: {error}): "
            "load it with adapter='transformers'"
        ) from error
