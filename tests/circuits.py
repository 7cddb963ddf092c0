"""Transformers built by hand, whose routes are known, as models of the core's protocol."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import Identity, Linear, Module, ModuleList

from captum_hta.model.attention import Attention, OutputProjection, Unembedding
from captum_hta.model.encoding import Batch, Encoding

SHARP = 60.0
"""Scores of this size make a softmax as good as one-hot."""
GAIN = 1e7
"""What a layer writes is so much larger than what it reads, so that the coordinates that it writes to count
for nothing in the input, where they are empty but could be changed.
"""


class Block(Module):
    """A pre-LN block without norms: attention by given weights, then a feed-forward part, if there is one.

    Args:
        query, key, value: ``[head, width, d_head]``.
        out: ``[head, d_head, width]``.
        bias: Added to the scores, ``[head, query, key]`` or what broadcasts to it, as of relative positions.
        feed_forward: Added to the residual; ``None``: nothing.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        bias: Tensor | float = 0.0,
        feed_forward: Callable | None = None,
    ) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (w.double() for w in (query, key, value, out))
        self.bias, self.feed_forward = bias, feed_forward
        self.entry, self.z, self.exit, self.pattern, self.values = (Identity() for _ in range(5))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.entry(x)
        q, k, v = (torch.einsum("btd,hdc->bhtc", x, w) for w in (self.query, self.key, self.value))
        scores = (q @ k.mT + self.bias).masked_fill(~mask[:, None, None, :], -torch.inf)
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        pattern, v = self.pattern(scores.softmax(-1)), self.values(v)
        z = self.z((pattern @ v).transpose(1, 2).flatten(2))
        x = x + z @ self.out.flatten(0, 1)
        return self.exit(x if self.feed_forward is None else x + self.feed_forward(x))


class Circuit(Module):
    """Letters in, one token each; nothing is trained.

    Args:
        embedding: ``[letter, width]``, of ``"A"`` and those that follow.
        positions: ``[position, width]``, which are added.
        blocks: The blocks.
        unembedding: ``[letter, width]``. Default: ``None``, there are no logits.
    """

    key_layers = None
    first_entry = 0
    fingerprint = "by hand"
    size = SimpleNamespace(causal=True)
    reader = SimpleNamespace(medium="text", reads="a string of letters", accepts=lambda t: isinstance(t, str))
    max_length = None
    checks = ()
    architecture = name = "circuit"
    mask_token = None

    def __init__(
        self, embedding: Tensor, positions: Tensor, blocks: list[Block], unembedding: Tensor | None = None
    ) -> None:
        super().__init__()
        self.embedding, self.positions = embedding.double(), positions.double()
        self.blocks = ModuleList(blocks)
        self.num_layers, self.d_model = len(blocks), embedding.shape[1]
        self.num_heads, self.d_head = blocks[0].out.shape[:2]
        self.device, self.dtype = torch.device("cpu"), torch.float64
        self.head = None
        if unembedding is not None:
            self.head = Linear(*unembedding.T.shape, bias=False).double().requires_grad_(False)
            self.head.weight.copy_(unembedding)

    def encode(self, text: str, max_length: int | None = None) -> Encoding:
        ids = [ord(letter) - ord("A") for letter in text]
        return Encoding(ids, [0] * len(ids), list(text), list(range(len(ids))), list(text))

    def batch(self, encodings: list[Encoding]) -> Batch:
        longest = max(map(len, encodings))
        ids = torch.tensor([one.ids + [0] * (longest - len(one)) for one in encodings])
        mask = torch.tensor([[True] * len(one) + [False] * (longest - len(one)) for one in encodings])
        return Batch((ids,), (mask,), mask)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding[ids] + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        return x

    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.head(self(ids, mask))

    def source(self, layer: int) -> Module:
        return self.blocks[layer].entry

    def target(self, layer: int, kind: str = "head") -> Module:
        return self.blocks[layer].z if kind == "head" else self.blocks[layer].exit

    def attention(self, batch: Batch) -> list[Attention]:
        seen = {}
        handles = [
            place.register_forward_hook(lambda module, args, out: seen.__setitem__(module, out.detach()))
            for block in self.blocks
            for place in (block.pattern, block.values)
        ]
        self(*batch.inputs, *batch.extra)
        for handle in handles:
            handle.remove()
        return [Attention(seen[block.pattern], None, seen[block.values]) for block in self.blocks]

    def output_projection(self, layer: int) -> OutputProjection:
        return OutputProjection(self.blocks[layer].out)

    @property
    def unembedding(self) -> Unembedding:
        return Unembedding(self.head.weight)


def _eye(width: int, rows: range, columns: range) -> Tensor:
    """A map of some coordinates to others: ``[width, columns]``."""
    out = torch.zeros(width, len(columns))
    out[list(rows), list(range(len(columns)))] = 1
    return out


# Coordinates of the width: a letter's identity, a position, and what the first layer writes.
LETTERS, LENGTH = 4, 6
LETTER = range(LETTERS)
PLACE = range(LETTERS, LETTERS + LENGTH)
WRITTEN = range(LETTERS + LENGTH, 2 * LETTERS + LENGTH)
WIDTH = 2 * LETTERS + LENGTH


def spaces() -> SimpleNamespace:
    """Embeddings, and the maps from the width to each of its spaces."""
    embedding = torch.zeros(LETTERS, WIDTH)
    embedding[:, list(LETTER)] = torch.eye(LETTERS)
    positions = torch.zeros(LENGTH, WIDTH)
    positions[:, list(PLACE)] = torch.eye(LENGTH)
    return SimpleNamespace(
        embedding=embedding,
        positions=positions,
        letter=_eye(WIDTH, LETTER, LETTER),
        place=_eye(WIDTH, PLACE, PLACE),
        written=_eye(WIDTH, WRITTEN, WRITTEN),
    )


def looking_back(steps: int | None) -> Block:
    """One head that looks at the token some steps before its query (or at the first one, of ``None``) and
    writes the letter that it reads into what the first layer writes.
    """
    s = spaces()
    wanted = torch.zeros(LENGTH, LENGTH)
    for place in range(LENGTH):
        wanted[place, 0 if steps is None else max(place - steps, 0)] = SHARP
    return Block((s.place @ wanted)[None], s.place[None], s.letter[None], GAIN * s.written.T[None])


def transcript(threshold: Tensor | float) -> Block:
    """No attention; writes the letters that exceed a threshold, ``[width]`` or for all the same."""
    s = spaces()
    nothing = torch.zeros(1, WIDTH, LETTERS)
    write = GAIN * (s.letter @ s.written.T).double()
    return Block(
        nothing, nothing, nothing, nothing.mT, feed_forward=lambda x: torch.relu(x - threshold) @ write
    )


def induction(reads: str) -> Block:
    """One head that looks for the token behind an earlier one of its query's letter, with the help of a first
    layer that has written each token's predecessor, and reads the letter there (``"letter"``) or what was
    written there (``"written"``).
    """
    s = spaces()
    value = s.letter if reads == "letter" else s.written
    return Block(SHARP * s.letter[None], s.written[None], value[None], s.letter.T[None])


def circuit(*blocks: Block) -> Circuit:
    """A circuit on these blocks, with the letters themselves as unembedding."""
    s = spaces()
    return Circuit(s.embedding, s.positions, list(blocks), s.embedding)


def silent() -> Circuit:
    """A head that gives nine tenths of its attention to the first token, and the same to all others. Its
    values are what the feed-forward part of the layer before makes of letters: of A nothing, and no little
    change of it makes it something.
    """
    s = spaces()
    threshold = torch.full((WIDTH,), 0.5).double()
    threshold[0] = 10.0
    nothing = torch.zeros(1, WIDTH, LETTERS)
    bias = torch.tensor([27.0, 1, 1, 1]).double().log()
    reader = Block(nothing, nothing, s.written[None], s.written.T[None], bias=bias)
    return circuit(transcript(threshold), reader)
