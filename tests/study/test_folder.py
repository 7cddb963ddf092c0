"""A study in a folder, read back: tables, record, and every matrix that was kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TransformerLensModel, WordTokenizer
from families import tiny
from studies import TEXTS

from captum_hta import contributions, open_study
from captum_hta.integrations import TransformersModel
from captum_hta.report import one_study as report
from captum_hta.study import run as study
from captum_hta.study.checkpoint import Shards
from captum_hta.study.folder import check_nothing_kept, keep
from captum_hta.study.run import run
from captum_hta.study.settings import StudySettings

SETTINGS = StudySettings(n_probes=None)


@pytest.fixture(scope="module")
def folder(model: TransformerLensModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished study that kept its matrices, in several parts."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "SHARD", 1)
        found = run(model, TEXTS, SETTINGS, shards=Shards(folder / "parts", {}), kept_in=folder)
        record = {"model": "bert", "arguments": {}, "counts": {"examples": 5}}
        report.write(folder, found, record, sections=[])
    return folder


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_matrices_are_those_of_the_text(model: TransformerLensModel, folder: Path, number: int) -> None:
    """Under its number in the corpus, to half precision."""
    kept = open_study(folder)
    found = kept[number]
    assert list(found) == ["attention", "previous_layer", "input", "hidden"]
    assert kept.tokens(number) == contributions(model, [TEXTS[number]], layers=0).tokens[0]
    for name, asked in (
        ("previous_layer", {"source": "previous_layer"}), ("input", {}), ("hidden", {"target": "layer"}),
    ):  # fmt: skip
        result = contributions(model, [TEXTS[number]], **asked)
        assert found[name].dtype == np.float32
        torch.testing.assert_close(
            torch.tensor(found[name]), result.values[0].float(), rtol=2**-10, atol=1e-7
        )
    torch.testing.assert_close(
        torch.tensor(found["attention"]), result.attention[0].float(), rtol=2**-10, atol=1e-7
    )


def test_a_folder_is_a_mapping(folder: Path) -> None:
    """From the numbers of texts to their matrices; other numbers raise KeyError."""
    kept = open_study(str(folder))
    assert list(kept) == list(range(len(TEXTS)))
    assert len(kept) == len(TEXTS)
    assert len(list((folder / "contributions").glob("*.npz"))) > 1
    with pytest.raises(KeyError):
        kept[5]


def test_cross_attention_has_keys_of_its_own(tmp_path: Path) -> None:
    """Their labels are told, and matrices are numbers."""
    cross = TransformersModel(tiny("T5"), WordTokenizer(), part="cross")
    keep_in = tmp_path / "study"
    found = run(cross, [("a b c", "d e f g")], SETTINGS, kept_in=keep_in)
    report.write(keep_in, found, {"model": "T5", "arguments": {}, "counts": {"examples": 1}})
    kept = open_study(keep_in)
    assert kept[0]["input"].shape[-2:] == (len(kept.tokens(0)), len(kept.key_tokens(0)))
    assert len(kept.tokens(0)) != len(kept.key_tokens(0))


def test_another_studys_matrices_are_not_shown(folder: Path, tmp_path: Path) -> None:
    """Where the study of the record kept none."""
    shutil.copytree(folder / "contributions", tmp_path / "contributions")
    (tmp_path / "run.json").write_text('{"arguments": {"keep_contributions": false}}')
    with pytest.raises(ValueError, match="kept no contributions"):
        open_study(tmp_path)[0]
    with pytest.raises(ValueError, match="holds matrices of another study"):
        check_nothing_kept(tmp_path)


def test_tables_and_record(folder: Path) -> None:
    """As they were written."""
    kept = open_study(folder)
    assert {"correlations", "layers", "mixing", "patterns", "identifiability"} <= set(kept.tables)
    assert kept.tables["correlations"].query("layer == 1")["pearson"].notna().all()
    assert kept.run == json.loads((folder / "run.json").read_text())


def test_a_folder_without_a_study(tmp_path: Path) -> None:
    """What to name is said."""
    with pytest.raises(ValueError, match="holds no finished study: pass the folder"):
        open_study(tmp_path)


def test_a_folder_of_several_studies(tmp_path: Path) -> None:
    """Which there are is said."""
    for name in ("German", "English"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="open one of its folders, English, German"):
        open_study(tmp_path)


def test_a_study_that_kept_nothing(tmp_path: Path) -> None:
    """Its tables are there, and how to have matrices is said."""
    (tmp_path / "run.json").write_text("{}")
    kept = open_study(tmp_path)
    assert kept.tables == {}
    with pytest.raises(ValueError, match="repeat the study with --keep-contributions"):
        kept[0]


def test_what_was_not_kept_is_computed_again(model: TransformerLensModel, tmp_path: Path) -> None:
    """A part counts as done only after its matrices are on disk."""
    (tmp_path / "contributions").write_text("in the way")
    with pytest.raises(OSError, match="contributions"):
        run(model, TEXTS[:1], SETTINGS, shards=Shards(tmp_path / "parts", {}), kept_in=tmp_path)
    assert 0 not in Shards(tmp_path / "parts", {})


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A copy of the finished study, to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_deleted_matrices_are_named_and_made_again(
    model: TransformerLensModel, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading says what is missing; the same run computes it again, and nothing else."""
    monkeypatch.setattr(study, "SHARD", 1)
    lost, *others = sorted((copied / "contributions").glob("*.npz"))
    expected = np.load(lost)
    contents = {name: expected[name] for name in expected.files}
    expected.close()
    times = {path: path.stat().st_mtime_ns for path in others}
    lost.unlink()
    with pytest.raises(ValueError, match=r"lacks the matrices of \d texts.*repeat the command"):
        open_study(copied)[0]
    run(model, TEXTS, SETTINGS, shards=Shards(copied / "parts", {}), kept_in=copied)
    with np.load(lost) as again:
        assert again.files == list(contents)
        for name, array in contents.items():
            np.testing.assert_array_equal(again[name], array)
    assert {path: path.stat().st_mtime_ns for path in others} == times
    assert len(open_study(copied)) == len(TEXTS)


def test_matrices_of_another_run_are_made_again(
    model: TransformerLensModel, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of the run differs."""
    monkeypatch.setattr(study, "SHARD", 1)
    first = sorted((copied / "contributions").glob("*.npz"))[0]
    keep(copied, 0, {0: {"input": np.zeros((2, 2, 3, 3)), "tokens": np.array(["a"] * 3)}}, run="other")
    run(model, TEXTS, SETTINGS, shards=Shards(copied / "parts", {}), kept_in=copied)
    with np.load(first) as archive:
        assert any(archive[name].any() for name in archive.files if name.endswith("/input"))


@pytest.mark.parametrize("name", ["run.json", "correlations.csv", "contributions/000000.npz"])
@pytest.mark.parametrize("size", ["half", "empty"])
def test_cut_files_are_named(copied: Path, name: str, size: str) -> None:
    """Whatever is read first."""
    content = (copied / name).read_bytes()
    (copied / name).write_bytes(content[: len(content) // 2] if size == "half" else b"")
    with pytest.raises(ValueError, match=f"{Path(name).name} is damaged .*delete it"):
        read_all(copied)


@pytest.mark.parametrize("name", ["run.json", "correlations.csv", "contributions/000000.npz"])
def test_flipped_bits_are_named_or_do_not_matter(copied: Path, name: str) -> None:
    """No number is another one without a word."""
    expected, content = read_all(copied), (copied / name).read_bytes()
    named = 0
    for place in range(0, len(content), max(1, len(content) // 20)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        (copied / name).write_bytes(damaged)
        try:
            found = read_all(copied)
        except ValueError as error:
            found, named = str(error), named + 1
        assert found == expected or f"{Path(name).name} is damaged" in found
    assert named > 10


def read_all(folder: Path) -> str:
    """The record, the tables and the matrices of a study."""
    study = open_study(folder)
    tables = {name: table.to_csv() for name, table in study.tables.items()}
    matrices = {
        number: {name: values.tolist() for name, values in study[number].items()}
        | {"tokens": study.tokens(number)}
        for number in study
    }
    return repr((study.run, tables, matrices))
