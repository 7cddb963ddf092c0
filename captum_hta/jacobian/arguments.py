"""Checks of single arguments, whose errors name the argument and its valid values.

Numbers of NumPy and PyTorch count as Python's; a truth value is not a number.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Collection, Sequence
from typing import SupportsIndex

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module


def choice(name: str, value: object, choices: Collection[str]) -> str:
    """One of several words.

    Raises:
        ValueError: If it is none of them.
    """
    if isinstance(value, str) and value in choices:
        return value
    listed = " or ".join(map(repr, choices)) if len(choices) == 2 else ", ".join(map(repr, choices))
    raise ValueError(f"{name} must be {'one of ' if len(choices) > 2 else ''}{listed}, got {value!r}")


def flag(name: str, value: object) -> bool:
    """A truth value.

    Raises:
        TypeError: If it is anything else, such as the text ``"false"``, which Python takes for true.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def is_integer(value: object) -> bool:
    """Whether a value is an integer of Python, NumPy or PyTorch."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not (
            value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
        )
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def integer(name: str, value: object) -> int:
    """An integer.

    Raises:
        TypeError: If it is not an integer.
    """
    if not is_integer(value):
        raise TypeError(f"{name} must be an int, got {value!r}")
    return as_int(value)


def as_int(value: object) -> int:
    """An integer of any library as Python's, which prints and hashes the same everywhere."""
    assert isinstance(value, SupportsIndex)
    return operator.index(value)


def optional_count(name: str, value: object) -> int | None:
    """A positive integer, or ``None``.

    Raises:
        ValueError: If it is another number.
        TypeError: If it is not a number.
    """
    if value is None:
        return None
    if is_integer(value) and as_int(value) > 0:
        return as_int(value)
    wrong_type = isinstance(value, bool) or not isinstance(value, numbers.Number | Tensor)
    raise (TypeError if wrong_type else ValueError)(f"{name} must be a positive int or None, got {value!r}")


def optional_positive(name: str, value: object) -> float | None:
    """A positive number, or ``None``.

    Raises:
        ValueError: If it is another number.
        TypeError: If it is not a number.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a positive number or None, got {value!r}")
    number = float(value)
    if not number > 0:
        raise ValueError(f"{name} must be positive or None, got {value!r}")
    return number


def check_modules(layer: object, source_layer: object) -> None:
    """Check the target modules, and the source module if there is one.

    Raises:
        TypeError: If one is not a module.
    """
    layers = layer if isinstance(layer, list | tuple) else [layer]
    if not layers or not all(isinstance(item, Module) for item in layers):
        raise TypeError(f"layer must be a torch.nn.Module or a list of them, got {layer!r}")
    if source_layer is not None and not isinstance(source_layer, Module):
        raise TypeError(f"source_layer must be a torch.nn.Module or None, got {source_layer!r}")


def check_devices(device_ids: object) -> None:
    """Check that at most one device is named, and that it exists.

    Raises:
        ValueError: If there are several, or the device does not exist.
        TypeError: If they are not a list of ints.
    """
    if device_ids is None:
        return
    if not isinstance(device_ids, list | tuple) or not all(map(is_integer, device_ids)):
        raise TypeError(f"device_ids must be a list of ints or None, got {device_ids!r}")
    if len(device_ids) > 1:
        raise ValueError(
            f"device_ids names {len(device_ids)} devices, but the derivative is taken on one: pass the "
            "module that DataParallel wraps"
        )
    count = max(torch.cuda.device_count(), 1)
    if any(not 0 <= as_int(number) < count for number in device_ids):
        raise ValueError(
            f"device_ids names {device_ids}, but there are devices 0 to {count - 1}: leave it out"
        )


def check_inputs(inputs: Sequence[object], has_source_layer: bool, batch_dim: int) -> None:
    """Check what a model is called with.

    Raises:
        ValueError: If there is no example, or there is no source layer and a tensor cannot be a source.
        TypeError: If an input is not a tensor, or a source has no derivative.
    """
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if len(tensors) < len(inputs):
        wrong = next(value for value in inputs if not isinstance(value, Tensor))
        raise TypeError(f"inputs must be a tensor or a tuple of tensors, got {type(wrong).__name__}")
    if not tensors or tensors[0].dim() == 0 or len(tensors[0]) == 0:
        raise ValueError("inputs hold no example: pass a batch of at least one")
    if has_source_layer:
        return
    for value in tensors:
        _check_source(value)
    examples = [value.shape[batch_dim] for value in tensors]
    if len(set(examples)) > 1:
        raise ValueError(
            f"inputs differ in their number of examples, {sorted(examples)}: axis {batch_dim} of each is the "
            "batch"
        )


def _check_source(value: Tensor) -> None:
    if not value.is_floating_point():
        raise TypeError(
            f"inputs of type {value.dtype} have no derivative: name the module that embeds them (or "
            "another one before the target) as source_layer"
        )
    if value.dim() != 3:
        raise ValueError(
            f"inputs must be [batch, position, width] to be sources, got {list(value.shape)}: insert "
            "the missing axis, or name a source_layer"
        )
    if not value.shape[1]:
        raise ValueError("inputs hold no position: pass sequences of at least one token")
