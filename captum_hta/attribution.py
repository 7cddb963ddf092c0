"""Hidden Token Attribution as a Captum attribution class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NoReturn

import torch
from captum.attr import GradientAttribution, NeuronAttribution
from captum.log import log_usage
from torch import Tensor
from torch.nn import Module
from tqdm.auto import tqdm

from captum_hta.jacobian.arguments import (
    check_devices,
    check_inputs,
    check_modules,
    choice,
    flag,
    is_integer,
    optional_count,
)
from captum_hta.jacobian.batch_splits import check_split, direction_rows, examples_of, part_of, splits
from captum_hta.jacobian.engine import Answer, Progress, answer
from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.jacobian.norms import NORMS, NotFiniteError, shares
from captum_hta.jacobian.query import ONE_PROBE, Query
from captum_hta.jacobian.rehearsal import rehearse
from captum_hta.model.precision import full_precision

Attribution = Tensor | tuple[Tensor, ...] | list[Tensor | tuple[Tensor, ...]]
"""For one source a tensor, for several a tuple; for several layers a list of these."""


class HiddenTokenAttribution(NeuronAttribution, GradientAttribution):  # type: ignore[misc]  # Captum has no types
    r"""How much of each source token is in each target token, measured with gradients.

    For source vectors :math:`x_i` and target vectors :math:`y_j`,

    .. math::
        r_{ij} = \Big\| \frac{\partial y_j}{\partial x_i} \Big\|, \qquad
        c_{ij} = \frac{r_{ij}}{\sum_k r_{kj}} .

    With the Frobenius norm, :math:`c_{ij}` is the share of source token ``i`` in the response of target
    token ``j`` to equal, isotropic noise on every source token. The result has the axes of an attention
    pattern, ``[batch, head, query, key]``: targets are queries and sources are keys.

    There are two exact modes, equal to rounding. *Forward* pushes tangents of every source token through
    the model and reads all targets on the way; *reverse* pulls cotangents of every target component
    back. The class counts the operations of both and takes the cheaper: forward for whole layers,
    reverse for a few query positions. It takes reverse for a model with an operator that has no forward
    derivative. *Probes* (``n_probes``, ``tolerance``) estimate the result from a few random tangents
    of each source token.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020 (targets are hidden embeddings).
        Pascual et al., "Telling BERT's Full Story: from Local Attention to Global Aggregation", EACL 2021
        (targets are the outputs of single heads).

    Args:
        forward_func (Callable or torch.nn.Module): The model, or a function that runs it.
        layer (torch.nn.Module or list of torch.nn.Module): The target: a module whose output (or input,
            see ``attribute_to_neuron_input``) is ``[batch, position, width]`` or
            ``[batch, position, head, d_head]``, or with ``num_heads`` also ``[batch, head, position,
            d_head]``. For several modules one pass serves all.
        source_layer (torch.nn.Module, optional): The source: a module whose output is
            ``[batch, position, width]``. Default: ``None``, the inputs themselves.
        num_heads (int, optional): Number of equal parts of the target's width. Default: ``None``: the heads
            that the target is known to have (a ``torch.nn.MultiheadAttention``, which is read before its
            output projection; a hook point of TransformerLens, such as ``hook_z``; a target with a head
            axis). Any other target gives ``[batch, query, key]``.
        norm (str, optional): ``"frobenius"``, of the whole Jacobian; ``"spectral"``, its largest
            singular value; ``"sum"``, the Euclidean norm of the gradient of the summed components of
            :math:`y_j`, which some public code uses (nearly constant behind a LayerNorm, so without
            meaning there). Default: ``"frobenius"``.
        multiply_by_inputs (bool, optional): Scale column ``d`` of each Jacobian by ``x_i[d]``.
            Default: ``False``.
        device_ids (list of int, optional): As in Captum, where ``forward_func`` applies a
            ``DataParallel`` model. Only one device is supported.
        batch_dim (int, optional): The axis of sources and targets that is the batch. ``1`` for modules that
            take ``[position, batch, width]``, such as ``torch.nn.TransformerEncoder`` with its default
            ``batch_first=False``. Results have the batch first in either case. Default: ``0``.

    Raises:
        ValueError: If ``norm`` or ``num_heads`` is not valid, or several devices are named.
        TypeError: If ``layer`` or ``source_layer`` is not a module.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> hta = HiddenTokenAttribution(model, model.self_attn)
        >>> contributions = hta.attribute(torch.randn(3, 5, 8))
        >>> contributions.shape
        torch.Size([3, 2, 5, 5])
        >>> torch.allclose(contributions.sum(-1), torch.ones(3, 2, 5))
        True
    """

    def __init__(
        self,
        forward_func: Callable[..., object],
        layer: Module | Sequence[Module],
        source_layer: Module | None = None,
        num_heads: int | None = None,
        norm: str = "frobenius",
        multiply_by_inputs: bool = False,
        device_ids: list[int] | None = None,
        batch_dim: int = 0,
    ) -> None:
        NeuronAttribution.__init__(self, forward_func, layer, device_ids)
        GradientAttribution.__init__(self, forward_func)
        check_modules(layer, source_layer)
        check_devices(device_ids)
        self.source_layer = source_layer
        self.num_heads = optional_count("num_heads", num_heads)
        self.norm = choice("norm", norm, NORMS)
        if not is_integer(batch_dim) or batch_dim not in (0, 1):
            raise ValueError(f"batch_dim must be 0 or 1, got {batch_dim!r}")
        self.batch_dim = int(batch_dim)
        self._multiply_by_inputs = flag("multiply_by_inputs", multiply_by_inputs)

    @property
    def multiplies_by_inputs(self) -> bool:
        """Whether columns of the Jacobians are scaled by the inputs."""
        return self._multiply_by_inputs

    @property
    def _layers(self) -> list[Module]:
        return list(self.layer) if isinstance(self.layer, list | tuple) else [self.layer]

    @log_usage(part_of_slo=True)  # type: ignore[untyped-decorator]
    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        neuron_selector: int | slice | Sequence[int] | Tensor | None = None,
        additional_forward_args: object = None,
        attribute_to_neuron_input: bool = False,
        n_probes: int | None = None,
        tolerance: float | None = None,
        seed: int = 0,
        internal_batch_size: int | None = None,
        show_progress: bool = False,
        return_standard_error: bool = False,
        mode: str | None = None,
        precision: str = "highest",
        direction: Tensor | Sequence[Tensor] | None = None,
    ) -> Attribution | tuple[Attribution, ...]:
        r"""Attribute the target to the source.

        Works under ``torch.no_grad()`` and ``torch.inference_mode()``, and leaves hooks, gradient
        flags, modes and random states as they were.

        Args:
            inputs (Tensor or tuple of Tensors): What ``forward_func`` is called with. Without a
                ``source_layer`` they are the sources, ``[batch, position, width]`` each; with one they
                may be token ids.
            neuron_selector (int, slice or list of int, optional): Query positions, in the order of the
                result, which keeps its query axis. Fewer queries may take less work. Default: ``None``,
                all.
            additional_forward_args (Any, optional): Further arguments of ``forward_func``, which
                nothing is attributed to; a tuple for several. Default: ``None``.
            attribute_to_neuron_input (bool, optional): Take the target module's input instead of its
                output. Default: ``False``.
            n_probes (int, optional): Estimate from this many random directions of each source token
                instead of all. Rows of a batch share their directions. Default: ``None``, exact.
            tolerance (float, optional): Double the probes until the standard error of every
                contribution is at most this. Default: ``None``.
            seed (int, optional): Seed of the probes. Default: ``0``.
            internal_batch_size (int, optional): Rows of the batch times tangents that are carried at
                once. Default: ``None``: what the caches of a CPU hold, or a quarter of the free memory
                of a device.
            show_progress (bool, optional): Show a progress bar. Default: ``False``.
            return_standard_error (bool, optional): Return ``(contributions, standard_errors)``. Exact
                contributions have a standard error of zero. Default: ``False``.
            mode (str, optional): Force ``"forward"`` or ``"reverse"``. Default: ``None``.
            precision (str, optional): Precision of float32 matrix products, ``"highest"``, ``"high"`` or
                ``"medium"`` as in ``torch.set_float32_matmul_precision``, restored afterwards. Lower
                ones are faster where the processor has units for them. Default: ``"highest"``.
            direction (Tensor or list of Tensors, optional): A vector :math:`v` in the space of the target,
                :math:`r_{ij} = \| v^\top \partial y_j / \partial x_i \|`: how much of ``x_i`` is in the
                component of ``y_j`` along it. ``[d_head]``, ``[head, d_head]`` or
                ``[batch, head, query, d_head]``; for a target without a head axis ``[width]`` or
                ``[batch, query, width]``. A list of layers may have a list of them. Default: ``None``, the
                whole Jacobian.

        Returns:
            *Tensor* ``[batch, head, query, key]`` of contributions: rows sum to 1, or are zero where
            nothing of a source reaches the target. A tuple of sources gives a tuple of tensors, whose
            rows sum to 1 together. A list of layers gives a list of these.

        Raises:
            ValueError: If a module is not called or the target is called twice, the source does not come
                before the target, no path joins them, a tensor lacks the axes above, a dropout is active, the
                model keeps state between forward passes, or an argument is out of its range.
            TypeError: If token ids are passed without a ``source_layer``, or an argument is of a wrong
                type.
        """
        sources = inputs if isinstance(inputs, tuple) else (inputs,)
        check_inputs(sources, self.source_layer is not None, self.batch_dim)
        flag("attribute_to_neuron_input", attribute_to_neuron_input)
        flag("show_progress", show_progress)
        flag("return_standard_error", return_standard_error)
        internal_batch_size = optional_count("internal_batch_size", internal_batch_size)
        query = Query(
            norm=self.norm,
            multiply_by_inputs=self._multiply_by_inputs,
            direction=direction,
            neuron_selector=neuron_selector,
            n_probes=n_probes,
            tolerance=tolerance,
            seed=seed,
            mode=mode,
            precision=precision,
        )
        if return_standard_error and query.n_probes == 1:
            raise ValueError(ONE_PROBE)
        extra = _as_tuple(additional_forward_args)
        forward_pass = self._forward_pass(sources, extra, attribute_to_neuron_input)
        answers = self._answers(forward_pass, query, internal_batch_size, show_progress)
        is_tuple = isinstance(inputs, tuple) and self.source_layer is None
        return self._formatted(answers, is_tuple, return_standard_error)

    def _forward_pass(
        self, sources: tuple[Tensor, ...], extra: tuple[object, ...], at_input: bool
    ) -> ForwardPass:
        return ForwardPass(
            self.forward_func,
            sources,
            extra,
            list(dict.fromkeys(self._layers)),
            self.source_layer,
            at_input,
            self.num_heads,
            self.batch_dim,
        )

    def _answers(
        self, forward_pass: ForwardPass, query: Query, internal_batch_size: int | None, show_progress: bool
    ) -> list[Answer]:
        """The answers for the parts that ``internal_batch_size`` splits the batch into."""
        with full_precision():
            rehearse(forward_pass)
        batch = examples_of(forward_pass)
        if internal_batch_size is not None and internal_batch_size < batch:
            check_split(forward_pass)
        chunk = internal_batch_size and max(internal_batch_size // batch, 1)
        answers = []
        with ExitStack() as bars:
            for rows in splits(batch, internal_batch_size):
                part = replace(query, direction=direction_rows(query.direction, rows, batch))
                progress = _bar(bars) if show_progress else None
                try:
                    answers.append(answer(part_of(forward_pass, rows), part, chunk=chunk, progress=progress))
                except NotFiniteError as error:
                    raise error.renumbered(range(batch)[rows]) from error
        return answers

    def _formatted(
        self, answers: list[Answer], is_tuple: bool, with_error: bool
    ) -> Attribution | tuple[Attribution, ...]:
        """Contributions, and standard errors if asked for, in the form of the inputs and layers."""
        found = {
            layer: _contributions(answers, index) for index, layer in enumerate(dict.fromkeys(self._layers))
        }
        several = isinstance(self.layer, list | tuple)
        forms = []
        for part in zip(*(found[layer] for layer in self._layers), strict=True):
            values = [tensors if is_tuple else tensors[0] for tensors in part]
            forms.append(values if several else values[0])
        return tuple(forms) if with_error else forms[0]

    def compute_convergence_delta(self, *args: object, **kwargs: object) -> NoReturn:
        """Not defined here.

        Raises:
            NotImplementedError: Always. Contributions are shares of a norm, not of a difference of
                outputs, so there is nothing that they should add up to but 1.
        """
        raise NotImplementedError(
            "hidden token attribution has no convergence delta: its rows sum to 1 by definition, not to "
            "a difference of outputs; use return_standard_error=True to judge an estimate"
        )


def _contributions(answers: list[Answer], index: int) -> tuple[tuple[Tensor, ...], ...]:
    """Contributions and errors of one layer, over all splits of the batch, each split by source."""
    parts = [shares(one.energies[index]) for one in answers]
    first = answers[0]
    values = torch.cat([value for value, _ in parts])
    errors = [error for _, error in parts if error is not None]
    return tuple(
        tuple(
            part.to(first.dtype).contiguous()
            for part in torch.split(whole if first.has_heads[index] else whole.squeeze(1), first.lengths, -1)
        )
        for whole in (values, torch.cat(errors) if errors else torch.zeros_like(values))
    )


def _as_tuple(extra: object) -> tuple[object, ...]:
    if extra is None:
        return ()
    return extra if isinstance(extra, tuple) else (extra,)


def _bar(stack: ExitStack) -> Progress:
    def start(total: int) -> Callable[[int], object]:
        bar = stack.enter_context(tqdm(desc="Hidden token attribution", total=total))
        return lambda count: bar.update(count)

    return start
