"""The only uses of names of ``transformers`` that are not public.

- ``_can_set_attn_implementation``: whether the attention of a class goes through ``AttentionInterface``; no
  public method tells this without switching the implementation.
- ``config._attn_implementation``: the name of the current implementation; ``set_attn_implementation`` is
  public, but nothing public reads what it set.
- ``ALL_ATTENTION_FUNCTIONS`` and ``ALL_MASK_ATTENTION_FUNCTIONS``, objects of the files that define models:
  an entry that a user sets on them is not seen by ``AttentionInterface`` itself.
- ``eager_attention_forward`` and ``apply_rotary_pos_emb``, functions of the file that defines a model: the
  only eager attention that returns the pattern as the model computes it (with its own mask, cap and dtype),
  and the rotation as the model applies it. ``AttentionInterface`` has no entry for eager attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def uses_attention_interface(model: PreTrainedModel) -> bool:
    """Whether the attention of a model goes through ``AttentionInterface``."""
    return bool(model._can_set_attn_implementation())


def attention_implementation(model: PreTrainedModel) -> str:
    """The name of a model's attention implementation."""
    return str(model.config._attn_implementation)


AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
"""Returns the outputs of the heads, and their patterns where it has them."""


def registered_attention(attention: Module, implementation: str) -> AttentionFunction | None:
    """The registered function of that name, as an attention module finds it; ``None`` for eager attention."""
    found: AttentionFunction | None = ALL_ATTENTION_FUNCTIONS.get(implementation)
    if _has_own(attention, "ALL_ATTENTION_FUNCTIONS"):
        functions: Mapping[str, AttentionFunction] = _own(attention, "ALL_ATTENTION_FUNCTIONS")
        found = functions.get(implementation)
    return found


def registered_mask(implementation: str) -> Callable[..., object]:
    """The registered function that makes masks for an implementation; without one there is no mask."""
    found: Callable[..., object] = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation, _no_mask)
    return found


def _no_mask(*args: object, **kwargs: object) -> None:
    return None


def eager_attention(attention: Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """The eager attention function of the file that defines an attention module."""
    found: Callable[..., tuple[Tensor, Tensor]] = _own(attention, "eager_attention_forward")
    return found


def rotary_function(attention: Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function that rotates queries and keys, of the file that defines an attention module."""
    found: Callable[..., tuple[Tensor, Tensor]] = _own(attention, "apply_rotary_pos_emb")
    return found


def _has_own(module: Module, name: str) -> bool:
    """Whether the file of a module's class, or of one that it derives from, has a name."""
    files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    return any(hasattr(file, name) for file in files)


def _own(module: Module, name: str) -> Any:
    """An object of the file that defines a module's class, or one that this class derives from."""
    files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    return next(getattr(file, name) for file in files if hasattr(file, name))
