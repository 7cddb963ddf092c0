"""Checks that an adapter makes of itself on a few tokens, when a model is loaded."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Module

from captum_hta.jacobian.closed_form import attention_energies
from captum_hta.jacobian.engine import Question, answer
from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.jacobian.precision import matmul_precision
from captum_hta.model.attention import Attention
from captum_hta.model.encoding import Encoding
from captum_hta.model.protocol import Check, Model
from captum_hta.model.sites import Site, observed, replaced, without_autocast

logger = logging.getLogger(__name__)
PROVEN_COMPONENTS = 12 * 768
"""Components of a token in all blocks, up to which every block is proven: those of a BERT-base."""


class Proof:
    """Checks of an adapter in the middle block.

    Args:
        model: The adapter.
        architecture: What to call the model's kind.
        sample: A few tokens.
    """

    def __init__(self, model: Model, architecture: str, sample: Encoding) -> None:
        self.model, self.architecture = model, architecture
        self.layer = (model.num_layers - 1) // 2
        self.checks: list[Check] = []
        self.batch = model.batch([sample])
        self.entry = self.layer if model.key_layers is None else model.key_layers

    @cached_property
    def attention(self) -> list[Attention]:
        """What the attention of every layer does with the tokens of the proof."""
        with matmul_precision("highest"), without_autocast():
            return self.model.attention(self.batch)

    def require(self, holds: bool, name: str, what: str, found: str = "") -> None:
        """Note a check; raise where it does not hold.

        Raises:
            ValueError: That the adapter does not fit, and why.
        """
        self.checks.append(Check(name, holds, found))
        if not holds:
            raise ValueError(
                f"the adapter does not fit {self.architecture}: {what} (checked in block {self.layer}); "
                "contributions would be wrong, so the model is refused"
            )

    def run(self, read: dict[str, Module | Site]) -> None:
        """All checks but the closed form's.

        Args:
            read: Where ``"source"`` and ``"head"`` are read, by the block and by the projection of its
                heads.
        """
        values = self.values(read)
        self._check_shapes(values)
        self._check_places(values)
        self._check_change(values["head"])
        self._check_patterns(values["head"])

    def values(self, read: dict[str, Module | Site] | None = None) -> dict[str, Tensor]:
        """The source and the targets of the block, the source of the next one, and what is read."""
        model = self.model
        sites = {
            "source": model.source(self.entry),
            "head": model.target(self.layer, "head"),
            "layer": model.target(self.layer, "layer"),
        }
        if model.key_layers is None and self.layer + 1 < model.num_layers:
            sites["next"] = model.source(self.layer + 1)
        sites |= {f"{name} read": site for name, site in (read or {}).items()}
        return observed(sites, lambda: model.forward(*self.batch.inputs, *self.batch.extra))

    def _check_shapes(self, values: dict[str, Tensor]) -> None:
        model, shape = self.model, self.batch.mask.shape
        for name in ("source", "head", "layer"):
            self.require(name in values, f"{name} is reached", f"the site of the {name} is not reached")
        for name, mask in (("source", self.batch.keys), ("layer", self.batch.mask)):
            found = list(values[name].shape)
            what = f"the {name} is {found}, not [batch, pos, d_model]"
            self.require(found == [*mask.shape, model.d_model], f"shape of the {name}", what, str(found))
        z = values["head"]
        fits = z.shape[:2] == shape and z[0, 0].numel() == model.num_heads * model.d_head
        what = f"the head target is {list(z.shape)}, not [batch, pos, head * d_head]"
        self.require(fits, "shape of the heads", what, str(list(z.shape)))

    def _check_places(self, values: dict[str, Tensor]) -> None:
        """That source and targets are the values that their names say."""
        for name, other, what in (
            ("source", "source read", "the source is not what enters the block"),
            ("head", "head read", "the head target is not what the output projection reads"),
            ("layer", "next", "the layer target is not what enters the next block"),
        ):
            if other in values:
                self.require(_equal(values[name], values[other]), f"place of the {name}", what)

    def _check_change(self, z: Tensor) -> None:
        def shifted(value: Tensor) -> Tensor:
            return value + torch.linspace(-1, 1, value.shape[-1], dtype=value.dtype, device=value.device)

        with replaced(self.model.source(self.entry), shifted):
            changed = self.values()["head"]
        what = "a change at the source does not reach the head target"
        self.require(not torch.equal(changed, z), "source reaches the heads", what)

    def _check_patterns(self, z: Tensor) -> None:
        pattern, value = self.attention[self.layer].pattern.float(), self.attention[self.layer].value
        error = (pattern.sum(-1) - 1).abs().max().item()
        what = f"rows of the attention pattern are off a sum of 1 by {error:.2g}"
        self.require(error < 1e-2, "patterns sum to 1", what, f"off by {error:.1e}")
        if value is None:
            return
        given = (pattern @ value.float()).transpose(1, 2).flatten(2)
        error = ((given - z.flatten(2)).abs().max() / z.abs().max()).item()
        what = f"patterns times values are off the heads' outputs by {error:.2g}"
        self.require(error < 2e-2, "patterns times values are the heads", what, f"off by {error:.1e}")

    def is_causal(self) -> bool:
        """Whether no query sees a later key."""
        return not self.attention[self.layer].pattern.triu(1).any()

    def closed_form_holds(self) -> bool:
        """Whether the closed form gives one row of all heads as autograd does; a warning, if not.

        Asked of every block of a small model, of the first, the middle and the last of a large one.
        """
        model = self.model
        layers = range(model.num_layers)
        if model.num_layers * model.d_model > PROVEN_COMPONENTS:
            layers = sorted({0, self.layer, model.num_layers - 1})
        return all(self._closed_form_holds(layer) for layer in layers)

    def _closed_form_holds(self, layer: int) -> bool:
        model = self.model
        factors = self.attention[layer].factors
        if factors is None:
            return False
        forward_pass = ForwardPass(
            model.forward,
            self.batch.inputs,
            self.batch.extra,
            [model.target(layer, "head")],
            model.source(layer),
        )
        question = Question(num_heads=model.num_heads, neuron_selector=1, mode="reverse")
        expected = answer(forward_pass, question).energies[0].mean[:, :, 0]
        with matmul_precision("highest"), without_autocast():
            found = attention_energies(factors)[:, :, 1]
        error = ((found - expected).abs().amax() / expected.amax()).item()
        holds = error < max(1e-3, 8 * torch.finfo(model.dtype).eps)
        name = f"closed form equals autograd in block {layer}"
        self.checks.append(Check(name, holds, f"off by {error:.1e}"))
        if not holds:
            logger.warning(
                "the closed form is off autograd by %.2g for %s in block %d, so the general modes are taken",
                error,
                self.architecture,
                layer,
            )
        return holds


def _equal(value: Tensor, other: Tensor) -> bool:
    return torch.equal(value.flatten(2), other.flatten(2))


def require_eval(name: str, model: Module) -> None:
    """Raise a ``ValueError`` if a dropout of the model is active, be it a module or a number of one."""
    for module in model.modules():
        if module.training and any(_drops(module)):
            raise ValueError(
                f"{name} is in training mode, with a dropout that is active: call its eval() first"
            )


def _drops(module: Module) -> Iterator[bool]:
    """For each of a module's numbers that are rates of a dropout, whether it is more than nought."""
    if isinstance(module, torch.nn.Dropout):
        yield module.p > 0
    for name, value in vars(module).items():
        if "drop" in name and isinstance(value, float):
            yield value > 0


def is_untouched(modules: Iterable[Module], own: tuple[str, ...]) -> bool:
    """Whether no hook but those of ``own`` packages, and no forward of its own, changes what modules do."""
    if any(getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS):
        return False
    return not any(
        "forward" in vars(module)
        or any(
            not hook.__module__.startswith(own)
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        )
        for module in modules
    )


_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


def no_logits(name: str, architecture: str) -> str:
    """What to say where logits are asked of a model without a head."""
    return (
        f"{name} ({architecture}) has no logits: load a class with a head, such as a ...ForCausalLM (with "
        "adapter='transformers', if it has one that TransformerLens does not bridge), or leave out what "
        "asks for a logit"
    )


def encoder_logits(name: str) -> str:
    """What to say where a direction of a token is asked of an encoder."""
    return (
        f"{name} is an encoder: more than a norm lies between its last hidden embedding and its logits, so "
        "no direction stands for a token; use a decoder"
    )


def require_weights(name: str, model: Module) -> None:
    """Raise a ``ValueError`` if weights of the model are not there."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{name} has weights on the meta device, which hold no numbers: load them first")


def weights_fingerprint(model: Module) -> str:
    """A digest of all weights, by name."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}".encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
