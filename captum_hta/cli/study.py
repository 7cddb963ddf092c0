"""``captum-hta study``: a model, or several, studied on a corpus."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from captum_hta import __version__
from captum_hta.cli import STOPPED
from captum_hta.cli.checks import check_folder, probes_or_exact
from captum_hta.cli.console import (
    add_row,
    counted,
    progress,
    progress_of,
    rounded,
    say,
    show,
    table,
    warn,
)
from captum_hta.cli.corpora import Corpus, Reading, check_source, read_corpus
from captum_hta.cli.errors import UserError
from captum_hta.cli.estimates import print_forecasts, print_standard_error
from captum_hta.cli.loading import ModelChoice, layer_numbers, named_layers
from captum_hta.cli.options import (
    Adapter,
    Debug,
    Device,
    Exact,
    Layers,
    Limit,
    Norm,
    OutputFolder,
    Part,
    Seed,
    Strict,
    TimesInputs,
    Tolerance,
    Truncation,
    expanded,
    probes_option,
)
from captum_hta.cli.pairings import Pairing, pairings
from captum_hta.study.settings import DEFAULT_PROBES, StudySettings

if TYPE_CHECKING:
    import pandas as pd

    from captum_hta.model.encoding import Text
    from captum_hta.model.protocol import Model
    from captum_hta.report.labelled_study import LabelledStudy
    from captum_hta.study.record import RunRecord
    from captum_hta.study.run import Study

FILES = ("*.csv", "*.png", "run.json", "report.html")
"""Patterns of the files of a study; which there are depends on what is found."""
COLUMNS = {
    "pearson_previous_layer_median": "previous layer, Pearson",
    "spearman_previous_layer_median": "Spearman",
    "pearson_input_median": "input, Pearson",
    "spearman_input_median": "Spearman",
}
"""Columns of the summary by layer, and what they are called on the console."""


def study(
    data: Annotated[
        list[Path] | None,
        typer.Argument(
            help='JSON lines with "premise" and "hypothesis", or with "text". Default: 64 pairs that come '
            "with the package. - reads standard input.",
            parser=expanded,
        ),
    ] = None,
    more_data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="The same as an option, for one file per model.", parser=expanded),
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="A dataset of the Hugging Face hub, such as nyu-mll/glue:mnli:validation_matched; needs the "
            "package datasets and a network."
        ),
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option(help='Fields to read, one or two, such as "premise,hypothesis" or "de.premise".'),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="A folder or a name on the Hugging Face hub, such as bert-base-uncased. Default: the demo "
            "model, a 6-layer BERT.",
        ),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="What to call each study, where there are several.")
    ] = None,
    output: OutputFolder = Path("hta-study"),
    limit: Limit = None,
    sample: Annotated[
        int | None,
        typer.Option(help="Draw the --limit examples at random with this seed, instead of the first."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Leave longer texts out (Pascual et al.: 64).", min=1)
    ] = None,
    exclude_special: Annotated[
        bool, typer.Option("--exclude-special", help="Leave special tokens out of the statistics.")
    ] = False,
    strict: Strict = False,
    layers: Layers = None,
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
    keep_contributions: Annotated[
        bool,
        typer.Option(
            "--keep-contributions",
            help="Keep every matrix too, compressed and in half precision; captum_hta.open_study reads them.",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Study a model on a corpus: how far attention differs from what the heads take in.

    Writes tables (CSV), figures (PNG), a record of the run (run.json) and report.html, after "Telling
    BERT's Full Story" (Pascual et al. 2021) and "On Identifiability in Transformers" (Brunner et al. 2020).
    Bad lines are reported and skipped. Finished parts are kept in the folder: a study that was stopped
    continues when the same command is given again. Several models or corpora are studied one after the
    other, and compared.

    Example: captum-hta study pairs.jsonl --limit 50 --out results
    """
    if sample is not None and limit is None:
        raise UserError("--sample draws the --limit examples at random: say how many with --limit")
    options = StudyOptions(
        limit, sample, max_tokens, exclude_special, layers or "all", norm,
        probes_or_exact(probes, tolerance, exact, norm, DEFAULT_PROBES),
        tolerance, exact, multiply_by_inputs, seed, device, part, adapter, truncation, keep_contributions,
    )  # fmt: skip
    pairs = pairings(
        model or [], [*(data or []), *(more_data or [])], dataset or [], fields or [], label or []
    )
    for pair in pairs:
        check_source(pair.source)
        options.choice(pair.model).check(layer_numbers(layers))
    for folder in [output, *(output / pair.folder for pair in pairs if len(pairs) > 1)]:
        check_folder(folder, FILES)
    if len(pairs) == 1:
        OneStudy(pairs[0], output, options, strict).run()
        return
    studies = [OneStudy(pair, output / pair.folder, options, strict, several=True).run() for pair in pairs]
    from captum_hta.report.several_studies import write

    write(output, studies)
    say(f"Comparison of all: {output / 'report.html'}")


@dataclass(frozen=True)
class StudyOptions:
    """The options that hold for every study of a command, as they are recorded."""

    limit: int | None
    sample: int | None
    max_tokens: int | None
    exclude_special: bool
    layers: str
    norm: str
    probes: int | None
    tolerance: float | None
    exact: bool
    multiply_by_inputs: bool
    seed: int
    device: str | None
    part: str | None
    adapter: str | None
    truncation: bool
    keep_contributions: bool

    def choice(self, model: str | None) -> ModelChoice:
        """The model of that name."""
        return ModelChoice(model, self.device, self.adapter, self.part)

    def settings(self, model: Model) -> StudySettings:
        """The settings of a study of this model."""
        return StudySettings(
            layers=named_layers(layer_numbers(self.layers), model),
            norm=self.norm,
            multiply_by_inputs=self.multiply_by_inputs,
            n_probes=self.probes,
            tolerance=self.tolerance,
            seed=self.seed,
            truncation=self.truncation,
            exclude_special=self.exclude_special,
        )

    def facts(self) -> dict[str, object]:
        """Those that decide the numbers."""
        return {name: value for name, value in asdict(self).items() if name != "device"}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Tokens:
    """What a model reads of a corpus.

    Attributes:
        lengths: The number of tokens of each text.
        cut: The number of texts of which truncation left tokens out.
        digest: A digest of all tokens.
    """

    lengths: list[int]
    cut: int
    digest: str

    @classmethod
    def of(cls, model: Model, texts: list[Text], truncation: bool) -> Tokens:
        """Tokenise all texts once; only these numbers are kept."""
        from captum_hta.computation import fingerprint
        from captum_hta.texts import encoded, missing_tokens

        lengths, cut, prints = [], 0, []
        for number, text in enumerate(texts):
            encoding = encoded(model, text, number, truncation)
            lengths.append(len(encoding))
            cut += missing_tokens(model, text, encoding) > 0
            prints.append(str(fingerprint(encoding)))
        return cls(lengths, cut, _digest(" ".join(prints)))


@dataclass(frozen=True)
class OneStudy:
    """The study of a model on a corpus.

    Attributes:
        pairing: Model and corpus.
        folder: Where the results go.
        options: The options of the command.
        strict: Stop at a bad line.
        several: Whether the command has others.
    """

    pairing: Pairing
    folder: Path
    options: StudyOptions
    strict: bool
    several: bool = False

    def run(self) -> LabelledStudy:
        """Run the study, write the folder and print a summary."""
        started = time.perf_counter()
        model = self.options.choice(self.pairing.model).load()
        if model.reader.medium != "text":
            raise UserError(
                f"{model.name} reads {model.reader.reads}, and only models that read texts can be studied"
            )
        settings = self.options.settings(model)
        corpus = self._read(model)
        tokens = Tokens.of(model, corpus.texts, settings.truncation)
        self._announce(model, tokens, settings)
        found = self._study(model, corpus.texts, settings, tokens)
        record = self._record(model, corpus, tokens.cut, found, time.perf_counter() - started)
        return self._write(model, found, record)

    def _read(self, model: Model) -> Corpus:
        options = self.options
        reading = Reading(
            options.limit, options.sample, self.pairing.fields, options.max_tokens, options.truncation,
            self.strict,
        )  # fmt: skip
        return read_corpus(self.pairing.source, model, reading)

    def _announce(self, model: Model, tokens: Tokens, settings: StudySettings) -> None:
        """Print about what the study will cost."""
        from captum_hta.jacobian.norms import NORMS

        layers = named_layers(settings.layers, model)
        hidden = NORMS[settings.norm].of_gram is None
        print_forecasts(
            model, tokens.lengths, layers, settings.norm, settings.n_probes, settings.tolerance, hidden
        )

    def _study(self, model: Model, texts: list[Text], settings: StudySettings, tokens: Tokens) -> Study:
        from captum_hta.study import run as studies
        from captum_hta.study.checkpoint import Shards
        from captum_hta.study.folder import check_nothing_kept
        from captum_hta.study.outputs import PARTS

        kept_in = self.folder if self.options.keep_contributions else None
        if kept_in is not None and not (self.folder / PARTS).exists():
            check_nothing_kept(self.folder)
        shards = Shards(self.folder / PARTS, self._facts(model, texts, tokens))
        try:
            with progress(len(texts)) as advance, progress_of("maps of hidden tokens") as advance_maps:
                return studies.run(
                    model, texts, settings, lambda done: advance(done * len(texts)), shards, kept_in,
                    advance_maps,
                )  # fmt: skip
        except KeyboardInterrupt:
            warn("stopped; the same command continues from the finished parts")
            raise SystemExit(STOPPED) from None

    def _facts(self, model: Model, texts: list[Text], tokens: Tokens) -> dict[str, object]:
        """What decides the numbers: a stopped study continues only if all of it is the same."""
        own = {
            "model": model.fingerprint,
            "texts": _digest(repr(texts)),
            "tokens": tokens.digest,
            "version": __version__,
        }
        return self.options.facts() | own

    def _record(self, model: Model, corpus: Corpus, cut: int, found: Study, seconds: float) -> RunRecord:
        source, fields = self.pairing.source, self.pairing.fields
        data = {"data": str(source or "the shipped pairs"), "fields": ", ".join(fields) if fields else None}
        steps = {name: round(spent, 1) for name, spent in found.watch.seconds.items()}
        return {
            "model": model.name,
            "label": self.pairing.label,
            "several": self.several,
            "arguments": data | asdict(self.options),
            "seed": self.options.seed,
            "counts": {
                "examples": len(corpus.texts), "bad_lines": len(corpus.bad), "too_long": corpus.too_long,
                "cut": cut, "tokens": sum(found.tokens),
            },
            "seconds": steps | {"this command": round(seconds, 1)},
            "bad_lines": [str(line) for line in corpus.bad],
        }  # fmt: skip

    def _write(self, model: Model, found: Study, record: RunRecord) -> LabelledStudy:
        """Write the folder and print a summary."""
        from captum_hta.report import one_study
        from captum_hta.report.labelled_study import LabelledStudy

        one_study.write(self.folder, found, record)
        _print_layers(found.tables()["layers"], model.name)
        _print_shares(found)
        _print_left_out(model, record["counts"])
        say(f"Report: {self.folder / 'report.html'}")
        return LabelledStudy(self.pairing.label or "", self.pairing.folder, found, record)


def _print_layers(summary: pd.DataFrame, name: str) -> None:
    medians = table(f"{name}: medians over heads, correlation with attention")
    for title in ("layer", *COLUMNS.values()):
        medians.add_column(title, justify="right")
    for row in summary.to_dict("records"):
        add_row(medians, f"{row['layer']:.0f}", *(rounded(row[column], ".2f") for column in COLUMNS))
    show(medians)


def _print_shares(found: Study) -> None:
    """Print the shares of heads for the previous layer, and the standard errors."""
    from captum_hta.study.correlations import Correlations
    from captum_hta.study.errors import ProbeErrors

    shares = found[Correlations].shares_of_heads()
    say(
        f"Previous layer: {rounded(shares['share_of_heads_pearson_over_0.85'], '.0%')} of heads over Pearson "
        f"0.85, {rounded(shares['share_of_heads_spearman_over_0.95'], '.0%')} over Spearman 0.95."
    )
    for source, errors in found[ProbeErrors].summary().items():
        print_standard_error(source, errors["mean"], errors["largest"])


def _print_left_out(model: Model, counts: Mapping[str, int]) -> None:
    left_out = {
        f"{counted(counts['bad_lines'], 'bad line')} skipped.": counts["bad_lines"],
        f"{counted(counts['too_long'], 'text')} left out by --max-tokens.": counts["too_long"],
        f"{counted(counts['cut'], 'text')} cut: {model.name} reads {model.max_length}.": counts["cut"],
    }
    for sentence, count in left_out.items():
        if count:
            say(sentence)
