"""Corpora as the commands read them: bad lines are reported, and what the model cannot read is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from captum_hta.cli.console import counted, warn
from captum_hta.cli.errors import UserError

if TYPE_CHECKING:
    from captum_hta.model.encoding import Text
    from captum_hta.model.protocol import Model
    from captum_hta.study.corpus import BadLine, Choice


CHARACTERS = 1000
"""Characters that a text may have for each token that the model reads; tokens rarely have more than ten.
Tokenising takes many times the memory of a text, so that longer ones are refused before it."""
LONGEST = 10_000
"""Tokens that a model without a limit reads, for the same purpose."""


@dataclass(frozen=True)
class Reading:
    """Which texts of a corpus are taken.

    Attributes:
        limit, sample, fields: As in :class:`captum_hta.study.corpus.Choice`.
        max_tokens: Leave longer texts out.
        truncation: Cut texts that are too long for the model; otherwise they are bad lines.
        strict: Stop at a bad line.
    """

    limit: int | None = None
    sample: int | None = None
    fields: Sequence[str] | None = None
    max_tokens: int | None = None
    truncation: bool = False
    strict: bool = False


@dataclass
class Corpus:
    """What was read.

    Attributes:
        texts: The texts.
        bad: The bad lines.
        too_long: Number of texts left out because of ``max_tokens``.
    """

    texts: list[Text]
    bad: list[BadLine]
    too_long: int = 0


def check_source(source: Path | str | None) -> None:
    """Check that a file can be read and is of JSON lines; pipes can be read only once, datasets only by name.

    Raises:
        UserError: If it cannot be read.
        CorpusError: If it is in another encoding or of another format.
    """
    from captum_hta.study.corpus import STANDARD_INPUT
    from captum_hta.study.json_lines import check_format

    if not isinstance(source, Path) or source == STANDARD_INPUT or source.is_fifo():
        return
    try:
        with source.open("rb") as file:
            check_format(file, str(source))
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror or error}") from error


def read_corpus(source: Path | str | None, model: Model, reading: Reading) -> Corpus:
    """The texts of a file, of a dataset by name or of the shipped pairs; bad lines are reported.

    Raises:
        UserError: If there is no text, the source cannot be read, or a line is bad and ``strict`` is set.
    """
    from captum_hta.study.corpus import read_dataset, read_texts, shipped_pairs

    source = source or shipped_pairs()
    found = Corpus([], [])
    choice = _choice(model, reading, found)
    try:
        read = read_texts(source, choice) if isinstance(source, Path) else read_dataset(source, choice)
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror or error}") from error
    found.texts, found.bad = read
    _check_corpus(source, found, reading)
    return found


def _choice(model: Model, reading: Reading, found: Corpus) -> Choice:
    """The choice of what the model reads; counts in ``found`` the texts that are too long."""
    from captum_hta.study.corpus import Choice
    from captum_hta.texts import text_lengths

    @lru_cache(maxsize=1)
    def length_of(text: Text) -> int:
        return max(text_lengths(model.encode(text)))

    def check(text: Text) -> str | None:
        if not model.reader.accepts(text):
            return f"it is not {model.reader.reads}"
        characters = len(text) if isinstance(text, str) else sum(map(len, text))
        if characters > CHARACTERS * (model.max_length or LONGEST):
            return f"{characters} characters, far more than {model.name} reads"
        length = length_of(text)
        if not reading.truncation and model.max_length is not None and length > model.max_length:
            return f"{length} tokens, but {model.name} reads at most {model.max_length}"
        return None

    def wanted(text: Text) -> bool:
        fits = reading.max_tokens is None or length_of(text) <= reading.max_tokens
        found.too_long += not fits
        return fits

    return Choice(check, wanted, reading.limit, reading.sample, reading.fields)


def _check_corpus(source: Path | str, found: Corpus, reading: Reading) -> None:
    name = _name(source)
    for line in found.bad:
        warn(f"{name}, {line}")
    if found.bad and reading.strict:
        raise UserError(
            f"{counted(len(found.bad), 'bad line')} in {source}; without --strict they are skipped"
        )
    if not found.texts:
        raise UserError(_why_empty(source, found, reading))


def _name(source: Path | str) -> str:
    """What messages about lines call a source."""
    from captum_hta.study.corpus import STANDARD_INPUT

    if source == STANDARD_INPUT:
        return "standard input"
    return source.name if isinstance(source, Path) else source


def _why_empty(source: Path | str, found: Corpus, reading: Reading) -> str:
    if found.too_long:
        return f"every text of {source} has more tokens than --max-tokens {reading.max_tokens}"
    if reading.fields:
        return f"{source} has no example with the fields {', '.join(reading.fields)}"
    return (
        f'{source} has no example: each line is a JSON object with "premise" and "hypothesis", or "text"; '
        "--fields of a study names others"
    )
