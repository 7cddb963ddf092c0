"""The map of CONTRIBUTING is that of the repository, and its guides name every file that a change needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
WALKED = {
    "model family": "tests/integrations/test_a_new_family.py",
    "baseline": "tests/baselines/test_a_new_baseline.py",
    "analysis": "tests/study/test_new_analysis.py",
    "norm": "tests/jacobian/test_a_new_norm.py",
}
"""The tests that take the steps of a guide, one by one."""
EXAMPLES = {"baseline": "ValueZeroing|zeroing", "analysis": "Sinks|sinks", "norm": "spectral"}
"""For each guide the names in the package of something that was added before."""


def paths(text: str) -> list[str]:
    """The files and folders of the repository that a text names."""
    folders = r"captum_hta|integrations|tests|examples|\.ci|\.github"
    return re.findall(rf"(?<![\w/.-])(?:(?:{folders})/[\w/.-]*\w/?|README\.md)", text)


def steps(guide: str) -> str:
    """The numbered steps of a guide."""
    (section,) = re.findall(rf"^## To add an? {guide}\n(.*?)^`tests/", GUIDE, re.M | re.S)
    return section


def test_every_path_exists() -> None:
    """Files and folders that the guide names are where it says."""
    named = paths(GUIDE)
    assert len(named) > 30
    assert not [path for path in named if not (ROOT / path).exists()]


def test_every_room_is_on_the_map() -> None:
    """A line for each folder and module at the top, and none twice."""
    rooms = re.findall(r"^\| `([^`]+)` \|", GUIDE, re.M)
    assert len(set(rooms)) == len(rooms)
    for path in (ROOT / "captum_hta").iterdir():
        if path.suffix != ".py" and not (path / "__init__.py").exists():
            continue
        name = path.relative_to(ROOT).as_posix() + ("/" if path.is_dir() else "")
        assert name in rooms or path.name == "__init__.py", name
    assert {"integrations/", "examples/"} <= set(rooms)


@pytest.mark.parametrize("guide", WALKED)
def test_a_test_takes_the_steps(guide: str) -> None:
    """In the same order, with the same files."""
    walked = (ROOT / WALKED[guide]).read_text("utf-8")
    taken = "\n".join(re.findall(r"^# (?:\d\.|  ) .*", walked, re.M))
    assert re.findall(r"^(\d)\.", steps(guide), re.M) == re.findall(r"^# (\d)\.", taken, re.M)
    assert paths(steps(guide)) == paths(taken)
    assert f"`{WALKED[guide]}` takes these steps." in GUIDE


@pytest.mark.parametrize("guide", EXAMPLES)
def test_no_other_file_needs_the_name(guide: str) -> None:
    """What was added before is named in the package only where the guide says, and everywhere there."""
    named = [path for path in paths(steps(guide)) if not path.startswith("tests/")]
    files = [ROOT / "README.md", *(ROOT / "captum_hta").rglob("*.py")]
    example = re.compile(rf"\b({EXAMPLES[guide]})\b")
    found = [path.relative_to(ROOT).as_posix() for path in files if example.search(path.read_text("utf-8"))]
    assert not [path for path in found if not path.startswith(tuple(named))]
    assert not [path for path in named if not any(one.startswith(path) for one in found)]
