r"""How well a hidden token tells which input token it stands for.

After Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 4: token ``i`` is identified in
layer ``l`` if the input embedding next to :math:`g(e_i^l)`, among those of its own text, is its own
:math:`x_i`. The map :math:`g` is the identity, linear or a multilayer perceptron (MLP); the latter two are
learnt from other texts, once for each distance that neighbours are told by.

The width of the MLP and how maps are trained are choices of this package, not the paper's: they let a study
take minutes. Shares of learnt maps grow with the texts that they are learnt from, so that they can be held
against the paper's figures by their course over the layers alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize
from torch.nn.utils import skip_init

from captum_hta.jacobian.endpoints import layers_of
from captum_hta.model.encoding import Encoding
from captum_hta.model.protocol import Model
from captum_hta.model.sites import observed, without_autocast
from captum_hta.statistics.accumulators import Mean
from captum_hta.texts import batches

Array = NDArray[np.float64]
MAPS = ("none", "linear", "mlp")
"""What is applied to hidden tokens before their neighbours are looked up."""
DISTANCES = ("cosine", "euclidean")
"""What is least for the neighbour, and on average for what a map is trained to give."""
SENTENCES = 512
"""Texts that are looked at, at most."""
FEWEST = 10
"""Texts without which no map is trained: of fewer next to nothing would be left to stop it and to test it."""
SPLIT = (70, 15)
"""Percentages of the texts for training and for validation; the rest are for the test."""
MLP_WIDTH = 2
"""Width of the MLP's hidden layer, in widths of the model."""
RATE = 3e-3
"""Learning rate of Adam."""
BATCH = 512
"""Tokens of a training step, at most."""
STEPS = 25
"""Training steps of an epoch, at least."""
EPOCHS = 20
"""Passes over the training tokens, at most."""
PATIENCE = 2
"""Epochs without a lower loss on the validation texts after which training ends."""


# --- result ----------------------------------------------------------------------------------------


@dataclass
class Identifiability:
    """The share of tokens that are identified, by layer, map and distance.

    Attributes:
        layers: The layers of the layer axis.
        identified: Whether a token of the test texts is identified, ``[layer, map, distance]`` in the order
            of :data:`MAPS` and :data:`DISTANCES`; of nothing for learnt maps where there are too few texts.
        epochs: After how many epochs the weights of a map were taken, of the same shape.
        sentences: Number of texts for training, validation and test.
        unique: Share of the test tokens whose input embedding occurs once in their text. No share can exceed
            it: that matters where the embedding does not tell the position.
    """

    layers: list[int]
    identified: Mean
    epochs: Array
    sentences: tuple[int, int, int]
    unique: float

    @property
    def note(self) -> str:
        """Why learnt maps are missing; empty if they are not."""
        if self.sentences[0]:
            return ""
        return (
            f"no map was trained: that takes {FEWEST} different texts, of which there are {self.sentences[2]}"
        )

    def table(self) -> pd.DataFrame:
        """A row for each layer, map and distance: the share of identified tokens, its error by text, what
        chance would give, and what it is measured on. Shares of maps that were not trained are NaN.
        """
        keys = pd.MultiIndex.from_product(
            [self.layers, MAPS, DISTANCES], names=["layer", "map", "distance"]
        ).to_frame(index=False)
        training, validation, test = self.sentences
        tokens = int(self.identified.counts[0, 0, 0])
        return keys.assign(
            identified=self.identified.mean().ravel(),
            identified_error=self.identified.standard_error().ravel(),
            chance=test / tokens,
            unique=self.unique,
            tokens=tokens,
            training_sentences=training,
            validation_sentences=validation,
            test_sentences=test,
            epochs=self.epochs.ravel().astype(int),
        )

    def arrays(self) -> dict[str, NDArray]:
        """All that it holds, by name."""
        rest = {
            "layers": np.array(self.layers),
            "epochs": self.epochs,
            "sentences": np.array(self.sentences),
            "unique": np.array([self.unique]),
        }
        return rest | {f"identified/{name}": array for name, array in self.identified.arrays().items()}

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray]) -> Identifiability:
        """The result that holds :meth:`arrays`."""
        prefix = "identified/"
        parts = {name.removeprefix(prefix): one for name, one in arrays.items() if name.startswith(prefix)}
        training, validation, test = (int(count) for count in arrays["sentences"])
        return cls(
            layers=[int(layer) for layer in arrays["layers"]],
            identified=Mean.of(parts),
            epochs=arrays["epochs"],
            sentences=(training, validation, test),
            unique=float(arrays["unique"][0]),
        )


def identify(
    model: Model,
    encodings: Sequence[Encoding],
    layers: Sequence[int] | int | None = None,
    seed: int = 0,
    advance: Callable[[float], object] = lambda share: None,
) -> Identifiability:
    """How many hidden tokens tell which input token they stand for, after each of some layers.

    Texts that occur several times are taken once, so that no test text is trained on; texts that share a
    part, such as pairs with one premise, are different. At most :data:`SENTENCES` are taken, at random. With
    fewer than :data:`FEWEST` no map is trained, and all are for the test of ``"none"``. All is in float32, on
    the model's device; what is held at a time is the tokens of these texts in one layer.

    Args:
        model: The model.
        encodings: Texts as the model reads them.
        layers: Layers whose outputs are looked at, negative ones from the end. Default: ``None``, all.
        seed: Decides which texts are for what, and the training.
        advance: Called with the share of all maps that has been done.

    Returns:
        Shares over the tokens of the test texts, special tokens included.

    Raises:
        ValueError: If there is no text, a layer is none, or the model reads no texts or has queries of one
            text and keys of another.
    """
    _check(model, encodings)
    layers = layers_of(model, layers)
    chosen = _chosen(encodings, seed)
    sentences = _split(len(chosen))
    shape = (len(MAPS), len(DISTANCES))
    epochs = np.zeros((len(layers), *shape))
    lengths = [len(encoding) for encoding in chosen[-sentences[2] :]]
    found = np.zeros((*epochs.shape, sum(lengths)))
    with torch.inference_mode(False), without_autocast():
        for row, layer in enumerate(layers):
            sides = read_tokens(model, chosen, layer).split(sentences)
            for at in np.ndindex(shape):
                found[row][at], epochs[row][at] = _measured(MAPS[at[0]], DISTANCES[at[1]], *sides, seed)
                advance(1 / (len(layers) * np.prod(shape)))
    share = Mean.zero(*epochs.shape)
    for values in np.split(found, np.cumsum(lengths)[:-1], axis=-1):
        share.add(values)
    return Identifiability(layers, share, epochs, sentences, _unique(sides[2]))


# --- texts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """The tokens of some texts, one text after the other.

    Attributes:
        hidden: What a block gives, ``[token, width]``.
        inputs: What enters the first block, of the same shape.
        lengths: Number of tokens of each text.
    """

    hidden: Tensor
    inputs: Tensor
    lengths: list[int]

    def split(self, sentences: Sequence[int]) -> list[Tokens]:
        """The tokens of the first so many texts, of the next, and so on."""
        ends = np.cumsum(sentences)
        lengths = [self.lengths[end - count : end] for count, end in zip(sentences, ends, strict=True)]
        tokens = [sum(side) for side in lengths]
        sides = zip(self.hidden.split(tokens), self.inputs.split(tokens), lengths, strict=True)
        return [Tokens(*side) for side in sides]

    def texts(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each text its part of values ``[token, ...]``, and its inputs."""
        return zip(values.split(self.lengths), self.inputs.split(self.lengths), strict=True)


def read_tokens(model: Model, encodings: Sequence[Encoding], layer: int) -> Tokens:
    """Hidden tokens after a block and the input embeddings they stand for, in float32."""
    places = {"input": model.source(0), "hidden": model.target(layer, "layer")}
    kept: dict[str, list[Tensor]] = {name: [torch.empty(0)] * len(encodings) for name in places}
    lengths = [len(encoding) for encoding in encodings]
    for rows in batches(lengths):
        batch = model.batch([encodings[row] for row in rows])
        found = observed(places, partial(model.forward, *batch.inputs, *batch.extra))
        for name, values in found.items():
            for row, value, mask in zip(rows, values, batch.mask, strict=True):
                kept[name][row] = value[mask].float()
    return Tokens(torch.cat(kept["hidden"]), torch.cat(kept["input"]), lengths)


def _check(model: Model, encodings: Sequence[Encoding]) -> None:
    if model.reader.medium != "text" or model.key_layers is not None:
        raise ValueError(
            f"tokens are identified within one text, but {model.name} reads {model.reader.reads}: take a "
            "model of texts, or a part of one with self-attention"
        )
    if not encodings:
        raise ValueError("there is no text whose tokens could be identified")


def _chosen(encodings: Sequence[Encoding], seed: int) -> list[Encoding]:
    """Different texts in random order, at most :data:`SENTENCES`."""
    different = {
        repr((one.ids, one.segments, None if one.context is None else one.context.ids)): one
        for one in encodings
    }
    texts = list(different.values())
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    return [texts[row] for row in order[:SENTENCES].tolist()]


def _split(count: int) -> tuple[int, int, int]:
    """How many texts are for training, validation and test; where they are few, all for the test."""
    if count < FEWEST:
        return 0, 0, count
    training, validation = (count * share // 100 for share in SPLIT)
    return training, validation, count - training - validation


# --- neighbours ------------------------------------------------------------------------------------


def identified(mapped: Tensor, tokens: Tokens, distance: str) -> Tensor:
    """Which tokens are identified.

    Args:
        mapped: What a map gives for each token, ``[token, width]``.
        tokens: The tokens.
        distance: One of :data:`DISTANCES`.

    Returns:
        For each token whether its own input embedding is nearer than all others of its text, ``[token]``: not
        so where another is as near, and always so for a text of one token.
    """
    return torch.cat([_own_is_nearest(*text, distance) for text in tokens.texts(mapped)])


def _own_is_nearest(mapped: Tensor, inputs: Tensor, distance: str) -> Tensor:
    if distance == "cosine":  # grows with the distance of vectors of length one
        mapped, inputs = normalize(mapped, dim=-1), normalize(inputs, dim=-1)
    distances = torch.cdist(mapped, inputs, compute_mode="donot_use_mm_for_euclid_dist")  # equal for equal
    own = distances.diagonal()
    others = distances.clone().fill_diagonal_(torch.inf)
    return own < others.min(-1).values


def _unique(tokens: Tokens) -> float:
    """The share of tokens whose input embedding is no other token's of the text."""
    once = []
    for _, inputs in tokens.texts(tokens.hidden):
        _, counts = inputs.unique(dim=0, return_counts=True)
        once.append(int((counts == 1).sum()))
    return sum(once) / sum(tokens.lengths)


# --- maps ------------------------------------------------------------------------------------------


def _measured(
    kind: str, distance: str, training: Tokens, validation: Tokens, test: Tokens, seed: int
) -> tuple[Array, int]:
    """Whether each test token is identified, 0 or 1, and after how many epochs; NaN if a map would have to be
    trained on nothing.
    """
    if kind == "none":
        return identified(test.hidden, test, distance).double().cpu().numpy(), 0
    if not training.lengths:
        return np.full(sum(test.lengths), np.nan), 0
    learnt, epochs = fit(kind, distance, training, validation, seed)
    with torch.no_grad():
        mapped = learnt(test.hidden)
    return identified(mapped, test, distance).double().cpu().numpy(), epochs


class LearntMap(nn.Module):
    """A map from hidden tokens to input embeddings, before it is trained.

    Hidden tokens are standardised before it, and what it gives is scaled as inputs are after it. That leaves
    the maps that it can become the same, and training alike for all models and layers.

    Args:
        kind: ``"linear"``, or ``"mlp"`` with one hidden layer and GELU.
        training: Tokens whose means and deviations are taken.
        generator: Decides the first weights.
    """

    def __init__(self, kind: str, training: Tokens, generator: torch.Generator) -> None:
        super().__init__()
        deviation, self.centre = torch.std_mean(training.hidden, dim=0, correction=0)
        self.scale = deviation.where(deviation > 0, 1)
        self.input_centre = training.inputs.mean(0)
        self.input_scale = (training.inputs - self.input_centre).square().mean().sqrt()
        width = len(self.centre)
        if kind == "linear":
            self.layers = nn.Sequential(_linear(width, width, generator))
        else:
            inner = MLP_WIDTH * width
            first, second = _linear(width, inner, generator), _linear(inner, width, generator)
            self.layers = nn.Sequential(first, nn.GELU(), second)
        self.layers.to(training.hidden.device)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[token, width]`` of ``[token, width]``."""
        return self.input_centre + self.input_scale * self.layers((hidden - self.centre) / self.scale)


def _linear(width: int, out: int, generator: torch.Generator) -> nn.Linear:
    """A linear map, random by a generator and not by the process's random state."""
    layer = skip_init(nn.Linear, width, out)
    nn.init.xavier_uniform_(layer.weight, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def fit(
    kind: str, distance: str, training: Tokens, validation: Tokens, seed: int = 0
) -> tuple[LearntMap, int]:
    """Train a map with Adam until the mean distance on the validation tokens no longer falls.

    Args:
        kind: ``"linear"`` or ``"mlp"``.
        distance: One of :data:`DISTANCES`, of what the map gives to the own input embedding.
        training: Tokens that it is trained on.
        validation: Tokens that tell when to stop.
        seed: Of the first weights, and of the order of the tokens.

    Returns:
        The map with the weights that did best on the validation tokens, and after how many epochs it had
        them.
    """
    generator = torch.Generator().manual_seed(seed)
    learnt = LearntMap(kind, training, generator)
    optimiser = torch.optim.Adam(learnt.parameters(), lr=RATE)
    lowest, best, weights = torch.inf, 0, learnt.state_dict()
    for epoch in range(1, EPOCHS + 1):
        with torch.enable_grad():
            _train_once(learnt, optimiser, training, distance, generator)
        with torch.no_grad():
            loss = _mean_distance(learnt(validation.hidden), validation.inputs, distance).item()
        if loss < lowest:
            lowest, best, weights = loss, epoch, copy.deepcopy(learnt.state_dict())
        elif epoch - best >= PATIENCE:
            break
    learnt.load_state_dict(weights)
    return learnt, best


def _train_once(
    learnt: LearntMap,
    optimiser: torch.optim.Optimizer,
    training: Tokens,
    distance: str,
    generator: torch.Generator,
) -> None:
    """One epoch."""
    order = torch.randperm(len(training.hidden), generator=generator).to(training.hidden.device)
    for rows in order.split(min(BATCH, -(-len(order) // STEPS))):
        optimiser.zero_grad()
        _mean_distance(learnt(training.hidden[rows]), training.inputs[rows], distance).backward()
        optimiser.step()


def _mean_distance(mapped: Tensor, inputs: Tensor, distance: str) -> Tensor:
    if distance == "cosine":
        return (1 - cosine_similarity(mapped, inputs, dim=-1)).mean()
    return torch.linalg.vector_norm(mapped - inputs, dim=-1).mean()
