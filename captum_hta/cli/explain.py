"""``captum-hta explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from matplotlib.figure import Figure
from rich.table import Table

from captum_hta.cli.options import (
    Adapter,
    Debug,
    Device,
    Exact,
    Layers,
    ModelName,
    Norm,
    Part,
    Seed,
    TimesInputs,
    Tolerance,
    Truncation,
    UserError,
    announce,
    check_output,
    counted,
    err,
    load,
    named_layers,
    out,
    plain,
    print_error,
    probes_or_exact,
)
from captum_hta.computation import contributions
from captum_hta.jacobian.forecast import in_all
from captum_hta.model.encoding import Encoding, Text
from captum_hta.model.protocol import Model
from captum_hta.result import Contributions
from captum_hta.study import run as study
from captum_hta.texts import encoded, missing_tokens
from captum_hta.views import heatmaps
from captum_hta.views.names import QUANTITY_NAMES

EXPLAIN_PROBES = 32
INSTEAD = {
    "text": "give the second by --pair",
    "image": "leave out --pair",
    "audio": "explain takes none, but captum_hta.contributions does",
}
"""What to do with a model that does not read what it is given."""


def explain(
    text: Annotated[str, typer.Argument(help="A text, the first of a pair, or the path of an image.")],
    pair: Annotated[str | None, typer.Option(help="The second text of a pair.")] = None,
    output: Annotated[
        Path, typer.Option("--out", "-o", help="The figure to write, as PNG, SVG or PDF.")
    ] = Path("explain.png"),
    query: Annotated[
        int | None,
        typer.Option(
            help="Number of the query token to list. Default: all; of an image the first, its class token.",
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
    """Show what the heads take in for one text or image.

    Prints, for each query token, the source tokens that are most in the output of one head, and draws
    attention, previous-layer contribution and input contribution side by side; for a model of images, those
    of one query over the image.

    Example: captum-hta explain "The cat sat on the mat." --pair "It slept." --layers 3
    """
    if not text.strip() or (pair is not None and not pair.strip()):
        raise UserError("the text is empty")
    check_output(output)
    n_probes = probes_or_exact(probes, tolerance, exact, norm, EXPLAIN_PROBES)
    loaded = load(model, device, adapter, part)
    chosen = named_layers(layers, loaded)
    if layers is None:
        chosen = [loaded.num_layers // 2]
    _check_head(head, loaded)
    read: Text = text if pair is None else (text, pair)
    encoding = _encoded(loaded, read, truncation)
    query = _query(query, encoding)
    asked = {"layers": chosen, "norm": norm, "n_probes": n_probes}
    announce(loaded, [len(encoding)], asked, tolerance)
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
            print_error(source, result.standard_error.mean().item(), result.standard_error.max().item())
    titles = [f"layer {layer}, head {number}" for layer, number in zip(chosen, heads, strict=True)]
    _figure(results, encoding, heads, query, titles).savefig(output, dpi=150)
    if heatmaps.undrawable([*encoding.tokens, *_keys(results)]):
        out.print(
            "Tokens in letters that the font of figures lacks are shown there by their numbers.", style="dim"
        )
    what = "Heatmap" if encoding.grid is None else "Image"
    out.print(f"{what}: {output}", highlight=False, markup=False, soft_wrap=True)


def _encoded(model: Model, text: Text, truncation: bool) -> Encoding:
    """The text as the model reads it; says what is cut of it."""
    if not model.reader.accepts(text):
        raise UserError(f"{model.name} reads {model.reader.reads}: {INSTEAD[model.reader.medium]}")
    encoding = encoded(model, text, 0, truncation)
    cut = missing_tokens(model, text, encoding) if truncation else 0
    if cut:
        out.print(
            f"{counted(cut, 'token')} cut, since {model.name} reads {model.max_length}.", highlight=False
        )
    return encoding


def _query(query: int | None, encoding: Encoding) -> int | None:
    """The query to show; of an image there is one."""
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
    """Heatmaps of all queries, or one query over its image."""
    patterns = {"attention": results["input"].attention} | {s: r.values for s, r in results.items()}
    maps = {name: _rows(values, heads) for name, values in patterns.items()}
    if encoding.grid is None:
        return heatmaps.heatmaps(maps, encoding.tokens, titles, _keys(results))
    maps = {name: values[:, query] for name, values in maps.items()}
    return heatmaps.overlays(maps, encoding.image, encoding.grid, encoding.tokens, query, titles)


def _keys(results: dict[str, Contributions]) -> list[str]:
    """Labels of the source tokens."""
    result = results["input"]
    return result.tokens[0] if result.keys is None else result.keys[0]


def _print_plans(model: Model, results: dict[str, Contributions]) -> None:
    """Say which modes were taken, where that was not known before."""
    if model.key_layers is None:
        return
    for source, result in results.items():
        for one in in_all(result.plans):
            out.print(f"{QUANTITY_NAMES[source]}: {one}", highlight=False, style="dim", soft_wrap=True)


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
        table.add_row(str(number), plain(tokens[number]), *shown)
    out.print(table)


def _strongest(row: torch.Tensor, keys: list[str], top: int) -> str:
    values, numbers = row.topk(min(top, len(keys)))
    shown = [(int(key), value) for key, value in zip(numbers, values, strict=True) if value >= 0.005]
    return plain(" · ".join(f"{_named(key, keys)} {100 * value:.0f}%" for key, value in shown))


def _named(key: int, tokens: list[str]) -> str:
    """A token, with its number where there are several of it."""
    return f"{tokens[key]}#{key}" if tokens.count(tokens[key]) > 1 else tokens[key]


def _check_head(head: int | None, model: Model) -> None:
    if head is not None and not 0 <= head < model.num_heads:
        raise UserError(f"--head {head} is no head: {model.name} has 0 to {model.num_heads - 1}")
