"""What heads do, by attention and by contributions: the scores of TransformerLens's ``detect_head``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import pandas as pd
import torch
from torch import Tensor
from transformer_lens.head_detector import (
    detect_head,
    get_duplicate_token_head_detection_pattern,
    get_induction_head_detection_pattern,
    get_previous_token_head_detection_pattern,
)

from captum_hta.computation import contributions
from captum_hta.model.encoding import Text
from captum_hta.model.head_names import head_name
from captum_hta.model.protocol import Model


def _sink_pattern(tokens: Tensor) -> Tensor:
    """The first token, for all later queries: ``[query, key]``."""
    pattern = torch.zeros(tokens.shape[-1], tokens.shape[-1], device="cpu")
    pattern[1:, 0] = 1
    return pattern


PATTERNS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "previous token": get_previous_token_head_detection_pattern,
    "duplicate token": get_duplicate_token_head_detection_pattern,
    "induction": get_induction_head_detection_pattern,
    "sink": _sink_pattern,
}
"""Which keys a kind of head takes in, ``[query, key]`` from token ids ``[1, token]``: the token before the
query, earlier occurrences of the query's token, the tokens after these, and the first token (Xiao et al.,
"Efficient Streaming Language Models with Attention Sinks", ICLR 2024)."""


def head_scores(
    model: Model, text: Text, n_probes: int | None = 16, tolerance: float | None = None, seed: int = 0
) -> pd.DataFrame:
    """How much each head attends to, and takes in from, the tokens that a kind of head is known for.

    A score is that of TransformerLens's ``detect_head`` (its measure ``"mul"``) on the queries for which
    there are such tokens: the mean share of these tokens, from 0 to 1. It is given for the attention, the
    previous-layer contribution and the input contribution, side by side.

    Args:
        model: An adapter around a decoder.
        text: A text, or token ids. For duplicate-token and induction heads tokens must occur repeatedly.
        n_probes: Probes of each token for the input contribution; ``None`` for an exact result, unless there
            is a ``tolerance``.
        tolerance: Double the probes until the standard error of every contribution is at most this.
        seed: Seed of the probes.

    Returns:
        A row for each of :data:`PATTERNS` and each head: ``pattern``, ``layer``, ``head``, ``name`` and the
        scores ``attention``, ``previous_layer`` and ``input``. Scores are NaN if no query has such tokens.

    Raises:
        ValueError: If the model reads a second text, as cross attention does, or no token ids.
        TypeError: If the text is of a kind that the model does not read.

    Example:
        >>> from captum_hta.integrations import head_scores, load_model
        >>> scores = head_scores(load_model(), "one two one two", n_probes=2)  # 6 layers of 12 heads
        >>> len(scores), list(scores.columns[4:])
        (288, ['attention', 'previous_layer', 'input'])
    """
    if model.key_layers is not None or model.reader.medium != "text":
        raise ValueError(
            f"{model.name} does not attend to the tokens of its own text: pass a decoder of texts"
        )
    local = contributions(model, [text], source="previous_layer")
    total = contributions(model, [text], source="input", n_probes=n_probes, tolerance=tolerance, seed=seed)
    assert total.encodings is not None
    ids = torch.tensor([total.encodings[0].ids], device="cpu")
    maps = {"attention": total.attention[0], "previous_layer": local.values[0], "input": total.values[0]}
    tables = [
        _scores(name, pattern(ids), {kind: _Patterns(ids, values) for kind, values in maps.items()})
        for name, pattern in PATTERNS.items()
    ]
    return pd.concat(tables, ignore_index=True)


def _scores(name: str, pattern: Tensor, maps: Mapping[str, _Patterns]) -> pd.DataFrame:
    """The scores of all heads for one pattern."""
    found = {kind: values.scores(pattern) for kind, values in maps.items()}
    layers, heads = next(iter(found.values())).shape
    places = [(layer, head) for layer in range(layers) for head in range(heads)]
    return pd.DataFrame({
        "pattern": name,
        "layer": [layer for layer, _ in places],
        "head": [head for _, head in places],
        "name": [head_name(*place) for place in places],
        **{kind: values.flatten().tolist() for kind, values in found.items()},
    })  # fmt: skip


@dataclass(frozen=True)
class _Patterns:
    """Attention or contributions of one text, as ``detect_head`` takes a model and its cache.

    Attributes:
        ids: ``[1, token]``.
        values: ``[layer, head, query, key]``.
    """

    ids: Tensor
    values: Tensor

    @property
    def cfg(self) -> SimpleNamespace:
        """The fields of a configuration that ``detect_head`` reads."""
        layers, heads, tokens, _ = self.values.shape
        return SimpleNamespace(
            n_layers=layers, n_heads=heads, n_ctx=tokens + 1, dtype=torch.float32, device="cpu"
        )

    def to_tokens(self, text: object) -> Tensor:
        """The token ids, whatever the text."""
        return self.ids

    def scores(self, pattern: Tensor) -> Tensor:
        """``[layer, head]``, on the queries for which the pattern has keys."""
        rows = pattern.any(-1)
        if not rows.any():
            return self.values.new_full(self.values.shape[:2], torch.nan)
        kept = self.values * rows[:, None]
        cache = {("pattern", layer, "attn"): values for layer, values in enumerate(kept)}
        found: Tensor = detect_head(self, "", pattern, cache=cache)  # type: ignore[arg-type]
        return found
