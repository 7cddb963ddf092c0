"""``captum-hta explain --toward``: which heads push an answer, and from which tokens they take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from captum_hta.cli.console import add_row, say, show, table, waiting
from captum_hta.cli.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from captum_hta.effects import HeadEffects
    from captum_hta.model.encoding import Text
    from captum_hta.model.protocol import Model

HEADS = 10
"""Heads to list."""
SHOWN_SHARE = 0.005
"""Smaller shares are not listed: they would be printed as 0%."""


@dataclass(frozen=True)
class Answer:
    """An answer to explain.

    Attributes:
        token: The token that it begins with.
        against: A token that it is compared with, or ``None``.
        query: The token after which it is given; ``None`` for the last.
    """

    token: str
    against: str | None
    query: int | None

    def effects(self, model: Model, text: Text, length: int) -> HeadEffects:
        """The effects of all heads; prints what they cost before.

        Raises:
            UserError: If the model has no such logits.
        """
        from captum_hta.effects import effects_plan, head_effects

        try:
            model.unembedding  # noqa: B018, refuses models without one
        except ValueError as error:
            raise UserError(f"{error}; name one with --model") from error
        say(f"Effects of all heads: {effects_plan(model, length)}", "dim")
        query = -1 if self.query is None else self.query
        with waiting("Attributing ..."):
            return head_effects(model, text, self.token, self.against, query)


@dataclass(frozen=True)
class EffectsTable:
    """The heads with the largest effects, and the tokens that they take them from.

    Attributes:
        effects: The effects.
        places: Layer and head of those to show, in order.
        top: Source tokens to list for each head.
    """

    effects: HeadEffects
    places: Sequence[tuple[int, int]]
    top: int

    @classmethod
    def of(cls, effects: HeadEffects, layers: Sequence[int], head: int | None, top: int) -> EffectsTable:
        """The table of the strongest heads of these layers, or of those with one number."""
        ranked = [(layer, number) for layer, number, _ in effects.order() if layer in layers]
        places = [(layer, number) for layer, number in ranked if head in (None, number)]
        return cls(effects, places[:HEADS], top)

    @property
    def names(self) -> list[str]:
        """Names of the heads."""
        from captum_hta.model.head_names import head_name

        return [head_name(layer, head) for layer, head in self.places]

    @property
    def answer(self) -> str:
        """The logit in words."""
        found = self.effects
        return repr(found.token) + ("" if found.against is None else f" against {found.against!r}")

    def print(self) -> None:
        """Print the heads, and what all parts of the model add up to."""
        shown = table(f"Heads by direct effect on {self.answer}, and their source tokens")
        shown.add_column("head", style="bold")
        shown.add_column("effect", justify="right")
        shown.add_column("attention")
        shown.add_column("input contribution")
        for name, (layer, head) in zip(self.names, self.places, strict=True):
            effect = f"{self.effects.effects[layer, head].item():+.2f}"
            rows = (self._row(values, layer, head) for values in self._maps.values())
            add_row(shown, name, effect, *map(self._strongest, rows))
        show(shown)
        query = self.effects.contributions.tokens[0][0]
        say(f"Direct effects after token {self.effects.queries[0]}, {query!r}: {self._sum}")
        if self.effects.is_capped:
            say("The model caps its logits afterwards.", "dim")

    @property
    def _sum(self) -> str:
        """The logit as the sum of its parts."""
        parts = {name: part.item() for name, part in self.effects.parts.items()}
        shown = ", ".join(f"{name} {value:+.2f}" for name, value in parts.items() if value)
        return f"{self.effects.logit.item():+.2f} ({shown})"

    @property
    def _maps(self) -> dict[str, Tensor]:
        """``[layer, head, key]``."""
        found = self.effects.contributions
        return {"attention": found.attention[0, :, :, 0], "input": found.values[0, :, :, 0]}

    def _row(self, values: Tensor, layer: int, head: int) -> Tensor:
        return values[layer, head]

    def _strongest(self, row: Tensor) -> str:
        keys = self.effects.keys
        values, numbers = row.topk(min(self.top, len(keys)))
        return " · ".join(
            f"{self._label(key)} {100 * value:.0f}%"
            for key, value in zip(numbers.tolist(), values.tolist(), strict=True)
            if value >= SHOWN_SHARE
        )

    def _label(self, key: int) -> str:
        """A source token, with its number where it occurs more than once."""
        keys = self.effects.keys
        return f"{keys[key]}#{key}" if keys.count(keys[key]) > 1 else keys[key]

    def figure(self) -> Figure:
        """All effects, and the sources of the heads in the table."""
        from captum_hta.views.effects import effects_figure

        layers, heads = map(list, zip(*self.places, strict=True))
        maps = {name: values[layers, heads].numpy() for name, values in self._maps.items()}
        signed = self.effects.signed[layers, heads].numpy()
        effects = self.effects.effects
        names = [
            f"{name}  {effects[place].item():+.2f}"
            for name, place in zip(self.names, self.places, strict=True)
        ]
        title = f"Direct effect on {self.answer}"
        return effects_figure(effects.numpy(), maps, signed, names, self.effects.keys, title)
