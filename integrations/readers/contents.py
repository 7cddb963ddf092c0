"""What readers of images and audio share: these are read in the place of token ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from captum_hta.model.encoding import Batch, Encoding


class ContentReader:
    """What readers of images and of audio have in common: tokens without ids, and batches without padding."""

    medium: str

    def token(self, text: str) -> int:
        """Raise an error, since there are no token ids.

        Raises:
            ValueError: Always.
        """
        plural = "images" if self.medium == "image" else self.medium
        raise ValueError(f"the tokens of {plural} have no ids, so {text!r} is none")

    def batch(self, encodings: Sequence[Encoding], device: torch.device) -> Batch:
        """Stack contents; there is no padding.

        Raises:
            ValueError: If their shapes differ.
        """
        contents = [encoding.content for encoding in encodings if encoding.content is not None]
        shapes = sorted({tuple(content.shape) for content in contents})
        if len(shapes) > 1:
            raise ValueError(f"images of one call must be of one size, got {shapes}: call once for each")
        mask = torch.ones(len(encodings), len(encodings[0]), dtype=torch.bool, device=device)
        return Batch((torch.stack(contents).to(device),), (None,), mask)
