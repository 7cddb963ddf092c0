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
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from captum_hta import __version__, plots, report, study
from captum_hta.contributions import Contributions, contributions, encoded
from captum_hta.forecast import forecast, in_all
from captum_hta.model import Model, Text
from captum_hta.norms import NORMS
from captum_hta.probes import FIRST_PROBES

EXPLAIN_PROBES = 32
DOCTOR_TOKENS = 32
FAILED = 1
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
    text: Annotated[str, typer.Argument(help="A text, or the first of a pair.")],
    pair: Annotated[str | None, typer.Option(help="The second text of a pair.")] = None,
    output: Annotated[
        Path, typer.Option("--out", "-o", help="The heatmap to write, as PNG, SVG or PDF.")
    ] = Path("explain.png"),
    head: Annotated[
        int | None,
        typer.Option(
            help="Default: in each layer the head whose input contribution differs most from its attention."
        ),
    ] = None,
    layers: Layers = None,
    top: Annotated[int, typer.Option(help="Source tokens to list for each query.", min=1)] = 3,
    model: ModelName = None,
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
    """Show what the heads take in for one text.

    Prints, for each query token, the source tokens that are most in the output of one head, and draws
    attention, previous-layer contribution and input contribution side by side.

    Example: captum-hta explain "The cat sat on the mat." --pair "It slept." --layers 3
    """
    if not text.strip() or (pair is not None and not pair.strip()):
        raise UserError("the text is empty")
    _check_output(output)
    n_probes = _probes(probes, tolerance, exact, norm, EXPLAIN_PROBES)
    loaded = _load(model, device)
    chosen = _layers(layers, loaded)
    if layers is None:
        chosen = [loaded.num_layers // 2]
    _check_head(head, loaded)
    words: Text = text if pair is None else (text, pair)
    asked = {"layers": chosen, "norm": norm, "n_probes": n_probes}
    _announce(loaded, [len(encoded(loaded, words, 0))], asked, tolerance)
    with err.status("Attributing ..."):
        results = {
            source: contributions(
                loaded, [words], source=source, tolerance=tolerance, seed=seed,
                multiply_by_inputs=multiply_by_inputs, **asked,
            )
            for source in study.SOURCES
        }  # fmt: skip
    heads = [
        _most_different(results["input"], index) if head is None else head for index in range(len(chosen))
    ]
    for index, (layer, number) in enumerate(zip(chosen, heads, strict=True)):
        _print_head(results, index, layer, number, top)
    if head is None:
        out.print(
            "Of each layer the head whose input contribution differs most from its attention.", style="dim"
        )
    for source, result in results.items():
        if result.standard_error is not None:
            _print_error(source, result.standard_error.mean().item(), result.standard_error.max().item())
    maps = {"attention": results["input"].attention} | {s: r.values for s, r in results.items()}
    figure = plots.heatmaps(
        {name: _rows(values, heads) for name, values in maps.items()},
        results["input"].tokens[0],
        [f"layer {layer}, head {number}" for layer, number in zip(chosen, heads, strict=True)],
    )
    figure.savefig(output, dpi=150)
    out.print(f"Heatmap: {output}", highlight=False, markup=False, soft_wrap=True)


def _announce(model: Model, lengths: Sequence[int], asked: dict[str, Any], tolerance: float | None) -> None:
    """Say which ways will be taken, and what they will cost about."""
    n_probes = asked["n_probes"]
    if n_probes is None and tolerance is not None:
        n_probes = FIRST_PROBES
    asked = asked | {"n_probes": n_probes, "dtype": model.dtype, "device": model.device}
    for source in study.SOURCES:
        plans = in_all(forecast(model.size, length, source=source, **asked) for length in lengths)
        more = " or more" if tolerance is not None and plans[0].way == "probes" else ""
        for one in plans:
            out.print(f"{plots.MAPS[source]}: {one}{more}", highlight=False, style="dim", soft_wrap=True)


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


def _most_different(result: Contributions, index: int) -> int:
    """The head whose input contribution is furthest from its attention, in total variation."""
    distance = (result.values[0, index] - result.attention[0, index]).abs().sum((-1, -2))
    return int(distance.argmax())


def _print_head(results: dict[str, Contributions], index: int, layer: int, head: int, top: int) -> None:
    tokens = results["input"].tokens[0]
    table = Table(title=f"Layer {layer}, head {head}: strongest source tokens", title_justify="left")
    table.add_column("#", justify="right", style="dim")
    table.add_column("query", style="bold")
    columns = {
        "attention": results["input"].attention,
        "previous layer": results["previous_layer"].values,
        "input": results["input"].values,
    }
    for name in columns:
        table.add_column(name)
    for query, token in enumerate(tokens):
        rows = [values[0, index, head, query] for values in columns.values()]
        table.add_row(str(query), _plain(token), *(_strongest(row, tokens, top) for row in rows))
    out.print(table)


def _strongest(row: torch.Tensor, tokens: list[str], top: int) -> str:
    values, keys = row.topk(min(top, len(tokens)))
    shown = [(int(key), value) for key, value in zip(keys, values, strict=True) if value >= 0.005]
    return _plain(" · ".join(f"{_named(key, tokens)} {100 * value:.0f}%" for key, value in shown))


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
    device: Device = None,
    debug: Debug = False,
) -> None:
    """Show what is found in a model: its parts, the checks at loading, and the ways that will be taken.

    Ends with status 1 if a check fails.

    Example: captum-hta doctor bert-base-uncased
    """
    loaded = _load(model, device)
    facts = {
        "model": loaded.name,
        "adapter": f"{type(loaded).__name__} on {loaded.architecture}",
        "size": f"{loaded.num_layers} layers of {loaded.num_heads} heads, {loaded.d_head} wide each",
        "width": str(loaded.d_model),
        "reads at most": "any length" if loaded.max_length is None else f"{loaded.max_length} tokens",
        "weights": f"{str(loaded.dtype).removeprefix('torch.')} on {loaded.device}",
        "closed form": "yes" if loaded.size.closed_form else "no, the general ways are taken",
    }
    facts |= {
        f"{plots.MAPS[source]}, {DOCTOR_TOKENS} tokens": str(
            forecast(loaded.size, DOCTOR_TOKENS, source=source, dtype=loaded.dtype, device=loaded.device)
        )
        for source in study.SOURCES
    }
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
    }  # fmt: skip
    started = time.perf_counter()
    _check_folder(output)
    loaded = _load(model, device)
    chosen = _layers(layers, loaded)
    texts, bad = _texts(data or study.shipped_pairs(), loaded, limit, strict)
    asked = {"layers": chosen, "norm": norm, "n_probes": arguments["probes"]}
    _announce(loaded, [len(loaded.encode(text)) for text in texts], asked, tolerance)
    setting = study.Setting(chosen, norm, multiply_by_inputs, arguments["probes"], tolerance, seed)
    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
    with tqdm(total=1.0, desc=f"{len(texts)} examples", bar_format=form, file=sys.stderr) as bar:
        found = study.run(loaded, texts, setting, lambda done: bar.update(min(done, 1 - bar.n)))
    record = {
        "model": loaded.name,
        "arguments": arguments,
        "seed": seed,
        "counts": {
            "examples": len(texts), "bad_lines": len(bad), "tokens": sum(found.tokens),
            "seconds": round(time.perf_counter() - started, 1),
        },
        "bad_lines": [str(line) for line in bad],
    }  # fmt: skip
    report.write(output, found, record)
    _print_study(found, loaded, output, bad)


def _texts(
    path: Path, model: Model, limit: int | None, strict: bool
) -> tuple[list[Text], list[study.BadLine]]:
    def check(text: Text) -> str | None:
        length = len(model.encode(text))
        if model.max_length is not None and length > model.max_length:
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


def _print_study(found: study.Study, model: Model, output: Path, bad: list[study.BadLine]) -> None:
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
    out.print(f"Report: {output / 'report.html'}", highlight=False, markup=False, soft_wrap=True)


# --- shared ----------------------------------------------------------------------------------------


def _load(name: str | None, device: str | None) -> Model:
    from captum_hta.integrations.transformer_lens import load_model

    try:
        torch.device(device or "cpu")
    except RuntimeError as error:
        raise UserError(f"{device!r} is no device: use cpu, cuda or mps") from error
    try:
        with err.status("Loading the model ..."), redirect_stdout(sys.stderr):
            return load_model(name, device=device)
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
