"""The proof that an adapter fits its model, on a few tokens, when the model is loaded."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import Module

from captum_hta.integrations.conditions import heads_error, relative_error, tolerance
from captum_hta.jacobian.closed_form import attention_energies
from captum_hta.jacobian.engine import answer
from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.jacobian.query import Query
from captum_hta.model.attention import Attention
from captum_hta.model.encoding import Batch, Encoding
from captum_hta.model.protocol import Check, Model
from captum_hta.model.sites import Site, observed, replaced

logger = logging.getLogger(__name__)
PROVEN_COMPONENTS = 12 * 768
"""Up to this number of layers times width, that of a BERT-base, the closed form is proven in every block."""


class ProofError(ValueError):
    """An adapter does not fit its model."""


class Proof:
    """Checks of an adapter, most of them in the middle block.

    Args:
        model: The adapter.
        architecture: The name of the model's class, for messages.
        sample: A few tokens.
        gaps: Numbers of blocks whose output is not the input of the next one with attention.

    Attributes:
        checks: What was checked so far.
        layer: The middle block.
        entry: The number of the source that is checked.
    """

    def __init__(
        self, model: Model, architecture: str, sample: Encoding, gaps: frozenset[int] = frozenset()
    ) -> None:
        self.model, self.architecture = model, architecture
        self.layer, self.gaps = (model.num_layers - 1) // 2, gaps
        self.checks: list[Check] = []
        self.batch = model.batch([sample])
        self.entry = self.layer if model.key_layers is None else model.key_layers

    @cached_property
    def attention(self) -> list[Attention]:
        """The attention of every layer for the tokens of the proof."""
        return self.model.attention(self.batch)

    def require(self, holds: bool, name: str, what: str, found: str = "") -> None:
        """Record a check, and raise if it does not hold.

        Args:
            holds: Whether it holds.
            name: What is checked.
            what: What is wrong if it does not hold.
            found: What was found.

        Raises:
            ProofError: If it does not hold.
        """
        self.checks.append(Check(name, holds, found))
        if not holds:
            raise ProofError(
                f"the adapter does not fit {self.architecture}: {what} (checked in block {self.layer}); "
                "contributions would be wrong, so the model is refused"
            )

    def run(self, read: Mapping[str, Module | Site]) -> None:
        """Run all checks except that of the closed form.

        Args:
            read: Other sites of the same values: ``"source"``, the input of the block, and ``"head"``, the
                input of the output projection.
        """
        values = self.values(read)
        self._check_shapes(values)
        self._check_places(values)
        self._check_change(values["head"])
        self._check_patterns(values["head"])

    def values(self, read: Mapping[str, Module | Site] | None = None) -> dict[str, Tensor]:
        """The source and the targets of the block, the source of the next one, and the sites of ``read``."""
        model = self.model
        sites: dict[str, Module | Site] = {
            "source": model.source(self.entry),
            "head": model.target(self.layer, "head"),
            "layer": model.target(self.layer, "layer"),
        }
        is_last = self.layer + 1 == model.num_layers
        if model.key_layers is None and not is_last and self.layer not in self.gaps:
            sites["next"] = model.source(self.layer + 1)
        sites |= {f"{name} read": site for name, site in (read or {}).items()}
        return observed(sites, lambda: model.forward(*self.batch.inputs, *self.batch.extra))

    def sites_of_blocks(self) -> dict[str, Module | Site]:
        """The targets of every block, by name."""
        layers = range(self.model.num_layers)
        return {
            f"{kind} {layer}": self.model.target(layer, kind)
            for layer in layers
            for kind in ("head", "layer")
        }

    def require_given(self, batch: Batch, expected: Mapping[str, Tensor]) -> None:
        """Check that the adapter runs the model that was handed in.

        Args:
            batch: A batch.
            expected: The targets of every block, as :meth:`sites_of_blocks` names them, when the model that
                was handed in is called on the batch as its user would call it.
        """
        run = partial(self.model.forward, *batch.inputs, *batch.extra)
        found = observed(self.sites_of_blocks(), run)
        errors = [
            relative_error(value.flatten(2), found[name].flatten(2)) for name, value in expected.items()
        ]
        error = max(errors) if len(errors) == len(found) else math.inf
        what = f"outputs of blocks are off those of the model as it is called by its user, by {error:.2g}"
        holds = error <= tolerance(self.model.dtype)
        self.require(holds, "the model that was handed in", what, f"off by {error:.1e}")

    def require_only_source(self, other: Batch) -> None:
        """Check that all that targets take of a text comes through the source.

        Args:
            other: A batch of other tokens of the same lengths. With the source of this proof's batch in the
                place of its own, its targets must be those of this proof's batch.

        Raises:
            ValueError: If they differ, so that contributions of the source would not be all of them.
        """
        model = self.model
        last = model.num_layers if model.key_layers is None else model.key_layers + 1
        numbers = range(model.first_entry, last)
        sites: dict[str, Module | Site] = {str(number): model.source(number) for number in numbers}
        first = str(model.first_entry)
        own = self._observed(sites | self.sites_of_blocks(), self.batch)
        for sources, what in (
            ([first], "the model's input"),
            (list(sites), "the input of its block"),
        ):
            with ExitStack() as stack:
                for name in sources:
                    stack.enter_context(replaced(sites[name], _constant(own[name])))
                found = self._observed(self.sites_of_blocks(), other)
            error = max(relative_error(own[name], value) for name, value in found.items())
            self.require(
                error <= tolerance(model.dtype),
                f"blocks read {what} alone",
                f"blocks read more of a text than {what}: with that held fixed, other tokens change their "
                f"outputs by {error:.2g}",
                f"off by {error:.1e}",
            )

    def hides_padding(self, alone: Batch, padded: Batch) -> bool:
        """Whether a text among others is treated as it is alone.

        Args:
            alone: A short text.
            padded: A longer one, and that text, padded.
        """
        own = self._observed(self.sites_of_blocks(), alone)
        among = self._observed(self.sites_of_blocks(), padded)
        errors = [relative_error(value, among[name][1:, : value.shape[1]]) for name, value in own.items()]
        holds = max(errors) <= tolerance(self.model.dtype)
        self.checks.append(
            Check("padding changes nothing", True, "yes" if holds else "no: texts are read one by one")
        )
        return holds

    def _observed(self, sites: dict[str, Module | Site], batch: Batch) -> dict[str, Tensor]:
        return observed(sites, lambda: self.model.forward(*batch.inputs, *batch.extra))

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
        """Check that source and targets are the values that they are named after."""
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
        sums = pattern.sum(-1)
        error = (sums - 1).abs().max().item()
        what = f"rows of the attention pattern are off a sum of 1 by {error:.2g}"
        has_sinks = value is not None and bool((pattern >= 0).all()) and sums.max().item() < 1 + 1e-2
        found = "up to 1, the rest goes to sinks" if error >= 1e-2 else f"off by {error:.1e}"
        self.require(error < 1e-2 or has_sinks, "patterns sum to 1", what, found)
        if value is None:
            return
        error = heads_error(self.attention[self.layer].pattern, value, z, self.batch.mask)
        what = f"patterns times values are off the heads' outputs by {error:.2g}"
        self.require(
            error <= tolerance(self.model.dtype),
            "patterns times values are the heads",
            what,
            f"off by {error:.1e}",
        )

    def is_causal(self) -> bool:
        """Whether no query of any layer attends to a later key."""
        is_self = self.model.key_layers is None
        return is_self and not any(one.pattern.triu(1).any() for one in self.attention)

    def closed_form_holds(self) -> bool:
        """Whether the closed form equals autograd for one query of all heads; a warning is logged if not.

        Every block of a small model is checked, and the first, the middle and the last of a large one.
        """
        model = self.model
        layers: Sequence[int] = range(model.num_layers)
        if model.num_layers * model.d_model > PROVEN_COMPONENTS:
            layers = sorted({0, self.layer, model.num_layers - 1})
        return all(self._closed_form_holds(layer) for layer in layers)

    def _closed_form_holds(self, layer: int) -> bool:
        model = self.model
        factors = self.attention[layer].factors
        if factors is None:
            return False
        expected = self._energies_by_autograd(layer)
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

    def _energies_by_autograd(self, layer: int) -> Tensor:
        """Energies ``[batch, head, key]`` of query 1, in reverse mode."""
        model, batch = self.model, self.batch
        forward_pass = ForwardPass(
            model.forward,
            batch.inputs,
            batch.extra,
            [model.target(layer, "head")],
            model.source(layer),
            num_heads=model.num_heads,
        )
        return answer(forward_pass, Query(neuron_selector=1, mode="reverse")).energies[0].mean[:, :, 0]


def _constant(value: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: value


def _equal(value: Tensor, other: Tensor) -> bool:
    return torch.equal(value.flatten(2), other.flatten(2))
