"""The command ``captum-hta``."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from captum_hta import __version__, plots, report, study
from captum_hta.contributions import (
    Contributions,
    contributions,
    encoded,
    missing_tokens,
    text_lengths,
)
from captum_hta.forecast import forecast, in_all
from captum_hta.model import Encoding, Model, Text
from captum_hta.norms import NORMS
from captum_hta.probes import FIRST_PROBES

EXPLAIN_PROBES = 32
DOCTOR_TOKENS = 32
FAILED = 1
INSTEAD = {
    "text": "give the second by --pair",
    "picture": "leave out --pair",
    "sound": "explain takes none, but captum_hta.contributions does",
}
"""What to do with a model that does not read what it is given."""
out = Console(soft_wrap=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)

app = typer.Typer(
    name="captum-hta",
    help="Hidden token attribution: how much of each token is in what an attention head takes in.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


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
Seed = Annotated[int, typer.Option(help="Seed of the probes.")]
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
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False,
) -> None:
    if version:
        out.print(f"captum-hta {__version__}", highlight=False)
        raise typer.Exit


# --- explain ---------------------------------------------------------------------------------------


@app.command()
def explain(
    text: Annotated[str, typer.Argument(help="A text, the first of a pair, or the path of a picture.")],
    pair: Annotated[str | None, typer.Option(help="The second text of a pair.")] = None,
    output: Annotated[
        Path, typer.Option("--out", "-o", help="The figure to write, as PNG, SVG or PDF.")
    ] = Path("explain.png"),
    query: Annotated[
        int | None,
        typer.Option(
            help="Number of the query token to list. Default: all; of a picture the first, its class token.",
            min=0,
        ),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(
            help="Default: in each layer the head whose input contribution differs most from its attention."
        ),
    ] = None,
    layers: Layers = None,
    top: Annotated[int, typer.Option(help="Source tokens to list for each query.", min=1)] = 3,
    model: ModelName = None,
    part: Part = None,
    adapter: Adapter = None,
    truncation: Truncation = False,
    device: Device = None,
    seed: Seed = 0,
    norm: Norm = "frobenius",
    probes: Annotated[
        int | None,
        typer.Option(
            help=f"Probes of each token for the input contribution. Default: {EXPLAIN_PROBES}.",
            min=1,
        ),
    ] = None,
    tolerance: Tolerance = None,
    exact: Exact = False,
    multiply_by_inputs: TimesInputs = False,
    debug: Debug = False,
) -> None:
    """Show what the heads take in for one text or picture.

    Prints, for each query token, the source tokens that are most in the output of one head, and draws
    attention, previous-layer contribution and input contribution side by side; for a model of pictures, those
    of one query over the picture.

    Example: captum-hta explain "The cat sat on the mat." --pair "It slept." --layers 3
    """
    if not text.strip() or (pair is not None and not pair.strip()):
        raise UserError("the text is empty")
    _check_output(output)
    n_probes = _probes(probes, tolerance, exact, norm, EXPLAIN_PROBES)
    loaded = _load(model, device, adapter, part)
    chosen = _layers(layers, loaded)
    if layers is None:
        chosen = [loaded.num_layers // 2]
    _check_head(head, loaded)
    read: Text = text if pair is None else (text, pair)
    encoding = _encoded(loaded, read, truncation)
    query = _query(query, encoding)
    asked = {"layers": chosen, "norm": norm, "n_probes": n_probes}
    _announce(loaded, [len(encoding)], asked, tolerance)
    with err.status("Attributing ..."):
        results = {
            source: contributions(
                loaded, [read], source=source, tolerance=tolerance, seed=seed, truncation=truncation,
                multiply_by_inputs=multiply_by_inputs, **asked,
            )
            for source in study.SOURCES
        }  # fmt: skip
    _print_plans(loaded, results)
    heads = [
        _most_different(results["input"], index, query) if head is None else head
        for index in range(len(chosen))
    ]
    for index, (layer, number) in enumerate(zip(chosen, heads, strict=True)):
        _print_head(results, index, f"Layer {layer}, head {number}", number, query, top)
    if head is None:
        out.print(
            "Of each layer the head whose input contribution differs most from its attention.", style="dim"
        )
    for source, result in results.items():
        if result.standard_error is not None:
            _print_error(source, result.standard_error.mean().item(), result.standard_error.max().item())
    titles = [f"layer {layer}, head {number}" for layer, number in zip(chosen, heads, strict=True)]
    _figure(results, encoding, heads, query, titles).savefig(output, dpi=150)
    what = "Heatmap" if encoding.grid is None else "Picture"
    out.print(f"{what}: {output}", highlight=False, markup=False, soft_wrap=True)


def _encoded(model: Model, text: Text, truncation: bool) -> Encoding:
    """The text as the model reads it; says what is cut of it."""
    if not model.reader.accepts(text):
        raise UserError(f"{model.name} reads {model.reader.reads}: {INSTEAD[model.reader.medium]}")
    encoding = encoded(model, text, 0, truncation)
    cut = missing_tokens(model, text, encoding) if truncation else 0
    if cut:
        out.print(
            f"{_count(cut, 'token')} cut, since {model.name} reads {model.max_length}.", highlight=False
        )
    return encoding


def _query(query: int | None, encoding: Encoding) -> int | None:
    """The query to show; of a picture there is one."""
    if query is not None and query >= len(encoding):
        raise UserError(f"--query {query} is no token: there are 0 to {len(encoding) - 1}")
    return 0 if query is None and encoding.grid is not None else query


def _figure(
    results: dict[str, Contributions],
    encoding: Encoding,
    heads: list[int],
    query: int | None,
    titles: list[str],
) -> Figure:
    """Heatmaps of all queries, or one query over its picture."""
    patterns = {"attention": results["input"].attention} | {s: r.values for s, r in results.items()}
    maps = {name: _rows(values, heads) for name, values in patterns.items()}
    if encoding.grid is None:
        return plots.heatmaps(maps, encoding.tokens, titles, _keys(results))
    maps = {name: values[:, query] for name, values in maps.items()}
    return plots.overlays(maps, encoding.picture, encoding.grid, encoding.tokens, query, titles)


def _keys(results: dict[str, Contributions]) -> list[str]:
    """Labels of the source tokens."""
    result = results["input"]
    return result.tokens[0] if result.keys is None else result.keys[0]


def _announce(model: Model, lengths: Sequence[int], asked: dict[str, Any], tolerance: float | None) -> None:
    """Say which ways will be taken, and what they will cost about; of cross attention it is not known."""
    if model.key_layers is not None:
        return
    n_probes = asked["n_probes"]
    if n_probes is None and tolerance is not None:
        n_probes = FIRST_PROBES
    asked = asked | {"n_probes": n_probes, "dtype": model.dtype, "device": model.device}
    for source in study.SOURCES:
        plans = in_all(forecast(model.size, length, source=source, **asked) for length in lengths)
        more = " or more" if tolerance is not None and plans[0].way == "probes" else ""
        for one in plans:
            out.print(f"{plots.MAPS[source]}: {one}{more}", highlight=False, style="dim", soft_wrap=True)


def _print_plans(model: Model, results: dict[str, Contributions]) -> None:
    """Say which ways were taken, where that was not known before."""
    if model.key_layers is None:
        return
    for source, result in results.items():
        for one in in_all(result.plans):
            out.print(f"{plots.MAPS[source]}: {one}", highlight=False, style="dim", soft_wrap=True)


def _print_error(source: str, mean: float, largest: float) -> None:
    what = f"Standard error of the {plots.MAPS[source].lower()}s"
    known = (
        f"{mean:.4f} on average, {largest:.4f} at most."
        if np.isfinite(largest)
        else "not known of one probe."
    )
    out.print(f"{what}: {known}", highlight=False)


def _rows(values: torch.Tensor, heads: list[int]) -> Any:
    return np.stack([values[0, index, head].numpy() for index, head in enumerate(heads)])


def _most_different(result: Contributions, index: int, query: int | None) -> int:
    """The head whose input contribution is furthest from its attention, in total variation."""
    distance = (result.values[0, index] - result.attention[0, index]).abs().sum(-1)
    return int((distance.sum(-1) if query is None else distance[:, query]).argmax())


def _print_head(
    results: dict[str, Contributions], index: int, title: str, head: int, query: int | None, top: int
) -> None:
    tokens = results["input"].tokens[0]
    table = Table(title=f"{title}: strongest source tokens", title_justify="left")
    table.add_column("#", justify="right", style="dim")
    table.add_column("query", style="bold")
    columns = {
        "attention": results["input"].attention,
        "previous layer": results["previous_layer"].values,
        "input": results["input"].values,
    }
    for name in columns:
        table.add_column(name)
    for number in range(len(tokens)) if query is None else [query]:
        rows = [values[0, index, head, number] for values in columns.values()]
        shown = (_strongest(row, _keys(results), top) for row in rows)
        table.add_row(str(number), _plain(tokens[number]), *shown)
    out.print(table)


def _strongest(row: torch.Tensor, keys: list[str], top: int) -> str:
    values, numbers = row.topk(min(top, len(keys)))
    shown = [(int(key), value) for key, value in zip(numbers, values, strict=True) if value >= 0.005]
    return _plain(" · ".join(f"{_named(key, keys)} {100 * value:.0f}%" for key, value in shown))


def _named(key: int, tokens: list[str]) -> str:
    """A token, with its number where there are several of it."""
    return f"{tokens[key]}#{key}" if tokens.count(tokens[key]) > 1 else tokens[key]


def _plain(text: str) -> str:
    """Without the meaning that rich gives to brackets, as in ``[CLS]``."""
    return text.replace("[", r"\[")


# --- doctor ---------------------------------------------------------------------------------------


@app.command()
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder, or a name on the Hugging Face hub. Default: the demo model."),
    ] = None,
    part: Part = None,
    adapter: Adapter = None,
    device: Device = None,
    debug: Debug = False,
) -> None:
    """Show what is found in a model: its parts, the checks at loading, and the ways that will be taken.

    Ends with status 1 if a check fails.

    Example: captum-hta doctor bert-base-uncased
    """
    loaded = _load(model, device, adapter, part)
    facts = {
        "model": loaded.name,
        "adapter": f"{type(loaded).__name__} on {loaded.architecture}",
        "size": f"{loaded.num_layers} layers of {loaded.num_heads} heads, {loaded.d_head} wide each",
        "width": str(loaded.d_model),
        "reads": loaded.reader.reads,
        "at most": "any length" if loaded.max_length is None else f"{loaded.max_length} tokens",
        "weights": f"{str(loaded.dtype).removeprefix('torch.')} on {loaded.device}",
        "closed form": "yes" if loaded.size.closed_form else "no, the general ways are taken",
    }
    facts |= _forecasts(loaded)
    _print_pairs("Found", facts)
    _print_pairs(
        "Checked",
        {
            check.name: " ".join(filter(None, ("passed" if check.passed else "FAILED", check.found)))
            for check in loaded.checks
        },
    )
    if not all(check.passed for check in loaded.checks):
        raise UserError("a check failed; results by the general ways are right all the same")


def _forecasts(model: Model) -> dict[str, str]:
    """What contributions will cost about; of cross attention it is not known."""
    if model.key_layers is not None:
        return {}
    return {
        f"{plots.MAPS[source]}, {DOCTOR_TOKENS} tokens": str(
            forecast(model.size, DOCTOR_TOKENS, source=source, dtype=model.dtype, device=model.device)
        )
        for source in study.SOURCES
    }


def _print_pairs(title: str, pairs: dict[str, str]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in pairs.items():
        table.add_row(name, _plain(value))
    out.print(table)


# --- study -----------------------------------------------------------------------------------------


@app.command(name="study")
def run_study(
    data: Annotated[
        Path | None,
        typer.Argument(
            help='JSON lines with "premise" and "hypothesis", or with "text". Default: 64 pairs that come '
            "with the package."
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")] = Path("hta-study"),
    limit: Annotated[int | None, typer.Option(help="Read only this many examples.", min=1)] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at a bad line.")] = False,
    layers: Layers = None,
    model: ModelName = None,
    part: Part = None,
    adapter: Adapter = None,
    truncation: Truncation = False,
    device: Device = None,
    seed: Seed = 0,
    norm: Norm = "frobenius",
    probes: Annotated[
        int | None,
        typer.Option(
            help=f"Probes of each token for the input contribution. Default: {study.DEFAULT_PROBES}.",
            min=1,
        ),
    ] = None,
    tolerance: Tolerance = None,
    exact: Exact = False,
    multiply_by_inputs: TimesInputs = False,
    debug: Debug = False,
) -> None:
    """Study a model on a corpus: attention against what the heads really take in.

    Writes tables (CSV), figures (PNG), a record of the run (run.json) and report.html, after "Telling
    BERT's Full Story" (Pascual et al. 2021). Bad lines are reported and skipped.

    Example: captum-hta study pairs.jsonl --limit 50 --out results
    """
    arguments = {
        "data": str(data or "the shipped pairs"), "limit": limit, "layers": layers or "all", "norm": norm,
        "probes": _probes(probes, tolerance, exact, norm, study.DEFAULT_PROBES), "tolerance": tolerance,
        "exact": exact, "multiply_by_inputs": multiply_by_inputs, "seed": seed, "device": device,
        "part": part, "adapter": adapter, "truncation": truncation,
    }  # fmt: skip
    started = time.perf_counter()
    _check_folder(output)
    loaded = _load(model, device, adapter, part)
    if loaded.reader.medium != "text":
        raise UserError(f"{loaded.name} reads {loaded.reader.reads}; a study is of texts: use explain")
    chosen = _layers(layers, loaded)
    texts, bad = _texts(data or study.shipped_pairs(), loaded, limit, strict, truncation)
    encodings = [encoded(loaded, text, number, truncation) for number, text in enumerate(texts)]
    cut = sum(missing_tokens(loaded, *pair) > 0 for pair in zip(texts, encodings, strict=True))
    asked = {"layers": chosen, "norm": norm, "n_probes": arguments["probes"]}
    _announce(loaded, [len(encoding) for encoding in encodings], asked, tolerance)
    setting = study.Setting(
        chosen, norm, multiply_by_inputs, arguments["probes"], tolerance, seed, truncation
    )
    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
    with tqdm(total=1.0, desc=f"{len(texts)} examples", bar_format=form, file=sys.stderr) as bar:
        found = study.run(loaded, texts, setting, lambda done: bar.update(min(done, 1 - bar.n)))
    record = {
        "model": loaded.name,
        "arguments": arguments,
        "seed": seed,
        "counts": {
            "examples": len(texts), "bad_lines": len(bad), "cut": cut, "tokens": sum(found.tokens),
            "seconds": round(time.perf_counter() - started, 1),
        },
        "bad_lines": [str(line) for line in bad],
    }  # fmt: skip
    report.write(output, found, record)
    _print_study(found, loaded, output, bad, cut)


def _texts(
    path: Path, model: Model, limit: int | None, strict: bool, truncation: bool
) -> tuple[list[Text], list[study.BadLine]]:
    def check(text: Text) -> str | None:
        if not model.reader.accepts(text):
            return f"it is not {model.reader.reads}"
        length = max(text_lengths(model.encode(text)))
        if not truncation and model.max_length is not None and length > model.max_length:
            return f"{length} tokens, but {model.name} reads at most {model.max_length}"
        return None

    try:
        texts, bad = study.read_texts(path, check, limit)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    for line in bad:
        err.print(f"{path.name}, {line}", markup=False)
    if bad and strict:
        raise UserError(f"{_count(len(bad), 'bad line')} in {path}; without --strict they are skipped")
    if not texts:
        raise UserError(
            f'{path} has no example: each line is a JSON object with "premise" and "hypothesis", or "text"'
        )
    return texts, bad


def _print_study(found: study.Study, model: Model, output: Path, bad: list[study.BadLine], cut: int) -> None:
    summary = found.layer_summary()
    table = Table(title=f"{model.name}: medians over heads, correlation with attention", title_justify="left")
    names = {
        "layer": "layer",
        "pearson_previous_layer_median": "previous layer, Pearson",
        "spearman_previous_layer_median": "Spearman",
        "pearson_input_median": "input, Pearson",
        "spearman_input_median": "Spearman",
    }
    for name in names.values():
        table.add_column(name, justify="right")
    for _, row in summary.iterrows():
        values = [_number(row[name], ".2f") for name in list(names)[1:]]
        table.add_row(f"{row['layer']:.0f}", *values)
    out.print(table)
    shares = found.findings()
    out.print(
        f"Previous layer: {_number(shares['share_of_heads_pearson_over_0.85'], '.0%')} of heads over Pearson "
        f"0.85, {_number(shares['share_of_heads_spearman_over_0.95'], '.0%')} over Spearman 0.95.",
        highlight=False,
    )
    for source, errors in found.probe_errors().items():
        _print_error(source, errors["mean"], errors["largest"])
    if bad:
        out.print(f"{_count(len(bad), 'bad line')} skipped.", highlight=False)
    if cut:
        out.print(f"{_count(cut, 'text')} cut, since {model.name} reads {model.max_length}.", highlight=False)
    out.print(f"Report: {output / 'report.html'}", highlight=False, markup=False, soft_wrap=True)


# --- shared ----------------------------------------------------------------------------------------


def _load(name: str | None, device: str | None, adapter: str | None = None, part: str | None = None) -> Model:
    from captum_hta.integrations.transformer_lens import load_model

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


def _layers(spec: str | None, model: Model) -> list[int]:
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


def _check_head(head: int | None, model: Model) -> None:
    if head is not None and not 0 <= head < model.num_heads:
        raise UserError(f"--head {head} is no head: {model.name} has 0 to {model.num_heads - 1}")


def _check_output(path: Path) -> None:
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--out {path} must end in .png, .svg or .pdf")
    if path.is_dir():
        raise UserError(f"--out {path} is a folder: name a file in it")
    if not path.absolute().parent.is_dir():
        raise UserError(f"the folder {path.absolute().parent} does not exist: make it first")


def _check_folder(path: Path) -> None:
    """Make the output folder before the work is done, so that it is not done in vain."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"the folder {path} cannot be written: {error.strerror or error}") from error


def _probes(probes: int | None, tolerance: float | None, exact: bool, norm: str, default: int) -> int | None:
    if exact and (probes is not None or tolerance is not None):
        raise UserError("--exact takes no probes: leave out --probes and --tolerance")
    if norm not in NORMS:
        raise UserError(f"--norm must be one of {', '.join(NORMS)}, got {norm!r}")
    if norm == "spectral" and (probes is not None or tolerance is not None):
        raise UserError("--probes and --tolerance do not estimate a spectral norm: leave them out")
    if exact or norm == "spectral":
        return None
    return probes if probes is not None or tolerance is not None else default


def _number(value: float, form: str) -> str:
    return format(value, form) if np.isfinite(value) else "-"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 for a failure, 2 for wrong usage, 130 if stopped."""
    arguments = sys.argv[1:] if arguments is None else arguments
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    return _guarded(lambda: app(arguments), "--debug" in arguments)


def _guarded(call: Callable[[], Any], debug: bool) -> int:
    try:
        call()
        return 0
    except SystemExit as stop:  # of typer, which has shown what was wrong with the usage
        return stop.code if isinstance(stop.code, int) else FAILED
    except KeyboardInterrupt:
        err.print("stopped")
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        expected = isinstance(error, UserError | ValueError | OSError)
        what = str(error) if expected else f"{type(error).__name__}: {error}"
        err.print(f"error: {what}", markup=False)
        if not expected and not debug:
            err.print("This should not happen; run again with --debug to see where.")
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
