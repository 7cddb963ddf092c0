"""The files of a report: images as PNG, versions, and writing each file as a whole."""

from __future__ import annotations

import io
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from captum_hta.report.page import Section
from captum_hta.study.outputs import write_outputs

FORMULAS = ("=", "+", "-", "@", "\t")
"""How cells begin that spreadsheets compute."""
PACKAGES = ("captum-hta", "torch", "transformers", "captum", "transformer-lens", "numpy", "scipy")


def write_files(folder: Path, images: Mapping[str, bytes], texts: Mapping[str, str]) -> list[Path]:
    """Write files by their names, as :func:`captum_hta.study.outputs.write_outputs` does."""
    return write_outputs(folder, {**images, **{name: text.encode() for name, text in texts.items()}})


def csv_text(table: pd.DataFrame) -> str:
    """A table as CSV, in which no word is a formula.

    Words that a spreadsheet would compute get an apostrophe, which makes them text (OWASP, "CSV Injection");
    carriage returns, which pandas does not quote, are escaped.
    """
    return table.map(_as_text).to_csv(index=False)


def _as_text(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = value.replace("\r", r"\r")
    return f"'{text}" if text.startswith(FORMULAS) else text


def images_of(sections: Sequence[Section]) -> dict[str, bytes]:
    """The figures of sections as PNG, by their file names."""
    return {item.file: png(item.figure) for section in sections for item in section.figures}


def png(figure: Figure) -> bytes:
    """A figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages on which results depend."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
