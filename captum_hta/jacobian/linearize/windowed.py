"""Tangents stored only at the tokens where they can differ from zero.

A tangent of one source token is zero at every other token until an operator mixes tokens, and in causal
models it is zero before its token throughout. A :class:`WindowedLinearization` finds the token axis of each
variable and narrows the operators to a window of tokens, which saves most of the first block's projections
and about half of a causal model.

The windows are verified when it is created: random tangents are pushed through them and through the whole
derivative, and the windows are given up if the results differ.

For many tangents, the token-wise segments on their way are collapsed first; see
:mod:`captum_hta.jacobian.linearize.tokenwise`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from captum_hta.jacobian.linearize.axes import (
    ROWS,
    MixesTokensError,
    TokenAxis,
    Window,
    narrowed,
    token_axes,
)
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
"""Largest number of different windows of a causal model."""


class WindowedLinearization:
    """A linearization for tangents that start at a few tokens of one source.

    Args:
        whole: The derivative.
        source: One of its source variables, of shape ``[batch, position, width]``.

    Attributes:
        axes: The token axis of each variable for which it is known.
        causal: Whether tangents stay zero before their token.
        segments: The token-wise segments that may be collapsed.
    """

    def __init__(self, whole: Linearization, source: int) -> None:
        self.whole, self.source = whole, source
        self.length = whole.shapes[source][1]
        self.axes: dict[int, TokenAxis] = {source: ROWS}
        tokenwise = self._follow(whole.calls, causal=False)
        self._prefix = [call for index, call in enumerate(whole.calls) if index in tokenwise]
        self._rest = [call for index, call in enumerate(whole.calls) if index not in tokenwise]
        self._border = self._border_variables()
        self._axes_before_mixing = dict(self.axes)
        self.causal = len(self._follow(self._rest, causal=True)) == len(self._rest)
        self._cache: dict[tuple[str, int, int], Linearization] = {}
        self._collapsed: dict[int, tuple[Segment, TokenJacobians]] = {}
        self._onward = self._rest
        self._give_up_unproven_windows()
        found = segments(self._rest, whole.shapes, self.length, whole.targets)
        self.segments = [segment for segment in found if self._is_followed(segment)]

    @property
    def collapsed(self) -> list[Segment]:
        """The segments that have been collapsed so far."""
        return [segment for segment, _ in self._collapsed.values()]

    def flops(self, target: int, count: int = 1) -> float:
        """Floating-point operations for one of ``count`` tangents up to ``target``, averaged over tokens."""
        calls = collapsed(self._rest, [(segment, None) for segment in self._worthwhile(count)])
        prefix = {id(call) for call in self._prefix}
        needed = between([*self._prefix, *calls], self.whole.sources, (target,))
        return sum(
            flops_of(call) * (1 / self.length if id(call) in prefix else self.share) for call in needed
        )

    def preparation_flops(self, count: int) -> float:
        """Floating-point operations before the first of ``count`` tangents."""
        return sum(segment.preparation_flops for segment in self._worthwhile(count))

    def preparation_elements(self, count: int) -> int:
        """Elements of the Jacobians that are kept for ``count`` tangents."""
        return sum(segment.elements for segment in self._worthwhile(count))

    def widest(self, count: int) -> int:
        """Elements of the largest intermediate tangent, for one of ``count`` tangents."""
        return self._widest(self._worthwhile(count))

    def _widest(self, chosen: Sequence[Segment]) -> int:
        calls = collapsed(self._rest, [(segment, None) for segment in chosen])
        return max((numel(call.shape) for call in calls), default=0)

    def prepare(self, count: int) -> None:
        """Collapse the segments that are worth it for ``count`` more tangents."""
        fresh = [segment for segment in self._worthwhile(count) if segment.exit not in self._collapsed]
        for segment in fresh:
            rule = token_jacobians(segment, self.whole.shapes)
            if rule is None:
                self.segments.remove(segment)
            else:
                self._collapsed[segment.exit] = (segment, rule)
        if fresh:
            self._onward = collapsed(self._rest, list(self._collapsed.values()))
            self._cache.clear()

    @property
    def share(self) -> float:
        """The average share of the tokens that a window holds, after tokens are mixed."""
        return causal_share(self.length) if self.causal else 1.0

    def _is_followed(self, segment: Segment) -> bool:
        """Whether a window of the segment is a window of its Jacobians."""
        ends = (self.axes.get(segment.entry), self.axes.get(segment.exit))
        return not self.causal or ends == (ROWS, ROWS)

    def _worthwhile(self, count: int) -> list[Segment]:
        """The segments to collapse for ``count`` tangents, including those that already are."""
        if not self.segments:
            return []
        known = self.collapsed
        others = [segment for segment in self.segments if segment.exit not in self._collapsed]
        like = self.whole.calls[0].primals[0]
        chunk = chunk_size(self._widest(self.segments) * like.element_size(), like.device)
        room = COLLAPSED_MEMORY * memory_budget(like.device) / like.element_size()
        room -= sum(segment.elements for segment in known)
        return [*known, *worthwhile(others, count * self.share, chunk, room)]

    def push(self, tangents: Tensor, tokens: range) -> Iterator[tuple[int, Tensor]]:
        """Push tangents of some tokens, after :meth:`prepare`.

        Args:
            tangents: ``[n, batch, len(tokens), width]``, zero at all other positions.
            tokens: The tokens, a range of step 1.

        Yields:
            ``(target, tangent)`` as :meth:`Linearization.push` does.
        """
        at_tokens = Window(tokens.start, tokens.stop, self.length)
        onward = Window(self._start(tokens.start), self.length, self.length)
        inner = Window(at_tokens.start - onward.start, at_tokens.stop - onward.start, onward.width)
        border = {}
        for variable, tangent in self._through_prefix(tangents, at_tokens):
            border[variable] = inner.widen(tangent, self._axes_before_mixing[variable])
        for target in self.whole.targets:
            if target in border and target in self._axes_before_mixing:
                yield target, onward.widen(border[target], self._axes_before_mixing[target])
        for target, tangent in self._through_rest(onward).push(border):
            if target not in border:
                full = onward.width == self.length
                yield target, tangent if full else onward.widen(tangent, self.axes[target])

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
        """A part of the linearization on a window; the last one of each part is cached."""
        key = (part, window.start, window.stop)
        if key not in self._cache:
            for other in [known for known in self._cache if known[0] == part]:
                del self._cache[other]
            if window.width < self.length:
                calls = [narrowed(call, self.axes, window) for call in calls]
            with torch.no_grad():
                self._cache[key] = Linearization(calls, self.whole.shapes, sources, targets)
        return self._cache[key]

    def _follow(self, calls: Sequence[Call], causal: bool) -> set[int]:
        """Find the token axes of the outputs of calls, as far as they can be followed.

        Returns:
            The indices of the calls that can.
        """
        probe = Window(0, max(1, self.length - 1), self.length)
        followed = set()
        for number, call in enumerate(calls):
            if self.length < 2 or not all(variable in self.axes for variable in call.inputs):
                continue
            try:
                found = token_axes(call, self.axes, probe, self.whole.shapes, causal)
            except (MixesTokensError, RuntimeError):
                continue
            self.axes.update(found)
            followed.add(number)
        return followed

    def _border_variables(self) -> list[int]:
        """Variables of the prefix that other operators read, or that are targets."""
        given = {self.source, *(variable for call in self._prefix for variable in call.outputs)}
        read = {variable for call in self._rest for variable in call.inputs} | set(self.whole.targets)
        return sorted(given & read)

    def _give_up_unproven_windows(self) -> None:
        if not self._proven():
            self.causal = False
            if not self._proven():
                self._prefix, self._rest, self._border = [], list(self.whole.calls), [self.source]
                self._onward = self._rest
                self._cache.clear()

    def _proven(self) -> bool:
        """Whether random tangents are zero outside the windows, and are the same when pushed through them.

        All windows of a causal model are tried, since a mask may be causal at some tokens only. For the first
        projections of an encoder, which have no mask, the middle window is enough.
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
        """The whole derivative with targets at the variables that must be zero outside their windows: those
        before tokens are mixed, keys and values, and the targets themselves. (Scores need not be zero there:
        the softmax gives later keys no weight.)
        """
        mixed = {
            variable
            for call in self._rest
            if call.name == "bmm"
            for index, variable in zip(call.argument_indices, call.inputs, strict=True)
            if index == 1
        }
        first = {variable for call in self._prefix for variable in call.outputs}
        wanted = first | mixed | set(self.whole.targets)
        known = [variable for variable in self._windowed if variable in wanted and variable != self.source]
        return Linearization(self.whole.calls, self.whole.shapes, self.whole.sources, known)

    @property
    def _windowed(self) -> dict[int, TokenAxis]:
        """The token axes of the variables whose tangents are carried in windows."""
        return self.axes if self.causal else self._axes_before_mixing

    def _stays(self, followed: Linearization, tangent: Tensor, tokens: range) -> bool:
        """Whether a tangent is exactly zero outside its windows."""
        at_tokens = Window(tokens.start, tokens.stop, self.length)
        onward = Window(self._start(tokens.start), self.length, self.length)
        prefix = {variable for call in self._prefix for variable in call.outputs}
        for variable, found in followed.push({self.source: at_tokens.widen(tangent, ROWS)}):
            window = at_tokens if variable in prefix else onward
            if not window.holds(found, self._windowed[variable]):
                return False
        return True

    def _middle(self, step: int) -> int:
        return self.length // 2 // step * step

    def _same(self, tangent: Tensor, tokens: range) -> bool:
        window = Window(tokens.start, tokens.stop, self.length)
        expected = dict(self.whole.push({self.source: window.widen(tangent, ROWS)}))
        found = dict(self.push(tangent, tokens))
        return found.keys() == expected.keys() and all(
            close(found[target], expected[target]) for target in expected
        )


def causal_share(length: int) -> float:
    """The average share of the tokens that a window of a causal model holds."""
    return 0.5 * (1 + 1 / min(STEPS, length))
