"""The map of CONTRIBUTING is that of the repository."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def test_every_path_exists() -> None:
    """Files and folders that the guide names are where it says."""
    folders = r"captum_hta|integrations|tests|examples|\.ci|\.github"
    named = re.findall(rf"(?<![\w/.-])(?:{folders})/[\w/.-]*\w/?", GUIDE)
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
