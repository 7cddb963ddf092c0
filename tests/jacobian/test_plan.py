"""Plans: the cheapest mode, its costs, and that its memory stays within the budget."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch

from captum_hta import Costs, HiddenTokenAttribution, contributions, load_model, plan
from captum_hta.jacobian.plan import CACHE, CPU_MEMORY, LIVE_STACKS, MEMORY_SHARE, chunk_size, memory_budget

BERT = Costs(
    tokens=32, directions=384, cotangents=[32 * 384] * 6,
    push_flops=[1e8 * k for k in range(1, 7)], pull_flops=[1e8 * k for k in range(1, 7)], tangent_bytes=2e5,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "mode"),
    [
        ({}, "forward"),
        ({"cotangents": [2 * 384] * 6}, "reverse"),
        ({"cotangents": [32 * 12] * 6}, "reverse"),
        ({"directions": 8, "is_estimate": True}, "probes"),
    ],
)
def test_cheapest_mode(change: dict, mode: str) -> None:
    """Forward for all queries, reverse for a few of them or for sums, probes for estimates."""
    assert plan(replace(BERT, **change)).mode == mode


def test_costs_are_counted() -> None:
    """Tangents go to the deepest target; cotangents of each target go through its own depth."""
    assert plan(BERT).flops == 32 * 384 * 6e8
    assert plan(BERT, mode="reverse").flops == 32 * 384 * 1e8 * (1 + 2 + 3 + 4 + 5 + 6)
    assert plan(replace(BERT, directions=8, is_estimate=True)).flops == 32 * 8 * 6e8


def test_line() -> None:
    """A plan prints as one line with units."""
    line = str(plan(BERT))
    assert line.startswith("forward (12288 tangents): 7.37 TFLOP, ")
    assert "\n" not in line


@pytest.mark.parametrize("mode", ["sideways", "probes", "closed form"])
def test_modes_that_are_not_valid(mode: str) -> None:
    """Forcing a mode that cannot give the result is an error."""
    with pytest.raises(ValueError, match="cannot give this result; valid here"):
        plan(BERT, mode=mode)


def test_chunks_fit_the_caches_and_the_budget() -> None:
    """A chunk has at least one tangent, however large it is."""
    cpu = torch.device("cpu")
    assert chunk_size(CACHE // 8, cpu) == 8
    assert chunk_size(1e12, cpu) == 1
    assert 0 < memory_budget(cpu) <= CPU_MEMORY
    assert plan(BERT).memory == LIVE_STACKS * plan(BERT).chunk * BERT.tangent_bytes


def test_the_budget_is_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that only caches files is available: a plan must not depend on what was read before."""
    memory = SimpleNamespace(available=1 << 30, free=0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert memory_budget(torch.device("cpu")) == MEMORY_SHARE * (1 << 30)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_precision(precision: str, minilm) -> None:
    """A lower precision is close, and PyTorch's setting is restored."""
    exact = contributions(minilm, "Dogs bark.", n_probes=4).values
    before = torch.get_float32_matmul_precision()
    found = contributions(minilm, "Dogs bark.", n_probes=4, precision=precision).values
    assert torch.get_float32_matmul_precision() == before
    assert (found - exact).abs().max() < 0.02


def test_the_users_precision_does_not_matter(minilm) -> None:
    """Checks and collapsed segments always have the highest precision, and the user's setting is restored."""
    exact = contributions(minilm, "Dogs bark.", layers=[1])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = contributions(load_model(), "Dogs bark.", layers=[1])
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert found.plans == exact.plans
    assert torch.allclose(found.values, exact.values, atol=1e-6)
    assert torch.allclose(found.attention, exact.attention, atol=1e-6)
    assert load_model().size.closed_form


def test_unknown_precision() -> None:
    """The error lists the valid ones."""
    model = torch.nn.Linear(3, 3)
    hta = HiddenTokenAttribution(model, model)
    with pytest.raises(ValueError, match="precision must be one of 'highest'"):
        hta.attribute(torch.ones(1, 2, 3), precision="low")


MEMORY = """
import resource
from types import SimpleNamespace
import psutil, torch
from captum_hta import contributions, load_model
from captum_hta.jacobian.plan import memory_budget
psutil.virtual_memory = lambda: SimpleNamespace(available=2 << 30, free=0)
model = load_model()
text = " ".join(["word"] * 254)
assert len(model.encode(text)) == 256
with torch.inference_mode():
    batch = model.batch([model.encode(text)])
    model.forward(*batch.inputs, *batch.extra)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
contributions(model, [text], source="previous_layer")
contributions(model, [text], source="input", layers=1, n_probes=1)
growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(growth, memory_budget(torch.device("cpu")))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
def test_memory_of_a_long_text() -> None:
    """For 256 tokens and both sources, peak memory grows by less than the budget of a machine with 2 GiB
    available. It runs in its own process, since a peak is that of a whole process.
    """
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    growth, budget = map(float, done.stdout.split()[-2:])
    assert growth < budget == MEMORY_SHARE * (2 << 30)
