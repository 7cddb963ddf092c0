"""``captum-hta explain --toward``: what it prints and draws."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image
from tokenizing import byte_level

from captum_hta import cli, head_effects, load_model
from captum_hta.model.head_names import head_name

TEXT = "the cat sat on the"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny GPT-2 with its head, and a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = byte_level()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=3, n_head=4, vocab_size=len(tokenizer), n_positions=40, initializer_range=0.5,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def explained(
    capsys: pytest.CaptureFixture[str], folder: Path, model: str, *options: str
) -> tuple[int, str, str]:
    """The status, and what is printed on both streams."""
    arguments = ["explain", TEXT, "--model", model, "--out", str(folder / "a.png"), *options]
    capsys.readouterr()
    status = cli.main(arguments)
    return status, *capsys.readouterr()


def rows(out: str) -> list[list[str]]:
    """The cells of the lines that begin with a head."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│ L" in line]


def test_table(gpt2: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Heads in the order of their effects, tokens with their shares, and the sum; on 80 columns."""
    status, out, _ = explained(capsys, tmp_path, gpt2, "--toward", " cat", "--against", " mat")
    assert status == 0
    effects = head_effects(load_model(gpt2), TEXT, " cat", against=" mat")
    expected = effects.top(10)
    found = rows(out)
    assert [row[0] for row in found] == expected["head"].to_list()
    assert [row[1] for row in found] == [f"{effect:+.2f}" for effect in expected["effect"]]
    for column, name in ((2, "attention"), (3, "contribution")):
        sources = zip(found, expected[f"{name} from"], expected[f"{name} share"], strict=True)
        for row, source, share in sources:
            assert re.match(rf"{re.escape(source)}(#\d+)?\s{100 * share:.0f}%", row[column])
    assert f"{effects.logit.item():+.2f} (heads {effects.parts['heads'].item():+.2f}, MLPs" in out
    assert re.search(r"reverse \(one pass a layer\): [\d.]+ \wFLOP", out)
    assert max(len(line) for line in out.splitlines() if "│" in line) <= 80
    with Image.open(tmp_path / "a.png") as image:
        assert image.width > image.height


@pytest.mark.parametrize(
    ("options", "heads"),
    [
        (("--head", "L2H1"), ["L2H1"]),
        (("--head", "1"), [head_name(layer, 1) for layer in range(3)]),
        (("--layers", "1"), [head_name(1, head) for head in range(4)]),
    ],
    ids=str,
)
def test_chosen_heads(
    gpt2: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...], heads: list[str]
) -> None:
    """A head by its name, its number in every layer, or the heads of some layers."""
    _, out, _ = explained(capsys, tmp_path, gpt2, "--toward", " cat", *options)
    assert sorted(row[0] for row in rows(out)) == heads


def test_another_query(gpt2: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """--query reads the logit after another token; --top lists more source tokens."""
    _, out, _ = explained(capsys, tmp_path, gpt2, "--toward", " cat", "--query", "2", "--top", "1")
    effects = head_effects(load_model(gpt2), TEXT, " cat", queries=2)
    assert [row[0] for row in rows(out)] == effects.top(10)["head"].to_list()
    assert "after token 2" in out
    assert all(row[2].count("%") == 1 for row in rows(out))


def test_a_token_that_is_several(gpt2: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The error names how the text splits."""
    status, _, err = explained(capsys, tmp_path, gpt2, "--toward", "cat dog")
    assert status == 1
    assert re.search(r"error: 'cat dog' is \d tokens, but one is needed \('.*'\): pass one token", err)
    assert not list(tmp_path.iterdir())
