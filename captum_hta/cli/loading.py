"""The model that a command names, its layers and its heads."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING

from captum_hta.cli.console import waiting
from captum_hta.cli.errors import UserError

if TYPE_CHECKING:
    from captum_hta.model.protocol import Model

ADAPTERS = ("transformer_lens", "transformers")


@dataclass(frozen=True)
class ModelChoice:
    """A model as the options name it.

    Attributes:
        name: A folder, also below ``~``, or a name on the hub; ``None`` for the demo model.
        device: Where to run; ``None`` for the default.
        adapter: Which adapter; ``None`` for the default.
        part: Part of an encoder-decoder model, or ``None``.
    """

    name: str | None
    device: str | None = None
    adapter: str | None = None
    part: str | None = None

    @property
    def path(self) -> str | None:
        """The name, with the home directory in the place of ``~``."""
        return self.name if self.name is None else os.path.expanduser(self.name)

    def check(self, layers: list[int] | None, head: int | None = None) -> None:
        """Check what can be known before any weights are read, from the model's configuration.

        Args:
            layers: Numbers of layers, negative from the end; ``None`` for all.
            head: Number of a head, or ``None``.

        Raises:
            UserError: If there is no such device, adapter, layer or head.
        """
        _check_device(self.device)
        if self.adapter not in (None, *ADAPTERS):
            raise UserError(f"--adapter must be {' or '.join(ADAPTERS)}, got {self.adapter!r}")
        if layers is None and head is None:
            return
        from captum_hta.integrations.transformers.dimensions import configured_dimensions

        known = configured_dimensions(self.path, self.part)
        if known is not None:
            check_layers(layers, known.layers, known.name)
            check_head(head, known.heads, known.name)

    def load(self) -> Model:
        """Load the model.

        Raises:
            UserError: If it cannot be loaded, or cannot run on the device.
        """
        from captum_hta import load_model

        try:
            with waiting("Loading the model ..."), redirect_stdout(sys.stderr):
                return load_model(self.path, device=self.device, adapter=self.adapter, part=self.part)
        except (ValueError, ModuleNotFoundError) as error:
            raise UserError(str(error)) from error
        except (AssertionError, RuntimeError) as error:
            raise UserError(
                f"the model cannot run on {self.device!r} ({error}): leave out --device, or install a "
                "PyTorch for it"
            ) from error


def _check_device(device: str | None) -> None:
    import torch

    try:
        torch.device(device or "cpu")
    except RuntimeError as error:
        raise UserError(f"{device!r} is not a device: use cpu, cuda or mps") from error


def layer_numbers(spec: str | None) -> list[int] | None:
    """Numbers in a list such as ``"0,3"``, ``"2-4"`` or ``"-1"``; ``None`` for all layers.

    Raises:
        UserError: If it is not such a list.
    """
    if spec is None or spec == "all":
        return None
    return [number for part in spec.split(",") for number in _layer_range(part.strip(), spec)]


def _layer_range(part: str, spec: str) -> range:
    first, dash, last = part.partition("-") if not part.startswith("-") else (part, "", "")
    try:
        start = int(first)
        stop = int(last) if dash else start
    except ValueError:
        raise UserError(f'--layers {spec!r} is not a list of layers: write "0,3", "2-4" or "-1"') from None
    if stop < start:
        raise UserError(f"--layers {spec!r} runs backwards: write the lower number first")
    return range(start, stop + 1)


def head_number(head: str | None, layers: list[int] | None) -> tuple[list[int] | None, int | None]:
    """The layers and the number of a head, from its name, as in ``L18H6``, or its number in these layers.

    Raises:
        UserError: If it is of another layer than those that are named.
    """
    from captum_hta.model.head_names import named_head

    if head is None:
        return layers, None
    if head.lstrip("-").isdecimal():
        return layers, int(head)
    layer, number = named_head(head)
    if layers not in (None, [layer]):
        raise UserError(f"--head {head} is in layer {layer}: leave out --layers")
    return [layer], number


def check_layers(numbers: list[int] | None, count: int, name: str) -> None:
    """Raise a ``UserError`` if a number is not a layer of the model of that name, which has ``count``."""
    for number in numbers or []:
        if not -count <= number < count:
            raise UserError(f"--layers names {number}, but {name} has 0 to {count - 1}")


def check_head(head: int | None, count: int, name: str) -> None:
    """Raise a ``UserError`` if that is not a head of the model of that name, which has ``count`` a layer."""
    if head is not None and not 0 <= head < count:
        raise UserError(f"--head {head} does not exist: {name} has heads 0 to {count - 1}")


def named_layers(numbers: list[int] | None, model: Model) -> list[int]:
    """The layers with these numbers in ascending order, each once; ``None`` for all.

    Raises:
        UserError: If the model lacks one of them.
    """
    if numbers is None:
        return list(range(model.num_layers))
    check_layers(numbers, model.num_layers, model.name)
    return sorted({number % model.num_layers for number in numbers})
