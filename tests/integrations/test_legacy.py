"""The Hooked classes of TransformerLens 2 and 3, each in a virtual environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = {
    # The lowest versions of pyproject.toml; later datasets and pyarrow do not work with numpy<2.
    "2.16.1": ("transformers==4.57.6", "pandas==2.3.3", "numpy==1.26.4", "datasets<4", "pyarrow<22"),
    "3.9.0": (),
}
"""Versions of TransformerLens, with what is installed beside each."""


def run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("HTA_LEGACY") != "1", reason="minutes of installing: set HTA_LEGACY=1")
@pytest.mark.parametrize("version", VERSIONS)
def test_hooked_models(version: str, tmp_path: Path) -> None:
    """The package installs beside that version and passes the tests of its Hooked classes."""
    run(sys.executable, "-m", "venv", tmp_path)
    python = tmp_path / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet")
    run(*pip, "torch==2.13.0")
    run(*pip, f"transformer-lens=={version}", *VERSIONS[version], "-e", ".[demo]", "pytest")
    shown = run(python, "-c", "from captum_hta import load_model; print(load_model())")
    assert shown.strip().endswith("(all-MiniLM-L6-v2: 6 layers of 12 heads)")
    options = ("-q", "-p", "no:cacheprovider", "-o", "addopts=")  # without workers
    report = run(python, "-m", "pytest", "tests/integrations/test_hooked.py", *options)
    assert re.search(r"^\d{3} passed", report, re.M), report[-3000:]  # and nothing failed or skipped
    assert "skipped" not in report
