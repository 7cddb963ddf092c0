"""Estimates from probes: reproducible, unbiased, with standard errors of the right size."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import nn

from captum_hta import HiddenTokenAttribution
from captum_hta.jacobian.engine import answer
from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.jacobian.norms import shares
from captum_hta.jacobian.query import Query

WIDTH, TOKENS = 32, 6


@pytest.fixture(scope="module")
def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()


@pytest.fixture(scope="module")
def attribution(encoder: nn.Module) -> HiddenTokenAttribution:
    return HiddenTokenAttribution(encoder, encoder.layers[1].linear1, num_heads=4)


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)


def test_all_probes_are_exact(attribution, x) -> None:
    """With as many probes as dimensions the result is exact, with an error of zero."""
    found, error = attribution.attribute(x, n_probes=WIDTH, return_standard_error=True)
    torch.testing.assert_close(found, attribution.attribute(x), rtol=1e-10, atol=0)
    assert not error.any()


def repeated(encoder: nn.Module, x: torch.Tensor, count: int, runs: int):
    """Contributions and errors of ``runs`` independent draws, ``[run, head, query, key]``."""
    target = encoder.layers[1].linear1
    forward_pass = ForwardPass(encoder, (x.expand(runs, -1, -1),), (), [target], num_heads=4)
    answered = answer(forward_pass, Query(n_probes=count), streams=[(run,) for run in range(runs)])
    return shares(answered.energies[0])


def test_error_falls_like_one_over_the_root(encoder, attribution, x) -> None:
    """Four times the probes halve the error, and a little more for drawing without replacement."""
    exact = attribution.attribute(x)

    def error(count: int) -> float:
        return (repeated(encoder, x, count, 100)[0] - exact).square().mean().sqrt().item()

    expected = 2 * ((1 - 2 / WIDTH) / (1 - 8 / WIDTH)) ** 0.5
    assert error(2) / error(8) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("count", [8, 16])
def test_intervals_cover(encoder, attribution, x, count: int) -> None:
    """95% intervals (Student's t) cover 93 to 97% over 400 repetitions."""
    found, error = repeated(encoder, x, count, 400)
    quantile = stats.t.ppf(0.975, count - 1)
    covered = (found - attribution.attribute(x)).abs() <= quantile * error
    assert 0.93 <= covered.double().mean() <= 0.97


def test_nearly_all_entries_are_within_four_errors(attribution, x) -> None:
    """With 16 probes 99% of the entries are."""
    found, error = attribution.attribute(x, n_probes=16, return_standard_error=True)
    assert ((found - attribution.attribute(x)).abs() <= 4 * error).double().mean() >= 0.99


def test_seeds(attribution, x) -> None:
    """The same seed gives the same numbers, and another seed other ones."""
    first, again, other = (attribution.attribute(x, n_probes=4, seed=s) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_batch_equals_its_rows(attribution) -> None:
    """Rows share their probes, so a row is the same alone."""
    x = torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    whole = attribution.attribute(x, n_probes=4)
    rows = torch.cat([attribution.attribute(row[None], n_probes=4) for row in x])
    torch.testing.assert_close(whole, rows)


@pytest.mark.parametrize("tolerance", [0.02, 0.005, 1e-9])
def test_tolerance_is_met(attribution, x, tolerance: float) -> None:
    """Probes are added until the error is small enough, up to all of them."""
    found, error = attribution.attribute(x, tolerance=tolerance, return_standard_error=True)
    assert error.max() <= tolerance
    assert (found - attribution.attribute(x)).abs().max() <= 8 * tolerance


def test_multiplied_by_inputs(encoder, x) -> None:
    """With all probes, scaling by the inputs gives the exact scaled result."""
    scaled = HiddenTokenAttribution(encoder, encoder.layers[1].linear1, num_heads=4, multiply_by_inputs=True)
    torch.testing.assert_close(scaled.attribute(x, n_probes=WIDTH), scaled.attribute(x))
