"""Audio as people have it: what is read, and the errors for what cannot be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from families import WHISPER, tiny
from tokenizing import byte_level

from captum_hta import contributions, load_model
from captum_hta.integrations import TransformersModel
from captum_hta.integrations.readers.audio import AudioReader

WAVE = np.sin(np.arange(8000) * 0.2).astype(np.float32)  # half a second
FEATURES = torch.zeros(4, 12)


def extractor() -> hf.WhisperFeatureExtractor:
    """For audio of a second."""
    return hf.WhisperFeatureExtractor(feature_size=4, chunk_length=1)


def whisper(**options: object) -> hf.WhisperModel:
    """A model that reads one second, as 50 tokens."""
    torch.manual_seed(0)
    config = hf.WhisperConfig(**(WHISPER | {"max_source_positions": 50} | options))
    return hf.WhisperForConditionalGeneration(config).eval()


def test_audio_is_read() -> None:
    """The features are those of the extractor, and the labels are times."""
    model = TransformersModel(whisper(), extractor(), part="encoder")
    found = contributions(model, WAVE, source="previous_layer")
    assert found.tokens[0][:3] == ["0.00 s", "0.02 s", "0.04 s"]
    assert found.tokens[0][-1] == "0.98 s"
    features = extractor()(WAVE, sampling_rate=16000, return_tensors="pt").input_features[0]
    torch.testing.assert_close(found.encodings[0].content, features, rtol=0, atol=0)
    for same in (features, features.numpy(), torch.tensor(WAVE), WAVE.astype(np.float64)):
        again = contributions(model, [same], source="previous_layer")
        torch.testing.assert_close(again.values, found.values, rtol=0, atol=0)


def test_a_token_is_where_its_audio_is() -> None:
    """A click at 0.3 s changes the source vectors around that label, and no others."""
    model = TransformersModel(whisper(), None, part="encoder")
    features = torch.zeros(4, 100)
    clicked = features.clone()
    clicked[:, 30] = 1
    entered = []
    handle = model.model.model.encoder.layers[0].register_forward_pre_hook(
        lambda module, args: entered.append(args[0])
    )
    for one in (features, clicked):
        model.model.model.encoder(one[None])
    handle.remove()
    moved = (entered[1] - entered[0])[0].abs().sum(-1) > 0
    labels = model.encode(features).tokens
    changed = [label for label, has_moved in zip(labels, moved, strict=True) if has_moved]
    assert changed == ["0.28 s", "0.30 s", "0.32 s"][-len(changed) :]
    assert "0.30 s" in changed


def test_a_folder_with_its_processor(tmp_path: Path) -> None:
    """Its feature extractor and its tokenizer are found, for every part."""
    tokenizer = byte_level(pad="<|end|>")
    whisper(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no processor is found"):
        load_model(tmp_path, part="encoder")
    hf.WhisperProcessor(extractor(), tokenizer).save_pretrained(tmp_path)
    assert contributions(load_model(tmp_path, part="encoder"), WAVE, layers=[0]).values.shape[-1] == 50
    found = contributions(load_model(tmp_path, part="cross"), [(WAVE, "so it goes")], n_probes=2)
    assert found.values.shape == (1, 3, 4, 5, 50)
    assert found.tokens[0][1:] == ["so", "it", "go", "es"]
    assert found.keys[0][1] == "0.02 s"


PROBLEMS: dict[str, tuple[object, type[Exception], str]] = {
    "text": ("one two", TypeError, r"audio 0 must be audio \(features of shape \[4, 12\]\), got 'one two'"),
    "path": (Path("a.wav"), TypeError, "must be a list, each of them audio"),
    "wave": (WAVE, ValueError, "there is no feature extractor"),
    "frames": (torch.zeros(4, 14), ValueError, r"of shape \[4, 14\], but the model reads \[4, 12\]"),
    "none": ([], ValueError, "there is no audio"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_is_no_audio(problem: str) -> None:
    """The error names what is read."""
    given, kind, words = PROBLEMS[problem]
    with pytest.raises(kind, match=words):
        contributions(TransformersModel(tiny("Whisper"), None, part="encoder"), given)


def test_audio_that_is_too_long() -> None:
    """It is refused, where the feature extractor would cut it without a word."""
    model = TransformersModel(whisper(), extractor(), part="encoder")
    with pytest.raises(ValueError, match="20000 numbers, but the model reads at most 16000, at 16000 Hz"):
        contributions(model, np.zeros(20000))


def test_a_decoder_needs_a_tokenizer() -> None:
    """And a pair."""
    with pytest.raises(ValueError, match="carries no tokenizer"):
        load_model(tiny("Whisper"), part="cross")
    with pytest.raises(ValueError, match="carries no tokenizer"):
        load_model(tiny("Whisper"), tokenizer=extractor(), part="cross")
    model = load_model(whisper(vocab_size=300), tokenizer=byte_level(), part="decoder")
    with pytest.raises(TypeError, match=r"a pair, what the encoder reads \(audio"):
        contributions(model, [("one", "two")])


@pytest.mark.parametrize("audio", [np.zeros(20, dtype=np.int16), np.zeros(0, dtype=np.float32)])
def test_integers_and_nothing_are_no_audio(audio: np.ndarray) -> None:
    """What is no array of real numbers between -1 and 1 is refused with what to do."""
    reader = AudioReader(hf.WhisperFeatureExtractor(), 80, 1500)
    with pytest.raises(ValueError, match="divide integers by the largest"):
        reader.encode(audio)
