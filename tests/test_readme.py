"""What the README and the examples say runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from families import table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
SLOW = {"both_papers", "other_methods"}
EXAMPLES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else [])
    for path in sorted((ROOT / "examples").glob("*.py"))
]


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("block", BLOCKS)
def test_readme_python(block: str) -> None:
    """Each Python block of the README, and the shapes that it prints, if it does."""
    shown = run("-c", block)
    assert ("torch.Size([1, " in shown) == ("print(" in block)


@pytest.mark.parametrize("path", EXAMPLES)
def test_example(path: Path) -> None:
    """Each example asserts something about its result."""
    run(str(path))
    assert "assert " in path.read_text(encoding="utf-8")


def test_families() -> None:
    """The README's table is that of the adapters' tests: ``python tests/families.py`` prints it."""
    shown = README.partition("<!-- families -->")[2].partition("<!-- end of families -->")[0]
    assert shown.strip() == table()
