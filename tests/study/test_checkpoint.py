"""Long runs that are stopped and go on: the same numbers, nothing half written, other runs refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers
from families import tiny
from tokenizing import byte_level

from captum_hta.cli import main
from captum_hta.integrations import TransformerLensModel
from captum_hta.storage import write_whole
from captum_hta.study import run as study
from captum_hta.study import token_maps
from captum_hta.study.checkpoint import OtherRunError, Shards
from captum_hta.study.run import Study, run
from captum_hta.study.settings import StudySettings

TEXTS = [" ".join(f"w{n}" for n in range(number, number + 2 + number % 5)) for number in range(20)]
SETTINGS = StudySettings(n_probes=2)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "SHARD", 1)
    monkeypatch.setattr(token_maps, "EPOCHS", 1)


class StoppedError(Exception):
    """Stands for whatever ends a run."""


def assert_equal(first: Study, second: Study) -> None:
    """Exactly."""
    one, two = first.arrays(), second.arrays()
    assert one.keys() == two.keys()
    for name in one.keys() - {"seconds"}:
        array = one[name]
        np.testing.assert_array_equal(array, two[name], err_msg=name)


def test_a_stopped_run_goes_on(model: TransformerLensModel, tmp_path: Path) -> None:
    """After any number of parts, with the numbers of a run that was not stopped; what is done stays."""
    expected = run(model, TEXTS, SETTINGS)
    for stop in (0.1, 0.5, 0.9):
        folder = tmp_path / str(stop)

        done = 0.0

        def advance(share: float, stop: float = stop) -> None:
            nonlocal done
            done += share
            if done > stop:
                raise StoppedError

        with pytest.raises(StoppedError):
            run(model, TEXTS, SETTINGS, advance, Shards(folder, {"seed": 0}))
        kept = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
        assert_equal(run(model, TEXTS, SETTINGS, shards=Shards(folder, {"seed": 0})), expected)
        assert {path: path.stat().st_mtime_ns for path in kept} == kept
        assert len(list(folder.glob("*.safetensors"))) > max(1, len(kept))


def test_a_finished_run_computes_nothing(model: TransformerLensModel, tmp_path: Path, monkeypatch) -> None:
    """Its parts are read, and progress is told all the same."""
    first = run(model, TEXTS, SETTINGS, shards=Shards(tmp_path, {}))
    monkeypatch.setattr(Study, "add_group", None)
    told = []
    assert_equal(run(model, TEXTS, SETTINGS, told.append, Shards(tmp_path, {})), first)
    assert sum(told) == pytest.approx(1)


def test_any_split_merges_to_the_same(model: TransformerLensModel) -> None:
    """Numbers of two halves together are those of the whole, to rounding."""
    whole, first, second = (run(model, texts, SETTINGS) for texts in (TEXTS, TEXTS[:7], TEXTS[7:]))
    empty = empty_study(whole)
    for half in (second, first):
        padded = empty_study(whole)
        widened(padded, half)
        empty.merge(padded)
    whole_padded = empty_study(whole)
    widened(whole_padded, whole)
    for name, array in empty.arrays().items():
        if name not in ("rest", "seconds"):
            np.testing.assert_allclose(array, whole_padded.arrays()[name], rtol=1e-10, atol=1e-10)
    assert sorted(empty.tokens) == sorted(whole.tokens)


def empty_study(like: Study) -> Study:
    """A study without texts, for texts of at most 8 tokens."""
    return Study(replace(like.size, longest=8), list(like.analyses))


def widened(into: Study, found: Study) -> None:
    """A study for longer texts that has seen the same."""
    arrays = found.arrays()
    for name, array in into.arrays().items():
        if name.startswith("positions"):
            extra = (array.shape[-1] - arrays[name].shape[-1]) // 2
            arrays[name] = np.pad(arrays[name], [(0, 0)] * (array.ndim - 1) + [(extra, extra)])
    into.restore(arrays)


def test_another_run_is_refused_by_name(tmp_path: Path) -> None:
    """What differs is named, both modes."""
    Shards(tmp_path, {"probes": 8, "model": "a"})
    Shards(tmp_path, {"model": "a", "probes": 8})
    with pytest.raises(OtherRunError, match=r"probes 8 \(now 16\): repeat that run"):
        Shards(tmp_path, {"probes": 16, "model": "a"})
    with pytest.raises(OtherRunError, match=r"model 'a' \(now None\)"):
        Shards(tmp_path, {"probes": 8})


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """No half file, and an error of the system."""
    shards = Shards(tmp_path / "parts", {})
    with pytest.raises(OSError, match="parts"):
        Shards(tmp_path / "parts" / "settings.json", {})
    (tmp_path / "parts" / "000003.safetensors").mkdir()
    with pytest.raises(OSError, match="000003"):
        shards.write(3, {"a": np.zeros(2)})
    with pytest.raises(OSError, match="000003"):
        write_whole(tmp_path / "parts" / "000003.safetensors", lambda path: path.write_bytes(b"x"))
    assert not list((tmp_path / "parts").glob("*.part"))


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the file and what to do; what was written before can still be read."""
    shards = Shards(tmp_path, {})
    shards.write(1, {"a": np.ones(2)})

    def full(arrays: dict, path: Path, header: dict) -> None:
        path.write_bytes(b"half a fi")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("captum_hta.study.checkpoint.save_file", full)
    with pytest.raises(OSError, match=r"000002\.safetensors cannot be written \(No space left.*make room"):
        shards.write(2, {"a": np.zeros(2)})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["000001.safetensors", "settings.json"]
    np.testing.assert_array_equal(shards.read(1)["a"], np.ones(2))


def test_a_part_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """With its file, which can be deleted."""
    shards = Shards(tmp_path, {})
    (tmp_path / "000001.safetensors").write_bytes(b"nonsense")
    with pytest.raises(OSError, match=r"000001\.safetensors cannot be read .*: delete it"):
        shards.read(1)


@pytest.mark.parametrize("place", [0.1, 0.3, 0.6, 0.99], ids=str)
def test_a_flipped_bit_is_refused_by_name(model: TransformerLensModel, tmp_path: Path, place: float) -> None:
    """Wherever it is in the file; what is deleted is computed again, with the same numbers."""
    expected = run(model, TEXTS, SETTINGS, shards=Shards(tmp_path, {"seed": 0}))
    path = tmp_path / "000001.safetensors"
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises((OSError, OtherRunError), match=r"000001\.safetensors .*delete it"):
        run(model, TEXTS, SETTINGS, shards=Shards(tmp_path, {"seed": 0}))
    path.unlink()
    assert_equal(run(model, TEXTS, SETTINGS, shards=Shards(tmp_path, {"seed": 0})), expected)


@pytest.mark.parametrize("name", ["000002.safetensors", "identifiability.safetensors"])
def test_a_part_of_another_run_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Even if its arrays have the same names and shapes."""
    part = int(name.split(".")[0]) if name[0].isdigit() else "identifiability"
    for seed in (0, 1):
        Shards(tmp_path / str(seed), {"seed": seed}).write(part, {"a": np.full(3, float(seed))})
    shutil.copy(tmp_path / "1" / name, tmp_path / "0" / name)
    with pytest.raises(OtherRunError, match=f"{name} is not a part of this run"):
        Shards(tmp_path / "0", {"seed": 0}).read(part)


def test_other_groups_of_texts_are_refused(
    model: TransformerLensModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a run that grouped texts otherwise would count some twice and others not at all."""
    run(model, TEXTS, SETTINGS, shards=Shards(tmp_path, {}), analyses=[])
    monkeypatch.setattr(study, "SHARD", 2)
    with pytest.raises(OtherRunError, match=r"part 0 in .* has other texts"):
        run(model, TEXTS, SETTINGS, shards=Shards(tmp_path, {}), analyses=[])


def test_a_renamed_part_is_refused_by_name(tmp_path: Path) -> None:
    """It has other texts."""
    shards = Shards(tmp_path, {})
    shards.write(1, {"a": np.zeros(2)})
    (tmp_path / "000001.safetensors").rename(tmp_path / "000002.safetensors")
    with pytest.raises(OtherRunError, match=r"000002\.safetensors"):
        shards.read(2)


def test_deleted_settings(tmp_path: Path) -> None:
    """Parts still know their run: the same run continues, another is refused."""
    Shards(tmp_path, {"seed": 0}).write(1, {"a": np.ones(2)})
    (tmp_path / "settings.json").unlink()
    other = Shards(tmp_path, {"seed": 1})
    with pytest.raises(OtherRunError, match=r"000001\.safetensors"):
        other.read(1)
    (tmp_path / "settings.json").unlink()
    np.testing.assert_array_equal(Shards(tmp_path, {"seed": 0}).read(1)["a"], np.ones(2))


def test_damaged_settings_are_named(tmp_path: Path) -> None:
    """With what to do."""
    for content in ("{", "[]", ""):
        (tmp_path / "settings.json").write_text(content)
        with pytest.raises(OSError, match=r"settings\.json cannot be read .*delete it"):
            Shards(tmp_path, {})


KILLED = """
import os, signal, sys
from captum_hta.cli import main
from captum_hta.study import run, token_maps
run.SHARD, token_maps.EPOCHS = 1, 1
replace, moment = os.replace, sys.argv.pop(1)
def kill(part, path):
    if str(path).endswith("000001.safetensors"):
        if moment == "after":
            replace(part, path)
        os.kill(os.getpid(), signal.SIGKILL)
    replace(part, path)
os.replace = kill
main(sys.argv[1:])
"""
"""A study that ends itself by ``kill -9`` before or after its second part gets its name."""


@pytest.mark.slow
def test_killed(tmp_path: Path) -> None:
    """``kill -9``, twice, and the same command again give the tables of an undisturbed run."""
    tokenizer = byte_level(pad="<|end|>")
    config = tiny("BART").config
    config.vocab_size = len(tokenizer)
    transformers.BartModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    texts = [json.dumps({"text": f"the cat sat {number} times"}) for number in range(6)]
    (tmp_path / "texts.jsonl").write_text("\n".join(texts), encoding="utf-8")
    command = ["study", str(tmp_path / "texts.jsonl"), "--probes", "2", "--part", "encoder"]
    command += ["--model", str(tmp_path / "model"), "--out"]
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    for moment, parts in (("before", 1), ("after", 2)):
        child = [sys.executable, "-c", KILLED, moment, *command, str(killed)]
        done = subprocess.run(child, capture_output=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert len(list((killed / "parts").glob("*.safetensors"))) == parts
        assert not (killed / "report.html").exists()
    for folder in (killed, plain):
        assert main([*command, str(folder)]) == 0
    for table in plain.glob("*.csv"):
        assert table.read_bytes() == (killed / table.name).read_bytes()
