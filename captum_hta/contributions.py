"""Contributions of tokens for texts: tokenised, batched by length, padded, and taken apart again."""

from __future__ import annotations

import hashlib
import logging
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from captum._utils.progress import NullProgress, progress
from torch import Tensor

from captum_hta.attention_jacobian import attention_energies
from captum_hta.direction import check_direction
from captum_hta.forward_pass import ForwardPass, without_autocast
from captum_hta.jacobian import Question, answer
from captum_hta.model import Attention, Batch, Encoding, Model, Text
from captum_hta.norms import Energy, check_norm, shares
from captum_hta.plan import Plan
from captum_hta.precision import matmul_precision
from captum_hta.request import check_probes
from captum_hta.stopwatch import Stopwatch

logger = logging.getLogger(__name__)
TARGETS = ("head", "layer")
BATCH_TOKENS = 1024
"""Positions of a batch, padding included. More gain nothing: the products are large enough."""
PADDING_SHARE = 1 / 8
"""Share of a batch that padding may be."""
GROUP = 4
"""Texts of a corpus that are attributed together: few, for an even progress."""
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


@dataclass(frozen=True)
class _Setting:
    """How contributions are to be found."""

    source: str | int
    layers: list[int]
    key_layers: int | None
    target: str = "head"
    norm: str = "frobenius"
    multiply_by_inputs: bool = False
    n_probes: int | None = None
    tolerance: float | None = None
    seed: int = 0
    way: str | None = None
    precision: str = "highest"
    direction: Tensor | None = None

    def entry(self, layer: int) -> int:
        """The block that the source of a layer's target enters; of cross attention, that of the encoder."""
        if self.source == "input":
            return 0
        if self.source == "previous_layer":
            return layer if self.key_layers is None else self.key_layers
        return int(self.source)


def contributions(
    model: Model,
    texts: Sequence[Text] | Text,
    source: str | int = "input",
    target: str = "head",
    layers: Sequence[int] | int | None = None,
    norm: str = "frobenius",
    multiply_by_inputs: bool = False,
    n_probes: int | None = None,
    tolerance: float | None = None,
    seed: int = 0,
    show_progress: bool = False,
    way: str | None = None,
    precision: str = "highest",
    truncation: bool = False,
    direction: Tensor | None = None,
) -> Contributions:
    r"""How much of each token is in each head's output, or in each hidden embedding.

    Args:
        model: An adapter around a model, such as
            :func:`captum_hta.integrations.transformer_lens.load_model` gives.
        texts: Texts, or pairs of texts; for a model of pictures paths, PIL images or arrays ``[channel,
            height, width]``, for one of sounds arrays.
        source: ``"input"``, the embedding that enters the first block (the *input contribution* of
            Pascual et al. 2021); ``"previous_layer"``, what enters the target's own block (the
            *previous-layer contribution*); or an int ``k``, what enters block ``k``.
        target: ``"head"``, the output of each head before the output projection; ``"layer"``, the
            hidden embedding after the block (Brunner et al. 2020).
        layers: Layers of the targets, negative ones from the end. Default: ``None``, all, or with an
            int as source all from that block on.
        norm: ``"frobenius"``, ``"spectral"`` or ``"sum"``; see
            :class:`captum_hta.HiddenTokenAttribution`.
        multiply_by_inputs: Scale column ``d`` of each Jacobian by ``x_i[d]``.
        n_probes: Estimate from this many random directions of each source token. Default: ``None``,
            exact. A text's directions depend on its tokens and the seed, not on the other texts.
        tolerance: Double the probes until the standard error of every contribution is at most this.
        seed: Seed of the probes.
        show_progress: Show a progress bar.
        way: Force one of :data:`captum_hta.plan.WAYS`. Default: ``None``, the cheapest.
        precision: Precision of float32 matrix products: ``"highest"``, ``"high"`` or ``"medium"``, as in
            ``torch.set_float32_matmul_precision``.
        truncation: Cut texts that are longer than the model reads, and say so in ``cut``. Default:
            ``False``, they are an error.
        direction: Vectors :math:`v` in the space of the target, such as
            :func:`captum_hta.logit_direction` gives: then :math:`r_{ij} = \| v^\top \partial y_j / \partial
            x_i \|`, how much of a token is in what the target says along it. ``[d_head]``,
            ``[head, d_head]`` or ``[layer, head, d_head]``, with all layers of the model; for the target
            ``"layer"`` ``[width]`` or ``[layer, width]``.

    Returns:
        The contributions, the model's attention and the tokens.

    Raises:
        ValueError: If there is no text, a text has no token or is longer than the model reads, or an
            argument is out of its range.
        TypeError: If a text is nothing that the model reads.

    Example:
        >>> from captum_hta.integrations.transformer_lens import load_model
        >>> model = load_model()  # the real 6-layer BERT of the extra "demo"
        >>> result = contributions(model, ["The cat sat."], source="previous_layer")
        >>> result.values.shape
        torch.Size([1, 6, 12, 6, 6])
        >>> result.tokens[0]
        ['[CLS]', 'The', 'cat', 'sat', '.', '[SEP]']
    """
    texts = listed(model, texts)
    asked = {
        "source": source, "target": target, "layers": layers, "norm": norm, "n_probes": n_probes,
        "multiply_by_inputs": multiply_by_inputs, "tolerance": tolerance, "seed": seed, "way": way,
        "precision": precision, "direction": direction,
    }  # fmt: skip
    settings = {"result": _setting(model, **asked)}
    encodings = [encoded(model, text, number, truncation) for number, text in enumerate(texts)]
    with progress(desc="Contributions", total=len(texts)) if show_progress else NullProgress() as bar:
        result = _jointly(model, encodings, settings, advance=bar.update)["result"]
    return replace(result, cut=_cut(model, texts, encodings)) if truncation else result


def jointly(
    model: Model,
    encodings: Sequence[Encoding],
    asked: Mapping[str, Mapping[str, Any]],
    look: Callable[[list[int], list[Attention]], object] = lambda rows, attention: None,
    watch: Stopwatch | None = None,
) -> dict[str, Contributions]:
    """Several contributions of the same texts, by name, with what they have in common found once.

    Args:
        model: The model.
        encodings: Texts as the model reads them.
        asked: For each result what is asked of :func:`contributions`. Those that differ in ``target`` alone
            share a sweep; all share the model's attention.
        look: Called with the numbers of the texts of each batch and the attention of every layer.
        watch: Counts the time of each part.

    Raises:
        ValueError: As :func:`contributions`.
    """
    settings = {name: _setting(model, **one) for name, one in asked.items()}
    return _jointly(model, encodings, settings, look=look, watch=watch)


def _jointly(
    model: Model,
    encodings: Sequence[Encoding],
    settings: Mapping[str, _Setting],
    advance: Callable[[int], object] = lambda count: None,
    look: Callable[[list[int], list[Attention]], object] = lambda rows, attention: None,
    watch: Stopwatch | None = None,
) -> dict[str, Contributions]:
    collected = {name: _Collected(model, encodings, setting) for name, setting in settings.items()}
    watch = watch or Stopwatch()
    for rows in _batches(encodings):
        with without_autocast():
            batch = model.batch([encodings[row] for row in rows])
            with watch("attention"):
                attention = model.attention(batch)
                look(rows, attention)
            _collect(model, batch, rows, attention, settings, collected, watch)
        advance(len(rows))
    return {name: store.result() for name, store in collected.items()}


def _collect(
    model: Model,
    batch: Batch,
    rows: list[int],
    attention: list[Attention],
    settings: Mapping[str, _Setting],
    collected: Mapping[str, _Collected],
    watch: Stopwatch,
) -> None:
    """Find all that is asked of a batch of texts."""
    for alike in _alike(settings):
        stores = [collected[name] for name in alike]
        keys, asked = stores[0].keys_of(rows), [settings[name] for name in alike]
        with watch(" and ".join(alike)):
            energies, plans = _batch_energies(model, batch, attention, keys, asked)
            for store, found in zip(stores, energies, strict=True):
                store.add(rows, batch, attention, found, plans)


def _alike(settings: Mapping[str, _Setting]) -> list[list[str]]:
    """Names of settings that differ in their target alone."""
    groups: dict[object, list[str]] = {}
    for name, setting in settings.items():
        groups.setdefault(repr(replace(setting, target="")), []).append(name)
    return list(groups.values())


def _batches(encodings: Sequence[Encoding]) -> Iterator[list[int]]:
    """Numbers of texts of like lengths; of pictures, of one size."""
    sizes: dict[object, list[int]] = {}
    for row, encoding in enumerate(encodings):
        sizes.setdefault(None if encoding.content is None else encoding.content.shape, []).append(row)
    for same in sizes.values():
        for rows in batches([len(encodings[row]) for row in same]):
            yield [same[row] for row in rows]


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Group sequences of like lengths, the shortest first: at most :data:`BATCH_TOKENS` positions, of
    which at most :data:`PADDING_SHARE` are padding.
    """
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (lengths[row], row)):
        positions = (len(rows) + 1) * lengths[row]
        real = sum(lengths[r] for r in rows) + lengths[row]
        if rows and (positions > BATCH_TOKENS or positions - real > PADDING_SHARE * positions):
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of texts of like lengths, :data:`GROUP` at a time."""
    for rows in batches(lengths):
        for start in range(0, len(rows), GROUP):
            yield rows[start : start + GROUP]


class _Collected:
    """The results of all batches, put in the order and the shape of the texts."""

    def __init__(self, model: Model, encodings: Sequence[Encoding], setting: _Setting) -> None:
        self.model, self.encodings, self.setting = model, encodings, setting
        rows = (len(encodings), len(setting.layers))
        square = (max(map(len, encodings)), max(map(self._key_length, range(len(encodings)))))
        heads = (model.num_heads,) if setting.target == "head" else ()
        dtype = torch.promote_types(model.dtype, torch.float32)
        self.values = torch.empty(*rows, *heads, *square, dtype=dtype)
        self.errors: Tensor | None = None
        self.attention = torch.empty(*rows, model.num_heads, *square, dtype=dtype)
        self.plans: list[Plan] = []

    def add(
        self,
        rows: list[int],
        batch: Batch,
        attention: list[Attention],
        energies: list[Energy],
        plans: list[Plan],
    ) -> None:
        """Keep what was found for the layers of some texts."""
        self.plans.extend(plans)
        for index, (layer, energy) in enumerate(zip(self.setting.layers, energies, strict=True)):
            values, errors = shares(_real(energy, batch.keys))
            if self.setting.target == "layer":
                values, errors = values.squeeze(1), errors if errors is None else errors.squeeze(1)
            self._put(self.values, rows, index, values)
            self._put(self.attention, rows, index, attention[layer].pattern)
            if errors is not None:
                if self.errors is None:
                    self.errors = torch.empty_like(self.values)
                self._put(self.errors, rows, index, errors)

    def keys_of(self, rows: list[int]) -> list[tuple[int, ...]]:
        """A stream of probes for each text, by its tokens: the same alone and among others."""
        seed = self.setting.seed
        return [(seed, _fingerprint(self.encodings[row])) for row in rows]

    def _put(self, store: Tensor, rows: list[int], index: int, values: Tensor) -> None:
        for row, value in zip(rows, values, strict=True):
            queries, keys = len(self.encodings[row]), self._key_length(row)
            store[row, index, ..., :queries, :keys] = value[..., :queries, :keys]
            store[row, index, ..., queries:, :] = torch.nan
            store[row, index, ..., :queries, keys:] = torch.nan

    def _key_length(self, row: int) -> int:
        encoding = self.encodings[row]
        return len(encoding if self.setting.key_layers is None else encoding.context)

    def result(self) -> Contributions:
        return Contributions(
            values=self.values,
            standard_error=self.errors,
            attention=self.attention,
            tokens=[encoding.tokens for encoding in self.encodings],
            layers=self.setting.layers,
            plans=self.plans,
            encodings=list(self.encodings),
            keys=None if self.setting.key_layers is None else [one.context.tokens for one in self.encodings],
        )


def _fingerprint(encoding: Encoding) -> int:
    read = [encoding.ids, encoding.segments]
    if encoding.context is not None:
        read.append(encoding.context.ids)
    digest = hashlib.blake2b(repr(tuple(read)).encode(), digest_size=8)
    for one in (encoding, encoding.context):
        if one is not None and one.content is not None:
            digest.update(one.content.double().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def _real(energy: Energy, mask: Tensor) -> Energy:
    """Without what padding contributes, so that it enters no sum."""
    if mask.all():
        return energy
    keys = mask[:, None, None, :]
    variance = None if energy.variance is None else energy.variance.where(keys, 0)
    return Energy(energy.mean.where(keys, 0), variance)


# --- energies of a batch ---------------------------------------------------------------------------


def _batch_energies(
    model: Model,
    batch: Batch,
    attention: list[Attention],
    keys: list[tuple[int, ...]],
    settings: list[_Setting],
) -> tuple[list[list[Energy]], list[Plan]]:
    """For each setting, of which only targets differ, the energies of its layers; and the plans that were
    followed.
    """
    setting = settings[0]
    if len(settings) == 1 and _has_closed_form(attention, setting):
        energies, plans = _closed_form(attention, setting)
        return [energies], plans
    found: dict[tuple[str, int], Energy] = {}
    plans = []
    for entry in sorted({setting.entry(layer) for layer in setting.layers}):
        layers = [layer for layer in setting.layers if setting.entry(layer) == entry]
        targets = [(one.target, layer) for one in settings for layer in layers]
        passage = ForwardPass(
            model.forward,
            batch.inputs,
            batch.extra,
            [model.target(layer, kind) for kind, layer in targets],
            model.source(entry),
        )
        answered = answer(passage, _question(model, keys, setting, targets))
        found.update(zip(targets, answered.energies, strict=True))
        plans.append(answered.plan)
    return [[found[one.target, layer] for layer in one.layers] for one in settings], plans


def _question(
    model: Model, keys: list[tuple[int, ...]], setting: _Setting, targets: list[tuple[str, int]]
) -> Question:
    return Question(
        norm=setting.norm,
        num_heads=[model.num_heads if kind == "head" else None for kind, _ in targets],
        multiply_by_inputs=setting.multiply_by_inputs,
        n_probes=setting.n_probes,
        tolerance=setting.tolerance,
        keys=keys,
        way=setting.way,
        precision=setting.precision,
        direction=_directions(setting, targets),
    )


def _directions(setting: _Setting, targets: list[tuple[str, int]]) -> list[Tensor] | None:
    """For each of the targets its directions."""
    if setting.direction is None:
        return None
    has_layers = setting.direction.dim() == (3 if setting.target == "head" else 2)
    return [setting.direction[layer] if has_layers else setting.direction for _, layer in targets]


def _has_closed_form(attention: list[Attention], setting: _Setting) -> bool:
    """Whether the closed form gives what is asked, at least as exactly and for less."""
    valid = (
        setting.norm == "frobenius"
        and setting.direction is None
        and setting.target == "head"
        and setting.key_layers is None
        and all(setting.entry(layer) == layer for layer in setting.layers)
        and all(attention[layer].factors is not None for layer in setting.layers)
    )
    if setting.way == "closed form" and not valid:
        raise ValueError(
            "the closed form gives the previous-layer contribution of heads in the Frobenius norm, for "
            "models whose attention the adapter knows; leave out way to take a general way"
        )
    return valid and setting.way in (None, "closed form")


def _closed_form(attention: list[Attention], setting: _Setting) -> tuple[list[Energy], list[Plan]]:
    factors = [attention[layer].factors for layer in setting.layers]
    with torch.inference_mode(), matmul_precision(setting.precision):
        energies = [attention_energies(factor, setting.multiply_by_inputs) for factor in factors]
    flops = sum(factor.flops() for factor in factors)
    memory = sum(energy.numel() * energy.element_size() for energy in energies)
    return [Energy(e) for e in energies], [Plan("closed form", flops, memory, None, "no tangents")]


# --- checks ----------------------------------------------------------------------------------------


def listed(model: Model, texts: Sequence[Text] | Text) -> list[Text]:
    """Texts, or what else the model reads, as a list.

    Raises:
        ValueError: If there is none.
        TypeError: If the model does not read one of them.
    """
    if isinstance(texts, str) or (not isinstance(texts, tuple | list) and model.reader.accepts(texts)):
        texts = [texts]
    if not isinstance(texts, Iterable):
        raise TypeError(f"texts must be a list, each of them {model.reader.reads}, got {texts!r}")
    texts, medium = list(texts), model.reader.medium
    if not texts:
        raise ValueError(f"there is no {medium}: pass a list, each of them {model.reader.reads}")
    for number, text in enumerate(texts):
        if not model.reader.accepts(text):
            raise TypeError(f"{medium} {number} must be {model.reader.reads}, got {reprlib.repr(text)}")
    return texts


def encoded(model: Model, text: Text, number: int, truncation: bool = False) -> Encoding:
    """The text of that number as the model reads it.

    Raises:
        ValueError: If it has no token, or more than the model reads and ``truncation`` is not allowed.
    """
    encoding = model.encode(text)
    if not len(encoding):
        raise ValueError(f"text {number} has no token: {text!r}")
    length = max(text_lengths(encoding), default=0)
    if model.max_length is not None and length > model.max_length:
        if truncation:
            return model.encode(text, model.max_length)
        raise ValueError(
            f"text {number} has {length} tokens, but {model.name} reads at most {model.max_length}: shorten "
            "it, or let truncation=True (--truncation) cut it"
        )
    return encoding


def text_lengths(encoding: Encoding) -> list[int]:
    """Tokens of a text and of its context; pictures and sounds, which are never cut, are left out."""
    both = (encoding, encoding.context)
    return [len(one) for one in both if one is not None and one.content is None]


def missing_tokens(model: Model, text: Text, encoding: Encoding) -> int:
    """How many tokens of a text its encoding lacks."""
    lengths = text_lengths(encoding)
    if model.max_length not in lengths:
        return 0
    return sum(text_lengths(model.encode(text))) - sum(lengths)


def _cut(model: Model, texts: Sequence[Text], encodings: Sequence[Encoding]) -> list[int]:
    """How many tokens of each text are missing."""
    cut = [missing_tokens(model, *pair) for pair in zip(texts, encodings, strict=True)]
    if any(cut):
        rows = ", ".join(f"{count} of text {number}" for number, count in enumerate(cut) if count)
        logger.warning("tokens left out, since %s reads %d: %s", model.name, model.max_length, rows)
    return cut


# --- words -----------------------------------------------------------------------------------------


def word_groups(encoding: Encoding) -> tuple[list[int], list[str]]:
    """For each token the number of its word or special token, in the order of the text; and their labels.

    Raises:
        ValueError: If the words are not known.
    """
    if encoding.words is None or encoding.word_labels is None:
        raise ValueError(
            "pictures and sounds are not made of words"
            if encoding.content is not None
            else "the tokenizer does not tell which tokens make a word: use a fast tokenizer"
        )
    groups: list[int] = []
    labels: list[str] = []
    known: dict[int, int] = {}
    for token, word in zip(encoding.tokens, encoding.words, strict=True):
        if word is None or word not in known:
            labels.append(token if word is None else encoding.word_labels[word])
            if word is not None:
                known[word] = len(labels) - 1
        groups.append(len(labels) - 1 if word is None else known[word])
    return groups, labels


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


def layers_of(model: Model, layers: Sequence[int] | int | None, source: str | int = "input") -> list[int]:
    """The numbers of layers, negative ones from the end; ``None``: all that a source reaches.

    Raises:
        ValueError: If one is none.
        TypeError: If they are no ints.
    """
    first = source if isinstance(source, int) and model.key_layers is None else 0
    if layers is None:
        return list(range(max(first, 0), model.num_layers))
    layers = [layers] if isinstance(layers, int) else layers
    if not isinstance(layers, list | tuple | range) or not all(_is_number(layer) for layer in layers):
        raise TypeError(f"layers must be an int, a list of ints or None, got {layers!r}")
    outside = [layer for layer in layers if not -model.num_layers <= layer < model.num_layers]
    if outside or not layers:
        raise ValueError(
            f"layers names {outside or 'none'}, but {model.name} has layers 0 to {model.num_layers - 1}"
        )
    return [layer % model.num_layers for layer in layers]


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _setting(
    model: Model,
    source: str | int = "input",
    layers: Sequence[int] | int | None = None,
    n_probes: int | None = None,
    **others: Any,
) -> _Setting:
    """What is asked, checked; see :func:`contributions`."""
    setting = _Setting(
        source=source,
        layers=layers_of(model, layers, source),
        n_probes=n_probes,
        key_layers=model.key_layers,
        **others,
    )
    _check(model, setting)
    return setting


def _check(model: Model, setting: _Setting) -> None:
    source = setting.source
    if isinstance(source, bool):
        raise TypeError(f"source is a name or the number of a block, got {source!r}")
    if not isinstance(setting.seed, int):
        raise TypeError(f"seed must be an int, got {setting.seed!r}")
    if isinstance(source, str) and source not in ("input", "previous_layer"):
        raise ValueError(f"source must be 'input', 'previous_layer' or an int, got {source!r}")
    last = model.num_layers - 1 if model.key_layers is None else model.key_layers
    if not isinstance(source, str) and not (isinstance(source, int) and 0 <= source <= last):
        raise ValueError(f"source {source!r} is no block: {model.name} has 0 to {last}")
    if isinstance(source, int) and model.key_layers is None and min(setting.layers) < source:
        raise ValueError(f"layer {min(setting.layers)} comes before the source, block {source}")
    if setting.target not in TARGETS:
        raise ValueError(f"target must be 'head' or 'layer', got {setting.target!r}")
    check_norm(setting.norm)
    check_probes(setting.n_probes, setting.tolerance, setting.norm)
    check_direction(setting.direction, setting.norm, setting.n_probes, setting.tolerance, setting.way)
    _check_direction(model, setting)


def _check_direction(model: Model, setting: _Setting) -> None:
    direction = setting.direction
    if direction is None:
        return
    if not isinstance(direction, Tensor):
        raise TypeError(f"direction must be a tensor or None, got {type(direction).__name__}")
    whole = (model.num_layers, model.d_model)
    if setting.target == "head":
        whole = (model.num_layers, model.num_heads, model.d_head)
    shapes = [list(whole[start:]) for start in range(len(whole))]
    if list(direction.shape) not in shapes:
        wanted = " or ".join(map(str, reversed(shapes)))
        raise ValueError(f"direction is {list(direction.shape)}, but this target takes {wanted}")
