r"""How well input tokens can be identified from their hidden tokens.

After Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 4: token ``i`` is identified in
layer ``l`` if, among the input embeddings of its own text, the nearest to :math:`g(e_i^l)` is its own
:math:`x_i`. The map :math:`g` is the identity, linear or a multilayer perceptron (MLP); the latter two are
trained on other texts, once for each distance.

The width of the MLP and the training are choices of this package, not the paper's: with them a study takes
minutes. Shares with trained maps grow with the number of training texts, so only their course over the
layers can be compared with the paper's figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from captum_hta.batching import batches_of
from captum_hta.jacobian.endpoints import layers_of
from captum_hta.model.encoding import Encoding
from captum_hta.model.precision import full_precision
from captum_hta.model.protocol import Model
from captum_hta.model.sites import observed
from captum_hta.statistics.accumulators import RowMean
from captum_hta.study.analysis import Advance, Analysis, Once
from captum_hta.study.encoded_corpus import Dimensions
from captum_hta.study.token_maps import Tokens, fit

if TYPE_CHECKING:
    from captum_hta.study.encoded_corpus import EncodedCorpus

Array = NDArray[np.float64]
MAPS = ("none", "linear", "mlp")
"""Maps that are applied to hidden tokens before the nearest input embedding is looked up."""
DISTANCES = ("cosine", "euclidean")
"""Distances by which the nearest is found; each trained map minimises one of them."""
SENTENCES = 512
"""Largest number of texts."""
FEWEST = 10
"""Fewest texts with which maps are trained: with fewer, hardly any would be left for validation and test."""
SPLIT = (70, 15)
"""Percentages of the texts for training and for validation; the rest are for the test."""


# --- the analysis ----------------------------------------------------------------------------------


class Identifiability(Analysis):
    """The share of tokens that are identified, by layer, map and distance.

    Attributes:
        identified: Whether a token of the test texts is identified, ``[layer, map, distance]`` in the order
            of :data:`MAPS` and :data:`DISTANCES`; empty for trained maps if there are too few texts.
        epochs: The epoch whose weights a map has, of the same shape; 0 without training.
        sentences: Numbers of texts for training, validation and test.
        unique: Share of the test tokens whose input embedding occurs once in their text. No share of
            identified tokens can exceed it, which matters if the embedding does not depend on the position.
    """

    name = "identifiability"

    def __init__(self, size: Dimensions) -> None:
        super().__init__(size)
        shape = (len(size.layers), len(MAPS), len(DISTANCES))
        self.identified = RowMean.zero(*shape)
        self.epochs = np.zeros(shape)
        self.sentences = (0, 0, 0)
        self.unique = np.nan

    @classmethod
    def applies(cls, corpus: EncodedCorpus) -> bool:
        """To self-attention."""
        return corpus.is_self_attention

    def finish(self, corpus: EncodedCorpus, once: Once) -> None:
        """Measure it on a sample of the texts."""

        def measured(advance: Advance) -> dict[str, Array]:
            texts = corpus.sample(SENTENCES)
            return identify(corpus.model, texts, corpus.layers, corpus.settings.seed, advance).results()

        self.restore_results(once(measured))

    @property
    def note(self) -> str:
        """Why there are no trained maps; empty if there are."""
        if self.sentences[0]:
            return ""
        return (
            f"no map was trained: that takes {FEWEST} different texts, of which there are {self.sentences[2]}"
        )

    def tables(self) -> dict[str, pd.DataFrame]:
        """``identifiability``: see :meth:`table`."""
        return {"identifiability": self.table()}

    def table(self) -> pd.DataFrame:
        """A row for each layer, map and distance: the share of identified tokens with its standard error by
        text, the share expected by chance, and the numbers of tokens and texts. Shares are NaN for maps that
        were not trained.
        """
        keys = pd.MultiIndex.from_product(
            [self.size.layers, MAPS, DISTANCES], names=["layer", "map", "distance"]
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

    def results(self) -> dict[str, Array]:
        """All results as arrays, by name."""
        rest = {
            "epochs": self.epochs,
            "sentences": np.array(self.sentences, dtype=np.float64),
            "unique": np.array([self.unique]),
        }
        return rest | {f"identified/{name}": array for name, array in self.identified.arrays().items()}

    def restore_results(self, arrays: Mapping[str, Array]) -> None:
        """Take over what :meth:`results` returned."""
        prefix = "identified/"
        self.identified.restore(
            {name.removeprefix(prefix): one for name, one in arrays.items() if name.startswith(prefix)}
        )
        training, validation, test = (int(count) for count in arrays["sentences"])
        self.epochs, self.sentences = arrays["epochs"], (training, validation, test)
        self.unique = float(arrays["unique"][0])


def identify(
    model: Model,
    encodings: Sequence[Encoding],
    layers: Sequence[int] | int | None = None,
    seed: int = 0,
    advance: Advance = lambda share: None,
) -> Identifiability:
    """How many input tokens can be identified from their hidden tokens, after each layer.

    Texts that occur several times are used once, so that no test text is trained on; texts that share a part,
    such as pairs with the same premise, are different. At most :data:`SENTENCES` are used, drawn at random.
    With fewer than :data:`FEWEST` no map is trained, and all texts are test texts. Everything is computed in
    float32 on the model's device, with the tokens of one layer in memory at a time.

    Args:
        model: The model.
        encodings: Texts as the model reads them.
        layers: Layers whose outputs are the hidden tokens; negative numbers count from the end. Default:
            ``None``, all.
        seed: Seed of the split of the texts and of the training.
        advance: Called with the share of all maps that has been done.

    Returns:
        Shares of the tokens of the test texts, special tokens included.

    Raises:
        ValueError: If there is no text, the model has no such layer, reads no texts, or has queries of one
            text and keys of another.
    """
    _check(model, encodings)
    numbers = layers_of(model, layers)
    chosen = sampled(encodings, seed)
    lengths = [len(encoding) for encoding in chosen]
    found = Identifiability(
        Dimensions(numbers, model.num_heads, model.d_head, max(lengths), model.num_layers)
    )
    found.sentences = split_counts(len(chosen))
    test_lengths = lengths[-found.sentences[2] :]
    rows_of_hits = np.zeros((*found.epochs.shape, sum(test_lengths)))
    with torch.inference_mode(False), full_precision():
        for row, layer in enumerate(numbers):
            training, validation, test = read_tokens(model, chosen, layer).split(found.sentences)
            for at in np.ndindex(len(MAPS), len(DISTANCES)):
                rows_of_hits[row][at], found.epochs[row][at] = hits(
                    MAPS[at[0]], DISTANCES[at[1]], training, validation, test, seed
                )
                advance(1 / found.epochs.size)
    for values in np.split(rows_of_hits, np.cumsum(test_lengths)[:-1], axis=-1):
        found.identified.add(values)
    found.unique = unique_share(test)
    return found


# --- texts -----------------------------------------------------------------------------------------


def read_tokens(model: Model, encodings: Sequence[Encoding], layer: int) -> Tokens:
    """Hidden tokens after a block and their input embeddings, in float32."""
    places = {"input": model.source(model.first_entry), "hidden": model.target(layer, "layer")}
    kept: dict[str, list[Tensor]] = {name: [torch.empty(0, device="cpu")] * len(encodings) for name in places}
    lengths = [len(encoding) for encoding in encodings]
    for rows in batches_of(encodings):
        batch = model.batch([encodings[row] for row in rows])
        found = observed(places, partial(model.forward, *batch.inputs, *batch.extra))
        for name, values in found.items():
            for row, value, mask in zip(rows, values, batch.mask, strict=True):
                kept[name][row] = value[mask].float()
    return Tokens(torch.cat(kept["hidden"]), torch.cat(kept["input"]), lengths)


def _check(model: Model, encodings: Sequence[Encoding]) -> None:
    if model.reader.medium != "text" or model.key_layers is not None:
        raise ValueError(
            f"tokens are identified within one text, but {model.name} reads {model.reader.reads}: use a "
            "text model, or its encoder or decoder alone"
        )
    if not encodings:
        raise ValueError("there is no text whose tokens could be identified: pass at least one")


def sampled(encodings: Sequence[Encoding], seed: int) -> list[Encoding]:
    """At most :data:`SENTENCES` different texts in random order."""
    different = {
        (tuple(one.ids), tuple(one.segments), None if one.context is None else tuple(one.context.ids)): one
        for one in encodings
    }
    texts = list(different.values())
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed), device="cpu")
    return [texts[row] for row in order[:SENTENCES].tolist()]


def split_counts(count: int) -> tuple[int, int, int]:
    """Numbers of texts for training, validation and test; if there are few texts, all are for the test."""
    if count < FEWEST:
        return 0, 0, count
    training, validation = (count * share // 100 for share in SPLIT)
    return training, validation, count - training - validation


# --- neighbours ------------------------------------------------------------------------------------


def identified(mapped: Tensor, tokens: Tokens, distance: str) -> Tensor:
    """Which tokens are identified.

    Args:
        mapped: The output of a map for each token, ``[token, width]``.
        tokens: The tokens.
        distance: One of :data:`DISTANCES`.

    Returns:
        Whether each token's own input embedding is nearer than all others of its text, ``[token]``: false if
        another is equally near, true for a text of one token.
    """
    return torch.cat([_own_is_nearest(*text, distance) for text in tokens.texts(mapped)])


def _own_is_nearest(mapped: Tensor, inputs: Tensor, distance: str) -> Tensor:
    if distance == "cosine":  # a monotone function of the Euclidean distance between unit vectors
        mapped, inputs = normalize(mapped, dim=-1), normalize(inputs, dim=-1)
    distances = torch.cdist(mapped, inputs, compute_mode="donot_use_mm_for_euclid_dist")  # exact for ties
    own = distances.diagonal()
    others = distances.clone().fill_diagonal_(torch.inf)
    return own < others.min(-1).values


def unique_share(tokens: Tokens) -> float:
    """The share of tokens whose input embedding occurs only once in their text."""
    once = []
    for _, inputs in tokens.texts(tokens.hidden):
        _, counts = torch.unique(inputs, dim=0, return_counts=True)
        once.append(int((counts == 1).sum()))
    return sum(once) / sum(tokens.lengths)


# --- maps ------------------------------------------------------------------------------------------


def hits(
    kind: str, distance: str, training: Tokens, validation: Tokens, test: Tokens, seed: int
) -> tuple[Array, int]:
    """Whether each test token is identified, 0 or 1, and the epoch of the map's weights; NaN if there is no
    training text for the map.
    """
    if kind == "none":
        return identified(test.hidden, test, distance).double().cpu().numpy(), 0
    if not training.lengths:
        return np.full(sum(test.lengths), np.nan), 0
    trained, epochs = fit(kind, distance, training, validation, seed)
    with torch.no_grad():
        mapped = trained(test.hidden)
    return identified(mapped, test, distance).double().cpu().numpy(), epochs
