"""The energies of a forward pass, computed in the cheapest mode that can answer the query."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from captum_hta.jacobian.adjoint_check import agrees, has_path
from captum_hta.jacobian.example_check import refuse_mixed_examples, refuse_mixed_gradients
from captum_hta.jacobian.forward import forward_energies
from captum_hta.jacobian.forward_pass import ForwardPass, NoPathError
from captum_hta.jacobian.linearize.recorder import NotLinearizableError
from captum_hta.jacobian.linearize.windowed import WindowedLinearization
from captum_hta.jacobian.norms import Energy, joined, refuse_not_finite
from captum_hta.jacobian.plan import Costs, Plan, plan
from captum_hta.jacobian.probes import FIRST_PROBES, probe_energies
from captum_hta.jacobian.query import Query, ResolvedQuery, joined_heads, query_positions
from captum_hta.jacobian.reverse import reverse_energies
from captum_hta.jacobian.target_directions import directions_for
from captum_hta.model.precision import full_precision, matmul_precision

logger = logging.getLogger(__name__)

Streams = Sequence[tuple[int, ...]]
Progress = Callable[[int], Callable[[int], object]]
"""Called with the number of tangents in all, returns what to call with the number of those done."""


@dataclass(frozen=True)
class Answer:
    """Energies of every target, ``[batch, head, query, key]`` with the keys of all sources in a row.

    Attributes:
        energies: One for each target.
        lengths: Number of source tokens of each source.
        has_heads: For each target, whether it has a head axis.
        dtype: Dtype of the sources.
        plan: The mode that was used, and what it cost.
    """

    energies: list[Energy]
    lengths: list[int]
    has_heads: list[bool]
    dtype: torch.dtype
    plan: Plan = field(repr=False)


def answer(
    forward_pass: ForwardPass,
    query: Query,
    streams: Streams | None = None,
    chunk: int | None = None,
    progress: Progress | None = None,
) -> Answer:
    """Answer a query.

    Everything except the products of tangents is computed in the highest precision, whatever PyTorch is set
    to, and in the dtypes of the weights.

    Args:
        forward_pass: The model on fixed inputs, with its source and targets.
        query: The query.
        streams: For each example the integers that name its stream of random numbers. Default: ``None``, the
            seed for all.
        chunk: Force the number of tangents or cotangents carried at once.
        progress: Called with the number of tangents in all, returns what to call with the number of those
            done.

    Raises:
        ValueError: If the forward pass does not fit the query; see :class:`ForwardPass`.
    """
    with full_precision():
        return _Run(forward_pass, query, streams, chunk, progress).answer()


@dataclass(frozen=True)
class _Run:
    """The computation of one answer; its fields are the arguments of :func:`answer`."""

    forward_pass: ForwardPass
    query: Query
    streams: Streams | None
    chunk: int | None
    progress: Progress | None

    def answer(self) -> Answer:
        query = self.query
        if query.direction is not None or (query.mode == "reverse" and not query.is_estimate):
            return self._reverse()
        try:
            derivative, sources, targets = self.forward_pass.linearize()
        except (NotLinearizableError, NoPathError) as error:
            return self._without_recording(error)
        derivatives = [WindowedLinearization(derivative, variable) for variable in derivative.sources]
        resolved = self._resolved(sources, targets)
        _refuse_not_a_number(targets, resolved)
        chosen = plan(self._costs(derivatives, sources, targets, resolved), query.mode, self.chunk)
        if chosen.mode == "reverse":
            return self._reverse(chosen)
        if not agrees(self.forward_pass, derivative):
            reason = "the recorded derivative differs from autograd's (a custom backward function?)"
            return self._without_recording(NotLinearizableError(reason))
        refuse_mixed_examples(derivative, sources)
        return self._pushed(derivatives, sources, resolved, chosen)

    def _pushed(
        self,
        derivatives: list[WindowedLinearization],
        sources: list[Tensor],
        resolved: ResolvedQuery,
        chosen: Plan,
    ) -> Answer:
        """Answer in forward mode, by all tangents or by probes."""
        logger.info("%s", chosen)
        assert chosen.chunk is not None
        per_token = chosen.probes or max(x.shape[2] for x in sources)
        resolved = self._with_progress(resolved, sum(x.shape[1] for x in sources) * per_token)
        with matmul_precision(self.query.precision):
            if chosen.mode == "forward":
                energies = forward_energies(derivatives, sources, resolved, chosen.chunk)
            else:
                energies, probes = probe_energies(derivatives, sources, resolved, chosen.chunk)
                chosen = _carried_out(chosen, probes, derivatives, sources)
        return _answer(energies, sources, resolved, chosen)

    def _without_recording(self, error: Exception) -> Answer:
        """Answer in reverse mode, the only one for a forward pass that cannot be linearised."""
        if not self.query.is_estimate and self.query.mode != "forward":
            found = self._reverse()
            logger.warning("taking the reverse mode, since the forward mode is not possible: %s", error)
            return found
        reaches = has_path(self.forward_pass)  # names an operator that loses the derivative
        if isinstance(error, NoPathError) and not reaches:
            raise error
        raise ValueError(
            f"the forward mode and probes need a forward derivative, but {error}; ask for an exact result "
            "and leave out mode (n_probes=None, tolerance=None, mode=None): the reverse mode can give it"
        ) from error

    def _reverse(self, chosen: Plan | None = None) -> Answer:
        """Answer in reverse mode; without a recording its operations are not counted."""
        with self.forward_pass.differentiable() as (sources, targets):
            resolved = self._resolved(sources, targets)
            _refuse_not_a_number(targets, resolved)
            refuse_mixed_gradients(sources, targets)
            costs = self._costs([], sources, targets, resolved)
            if chosen is None:
                chosen = replace(plan(costs, "reverse", self.chunk), flops=None)
            logger.info("%s", chosen)
            assert chosen.chunk is not None
            resolved = self._with_progress(resolved, sum(costs.cotangents))
            with matmul_precision(self.query.precision):
                energies = reverse_energies(self.forward_pass, sources, targets, resolved, chosen.chunk)
        return _answer(energies, sources, resolved, chosen)

    def _with_progress(self, resolved: ResolvedQuery, total: int) -> ResolvedQuery:
        return resolved if self.progress is None else replace(resolved, advance=self.progress(total))

    def _resolved(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> ResolvedQuery:
        """What the query means for these sources and targets."""
        query = self.query
        lengths = {target.shape[1] for target in targets}
        if query.neuron_selector is not None and len(lengths) > 1:
            raise ValueError(
                f"neuron_selector needs targets of one length, got {sorted(lengths)}: attribute to them "
                "one at a time"
            )
        positions = query_positions(query.neuron_selector, targets[0].shape[1], targets[0].device)
        heads = self.forward_pass.heads_of(targets)
        streams = self.streams or [(query.seed,)] * len(sources[0])
        resolved = ResolvedQuery(query, heads, positions, streams=streams)
        if query.direction is None:
            return resolved
        shapes = []
        for number, target in enumerate(targets):
            batch, length, width = joined_heads(target).shape
            parts = resolved.parts(number)
            shapes.append((batch, parts, resolved.queries(length), width // parts))
        return replace(resolved, directions=directions_for(query.direction, shapes, targets[0]))

    def _costs(
        self,
        derivatives: Sequence[WindowedLinearization],
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        resolved: ResolvedQuery,
    ) -> Costs:
        """The costs of each mode; without derivatives only the reverse mode, operations uncounted."""
        query, first = self.query, sources[0]
        probes = (query.n_probes or FIRST_PROBES) if query.is_estimate else None
        cotangents = [
            query.cotangents(resolved.queries(target.shape[1]), resolved.parts(number), _width(target))
            for number, target in enumerate(targets)
        ]
        costs = Costs(
            tokens=sum(x.shape[1] for x in sources),
            directions=probes or max(x.shape[2] for x in sources),
            cotangents=cotangents,
            push_flops=[0.0] * len(targets),
            pull_flops=[0.0] * len(targets),
            tangent_bytes=max(value.numel() for value in (*sources, *targets)) * first.element_size(),
            is_estimate=query.is_estimate,
            device=first.device,
        )
        counts = [x.shape[1] * (probes or x.shape[2]) for x in sources]
        pushes = list(zip(derivatives, counts, strict=True)) if derivatives else []
        return _counted(costs, pushes, first.element_size()) if pushes else costs


def _width(target: Tensor) -> int:
    return joined_heads(target).shape[2]


def _counted(costs: Costs, pushes: Sequence[tuple[WindowedLinearization, int]], element_size: int) -> Costs:
    """Costs with the operations and the memory of pushing a number of tangents of each source."""
    whole = pushes[0][0].whole
    widest = max(one.widest(count) for one, count in pushes)
    return replace(
        costs,
        push_flops=[max(one.flops(target, count) for one, count in pushes) for target in whole.targets],
        pull_flops=[float(whole.flops(target)) for target in whole.targets],
        tangent_bytes=max(costs.tangent_bytes, widest * element_size),
        preparation_flops=sum(one.preparation_flops(count) for one, count in pushes),
        preparation_bytes=sum(one.preparation_elements(count) for one, count in pushes) * element_size,
    )


def _carried_out(
    chosen: Plan, probes: int, derivatives: Sequence[WindowedLinearization], sources: Sequence[Tensor]
) -> Plan:
    """The plan as it was carried out: a tolerance may have asked for more probes."""
    if probes == chosen.probes or chosen.flops is None:
        return chosen
    tokens = sum(x.shape[1] for x in sources)
    deepest = max(one.flops(target, tokens * probes) for one in derivatives for target in one.whole.targets)
    flops = chosen.flops + tokens * (probes - (chosen.probes or 0)) * deepest
    return replace(chosen, flops=flops, reason=f"{probes} a token", probes=probes)


def _refuse_not_a_number(targets: Sequence[Tensor], resolved: ResolvedQuery) -> None:
    """Check the targets at the queries before they are differentiated.

    Infinite values may be right, as those of masked scores.

    Raises:
        NotFiniteError: If one is NaN.
    """
    for target in targets:
        chosen = target if resolved.positions is None else target.index_select(1, resolved.positions)
        refuse_not_finite("activations", chosen.detach().isnan())


def _answer(
    energies: list[list[Energy]], sources: Sequence[Tensor], resolved: ResolvedQuery, chosen: Plan
) -> Answer:
    return Answer(
        energies=[joined(by_source) for by_source in zip(*energies, strict=True)],
        lengths=[x.shape[1] for x in sources],
        has_heads=[heads is not None for heads in resolved.heads],
        dtype=sources[0].dtype,
        plan=chosen,
    )
