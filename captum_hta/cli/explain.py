"""``captum-hta explain``: what the heads take in from one text or image."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from captum_hta.cli.checks import check_figure, probes_or_exact
from captum_hta.cli.console import add_row, counted, say, show, table, waiting, warn
from captum_hta.cli.errors import UserError
from captum_hta.cli.estimates import print_forecasts, print_plans, print_standard_error
from captum_hta.cli.figures import write_figure
from captum_hta.cli.loading import ModelChoice, check_head, head_number, layer_numbers, named_layers
from captum_hta.cli.options import (
    Adapter,
    Debug,
    Device,
    Exact,
    Head,
    ModelName,
    Norm,
    Part,
    Seed,
    TimesInputs,
    Tolerance,
    Truncation,
    expanded,
    probes_option,
)
from captum_hta.cli.toward import Answer, EffectsTable

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from torch import Tensor

    from captum_hta.model.encoding import Encoding, Text
    from captum_hta.model.protocol import Model
    from captum_hta.result import Contributions

DEFAULT_PROBES = 32
SHOWN_SHARE = 0.005
"""Smaller contributions are not listed: they would be printed as 0%."""
FILE_NAME = re.compile(r"\S+\.(jpe?g|png|gif|webp|wav|mp3|flac|jsonl?|csv|tsv|txt|gz)", re.IGNORECASE)
"""A text of one word that ends as the names of images, audio and tables do."""
REMEDIES = {
    "text": "give the second text with --pair",
    "image": "leave out --pair",
    "audio": "explain does not, but captum_hta.contributions does",
}
"""What to do when a model does not read what it is given, by what it reads."""


def explain(
    text: Annotated[str, typer.Argument(help="A text, the first of a pair, or the path of an image.")],
    pair: Annotated[str | None, typer.Option(help="The second text of a pair.")] = None,
    output: Annotated[
        Path, typer.Option("--out", "-o", help="The figure to write, as PNG, SVG or PDF.", parser=expanded)
    ] = Path("explain.png"),
    query: Annotated[
        str | None,
        typer.Option(
            help="The query token to list, by position (negative from the end) or text. Default: all; "
            "for an image the first, its class token; with --toward the last."
        ),
    ] = None,
    head: Head = None,
    toward: Annotated[
        str | None,
        typer.Option(
            help="Explain this next token of a decoder: list the heads by their direct effect on its logit, "
            "and the tokens that they take it from."
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="With --toward, a token whose logit is subtracted.")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help='Layers, such as "0,3", "2-4" or "-1" (the last). Default: the middle; with --toward all.'
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="Source tokens to list for each query, or head.", min=1)] = 3,
    model: ModelName = None,
    part: Part = None,
    adapter: Adapter = None,
    truncation: Truncation = False,
    device: Device = None,
    seed: Seed = 0,
    norm: Norm = "frobenius",
    probes: Annotated[int | None, probes_option(DEFAULT_PROBES)] = None,
    tolerance: Tolerance = None,
    exact: Exact = False,
    multiply_by_inputs: TimesInputs = False,
    debug: Debug = False,
) -> None:
    """Show what the heads take in from one text or image.

    Prints, for each query token, the source tokens that contribute most to the output of one head, and draws
    attention, previous-layer contribution and input contribution side by side; for vision models, those of
    one query over the image.

    Example: captum-hta explain "The cat sat on the mat." --pair "It slept." --layers 3

    With --toward, lists the heads of a decoder that push one next token, or one token against another.

    Example: captum-hta explain "John gave a drink to" --toward " Mary" --against " John" --model gpt2
    """
    if not text.strip() or (pair is not None and not pair.strip()):
        raise UserError("the text is empty")
    check_figure(output)
    numbers, number = head_number(head, layer_numbers(layers))
    choice = ModelChoice(model, device, adapter, part)
    estimate = Estimate(
        norm, probes_or_exact(probes, tolerance, exact, norm, DEFAULT_PROBES), tolerance, seed,
        multiply_by_inputs,
    )  # fmt: skip
    if toward is None and against is not None:
        raise UserError("--against goes with --toward: name the token that the answer begins with")
    if toward is not None:
        estimate.refuse_options(pair, probes)
    choice.check(numbers, number)
    loaded = choice.load()
    check_head(number, loaded.num_heads, loaded.name)
    if loaded.reader.medium == "image":
        text = os.path.expanduser(text)
    read = text if pair is None else (text, pair)
    encoding = _encoded(loaded, read, truncation)
    position = _query(query, encoding)
    if toward is not None:
        answer = Answer(toward, against, position)
        effects = answer.effects(loaded, encoding.ids if truncation else text, len(encoding))
        strongest = EffectsTable.of(effects, named_layers(numbers, loaded), number, top)
        strongest.print()
        write_figure(strongest.figure(), output, encoding.tokens)
        return
    chosen = [loaded.num_layers // 2] if numbers is None else named_layers(numbers, loaded)
    results = estimate.results(loaded, read, encoding, chosen, truncation)
    explanation = Explanation.of(results, encoding, position, number)
    explanation.print(top)
    if number is None:
        where = "" if position is None else " at this query"
        say(f"Heads: those whose input contribution differs most from their attention{where}.", "dim")
    for source, result in results.items():
        if result.standard_error is not None:
            error = result.standard_error
            print_standard_error(source, error.mean().item(), error.max().item())
    explanation.write_figure(output)


@dataclass(frozen=True)
class Estimate:
    """How contributions are computed; fields as arguments of :func:`captum_hta.contributions`."""

    norm: str
    n_probes: int | None
    tolerance: float | None
    seed: int
    multiply_by_inputs: bool

    def refuse_options(self, pair: str | None, probes: int | None) -> None:
        """Raise a ``UserError`` if an option was given that has no meaning with ``--toward``."""
        given = {
            "--pair": pair is not None,
            "--probes": probes is not None,
            "--tolerance": self.tolerance is not None,
            "--norm": self.norm != "frobenius",
            "--multiply-by-inputs": self.multiply_by_inputs,
        }
        wrong = [name for name, is_given in given.items() if is_given]
        if wrong:
            raise UserError(f"--toward explains one text along one direction, exactly: leave out {wrong[0]}")

    def results(
        self, model: Model, text: Text, encoding: Encoding, layers: list[int], truncation: bool
    ) -> dict[str, Contributions]:
        """The contributions from each source; prints about what they cost."""
        from captum_hta.computation import contributions
        from captum_hta.study.settings import SOURCES

        print_forecasts(model, [len(encoding)], layers, self.norm, self.n_probes, self.tolerance)
        with waiting("Attributing ..."):
            results = {
                source: contributions(
                    model, [text], source=source, layers=layers, norm=self.norm, n_probes=self.n_probes,
                    tolerance=self.tolerance, seed=self.seed, truncation=truncation,
                    multiply_by_inputs=self.multiply_by_inputs,
                )
                for source in SOURCES
            }  # fmt: skip
        if model.key_layers is not None:  # nothing was forecast
            for source, result in results.items():
                print_plans(source, result.plans)
        return results


def _encoded(model: Model, text: Text, truncation: bool) -> Encoding:
    """The text as the model reads it; prints how many tokens are cut."""
    from captum_hta.texts import encoded, missing_tokens

    if not model.reader.accepts(text):
        raise UserError(f"{model.name} reads {model.reader.reads}: {REMEDIES[model.reader.medium]}")
    if model.reader.medium == "text" and isinstance(text, str) and FILE_NAME.fullmatch(text):
        warn(f"{text!r} looks like the name of a file, but is explained as a text, which {model.name} reads")
    encoding = encoded(model, text, 0, truncation)
    cut = missing_tokens(model, text, encoding) if truncation else 0
    if cut:
        say(f"{counted(cut, 'token')} cut: {model.name} reads {model.max_length}.")
    return encoding


def _query(query: str | None, encoding: Encoding) -> int | None:
    """The number of the query to show; for an image there is one."""
    if query is None:
        return 0 if encoding.grid is not None else None
    count = len(encoding)
    if re.fullmatch(r"-?\d+", query):
        if not -count <= int(query) < count:
            raise UserError(f"--query {query} does not exist: there are tokens 0 to {count - 1}")
        return int(query) % count
    named = [number for number, token in enumerate(encoding.tokens) if token.strip() == query.strip()]
    if len(named) == 1:
        return named[0]
    if not named:
        raise UserError(f"--query {query!r} is no token of the text: {', '.join(encoding.tokens)}")
    numbers = " and ".join(map(str, named))
    raise UserError(f"--query {query!r} occurs as tokens {numbers}: pass one of these numbers")


@dataclass(frozen=True)
class Explanation:
    """What one head of each layer takes in from a text or image.

    Attributes:
        results: Contributions of the text from each source.
        encoding: The text as the model reads it.
        query: The query to show, or ``None`` for all.
        heads: For each layer the head to show.
    """

    results: Mapping[str, Contributions]
    encoding: Encoding
    query: int | None
    heads: Sequence[int]

    @classmethod
    def of(
        cls, results: Mapping[str, Contributions], encoding: Encoding, query: int | None, head: int | None
    ) -> Explanation:
        """The explanation by that head, or by the most different one of each layer."""
        count = len(results["input"].layers)
        if head is None:
            heads = [_most_different(results["input"], index, query) for index in range(count)]
        else:
            heads = [head] * count
        return cls(results, encoding, query, heads)

    @property
    def keys(self) -> list[str]:
        """Labels of the source tokens."""
        result = self.results["input"]
        return result.tokens[0] if result.keys is None else result.keys[0]

    @property
    def maps(self) -> dict[str, Tensor]:
        """Attention and contributions, each ``[layer, head, query, key]``."""
        attention = {"attention": self.results["input"].attention[0]}
        return attention | {source: result.values[0] for source, result in self.results.items()}

    def titles(self, form: str) -> list[str]:
        """A title for each layer, from a format of the name of its head."""
        from captum_hta.model.head_names import head_name

        layers = self.results["input"].layers
        return [form.format(head_name(*place)) for place in zip(layers, self.heads, strict=True)]

    def print(self, top: int) -> None:
        """Print a table for each layer: for each query the strongest source tokens."""
        titles = self.titles("{}: strongest source tokens")
        for index, (title, head) in enumerate(zip(titles, self.heads, strict=True)):
            self._print_head(title, index, head, top)

    def _print_head(self, title: str, index: int, head: int, top: int) -> None:
        strongest = table(title)
        strongest.add_column("#", justify="right", style="dim")
        strongest.add_column("query", style="bold")
        for name in self.maps:
            strongest.add_column(name.replace("_", " "))
        tokens = self.encoding.tokens
        for number in range(len(tokens)) if self.query is None else [self.query]:
            rows = [values[index, head, number] for values in self.maps.values()]
            add_row(strongest, str(number), tokens[number], *(self._strongest(row, top) for row in rows))
        show(strongest)

    def _strongest(self, row: Tensor, top: int) -> str:
        values, numbers = row.topk(min(top, len(self.keys)))
        pairs = zip(numbers.tolist(), values.tolist(), strict=True)
        return " · ".join(
            f"{self._label(key)} {100 * value:.0f}%" for key, value in pairs if value >= SHOWN_SHARE
        )

    def _label(self, key: int) -> str:
        """A source token, with its number where it occurs more than once."""
        token = self.keys[key]
        return f"{token}#{key}" if self.keys.count(token) > 1 else token

    def figure(self) -> Figure:
        """Heatmaps of all queries, or one query over its image."""
        from captum_hta.views import heatmaps

        titles = self.titles("{}")
        maps = {name: self._of_heads(values) for name, values in self.maps.items()}
        grid, image = self.encoding.grid, self.encoding.image
        if grid is None or image is None or self.query is None:
            return heatmaps.heatmaps(maps, self.encoding.tokens, titles, self.keys)
        maps = {name: values[:, self.query] for name, values in maps.items()}
        return heatmaps.overlays(maps, image, grid, self.encoding.tokens, self.query, titles)

    def _of_heads(self, values: Tensor) -> NDArray[np.float64]:
        """``[layer, query, key]`` of the heads to show."""
        import numpy as np

        return np.stack([values[index, head].numpy() for index, head in enumerate(self.heads)])

    def write_figure(self, output: Path) -> None:
        """Write the figure; print where it is, and what its font cannot show."""
        kind = "Heatmap" if self.encoding.grid is None else "Image"
        write_figure(self.figure(), output, [*self.encoding.tokens, *self.keys], kind)


def _most_different(result: Contributions, index: int, query: int | None) -> int:
    """The head whose input contribution is furthest from its attention, in total variation."""
    distance = (result.values[0, index] - result.attention[0, index]).abs().sum(-1)  # head query
    return int((distance.sum(-1) if query is None else distance[:, query]).argmax())
