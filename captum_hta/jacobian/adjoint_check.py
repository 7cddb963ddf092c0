r"""A check that a recorded derivative is the one that autograd gives.

A recorder sees operators; autograd also respects custom backward functions, ``torch.no_grad`` inside a model,
and values that leave PyTorch and come back. So the adjoint identity is checked, :math:`\langle w, J u \rangle
= \langle J^\top w, u \rangle` with ``J u`` from the recording and :math:`J^\top w` from one backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from captum_hta.jacobian.forward_pass import ForwardPass, NoPathError
from captum_hta.jacobian.linearize.linearization import Linearization

FLOAT32_INSIDE = 1e-4
"""Rounding that a model in float64 may have where it computes in float32, as many norms do."""


def agrees(forward_pass: ForwardPass, derivative: Linearization) -> bool:
    """Whether the adjoint identity holds for a random tangent and cotangents along its images.

    Cotangents are the images themselves, with as much noise again, each target's of unit norm: a part of
    the derivative that is missing or foreign shows in proportion to its size. A model that hides itself
    from autograd, so that no backward pass exists, leaves nothing to disagree with.
    """
    try:
        with forward_pass.differentiable() as (sources, targets):
            tangents = [_noise(x) for x in sources]
            images = _images(derivative, tangents)
            pairs = [
                (target, *_cotangent(images[variable]))
                for target, variable in zip(targets, derivative.targets, strict=True)
            ]
            paired = torch.stack([(target * cotangent).sum() for target, cotangent, _ in pairs]).sum()
            gradients = torch.autograd.grad(paired, sources, allow_unused=True)
    except (RuntimeError, NotImplementedError, NoPathError):
        return True
    back = sum(
        (gradient.double() * tangent.double()).sum().item()
        for gradient, tangent in zip(gradients, tangents, strict=True)
        if gradient is not None
    )
    forth = sum(product for *_, product in pairs)
    tolerance = min(max(4096 * torch.finfo(sources[0].dtype).eps, FLOAT32_INSIDE), 0.1)
    return abs(forth - back) <= tolerance * max(1, len(pairs))


def has_path(forward_pass: ForwardPass) -> bool:
    """Whether autograd finds a path from a source to every target."""
    try:
        with forward_pass.differentiable() as (sources, targets):
            found = [
                torch.autograd.grad(target.sum(), sources, allow_unused=True, retain_graph=True)
                for target in targets
            ]
    except NoPathError:
        return False
    return all(any(gradient is not None for gradient in gradients) for gradients in found)


def _noise(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(like.numel())
    return torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like)


def _images(derivative: Linearization, tangents: list[Tensor]) -> dict[int, Tensor]:
    stacks = {variable: tangent[None] for variable, tangent in zip(derivative.sources, tangents, strict=True)}
    with torch.no_grad():
        return {target: image[0] for target, image in derivative.push(stacks)}


def _cotangent(image: Tensor) -> tuple[Tensor, float]:
    """A unit cotangent near an image, scaled so that their product is of order one; and the product."""
    norm = image.double().norm().item() or 1.0
    unit = image.double() / norm
    noise = _noise(unit)
    cotangent = ((unit + noise / noise.norm()) / norm).to(image)
    return cotangent, (cotangent.double() * image.double()).sum().item()
