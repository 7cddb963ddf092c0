"""What the commands share: options, loading, checks, and how they speak."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from tqdm import tqdm

from captum_hta.jacobian.forecast import forecast, in_all
from captum_hta.jacobian.norms import NORMS
from captum_hta.jacobian.probes import FIRST_PROBES
from captum_hta.model.encoding import Text
from captum_hta.model.protocol import Model
from captum_hta.study import corpus
from captum_hta.study import run as study
from captum_hta.texts import text_lengths
from captum_hta.views.names import QUANTITY_NAMES

out = Console(soft_wrap=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)


class UserError(Exception):
    """A mistake that the user can mend; its text says how."""


ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", "-m",
        help="A folder, or a name on the Hugging Face hub. Default: the demo model, a 6-layer BERT.",
    ),
]  # fmt: skip
Device = Annotated[str | None, typer.Option(help='Where to run, such as "cpu" or "cuda".')]
Seed = Annotated[int, typer.Option(help="Seed of the probes.", min=0, max=2**62)]
Layers = Annotated[
    str | None, typer.Option(help='Layers, such as "0,3", "2-4" or "-1" (the last). Default: all.')
]
Norm = Annotated[str, typer.Option(help="Norm of the Jacobian: frobenius, spectral or sum.")]
Tolerance = Annotated[
    float | None,
    typer.Option(help="Add probes until every standard error is at most this.", min=1e-9),
]
Exact = Annotated[bool, typer.Option("--exact", help="No probes: every direction of every token. Slower.")]
TimesInputs = Annotated[
    bool, typer.Option("--multiply-by-inputs", help="Weigh each Jacobian by its input vector.")
]
Part = Annotated[
    str | None,
    typer.Option(
        help="Of an encoder-decoder: encoder, decoder (its self-attention) or cross (its attention to the "
        "encoder). The last two read pairs: what the encoder reads and what the decoder has said."
    ),
]
Adapter = Annotated[
    str | None,
    typer.Option(help="transformer_lens or transformers. Default: the first for a BERT or RoBERTa."),
]
Truncation = Annotated[bool, typer.Option("--truncation", help="Cut what is longer than the model reads.")]
Data = Annotated[
    Path | None,
    typer.Argument(
        help='JSON lines with "premise" and "hypothesis", or with "text". Default: 64 pairs that come with '
        "the package."
    ),
]
Limit = Annotated[int | None, typer.Option(help="Read only this many examples.", min=1)]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at a bad line.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


# --- loading and checks ----------------------------------------------------------------------------


def load(name: str | None, device: str | None, adapter: str | None = None, part: str | None = None) -> Model:
    """The model of a name or folder.

    Raises:
        UserError: If it cannot be loaded, or cannot run on the device.
    """
    from captum_hta import load_model

    try:
        torch.device(device or "cpu")
    except RuntimeError as error:
        raise UserError(f"{device!r} is no device: use cpu, cuda or mps") from error
    try:
        with err.status("Loading the model ..."), redirect_stdout(sys.stderr):
            return load_model(name, device=device, adapter=adapter, part=part)
    except (ValueError, ModuleNotFoundError) as error:
        raise UserError(str(error)) from error
    except (AssertionError, RuntimeError) as error:
        raise UserError(
            f"the model cannot run on {device!r} ({error}): leave out --device, or install a PyTorch for it"
        ) from error


def named_layers(spec: str | None, model: Model) -> list[int]:
    """Layers of a list such as ``"0,3"``, ``"2-4"`` or ``"-1"``."""
    if spec is None or spec == "all":
        return list(range(model.num_layers))
    found: list[int] = []
    for part in spec.split(","):
        found.extend(_layer_range(part.strip(), spec))
    outside = [layer for layer in found if not -model.num_layers <= layer < model.num_layers]
    if outside:
        raise UserError(f"--layers names {outside[0]}, but {model.name} has 0 to {model.num_layers - 1}")
    return sorted({layer % model.num_layers for layer in found})


def _layer_range(part: str, spec: str) -> range:
    first, dash, last = part.partition("-") if not part.startswith("-") else (part, "", "")
    try:
        start = int(first)
        stop = int(last) if dash else start
    except ValueError:
        raise UserError(f'--layers {spec!r} is no list of layers: write "0,3", "2-4" or "-1"') from None
    if stop < start:
        raise UserError(f"--layers {spec!r} runs backwards: write the lower number first")
    return range(start, stop + 1)


def check_output(path: Path) -> None:
    """Raise a ``UserError`` if no figure can be written there."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--out {path} must end in .png, .svg or .pdf")
    if path.is_dir():
        raise UserError(f"--out {path} is a folder: name a file in it")
    if not path.absolute().parent.is_dir():
        raise UserError(f"the folder {path.absolute().parent} does not exist: make it first")


def check_folder(path: Path) -> None:
    """Make the output folder before the work is done, so that it is not done in vain."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"the folder {path} cannot be written: {error.strerror or error}") from error


def probes_or_exact(
    probes: int | None, tolerance: float | None, exact: bool, norm: str, default: int
) -> int | None:
    """The number of probes that is asked for, ``None`` for an exact result.

    Raises:
        UserError: If options contradict each other.
    """
    if exact and (probes is not None or tolerance is not None):
        raise UserError("--exact takes no probes: leave out --probes and --tolerance")
    if norm not in NORMS:
        raise UserError(f"--norm must be one of {', '.join(NORMS)}, got {norm!r}")
    if norm == "spectral" and (probes is not None or tolerance is not None):
        raise UserError("--probes and --tolerance do not estimate a spectral norm: leave them out")
    if exact or norm == "spectral":
        return None
    return probes if probes is not None or tolerance is not None else default


@dataclass(frozen=True)
class Reading:
    """What is read of a corpus.

    Attributes:
        limit, sample, fields: As in :class:`captum_hta.study.corpus.Choice`.
        max_tokens: Leave longer texts out.
        truncation: Cut texts that are longer than the model reads; otherwise they are bad.
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
        texts: Its texts.
        bad: Lines that are none.
        too_long: How many texts were left out for their length.
    """

    texts: list[Text]
    bad: list[corpus.BadLine]
    too_long: int = 0


def read_corpus(source: Path | str, model: Model, reading: Reading) -> Corpus:
    """The texts of a file, or of a dataset by name, that the model can read; bad lines are named on the way.

    Raises:
        UserError: If there is no text, the source cannot be read, or a line is bad and must not be.
    """
    length_of = lru_cache(maxsize=1)(lambda text: max(text_lengths(model.encode(text))))
    found = Corpus([], [])

    def check(text: Text) -> str | None:
        if not model.reader.accepts(text):
            return f"it is not {model.reader.reads}"
        length = length_of(text)
        if not reading.truncation and model.max_length is not None and length > model.max_length:
            return f"{length} tokens, but {model.name} reads at most {model.max_length}"
        return None

    def wanted(text: Text) -> bool:
        fits = reading.max_tokens is None or length_of(text) <= reading.max_tokens
        found.too_long += not fits
        return fits

    choice = corpus.Choice(check, wanted, reading.limit, reading.sample, reading.fields)
    read = corpus.read_texts if isinstance(source, Path) else corpus.read_dataset
    try:
        found.texts, found.bad = read(source, choice)
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror or error}") from error
    _check_corpus(source, found, reading)
    return found


def _check_corpus(source: Path | str, found: Corpus, reading: Reading) -> None:
    name = source.name if isinstance(source, Path) else source
    for line in found.bad:
        err.print(f"{name}, {line}", markup=False)
    if found.bad and reading.strict:
        raise UserError(
            f"{counted(len(found.bad), 'bad line')} in {source}; without --strict they are skipped"
        )
    if not found.texts and found.too_long:
        raise UserError(f"every text of {source} has more tokens than --max-tokens {reading.max_tokens}")
    if not found.texts and reading.fields:
        raise UserError(f"{source} has no example with the fields {', '.join(reading.fields)}")
    if not found.texts:
        raise UserError(
            f'{source} has no example: each line is a JSON object with "premise" and "hypothesis", or '
            '"text"; --fields of a study names others'
        )


# --- what is said ----------------------------------------------------------------------------------


def announce(
    model: Model,
    lengths: Sequence[int],
    asked: dict[str, Any],
    tolerance: float | None,
    hidden: bool = False,
) -> None:
    """Say which modes will be taken, and what they will cost about; of cross attention it is not known.
    ``hidden``: for hidden embeddings too.
    """
    if model.key_layers is not None:
        return
    n_probes = asked["n_probes"]
    if n_probes is None and tolerance is not None:
        n_probes = FIRST_PROBES
    asked = asked | {"n_probes": n_probes, "dtype": model.dtype, "device": model.device}
    for source in study.SOURCES:
        target = "layer" if hidden and source == "input" else "head"
        plans = in_all(
            forecast(model.size, length, source=source, target=target, **asked) for length in lengths
        )
        more = " or more" if tolerance is not None and plans[0].mode == "probes" else ""
        for one in plans:
            out.print(f"{QUANTITY_NAMES[source]}: {one}{more}", highlight=False, style="dim", soft_wrap=True)


def print_error(source: str, mean: float, largest: float) -> None:
    """Say how far estimates are off."""
    what = f"Standard error of the {QUANTITY_NAMES[source].lower()}s"
    known = (
        f"{mean:.4f} on average, {largest:.4f} at most."
        if np.isfinite(largest)
        else "not known of one probe."
    )
    out.print(f"{what}: {known}", highlight=False)


@contextmanager
def progress(examples: int) -> Iterator[Callable[[float], object]]:
    """A progress bar; yields what to call with the number of examples done."""
    with progress_of(counted(examples, "example")) as advance:
        advance(0)
        yield lambda done: advance(done / examples)


@contextmanager
def progress_of(what: str) -> Iterator[Callable[[float], object]]:
    """A progress bar that comes with the first step; yields what to call with the share that was done."""
    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
    with ExitStack() as open_bars:
        bars: list[tqdm] = []

        def advance(share: float) -> None:
            if not bars:
                bar = tqdm(total=1.0, desc=what, bar_format=form, file=sys.stderr)
                bars.append(open_bars.enter_context(bar))
            bars[0].update(min(share, 1 - bars[0].n))

        yield advance


def rounded(value: float, form: str) -> str:
    """A number, or a dash where there is none."""
    return format(value, form) if np.isfinite(value) else "-"


def counted(number: int, noun: str) -> str:
    """``"1 line"`` or ``"2 lines"``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def plain(text: str) -> str:
    """Without the meaning that rich gives to brackets, as in ``[CLS]``."""
    return text.replace("[", r"\[")
