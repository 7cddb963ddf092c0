"""Models of ``transformers`` inside the wrappers of PEFT and PyTorch."""

from __future__ import annotations

from typing import Any

from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from captum_hta.jacobian.torch_internals import uncompiled


def unwrapped(model: object) -> PreTrainedModel:
    """The model of ``transformers`` that a PEFT model changes; any other model as it is.

    Its layers are those of the adapters (LoRA and others), so that it computes what the PEFT model does.

    Raises:
        TypeError: If it is no model of ``transformers``.
        ValueError: If adapters add virtual tokens, which are no tokens of the text.
    """
    require_own_tokens(model)
    model = found = _plain(model)
    if isinstance(model, Module) and hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        peft_model: Any = model
        found = peft_model.get_base_model()
    if not isinstance(found, PreTrainedModel):
        raise TypeError(no_model(found))
    return found


def _plain(model: object) -> object:
    """The model inside ``torch.compile`` and data parallelism, which compute the same."""
    while isinstance(model, Module):
        inner = (
            model.module if isinstance(model, DataParallel | DistributedDataParallel) else uncompiled(model)
        )
        if inner is model:
            break
        model = inner
    return model


def require_own_tokens(model: object) -> None:
    """Raise a ``ValueError`` if adapters add virtual tokens, as prefix and prompt tuning do."""
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if getattr(config, "is_prompt_learning", False) or kind == "ADAPTION_PROMPT":
            raise ValueError(
                f"{type(model).__name__} has an adapter of type {kind}, which adds virtual tokens: attention "
                "to them belongs to no token of the text, so contributions would be of another model. Load "
                "the model without it, or use adapters that change weights, such as LoRA"
            )


def no_model(model: Any) -> str:
    """The error for an object that is no model of ``transformers``, with what to pass instead."""
    name = type(model).__name__
    if hasattr(model, "model") and hasattr(model, "tokenizer") and name != "SentenceTransformer":
        return f"model must be a model of transformers, got {name}: pass its .model and its .tokenizer"
    inner = getattr(model[0], "auto_model", None) if name == "SentenceTransformer" else None
    if inner is not None:
        return (
            f"model must be a model of transformers, got {name}: pass model[0].auto_model and model.tokenizer"
        )
    return (
        f"model must be a model of transformers, got {name}: pass a name, a folder or such a model, or use "
        "the class HiddenTokenAttribution, which takes any PyTorch model"
    )
