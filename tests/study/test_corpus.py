"""What is read of a corpus, and what of it is taken."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from captum_hta.study.corpus import STANDARD_INPUT, Choice, read_dataset, read_texts, shipped_pairs
from captum_hta.study.json_lines import CorpusError


def lines(folder: Path, *content: bytes) -> Path:
    """A file of these lines."""
    path = folder / "texts.jsonl"
    path.write_bytes(b"\n".join(content))
    return path


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"premise": "a b", "hypothesis": "c"}', ("a b", "c")),
        (b'{"hypothesis": "c", "label": 1, "premise": "a b"}', ("a b", "c")),
        (b'{"text": "a b"}', "a b"),
        (b'{"text": "a b", "premise": "p", "hypothesis": "h"}', "a b"),
        (b'\xef\xbb\xbf{"text": "a b"}', "a b"),
        (b'  {"text": "a b"}\t\r', "a b"),
        ('{"text": "Žluťoučký 東京 🙂"}'.encode(), "Žluťoučký 東京 🙂"),
        (rb'{"text": "\ud83d\ude42 \u00e9"}', "🙂 é"),
        ('{"text": "one\u2028two\u0085three"}'.encode(), "one\u2028two\u0085three"),
        (rb'{"text": " a\nb "}', " a\nb "),
    ],
    ids=["pair", "order", "text", "both", "bom", "crlf", "utf-8", "escapes", "breaks", "spaces"],
)
def test_good_lines(tmp_path: Path, line: bytes, text: Any) -> None:
    """A line is an example however its JSON is written."""
    assert read_texts(lines(tmp_path, line), Choice()) == ([text], [])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"The cat sat.", "not JSON"),
        (b'{"text": "a"', "not JSON"),
        (b'{"text": "a"} {"text": "b"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"1" * 5000, "not JSON"),
        ('{"text": "é"}'.encode("latin-1"), "not UTF-8"),
        (b'["a", "b"]', "not a JSON object but list"),
        (b'"a"', "not a JSON object but str"),
        (b"null", "not a JSON object but NoneType"),
        (b"NaN", "not a JSON object but float"),
        (b"{}", "no field 'premise'"),
        (b'{"premise": "a"}', "no field 'hypothesis'"),
        (b'{"hypothesis": "a"}', "no field 'premise'"),
        (b'{"text": 3}', "field 'text' is not a string"),
        (b'{"text": null, "premise": "a", "hypothesis": "b"}', "field 'text' is not a string"),
        (b'{"premise": "a", "hypothesis": ["b"]}', "field 'hypothesis' is not a string"),
        (b'{"text": ""}', "field 'text' is empty"),
        (b'{"premise": " \\n ", "hypothesis": "b"}', "field 'premise' is empty"),
    ],
)
def test_bad_lines_have_number_and_reason(tmp_path: Path, line: bytes, problem: str) -> None:
    """Bad lines are reported with number and reason; blank lines count but are not reported."""
    path = lines(tmp_path, b'{"text": "a"}', b"", b" \t\r", line, b'{"text": "b"}', b"")
    texts, (bad,) = read_texts(path, Choice())
    assert texts == ["a", "b"]
    assert bad.number == 4
    assert str(bad).startswith(f"line 4: {problem}")


def test_a_bad_line_has_one_line_number(tmp_path: Path) -> None:
    """JSON's own "line 1" is not the line of the file, and would only confuse."""
    (bad,) = read_texts(lines(tmp_path, b"", b"{'text': 'a'}"), Choice())[1]
    assert "line 1" not in str(bad)


def test_half_a_character_is_a_bad_line(tmp_path: Path) -> None:
    """A lone surrogate is valid JSON but no text: tokenizers crash on it."""
    path = lines(tmp_path, rb'{"text": "a \ud83d"}', rb'{"premise": "a", "hypothesis": "\udc00"}')
    texts, bad = read_texts(path, Choice())
    assert (texts, [line.number for line in bad]) == ([], [1, 2])


def test_the_check_decides_about_texts(tmp_path: Path) -> None:
    """It sees the texts of all lines that are well formed, and its words are the reason."""
    path = lines(tmp_path, b'{"text": "a"}', b"no", b'{"text": "long"}', b'{"text": "b"}')
    texts, bad = read_texts(path, Choice(lambda text: "too long" if len(text) > 1 else None))
    assert texts == ["a", "b"]
    assert [line.number for line in bad] == [2, 3]
    assert str(bad[1]) == "line 3: too long"


@pytest.mark.parametrize(
    ("limit", "texts", "bad"), [(1, 1, 0), (2, 2, 1), (3, 3, 1), (9, 3, 2), (None, 3, 2)]
)
def test_limit_counts_good_lines(tmp_path: Path, limit: int, texts: int, bad: int) -> None:
    """Reading stops with the last of them, so that what comes after is not complained about."""
    line = b'{"text": "a"}'
    found = read_texts(lines(tmp_path, line, b"bad", line, b"", line, b"bad"), Choice(limit=limit))
    assert list(map(len, found)) == [texts, bad]


@pytest.mark.parametrize("content", [b"", b"\n\r\n \n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_an_empty_file_has_no_example(tmp_path: Path, content: bytes) -> None:
    """Nothing to read is nothing bad."""
    assert read_texts(lines(tmp_path, content), Choice()) == ([], [])


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    """It is an OSError, as documented."""
    with pytest.raises(OSError, match=r"No such file|Is a directory"):
        read_texts(tmp_path / name, Choice())


def test_shipped_pairs() -> None:
    """64 good lines, no two the same, with labels in balance."""
    texts, bad = read_texts(shipped_pairs(), Choice())
    records = [json.loads(line) for line in shipped_pairs().read_text("utf-8").splitlines()]
    assert (len(texts), bad, len(records)) == (64, [], 64)
    assert len(set(texts)) == len({premise for premise, _ in texts}) == 64
    labels = Counter(record["label"] for record in records)
    assert sorted(labels) == ["contradiction", "entailment", "neutral"]
    assert max(labels.values()) - min(labels.values()) <= 1


# --- encodings and formats ------------------------------------------------------------------------


TEXTS = ["first line of text", "plain english line", "日本語 text here", "the last"]
ALL = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS)


@pytest.mark.parametrize(
    ("encoding", "found"),
    [
        ("utf-16", "UTF-16"),
        ("utf-32", "UTF-32"),
        ("utf-16-le", "UTF-16LE"),
        ("utf-16-be", "UTF-16BE"),
        ("utf-32-le", "UTF-32LE"),
        ("utf-32-be", "UTF-32BE"),
    ],
)
def test_another_encoding_is_one_error(tmp_path: Path, encoding: str, found: str) -> None:
    """It names the encoding found and how to convert the file; no line is guessed."""
    path = lines(tmp_path, ALL.encode(encoding))
    with pytest.raises(CorpusError, match=rf"texts.jsonl is in {found}, not in UTF-8: .*iconv -f {found} "):
        read_texts(path, Choice())


def test_no_line_is_read_in_an_encoding_of_its_own(tmp_path: Path) -> None:
    """A single line in UTF-16 is a bad line, though JSON could be guessed from its zeros."""
    path = lines(tmp_path, b'{"text": "a"}', '{"text": "b"}'.encode("utf-16-le"), b'{"text": "c"}')
    texts, bad = read_texts(path, Choice())
    assert texts == ["a", "c"]
    assert [line.number for line in bad] == [2]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(ALL.encode()), r"compressed \(gzip\): unpack it first, with gunzip"),
        (bz2.compress(ALL.encode()), r"compressed \(bzip2\)"),
        (lzma.compress(ALL.encode()), r"compressed \(xz\)"),
        (b"PK\x03\x04...", r"compressed \(zip\)"),
        (b"PAR1\x00\x15", "a binary file"),
        (b"premise,hypothesis\na,b\nc,d\n", "looks like CSV"),
        (b"premise\thypothesis\na\tb\n", "looks like CSV"),
        (b"Dogs bark\nCats meow\n", "not JSON lines: each line must be a JSON object"),
        (b'[\n  {"text": "a"},\n  {"text": "b"}\n]\n', "is a JSON array: write each object on a line"),
        (b'[{"text": "a"}, {"text": "b"}]', "is a JSON array"),
    ],
    ids=["gzip", "bzip2", "xz", "zip", "binary", "csv", "tsv", "plain", "array", "array in a line"],
)
def test_another_format_is_one_error(tmp_path: Path, content: bytes, words: str) -> None:
    """The file is one error, not each of its lines."""
    with pytest.raises(CorpusError, match=words):
        read_texts(lines(tmp_path, content), Choice())


def test_bad_lines_first_are_no_other_format(tmp_path: Path) -> None:
    """One good line among the first shows that the file is of JSON lines."""
    texts, bad = read_texts(lines(tmp_path, b"# header", b"a, b", b'{"text": "a"}'), Choice())
    assert (texts, len(bad)) == (["a"], 2)


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read as a file is, and named as what it is."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(ALL.encode())))
    assert read_texts(STANDARD_INPUT, Choice())[0] == TEXTS
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a,b\nc,d")))
    with pytest.raises(CorpusError, match="standard input is not JSON lines"):
        read_texts(STANDARD_INPUT, Choice())


# --- a choice -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (("de",), "ein Haus"),
        (("en.premise", "en.hypothesis"), ("a house", "a home")),
        (("en.premise", "de"), ("a house", "ein Haus")),
    ],
    ids=["one", "nested", "mixed"],
)
def test_fields_by_name(tmp_path: Path, fields: tuple[str, ...], text: Any) -> None:
    """One or two, dots leading inwards."""
    path = lines(tmp_path, b'{"en": {"premise": "a house", "hypothesis": "a home"}, "de": "ein Haus"}')
    assert read_texts(path, Choice(fields=fields)) == ([text], [])


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (("fr",), "no field 'fr'"),
        (("en.text",), "no field 'en.text'"),
        (("de.premise",), "no field 'de.premise'"),
        (("en",), "field 'en' is not a string"),
    ],
    ids=str,
)
def test_fields_that_are_not_there(tmp_path: Path, fields: tuple[str, ...], problem: str) -> None:
    """The line is bad, by the name that was asked for."""
    path = lines(tmp_path, b'{"en": {"premise": "a house"}, "de": "ein Haus"}')
    (bad,) = read_texts(path, Choice(fields=fields))[1]
    assert bad.problem == problem


def test_unwanted_texts_are_left_out_silently(tmp_path: Path) -> None:
    """They are not bad, and do not count against the limit."""
    path = lines(tmp_path, *(b'{"text": "%d"}' % number for number in range(9)))
    odd = Choice(wanted=lambda text: int(text) % 2 == 1, limit=3)
    assert read_texts(path, odd) == (["1", "3", "5"], [])


def test_a_sample_is_of_all_lines(tmp_path: Path) -> None:
    """In their order, the same for one seed; each as often as any other over many seeds."""
    path = lines(tmp_path, *(b'{"text": "%d"}' % number for number in range(10)), b"bad")
    counts: Counter[str] = Counter()
    for seed in range(400):
        texts, bad = read_texts(path, Choice(limit=4, sample=seed))
        assert len(texts) == 4
        assert texts == sorted(texts)
        assert len(bad) == 1
        counts.update(texts)
    assert read_texts(path, Choice(limit=4, sample=3)) == read_texts(path, Choice(limit=4, sample=3))
    found = np.array([counts[str(number)] for number in range(10)])
    assert found.sum() == 1600
    assert np.abs(found - 160).max() < 5 * np.sqrt(160 * 0.6)


@pytest.mark.parametrize("limit", [None, 20])
def test_a_sample_of_more_than_there_are(tmp_path: Path, limit: int | None) -> None:
    """All of them, in their order."""
    path = lines(tmp_path, *(b'{"text": "%d"}' % number for number in range(9)))
    assert read_texts(path, Choice(limit=limit, sample=1))[0] == [str(number) for number in range(9)]


# --- datasets -------------------------------------------------------------------------------------


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    """A folder that ``datasets`` can load, with two splits."""
    pytest.importorskip("datasets")
    for split in ("validation", "test"):
        records = [json.dumps({"sentence1": f"{split} {number}", "sentence2": "b"}) for number in range(5)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(records))
    return str(tmp_path)


PAIR = ("sentence1", "sentence2")


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_dataset(dataset: str, split: str) -> None:
    """Split and fields are as named; validation is the split that is not named."""
    name = dataset if split == "validation" else f"{dataset}:{split}"
    texts, bad = read_dataset(name, Choice(fields=PAIR, limit=2))
    assert (texts, bad) == ([(f"{split} 0", "b"), (f"{split} 1", "b")], [])


def test_records_of_a_dataset_can_be_bad(dataset: str) -> None:
    """As lines of a file can."""
    texts, bad = read_dataset(dataset, Choice())
    assert (texts, [line.number for line in bad]) == ([], [1, 2, 3, 4, 5])


@pytest.mark.parametrize("name", ["a:b:c:d", ":", "a::b", ""])
def test_names_of_no_dataset(name: str) -> None:
    """How to write it is said."""
    pytest.importorskip("datasets")
    with pytest.raises(CorpusError, match="write PATH"):
        read_dataset(name, Choice())


def test_a_dataset_that_cannot_be_loaded(tmp_path: Path) -> None:
    """Whatever went wrong, it is an error of one kind that names the dataset."""
    pytest.importorskip("datasets")
    with pytest.raises(CorpusError, match=r"nothing:test cannot be loaded"):
        read_dataset(f"{tmp_path}/nothing:test", Choice())


def test_without_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is said."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CorpusError, match=r"pip install .captum-hta\[datasets\]"):
        read_dataset("a", Choice())
