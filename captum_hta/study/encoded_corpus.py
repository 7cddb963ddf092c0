"""The texts of a study as the model reads them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from captum_hta.batching import groups
from captum_hta.model.encoding import Encoding, Text
from captum_hta.model.protocol import Model
from captum_hta.study.settings import StudySettings
from captum_hta.texts import encoded


@dataclass(frozen=True)
class Dimensions:
    """Sizes of the arrays of a study.

    Attributes:
        layers: Numbers of the layers on the layer axis.
        heads: Number of heads of a layer.
        d_head: Width of a head's output.
        longest: Tokens of the longest text.
        num_layers: Number of layers of the model, studied or not.
    """

    layers: list[int]
    heads: int
    d_head: int
    longest: int
    num_layers: int


class EncodedCorpus:
    """Texts with their lengths. Encodings are not kept: each text is encoded again when it is needed.

    Args:
        model: The model.
        texts: The corpus.
        settings: Settings of the study.

    Attributes:
        layers: Layers to study, each once, counted from 0.
        lengths: Number of tokens of each text.
        longest: Tokens of the longest text, or of the longest second text where keys are of another text.

    Raises:
        ValueError: If there is no text, a text is longer than the model reads, or special tokens are to be
            excluded and none is known, or keys are of another text.
    """

    def __init__(self, model: Model, texts: Sequence[Text], settings: StudySettings) -> None:
        if not texts:
            raise ValueError("there is no text to study: pass at least one")
        named = range(model.num_layers) if settings.layers is None else settings.layers
        self.layers = list(dict.fromkeys(layer % model.num_layers for layer in named))
        self.model, self.texts = model, texts
        self.settings = replace(settings, layers=self.layers)
        self.lengths: list[int] = []
        self.longest = 0
        for row in range(len(texts)):
            one = self.encoding(row)
            self.lengths.append(len(one))
            self.longest = max(self.longest, len(one), len(one.context or ()))
        self._cost = sum(length**2 for length in self.lengths)
        if settings.exclude_special:
            self._check_special_tokens()

    def _check_special_tokens(self) -> None:
        if not self.is_self_attention:
            raise ValueError(
                "special tokens can be excluded for self-attention only, where keys are the queries: study "
                "the encoder or the decoder, or leave exclude_special out"
            )
        if not any(special_tokens(self.encoding(row)).any() for row in range(len(self.texts))):
            raise ValueError(
                f"{self.model.name} adds no special token to these texts, or its tokenizer does not tell "
                "which tokens are special: leave exclude_special out"
            )

    @property
    def dimensions(self) -> Dimensions:
        """Sizes of the arrays of the study."""
        return Dimensions(
            layers=self.layers,
            heads=self.model.num_heads,
            d_head=self.model.d_head,
            longest=self.longest,
            num_layers=self.model.num_layers,
        )

    @property
    def is_self_attention(self) -> bool:
        """Whether keys and queries are of the same text."""
        return self.model.key_layers is None

    @cached_property
    def shows_values(self) -> bool:
        """Whether the model's adapter gives the values that attention weighs and the output projection."""
        try:
            for layer in self.layers:
                self.model.output_projection(layer)
        except ValueError:
            return False
        shortest = self.encoding(min(range(len(self.lengths)), key=self.lengths.__getitem__))
        return all(one.value is not None for one in self.model.attention(self.model.batch([shortest])))

    def encoding(self, row: int) -> Encoding:
        """The text of that number, as the model reads it."""
        return encoded(self.model, self.texts[row], row, self.settings.truncation)

    def sample(self, count: int) -> list[Encoding]:
        """That many of the texts, or all, drawn at random by the seed, in their order."""
        rows = random.Random(self.settings.seed).sample(range(len(self.texts)), min(count, len(self.texts)))
        return [self.encoding(row) for row in sorted(rows)]

    def shards(self, size: int) -> Iterator[list[list[int]]]:
        """Numbers of texts in groups of similar lengths, ``size`` groups at a time."""
        few = list(groups(self.lengths))
        for start in range(0, len(few), size):
            yield few[start : start + size]

    def share(self, rows: Sequence[int]) -> float:
        """The share of the whole cost that these texts have."""
        return sum(self.lengths[row] ** 2 for row in rows) / self._cost


def special_tokens(encoding: Encoding) -> NDArray[np.bool_]:
    """Whether each token is special, ``[token]``: such as ``[CLS]`` and ``[SEP]``, or a token that begins a
    text, which belong to no word. Full stops and commas are words. If the tokenizer does not tell words, no
    token is known to be special.
    """
    if encoding.words is None:
        return np.zeros(len(encoding), dtype=bool)
    return np.array([word is None for word in encoding.words])
