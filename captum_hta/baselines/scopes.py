"""Jacobian scopes: how tokens move the final hidden state along a meaningful direction."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from captum_hta.baselines.base import Baseline
from captum_hta.baselines.logits import check_token
from captum_hta.jacobian.engine import answer
from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.jacobian.query import Query
from captum_hta.model.activations import Activations, promoted
from captum_hta.model.protocol import Model
from captum_hta.model.sites import Site, observed

SCOPES = ("semantic", "temperature", "fisher")


class JacobianScope(Baseline):
    r"""The norm of :math:`v^\top J_{ji}`, with the Jacobian from the embedding of token ``i`` to the final
    hidden state of token ``j`` after the last norm.

    The vector is a token's row of the unembedding (``"semantic"``), the direction of the hidden state itself
    (``"temperature"``), or the leading eigenvector of the Fisher information of the next token,
    :math:`W^\top (\operatorname{diag} p - p p^\top) W` (``"fisher"``).

    Args:
        model: An adapter around a decoder with a head; with ``"temperature"`` any model.
        scope: One of the three.
        token: The token of the semantic scope. Default: ``None``, the likeliest at each position.

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
        self.name = f"{scope} scope"

    def values(self, activations: Activations) -> Tensor:
        """``[query, key]``."""
        model, batch, place = self.model, activations.batch, self._final()
        final = observed({"final": place}, activations.run)["final"][0]
        hidden = activations.finite("final hidden states", promoted(final))
        forward_pass = ForwardPass(
            model.forward, batch.inputs, batch.extra, [place], model.source(model.first_entry)
        )
        found = answer(forward_pass, Query(direction=self._vectors(activations, hidden)[None]))
        return found.energies[0].mean[0, 0].clamp_min(0).sqrt().to(hidden)

    def _final(self) -> Site | Module:
        """Where the final hidden state is, after the last norm."""
        norm = None if self.scope == "temperature" and not self._has_logits else self.model.unembedding.norm
        return self.model.target(self.model.num_layers - 1, "layer") if norm is None else Site(norm)

    @property
    def _has_logits(self) -> bool:
        try:
            return self.model.unembedding is not None
        except ValueError:
            return False

    def _vectors(self, activations: Activations, hidden: Tensor) -> Tensor:
        """One vector for each token, ``[token, width]``."""
        if self.scope == "temperature":
            directions: Tensor = hidden / torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
            return directions
        weight = promoted(self.model.unembedding.weight)
        check_token(self.token, len(weight))
        if self.scope == "semantic" and self.token is not None:
            return weight[self.token].expand_as(hidden)
        with torch.no_grad():
            logits = activations.finite("logits", promoted(self.model.logits(*activations.repeated(1))[0]))
        if self.scope == "semantic":
            return weight[logits.argmax(-1)]
        self._check_affine(logits, hidden @ weight.T)
        return torch.stack([_leading_direction(weight, p) for p in logits.softmax(-1)])

    def _check_affine(self, logits: Tensor, unembedded: Tensor) -> None:
        """Check that logits are the unembedded hidden state, up to a bias."""
        rest = logits - unembedded
        tolerance = max(1e-3, 8 * torch.finfo(self.model.dtype).eps)
        if (rest - rest[:1]).abs().max() > tolerance * unembedded.abs().max():
            raise ValueError(
                f"{self.model.name} scales or caps its logits, which this Fisher information does not cover; "
                "use the semantic scope"
            )


def _leading_direction(weight: Tensor, p: Tensor) -> Tensor:
    """The eigenvector of the Fisher information with the largest eigenvalue, ``[width]``."""
    from scipy.sparse.linalg import LinearOperator, eigsh  # scipy is slow to import

    def product(vector: NDArray[np.float64]) -> NDArray[np.float64]:
        along = weight @ torch.as_tensor(vector, device="cpu").to(weight).flatten()
        return (weight.T @ (p * along - p * (p @ along))).cpu().double().numpy()

    width = weight.shape[1]
    start = np.random.default_rng(0).standard_normal(width)
    _, vectors = eigsh(LinearOperator((width, width), product, dtype=np.float64), k=1, v0=start)
    return torch.as_tensor(vectors[:, 0], device="cpu").to(weight)
