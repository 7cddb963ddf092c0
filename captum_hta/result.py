"""The result of :func:`captum_hta.contributions`: values with named axes, tokens and words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from captum_hta.jacobian.plan import Plan
from captum_hta.model.encoding import Encoding
from captum_hta.texts import word_groups

REDUCTIONS = {"sum": "sum", "max": "amax", "mean": "mean"}
"""How the values of the pieces of a word are combined, with PyTorch's name of each reduction."""

EPSILON = torch.finfo(torch.float64).eps
"""Shares are kept this far from 0 and 1, where their logits are infinite."""


@dataclass(frozen=True, repr=False)
class Contributions:
    """Contributions of source tokens (keys) to target tokens (queries), for several texts.

    Attributes:
        values: ``[batch, layer, head, query, key]``, without the head axis for the target ``"layer"``.
            Rows sum to 1, or are zero if no source reaches the target; padding is NaN.
        standard_error: Standard errors of the same shape, or ``None`` for exact values.
        attention: The model's attention patterns ``[batch, layer, head, query, key]``; padding is NaN.
        tokens: The token labels of each text.
        layers: The layer numbers of the layer axis.
        source, target, norm: The arguments of :func:`captum_hta.contributions`.
        model: The name of the model.
        probes: The number of probes of each source token, for each text; ``None`` for exact values.
        plans: How the contributions of each batch of texts were computed.
        encodings: The texts as the model read them; ``None`` for contributions of words.
        cut: The number of tokens that truncation removed from each text; ``None`` if it was not allowed.
        keys: The key labels of each text if they differ from ``tokens``, as in cross attention.
        queries: The positions of the queries in each text, if only some were asked for: the query axis has
            rows of these alone. ``None`` for all.
    """

    values: Tensor
    standard_error: Tensor | None
    attention: Tensor
    tokens: list[list[str]]
    layers: list[int]
    source: str | int
    target: str
    norm: str
    model: str
    probes: list[int] | None = None
    plans: list[Plan] = field(default_factory=list)
    encodings: list[Encoding] | None = None
    cut: list[int] | None = None
    keys: list[list[str]] | None = None
    queries: list[list[int]] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        how = "exact" if self.standard_error is None else "estimated"
        queries = "" if self.queries is None else f"queries={self.queries}, "
        return (
            f"Contributions(source={self.source!r}, target={self.target!r}, {how}, texts={len(self)}, "
            f"layers={self.layers}, {queries}{list(self.values.shape)})"
        )

    def example(self, index: int) -> Contributions:
        """The contributions of one text, without padding."""
        queries = len(self.tokens[index] if self.queries is None else self.queries[index])
        keys = len(self.tokens[index] if self.keys is None else self.keys[index])
        return replace(
            self._mapped(lambda values: values[index][None, ..., :queries, :keys]),
            tokens=[self.tokens[index]],
            encodings=None if self.encodings is None else [self.encodings[index]],
            probes=None if self.probes is None else [self.probes[index]],
            cut=None if self.cut is None else [self.cut[index]],
            keys=None if self.keys is None else [self.keys[index]],
            queries=None if self.queries is None else [self.queries[index]],
        )

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        r"""Confidence intervals of the values.

        With few probes the standard error is itself uncertain, and estimates of small shares are skewed. So
        Student's t with ``probes - 1`` degrees of freedom is used, for the logit of the share :math:`c`,

        .. math:: \operatorname{logit} c \pm t \, \frac{\sigma}{c (1 - c)} ,

        by the delta method; it stays within 0 and 1. Exact values are their own intervals, and with a single
        probe the interval is all of 0 to 1.

        Args:
            level: The share of intervals that hold the exact value.

        Returns:
            The lower and the upper limits, of the shape of ``values``.

        Raises:
            ValueError: If the level is not between 0 and 1.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must be between 0 and 1, such as 0.95, got {level!r}")
        if self.standard_error is None or self.probes is None:
            return self.values.clone(), self.values.clone()
        from scipy.stats import t  # takes long to import

        freedom = np.maximum(np.array(self.probes) - 1.0, 1.0)
        quantiles = torch.from_numpy(t.ppf((1 + level) / 2, freedom)).reshape(
            -1, *(1,) * (self.values.dim() - 1)
        )
        share, error = self.values.double(), self.standard_error.double()
        centre = share.clamp(EPSILON, 1 - EPSILON)
        half = quantiles * error / (centre * (1 - centre))
        low, high = (
            torch.where(error > 0, (centre.logit() + side * half).sigmoid(), share).to(self.values.dtype)
            for side in (-1, 1)
        )
        return low, high

    def to_words(self, reduction: str = "sum") -> Contributions:
        """Contributions of words to words, for models whose tokens are pieces of words.

        Args:
            reduction: How the pieces of a key are combined: ``"sum"``, their joint contribution; ``"max"`` or
                ``"mean"``, after which rows are scaled to sum to 1 again. The pieces of a query are averaged.

        Returns:
            The same axes with words instead of tokens; special tokens are kept. Only ``"sum"`` has a standard
            error, an upper bound, which assumes that the errors of all pieces add up.

        Raises:
            ValueError: If there is no such reduction, the words are unknown, or only some queries were asked
                for.
        """
        if reduction not in REDUCTIONS:
            raise ValueError(
                f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}"
            )
        if self.queries is not None:
            raise ValueError("the queries of a word are averaged, so to_words needs all: leave out queries")
        if not self.encodings:
            raise ValueError("these contributions are not of tokens: call to_words on the first result")
        queries = [word_groups(encoding) for encoding in self.encodings]
        contexts = [encoding.context for encoding in self.encodings if encoding.context is not None]
        keys = queries if self.keys is None else [word_groups(context) for context in contexts]
        groups = [(query, key) for (query, _), (key, _) in zip(queries, keys, strict=True)]
        words = replace(
            self._mapped(lambda values: _merged(values, groups, reduction)),
            tokens=[labels for _, labels in queries],
            encodings=None,
            keys=None if self.keys is None else [labels for _, labels in keys],
        )
        return words if reduction == "sum" else replace(words, standard_error=None)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Contributions:
        """The same result with all its tensors changed."""
        error = None if self.standard_error is None else change(self.standard_error)
        return replace(
            self, values=change(self.values), standard_error=error, attention=change(self.attention)
        )


def _merged(values: Tensor, groups: Sequence[tuple[Sequence[int], Sequence[int]]], reduction: str) -> Tensor:
    """``[batch, ..., word, word]`` from ``[batch, ..., token, token]``, padded with NaN."""
    longest = [max(max(pair[side]) for pair in groups) + 1 for side in (0, 1)]
    out = values.new_full((*values.shape[:-2], *longest), torch.nan)
    for row, (queries, keys) in enumerate(groups):
        part = values[row, ..., : len(queries), : len(keys)]
        part = _grouped(part, keys, REDUCTIONS[reduction])
        part = _grouped(part.mT, queries, "mean").mT
        if reduction != "sum":
            part = part / part.sum(-1, keepdim=True).clamp_min(torch.finfo(part.dtype).tiny)
        out[row, ..., : part.shape[-2], : part.shape[-1]] = part
    return out


def _grouped(values: Tensor, group: Sequence[int], how: str) -> Tensor:
    """Reduce the last axis to groups."""
    index = torch.tensor(group, device=values.device).expand(values.shape)
    out = values.new_zeros(*values.shape[:-1], max(group) + 1)
    return out.scatter_reduce(-1, index, values, how, include_self=False)
