"""Tangents of a few positions, carried at those positions alone for as long as that is right.

A tangent of one source token is zero at every other token until an operator mixes positions, and in a
causal model it is zero before its token throughout. A :class:`WindowedLinearization` finds which axis of
each variable holds the positions, narrows the operators to the positions that can move, and so saves
most of the first block's projections and about half of a causal model.

Nothing is taken on trust: random tangents are pushed both ways when it is made, for every window, and the
windows are given up if the results differ.

Where many tangents are to come, the token-wise segments on their way are collapsed first; see
:mod:`captum_hta.jacobian.linearize.tokenwise`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from captum_hta.jacobian.linearize.axes import MixedError, Positions, Window, narrowed, positions_of
from captum_hta.jacobian.linearize.linearization import Linearization, between, flops_of, numel
from captum_hta.jacobian.linearize.recorder import Call
from captum_hta.jacobian.linearize.tokenwise import (
    COLLAPSED_MEMORY,
    Segment,
    TokenJacobians,
    close,
    collapsed,
    noise,
    segments,
    token_jacobians,
    worthwhile,
)
from captum_hta.jacobian.plan import chunk_size, memory_budget

STEPS = 8
"""A causal model is narrowed to this many starting positions at most."""


class WindowedLinearization:
    """A linearisation whose tangents start at a few tokens of one source.

    Args:
        whole: The derivative.
        source: One of its source variables, with the value ``[batch, position, width]``.
    """

    def __init__(self, whole: Linearization, source: int) -> None:
        self.whole, self.source = whole, source
        self.length = whole.shapes[source][1]
        self.at: dict[int, Positions] = {source: Positions(-2)}
        tokenwise = self._locate(whole.calls, causal=False)
        self._prefix = [call for index, call in enumerate(whole.calls) if index in tokenwise]
        self._rest = [call for index, call in enumerate(whole.calls) if index not in tokenwise]
        self._border = self._border_variables()
        self._located = dict(self.at)
        self.causal = len(self._locate(self._rest, causal=True)) == len(self._rest)
        self._cache: dict[tuple[str, int, int], Linearization] = {}
        self._give_up_what_does_not_hold()
        self._segments = [segment for segment in self._found_segments() if self._is_followed(segment)]
        self._collapsed: dict[int, tuple[Segment, TokenJacobians]] = {}
        self._onward = self._rest

    def flops(self, target: int, count: int = 1) -> float:
        """Operations for one tangent of one token up to ``target``, on average over the tokens, where
        ``count`` tangents are pushed.
        """
        calls = collapsed(self._rest, [(segment, None) for segment in self._worthwhile(count)])
        prefix = {id(call) for call in self._prefix}
        needed = between([*self._prefix, *calls], self.whole.sources, (target,))
        return sum(
            flops_of(call) * (1 / self.length if id(call) in prefix else self._share) for call in needed
        )

    def preparation_flops(self, count: int) -> float:
        """Operations spent before the first of ``count`` tangents."""
        return sum(segment.preparation_flops for segment in self._worthwhile(count))

    def preparation_elements(self, count: int) -> int:
        """Numbers kept for ``count`` tangents."""
        return sum(segment.elements for segment in self._worthwhile(count))

    def widest(self, count: int) -> int:
        """Elements of the largest tangent on the way, for one of ``count`` tangents."""
        return self._widest(self._worthwhile(count))

    def _widest(self, chosen: Sequence[Segment]) -> int:
        calls = collapsed(self._rest, [(segment, None) for segment in chosen])
        return max((numel(call.shape) for call in calls), default=0)

    def prepare(self, count: int) -> None:
        """Collapse what pays for ``count`` more tangents."""
        fresh = [segment for segment in self._worthwhile(count) if segment.exit not in self._collapsed]
        for segment in fresh:
            rule = token_jacobians(segment, self.whole.shapes)
            if rule is None:
                self._segments.remove(segment)
            else:
                self._collapsed[segment.exit] = (segment, rule)
        if fresh:
            self._onward = collapsed(self._rest, list(self._collapsed.values()))
            self._cache.clear()

    @property
    def _share(self) -> float:
        """The part of the positions that the windows of a causal model hold, on average."""
        return causal_share(self.length) if self.causal else 1.0

    def _found_segments(self) -> list[Segment]:
        return segments(self._rest, self.whole.shapes, self.length, self.whole.targets)

    def _is_followed(self, segment: Segment) -> bool:
        """Whether a window of the segment is a window of its Jacobians."""
        ends = (self.at.get(segment.entry), self.at.get(segment.exit))
        return not self.causal or ends == (Positions(-2), Positions(-2))

    def _worthwhile(self, count: int) -> list[Segment]:
        """The segments to collapse for ``count`` tangents, those that already are among them."""
        if not self._segments:
            return []
        known = [segment for segment, _ in self._collapsed.values()]
        others = [segment for segment in self._segments if segment.exit not in self._collapsed]
        like = self.whole.calls[0].primals[0]
        chunk = chunk_size(self._widest(self._segments) * like.element_size(), like.device)
        room = COLLAPSED_MEMORY * memory_budget(like.device) / like.element_size()
        room -= sum(segment.elements for segment in known)
        return [*known, *worthwhile(others, count * self._share, chunk, room)]

    def push(self, tangents: Tensor, tokens: range) -> Iterator[tuple[int, Tensor]]:
        """Push tangents of some tokens, after :meth:`prepare`.

        Args:
            tangents: ``[n, batch, len(tokens), width]``, zero at all other positions.
            tokens: The tokens, from one to another.

        Yields:
            ``(target, tangent)`` as :meth:`Linearization.push` does.
        """
        at_tokens = Window(tokens.start, tokens.stop, self.length)
        onward = Window(self._start(tokens.start), self.length, self.length)
        inner = Window(at_tokens.start - onward.start, at_tokens.stop - onward.start, onward.width)
        border = {}
        for variable, tangent in self._through_prefix(tangents, at_tokens):
            border[variable] = inner.widen(tangent, self._located[variable])
        for target in self.whole.targets:
            if target in border and target in self._located:
                yield target, onward.widen(border[target], self._located[target])
        for target, tangent in self._through_rest(onward).push(border):
            if target not in border:
                full = onward.width == self.length
                yield target, tangent if full else onward.widen(tangent, self.at[target])

    def _start(self, token: int) -> int:
        if not self.causal:
            return 0
        step = -(-self.length // STEPS)
        return token - token % step

    def _through_prefix(self, tangents: Tensor, window: Window) -> Iterator[tuple[int, Tensor]]:
        if self.source in self._border:
            yield self.source, tangents
        targets = [variable for variable in self._border if variable != self.source]
        if targets:
            prefix = self._narrowed("prefix", window, self._prefix, (self.source,), targets)
            yield from prefix.push({self.source: tangents})

    def _through_rest(self, window: Window) -> Linearization:
        return self._narrowed("rest", window, self._onward, self._border, self.whole.targets)

    def _narrowed(
        self, part: str, window: Window, calls: list[Call], sources: Sequence[int], targets: Sequence[int]
    ) -> Linearization:
        """A part of the linearisation on a window; the last one of each part is kept."""
        key = (part, window.start, window.stop)
        if key not in self._cache:
            for other in [known for known in self._cache if known[0] == part]:
                del self._cache[other]
            if window.width < self.length:
                calls = [narrowed(call, self.at, window) for call in calls]
            with torch.no_grad():
                self._cache[key] = Linearization(calls, self.whole.shapes, sources, targets)
        return self._cache[key]

    def _locate(self, calls: Sequence[Call], causal: bool) -> set[int]:
        """Find the positions of what the calls give; the numbers of those that could be followed."""
        probe = Window(0, max(1, self.length - 1), self.length)
        followed = set()
        for number, call in enumerate(calls):
            if self.length < 2 or not all(variable in self.at for variable in call.inputs):
                continue
            try:
                found = positions_of(call, self.at, probe, self.whole.shapes, causal)
            except (MixedError, RuntimeError):
                continue
            self.at.update(found)
            followed.add(number)
        return followed

    def _border_variables(self) -> list[int]:
        """Variables that the prefix gives and something else reads, or that are asked for."""
        given = {self.source, *(variable for call in self._prefix for variable in call.outputs)}
        read = {variable for call in self._rest for variable in call.inputs} | set(self.whole.targets)
        return sorted(given & read)

    def _give_up_what_does_not_hold(self) -> None:
        self._onward = self._rest
        if not self._proven():
            self.causal = False
            if not self._proven():
                self._prefix, self._rest, self._border = [], list(self.whole.calls), [self.source]

    def _proven(self) -> bool:
        """Whether random tangents stay where the windows say, and come out the same through them.

        Every window of a causal model is tried, for a mask may be causal in one place and not in another;
        of an encoder's first projections, which know no mask, the middle one.
        """
        if not self.whole.calls:
            return True
        batch, _, width = self.whole.shapes[self.source]
        like = self.whole.calls[0].primals[0]
        step = -(-self.length // STEPS)
        starts = range(0, self.length, step) if self.causal else [self._middle(step)]
        with torch.no_grad():
            followed = self._followed()
            for start in starts:
                tokens = range(start, min(start + step, self.length))
                tangent = noise(1, like.new_empty(batch, len(tokens), width))
                if not (self._stays(followed, tangent, tokens) and self._same(tangent, tokens)):
                    return False
        return True

    def _followed(self) -> Linearization:
        """The whole, with those variables as targets that must be nought outside their windows: what comes
        before any mixing, keys and values, and the targets themselves. (Scores need not be: the softmax
        gives those of later keys no weight.)
        """
        mixed = {
            variable
            for call in self._rest
            if call.name == "bmm"
            for position, variable in zip(call.positions, call.inputs, strict=True)
            if position == 1
        }
        first = {variable for call in self._prefix for variable in call.outputs}
        wanted = first | mixed | set(self.whole.targets)
        known = [variable for variable in self._windowed if variable in wanted and variable != self.source]
        return Linearization(self.whole.calls, self.whole.shapes, self.whole.sources, known)

    @property
    def _windowed(self) -> dict[int, Positions]:
        """Variables that are carried in windows."""
        return self.at if self.causal else self._located

    def _stays(self, followed: Linearization, tangent: Tensor, tokens: range) -> bool:
        """Whether a tangent is nought, to the last bit, wherever its windows leave it out."""
        at_tokens = Window(tokens.start, tokens.stop, self.length)
        onward = Window(self._start(tokens.start), self.length, self.length)
        prefix = {variable for call in self._prefix for variable in call.outputs}
        for variable, found in followed.push({self.source: at_tokens.widen(tangent, Positions(-2))}):
            window = at_tokens if variable in prefix else onward
            if not window.holds(found, self._windowed[variable]):
                return False
        return True

    def _middle(self, step: int) -> int:
        return self.length // 2 // step * step

    def _same(self, tangent: Tensor, tokens: range) -> bool:
        window = Window(tokens.start, tokens.stop, self.length)
        expected = dict(self.whole.push({self.source: window.widen(tangent, Positions(-2))}))
        found = dict(self.push(tangent, tokens))
        return found.keys() == expected.keys() and all(
            close(found[target], expected[target]) for target in expected
        )


def causal_share(length: int) -> float:
    """The part of the positions that the windows of a causal model hold, on average."""
    return 0.5 * (1 + 1 / min(STEPS, length))
