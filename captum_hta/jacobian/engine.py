"""The energies of a forward pass, by the cheapest mode that is valid for what is asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from captum_hta.jacobian.adjoint_check import agrees, has_path
from captum_hta.jacobian.directions import directions_for
from captum_hta.jacobian.forward import forward_energies
from captum_hta.jacobian.forward_pass import ForwardPass, NoPathError
from captum_hta.jacobian.linearize.linearization import Linearization
from captum_hta.jacobian.linearize.recorder import NotLinearizableError
from captum_hta.jacobian.linearize.tokenwise import halves, noise
from captum_hta.jacobian.linearize.windowed import WindowedLinearization
from captum_hta.jacobian.norms import Energy, joined
from captum_hta.jacobian.plan import Plan, Work, plan
from captum_hta.jacobian.precision import matmul_precision
from captum_hta.jacobian.probes import FIRST_PROBES, probe_energies
from captum_hta.jacobian.query import Request, joined_heads, query_positions
from captum_hta.jacobian.reverse import reverse_energies
from captum_hta.model.sites import without_autocast

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """What a user asks of a forward pass.

    Attributes:
        norm: One of :data:`captum_hta.jacobian.norms.NORMS`.
        num_heads: Parts of a target ``[batch, position, width]``; ``None``: one, without a head axis. A list
            has one for each target.
        neuron_selector: Query positions, as :func:`captum_hta.jacobian.query.query_positions` takes them.
        multiply_by_inputs: Scale column ``d`` of a block by ``x_i[d]``.
        direction: Multiply blocks by vectors from the left, as
            :func:`captum_hta.jacobian.directions.directions_for` takes them; ``None``: whole blocks.
        n_probes: Probes of each source token, or ``None`` for an exact result.
        tolerance: Standard error at which to stop adding probes.
        keys: For each example the integers that name its stream of probes.
        mode: Force a way of :data:`captum_hta.jacobian.plan.MODES`.
        chunk: Force the number of tangents or cotangents carried at once.
        precision: Of the matrix products, as ``torch.set_float32_matmul_precision`` takes it.
        progress: Called with the number of tangents in all, gives what to call with those done.
    """

    norm: str = "frobenius"
    num_heads: int | Sequence[int | None] | None = None
    neuron_selector: Any = None
    multiply_by_inputs: bool = False
    direction: Tensor | Sequence[Tensor] | None = None
    n_probes: int | None = None
    tolerance: float | None = None
    keys: Sequence[tuple[int, ...]] = ((0,),)
    mode: str | None = None
    chunk: int | None = None
    precision: str = "highest"
    progress: Callable[[int], Callable[[int], object]] | None = None

    @property
    def estimated(self) -> bool:
        """Whether probes are asked for."""
        return self.n_probes is not None or self.tolerance is not None


@dataclass(frozen=True)
class Answer:
    """Energies of every target, ``[batch, head, query, key]`` with the keys of all sources in a row.

    Attributes:
        energies: One for each target.
        lengths: Number of source tokens of each source.
        split: For each target, whether it has a head axis.
        dtype: That of the sources.
        plan: The mode that was taken.
    """

    energies: list[Energy]
    lengths: list[int]
    split: list[bool]
    dtype: torch.dtype
    plan: Plan = field(repr=False)


def answer(forward_pass: ForwardPass, question: Question) -> Answer:
    """The energies that a question asks for.

    All but the products of tangents is done in the highest precision, whatever PyTorch is set to, and in the
    types of the weights.

    Raises:
        ValueError: If the forward pass does not fit the question; see :class:`ForwardPass`.
    """
    with matmul_precision("highest"), without_autocast():
        return _answered(forward_pass, question)


def _answered(forward_pass: ForwardPass, question: Question) -> Answer:
    if question.direction is not None or (question.mode == "reverse" and not question.estimated):
        return _reverse(forward_pass, question)
    try:
        derivative, sources, targets = forward_pass.linearize()
    except (NotLinearizableError, NoPathError) as error:
        return _instead(forward_pass, question, error)
    request, split = _request(forward_pass, question, targets)
    derivatives = [WindowedLinearization(derivative, variable) for variable in derivative.sources]
    work = _work(derivatives, sources, targets, request, question)
    chosen = plan(work, question.mode, question.chunk)
    if chosen.mode == "reverse":
        return _reverse(forward_pass, question, chosen)
    if not agrees(forward_pass, derivative):
        error = "the recorded derivative is not the one that autograd gives (a custom backward function?)"
        return _instead(forward_pass, question, NotLinearizableError(error))
    _refuse_mixed_examples(derivative, sources)
    logger.info("%s", chosen)
    request = replace(request, advance=_advance(question, work, chosen))
    with matmul_precision(question.precision):
        energies, carried = _pushed(derivatives, sources, request, chosen, question)
    return _answer(energies, sources, split, _done(chosen, carried, derivatives, sources))


def _refuse_mixed_examples(derivative: Linearization, sources: Sequence[Tensor]) -> None:
    """Raise if an example of the batch reaches another: all are carried at once, each for itself."""
    if len(sources[0]) == 1:
        return
    for moves in halves(len(sources[0]), sources[0].device):
        tangents = {
            variable: noise(1, x) * moves[:, None, None]
            for variable, x in zip(derivative.sources, sources, strict=True)
        }
        with torch.no_grad():
            mixed = any(image[:, ~moves].any() for _, image in derivative.push(tangents))
        if mixed:
            raise ValueError(
                "examples of the batch influence each other in this model: pass them one at a time"
            )


def _done(
    chosen: Plan, carried: int, derivatives: Sequence[WindowedLinearization], sources: Sequence[Tensor]
) -> Plan:
    """The plan as it was carried out: a tolerance may have asked for more probes."""
    planned = sum(x.shape[1] for x in sources)
    if chosen.mode != "probes" or carried == chosen.probes:
        return chosen
    extra = planned * (carried - (chosen.probes or 0))
    deepest = max(one.flops(target, planned * carried) for one in derivatives for target in one.whole.targets)
    return replace(chosen, flops=chosen.flops + extra * deepest, reason=f"{carried} a token", probes=carried)


def _pushed(
    derivatives: list[WindowedLinearization],
    sources: list[Tensor],
    request: Request,
    chosen: Plan,
    question: Question,
) -> tuple[list[list[Energy]], int]:
    """The energies, and how many directions of each token they took."""
    if chosen.mode == "forward":
        return forward_energies(derivatives, sources, request, chosen.chunk), sources[0].shape[2]
    return probe_energies(
        derivatives,
        sources,
        request,
        chosen.chunk,
        question.n_probes,
        question.tolerance,
        question.keys,
    )


def _instead(forward_pass: ForwardPass, question: Question, error: Exception) -> Answer:
    """The reverse mode, the only one where the forward pass cannot be linearised."""
    if not question.estimated and question.mode != "forward":
        found = _reverse(forward_pass, question)
        logger.warning("taking the reverse mode, since the forward mode is closed: %s", error)
        return found
    reaches = has_path(forward_pass)  # which names an operator that loses the derivative
    if isinstance(error, NoPathError) and not reaches:
        raise error
    raise ValueError(
        f"the forward mode and probes need a forward derivative, but {error}; ask for an exact result and "
        "leave out mode (n_probes=None, tolerance=None, mode=None): the reverse mode can give it"
    ) from error


def _reverse(forward_pass: ForwardPass, question: Question, chosen: Plan | None = None) -> Answer:
    """By backward passes alone; without a recording their operations are not counted."""
    with forward_pass.differentiable() as (sources, targets):
        request, split = _request(forward_pass, question, targets)
        work = _work([], sources, targets, request, question)
        if chosen is None:
            chosen = replace(plan(work, "reverse", question.chunk), flops=None)
        logger.info("%s", chosen)
        request = replace(request, advance=_advance(question, work, chosen))
        with matmul_precision(question.precision):
            energies = reverse_energies(forward_pass, sources, targets, request, chosen.chunk)
    return _answer(energies, sources, split, chosen)


def _answer(
    energies: list[list[Energy]], sources: Sequence[Tensor], split: list[bool], chosen: Plan
) -> Answer:
    return Answer(
        energies=[joined(by_source) for by_source in zip(*energies, strict=True)],
        lengths=[x.shape[1] for x in sources],
        split=split,
        dtype=sources[0].dtype,
        plan=chosen,
    )


def _request(
    forward_pass: ForwardPass, question: Question, targets: Sequence[Tensor]
) -> tuple[Request, list[bool]]:
    """The question put to these targets, and which of them have a head axis."""
    lengths = {target.shape[1] for target in targets}
    if question.neuron_selector is not None and len(lengths) > 1:
        raise ValueError(
            f"neuron_selector needs targets of one length, got {sorted(lengths)}: attribute to them "
            "one at a time"
        )
    queries = query_positions(question.neuron_selector, targets[0].shape[1], targets[0].device)
    asked = question.num_heads
    each = asked if isinstance(asked, list | tuple) else [asked] * len(targets)
    heads = [
        _heads(forward_pass.name(layer), target, count)
        for layer, target, count in zip(forward_pass.layers, targets, each, strict=True)
    ]
    request = Request(question.norm, [count or 1 for count in heads], queries, question.multiply_by_inputs)
    if question.direction is not None:
        request = replace(request, directions=_directions(question.direction, request, targets))
    return request, [count is not None for count in heads]


def _directions(
    direction: Tensor | Sequence[Tensor], request: Request, targets: Sequence[Tensor]
) -> list[Tensor]:
    shapes = []
    for target, heads in zip(targets, request.heads, strict=True):
        batch, positions, width = joined_heads(target).shape
        queries = positions if request.queries is None else len(request.queries)
        shapes.append((batch, heads, queries, width // heads))
    return directions_for(direction, shapes, targets[0])


def _heads(name: str, target: Tensor, num_heads: int | None) -> int | None:
    """The number of heads of a target, or ``None`` for a target without a head axis."""
    if target.dim() == 4:
        if num_heads not in (None, target.shape[2]):
            raise ValueError(f"{name} has {target.shape[2]} heads, but num_heads is {num_heads}")
        return target.shape[2]
    if num_heads is not None and target.shape[2] % num_heads:
        raise ValueError(
            f"{name} is {target.shape[2]} wide, which num_heads={num_heads} does not divide: pass the "
            "model's number of attention heads"
        )
    return num_heads


def _work(
    derivatives: Sequence[WindowedLinearization],
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    request: Request,
    question: Question,
) -> Work:
    widest = max(value.numel() for value in (*sources, *targets))
    push_flops = pull_flops = [0.0] * len(targets)
    preparation = kept = 0.0
    n_probes = (question.n_probes or FIRST_PROBES) if question.estimated else None
    if derivatives:
        whole = derivatives[0].whole
        counts = [x.shape[1] * (n_probes or x.shape[2]) for x in sources]
        pushes = list(zip(derivatives, counts, strict=True))
        widest = max(widest, *(one.widest(count) for one, count in pushes))
        push_flops = [max(one.flops(target, count) for one, count in pushes) for target in whole.targets]
        preparation = sum(one.preparation_flops(count) for one, count in pushes)
        kept = sum(one.preparation_elements(count) for one, count in pushes) * sources[0].element_size()
        pull_flops = [float(whole.flops(target)) for target in whole.targets]
    queries = targets[0].shape[1] if request.queries is None else len(request.queries)
    return Work(
        tokens=sum(x.shape[1] for x in sources),
        width=max(x.shape[2] for x in sources),
        queries=queries,
        heads=max(request.heads),
        target_widths=[joined_heads(target).shape[2] for target in targets],
        push_flops=push_flops,
        pull_flops=pull_flops,
        tangent_bytes=widest * sources[0].element_size(),
        norm=question.norm,
        along_direction=question.direction is not None,
        preparation_flops=preparation,
        preparation_bytes=kept,
        n_probes=n_probes,
        device=sources[0].device,
    )


def _advance(question: Question, work: Work, chosen: Plan) -> Callable[[int], object]:
    if question.progress is None:
        return lambda count: None
    if chosen.mode == "reverse":
        return question.progress(sum(work.cotangents))
    return question.progress(work.tokens * (work.n_probes or work.width))
