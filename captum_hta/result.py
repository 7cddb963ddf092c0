"""The result of :func:`captum_hta.contributions`: values with named axes, tokens and words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from captum_hta.jacobian.plan import Plan
from captum_hta.model.encoding import Encoding
from captum_hta.texts import word_groups

REDUCTIONS = ("sum", "max", "mean")


@dataclass(frozen=True, repr=False)
class Contributions:
    """Contributions of source tokens (keys) to target tokens (queries), for several texts.

    Attributes:
        values: ``[batch, layer, head, query, key]``, without the head axis for the target ``"layer"``.
            Rows sum to 1, or are zero where nothing of a source reaches the target; padding is NaN.
        standard_error: Of the same shape, or ``None`` where the values are exact.
        attention: The model's own patterns ``[batch, layer, head, query, key]``; padding is NaN.
        tokens: For each text the labels of its tokens.
        layers: The layers of the layer axis.
        plans: For each batch of texts how its contributions were found.
        encodings: The texts as the model read them.
        cut: For each text how many tokens were left out, where truncation was allowed: those at its end, or
            where the tokenizer cuts.
        keys: For each text the labels of its keys, where they are of another text (cross attention).
    """

    values: Tensor
    standard_error: Tensor | None
    attention: Tensor
    tokens: list[list[str]]
    layers: list[int]
    plans: list[Plan] = field(repr=False)
    encodings: list[Encoding] | None = field(default=None, repr=False)
    cut: list[int] | None = field(default=None, repr=False)
    keys: list[list[str]] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        what = "exact" if self.standard_error is None else "estimated"
        return f"Contributions({what}, texts={len(self)}, layers={self.layers}, {list(self.values.shape)})"

    def example(self, index: int) -> Contributions:
        """The contributions of one text, without padding."""
        queries = len(self.tokens[index])
        keys = queries if self.keys is None else len(self.keys[index])

        def cut(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[index][None, ..., :queries, :keys]

        return Contributions(
            values=cut(self.values),
            standard_error=cut(self.standard_error),
            attention=cut(self.attention),
            tokens=[self.tokens[index]],
            layers=self.layers,
            plans=self.plans,
            encodings=None if self.encodings is None else [self.encodings[index]],
            cut=None if self.cut is None else [self.cut[index]],
            keys=None if self.keys is None else [self.keys[index]],
        )

    def to_words(self, reduction: str = "sum") -> Contributions:
        """Contributions of words to words, where the model's tokens are pieces of words.

        Args:
            reduction: How the pieces of a key are put together: ``"sum"``, what all of them contribute;
                ``"max"`` or ``"mean"``, after which rows are scaled to sum to 1 again. The pieces of a
                query are averaged.

        Returns:
            The same axes with words in the place of tokens; special tokens stand for themselves. The
            standard error, with ``"sum"`` alone, is an upper bound, as if all pieces erred together.

        Raises:
            ValueError: If the reduction is none of these, or the tokenizer does not tell words.
        """
        if reduction not in REDUCTIONS:
            raise ValueError(
                f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}"
            )
        if not self.encodings:
            raise ValueError("these contributions are not of tokens: call to_words on the first result")
        queries = [word_groups(encoding) for encoding in self.encodings]
        keys = queries if self.keys is None else [word_groups(one.context) for one in self.encodings]
        groups = [(query, key) for (query, _), (key, _) in zip(queries, keys, strict=True)]

        def merged(values: Tensor | None) -> Tensor | None:
            return None if values is None else _merged(values, groups, reduction)

        return Contributions(
            values=merged(self.values),
            standard_error=merged(self.standard_error) if reduction == "sum" else None,
            attention=merged(self.attention),
            tokens=[labels for _, labels in queries],
            layers=self.layers,
            plans=self.plans,
            cut=self.cut,
            keys=None if self.keys is None else [labels for _, labels in keys],
        )


def _merged(values: Tensor, groups: Sequence[tuple[Sequence[int], Sequence[int]]], reduction: str) -> Tensor:
    """``[batch, ..., word, word]`` of ``[batch, ..., token, token]``, padded with NaN."""
    longest = [max(max(pair[side]) for pair in groups) + 1 for side in (0, 1)]
    out = values.new_full((*values.shape[:-2], *longest), torch.nan)
    how = {"sum": "sum", "max": "amax", "mean": "mean"}[reduction]
    for row, (queries, keys) in enumerate(groups):
        part = values[row, ..., : len(queries), : len(keys)]
        part = _grouped(part, keys, how)
        part = _grouped(part.mT, queries, "mean").mT
        if reduction != "sum":
            part = part / part.sum(-1, keepdim=True).clamp_min(torch.finfo(part.dtype).tiny)
        out[row, ..., : part.shape[-2], : part.shape[-1]] = part
    return out


def _grouped(values: Tensor, group: Sequence[int], how: str) -> Tensor:
    """The last axis reduced to groups."""
    index = torch.tensor(group, device=values.device).expand(values.shape)
    out = values.new_zeros(*values.shape[:-1], max(group) + 1)
    return out.scatter_reduce(-1, index, values, how, include_self=False)
