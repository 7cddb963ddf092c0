"""How much of what heads look at, and of what they take in, is a text's first token.

Decoders attend to the first token where there is nothing to look for (Xiao et al., "Efficient Streaming
Language Models with Attention Sinks", ICLR 2024). Contributions show whether a head takes in that token too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pandas as pd

from captum_hta.statistics.accumulators import RowMean
from captum_hta.study.analysis import Analysis, TextResult
from captum_hta.study.encoded_corpus import Dimensions, EncodedCorpus
from captum_hta.study.settings import SOURCES

MEASURES = ("attention", *SOURCES)
"""What is shared among the tokens: attention, and the contributions of each source."""


class Sinks(Analysis):
    """The share of the first token in attention and in contributions, for causal models.

    The first query sees no other token, so the mean is over all later queries.

    Attributes:
        shares: The share by measure, ``[layer, head]``.
    """

    name = "sinks"
    layer_columns: ClassVar[Mapping[str, str]] = {
        "first_token_attention_mean": "first token, attention",
        "first_token_previous_layer_mean": "first token, previous layer",
        "first_token_input_mean": "first token, input",
    }
    layer_note = "Shares of the first token are means over the heads of a layer."

    def __init__(self, size: Dimensions) -> None:
        super().__init__(size)
        self.shares = {measure: RowMean.zero(len(size.layers), size.heads) for measure in MEASURES}

    @classmethod
    def applies(cls, corpus: EncodedCorpus) -> bool:
        """To causal self-attention with all tokens: the first one is often special."""
        causal = corpus.is_self_attention and corpus.model.size.causal
        return causal and not corpus.settings.exclude_special

    @property
    def accumulators(self) -> Mapping[str, RowMean]:
        """A mean over queries for each measure."""
        return self.shares

    def add(self, text: TextResult) -> None:
        """Add one text."""
        for measure, values in {"attention": text.attention, **text.contributions}.items():
            self.shares[measure].add(values[..., 1:, 0])

    def tables(self) -> dict[str, pd.DataFrame]:
        """``sinks``: see :meth:`table`."""
        return {"sinks": self.table()}

    def table(self) -> pd.DataFrame:
        """A row for each layer and head: the share of the first token by measure, its standard error by text,
        and the number of texts with more than one token.
        """
        index = pd.MultiIndex.from_product(
            [self.size.layers, range(self.size.heads)], names=["layer", "head"]
        )
        columns = {}
        for measure, share in self.shares.items():
            columns[measure] = share.mean()
            columns[f"{measure}_error"] = share.standard_error()
        columns["texts"] = self.shares["attention"].examples.astype(np.int64)
        return pd.DataFrame({name: one.ravel() for name, one in columns.items()}, index).reset_index()

    def by_layer(self) -> pd.DataFrame:
        """Means over heads, a row for each layer."""
        means = self.table().groupby("layer")[list(MEASURES)].mean()
        return means.add_prefix("first_token_").add_suffix("_mean")
