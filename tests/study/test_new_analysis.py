"""How an analysis is added, step by step as in CONTRIBUTING, with the first token's share as example."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
from studies import TEXTS

from captum_hta import contributions, open_study
from captum_hta.integrations import TransformerLensModel
from captum_hta.report import layers, one_study
from captum_hta.report.page import Section, Table
from captum_hta.statistics.accumulators import RowMean
from captum_hta.study import run as study
from captum_hta.study.analyses import ANALYSES
from captum_hta.study.analysis import Analysis, Once, TextResult
from captum_hta.study.checkpoint import Shards
from captum_hta.study.encoded_corpus import Dimensions, EncodedCorpus
from captum_hta.study.run import Study, run
from captum_hta.study.settings import StudySettings

SETTINGS = StudySettings(n_probes=None)
RECORD = {"model": "tiny BERT", "arguments": {}, "counts": {"examples": 5}}


# 1. A subclass of Analysis, in a file of its own in captum_hta/study/: accumulators, add, tables.
class FirstToken(Analysis):
    """The share of the first token in the input contribution."""

    name = "first_token"
    layer_columns: ClassVar[Mapping[str, str]] = {"first_token": "the first token's own share"}
    layer_note = "The first token is often a delimiter."

    def __init__(self, size: Dimensions) -> None:
        super().__init__(size)
        self.share = RowMean.zero(len(size.layers), size.heads)
        self.longest = 0

    @property
    def accumulators(self) -> dict[str, RowMean]:
        """One mean."""
        return {"share": self.share}

    def add(self, text: TextResult) -> None:
        """Add one text."""
        self.share.add(text.contributions["input"][..., 0])

    def finish(self, corpus: EncodedCorpus, once: Once) -> None:
        """Look at the whole corpus."""
        kept = once(lambda advance: {"longest": np.array([float(corpus.longest)])})
        self.longest = int(kept["longest"][0])

    def tables(self) -> dict[str, pd.DataFrame]:
        """A row for each layer and head."""
        index = pd.MultiIndex.from_product(
            [self.size.layers, range(self.size.heads)], names=["layer", "head"]
        )
        return {"first_token": pd.DataFrame({"share": self.share.mean().ravel()}, index).reset_index()}

    def by_layer(self) -> pd.DataFrame:
        """The mean over heads."""
        table = self.tables()["first_token"]
        return table.groupby("layer")[["share"]].mean().rename(columns={"share": "first_token"})

    def record(self) -> dict[str, int]:
        """One number."""
        return {"longest_text": self.longest}


# 2. Its place in ANALYSES of captum_hta/study/analyses.py, from which every study takes its analyses.
# 3. Its section, in a file of its own in captum_hta/report/.
def first_token(found: Study) -> Section:
    """The section of the analysis."""
    table = found[FirstToken].tables()["first_token"]
    names = {"layer": "layer", "head": "head", "share": "share of the first token"}
    return Section("First token", "How much it contributes.", tables=[Table.of(table, "Shares", "", names)])


# 4. The section's place in SECTIONS of captum_hta/report/contents.py, from which pages take their sections.
# 5. A test in tests/study/, and a line for its table in README.md.


def test_an_analysis_is_a_class_and_a_section(
    model: TransformerLensModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is measured, merged over parts, restored from a checkpoint, and shown, next to all others."""
    monkeypatch.setattr(study, "SHARD", 1)
    analyses, sections = [*ANALYSES, FirstToken], [first_token]
    found = run(model, TEXTS, SETTINGS, shards=Shards(tmp_path / "parts", {}), analyses=analyses)
    rows = [contributions(model, [text]).values[0, ..., 0].numpy() for text in TEXTS]
    expected = np.concatenate(rows, axis=-1).mean(-1)
    np.testing.assert_allclose(found[FirstToken].share.mean(), expected)

    monkeypatch.setattr(Study, "add_group", None)  # nothing is computed again
    restored = run(model, TEXTS, SETTINGS, shards=Shards(tmp_path / "parts", {}), analyses=analyses)
    np.testing.assert_array_equal(restored[FirstToken].share.mean(), found[FirstToken].share.mean())

    one_study.write(tmp_path, restored, RECORD, [*sections, layers.by_layer])
    folder = open_study(tmp_path)
    np.testing.assert_allclose(folder.tables["first_token"]["share"], expected.ravel())
    np.testing.assert_allclose(folder.tables["layers"]["first_token"], expected.mean(-1))
    assert folder.run["longest_text"] == 8
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "First token</h2>" in page
    assert "share of the first token" in page
    assert "the first token&#39;s own share" in page
    assert "The first token is often a delimiter." in page
    assert f"{expected[0, 0]:.3f}" in page
