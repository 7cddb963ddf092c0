"""Hidden Token Attribution as a Captum attribution class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from captum._utils.progress import progress
from captum.attr import GradientAttribution, NeuronAttribution
from captum.log import log_usage
from torch import Tensor
from torch.nn import Module

from captum_hta.jacobian.directions import check_direction
from captum_hta.jacobian.engine import Answer, Question, answer
from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.jacobian.norms import check_norm, shares
from captum_hta.jacobian.query import check_probes


class HiddenTokenAttribution(NeuronAttribution, GradientAttribution):
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
    reverse for a few query positions. Where a model holds an operator without a forward derivative, it
    takes reverse. *Probes* (``n_probes``, ``tolerance``) estimate the result from a few random tangents
    of each source token.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020 (targets are hidden embeddings).
        Pascual et al., "Telling BERT's Full Story: from Local Attention to Global Aggregation", EACL 2021
        (targets are the outputs of single heads).

    Args:
        forward_func (Callable or torch.nn.Module): The model, or a function that runs it.
        layer (torch.nn.Module or list of torch.nn.Module): The target: a module whose output (or input,
            see ``attribute_to_neuron_input``) is ``[batch, position, width]`` or
            ``[batch, position, head, d_head]``. For several modules one pass serves all.
        source_layer (torch.nn.Module, optional): The source: a module whose output is
            ``[batch, position, width]``. Default: ``None``, the inputs themselves.
        num_heads (int, optional): Number of equal parts of the target's width. Default: ``None``: the
            head axis that the target has; a target without one gives ``[batch, query, key]``.
        norm (str, optional): ``"frobenius"``, of the whole Jacobian; ``"spectral"``, its largest
            singular value; ``"sum"``, the Euclidean norm of the gradient of the summed components of
            :math:`y_j`, which some public code uses (nearly constant, so without meaning, behind a
            LayerNorm). Default: ``"frobenius"``.
        multiply_by_inputs (bool, optional): Scale column ``d`` of each Jacobian by ``x_i[d]``.
            Default: ``False``.
        device_ids (list of int, optional): As in Captum, where ``forward_func`` applies a
            ``DataParallel`` model. Only one device is supported.

    Raises:
        ValueError: If ``norm`` or ``num_heads`` is not valid, or several devices are named.
        TypeError: If ``layer`` or ``source_layer`` is not a module.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
        >>> hta = HiddenTokenAttribution(model, model.linear1, num_heads=2)
        >>> contributions = hta.attribute(torch.randn(3, 5, 8))
        >>> contributions.shape
        torch.Size([3, 2, 5, 5])
        >>> torch.allclose(contributions.sum(-1), torch.ones(3, 2, 5))
        True
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Module | Sequence[Module],
        source_layer: Module | None = None,
        num_heads: int | None = None,
        norm: str = "frobenius",
        multiply_by_inputs: bool = False,
        device_ids: list[int] | None = None,
    ) -> None:
        NeuronAttribution.__init__(self, forward_func, layer, device_ids)
        GradientAttribution.__init__(self, forward_func)
        _check_setting(layer, source_layer, num_heads, norm, device_ids)
        self.source_layer = source_layer
        self.num_heads = num_heads
        self.norm = norm
        self._multiply_by_inputs = multiply_by_inputs

    @property
    def multiplies_by_inputs(self) -> bool:
        """Whether columns of the Jacobians are scaled by the inputs."""
        return self._multiply_by_inputs

    @property
    def _layers(self) -> list[Module]:
        return list(self.layer) if isinstance(self.layer, list | tuple) else [self.layer]

    @log_usage(part_of_slo=True)
    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        neuron_selector: int | slice | Sequence[int] | Tensor | None = None,
        additional_forward_args: Any = None,
        attribute_to_neuron_input: bool = False,
        n_probes: int | None = None,
        tolerance: float | None = None,
        seed: int = 0,
        internal_batch_size: int | None = None,
        show_progress: bool = False,
        return_standard_error: bool = False,
        mode: str | None = None,
        precision: str = "highest",
        direction: Tensor | list[Tensor] | None = None,
    ) -> Any:
        r"""Attribute the target to the source.

        Works under ``torch.no_grad()`` and ``torch.inference_mode()``, and leaves hooks, gradient
        flags, modes and random states as they were.

        Args:
            inputs (Tensor or tuple of Tensors): What ``forward_func`` is called with. Without a
                ``source_layer`` they are the sources, ``[batch, position, width]`` each; with one they
                may be token ids.
            neuron_selector (int, slice or list of int, optional): Query positions, in the order of the
                result, whose query axis stays. Fewer queries may be less work. Default: ``None``, all.
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
                :math:`r_{ij} = \| v^\top \partial y_j / \partial x_i \|`: how much of ``x_i`` is in what
                ``y_j`` says along it. ``[d_head]``, ``[head, d_head]`` or ``[batch, head, query, d_head]``;
                of a target without a head axis ``[width]`` or ``[batch, query, width]``. A list of layers
                may have a list of them. Default: ``None``, the whole Jacobian.

        Returns:
            *Tensor* ``[batch, head, query, key]`` of contributions: rows sum to 1, or are zero where
            nothing of a source reaches the target. A tuple of sources gives a tuple of tensors, whose
            rows sum to 1 together. A list of layers gives a list of these.

        Raises:
            ValueError: If a module is not called, the source does not come before the target, no path
                joins them, a tensor lacks the axes above, a dropout is active, or an argument is out
                of its range.
            TypeError: If token ids are passed without a ``source_layer``, or an argument is of a wrong
                type.
        """
        is_tuple = isinstance(inputs, tuple)
        inputs = inputs if is_tuple else (inputs,)
        extra = _as_tuple(additional_forward_args)
        _check_inputs(inputs, self.source_layer)
        check_probes(n_probes, tolerance, self.norm, return_standard_error)
        check_direction(direction, self.norm, n_probes, tolerance, mode)
        _check_internal_batch(internal_batch_size)
        answers = []
        with ExitStack() as bars:
            for rows in _splits(len(inputs[0]), internal_batch_size):
                forward_pass = ForwardPass(
                    self.forward_func,
                    _rows(inputs, rows, len(inputs[0])),
                    _rows(extra, rows, len(inputs[0])),
                    list(dict.fromkeys(self._layers)),
                    self.source_layer,
                    attribute_to_neuron_input,
                )
                question = Question(
                    norm=self.norm,
                    num_heads=self.num_heads,
                    neuron_selector=neuron_selector,
                    multiply_by_inputs=self._multiply_by_inputs,
                    direction=_direction_rows(direction, rows, len(inputs[0])),
                    n_probes=n_probes,
                    tolerance=tolerance,
                    keys=[(seed,)] * len(range(len(inputs[0]))[rows]),
                    mode=mode,
                    precision=precision,
                    chunk=internal_batch_size and max(internal_batch_size // len(inputs[0]), 1),
                    progress=_bar(bars) if show_progress else None,
                )
                answers.append(answer(forward_pass, question))
        return self._formatted(answers, is_tuple and self.source_layer is None, return_standard_error)

    def _formatted(self, answers: list[Answer], is_tuple: bool, with_error: bool) -> Any:
        """Contributions, and standard errors if asked for, in the form of the inputs and layers."""
        found = dict(
            zip(
                dict.fromkeys(self._layers),
                (_contributions(answers, index) for index in range(len(answers[0].energies))),
                strict=True,
            )
        )
        by_layer = [found[layer] for layer in self._layers]
        several = isinstance(self.layer, list | tuple)
        forms = []
        for part in zip(*by_layer, strict=True):
            values = [tensors if is_tuple else tensors[0] for tensors in part]
            forms.append(values if several else values[0])
        return tuple(forms) if with_error else forms[0]

    def compute_convergence_delta(self, *args: Any, **kwargs: Any) -> NoReturn:
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
    """Of one layer, over all splits of the batch: contributions and errors, each split by source."""
    parts = [shares(one.energies[index]) for one in answers]
    first = answers[0]
    values = torch.cat([value for value, _ in parts])
    errors = torch.zeros_like(values) if parts[0][1] is None else torch.cat([e for _, e in parts])
    return tuple(
        tuple(
            part.to(first.dtype).contiguous()
            for part in (whole if first.split[index] else whole.squeeze(1)).split(first.lengths, -1)
        )
        for whole in (values, errors)
    )


def _as_tuple(extra: Any) -> tuple[Any, ...]:
    if extra is None:
        return ()
    return extra if isinstance(extra, tuple) else (extra,)


def _splits(batch: int, internal_batch_size: int | None) -> Iterator[slice]:
    """Parts of the batch that ``internal_batch_size`` allows at once."""
    step = batch if internal_batch_size is None else min(internal_batch_size, batch)
    for start in range(0, batch, step):
        yield slice(start, min(start + step, batch))


def _rows(values: tuple[Any, ...], rows: slice, batch: int) -> tuple[Any, ...]:
    """Those rows of each tensor that has one for each example, as Captum splits a batch."""
    if rows == slice(0, batch):
        return values
    return tuple(
        value[rows] if isinstance(value, Tensor) and value.dim() and len(value) == batch else value
        for value in values
    )


def _direction_rows(direction: Any, rows: slice, batch: int) -> Any:
    """Those examples of directions that have a batch axis."""
    if isinstance(direction, list | tuple):
        return [_direction_rows(one, rows, batch) for one in direction]
    has_batch = isinstance(direction, Tensor) and direction.dim() >= 3 and len(direction) == batch
    return direction[rows] if has_batch else direction


def _bar(stack: ExitStack) -> Callable[[int], Callable[[int], object]]:
    def start(total: int) -> Callable[[int], object]:
        return stack.enter_context(progress(desc="Hidden token attribution", total=total)).update

    return start


def _check_setting(
    layer: Any, source_layer: Any, num_heads: int | None, norm: str, device_ids: list[int] | None
) -> None:
    layers = layer if isinstance(layer, list | tuple) else [layer]
    if not layers or not all(isinstance(item, Module) for item in layers):
        raise TypeError(f"layer must be a torch.nn.Module or a list of them, got {layer!r}")
    if source_layer is not None and not isinstance(source_layer, Module):
        raise TypeError(f"source_layer must be a torch.nn.Module or None, got {source_layer!r}")
    check_norm(norm)
    if num_heads is not None and (not isinstance(num_heads, int) or num_heads < 1):
        raise ValueError(f"num_heads must be a positive int or None, got {num_heads!r}")
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"device_ids names {len(device_ids)} devices, but the derivative is taken on one: pass the "
            "module that DataParallel wraps"
        )


def _check_internal_batch(size: Any) -> None:
    if size is not None and (not isinstance(size, int) or size < 1):
        raise ValueError(f"internal_batch_size must be a positive int or None, got {size!r}")


def _check_inputs(inputs: tuple[Any, ...], source_layer: Module | None) -> None:
    for value in inputs:
        if not isinstance(value, Tensor):
            raise TypeError(f"inputs must be a tensor or a tuple of tensors, got {type(value).__name__}")
    if not inputs or inputs[0].dim() == 0 or len(inputs[0]) == 0:
        raise ValueError("inputs hold no example: pass a batch of at least one")
    sizes = {value.shape[:1] for value in inputs}
    if len(sizes) > 1 and source_layer is None:
        raise ValueError(
            f"inputs differ in their number of examples, {sorted(size.numel() for size in sizes)}: the "
            "first dimension of each is the batch"
        )
    if source_layer is not None:
        return
    for value in inputs:
        if not value.is_floating_point():
            raise TypeError(
                f"inputs of type {value.dtype} have no derivative: name the module that embeds them (or "
                "another one before the target) as source_layer"
            )
        if value.dim() == 3 and not value.shape[1]:
            raise ValueError("inputs hold no position: pass sequences of at least one token")
        if value.dim() != 3:
            raise ValueError(
                f"inputs must be [batch, position, width] to be sources, got {list(value.shape)}: insert "
                "the missing axis, or name a source_layer"
            )
