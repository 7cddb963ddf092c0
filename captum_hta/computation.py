"""Contributions for texts: they are tokenised, batched by length, padded, and answered batch by batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm.auto import tqdm

from captum_hta.batching import batches_of
from captum_hta.jacobian.arguments import flag
from captum_hta.jacobian.closed_form import attention_energies, closed_form_flops, has_closed_form
from captum_hta.jacobian.endpoints import Endpoints, endpoints_of
from captum_hta.jacobian.engine import answer
from captum_hta.jacobian.factors_check import checked_factors
from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.jacobian.norms import Energy, NotFiniteError, shares
from captum_hta.jacobian.plan import Plan
from captum_hta.jacobian.query import Query, Selector, query_positions
from captum_hta.model.attention import Attention, AttentionFactors
from captum_hta.model.encoding import Batch, Encoding, Text
from captum_hta.model.precision import full_precision, matmul_precision
from captum_hta.model.protocol import Model
from captum_hta.result import Contributions
from captum_hta.texts import cut_tokens, encoded, listed

Look = Callable[[list[int], list[Attention]], object]
"""Called with the numbers of the texts of a batch and the attention of every layer."""
Timed = Callable[[str], AbstractContextManager[object]]
"""Called with the name of a part of the work, returns a context to do it in, such as a stopwatch."""


@dataclass(frozen=True)
class Question:
    """A query, with its source and its targets.

    Attributes:
        query: The query.
        ends: The source and the targets.
    """

    query: Query
    ends: Endpoints


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
    queries: Selector = None,
) -> Contributions:
    r"""How much of each token is in each head's output, or in each hidden embedding.

    Args:
        model: An adapter around a model, as :func:`captum_hta.load_model` returns it.
        texts: Texts, or pairs of texts; for vision models paths, PIL images or arrays ``[channel, height,
            width]``, for audio models arrays.
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
            exact. The directions for a text depend on its tokens and the seed, not on the other texts.
        tolerance: Double the probes until the standard error of every contribution is at most this.
        seed: Seed of the probes.
        show_progress: Show a progress bar.
        mode: Force one of :data:`captum_hta.jacobian.plan.MODES`. Default: ``None``, the cheapest.
        precision: Precision of float32 matrix products; see
            :meth:`captum_hta.HiddenTokenAttribution.attribute`.
        truncation: Cut texts that are longer than the model reads, and report it in ``cut``. Default:
            ``False``, they are an error.
        direction: Vectors :math:`v` in the space of the target, as :func:`captum_hta.logit_direction` returns
            them: then :math:`r_{ij} = \| v^\top \partial y_j / \partial x_i \|`, how much of a token is in
            the component of the target along :math:`v`. ``[d_head]``, ``[head, d_head]`` or ``[layer, head,
            d_head]``, with all layers of the model; for the target ``"layer"`` ``[width]`` or ``[layer,
            width]``.
        queries: Positions of the queries in each text, an int, a slice or a list of ints, negative ones from
            the end of the text. Results have rows of these alone, and may take less work: for a few queries
            the reverse mode may be the cheapest. Default: ``None``, all.

    Returns:
        The contributions, the model's attention and the tokens.

    Raises:
        ValueError: If there is no text, a text has no token or is longer than the model reads, a query lies
            outside a text, or an argument is out of its range.
        TypeError: If a text is of a kind that the model does not read, or an argument is of a wrong type.

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
    flag("show_progress", show_progress)
    flag("truncation", truncation)
    question = Question(
        Query(
            norm=norm,
            multiply_by_inputs=multiply_by_inputs,
            direction=direction,
            n_probes=n_probes,
            tolerance=tolerance,
            seed=seed,
            mode=mode,
            precision=precision,
        ),
        endpoints_of(model, source, target, layers),
    )
    _check_direction(model, question)
    encodings = [encoded(model, text, number, truncation) for number, text in enumerate(texts)]
    positions = _positions(queries, encodings)
    with _progress(len(texts)) if show_progress else nullcontext(_ignore) as advance:
        computation = _Computation(model, encodings, {"result": question}, positions, advance)
        result = computation.run()["result"]
    return replace(result, cut=cut_tokens(model, texts, encodings)) if truncation else result


def jointly(
    model: Model,
    encodings: Sequence[Encoding],
    questions: Mapping[str, Question],
    look: Look | None = None,
    timed: Timed = nullcontext,
) -> dict[str, Contributions]:
    """Several contributions of the same texts, by name; what they have in common is computed once.

    Args:
        model: The model.
        encodings: Texts as the model reads them.
        questions: A question for each result. Those that differ in ``target`` alone share a sweep; all share
            the model's attention.
        look: Called with the numbers of the texts of each batch and the attention of every layer.
        timed: Called with the name of a part of the work, returns a context to do it in.

    Raises:
        ValueError: If directions do not fit the targets, or activations of a text are not finite.
        TypeError: If a direction is not a tensor.
    """
    for question in questions.values():
        _check_direction(model, question)
    return _Computation(model, encodings, questions, look=look, timed=timed).run()


def _check_direction(model: Model, question: Question) -> None:
    """Raise if directions do not fit the targets."""
    direction = question.query.direction
    if direction is None:
        return
    if not isinstance(direction, Tensor):
        raise TypeError(f"direction must be a tensor or None, got {type(direction).__name__}")
    whole: tuple[int, ...] = (model.num_layers, model.d_model)
    if question.ends.target == "head":
        whole = (model.num_layers, model.num_heads, model.d_head)
    shapes = [list(whole[start:]) for start in range(len(whole))]
    if list(direction.shape) not in shapes:
        wanted = " or ".join(map(str, reversed(shapes)))
        raise ValueError(f"direction is {list(direction.shape)}, but this target takes {wanted}")


def _positions(queries: Selector, encodings: Sequence[Encoding]) -> list[list[int]] | None:
    """The positions of the queries in each text, or ``None`` for all.

    Raises:
        ValueError: If one lies outside a text.
        TypeError: If the queries are of a wrong type.
    """
    if queries is None:
        return None
    found = []
    for number, encoding in enumerate(encodings):
        try:
            positions = query_positions(queries, len(encoding), torch.device("cpu"), "queries")
        except ValueError as error:
            raise ValueError(f"text {number} has {len(encoding)} tokens: {error}") from error
        assert positions is not None
        found.append(positions.tolist())
    return found


def _ignore(count: int) -> None:
    """Show no progress."""


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], object]]:
    with tqdm(desc="Contributions", total=total) as bar:
        yield bar.update


@dataclass(frozen=True)
class _Computation:
    """Contributions of the same texts to several questions, by name.

    Attributes:
        model, encodings, questions: The model, the texts as it reads them, and the questions.
        positions: The positions of the queries in each text; ``None`` for all.
        advance: Called with the number of texts of each batch that is done.
        look, timed: As :func:`jointly` takes them.
    """

    model: Model
    encodings: Sequence[Encoding]
    questions: Mapping[str, Question]
    positions: Sequence[list[int]] | None = None
    advance: Callable[[int], object] = _ignore
    look: Look | None = None
    timed: Timed = nullcontext

    def run(self) -> dict[str, Contributions]:
        """The results, by name."""
        stores = {
            name: _Store(self.model, self.encodings, one, self.positions)
            for name, one in self.questions.items()
        }
        for rows in self._batches():
            with full_precision():
                batch = self.model.batch([self.encodings[row] for row in rows])
                with self.timed("attention"):
                    attention = self.model.attention(batch)
                    if any(_factors(attention, question) for question in self.questions.values()):
                        attention = checked_factors(attention)
                    if self.look is not None:
                        self.look(rows, attention)
                try:
                    self._answer(rows, batch, attention, stores)
                except NotFiniteError as error:
                    raise error.renumbered(rows, "text") from error
            self.advance(len(rows))
        return {name: store.result() for name, store in stores.items()}

    def _batches(self) -> Iterator[list[int]]:
        """Row numbers of each batch; its texts have the same queries."""
        for rows in batches_of(self.encodings):
            groups: dict[object, list[int]] = {}
            for row in rows:
                key = None if self.positions is None else tuple(self.positions[row])
                groups.setdefault(key, []).append(row)
            yield from groups.values()

    def _answer(
        self, rows: list[int], batch: Batch, attention: list[Attention], stores: Mapping[str, _Store]
    ) -> None:
        """Answer all questions about a batch of texts."""
        for names in self._groups(attention):
            questions = [self.questions[name] for name in names]
            selector = None if self.positions is None else self.positions[rows[0]]
            with self.timed(" and ".join(names)):
                streams = [(questions[0].query.seed, fingerprint(self.encodings[row])) for row in rows]
                energies, plans = _energies(self.model, batch, attention, streams, questions, selector)
                for name, found in zip(names, energies, strict=True):
                    stores[name].add(rows, batch, attention, found, plans)

    def _groups(self, attention: list[Attention]) -> list[list[str]]:
        """Names of questions in groups that differ only in their targets: one sweep answers a group."""
        groups: dict[object, list[str]] = {}
        for name, question in self.questions.items():
            alone = name if _factors(attention, question) else None
            key = question.query.identity, replace(question.ends, target=""), alone
            groups.setdefault(key, []).append(name)
        return list(groups.values())


class _Store:
    """The results of all batches, in the order of the texts."""

    def __init__(
        self,
        model: Model,
        encodings: Sequence[Encoding],
        question: Question,
        positions: Sequence[list[int]] | None,
    ) -> None:
        self.encodings, self.ends, self.positions = encodings, question.ends, positions
        self.norm, self.model = question.query.norm, model.name
        ends = question.ends
        self._key_encodings = [_key_encoding(one, ends) for one in encodings]
        rows = (len(encodings), len(ends.layers))
        square = (max(map(len, positions or encodings)), max(map(len, self._key_encodings)))
        heads = (model.num_heads,) if ends.target == "head" else ()
        dtype = torch.promote_types(model.dtype, torch.float32)
        self.values = torch.empty(*rows, *heads, *square, dtype=dtype, device="cpu")
        self.errors: Tensor | None = None
        self.attention = torch.empty(*rows, model.num_heads, *square, dtype=dtype, device="cpu")
        self.plans: list[Plan] = []
        self.probes: dict[int, int] = {}

    def add(
        self,
        rows: list[int],
        batch: Batch,
        attention: list[Attention],
        energies: list[Energy],
        plans: list[Plan],
    ) -> None:
        """Keep the energies of the layers of some texts."""
        self.plans.extend(plans)
        counts = [plan.probes for plan in plans if plan.probes is not None]
        self.probes.update(dict.fromkeys(rows, min(counts)) if counts else {})
        for index, (layer, energy) in enumerate(zip(self.ends.layers, energies, strict=True)):
            values, errors = shares(_without_padding(energy, batch.keys))
            if self.ends.target == "layer":
                values, errors = values.squeeze(1), errors if errors is None else errors.squeeze(1)
            self._put(self.values, rows, index, values)
            pattern = attention[layer].pattern
            if self.positions is not None:
                pattern = pattern[:, :, self.positions[rows[0]]]
            self._put(self.attention, rows, index, pattern)
            if errors is not None:
                if self.errors is None:
                    self.errors = torch.empty_like(self.values)
                self._put(self.errors, rows, index, errors)

    def _put(self, store: Tensor, rows: list[int], index: int, values: Tensor) -> None:
        for row, value in zip(rows, values, strict=True):
            queries, keys = len((self.positions or self.encodings)[row]), len(self._key_encodings[row])
            store[row, index, ..., :queries, :keys] = value[..., :queries, :keys]
            store[row, index, ..., queries:, :] = torch.nan
            store[row, index, ..., :queries, keys:] = torch.nan

    def result(self) -> Contributions:
        is_cross = self.ends.key_layers is not None
        return Contributions(
            values=self.values,
            standard_error=self.errors,
            attention=self.attention,
            tokens=[encoding.tokens for encoding in self.encodings],
            layers=list(self.ends.layers),
            source=self.ends.source,
            target=self.ends.target,
            norm=self.norm,
            model=self.model,
            probes=[self.probes[row] for row in range(len(self.encodings))] if self.probes else None,
            plans=self.plans,
            encodings=list(self.encodings),
            keys=[encoding.tokens for encoding in self._key_encodings] if is_cross else None,
            queries=None if self.positions is None else list(self.positions),
        )


def _key_encoding(encoding: Encoding, ends: Endpoints) -> Encoding:
    """The text that the keys are tokens of: for cross attention the one that the encoder read."""
    if ends.key_layers is None:
        return encoding
    assert encoding.context is not None, "cross attention reads pairs of texts"
    return encoding.context


def fingerprint(encoding: Encoding) -> int:
    """A number for what the model reads, the same on every machine; it names the text's random numbers."""
    read = [encoding.ids, encoding.segments]
    if encoding.context is not None:
        read.append(encoding.context.ids)
    digest = hashlib.blake2b(repr(tuple(read)).encode(), digest_size=8)
    for one in (encoding, encoding.context):
        if one is not None and one.content is not None:
            digest.update(one.content.double().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def _without_padding(energy: Energy, mask: Tensor) -> Energy:
    """Energies with those of padding set to zero, so that it enters no sum."""
    if mask.all():
        return energy
    keys = mask[:, None, None, :]
    variance = None if energy.variance is None else energy.variance.where(keys, 0)
    return Energy(energy.mean.where(keys, 0), variance)


# --- energies of a batch ---------------------------------------------------------------------------


def _energies(
    model: Model,
    batch: Batch,
    attention: list[Attention],
    streams: Sequence[tuple[int, ...]],
    questions: Sequence[Question],
    positions: list[int] | None,
) -> tuple[list[list[Energy]], list[Plan]]:
    """For each question the energies of its layers at some positions, and the plans that were followed. The
    questions differ only in their targets.
    """
    query, ends = questions[0].query, questions[0].ends
    factors = _factors(attention, questions[0])
    if factors:
        energies, chosen = _closed_form(factors, query, positions)
        return [energies], [chosen]
    query = replace(query, neuron_selector=positions)
    found: dict[tuple[str, int], Energy] = {}
    plans = []
    for entry in ends.entries:
        layers = [layer for layer in ends.layers if ends.entry(layer) == entry]
        targets = [(one.ends.target, layer) for one in questions for layer in layers]
        forward_pass = ForwardPass(
            model.forward,
            batch.inputs,
            batch.extra,
            [model.target(layer, kind) for kind, layer in targets],
            model.source(entry),
            num_heads=[model.num_heads if kind == "head" else None for kind, _ in targets],
        )
        answered = answer(forward_pass, _for_layers(query, targets), streams)
        found.update(zip(targets, answered.energies, strict=True))
        plans.append(answered.plan)
    return [[found[one.ends.target, layer] for layer in ends.layers] for one in questions], plans


def _for_layers(query: Query, targets: Sequence[tuple[str, int]]) -> Query:
    """The query with directions for each of the targets."""
    direction = query.direction
    if not isinstance(direction, Tensor):
        return query
    has_layers = direction.dim() == (3 if targets[0][0] == "head" else 2)
    return replace(query, direction=[direction[layer] if has_layers else direction for _, layer in targets])


def _factors(attention: list[Attention], question: Question) -> list[AttentionFactors] | None:
    """The factors of each layer's attention, where the closed form gives the result."""
    known = [attention[layer].factors for layer in question.ends.layers]
    factors = [one for one in known if one is not None]
    complete = len(factors) == len(known)
    return factors if has_closed_form(question.query, question.ends, complete) else None


def _closed_form(
    factors: Sequence[AttentionFactors], query: Query, positions: list[int] | None
) -> tuple[list[Energy], Plan]:
    with torch.inference_mode(), matmul_precision(query.precision):
        energies = [attention_energies(one, query.multiply_by_inputs, positions) for one in factors]
    flops = sum(closed_form_flops(*one.query.shape) for one in factors)
    memory = sum(energy.numel() * energy.element_size() for energy in energies)
    return [Energy(one) for one in energies], Plan("closed form", flops, memory, None, "no tangents")
