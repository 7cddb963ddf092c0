"""``captum-hta study``."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from captum_hta import __version__
from captum_hta.cli.options import (
    Adapter,
    Corpus,
    Debug,
    Device,
    Exact,
    Layers,
    Limit,
    Norm,
    Part,
    Reading,
    Seed,
    Strict,
    TimesInputs,
    Tolerance,
    Truncation,
    UserError,
    announce,
    check_folder,
    counted,
    err,
    load,
    named_layers,
    out,
    plain,
    print_error,
    probes_or_exact,
    progress,
    progress_of,
    read_corpus,
    rounded,
)
from captum_hta.cli.pairings import Pairing, pairings
from captum_hta.model.encoding import Text
from captum_hta.model.protocol import Model
from captum_hta.report import one_study as report
from captum_hta.report import several_studies as together
from captum_hta.study import corpus
from captum_hta.study import run as study
from captum_hta.study.checkpoint import Shards
from captum_hta.study.folder import check_nothing_kept
from captum_hta.texts import encoded, missing_tokens

INTERRUPTED = 130
RUN_FACTS = ("data", "device", "label")
"""Arguments that do not decide the numbers."""


def run_study(
    data: Annotated[
        list[Path] | None,
        typer.Argument(
            help='JSON lines with "premise" and "hypothesis", or with "text". Default: 64 pairs that come '
            "with the package."
        ),
    ] = None,
    more_data: Annotated[
        list[Path] | None, typer.Option("--data", help="The same, where several models have one each.")
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
            help="A folder, or a name on the Hugging Face hub, such as bert-base-uncased. Default: the demo "
            "model, a 6-layer BERT.",
        ),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="What to call each run, where there are several.")
    ] = None,
    output: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")] = Path("hta-study"),
    limit: Limit = None,
    sample: Annotated[
        int | None,
        typer.Option(help="Draw the --limit examples at random, by this seed, in the place of the first."),
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
    keep_contributions: Annotated[
        bool,
        typer.Option(
            "--keep-contributions",
            help="Keep every matrix too, compressed and in half precision; captum_hta.open_study reads them.",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Study a model on a corpus: attention against what the heads really take in.

    Writes tables (CSV), figures (PNG), a record of the run (run.json) and report.html, after "Telling
    BERT's Full Story" (Pascual et al. 2021) and "On Identifiability in Transformers" (Brunner et al. 2020).
    Bad lines are reported and skipped. What is done is kept in the folder: a study that was stopped goes on
    when the same command is given again. Several models or corpora are studied one after the other, and
    compared.

    Example: captum-hta study pairs.jsonl --limit 50 --out results
    """
    if sample is not None and limit is None:
        raise UserError("--sample draws the --limit examples at random: say how many with --limit")
    runs = pairings(
        model or [], [*(data or []), *(more_data or [])], dataset or [], fields or [], label or []
    )
    arguments = {
        "limit": limit, "sample": sample, "max_tokens": max_tokens, "exclude_special": exclude_special,
        "layers": layers or "all", "norm": norm,
        "probes": probes_or_exact(probes, tolerance, exact, norm, study.DEFAULT_PROBES),
        "tolerance": tolerance, "exact": exact, "multiply_by_inputs": multiply_by_inputs, "seed": seed,
        "device": device, "part": part, "adapter": adapter, "truncation": truncation,
        "keep_contributions": keep_contributions,
    }  # fmt: skip
    check_folder(output)
    if len(runs) == 1:
        _Run(runs[0], output, arguments, strict).do()
        return
    parts = [_Run(run, output / run.folder, arguments, strict, several=True).do() for run in runs]
    together.write(output, parts)
    out.print(f"All side by side: {output / 'report.html'}", highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class _Run:
    """The study of a model on a corpus.

    Attributes:
        pairing: Which.
        folder: Where the results go.
        arguments: Those of the command that hold for all runs.
        strict: Stop at a bad line.
        several: Whether there are others.
    """

    pairing: Pairing
    folder: Path
    arguments: dict[str, Any]
    strict: bool
    several: bool = False

    def do(self) -> together.Part:
        """Study, write and print."""
        started = time.perf_counter()
        check_folder(self.folder)
        model = load(
            self.pairing.model,
            self.arguments["device"],
            self.arguments["adapter"],
            self.arguments["part"],
        )
        if model.reader.medium != "text":
            raise UserError(
                f"{model.name} reads {model.reader.reads}; a study is of texts: name a model that reads them"
            )
        setting = self._setting(model)
        read = self._read(model)
        cut = self._announce(model, read.texts, setting)
        found = self._study(model, read.texts, setting)
        record = self._record(model, read, cut, found, time.perf_counter() - started)
        report.write(self.folder, found, record, model.num_layers)
        print_study(found, model, self.folder, record["counts"])
        return together.Part(self.pairing.label or "", self.pairing.folder, found, record, model.num_layers)

    def _setting(self, model: Model) -> study.Setting:
        asked = self.arguments
        names = ("norm", "multiply_by_inputs", "tolerance", "seed", "truncation", "exclude_special")
        layers = named_layers(None if asked["layers"] == "all" else asked["layers"], model)
        return study.Setting(layers, n_probes=asked["probes"], **{name: asked[name] for name in names})

    def _read(self, model: Model) -> Corpus:
        names = ("limit", "sample", "max_tokens", "truncation")
        asked = {name: self.arguments[name] for name in names}
        reading = Reading(fields=self.pairing.fields, strict=self.strict, **asked)
        return read_corpus(self.pairing.source or corpus.shipped_pairs(), model, reading)

    def _announce(self, model: Model, texts: list[Text], setting: study.Setting) -> int:
        """Say what it will cost; the number of texts that are cut."""
        lengths, cut = [], 0
        for number, text in enumerate(texts):
            encoding = encoded(model, text, number, setting.truncation)
            lengths.append(len(encoding))
            cut += missing_tokens(model, text, encoding) > 0
        asked = {"layers": setting.layers, "norm": setting.norm, "n_probes": setting.n_probes}
        announce(model, lengths, asked, setting.tolerance, hidden=setting.norm != "spectral")
        return cut

    def _study(self, model: Model, texts: list[Text], setting: study.Setting) -> study.Study:
        digest = hashlib.blake2b(repr(texts).encode(), digest_size=16).hexdigest()
        facts = {name: value for name, value in self.arguments.items() if name not in RUN_FACTS}
        facts |= {"model": model.fingerprint, "texts": digest, "version": __version__}
        kept_in = self.folder if self.arguments["keep_contributions"] else None
        if kept_in is not None and not (self.folder / "parts").exists():
            check_nothing_kept(self.folder)
        shards = Shards(self.folder / "parts", facts)
        try:
            with progress(len(texts)) as advance, progress_of("maps of hidden tokens") as advance_maps:
                return study.run(
                    model, texts, setting, lambda done: advance(done * len(texts)), shards, kept_in,
                    advance_maps,
                )  # fmt: skip
        except KeyboardInterrupt:
            err.print("stopped; the same command goes on from what is done")
            raise SystemExit(INTERRUPTED) from None

    def _record(
        self, model: Model, read: Corpus, cut: int, found: study.Study, seconds: float
    ) -> dict[str, Any]:
        source, fields = self.pairing.source, self.pairing.fields
        data = {"data": str(source or "the shipped pairs"), "fields": ", ".join(fields) if fields else None}
        parts = {name: round(spent, 1) for name, spent in found.watch.seconds.items()}
        return {
            "model": model.name,
            "label": self.pairing.label,
            "several": self.several,
            "arguments": data | self.arguments,
            "seed": self.arguments["seed"],
            "counts": {
                "examples": len(read.texts), "bad_lines": len(read.bad), "too_long": read.too_long,
                "cut": cut, "tokens": sum(found.tokens),
            },
            "seconds": parts | {"this command": round(seconds, 1)},
            "bad_lines": [str(line) for line in read.bad],
        }  # fmt: skip


def print_study(found: study.Study, model: Model, folder: Path, counts: dict[str, int]) -> None:
    """Print what was found, and where the rest is."""
    summary = found.layer_summary()
    table = Table(
        title=f"{plain(model.name)}: medians over heads, correlation with attention", title_justify="left"
    )
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
        values = [rounded(row[name], ".2f") for name in list(names)[1:]]
        table.add_row(f"{row['layer']:.0f}", *values)
    out.print(table)
    shares = found.findings()
    out.print(
        f"Previous layer: {rounded(shares['share_of_heads_pearson_over_0.85'], '.0%')} of heads over Pearson "
        f"0.85, {rounded(shares['share_of_heads_spearman_over_0.95'], '.0%')} over Spearman 0.95.",
        highlight=False,
    )
    for source, errors in found.probe_errors().items():
        print_error(source, errors["mean"], errors["largest"])
    left_out = {
        f"{counted(counts['bad_lines'], 'bad line')} skipped.": counts["bad_lines"],
        f"{counted(counts['too_long'], 'text')} left out by --max-tokens.": counts["too_long"],
        f"{counted(counts['cut'], 'text')} cut, since {model.name} reads {model.max_length}.": counts["cut"],
    }
    for sentence, count in left_out.items():
        if count:
            out.print(sentence, highlight=False)
    out.print(f"Report: {folder / 'report.html'}", highlight=False, markup=False, soft_wrap=True)
