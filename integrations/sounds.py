"""Sounds as a speech model hears them: features of frames, and tokens named by their time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from captum_hta.model import Batch, Encoding

STRIDE = 2
"""Frames of a token, by the strides of Whisper's convolutions (Radford et al. 2022, section 2.2)."""
FRAME = 0.01
"""Seconds of a frame, where no feature extractor says otherwise."""


class SoundReader:
    """Reads sounds with a feature extractor, or features as they are.

    Args:
        tokenizer: A feature extractor of ``transformers``, or ``None``.
        features: Features of a frame.
        longest: Tokens that the model makes of every sound.
    """

    medium = "sound"

    def __init__(self, tokenizer: Any, features: int, longest: int) -> None:
        self.tokenizer, self.longest = tokenizer, longest
        self.shape = (features, STRIDE * longest)

    @property
    def reads(self) -> str:
        """What it takes."""
        features = f"features of shape {list(self.shape)}"
        if self.tokenizer is None:
            return f"a sound ({features})"
        return f"a sound (an array of numbers at {self.tokenizer.sampling_rate} Hz, or {features})"

    def accepts(self, sound: Any) -> bool:
        """Whether it is an array with one axis, or two of features."""
        return isinstance(sound, np.ndarray | Tensor) and sound.ndim in (1, 2)

    def sample(self) -> Encoding:
        """The first tokens of features of waves."""
        waves = torch.arange(self.shape[0] * self.shape[1]).mul(0.7).sin()
        return self._encoding(waves.view(self.shape)).first(6)

    def encode(self, sound: Any, max_length: int | None = None) -> Encoding:
        """Read a sound. It is made as long as the model hears, so nothing of it is cut.

        Raises:
            ValueError: If it is longer than the model hears, has features of another shape, or is to be
                read without a feature extractor.
        """
        sound = torch.as_tensor(sound).detach().cpu()
        if not sound.is_floating_point() or not sound.numel():
            raise ValueError(
                f"a sound is an array of real numbers between -1 and 1, got {sound.numel()} numbers of "
                f"{sound.dtype}: divide integers by the largest that they may be"
            )
        features = self._features(sound) if sound.dim() == 1 else sound
        if tuple(features.shape) != self.shape:
            raise ValueError(
                f"features are of shape {list(features.shape)}, but the model reads {list(self.shape)}"
            )
        return self._encoding(features)

    def _features(self, sound: Tensor) -> Tensor:
        """Features ``[feature, frame]`` of a sound."""
        extractor = self.tokenizer
        if extractor is None:
            raise ValueError(
                "there is no feature extractor, which makes features of a sound: pass tokenizer="
                f"AutoProcessor.from_pretrained(...), or features of shape {list(self.shape)}"
            )
        if len(sound) > extractor.n_samples:
            raise ValueError(
                f"a sound has {len(sound)} numbers, but the model hears at most {extractor.n_samples}, at "
                f"{extractor.sampling_rate} Hz: cut it"
            )
        made = extractor(sound.float().numpy(), sampling_rate=extractor.sampling_rate, return_tensors="pt")
        return made["input_features"][0]

    def _encoding(self, features: Tensor) -> Encoding:
        extractor = self.tokenizer
        step = STRIDE * (FRAME if extractor is None else extractor.hop_length / extractor.sampling_rate)
        return Encoding([], [], [f"{step * token:.2f} s" for token in range(self.longest)], content=features)

    def batch(self, encodings: Sequence[Encoding], device: torch.device) -> Batch:
        """Put features together; there is no padding."""
        return Batch.of_contents(encodings, device)
