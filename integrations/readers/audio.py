"""Audio as speech models read it: features of frames, and tokens labelled by their time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from captum_hta.integrations.readers.contents import ContentReader
from captum_hta.model.encoding import Encoding

STRIDE = 2
"""Frames per token, the strides of Whisper's convolutions together (Radford et al. 2022, section 2.2)."""
FRAME = 0.01
"""Seconds per frame, if there is no feature extractor."""


class AudioReader(ContentReader):
    """Reads audio with a feature extractor, or takes features as they are.

    Args:
        tokenizer: A feature extractor of ``transformers``, or ``None``.
        features: Number of features per frame.
        longest: Number of tokens of any audio: shorter audio is padded.
    """

    medium = "audio"
    sampled: int | None = 6

    def __init__(self, tokenizer: Any, features: int, longest: int) -> None:
        self.tokenizer, self.longest = tokenizer, longest
        self.shape = (features, STRIDE * longest)

    @property
    def reads(self) -> str:
        """What is accepted, in words."""
        features = f"features of shape {list(self.shape)}"
        if self.tokenizer is None:
            return f"audio ({features})"
        return f"audio (an array of numbers at {self.tokenizer.sampling_rate} Hz, or {features})"

    def accepts(self, audio: object) -> bool:
        """Whether it is an array with one axis, or features with two."""
        return isinstance(audio, np.ndarray | Tensor) and audio.ndim in (1, 2)

    def sample(self) -> Encoding:
        """The first tokens of some features that are not constant."""
        waves = torch.arange(self.shape[0] * self.shape[1], device="cpu").mul(0.7).sin()
        return self._encoding(waves.view(self.shape)).first(self.sampled)

    def encode(self, audio: object, max_length: int | None = None) -> Encoding:
        """Read audio. It is padded to the length that the model reads, and never cut.

        Raises:
            ValueError: If it is longer than the model reads, its features have another shape, or there is no
                feature extractor.
        """
        audio = torch.as_tensor(audio, device="cpu").detach().cpu()
        if not audio.is_floating_point() or not audio.numel():
            raise ValueError(
                f"audio is an array of real numbers between -1 and 1, got {audio.numel()} numbers of "
                f"{audio.dtype}: divide integers by the largest that they may be"
            )
        features = self._features(audio) if audio.dim() == 1 else audio
        if tuple(features.shape) != self.shape:
            raise ValueError(
                f"features are of shape {list(features.shape)}, but the model reads {list(self.shape)}"
            )
        return self._encoding(features)

    def _features(self, audio: Tensor) -> Tensor:
        """The features ``[feature, frame]`` of audio."""
        extractor = self.tokenizer
        if extractor is None:
            raise ValueError(
                "there is no feature extractor, which makes features of audio: pass tokenizer="
                f"AutoProcessor.from_pretrained(...), or features of shape {list(self.shape)}"
            )
        if len(audio) > extractor.n_samples:
            raise ValueError(
                f"audio has {len(audio)} numbers, but the model reads at most {extractor.n_samples}, at "
                f"{extractor.sampling_rate} Hz: cut it"
            )
        made = extractor(audio.float().numpy(), sampling_rate=extractor.sampling_rate, return_tensors="pt")
        features: Tensor = made["input_features"][0]
        return features

    def _encoding(self, features: Tensor) -> Encoding:
        extractor = self.tokenizer
        step = STRIDE * (FRAME if extractor is None else extractor.hop_length / extractor.sampling_rate)
        return Encoding([], [], [f"{step * token:.2f} s" for token in range(self.longest)], content=features)
