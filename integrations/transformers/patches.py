"""Where the patches of an image are among the tokens of a vision model, found by changing pixels."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Module

from captum_hta.integrations.readers.images import ImageReader
from captum_hta.model.encoding import Encoding
from captum_hta.model.sites import Site, observed

Run = Callable[[Encoding], object]


def find_patches(reader: ImageReader, source: Module | Site, run: Run, labels: tuple[str, ...]) -> None:
    """Tell a reader of images how many tokens come before the patches, and whether images have any size.

    Args:
        reader: The reader, which knows the size of images and patches.
        source: Where the tokens enter the first block.
        run: Runs the model on an image.
        labels: Labels of the tokens before the patches, where they are known.

    Raises:
        ValueError: If tokens are not the patches row by row, with others only before them.
    """
    image = reader.sample()
    tokens = _tokens(source, run, image)
    count = math.prod(reader.grid(reader.shape))
    first, last = (_moved(source, run, image, tokens, reader.patch, at) for at in (0, -1))
    before = len(tokens) - count
    if before < 0 or (first, last) != ([before], [len(tokens) - 1]):
        raise ValueError(
            f"the tokens of this model are not the {count} patches of an image in their order, after others: "
            f"a change of the first patch moves tokens {first}, one of the last patch {last} of {len(tokens)}"
        )
    reader.special = labels if len(labels) == before else _labels(before)
    reader.any_size = _reads_other_sizes(reader, source, run)


def _labels(count: int) -> tuple[str, ...]:
    """Labels of tokens before the patches: the first is that of the class, by convention."""
    return ("[CLS]", *(f"[REG {number}]" for number in range(1, count)))[:count]


def _tokens(source: Module | Site, run: Run, image: Encoding) -> Tensor:
    return observed({"": source}, lambda: run(image))[""][0]


def _moved(
    source: Module | Site, run: Run, image: Encoding, tokens: Tensor, patch: tuple[int, int], at: int
) -> list[int]:
    """The tokens that a change of the first or the last patch moves."""
    assert image.content is not None
    content = image.content.clone()
    rows, columns = ((slice(None, size) if at == 0 else slice(-size, None)) for size in patch)
    content[:, rows, columns] += 1
    moved = _tokens(source, run, _with(image, content)) != tokens
    return moved.any(-1).nonzero().flatten().tolist()


def _with(image: Encoding, content: Tensor) -> Encoding:
    return Encoding(image.ids, image.segments, image.tokens, content=content)


def _reads_other_sizes(reader: ImageReader, source: Module | Site, run: Run) -> bool:
    """Whether the model reads an image of two by three patches, each as a token."""
    height, width = 2 * reader.patch[0], 3 * reader.patch[1]
    if (height, width) == reader.shape[1:]:
        height += reader.patch[0]
    content = torch.linspace(-1, 1, reader.shape[0] * height * width, device="cpu")
    shape = reader.shape[0], height, width
    try:
        tokens = _tokens(source, run, _with(reader.sample(), content.view(shape)))
    except Exception:  # whatever the model raises for an image of another size
        return False
    return len(tokens) == len(reader.special) + math.prod(reader.grid(shape))
