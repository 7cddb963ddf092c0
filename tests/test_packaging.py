"""The wheel contains every module and data file, and the workflow runs what exists."""

from __future__ import annotations

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
JOB = WORKFLOW["jobs"]["run"]
FOLDERS = {"captum_hta": "captum_hta", "integrations": "captum_hta.integrations"}
"""Folders of the repository, by the package that they are."""


def package_of(path: Path) -> str:
    """The package whose folder holds a file."""
    top, *inner = path.relative_to(ROOT).parent.parts
    return ".".join([FOLDERS[top], *inner])


def files() -> list[Path]:
    """All files of the package."""
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    return [path for path in found if path.parent.name != "__pycache__"]


def test_every_folder_is_a_package() -> None:
    """The list of packages is that of the folders with modules."""
    assert sorted(SETUPTOOLS["packages"]) == sorted({package_of(path) for path in files()})
    assert all((path.parent / "__init__.py").exists() for path in files())


def test_every_other_file_is_package_data() -> None:
    """Templates, texts and markers match a pattern, and each pattern matches a file."""
    patterns = SETUPTOOLS["package-data"]
    data = [path for path in files() if path.suffix != ".py"]
    for path in data:
        assert any(fnmatch(path.name, pattern) for pattern in patterns.get(package_of(path), [])), path
    for package, names in patterns.items():
        inside = [path.name for path in data if package_of(path) == package]
        assert all(any(fnmatch(name, pattern) for name in inside) for pattern in names), package


def test_the_workflow_covers_what_is_supported() -> None:
    """Three systems, every Python from the lowest on, and the lowest PyTorch besides the newest."""
    matrix = JOB["strategy"]["matrix"]
    assert {name.split("-")[0] for name in matrix["os"]} == {"ubuntu", "macos"}
    assert any(name.endswith("-arm") for name in matrix["os"])
    assert f">={matrix['python'][0]}" == PROJECT["project"]["requires-python"]
    assert matrix["python"] == ["3.11", "3.12", "3.13", "3.14"]
    (bound,) = [one for one in PROJECT["project"]["dependencies"] if re.match(r"torch\W", one)]
    lowest = bound.replace(">=", "==")
    assert matrix["torch"] == [f"{lowest}.0", "torch"]
    assert lowest in (ROOT / ".ci" / "run").read_text("utf-8")


def test_the_workflow_runs_what_exists() -> None:
    """Its commands are scripts of this repository whose syntax bash accepts."""
    commands = [step["run"] for step in JOB["steps"] if "run" in step]
    assert commands == ["bash .ci/run"]
    for script in (ROOT / ".ci").iterdir():
        assert script.stat().st_mode & 0o100
        subprocess.run(["bash", "-n", str(script)], check=True)
    assert "TORCH" in next(step["env"] for step in JOB["steps"] if "run" in step)
    assert "${TORCH:-" in (ROOT / ".ci" / "run").read_text("utf-8")


def test_actions_have_versions() -> None:
    """Each action is named with its major version."""
    for action in [step["uses"] for step in JOB["steps"] if "uses" in step]:
        assert re.fullmatch(r"actions/[\w-]+@v\d+", action)


def test_links_of_the_readme_work_elsewhere() -> None:
    """On PyPI there is no repository around it: images and links are absolute, inside this repository."""
    readme = (ROOT / "README.md").read_text("utf-8")
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert all(link.startswith(("https://", "#")) for link in links)
    raw = "https://raw.githubusercontent.com/captum-hta/captum_hta/main/"
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", readme)
    assert images
    for image in images:
        assert (ROOT / image.removeprefix(raw)).is_file(), image
    assert PROJECT["project"]["urls"]["Repository"].endswith("captum-hta/captum_hta")


def test_citations_agree() -> None:
    """The version and the repository are the same wherever they are stated."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["repository-code"] == PROJECT["project"]["urls"]["Repository"]
    init = (ROOT / "captum_hta" / "__init__.py").read_text("utf-8")
    assert f'__version__ = "{citation["version"]}"' in init
