"""Probes are orthogonal, isotropic and reproducible."""

from __future__ import annotations

import torch

from captum_hta.jacobian.probe_distribution import orthogonal_probes

NONE = torch.empty(1, 0, 16, dtype=torch.float64)


def test_probes_are_orthogonal_also_to_earlier_ones() -> None:
    """All have the norm sqrt(D) and are orthogonal to each other."""
    first = orthogonal_probes(3, [(0,)], NONE)
    second = orthogonal_probes(13, [(0,)], first)
    whole = torch.cat([first, second], 1)[0]
    torch.testing.assert_close(whole @ whole.T, 16 * torch.eye(16, dtype=torch.float64))


def test_streams_depend_on_their_numbers_alone() -> None:
    """A stream is the same alone and among others, and differs with other numbers."""
    alone = orthogonal_probes(4, [(3, 1)], NONE)[0]
    among = orthogonal_probes(4, [(3, 0), (3, 1), (4, 1)], NONE.expand(3, 0, 16))
    assert torch.equal(among[1], alone)
    assert not torch.allclose(among[0], alone)
    assert not torch.allclose(among[2], alone)


def test_directions_are_isotropic() -> None:
    """The mean outer product over many streams is the identity."""
    probes = orthogonal_probes(4, [(number,) for number in range(4000)], NONE.expand(4000, 0, 16))
    mean = torch.einsum("skd,ske->de", probes, probes) / (4000 * 4)
    assert (mean - torch.eye(16, dtype=torch.float64)).abs().max() < 0.05
