"""Pages in a real browser, at the width of a phone or of a screen."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
PHONE, SCREEN = 390, 1280
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--virtual-time-budget=3000", "--enable-logging=stderr", "--v=0", "--dump-dom",
)  # fmt: skip
FRAME = """<!doctype html><title></title>
<iframe src="{page}" style="width: {width}px; height: 844px; border: 0"></iframe>
<script>addEventListener("message", (event) => {{ document.title = event.data; }});</script>"""
"""A window cannot be as narrow as a phone, but a frame can. What is found in it is told in the title."""
TOLD = (
    '<script>addEventListener("load", () => parent.postMessage(JSON.stringify(({script})()), "*"))</script>'
)


@dataclass
class Visit:
    """What a script has found on a page, and what the browser complained about."""

    found: Any
    console: list[str]


def visit(page: str, folder: Path, script: str, width: int = SCREEN) -> Visit:
    """Open a page, and run a JavaScript function in it once it is loaded.

    Args:
        page: The page.
        folder: For the page and the browser's own files.
        script: A function that returns what JSON can hold.
        width: Width in pixels.
    """
    (folder / "page.html").write_text(
        page.replace("</body>", TOLD.format(script=script) + "</body>"), "utf-8"
    )
    (folder / "frame.html").write_text(FRAME.format(page="page.html", width=width), "utf-8")
    done = subprocess.run(
        [str(BROWSER), *OPTIONS, f"--user-data-dir={folder / 'browser'}", (folder / "frame.html").as_uri()],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
    assert title, done.stdout
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Visit(json.loads(html.unescape(title[1])), console)
