"""The folder of a study: tables, figures, the record, and a page that shows them."""

from __future__ import annotations

import base64
import json
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from browser import BROWSER, PHONE, SCREEN, visit
from conftest import TransformerLensModel
from studies import EXACT, TEXTS

from captum_hta.report import files as report_files
from captum_hta.report import one_study as report
from captum_hta.report.findings import found_in
from captum_hta.study.correlations import Correlations
from captum_hta.study.effective_attention import EffectiveCorrelation
from captum_hta.study.errors import ProbeErrors
from captum_hta.study.hidden_tokens import Mixing
from captum_hta.study.outputs import MANIFEST
from captum_hta.study.positions import RelativePositions
from captum_hta.study.run import Study, run
from captum_hta.study.settings import StudySettings

RECORD = {"model": "a <tiny> BERT & co", "arguments": {"data": "<none>"}, "counts": {"examples": 5}}
FILES = {
    "correlations.csv",
    "relative_positions.csv",
    "centres_of_mass.csv",
    "layers.csv",
    "figure1_attention_and_previous_layer.png",
    "figure2_attention_positions.png",
    "figure3_input_positions.png",
    "figure4_attention_centre.png",
    "figure5_centres.png",
    "figure6_attention_and_input.png",
    "figure8_own_share.png",
    "figure7_patterns.png",
    "figure9_neighbours.png",
    "figure10_identifiability.png",
    "figure11_effective_attention.png",
    "patterns.csv",
    "effective_attention.csv",
    "identifiability.csv",
    "mixing.csv",
    "run.json",
    "report.html",
    MANIFEST,
}


class Page(HTMLParser):
    """Reads a page, and notes what does not belong."""

    VOID = ("meta", "img", "br", "hr", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.ids: list[str] = []
        self.rows: list[list[str]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what is opened and what is linked."""
        if tag not in self.VOID:
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag == "img":
            self.images.append(dict(attrs))
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        """Close what was opened last."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Note the words, and those of tables by their captions."""
        tag = self.open[-1] if self.open else ""
        self.words += data * (tag not in ("style", "script"))
        if tag == "caption":
            self.rows = self.tables[data] = []
        elif tag in ("th", "td"):
            self.rows[-1][-1] += data


def written(folder: Path, study: Study, **options: Any) -> list[Path]:
    """Write the report; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return report.write(folder, study, **{"record": RECORD} | options)


def words_of(page: Path) -> str:
    """What a reader sees."""
    return Page(page.read_text("utf-8")).words


def strict_json(path: Path) -> dict[str, Any]:
    """Read JSON that has no NaN and no infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text("utf-8"), parse_constant=refuse)


@pytest.fixture
def no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report whose figures are not drawn, which is quick to write."""
    monkeypatch.setattr(report_files, "png", lambda figure: b"")


@pytest.fixture(scope="module")
def files(study: Study, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The report of the exact study, in a folder that was not there."""
    return written(tmp_path_factory.mktemp("reports") / "new" / "folder", study)


@pytest.fixture(scope="module")
def folder(files: list[Path]) -> Path:
    """Where that report is."""
    return files[0].parent


def test_all_files_are_written(files: list[Path], folder: Path) -> None:
    """And told, each once."""
    assert {path.name for path in folder.iterdir()} == FILES
    assert {path.name for path in files} == FILES - {MANIFEST}
    assert all(path.stat().st_size > 0 for path in files)


@pytest.mark.usefixtures("no_images")
def test_an_older_report_is_replaced(study: Study, estimated: Study, tmp_path: Path) -> None:
    """What is in the folder is the newer."""
    written(tmp_path, estimated)
    files = written(tmp_path, study)
    assert {path.name for path in files} == {path.name for path in tmp_path.iterdir()} - {MANIFEST}
    assert strict_json(tmp_path / "run.json")["standard_errors"] == {}


def test_tables_are_read_back(study: Study, folder: Path) -> None:
    """What is in the files is what the study says."""
    for name, expected in study.tables().items():
        found = pd.read_csv(folder / f"{name}.csv")
        pd.testing.assert_frame_equal(found, expected, check_dtype=False, rtol=0, atol=1e-14)


def test_run_record(study: Study, folder: Path) -> None:
    """The record that was given, with shares, findings, versions and modes; the one given is not changed."""
    found = strict_json(folder / "run.json")
    assert {name: found[name] for name in RECORD} == RECORD
    assert set(RECORD) == {"model", "arguments", "counts"}
    assert found["shares_of_heads"] == study[Correlations].shares_of_heads()
    assert found["findings_of_papers"] == [one.record() for one in found_in(study)]
    assert found["standard_errors"] == {}
    assert found["modes"] == study.plans
    assert {"python", "torch", "captum-hta"} <= set(found["versions"])


def read(folder: Path) -> Page:
    """The page in a folder."""
    return Page((folder / "report.html").read_text("utf-8"))


def test_the_page_stands_alone(folder: Path) -> None:
    """Its tags match, its images are within it, and it points nowhere but to its own sections."""
    page = read(folder)
    assert page.open == []
    assert len(page.images) == 11
    for image in page.images:
        kind, _, data = (image["src"] or "").partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data, validate=True).startswith(b"\x89PNG")
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith("data:") or link[1:] in page.ids for link in page.links)
    text = (folder / "report.html").read_text("utf-8")
    assert not any(sign in text for sign in ("http:", "https:", "url(", "@import", "<script src"))


def test_every_figure_is_described(study: Study, folder: Path) -> None:
    """By its numbers, not by its title: medians, ends of lines, and where the bars are highest."""
    alts = [image["alt"] or "" for image in read(folder).images]
    assert len(set(alts)) == 11
    assert all(len(alt) > 40 for alt in alts)
    layers, mixing = study.tables()["layers"], study[Mixing].table()
    for alt, table, column in (
        (alts[0], layers, "pearson_previous_layer_median"),
        (alts[0], layers, "spearman_previous_layer_median"),
        (alts[3], layers, "centre_of_mass_attention"),
        (alts[4], layers, "centre_of_mass_input"),
        (alts[5], layers, "pearson_input_median"),
        (alts[7], mixing, "own_median"),
        (alts[7], mixing, "own_is_largest"),
        (alts[8], mixing, "at_distance_1"),
    ):
        assert f"from {table[column][0]:.2f} in layer 0 to {table[column][1]:.2f} in layer 1" in alt


def test_highest_bars_are_counted(study: Study, folder: Path) -> None:
    """A head at a time, for attention and input contribution."""
    positions = study[RelativePositions].table()
    for image, quantity in zip(read(folder).images[1:3], ("attention", "input"), strict=True):
        heads = positions[positions["quantity"] == quantity].groupby(["layer", "head"])
        highest = [group.sort_values("value")["offset"].iloc[-1] for _, group in heads]
        counts = [highest.count(offset) for offset in (0, -1, 1)]
        expected = "the token itself in {}, the token before in {}, the token after in {}".format(*counts)
        assert f"{expected} and elsewhere in {4 - sum(counts)} of 4" in (image["alt"] or "")


def test_the_page_shows_the_figures_and_numbers(study: Study, folder: Path) -> None:
    """The images are those of the folder, and the tables those of layers, heads and hidden tokens."""
    page = read(folder)
    images = sorted(folder.glob("*.png"), key=lambda path: int(path.name.split("_")[0][6:]))
    for image, path in zip(page.images, images, strict=True):
        assert base64.b64decode((image["src"] or "").partition(",")[2]) == path.read_bytes()
    shown = [[float(text) for text in row] for row in page.tables["Results by layer"][1:]]
    columns = [column for one in study.analyses.values() for column in one.layer_columns]
    expected = study.tables()["layers"][["layer", *columns]]
    np.testing.assert_allclose(shown, expected, atol=5.1e-4)
    assert RECORD["model"] in page.words
    assert "exact" in page.words


@pytest.mark.parametrize("source", ["previous layer", "input"])
def test_the_page_shows_every_head(study: Study, folder: Path, source: str) -> None:
    """Correlations with their errors, and how many rows they are of."""
    name = {"previous layer": "previous-layer contribution", "input": "input contribution"}[source]
    rows = read(folder).tables[f"Attention and {name} by head"]
    table = study[Correlations].table()
    table = table[table["source"] == source.replace(" ", "_")]
    assert rows[1:] == [
        [
            f"L{one.layer}H{one.head}",
            f"{one.pearson:.3f} ± {one.pearson_error:.3f}",
            f"{one.spearman:.3f} ± {one.spearman_error:.3f}",
            str(one.rows), str(one.rows_left_out), str(one.examples),
        ]
        for one in table.itertuples()
    ]  # fmt: skip


def test_the_page_shows_hidden_tokens(study: Study, folder: Path) -> None:
    """The share of the own input with its error, and every distance that occurs."""
    rows = read(folder).tables["Hidden tokens by layer"]
    mixing = study[Mixing].table()
    assert rows[0][-7:] == [f"{distance} away" for distance in range(1, 8)]
    for row, one in zip(rows[1:], mixing.itertuples(), strict=True):
        assert row[1] == f"{one.own_mean:.3f} ± {one.own_mean_error:.3f}"
        assert row[3] == f"{one.own_median:.3f}"
        assert row[-1] == f"{one.at_distance_7:.3f}"  # in one text, so without an error
        assert row[-7] == f"{one.at_distance_1:.3f} ± {one.at_distance_1_error:.3f}"


def test_the_page_shows_effective_attention(study: Study, folder: Path) -> None:
    """For texts that are longer than a head is wide, and for others."""
    name = "Attention and effective attention up to the width of a head and beyond"
    rows = read(folder).tables[name][1:]
    expected = study[EffectiveCorrelation].width_table()
    width = study.size.d_head
    for row, one in zip(rows, expected.itertuples(), strict=True):
        assert row[1] == (f"more than {width}" if one.longer_than_d_head else f"to {width}")
        assert row[2].startswith(f"{one.correlation:.3f}")


def test_the_page_compares_findings_with_the_study(study: Study, folder: Path) -> None:
    """The first section: each finding with this run's number, and whether it holds."""
    page = read(folder)
    assert page.ids[0] == "compared-with-the-papers"
    rows = page.tables["Findings of the papers"][1:]
    found = found_in(study)
    assert [row[0] for row in rows] == [one.finding.sentence for one in found]
    assert [row[1] for row in rows] == [one.verdict for one in found]
    assert rows[0][2] == f"{study[Correlations].shares_of_heads()['share_of_heads_pearson_over_0.7']:.1%}"
    holding = sum(one.holds is True for one in found)
    assert f"Of {len(found)} findings of the papers {holding} hold here" in page.words


@pytest.mark.usefixtures("no_images")
def test_rows_left_out_are_counted(model: TransformerLensModel, tmp_path: Path) -> None:
    """No row of a text of two tokens has a correlation: 2 queries in each of 4 heads."""
    written(tmp_path, run(model, ["", "a b c"], EXACT))
    words = words_of(tmp_path / "report.html")
    assert "Left out are 8 of 28 rows for the previous-layer contribution and 8 of 28 rows for the" in words


@pytest.mark.usefixtures("no_images")
def test_the_page_shows_seconds(study: Study, tmp_path: Path) -> None:
    """Those of each step, by their names."""
    written(tmp_path, study, record=RECORD | {"seconds": {"reading": 1.5, "study": 9}})
    words = words_of(tmp_path / "report.html").split("Seconds", 1)[1].split("Modes", 1)[0]
    assert [line for line in map(str.strip, words.split("\n")) if line] == ["reading1.5", "study9"]


@pytest.mark.usefixtures("no_images")
def test_layers_that_were_not_studied(model: TransformerLensModel, tmp_path: Path) -> None:
    """What the papers say of them is not measured, on the page and in the record."""
    study = run(model, TEXTS[:2], StudySettings([0], n_probes=None))
    written(tmp_path, study)
    verdicts = {row[0]: row[1] for row in read(tmp_path).tables["Findings of the papers"][1:]}
    holds = {
        one["sentence"]: one["holds"] for one in strict_json(tmp_path / "run.json")["findings_of_papers"]
    }
    assert {name for name, verdict in verdicts.items() if verdict != "not measured"} == {
        name for name, held in holds.items() if held is not None
    }
    measured = [one.finding.key for one in found_in(study) if one.holds is not None]
    assert measured == ["own_share_first_layer"]


LOOK = """() => ({
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  loaded: [...document.images].every((image) => image.naturalWidth > 0),
  images: document.images.length,
})"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
@pytest.mark.parametrize("width", [PHONE, SCREEN], ids=["phone", "screen"])
def test_the_page_in_a_browser(folder: Path, tmp_path: Path, width: int) -> None:
    """Every figure is seen, nothing sticks out, and the browser does not complain."""
    visited = visit((folder / "report.html").read_text("utf-8"), tmp_path, LOOK, width)
    assert visited.found == {"overflow": 0, "loaded": True, "images": 11}
    assert visited.console == []


def small(model: TransformerLensModel, texts: list[str], folder: Path) -> str:
    """Study a few short texts, and read the page; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`torch.jit.script`")  # torch, at its first tangent
        found = run(model, texts, StudySettings(n_probes=4))
    written(folder, found)
    strict_json(folder / "run.json")
    return words_of(folder / "report.html")


@pytest.mark.parametrize("texts", [["a b"], ["", ""]], ids=["single", "two-tokens"])
def test_small_studies_are_written(model: TransformerLensModel, tmp_path: Path, texts: Any) -> None:
    """Undefined correlations and errors are no reason to fail or to warn."""
    assert "nan" not in small(model, texts, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES


@pytest.mark.usefixtures("no_images")
@pytest.mark.parametrize("texts", [["a"], ["", "a b c"]], ids=["one-word", "mixed"])
def test_small_studies_have_no_nan(model: TransformerLensModel, tmp_path: Path, texts: Any) -> None:
    """A correlation that is defined for one example only is a number all the same."""
    assert "nan" not in small(model, texts, tmp_path)


@pytest.mark.usefixtures("no_images")
def test_the_page_tells_the_standard_error(estimated: Study, tmp_path: Path) -> None:
    """Estimates are called so, with their error."""
    written(tmp_path, estimated)
    errors, words = estimated[ProbeErrors].summary()["input"], words_of(tmp_path / "report.html")
    assert f"{errors['mean']:.4f}" in words
    assert f"{errors['largest']:.4f}" in words
    assert "exact" not in words
    assert strict_json(tmp_path / "run.json")["standard_errors"] == {"input": errors}


@pytest.mark.usefixtures("no_images")
def test_one_probe_is_refused_or_told(model: TransformerLensModel, tmp_path: Path) -> None:
    """It has no standard error: neither one of zero, nor one that JSON can hold."""
    try:
        written(tmp_path, run(model, ["a b"], StudySettings(n_probes=1)))
    except ValueError:
        return
    strict_json(tmp_path / "run.json")
    assert "are exact" not in words_of(tmp_path / "report.html")


def test_a_file_in_the_mode_of_the_folder(study: Study, tmp_path: Path) -> None:
    """It is an OSError, as documented."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(OSError, match="taken"):
        report.write(tmp_path / "taken", study, RECORD)
