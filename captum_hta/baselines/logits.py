"""Attributions of one logit, to attention patterns and to embeddings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

import numpy as np
import torch
from captum.attr import InputXGradient, IntegratedGradients, Saliency
from torch import Tensor
from torch.nn import Module

from captum_hta.baselines.base import Baseline, Example, wide
from captum_hta.model.protocol import Model
from captum_hta.model.sites import Site, replaced


class LogitBaseline(Baseline):
    """A method that explains one logit.

    Args:
        model: An adapter around a model with a head.
        position: Where the logit is, negative from the end; of a classifier it does not matter.
        token: Which logit, by its token's id or of a class its number. Default: ``None``, the largest.

    Raises:
        ValueError: On ``attribute``, if the model has no logits, or not that one.
    """

    def __init__(self, model: Model, position: int = -1, token: int | None = None) -> None:
        super().__init__(model)
        self.position, self.token = position, token

    def score(self, example: Example, place: Site | Module) -> Callable[..., Tensor]:
        """The logit as a function of what is at a place, ``[copy, ...]``, and of the model's arguments."""
        token = self._token(example)

        def logit(value: Tensor, *arguments: Any) -> Tensor:
            with replaced(place, lambda given: value.to(given.dtype).reshape(given.shape)):
                return self._pick(self.model.logits(*arguments), token)

        return logit

    def _token(self, example: Example) -> int:
        with torch.no_grad():
            logits = self.model.logits(*example.repeated(1))
        if logits.dim() == 3 and not -logits.shape[1] <= self.position < logits.shape[1]:
            raise ValueError(f"position {self.position} is none: the text has {logits.shape[1]} tokens")
        last = self._at(logits)[0]
        if self.token is not None and not 0 <= self.token < len(last):
            raise ValueError(f"token {self.token} is none: the model has logits of {len(last)}")
        return int(last.argmax()) if self.token is None else self.token

    def _at(self, logits: Tensor) -> Tensor:
        return logits if logits.dim() == 2 else logits[:, self.position]

    def _pick(self, logits: Tensor, token: int) -> Tensor:
        return self._at(logits)[:, token]

    def gradients(self, example: Example, token: int) -> Tensor:
        """Of the logit with respect to every head's output, ``[layer, head, query, d_head]``."""
        outputs: list[Tensor] = []

        def split_off(z: Tensor) -> Tensor:
            outputs.append(z.clone() if z.requires_grad else z.detach().clone().requires_grad_())
            return outputs[-1]

        with torch.enable_grad(), ExitStack() as stack:
            for layer in range(self.model.num_layers):
                stack.enter_context(replaced(self.model.target(layer, "head"), split_off))
            logit = self._pick(self.model.logits(*example.repeated(1)), token)
        found = torch.autograd.grad(logit.sum(), outputs)
        heads = [wide(one).reshape(*one.shape[:2], self.model.num_heads, -1).transpose(1, 2) for one in found]
        return torch.cat(heads)


class SteppedBaseline(LogitBaseline):
    """A method that goes from a baseline to what is there in steps.

    Args:
        model: An adapter around a model with a head.
        position: Where the logit is, negative from the end.
        token: Which logit. Default: ``None``, the largest.
        n_steps: Steps of the mode. Default: ``None``, :attr:`steps`.

    Raises:
        ValueError: If ``n_steps`` is no positive int.
    """

    steps: ClassVar[int] = 50

    def __init__(
        self, model: Model, position: int = -1, token: int | None = None, n_steps: int | None = None
    ) -> None:
        super().__init__(model, position, token)
        self.n_steps = self.steps if n_steps is None else n_steps
        if not isinstance(self.n_steps, int) or self.n_steps < 1:
            raise ValueError(f"n_steps must be a positive int, got {n_steps!r}")


class GradientTimesAttention(LogitBaseline):
    r"""Each attention weight times the gradient of the logit with respect to it,
    :math:`a_{ji}\, \partial F / \partial a_{ji}`.

    The gradient is that of the head's output times the value, since :math:`z_j = \sum_i a_{ji} v_i`; so it is
    right also where edits of a pattern would be discarded.

    References:
        Captum's tutorial "Interpreting BERT Models (Part 2)"; the one-step case of Hao et al. 2021.
    """

    name = "gradient x attention"

    def of(self, example: Example) -> Tensor:
        """The values of one text, without the batch axis."""
        return example.pattern * (self.gradients(example, self._token(example)) @ example.value.mT)


class IntegratedAttention(SteppedBaseline):
    r"""Integrated gradients on each layer's pattern, from no attention to the pattern as it is:
    :math:`a_{ji} \int_0^1 \partial F(t A) / \partial a_{ji}\, dt`, with Captum's ``IntegratedGradients``.

    Of each layer the values add up to the logit less what it is without that layer's heads.

    Args:
        model: An adapter around a model with a head.
        position: Where the logit is, negative from the end.
        token: Which logit. Default: ``None``, the largest.
        n_steps: Steps of the integral.

    References:
        Hao et al., "Self-Attention Attribution: Interpreting Information Interactions Inside Transformer",
        AAAI 2021; Sundararajan et al., "Axiomatic Attribution for Deep Networks", ICML 2017.
    """

    name = "integrated attention"

    def of(self, example: Example) -> Tensor:
        """The values of one text, without the batch axis."""
        z = (example.pattern @ example.value).transpose(1, 2).flatten(2)  # [layer, query, head * d_head]
        gradients = [self._mean_gradient(example, layer, z[layer : layer + 1]) for layer in range(len(z))]
        return example.pattern * (torch.stack(gradients) @ example.value.mT)

    def _mean_gradient(self, example: Example, layer: int, z: Tensor) -> Tensor:
        """Over the path, ``[head, query, d_head]``."""
        method = IntegratedGradients(
            self.score(example, self.model.target(layer, "head")), multiply_by_inputs=False
        )
        mean = method.attribute(
            z, additional_forward_args=example.repeated(1), n_steps=self.n_steps, internal_batch_size=16
        )
        return wide(mean[0]).unflatten(1, (self.model.num_heads, -1)).transpose(0, 1)


class AttentionConductance(SteppedBaseline):
    r"""What flows through each attention weight while the embedding grows from zero:
    :math:`\sum_k \partial F / \partial a\, (a_{k+1} - a_k)` over Gauss-Legendre points of the mode, as
    Captum's ``LayerConductance`` on the pattern.

    Args:
        model: An adapter around a model with a head.
        position: Where the logit is, negative from the end.
        token: Which logit. Default: ``None``, the largest.
        n_steps: Steps of the mode.

    References:
        Dhamdhere et al., "How Important Is a Neuron?", ICLR 2019; Captum's tutorial "Interpreting BERT Models
        (Part 2)".
    """

    name = "attention conductance"

    steps = 20

    def of(self, example: Example) -> Tensor:
        """The values of one text, without the batch axis."""
        token = self._token(example)
        points = (np.polynomial.legendre.leggauss(self.n_steps + 1)[0] + 1) / 2
        total: Tensor | int = 0
        before = None
        for point in points:
            pattern, gradient = self._at_point(example, float(point), token)
            if before is not None:
                total = total + before[1] * (pattern - before[0])
            before = pattern, gradient
        return total

    def _at_point(self, example: Example, point: float, token: int) -> tuple[Tensor, Tensor]:
        """Patterns and gradients with respect to them, where the embedding is scaled."""
        here = Example(self.model, example.batch)
        with replaced(self.model.source(0), lambda x: point * x):
            return here.pattern, self.gradients(here, token) @ here.value.mT


class EmbeddingBaseline(LogitBaseline):
    """An attribution of the logit to the embedding that enters the first block, by a class of Captum.

    Only the row of the logit's position holds numbers, the others NaN.
    """

    axes = "batch query key"

    def of(self, example: Example) -> Tensor:
        """The values of one text, without the batch axis."""
        place = self.model.source(0)
        x = example.hidden[:1].clone().requires_grad_()
        components = self.attributed(self.score(example, place), x, example.repeated(1))[0]
        row = wide(self.summary(components))
        out = row.new_full((len(row), len(row)), torch.nan)
        out[self.position] = row
        return out

    def attributed(self, logit: Callable[..., Tensor], x: Tensor, arguments: tuple[Any, ...]) -> Tensor:
        """The attribution of each component of ``x``, ``[1, token, width]``."""
        raise NotImplementedError

    def summary(self, components: Tensor) -> Tensor:
        """One number a token: the sum of its components, by which attributions stay complete."""
        return components.sum(-1)


class EmbeddingSaliency(EmbeddingBaseline):
    """Captum's ``Saliency``: the length of the gradient at each token.

    References:
        Simonyan et al., "Deep Inside Convolutional Networks", ICLR workshop 2014.
    """

    name = "saliency"

    def attributed(self, logit: Callable[..., Tensor], x: Tensor, arguments: tuple[Any, ...]) -> Tensor:
        """The attribution of each component of ``x``, ``[1, token, width]``."""
        return Saliency(logit).attribute(x, additional_forward_args=arguments)

    def summary(self, components: Tensor) -> Tensor:
        """The length of the gradient."""
        return components.norm(dim=-1)


class EmbeddingInputXGradient(EmbeddingBaseline):
    """Captum's ``InputXGradient``.

    References:
        Shrikumar et al., "Not Just a Black Box", 2016, arXiv 1605.01713.
    """

    name = "input x gradient"

    def attributed(self, logit: Callable[..., Tensor], x: Tensor, arguments: tuple[Any, ...]) -> Tensor:
        """The attribution of each component of ``x``, ``[1, token, width]``."""
        return InputXGradient(logit).attribute(x, additional_forward_args=arguments)


class EmbeddingIntegratedGradients(SteppedBaseline, EmbeddingBaseline):
    """Captum's ``IntegratedGradients``, from a zero embedding.

    Args:
        model: An adapter around a model with a head.
        position: Where the logit is, negative from the end.
        token: Which logit. Default: ``None``, the largest.
        n_steps: Steps of the integral.

    References:
        Sundararajan et al. 2017.
    """

    name = "integrated gradients"

    def attributed(self, logit: Callable[..., Tensor], x: Tensor, arguments: tuple[Any, ...]) -> Tensor:
        """The attribution of each component of ``x``, ``[1, token, width]``."""
        return IntegratedGradients(logit).attribute(
            x, additional_forward_args=arguments, n_steps=self.n_steps, internal_batch_size=16
        )
