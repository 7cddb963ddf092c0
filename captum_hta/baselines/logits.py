"""Attributions of one logit, to attention patterns and to embeddings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import ClassVar

import numpy as np
import torch
from captum.attr import InputXGradient, IntegratedGradients, Saliency
from torch import Tensor
from torch.nn import Module

from captum_hta.baselines.base import Baseline
from captum_hta.jacobian.linearize.lost_derivatives import DerivativeWatch, refuse_loss
from captum_hta.model.activations import Activations, promoted
from captum_hta.model.protocol import Model
from captum_hta.model.sites import Site, replaced


class LogitBaseline(Baseline):
    """A method that explains one logit.

    Args:
        model: An adapter around a model with a head.
        position: The token position of the logit, negative from the end; ignored for classifiers.
        token: The logit: a token id, or for a classifier the number of a class. Default: ``None``, the
            largest logit.

    Raises:
        TypeError: If the position or token is not an int.
        ValueError: From ``attribute``, if the model has no logits, or not this one.
    """

    def __init__(self, model: Model, position: int = -1, token: int | None = None) -> None:
        super().__init__(model)
        for name, value in (("position", position), ("token", token)):
            if isinstance(value, bool) or not isinstance(value, int | None):
                raise TypeError(f"{name} must be an int, got {value!r}")
        self.position, self.token = position, token

    def check(self, activations: Activations) -> None:
        """Check that no derivative is lost between the embedding and the logits.

        Raises:
            LostDerivativeError: If one is, as in quantised layers; names the operator.
        """
        watch = DerivativeWatch()

        def entered(x: Tensor) -> Tensor:
            leaf = x.detach().clone().requires_grad_()
            watch.mark_source(leaf)
            return leaf.clone()

        with torch.enable_grad(), replaced(self.model.source(0), entered), watch:
            logits = self.model.logits(*activations.repeated(1))
        found = watch.dependence(logits)
        if found is not None and found.lost is not None:
            module = found.lost.module
            refuse_loss(found.lost, "" if module is None else f" of {type(module).__qualname__}", "the logit")

    def logit_from(self, activations: Activations, place: Site | Module) -> Callable[..., Tensor]:
        """The logit as a function of the tensor at a place, ``[copy, ...]``, and the model's arguments."""
        token = self._token(activations)

        def logit(value: Tensor, *arguments: object) -> Tensor:
            with replaced(place, lambda given: value.to(given.dtype).reshape(given.shape)):
                return self._at(self.model.logits(*arguments))[:, token]

        return logit

    def _token(self, activations: Activations) -> int:
        """The number of the logit in the model's output."""
        with torch.no_grad():
            logits = self.model.logits(*activations.repeated(1))
        if logits.dim() == 3 and not -logits.shape[1] <= self.position < logits.shape[1]:
            raise ValueError(
                f"position must be between {-logits.shape[1]} and {logits.shape[1] - 1}, as the text has "
                f"{logits.shape[1]} tokens, got {self.position}"
            )
        last = activations.finite("logits", self._at(logits)[0])
        check_token(self.token, len(last))
        return int(last.argmax()) if self.token is None else self.token

    def _at(self, logits: Tensor) -> Tensor:
        """Logits of all tokens or classes, ``[copy, token]``."""
        return logits if logits.dim() == 2 else logits[:, self.position]

    def head_gradients(self, activations: Activations, token: int) -> Tensor:
        """Gradients of the logit with respect to every head's output, ``[layer, head, query, d_head]``."""
        outputs: list[Tensor] = []

        def split_off(z: Tensor) -> Tensor:
            outputs.append(z.clone() if z.requires_grad else z.detach().clone().requires_grad_())
            return outputs[-1]

        with torch.enable_grad(), ExitStack() as stack:
            for layer in range(self.model.num_layers):
                stack.enter_context(replaced(self.model.target(layer, "head"), split_off))
            logit = self._at(self.model.logits(*activations.repeated(1)))[:, token]
        found = torch.autograd.grad(logit.sum(), outputs)
        heads = [promoted(g).reshape(*g.shape[:2], self.model.num_heads, -1).transpose(1, 2) for g in found]
        return torch.cat(heads)


def check_token(token: int | None, count: int) -> None:
    """Check the number of a logit, which may be ``None``.

    Raises:
        ValueError: If the model has no logit of that number.
    """
    if token is not None and not 0 <= token < count:
        raise ValueError(f"token must be between 0 and {count - 1}, the logits of the model, got {token}")


class SteppedBaseline(LogitBaseline):
    """A method that sums gradients along a path from a baseline input to the input.

    Args:
        model: An adapter around a model with a head.
        position: The token position of the logit, negative from the end.
        token: The logit. Default: ``None``, the largest.
        n_steps: Number of steps along the path. Default: ``None``, :attr:`default_steps`.

    Raises:
        ValueError: If ``n_steps`` is not a positive int.
    """

    default_steps: ClassVar[int] = 50

    def __init__(
        self, model: Model, position: int = -1, token: int | None = None, n_steps: int | None = None
    ) -> None:
        super().__init__(model, position, token)
        self.n_steps = self.default_steps if n_steps is None else n_steps
        if isinstance(self.n_steps, bool) or not isinstance(self.n_steps, int) or self.n_steps < 1:
            raise ValueError(f"n_steps must be a positive int, got {n_steps!r}")


class GradientTimesAttention(LogitBaseline):
    r"""Each attention weight times the gradient of the logit with respect to it,
    :math:`a_{ji}\, \partial F / \partial a_{ji}`.

    Since :math:`z_j = \sum_i a_{ji} v_i`, that gradient is the product of the gradient with respect to the
    head's output and the value; this also holds for models that discard edits of their patterns.

    References:
        Captum's tutorial "Interpreting BERT Models (Part 2)"; the one-step case of Hao et al. 2021.
    """

    name = "gradient x attention"

    def values(self, activations: Activations) -> Tensor:
        """``[layer, head, query, key]``."""
        gradients = self.head_gradients(activations, self._token(activations))
        return activations.pattern * (gradients @ activations.value.mT)


class IntegratedAttention(SteppedBaseline):
    r"""Integrated gradients on each layer's pattern, from no attention to the actual pattern:
    :math:`a_{ji} \int_0^1 \partial F(t A) / \partial a_{ji}\, dt`, with Captum's ``IntegratedGradients``.

    The values of a layer add up to the logit minus the logit without that layer's heads.

    It takes the arguments of :class:`SteppedBaseline`.

    References:
        Hao et al., "Self-Attention Attribution: Interpreting Information Interactions Inside Transformer",
        AAAI 2021; Sundararajan et al., "Axiomatic Attribution for Deep Networks", ICML 2017.
    """

    name = "integrated attention"

    def values(self, activations: Activations) -> Tensor:
        """``[layer, head, query, key]``."""
        z = (
            (activations.pattern @ activations.value).transpose(1, 2).flatten(2)
        )  # [layer, query, head * d_head]
        gradients = [self._mean_gradient(activations, layer, one[None]) for layer, one in enumerate(z)]
        return activations.pattern * (torch.stack(gradients) @ activations.value.mT)

    def _mean_gradient(self, activations: Activations, layer: int, z: Tensor) -> Tensor:
        """The mean gradient along the path from zero to ``z``, ``[head, query, d_head]``."""
        logit = self.logit_from(activations, self.model.target(layer, "head"))
        mean: Tensor = IntegratedGradients(logit, multiply_by_inputs=False).attribute(
            z, additional_forward_args=activations.repeated(1), n_steps=self.n_steps, internal_batch_size=16
        )
        return promoted(mean[0]).reshape(z.shape[1], self.model.num_heads, -1).transpose(0, 1)


class AttentionConductance(SteppedBaseline):
    r"""The change of the logit that flows through each attention weight while the embedding grows from zero:
    :math:`\sum_k \partial F / \partial a\, (a_{k+1} - a_k)` over Gauss-Legendre points of the path, as
    Captum's ``LayerConductance`` gives on the pattern.

    It takes the arguments of :class:`SteppedBaseline`.

    Raises:
        ValueError: From ``attribute``, also if the model is in half precision, whose rounding is larger than
            the steps.

    References:
        Dhamdhere et al., "How Important Is a Neuron?", ICLR 2019; Captum's tutorial "Interpreting BERT Models
        (Part 2)".
    """

    name = "attention conductance"
    default_steps = 20

    def values(self, activations: Activations) -> Tensor:
        """``[layer, head, query, key]``."""
        if self.model.dtype.itemsize < 4:
            raise ValueError(
                f"steps of attention are lost in the rounding of {self.model.dtype}: "
                f"load {self.model.name} in float32"
            )
        token = self._token(activations)
        points = (np.polynomial.legendre.leggauss(self.n_steps + 1)[0] + 1) / 2
        pattern, gradient = self._at_point(activations, float(points[0]), token)
        total = torch.zeros_like(pattern)
        for point in points[1:]:
            previous, slope = pattern, gradient
            pattern, gradient = self._at_point(activations, float(point), token)
            total += slope * (pattern - previous)
        return total

    def _at_point(self, activations: Activations, point: float, token: int) -> tuple[Tensor, Tensor]:
        """Patterns and the gradients with respect to them, with the embedding scaled by ``point``."""
        scaled = Activations(self.model, activations.batch)
        with replaced(self.model.source(self.model.first_entry), lambda x: point * x):
            return scaled.pattern, self.head_gradients(scaled, token) @ scaled.value.mT


class EmbeddingBaseline(LogitBaseline):
    """An attribution of the logit to the embedding that enters the first block, by one of Captum's classes.

    Only the row at the logit's position holds numbers; the others are NaN.
    """

    axes = "batch query key"

    def values(self, activations: Activations) -> Tensor:
        """``[query, key]``."""
        x = activations.hidden[:1].clone().requires_grad_()
        logit = self.logit_from(activations, self.model.source(self.model.first_entry))
        row = promoted(self.summary(self.attributed(logit, x, activations.repeated(1))[0]))
        out = row.new_full((len(row), len(row)), torch.nan)
        out[self.position] = row
        return out

    def defined(self, values: Tensor) -> Tensor:
        """The row of the logit's position."""
        return values[self.position]

    @abstractmethod
    def attributed(self, logit: Callable[..., Tensor], x: Tensor, arguments: tuple[object, ...]) -> Tensor:
        """The attribution to each component of ``x``, ``[1, token, width]``."""

    def summary(self, components: Tensor) -> Tensor:
        """One number for each token: the sum over components, which keeps attributions complete."""
        return components.sum(-1)


class EmbeddingSaliency(EmbeddingBaseline):
    """Captum's ``Saliency``: the norm of the gradient at each token.

    References:
        Simonyan et al., "Deep Inside Convolutional Networks", ICLR workshop 2014.
    """

    name = "saliency"

    def attributed(self, logit: Callable[..., Tensor], x: Tensor, arguments: tuple[object, ...]) -> Tensor:
        """The attribution to each component of ``x``, ``[1, token, width]``."""
        found: Tensor = Saliency(logit).attribute(x, additional_forward_args=arguments)
        return found

    def summary(self, components: Tensor) -> Tensor:
        """The norm of the gradient."""
        norms: Tensor = torch.linalg.vector_norm(components, dim=-1)
        return norms


class EmbeddingInputXGradient(EmbeddingBaseline):
    """Captum's ``InputXGradient``.

    References:
        Shrikumar et al., "Not Just a Black Box", 2016, arXiv 1605.01713.
    """

    name = "input x gradient"

    def attributed(self, logit: Callable[..., Tensor], x: Tensor, arguments: tuple[object, ...]) -> Tensor:
        """The attribution to each component of ``x``, ``[1, token, width]``."""
        found: Tensor = InputXGradient(logit).attribute(x, additional_forward_args=arguments)
        return found


class EmbeddingIntegratedGradients(SteppedBaseline, EmbeddingBaseline):
    """Captum's ``IntegratedGradients``, from a zero embedding.

    It takes the arguments of :class:`SteppedBaseline`.

    References:
        Sundararajan et al. 2017.
    """

    name = "integrated gradients"

    def attributed(self, logit: Callable[..., Tensor], x: Tensor, arguments: tuple[object, ...]) -> Tensor:
        """The attribution to each component of ``x``, ``[1, token, width]``."""
        found: Tensor = IntegratedGradients(logit).attribute(
            x, additional_forward_args=arguments, n_steps=self.n_steps, internal_batch_size=16
        )
        return found
