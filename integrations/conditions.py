"""Conditions that every model must meet, and errors that several adapters raise."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from operator import itemgetter

import torch
from torch import Tensor
from torch.nn import Module

from captum_hta.model.precision import full_precision

_PEFT_SETTINGS = ("active_adapters", "merged_adapters", "disable_adapters", "scaling")
"""Attributes of PEFT's layers that decide what they compute."""
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


def require_eval(name: str, model: Module) -> None:
    """Raise a ``ValueError`` if a dropout is active, be it a module or a rate that a module keeps."""
    for module in model.modules():
        if module.training and any(rate > 0 for rate in _dropout_rates(module)):
            raise ValueError(
                f"{name} is in training mode, with a dropout that is active: call its eval() first"
            )


def _dropout_rates(module: Module) -> Iterator[float]:
    if isinstance(module, torch.nn.Dropout):
        yield module.p
    for name, value in vars(module).items():
        if "drop" in name and isinstance(value, float):
            yield value


def require_weights(name: str, model: Module) -> None:
    """Raise a ``ValueError`` if weights are on the meta device, or have no derivatives."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{name} has weights on the meta device, which hold no numbers: load them first")
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ValueError(
            f"{name} was made under torch.inference_mode, so nothing has derivatives: pass the model to "
            "load_model, which copies its weights, or make it outside of that"
        )


def weights_fingerprint(model: Module) -> str:
    """A digest of the names and values of all weights, and of buffers such as the masks of pruning.

    With PEFT, which adapters are active and how they are scaled is part of it. Frequencies of rotary
    embeddings are left out: some models change them in each forward pass.
    """
    digest = hashlib.blake2b(digest_size=16)
    buffers = [(name, value) for name, value in model.named_buffers() if "inv_freq" not in name]
    for name, parameter in sorted([*model.named_parameters(), *buffers], key=itemgetter(0)):
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}".encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    for name, module in model.named_modules():
        found = [getattr(module, setting, None) for setting in _PEFT_SETTINGS]
        settings = [value for value in found if isinstance(value, bool | float | list | tuple | dict)]
        digest.update(f"{name} {settings}".encode())
    return digest.hexdigest()


def is_untouched(modules: Iterable[Module], own: tuple[str, ...]) -> bool:
    """Whether nothing changes what modules compute: no ``forward`` of an instance and no hooks, except those
    that the packages ``own`` register.
    """
    if any(getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS):
        return False
    return not any("forward" in vars(module) or _has_foreign_hook(module, own) for module in modules)


def _has_foreign_hook(module: Module, own: tuple[str, ...]) -> bool:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(hook.__module__.startswith(own) for hook in hooks)


def heads_error(pattern: Tensor, value: Tensor, outputs: Tensor, real: Tensor) -> float:
    """How far the outputs of heads are off the pattern times the values, relative to the largest output.

    Args:
        pattern: ``[batch, head, query, key]``.
        value: ``[batch, head, key, d_head]``.
        outputs: ``[batch, query, head * d_head]``, or with two axes for heads and their components.
        real: ``[batch, query]``, true for real tokens.
    """
    wide = torch.promote_types(outputs.dtype, torch.float32)
    with full_precision():
        expected = (pattern.to(wide) @ value.to(wide)).transpose(1, 2).flatten(2)
    found = outputs.flatten(2).to(wide)
    return relative_error(expected[real], found[real])


def relative_error(expected: Tensor, found: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    scale = max(found.abs().max().item(), torch.finfo(found.dtype).tiny)
    return (expected - found).abs().max().item() / scale


def is_scaled(value: Tensor, other: Tensor) -> bool:
    """Whether a tensor is a positive number times another, up to rounding."""
    if value.shape != other.shape:
        return False
    wide = torch.promote_types(value.dtype, torch.float32)
    value, other = value.to(wide), other.to(wide)
    scale = (value * other).sum() / other.square().sum().clamp_min(torch.finfo(wide).tiny)
    return scale.item() > 0 and relative_error(scale * other, value) <= tolerance(value.dtype)


def tolerance(dtype: torch.dtype) -> float:
    """The relative error that rounding may cause between two ways to run one model.

    Products of float32 may be in TF32 on a GPU, whose rounding error is 2 ** -11.
    """
    return 1e-4 if dtype == torch.float64 else max(2e-3, 32 * torch.finfo(dtype).eps)


def no_logits(name: str, architecture: str) -> str:
    """The error for a model without a head that is asked for logits."""
    return (
        f"{name} ({architecture}) has no logits: load a class with a head, such as a ...ForCausalLM (with "
        "adapter='transformers', if it has one that TransformerLens does not bridge), or leave out what "
        "asks for a logit"
    )


def encoder_logits(name: str) -> str:
    """The error for an encoder that is asked for the direction of a token."""
    return (
        f"{name} is an encoder: more than a norm lies between its last hidden embedding and its logits, so "
        "no direction stands for a token; use a decoder"
    )
