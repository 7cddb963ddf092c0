"""Maps from hidden tokens to input embeddings, and how they are trained."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.nn.utils import skip_init

MLP_WIDTH = 2
"""Width of the MLP's hidden layer, in widths of the model."""
RATE = 3e-3
"""Learning rate of Adam."""
BATCH = 512
"""Largest number of tokens of a training step."""
STEPS = 25
"""Smallest number of training steps of an epoch."""
EPOCHS = 20
"""Largest number of passes over the training tokens."""
PATIENCE = 2
"""Epochs without a lower loss on the validation texts after which training ends."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of some texts, one text after the other.

    Attributes:
        hidden: Hidden embeddings after a block, ``[token, width]``.
        inputs: Input embeddings, of the same shape.
        lengths: Number of tokens of each text.
    """

    hidden: Tensor
    inputs: Tensor
    lengths: list[int]

    def split(self, sentences: Sequence[int]) -> list[Tokens]:
        """Tokens of consecutive groups of texts, given the number of texts in each group."""
        ends = np.cumsum(sentences)
        lengths = [self.lengths[end - count : end] for count, end in zip(sentences, ends, strict=True)]
        tokens = [sum(side) for side in lengths]
        sides = zip(torch.split(self.hidden, tokens), torch.split(self.inputs, tokens), lengths, strict=True)
        return [Tokens(*side) for side in sides]

    def texts(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The slice of values ``[token, ...]`` of each text, with its input embeddings."""
        both = torch.split(values, self.lengths), torch.split(self.inputs, self.lengths)
        return zip(*both, strict=True)


class TokenMap(nn.Module):
    """A map from hidden tokens to input embeddings, with random weights.

    Hidden tokens are standardised first, and the output is scaled like the inputs. This does not change the
    set of maps that training can reach, and makes training similar for all models and layers.

    Args:
        kind: ``"linear"``, or ``"mlp"`` with one hidden layer and GELU.
        training: Tokens whose means and deviations are used.
        generator: Generator of the initial weights.
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
        """Map hidden tokens ``[token, width]`` to input embeddings, of the same shape."""
        mapped: Tensor = self.layers((hidden - self.centre) / self.scale)
        return self.input_centre + self.input_scale * mapped


def _linear(width: int, out: int, generator: torch.Generator) -> nn.Linear:
    """A linear map with weights from a generator, so that the global random state is left alone."""
    layer: nn.Linear = skip_init(nn.Linear, width, out)  # type: ignore[no-untyped-call]
    nn.init.xavier_uniform_(layer.weight, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def fit(
    kind: str, distance: str, training: Tokens, validation: Tokens, seed: int = 0
) -> tuple[TokenMap, int]:
    """Train a map with Adam until the mean distance on the validation tokens no longer falls.

    Args:
        kind: ``"linear"`` or ``"mlp"``.
        distance: ``"cosine"`` or ``"euclidean"``: the distance between output and own input embedding.
        training: Tokens on which it is trained.
        validation: Tokens that decide when to stop.
        seed: Seed of the initial weights and of the order of the tokens.

    Returns:
        The map with the weights that did best on the validation tokens, and the epoch after which it had
        them.
    """
    generator = torch.Generator().manual_seed(seed)
    trained = TokenMap(kind, training, generator)
    optimiser = torch.optim.Adam(trained.parameters(), lr=RATE)
    lowest, best, weights = torch.inf, 0, trained.state_dict()
    for epoch in range(1, EPOCHS + 1):
        with torch.enable_grad():
            _train_once(trained, optimiser, training, distance, generator)
        with torch.no_grad():
            loss = _mean_distance(trained(validation.hidden), validation.inputs, distance).item()
        if loss < lowest:
            lowest, best, weights = loss, epoch, copy.deepcopy(trained.state_dict())
        elif epoch - best >= PATIENCE:
            break
    trained.load_state_dict(weights)
    return trained, best


def _train_once(
    trained: TokenMap,
    optimiser: torch.optim.Optimizer,
    training: Tokens,
    distance: str,
    generator: torch.Generator,
) -> None:
    """Train for one epoch."""
    order = torch.randperm(len(training.hidden), generator=generator, device="cpu").to(training.hidden.device)
    for rows in torch.split(order, min(BATCH, -(-len(order) // STEPS))):
        optimiser.zero_grad()
        loss = _mean_distance(trained(training.hidden[rows]), training.inputs[rows], distance)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def _mean_distance(mapped: Tensor, inputs: Tensor, distance: str) -> Tensor:
    if distance == "cosine":
        return (1 - cosine_similarity(mapped, inputs, dim=-1)).mean()
    lengths: Tensor = torch.linalg.vector_norm(mapped - inputs, dim=-1)
    return lengths.mean()
