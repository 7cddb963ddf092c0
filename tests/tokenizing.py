"""Tokenizers that are trained on the spot."""

from __future__ import annotations

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = ["the cat sat on the mat", "dogs bark at night", "def f(x):\n    return x", "so it goes"] * 3


def byte_level(special: tuple[str, ...] = ("<|end|>",), pad: str | None = None) -> object:
    """A byte-level BPE tokenizer like GPT-2's: no BOS, and no padding token unless one is named."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator(CORPUS, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token=pad)
