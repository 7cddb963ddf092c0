r"""The probes mode: a few random tangents of each source token, which estimate a Frobenius norm.

For ``u`` of unit covariance, :math:`\|J\|_F^2 = \mathbb{E} \|J u\|^2` (Hutchinson 1990). The ``m`` probes
of a source token are draws without replacement from a random orthonormal basis, see
:mod:`captum_hta.jacobian.probe_distribution`, so the mean of ``m`` of them has variance

.. math:: \frac{s^2}{m} \Big(1 - \frac{m}{D}\Big)

with :math:`s^2` their sample variance. This finite-population correction is exact, because the sum over
a whole orthonormal basis is :math:`D \|J\|_F^2` whatever the basis; at ``m = D`` so is the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from captum_hta.jacobian.forward import Columns, sweep
from captum_hta.jacobian.linearize.windowed import WindowedLinearization
from captum_hta.jacobian.norms import Energy, joined, shares
from captum_hta.jacobian.probe_distribution import orthogonal_probes
from captum_hta.jacobian.query import ResolvedQuery

FIRST_PROBES = 8
"""Probes of each source token that an estimate to a tolerance starts with."""


def probe_energies(
    derivatives: Sequence[WindowedLinearization],
    sources: Sequence[Tensor],
    resolved: ResolvedQuery,
    chunk: int,
) -> tuple[list[list[Energy]], int]:
    """Energies estimated with orthogonal probes of every source token.

    Args:
        derivatives: For each source the derivative with respect to it.
        sources: Each ``[batch, key, width]``.
        resolved: The norm, the probes, the tolerance, the heads, the queries and the streams.
        chunk: Tangents carried at once.

    Returns:
        For each source a list with the energies ``[batch, head, query, key]`` of each target; and the
        number of probes.
    """
    query = resolved.query
    runs = [
        _Run(derivative, x, resolved, chunk, number)
        for number, (derivative, x) in enumerate(zip(derivatives, sources, strict=True))
    ]
    for run in runs:
        run.extend(query.n_probes or FIRST_PROBES)
    while query.tolerance is not None and _largest_error(runs) > query.tolerance:
        for run in runs:
            run.extend(2 * run.count)
    return [run.energies() for run in runs], max(run.count for run in runs)


class _Run:
    """The probes of one source, and the energies that they have given so far."""

    def __init__(
        self,
        derivative: WindowedLinearization,
        x: Tensor,
        resolved: ResolvedQuery,
        chunk: int,
        source: int,
    ) -> None:
        self.derivative, self.x, self.resolved, self.chunk = derivative, x, resolved, chunk
        self.width = x.shape[-1]
        norm, tokens = resolved.query.norm, x.shape[1]
        self.columns = [Columns(norm, tokens, squares=True) for _ in derivative.whole.targets]
        self._streams = [(*stream, source, token) for stream in resolved.streams for token in range(tokens)]
        self._probes = torch.empty(len(self._streams), 0, self.width, dtype=torch.float64, device="cpu")

    @property
    def count(self) -> int:
        """The number of probes of each source token."""
        return self._probes.shape[1]

    def extend(self, total: int) -> None:
        """Draw and push probes until there are ``total`` of them, or as many as the source is wide."""
        more = min(total, self.width) - self.count
        if more <= 0:
            return
        fresh = orthogonal_probes(more, self._streams, self._probes)
        self._probes = torch.cat([self._probes, fresh], dim=1)
        directions = fresh.reshape(-1, self.x.shape[1], *fresh.shape[1:]).permute(2, 0, 1, 3)
        sweep(self.derivative, self.x, directions, self.resolved, self.chunk, self.columns)

    def energies(self) -> list[Energy]:
        return [estimate(column, self.count, self.width) for column in self.columns]


def estimate(column: Columns, count: int, width: int) -> Energy:
    """The mean over ``count`` probes of ``width`` dimensions, and its variance."""
    mean = column.sums.movedim(0, -1) / count
    if count == width:
        return Energy(mean, torch.zeros_like(mean))
    if count == 1:
        return Energy(mean, torch.full_like(mean, torch.inf))
    spread = column.squares.movedim(0, -1) / count - mean.square()
    return Energy(mean, spread.clamp_min(0) / (count - 1) * (1 - count / width))


def _largest_error(runs: Sequence[_Run]) -> float:
    if all(run.count == run.width for run in runs):
        return 0.0
    errors = [shares(joined(energies))[1] for energies in zip(*(run.energies() for run in runs), strict=True)]
    return max(error.max().item() for error in errors if error is not None)
