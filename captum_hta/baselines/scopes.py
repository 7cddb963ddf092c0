"""Jacobian scopes: what moves the final hidden state along a direction that means something."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor
from torch.nn import Module

from captum_hta.baselines.base import Baseline, Example, wide
from captum_hta.jacobian.engine import Question, answer
from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.model.protocol import Model
from captum_hta.model.sites import Site, observed

SCOPES = ("semantic", "temperature", "fisher")


class JacobianScope(Baseline):
    r"""The length of :math:`v^\top J_{ji}`, from the embedding of token ``i`` to the normed final hidden
    state of token ``j``.

    The vector is the row of the unembedding of a token (``"semantic"``), the direction of the hidden state
    itself (``"temperature"``), or the leading eigenvector of the Fisher information of the next token,
    :math:`W^\top (\operatorname{diag} p - p p^\top) W` (``"fisher"``).

    Args:
        model: An adapter around a decoder with a head; for ``"temperature"`` any model.
        scope: One of the three.
        token: Of the semantic scope, the token. Default: ``None``, at each position the likeliest.

    Raises:
        ValueError: If there is no such scope.

    References:
        Liu et al., "Jacobian Scopes: token-level causal attributions in LLMs", 2026, arXiv 2601.16407.
    """

    axes = "batch query key"

    def __init__(self, model: Model, scope: str = "semantic", token: int | None = None) -> None:
        super().__init__(model)
        if scope not in SCOPES:
            raise ValueError(f"scope must be one of {', '.join(map(repr, SCOPES))}, got {scope!r}")
        self.scope, self.token = scope, token

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.scope} scope"

    def of(self, example: Example) -> Tensor:
        """The values of one text, without the batch axis."""
        model, place = self.model, self._final(example)
        hidden = wide(observed({"final": place}, example.run)["final"][0])
        forward_pass = ForwardPass(
            model.forward, example.batch.inputs, example.batch.extra, [place], model.source(0)
        )
        found = answer(forward_pass, Question(direction=self._vectors(hidden)[None]))
        return found.energies[0].mean[0, 0].clamp_min(0).sqrt().to(hidden)

    def _final(self, example: Example) -> Site | Module:
        """Where the normed final hidden state is."""
        norm = None if self.scope == "temperature" and not self._has_logits else self.model.unembedding.norm
        return self.model.target(self.model.num_layers - 1, "layer") if norm is None else Site(norm)

    @property
    def _has_logits(self) -> bool:
        try:
            return self.model.unembedding is not None
        except ValueError:
            return False

    def _vectors(self, hidden: Tensor) -> Tensor:
        """One for each token, ``[token, width]``."""
        if self.scope == "temperature":
            return hidden / hidden.norm(dim=-1, keepdim=True)
        weight = wide(self.model.unembedding.weight)
        if self.token is not None and not 0 <= self.token < len(weight):
            raise ValueError(f"token {self.token} is none: the model has {len(weight)}")
        logits = hidden @ weight.T
        if self.scope == "fisher":
            return torch.stack([_leading_direction(weight, p) for p in logits.softmax(-1)])
        if self.token is not None:
            return weight[self.token].expand_as(hidden)
        return weight[logits.argmax(-1)]


def _leading_direction(weight: Tensor, p: Tensor) -> Tensor:
    """The eigenvector of the Fisher information to its largest eigenvalue, ``[width]``."""

    def product(vector: np.ndarray) -> np.ndarray:
        along = weight @ torch.as_tensor(vector).to(weight).flatten()
        return (weight.T @ (p * along - p * (p @ along))).cpu().double().numpy()

    width = weight.shape[1]
    start = np.random.default_rng(0).standard_normal(width)
    _, vectors = eigsh(LinearOperator((width, width), product, dtype=np.float64), k=1, v0=start)
    return torch.as_tensor(vectors[:, 0]).to(weight)
