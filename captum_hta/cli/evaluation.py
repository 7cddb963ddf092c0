"""What ``compare`` and ``faithfulness`` share: model, texts, methods and the output folder."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from captum_hta.cli.checks import check_folder, probes_or_exact
from captum_hta.cli.console import counted, say
from captum_hta.cli.corpora import Corpus, Reading, check_source, read_corpus
from captum_hta.cli.errors import UserError
from captum_hta.cli.loading import ModelChoice, layer_numbers, named_layers

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from captum_hta.evaluation.methods import Method
    from captum_hta.model.encoding import Text
    from captum_hta.model.protocol import Model

DEFAULT_PROBES = 12


@dataclass(frozen=True)
class EvaluationOptions:
    """The options of both commands."""

    data: Path | None
    limit: int | None
    strict: bool
    layers: str | None
    model: str | None
    part: str | None
    adapter: str | None
    device: str | None
    seed: int
    probes: int | None
    exact: bool

    @property
    def choice(self) -> ModelChoice:
        """The model."""
        return ModelChoice(self.model, self.device, self.adapter, self.part)

    @property
    def n_probes(self) -> int | None:
        """The number of probes, ``None`` for an exact result; raises if options contradict each other."""
        return probes_or_exact(self.probes, None, self.exact, "frobenius", DEFAULT_PROBES)

    def record(self) -> dict[str, object]:
        """The options that decide the numbers."""
        resolved = {
            "data": str(self.data or "the shipped pairs"),
            "layers": self.layers or "all",
            "probes": self.n_probes,
        }
        arguments = asdict(self) | resolved
        return {name: value for name, value in arguments.items() if name not in ("model", "strict", "exact")}


@dataclass
class Evaluation:
    """An evaluation of methods on a corpus.

    Attributes:
        options: The options.
        output: The folder of the results.
        model: The model.
        layers: The layers to evaluate.
        corpus: The texts.
        refused: Methods that the model does not allow, and why.
        started: When the command began, in seconds of ``time.perf_counter``.
    """

    options: EvaluationOptions
    output: Path
    model: Model
    layers: list[int]
    corpus: Corpus
    refused: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def prepared(cls, options: EvaluationOptions, output: Path, files: Sequence[str]) -> Evaluation:
        """Check the options and the names of the result files, load the model and read the corpus.

        Raises:
            UserError: If one of them is not possible.
        """
        started = time.perf_counter()
        numbers = layer_numbers(options.layers)
        options.n_probes  # noqa: B018 - contradictions are refused before the model is loaded
        check_source(options.data)
        options.choice.check(numbers)
        check_folder(output, files)
        model = options.choice.load()
        layers = named_layers(numbers, model)
        if model.reader.medium != "text" or model.key_layers is not None:
            raise UserError(
                f"{model.name}: methods are compared on texts and their self-attention, so name a model "
                "that reads texts, and --part encoder or decoder"
            )
        corpus = read_corpus(options.data, model, Reading(limit=options.limit, strict=options.strict))
        return cls(options, output, model, layers, corpus, started=started)

    @property
    def texts(self) -> list[Text]:
        """The texts."""
        return self.corpus.texts

    def methods(self, with_logits: bool) -> list[Method]:
        """The methods that the model allows; prints why others are left out."""
        from captum_hta.evaluation.methods import methods_for

        methods, self.refused = methods_for(
            self.model, self.texts[0], self.options.n_probes, self.options.seed, with_logits
        )
        names: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            names.setdefault(reason, []).append(name)
        for reason, alike in names.items():
            say(f"Without {', '.join(alike)}: {reason}.", "dim")
        return methods

    def write(self, tables: Mapping[str, pd.DataFrame], figures: Mapping[str, Figure]) -> None:
        """Write the folder."""
        from captum_hta.report.files import csv_text, png, write_files

        images = {name: png(figure) for name, figure in figures.items()}
        texts = {name: csv_text(one) for name, one in tables.items()}
        record = json.dumps(self._record(), indent=2) + "\n"
        write_files(self.output, images, texts | {"run.json": record})
        if self.corpus.bad:
            say(f"{counted(len(self.corpus.bad), 'bad line')} skipped.")
        say(f"Results: {self.output}")

    def _record(self) -> dict[str, object]:
        from captum_hta.report.files import versions

        return {
            "model": self.model.name,
            "arguments": self.options.record(),
            "left_out": self.refused,
            "counts": {
                "examples": len(self.texts),
                "bad_lines": len(self.corpus.bad),
                "seconds": round(time.perf_counter() - self.started, 1),
            },
            "bad_lines": [str(line) for line in self.corpus.bad],
            "versions": versions(),
        }
