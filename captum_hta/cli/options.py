"""Options that several commands have, with their help."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def expanded(path: str) -> Path:
    """A path with the home directory in the place of ``~``, which shells expand only in some arguments."""
    return Path(os.path.expanduser(path))


def known_head(head: str | None) -> str | None:
    """The name or the number of a head, checked.

    Raises:
        typer.BadParameter: If it is neither.
    """
    from captum_hta.model.head_names import named_head

    if head is not None and not head.lstrip("-").isdecimal():
        try:
            named_head(head)
        except ValueError as error:
            raise typer.BadParameter(f"{error}, or its number alone") from error
    return head


ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", "-m",
        help="A folder or a name on the Hugging Face hub. Default: the demo model, a 6-layer BERT.",
    ),
]  # fmt: skip
Device = Annotated[str | None, typer.Option(help='Where to run, such as "cpu" or "cuda".')]
Seed = Annotated[int, typer.Option(help="Seed of the probes.", min=0, max=2**62)]
Head = Annotated[
    str | None,
    typer.Option(
        help="A head of one layer, such as L18H6, or a number in each of the layers. Default: in each layer "
        "the head whose input contribution differs most from its attention.",
        callback=known_head,
    ),
]
Layers = Annotated[
    str | None, typer.Option(help='Layers, such as "0,3", "2-4" or "-1" (the last). Default: all.')
]
Norm = Annotated[str, typer.Option(help="Norm of the Jacobian: frobenius, spectral or sum.")]
Tolerance = Annotated[
    float | None,
    typer.Option(help="Add probes until every standard error is at most this.", min=1e-9),
]
Exact = Annotated[bool, typer.Option("--exact", help="Compute exactly, without probes. Slower.")]
TimesInputs = Annotated[
    bool, typer.Option("--multiply-by-inputs", help="Weight each Jacobian by its input vector.")
]
Part = Annotated[
    str | None,
    typer.Option(
        help="For encoder-decoder models: encoder, decoder (its self-attention) or cross (its attention to "
        "the encoder). The last two read pairs: the encoder's text and the decoder's. For models with a part "
        "for each of several media: text, image or audio."
    ),
]
Adapter = Annotated[
    str | None,
    typer.Option(help="transformer_lens or transformers. Default: the first for BERT and RoBERTa."),
]
Truncation = Annotated[bool, typer.Option("--truncation", help="Cut texts that are too long for the model.")]
Data = Annotated[
    Path | None,
    typer.Argument(
        help='JSON lines with "premise" and "hypothesis", or with "text". Default: 64 pairs that come with '
        "the package. - reads standard input.",
        parser=expanded,
    ),
]
OutputFolder = Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.", parser=expanded)]
Limit = Annotated[int | None, typer.Option(help="Read only this many examples.", min=1)]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at a bad line.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def probes_option(default: int) -> object:
    """The option ``--probes`` of a command with this default."""
    return typer.Option(help=f"Probes of each token for the input contribution. Default: {default}.", min=1)
