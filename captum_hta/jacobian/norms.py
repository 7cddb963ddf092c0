r"""Norms of Jacobian blocks, and the shares of a row that they make.

An *energy* is a squared norm, :math:`r_{ij}^2` for source token ``i`` and target token ``j``. It adds up
over the tangents (or cotangents) that span the block, so it is what the modes of
:mod:`captum_hta.jacobian.engine` accumulate, in float64 where the device has it. Axes are
``[batch, head, query, key]`` throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_LENGTH = 1e-15
"""In vectors longer than this, no component matters whose square is below the range of float32."""


@dataclass
class Energy:
    """Squared norms ``[batch, head, query, key]`` with the variance of their estimate, if they are one."""

    mean: Tensor
    variance: Tensor | None = None


def joined(sources: Iterable[Energy]) -> Energy:
    """The energies of several sources side by side, along the key axis."""
    sources = list(sources)
    variances = [energy.variance for energy in sources if energy.variance is not None]
    mean = torch.cat([energy.mean for energy in sources], dim=-1)
    return Energy(mean, torch.cat(variances, dim=-1) if variances else None)


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Float64, so that squares of small and large derivatives stay in range, where a device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def energies(tangents: Tensor, norm: str) -> Tensor:
    """What each tangent ``[..., head, d_head]`` adds to the energy: ``[..., head]``."""
    dtype = accumulation_dtype(tangents.device)
    if (weights := NORMS[norm].row_weights(tangents)) is not None:
        return (tangents * weights).sum(-1, dtype=dtype).square()
    lengths: Tensor = torch.linalg.vector_norm(tangents, dim=-1)
    if lengths.dtype != torch.float32 or not _in_range(lengths):
        lengths = torch.linalg.vector_norm(tangents, dim=-1, dtype=dtype)
    return lengths.to(dtype).square()


def _in_range(lengths: Tensor) -> bool:
    """Whether none of the squares in these lengths left the range of float32."""
    smallest, largest = torch.aminmax(lengths)
    return bool(smallest > SMALLEST_LENGTH) and bool(largest < torch.inf)


class NotFiniteError(ValueError):
    """Values of some examples are infinite or NaN.

    Attributes:
        what: Which values.
        examples: The numbers of the examples in their batch.
    """

    def __init__(self, what: str, examples: Sequence[int], kind: str = "example") -> None:
        self.what, self.examples = what, list(examples)
        numbers = ", ".join(map(str, self.examples))
        super().__init__(
            f"{kind}{'s' if len(self.examples) > 1 else ''} {numbers}: {what} are infinite or NaN: check the "
            "inputs and the weights of the model, or load it in float32"
        )

    def renumbered(self, numbers: Sequence[int], kind: str = "example") -> NotFiniteError:
        """The same error with the numbers of the examples, and the word for them, in the caller's batch."""
        return NotFiniteError(self.what, [numbers[example] for example in self.examples], kind)


def refuse_not_finite(what: str, bad: Tensor) -> None:
    """Check values by a mask ``[batch, ...]``, true where they are infinite or NaN.

    Raises:
        NotFiniteError: If there are such values.
    """
    examples = bad.flatten(1).any(1)
    if examples.any():
        raise NotFiniteError(what, examples.nonzero().flatten().tolist())


def largest_eigenvalue(gram: Tensor) -> Tensor:
    """The squared spectral norm of a Jacobian from its Gram matrix ``[..., d_head, d_head]``."""
    largest: Tensor = torch.linalg.eigvalsh(gram)[..., -1]
    return largest.clamp_min(0)


@dataclass(frozen=True)
class Norm:
    """How a norm ``r`` of the Jacobian ``J`` of a head is computed; the Frobenius norm if nothing is given.

    Attributes:
        weights: From the numbers of components, ``[d_head]``, to their weights ``w``, for the length of the
            gradient of a weighted sum, ``r ** 2 = |w^T J| ** 2``, which adds up over tangents.
        of_gram: From the Gram matrix ``J J^T``, ``[..., d_head, d_head]``, to ``r ** 2``, ``[...]``, for a
            norm that needs all rows and columns of ``J`` together. Probes cannot estimate it.
    """

    weights: Callable[[Tensor], Tensor] | None = None
    of_gram: Callable[[Tensor], Tensor] | None = None

    def row_weights(self, heads: Tensor) -> Tensor | None:
        """The weights ``[d_head]`` of components of heads ``[..., d_head]``; ``None`` without a sum."""
        if self.weights is None:
            return None
        return self.weights(torch.arange(heads.shape[-1], dtype=heads.dtype, device=heads.device))


NORMS: dict[str, Norm] = {
    "frobenius": Norm(),
    "spectral": Norm(of_gram=largest_eigenvalue),
    "sum": Norm(weights=torch.ones_like),
}
"""Every norm, by the name that users give."""


def shares(energy: Energy) -> tuple[Tensor, Tensor | None]:
    r"""Contributions :math:`c_{ij} = r_{ij} / \sum_k r_{kj}` and their standard errors.

    With :math:`v_k = \operatorname{Var} r_k^2 / (4 r_k^2)` the variance of a norm and :math:`S` the sum
    of the row, the delta method gives

    .. math:: \operatorname{Var} c_i = \big[(1 - c_i)^2 v_i + c_i^2 \sum_{k \ne i} v_k\big] / S^2 ,

    since the probes of different source tokens are independent. A row that no source reaches (0/0) is
    zero throughout.

    Raises:
        NotFiniteError: If an energy is infinite or NaN.
    """
    norms = energy.mean.clamp_min(0).sqrt_()
    total = norms.sum(-1, keepdim=True)
    refuse_not_finite("derivatives", ~total.isfinite())
    scale = torch.where(total > 0, total, 1).reciprocal()
    share = norms.mul_(scale)
    if energy.variance is None:
        return share, None
    squares = torch.where(energy.mean > 0, energy.mean, 1)
    variance = torch.where(energy.mean > 0, energy.variance / (4 * squares), 0) * scale.square()
    others = variance.sum(-1, keepdim=True) - variance
    error = ((1 - share).square() * variance + share.square() * others).clamp_min(0).sqrt()
    return share, error.nan_to_num(nan=torch.inf, posinf=torch.inf)  # a single probe has no error
