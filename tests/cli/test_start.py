"""What starting imports: seconds depend on the machine, modules do not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

SLOW = {
    "PIL", "captum", "jinja2", "matplotlib", "numpy", "pandas", "psutil", "safetensors", "scipy", "torch",
    "tqdm", "transformer_lens", "transformers",
}  # fmt: skip
"""The packages that this one depends on, except typer and rich, which show the help."""
COMMANDS = ("explain", "study", "compare", "faithfulness", "doctor")


def imported(code: str) -> set[str]:
    """The packages that a program imports, beside the standard library."""
    shown = f"import sys\n{code}\nprint('imported', *{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("imported ")]
    found = set(line.split()[1:]) - sys.stdlib_module_names
    return {name for name in found if not name.startswith("__")}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], [], *([command, "--help"] for command in COMMANDS)], ids=str
)
def test_help_imports_little(arguments: list[str]) -> None:
    """The help of every command is there before PyTorch would be."""
    assert not imported(f"from captum_hta.cli import main\nmain({arguments!r})") & SLOW


def test_wrong_usage_imports_little() -> None:
    """An option that does not exist is refused as fast."""
    assert not imported("from captum_hta.cli import main\nassert main(['study', '--colour']) == 2") & SLOW


def test_the_package_imports_nothing() -> None:
    """``import captum_hta`` waits with everything until a name is used."""
    bare = imported("pass")  # what the environment loads at every start
    assert imported("import captum_hta, captum_hta.integrations") - bare == {"captum_hta"}


def test_the_core_imports_no_adapter() -> None:
    """Attribution and contributions need neither transformers nor TransformerLens, and no plots."""
    code = "from captum_hta import HiddenTokenAttribution, contributions, forecast, plan"
    assert not imported(code) & {"jinja2", "transformer_lens", "transformers"}


def test_the_slow_packages_exist() -> None:
    """The names above are right, so that their absence means something."""
    assert all(importlib.util.find_spec(name) for name in SLOW)


INTERRUPTED = """
import importlib.abc
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = ["explain", "Go"]
from captum_hta.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("name", ["typer", "captum_hta.cli.console", "torch"])
def test_ctrl_c_during_an_import_is_quiet(name: str) -> None:
    """It ends the command with the usual status, and without a traceback."""
    code = "import sys\n" + INTERRUPTED.format(name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
