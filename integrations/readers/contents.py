"""Batches of images and audio, which are read in the place of token ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from captum_hta.model.encoding import Batch, Encoding


def stacked(encodings: Sequence[Encoding], device: torch.device) -> Batch:
    """The contents of encodings as one batch, without padding.

    Raises:
        ValueError: If their shapes differ.
    """
    contents = [encoding.content for encoding in encodings if encoding.content is not None]
    shapes = sorted({tuple(content.shape) for content in contents})
    if len(shapes) > 1:
        raise ValueError(f"images of one call must be of one size, got {shapes}: call once for each")
    mask = torch.ones(len(encodings), len(encodings[0]), dtype=torch.bool, device=device)
    return Batch((torch.stack(contents).to(device),), (None,), mask)
