"""The only uses of names of ``transformers`` that are not public.

- ``_can_set_attn_implementation``: whether the attention of a class goes through ``AttentionInterface``; no
  public method tells this without switching the implementation.
- ``config._attn_implementation``: the name of the current implementation; ``set_attn_implementation`` is
  public, but nothing public reads what it set.
- ``eager_attention_forward`` and ``apply_rotary_pos_emb``, functions of the file that defines a model: the
  only eager attention that returns the pattern as the model computes it (with its own mask, cap and dtype),
  and the rotation as the model applies it. ``AttentionInterface`` has no entry for eager attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.nn import Module
from transformers import PreTrainedModel


def uses_attention_interface(model: PreTrainedModel) -> bool:
    """Whether the attention of a model goes through ``AttentionInterface``."""
    return bool(model._can_set_attn_implementation())


def attention_implementation(model: PreTrainedModel) -> str:
    """The name of a model's attention implementation."""
    return str(model.config._attn_implementation)


def eager_attention(attention: Module) -> Callable[..., Any]:
    """The eager attention function of the file that defines an attention module."""
    return _own(attention, "eager_attention_forward")


def rotary_function(attention: Module) -> Callable[..., Any]:
    """The function that rotates queries and keys, of the file that defines an attention module."""
    return _own(attention, "apply_rotary_pos_emb")


def _own(module: Module, name: str) -> Callable[..., Any]:
    """A function of the file that defines a module's class, or one that this class derives from."""
    files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    found: Callable[..., Any] = next(getattr(file, name) for file in files if hasattr(file, name))
    return found
