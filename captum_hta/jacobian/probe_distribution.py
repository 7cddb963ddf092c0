r"""The distribution of random probes, and the streams of random numbers that they are drawn from.

The probes of a source token are :math:`\sqrt D` times rows of a random orthonormal matrix of size
:math:`D \times D`: exchangeable draws without replacement, each of unit covariance (orthogonal random
features: Yu et al. 2016). The matrix is uniformly distributed, as the signs of the QR decomposition are fixed
(Mezzadri 2007).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def orthogonal_probes(count: int, streams: Sequence[tuple[int, ...]], known: Tensor) -> Tensor:
    """Draw probes that are orthogonal to each other and to those already known.

    Args:
        count: Number of new probes.
        streams: One tuple of integers for each stream of random numbers, such as seed, example and token.
            Equal tuples give equal probes, on every device and in every batch.
        known: Earlier probes ``[stream, m, width]`` of the same streams.

    Returns:
        ``[stream, count, width]`` in float64 on the CPU, each probe of norm ``sqrt(width)``.

    Example:
        >>> probes = orthogonal_probes(2, [(0,)], torch.empty(1, 0, 4, dtype=torch.float64))[0]
        >>> torch.allclose(probes @ probes.T, 4 * torch.eye(2, dtype=torch.float64))
        True
    """
    before, width = known.shape[1:]
    draws = torch.stack([_normal((width, count), (*stream, before)) for stream in streams])
    basis = known.mT / width**0.5
    for _ in range(2 if before else 0):  # twice is enough for orthogonality to rounding
        draws = draws - basis @ (basis.mT @ draws)
    directions, triangle = torch.linalg.qr(draws)
    signs = triangle.diagonal(dim1=-2, dim2=-1).sign()
    probes: Tensor = (directions * signs[:, None]).mT * width**0.5
    return probes


def _normal(shape: tuple[int, int], stream: tuple[int, ...]) -> Tensor:
    """Standard normal numbers of a stream; neighbouring streams are unrelated."""
    digest = hashlib.blake2b(repr(stream).encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
