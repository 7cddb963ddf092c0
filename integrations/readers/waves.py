"""Audio as models of raw waves read it: numbers, and tokens labelled by their time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from captum_hta.integrations.readers.contents import ContentReader
from captum_hta.model.encoding import Encoding

RATE = 16000
"""Numbers a second, if there is no feature extractor."""


class WaveReader(ContentReader):
    """Reads audio with a feature extractor, or takes its numbers as they are.

    Args:
        tokenizer: A feature extractor of ``transformers``, or ``None``.
        kernels, strides: Of the convolutions that make tokens of numbers.
    """

    medium = "audio"
    longest: int | None = None
    sampled: int | None = 6

    def __init__(self, tokenizer: Any, kernels: Sequence[int], strides: Sequence[int]) -> None:
        self.tokenizer, self.kernels, self.strides = tokenizer, tuple(kernels), tuple(strides)

    @property
    def rate(self) -> int:
        """Numbers a second."""
        return int(getattr(self.tokenizer, "sampling_rate", RATE))

    @property
    def reads(self) -> str:
        """What is accepted, in words."""
        return f"audio (an array of numbers at {self.rate} Hz)"

    def accepts(self, audio: object) -> bool:
        """Whether it is an array with one axis."""
        return isinstance(audio, np.ndarray | Tensor) and audio.ndim == 1

    def sample(self) -> Encoding:
        """The first tokens of a short wave."""
        needed = 1
        for kernel, stride in zip(reversed(self.kernels), reversed(self.strides), strict=True):
            needed = (max(needed, 8 if needed == 1 else 0) - 1) * stride + kernel
        return self._encoding(torch.arange(needed, device="cpu").mul(0.7).sin()).first(self.sampled)

    def encode(self, audio: object, max_length: int | None = None) -> Encoding:
        """Read audio. It is never cut.

        Raises:
            ValueError: If it is no array of real numbers, or too short for a token.
        """
        wave = torch.as_tensor(audio, device="cpu").detach().cpu()
        if not wave.is_floating_point() or not wave.numel():
            raise ValueError(
                f"audio is an array of real numbers between -1 and 1, got {wave.numel()} numbers of "
                f"{wave.dtype}: divide integers by the largest that they may be"
            )
        if self._count(len(wave)) < 1:
            raise ValueError(f"audio of {len(wave)} numbers is too short for a token: pass a longer one")
        if self.tokenizer is not None:
            made = self.tokenizer(wave.float().numpy(), sampling_rate=self.rate, return_tensors="pt")
            wave = made["input_values"][0]
        return self._encoding(wave)

    def _count(self, length: int) -> int:
        """The number of tokens of so many numbers."""
        for kernel, stride in zip(self.kernels, self.strides, strict=True):
            length = (length - kernel) // stride + 1
        return length

    def _encoding(self, wave: Tensor) -> Encoding:
        step = int(np.prod(self.strides)) / self.rate
        labels = [f"{step * token:.2f} s" for token in range(self._count(len(wave)))]
        return Encoding([], [], labels, content=wave)
