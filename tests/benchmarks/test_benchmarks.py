"""The benchmark runs, in a small mode."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_benchmark(tmp_path: Path) -> None:
    """It prints a table and writes its figures, each a ratio of two times."""
    out = tmp_path / "figures.json"
    command = [
        sys.executable,
        "tests/benchmarks",
        "--quick",
        "--only",
        "previous",
        "input",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["machine"]["torch"]
    names = {figure["above"] for figure in record["figures"]}
    assert {"Captum NeuronGradient", "exact sweep", "batched VJP, all layers"} <= names
    for figure in record["figures"]:
        assert figure["ratio"] > 0
        assert figure["above"] in done.stdout
