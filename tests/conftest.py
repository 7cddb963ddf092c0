"""Models and texts that several tests use."""

from __future__ import annotations

import os

# On tensors as small as most of these, a second thread costs far more than it saves, above all on a busy
# machine. PyTorch reads this when it is imported, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from studies import EXACT, TEXTS
from transformers import BertConfig, BertForMaskedLM, RobertaConfig, RobertaForMaskedLM

from captum_hta import load_model
from captum_hta.integrations import TransformerLensModel
from captum_hta.study.run import Study, run
from captum_hta.study.settings import StudySettings

PAIR = ("The cat sat.", "It slept.")
SHORT = "Dogs bark."


class WordTokenizer:
    """A tokenizer without a vocabulary file: each word is hashed to an id of a tiny vocabulary."""

    pad_token_id = 0
    all_special_ids = (0, 1, 2)
    is_fast = False

    def __init__(self, size: int = 64, segments: bool = True) -> None:
        self.size, self.segments = size, segments

    def __len__(self) -> int:
        return self.size

    def __call__(self, text: str, pair: str | None = None, **options: object) -> dict[str, list[int]]:
        first = [1, *map(self._id, text.split()), 2]
        second = [] if pair is None else [*map(self._id, pair.split()), 2]
        encoded = {"input_ids": first + second}
        if self.segments:
            encoded["token_type_ids"] = [0] * len(first) + [1] * len(second)
        return encoded

    def _id(self, word: str) -> int:
        return 4 + sum(map(ord, word)) % (self.size - 4)

    def convert_ids_to_tokens(self, number: int) -> str:
        return f"t{number}"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return " ".join(tokens)


def tiny_bert(cls: type = BertForMaskedLM, **options: object) -> torch.nn.Module:
    """A random BERT in float64: 2 layers, 2 heads of 4, 40 positions."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=40, initializer_range=0.5, **options,
    )  # fmt: skip
    return cls(config).double().eval()


def tiny_roberta(cls: type = RobertaForMaskedLM) -> torch.nn.Module:
    """A random RoBERTa in float64: 2 layers, 2 heads of 4, 38 positions."""
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=64, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=40, initializer_range=0.5, pad_token_id=1, type_vocab_size=1,
    )  # fmt: skip
    return cls(config).double().eval()


@pytest.fixture(scope="session")
def minilm() -> TransformerLensModel:
    """The real 6-layer BERT of the demo package, in float32."""
    return load_model()


@pytest.fixture(scope="session")
def minilm64() -> TransformerLensModel:
    """The real 6-layer BERT of the demo package, in float64."""
    return load_model(dtype=torch.float64)


@pytest.fixture(scope="module")
def model() -> TransformerLensModel:
    """A tiny random BERT through TransformerLens, in float64, shared by tests that do not change it."""
    return load_model(tiny_bert(), tokenizer=WordTokenizer())


@pytest.fixture
def bert() -> TransformerLensModel:
    """The same, for one test alone."""
    return load_model(tiny_bert(), tokenizer=WordTokenizer())


@pytest.fixture(scope="module")
def study(model: TransformerLensModel) -> Study:
    """An exact study of five texts of different lengths."""
    return run(model, TEXTS, EXACT)


@pytest.fixture(scope="module")
def estimated(model: TransformerLensModel) -> Study:
    """A study of three of the texts with few probes."""
    return run(model, TEXTS[:3], StudySettings(n_probes=2))
