"""The heads in a module's output, known for PyTorch's attention and for hook points of TransformerLens."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, eye
from torch.nn import Module, MultiheadAttention, functional
from torch.overrides import TorchFunctionMode

from captum_hta.jacobian.torch_internals import Arguments, Keywords

_OF_QUERIES = re.compile(r"attn\.(hook_z|hook_q|hook_rot_q|o\.hook_in|q\.hook_out)$")
_OF_KEYS = re.compile(r"attn\.(hook_k|hook_v|hook_rot_k|k\.hook_out|v\.hook_out)$")
_SIGNATURE = inspect.signature(functional.multi_head_attention_forward)


def known_heads(forward_func: Callable[..., object], module: Module) -> int | None:
    """The number of heads in a hook point of TransformerLens, from the ``cfg`` of its model.

    Returns:
        The number; ``None`` for any other module, and where ``forward_func`` is not the model, one of its
        methods or a ``functools.partial`` of these.
    """
    while isinstance(forward_func, partial):
        forward_func = forward_func.func
    model = getattr(forward_func, "__self__", forward_func)
    name, config = getattr(module, "name", None), getattr(model, "cfg", None)
    heads = getattr(config, "n_heads", None)
    if not isinstance(name, str) or not isinstance(heads, int):
        return None
    if _OF_KEYS.search(name):
        return getattr(config, "n_key_value_heads", None) or heads
    return heads if _OF_QUERIES.search(name) else None


def refuse_unknown_heads(module: Module) -> None:
    """Raise a ``ValueError`` if a module is a hook point of TransformerLens that holds heads."""
    name = getattr(module, "name", None)
    if isinstance(name, str) and (_OF_QUERIES.search(name) or _OF_KEYS.search(name)):
        raise ValueError(
            f"{name} holds heads, but forward_func does not tell how many: pass num_heads, or pass the model "
            "itself as forward_func"
        )


def refuse_mixed_heads(name: str, module: Module) -> None:
    """Raise a ``ValueError`` if a module's output mixes the heads of the attention inside it."""
    if isinstance(module, MultiheadAttention):
        return
    inner = [inside for inside, part in module.named_modules() if isinstance(part, MultiheadAttention)]
    if inner:
        raise ValueError(
            f"{name} mixes the heads of the attention inside it, so its output has none: leave out "
            f"num_heads, or pass its module {inner[-1]!r} as the layer, which gives the heads"
        )


class HeadOutputs(TorchFunctionMode):
    """Reads the outputs of the heads inside PyTorch's ``MultiheadAttention``, before its output projection.

    Within the context the projection is taken out of ``multi_head_attention_forward`` and applied afterwards,
    so that its input can be read. The mode belongs to one thread, and turns off the module's fast path, which
    would bypass it.

    Args:
        keep: Called with a module and the outputs of its heads ``[batch, position, head, d_head]``.
        modules: The modules.
    """

    def __init__(
        self, keep: Callable[[MultiheadAttention, Tensor], None], modules: list[MultiheadAttention]
    ) -> None:
        super().__init__()
        self.keep, self.modules = keep, modules

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        if func is not functional.multi_head_attention_forward:
            return func(*args, **(kwargs or {}))
        bound = _SIGNATURE.bind(*args, **(kwargs or {}))
        weight, bias = bound.arguments["out_proj_weight"], bound.arguments["out_proj_bias"]
        owner = next((one for one in self.modules if one.out_proj.weight is weight), None)
        if owner is None:
            return func(*args, **(kwargs or {}))
        identity = eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        bound.arguments |= {"out_proj_weight": identity, "out_proj_bias": None}
        mixed, weights = func(*bound.args, **bound.kwargs)
        split = mixed.reshape(*mixed.shape[:-1], owner.num_heads, owner.head_dim)
        self.keep(owner, split.transpose(0, 1) if split.dim() == 4 else split)
        return functional.linear(mixed, weight, bias), weights
