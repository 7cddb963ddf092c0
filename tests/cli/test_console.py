"""What the terminal gets: texts as they are, and nothing that it would obey."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from captum_hta.cli import main
from captum_hta.cli.console import add_row, say, show, table, visible, warn

ODD = {
    "markup": ("a [red]b[/red] [CLS] [", "a [red]b[/red] [CLS] ["),
    "escaped markup": (r"\[red] \\[bold]", r"\[red] \\[bold]"),
    "emoji code": (":smile: :x:", ":smile: :x:"),
    "link": ("[link=https://a.b]c[/link]", "[link=https://a.b]c[/link]"),
    "escape": ("\x1b[31mred\x1b]0;title\x07", r"\x1b[31mred\x1b]0;title\x07"),
    "C1": ("\x9b31mred\x85", r"\x9b31mred\x85"),
    "carriage return": ("safe\rgone\x08", r"safe\rgone\x08"),
    "right to left": ("a\u202eb\u2066c\u200f", r"a\u202eb\u2066c\u200f"),
    "separators": ("a\u2028b", r"a\u2028b"),
    "half a character": ("a\ud83d", r"a\ud83d"),
    "letters": ("東京 é עברית 🙂 👩\u200d🔬", "東京 é עברית 🙂 👩\u200d🔬"),
}
"""Texts, and what is shown of them."""


@pytest.mark.parametrize("kind", ODD)
def test_texts_are_shown_not_obeyed(capsys: pytest.CaptureFixture, kind: str) -> None:
    """In lines, messages, titles and cells."""
    text, shown = ODD[kind]
    assert visible(text) == shown
    say(text, "dim")
    warn(f"first\n{text}")
    assert capsys.readouterr() == (f"{shown}\n", f"first\n{shown}\n")
    cells = table(text)
    cells.add_column("name", no_wrap=True)
    add_row(cells, text)
    show(cells)
    assert capsys.readouterr().out.count(shown) == 2


def test_errors_name_models_as_they_are(capsys: pytest.CaptureFixture) -> None:
    """A name with an escape sequence does not colour the terminal."""
    assert main(["doctor", "/none/\x1b[31m[red]:smile:\u202e"]) == 1
    found = capsys.readouterr()
    assert r"/none/\x1b[31m[red]:smile:\u202e" in found.err
    assert "\x1b" not in found.out + found.err


PRINTED = """
from captum_hta.cli.console import add_row, say, show, table, tolerate_encodings, warn
tolerate_encodings()
say("± · 東京")
warn("↦ 東京")
cells = table("東京")
add_row(cells, "· 東京")
show(cells)
"""


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_narrow_encodings_end_nothing(encoding: str) -> None:
    """What the encoding of the terminal lacks is shown as an escape."""
    done = subprocess.run(
        [sys.executable, "-c", PRINTED],
        capture_output=True, check=False, env=os.environ | {"PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = "東京" if encoding == "utf-8" else r"\u6771\u4eac"
    assert done.stdout.decode(encoding).count(shown) == 3
    assert shown in done.stderr.decode(encoding)


@pytest.mark.parametrize("arguments", [["study", "--help"], ["--version"]], ids=str)
def test_a_closed_pipe_is_quiet(arguments: list[str]) -> None:
    """As in ``captum-hta study --help | head -1``."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "captum_hta.cli", *arguments]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert done.returncode == 1
    assert done.stderr == b""
