"""Contributions of tokens for texts: tokenised, batched by length, padded, and taken apart again."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from captum._utils.progress import NullProgress, progress
from torch import Tensor

from captum_hta.jacobian.closed_form import attention_energies, closed_form_flops
from captum_hta.jacobian.directions import check_direction
from captum_hta.jacobian.engine import Question, answer
from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.jacobian.norms import Energy, check_norm, shares
from captum_hta.jacobian.plan import Plan
from captum_hta.jacobian.precision import matmul_precision
from captum_hta.jacobian.query import check_probes
from captum_hta.model.attention import Attention
from captum_hta.model.encoding import Batch, Encoding, Text
from captum_hta.model.protocol import Model
from captum_hta.model.sites import without_autocast
from captum_hta.result import Contributions
from captum_hta.study.stopwatch import Stopwatch
from captum_hta.texts import batches_of, cut_tokens, encoded, listed

logger = logging.getLogger(__name__)
TARGETS = ("head", "layer")


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
    mode: str | None = None
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
    mode: str | None = None,
    precision: str = "highest",
    truncation: bool = False,
    direction: Tensor | None = None,
) -> Contributions:
    r"""How much of each token is in each head's output, or in each hidden embedding.

    Args:
        model: An adapter around a model, such as
            :func:`captum_hta.load_model` gives.
        texts: Texts, or pairs of texts; for a model of images paths, PIL images or arrays ``[channel,
            height, width]``, for one of audio arrays.
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
        mode: Force one of :data:`captum_hta.jacobian.plan.MODES`. Default: ``None``, the cheapest.
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
        >>> from captum_hta import load_model
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
        "multiply_by_inputs": multiply_by_inputs, "tolerance": tolerance, "seed": seed, "mode": mode,
        "precision": precision, "direction": direction,
    }  # fmt: skip
    settings = {"result": _setting(model, **asked)}
    encodings = [encoded(model, text, number, truncation) for number, text in enumerate(texts)]
    with progress(desc="Contributions", total=len(texts)) if show_progress else NullProgress() as bar:
        result = _jointly(model, encodings, settings, advance=bar.update)["result"]
    return replace(result, cut=cut_tokens(model, texts, encodings)) if truncation else result


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
    for rows in batches_of(encodings):
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
        forward_pass = ForwardPass(
            model.forward,
            batch.inputs,
            batch.extra,
            [model.target(layer, kind) for kind, layer in targets],
            model.source(entry),
        )
        answered = answer(forward_pass, _question(model, keys, setting, targets))
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
        mode=setting.mode,
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
    if setting.mode == "closed form" and not valid:
        raise ValueError(
            "the closed form gives the previous-layer contribution of heads in the Frobenius norm, for "
            "models whose attention the adapter knows; leave out mode to take a general mode"
        )
    return valid and setting.mode in (None, "closed form")


def _closed_form(attention: list[Attention], setting: _Setting) -> tuple[list[Energy], list[Plan]]:
    factors = [attention[layer].factors for layer in setting.layers]
    with torch.inference_mode(), matmul_precision(setting.precision):
        energies = [attention_energies(factor, setting.multiply_by_inputs) for factor in factors]
    flops = sum(closed_form_flops(*factor.query.shape) for factor in factors)
    memory = sum(energy.numel() * energy.element_size() for energy in energies)
    return [Energy(e) for e in energies], [Plan("closed form", flops, memory, None, "no tangents")]


# --- checks ----------------------------------------------------------------------------------------


# --- words -----------------------------------------------------------------------------------------


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
    check_direction(setting.direction, setting.norm, setting.n_probes, setting.tolerance, setting.mode)
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
