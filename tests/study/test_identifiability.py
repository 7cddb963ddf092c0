"""Whether tokens are identified: on tokens whose answer is known, and one token at a time."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import WordTokenizer
from families import tiny
from torch import Tensor

from captum_hta.integrations import TransformerLensModel, TransformersModel
from captum_hta.model.encoding import Encoding
from captum_hta.model.protocol import Model
from captum_hta.model.sites import observed
from captum_hta.study import corpus, identifiability, token_maps
from captum_hta.study.checkpoint import Shards
from captum_hta.study.identifiability import (
    DISTANCES,
    MAPS,
    Identifiability,
    hits,
    identified,
    identify,
    read_tokens,
    sampled,
    split_counts,
    unique_share,
)
from captum_hta.study.token_maps import Tokens, fit
from captum_hta.texts import encoded

LEARNT = [(kind, distance) for kind in MAPS[1:] for distance in DISTANCES]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little training, where it does not matter how well maps are learnt."""
    monkeypatch.setattr(token_maps, "EPOCHS", 2)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotation(width: int) -> Tensor:
    return torch.linalg.qr(normal(width, width, seed=9)).Q


def texts(count: int) -> list[str]:
    """Different texts of 2 to 9 words."""
    return [" ".join(f"w{number * 7 + place}" for place in range(2 + number % 8)) for number in range(count)]


def read(model: Model, count: int) -> list[Encoding]:
    return [encoded(model, text, number) for number, text in enumerate(texts(count))]


def sides(hidden: Tensor, inputs: Tensor, length: int) -> list[Tokens]:
    """Tokens of texts of one length, 70 of 100 for training and 15 for validation."""
    count = len(hidden) // length
    return Tokens(hidden, inputs, [length] * count).split(split_counts(count))


def share(kind: str, distance: str, hidden: Tensor, inputs: Tensor, length: int = 10) -> float:
    """The share of test tokens that are identified."""
    found, _ = hits(kind, distance, *sides(hidden, inputs, length), seed=0)
    return found.mean()


# --- neighbours ------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", DISTANCES)
def test_one_token_at_a_time(distance: str) -> None:
    """Neighbours by a loop over three texts, one of them of a single token."""
    lengths = [4, 1, 7]
    inputs = normal(12, 6)
    mapped = inputs + normal(12, 6, seed=1)
    expected = []
    for text in (range(4), range(4, 5), range(5, 12)):
        for token in text:
            away = []
            for other in text:
                x, y = mapped[token].double().numpy(), inputs[other].double().numpy()
                cosine = 1 - x @ y / np.sqrt((x @ x) * (y @ y))
                away.append(cosine if distance == "cosine" else np.sqrt(((x - y) ** 2).sum()))
            expected.append(text[int(np.argmin(away))] == token)
    found = identified(mapped, Tokens(mapped, inputs, lengths), distance)
    assert found.tolist() == expected
    assert 2 < sum(expected) < 11


@pytest.mark.parametrize("distance", DISTANCES)
def test_an_equal_neighbour_is_not_the_own(distance: str) -> None:
    """Tokens whose input occurs twice are not identified, in texts of any length; they are no share of those
    that can be.
    """
    for length in range(2, 40):
        inputs = normal(length, 33)
        inputs[-1] = inputs[0]
        tokens = Tokens(inputs, inputs, [length])
        expected = [False, *[True] * (length - 2), False]
        assert identified(inputs, tokens, distance).tolist() == expected
        assert unique_share(tokens) == (length - 2) / length


# --- maps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", DISTANCES)
def test_hidden_tokens_that_are_their_inputs(distance: str) -> None:
    """All are identified, without a map and with a linear one."""
    inputs = normal(2000, 16)
    assert share("none", distance, inputs, inputs) == 1
    assert share("linear", distance, inputs, inputs) > 0.99


@pytest.mark.parametrize(("kind", "distance"), LEARNT)
def test_hidden_tokens_that_are_rotated(kind: str, distance: str) -> None:
    """A learnt map turns them back; without one they are hardly told."""
    inputs = normal(4000, 16)
    hidden = inputs @ rotation(16) + 0.01 * normal(4000, 16, seed=1)
    assert share("none", distance, hidden, inputs) < 0.2
    assert share(kind, distance, hidden, inputs) > (0.99 if kind == "linear" else 0.95)


@pytest.mark.parametrize(("kind", "distance"), LEARNT)
def test_hidden_tokens_that_are_bent(kind: str, distance: str) -> None:
    """An MLP straightens what a linear map cannot."""
    inputs = normal(8000, 4)
    hidden = torch.cat([inputs.abs(), (inputs > 0).float()], dim=1) @ rotation(8)
    padded = torch.cat([inputs, torch.zeros_like(inputs)], dim=1)
    found = share(kind, distance, hidden, padded)
    assert found > 0.9 if kind == "mlp" else found < 0.8


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("distance", DISTANCES)
def test_hidden_tokens_that_know_nothing(kind: str, distance: str) -> None:
    """One of ten is identified, by chance."""
    found = share(kind, distance, normal(4000, 16, seed=1), normal(4000, 16))
    assert found == pytest.approx(0.1, abs=4 * np.sqrt(0.1 * 0.9 / 600))


@pytest.mark.parametrize(("kind", "distance"), LEARNT)
def test_the_best_weights_are_kept(kind: str, distance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the lowest loss on validation tokens: no number of epochs gives lower ones, up to the last."""
    monkeypatch.setattr(token_maps, "RATE", 0.03)
    hidden, inputs = normal(400, 16, seed=1), normal(400, 16)
    training, validation, _ = sides(hidden + 0.3 * inputs, inputs, 10)

    def loss() -> tuple[float, int]:
        """The loss of a trained map, over the validation tokens one by one; and its epochs."""
        learnt, epochs = fit(kind, distance, training, validation)
        mapped, own = learnt(validation.hidden).detach().double(), validation.inputs.double()
        if distance == "cosine":
            cosines = [float(x @ y / (x.norm() * y.norm())) for x, y in zip(mapped, own, strict=True)]
            return 1 - float(np.mean(cosines)), epochs
        return float(np.mean([float((x - y).norm()) for x, y in zip(mapped, own, strict=True)])), epochs

    found, epochs = loss()
    assert epochs < token_maps.EPOCHS - token_maps.PATIENCE
    losses = []
    for most in range(1, epochs + token_maps.PATIENCE + 1):
        monkeypatch.setattr(token_maps, "EPOCHS", most)
        losses.append(loss())
    assert min(losses) == losses[epochs - 1] == (found, epochs)
    assert losses[-1] == losses[epochs - 1]


@pytest.mark.parametrize("kind", MAPS[1:])
def test_a_component_that_does_not_vary(kind: str) -> None:
    """It neither stops the training nor upsets the map where it does vary."""
    inputs = normal(1000, 8)
    hidden = inputs.clone()
    hidden[:, 3] = 5
    training, validation, _ = sides(hidden, inputs, 10)
    learnt, _ = fit(kind, "euclidean", training, validation)
    assert learnt(hidden + 0.1).isfinite().all()


# --- texts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 9, 10, 33, 512])
def test_the_split(count: int) -> None:
    """70, 15 and 15 percent to whole texts, the rest to the test; of few texts all."""
    training, validation, test = split_counts(count)
    assert training + validation + test == count
    if count < identifiability.FEWEST:
        assert test == count
    else:
        assert (training, validation) == (int(np.floor(0.7 * count)), int(np.floor(0.15 * count)))
        assert min(training, validation, test) > 0


def test_no_text_is_on_two_sides(bert: TransformerLensModel) -> None:
    """Tokens of a side are those of its texts, and texts that occur twice are taken once."""
    encodings = read(bert, 20)
    chosen = sampled([*encodings, *encodings[::-1]], seed=3)
    assert sorted(one.ids for one in chosen) == sorted(one.ids for one in encodings)
    counts = split_counts(20)
    tokens = read_tokens(bert, chosen, 1).split(counts)
    rest = iter(chosen)
    for side, count in zip(tokens, counts, strict=True):
        for length, (hidden, inputs) in zip(side.lengths, side.texts(side.hidden), strict=True):
            encoding = next(rest)
            alone = read_tokens(bert, [encoding], 1)
            assert length == len(encoding)
            torch.testing.assert_close(hidden, alone.hidden)
            torch.testing.assert_close(inputs, alone.inputs)
        assert len(side.lengths) == count
    assert next(rest, None) is None


def test_texts_are_chosen_by_seed(bert: TransformerLensModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many, others for another seed."""
    monkeypatch.setattr(identifiability, "SENTENCES", 7)
    encodings = read(bert, 30)
    first, again, other = (sampled(encodings, seed) for seed in (0, 0, 1))
    assert len(first) == 7
    assert first == again
    assert first != other


# --- models ----------------------------------------------------------------------------------------


def naive(model: Model, encodings: list[Encoding], layer: int, distance: str) -> list[list[bool]]:
    """Whether each token is identified without a map, by hooks of the test's own, a text at a time."""
    found = []
    for encoding in encodings:
        batch = model.batch([encoding])
        forward_pass = observed(
            {"x": model.source(0), "e": model.target(layer, "layer")},
            lambda batch=batch: model.forward(*batch.inputs, *batch.extra),
        )
        x, e = (forward_pass[name][0].double().numpy() for name in ("x", "e"))
        if distance == "cosine":
            x, e = (one / np.linalg.norm(one, axis=1, keepdims=True) for one in (x, e))
        found.append([int(np.argmin(np.linalg.norm(x - y, axis=1))) == i for i, y in enumerate(e)])
    return found


def adapters() -> dict[str, Model]:
    return {
        "GPT-2": TransformersModel(tiny("GPT-2"), WordTokenizer(60)),
        "ALBERT": TransformersModel(tiny("ALBERT"), WordTokenizer(60)),
        "BART encoder": TransformersModel(tiny("BART"), WordTokenizer(60), part="encoder"),
    }


def check_naive(model: Model) -> None:
    """Shares and their errors are those of the test texts, read one at a time."""
    encodings = read(model, 14)
    result = identify(model, encodings, None, seed=2)
    table = result.table().set_index(["layer", "map", "distance"])
    test = sampled(encodings, 2)[-result.sentences[2] :]
    assert result.sentences == (9, 2, 3)
    for layer in range(model.num_layers):
        for distance in DISTANCES:
            rows = naive(model, test, layer, distance)
            row = table.loc[(layer, "none", distance)]
            tokens = sum(map(len, rows))
            mean = sum(map(sum, rows)) / tokens
            spread = sum((sum(one) - mean * len(one)) ** 2 for one in rows)
            assert row["identified"] == pytest.approx(mean)
            assert row["identified_error"] == pytest.approx(np.sqrt(3 / 2 * spread) / tokens)
            assert (row["tokens"], row["chance"]) == (tokens, pytest.approx(3 / tokens))
    assert table["identified"].between(0, 1).all()
    trained = table.query("map != 'none'")["epochs"]
    assert trained.between(1, token_maps.EPOCHS).all()
    assert (table.query("map == 'none'")["epochs"] == 0).all()


@pytest.mark.usefixtures("quick")
def test_bert(bert: TransformerLensModel) -> None:
    """Through TransformerLens."""
    check_naive(bert)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["GPT-2", "ALBERT", "BART encoder"])
def test_models_of_transformers(name: str) -> None:
    """Causal, with shared blocks, and part of an encoder-decoder."""
    check_naive(adapters()[name])


@pytest.mark.usefixtures("quick")
def test_layers_and_progress(bert: TransformerLensModel) -> None:
    """Layers are named as elsewhere, have the numbers that they have among others, and progress is told."""
    told: list[float] = []
    encodings = read(bert, 12)
    last = identify(bert, encodings, [-1], advance=told.append).table()
    assert sum(told) == pytest.approx(1)
    both = identify(bert, encodings).table()
    assert list(both["layer"]) == [0] * 6 + [1] * 6
    pd.testing.assert_frame_equal(last, both[both["layer"] == 1].reset_index(drop=True))
    for name, values in (("map", MAPS), ("distance", DISTANCES)):
        assert set(last[name]) == set(values)


@pytest.mark.usefixtures("quick")
def test_nothing_is_left_behind(bert: TransformerLensModel) -> None:
    """Numbers depend on the seed, not on random states or modes, and neither these nor the model change."""
    encodings = read(bert, 12)
    before = copy.deepcopy(bert.module.state_dict())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = identify(bert, encodings, seed=4).table()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    with torch.inference_mode():
        pd.testing.assert_frame_equal(identify(bert, encodings, seed=4).table(), first)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        pd.testing.assert_frame_equal(identify(bert, encodings, seed=4).table(), first)
    assert not identify(bert, encodings, seed=7).table().equals(first)
    for name, values in bert.module.state_dict().items():
        torch.testing.assert_close(values, before[name], rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in bert.module.parameters())


@pytest.mark.usefixtures("quick")
def test_few_texts(bert: TransformerLensModel) -> None:
    """No map is trained, all texts are for the test, and a note says so."""
    few = identify(bert, read(bert, 9))
    table = few.table()
    assert few.sentences == (0, 0, 9)
    assert "10 different texts, of which there are 9" in few.note
    assert table.query("map == 'none'")["identified"].between(0, 1).all()
    learnt = table.query("map != 'none'")
    assert learnt[["identified", "identified_error"]].isna().all(axis=None)
    assert (learnt["epochs"] == 0).all()
    assert identify(bert, read(bert, 10), [0]).note == ""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("count", [3, 12])
def test_a_result_is_read_back(bert: TransformerLensModel, tmp_path: Path, count: int) -> None:
    """From a shard, with all that it says."""
    result = identify(bert, read(bert, count))
    shards = Shards(tmp_path, {})
    shards.write(0, result.results())
    back = Identifiability(result.size)
    back.restore_results(shards.read(0))
    pd.testing.assert_frame_equal(back.table(), result.table())
    assert (back.sentences, back.note) == (result.sentences, result.note)


def test_what_cannot_be_identified(bert: TransformerLensModel) -> None:
    """No text, a layer that is none, and queries and keys of different texts."""
    with pytest.raises(ValueError, match="there is no text"):
        identify(bert, [])
    with pytest.raises(ValueError, match="layers 0 to 1"):
        identify(bert, read(bert, 2), [2])
    crossed = TransformersModel(tiny("BART"), WordTokenizer(60), part="cross")
    with pytest.raises(ValueError, match="its encoder or decoder alone"):
        identify(crossed, [])


@pytest.mark.slow
def test_the_demo_model(minilm: TransformerLensModel) -> None:
    """Its first layer tells tokens far better than chance, and better than its last."""
    pairs, _ = corpus.read_texts(corpus.shipped_pairs(), corpus.Choice(limit=24))
    encodings = [encoded(minilm, text, number) for number, text in enumerate(pairs)]
    table = identify(minilm, encodings, [0, 5]).table().set_index(["map", "distance", "layer"])
    assert (table["unique"] == 1).all()
    assert table.loc[("none", "cosine", 0), "identified"] > 0.95
    for kind in MAPS:
        first, last = (table.loc[(kind, "cosine", layer), "identified"] for layer in (0, 5))
        assert first > last > 3 * table["chance"].max()
