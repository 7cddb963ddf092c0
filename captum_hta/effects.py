"""From an answer back to tokens: the direct effect of every head on a logit, and where it takes it from."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from captum_hta.jacobian.arguments import as_int, is_integer
from captum_hta.jacobian.forecast import forecast
from captum_hta.jacobian.forward_pass import ForwardPass
from captum_hta.jacobian.norms import Energy, shares
from captum_hta.jacobian.plan import Plan
from captum_hta.jacobian.pullback import Pullback, pulled_back
from captum_hta.jacobian.query import query_positions
from captum_hta.jacobian.target_directions import token_id
from captum_hta.model.attention import Attention
from captum_hta.model.encoding import Batch, Encoding, Text
from captum_hta.model.head_names import head_name
from captum_hta.model.precision import full_precision
from captum_hta.model.protocol import Model, check_model
from captum_hta.model.residual_stream import ResidualStream, residual_stream
from captum_hta.result import Contributions
from captum_hta.texts import encoded

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Largest difference between a logit and its parts, relative to the sizes of all parts, in float32."""


@dataclass(frozen=True, repr=False)
class HeadEffects:
    r"""The direct effect of every head on a logit, or on the difference of two, and its source tokens.

    The logit is the sum of the effects of heads, MLPs, embedding, other parts and biases, with the scale of
    the final norm frozen at this text. Tensors have a query axis only if several queries were asked for.

    Attributes:
        effects: Direct effects of heads, ``[layer, head]`` or ``[layer, head, query]``. Positive ones push
            the logit up.
        contributions: Contributions of source tokens to each head's output along the direction ``v`` of its
            effect, of the queries asked for. Its ``attention`` has the attention of the same rows.
        signed: :math:`v^\top J_{ij} x_i`, ``[layer, head, key]`` or ``[layer, head, query, key]``: how far
            the effect would change, to first order, if the source vector :math:`x_i` grew by its own length.
        mlps: Direct effects of the feed-forward parts, ``[layer]`` or ``[layer, query]``.
        embedding: Direct effect of what enters the first block, a number or ``[query]``.
        others: The same for blocks without attention heads; zero for most models.
        biases: The same for the biases of output projections, final norm and unembedding.
        logit: The logit or the difference, as the model computes it, before a soft cap if there is one.
        token, against: Labels of the tokens; ``against`` is ``None`` for a single logit.
        queries: Positions of the queries in the text.
        is_capped: Whether the model caps its logits afterwards.
        model: The name of the model.
        plan: How the contributions were computed.
    """

    effects: Tensor
    contributions: Contributions
    signed: Tensor
    mlps: Tensor
    embedding: Tensor
    others: Tensor
    biases: Tensor
    logit: Tensor
    token: str
    against: str | None
    queries: list[int]
    is_capped: bool
    model: str
    plan: Plan

    def __repr__(self) -> str:
        layers, heads = self.effects.shape[:2]
        against = "" if self.against is None else f" against {self.against!r}"
        return (
            f"HeadEffects({self.token!r}{against}, {self.model}: {layers} layers of {heads} heads, "
            f"queries={self.queries}, logit={[round(one, 3) for one in self.logit.flatten().tolist()]})"
        )

    @property
    def parts(self) -> dict[str, Tensor]:
        """Total effects of heads, MLPs, embedding, other parts and biases, which add up to ``logit``."""
        return {
            "heads": self.effects.sum((0, 1)),
            "MLPs": self.mlps.sum(0),
            "embedding": self.embedding,
            "others": self.others,
            "biases": self.biases,
        }

    @property
    def keys(self) -> list[str]:
        """Labels of the source tokens."""
        keys = self.contributions.keys
        return self.contributions.tokens[0] if keys is None else keys[0]

    def top(self, k: int = 10) -> pd.DataFrame:
        """The heads with the largest effects, up or down.

        Returns:
            For each head its name, its effect, and the source tokens with the largest attention and with the
            largest contribution; of several queries also the position of the query.
        """
        import pandas as pd

        return pd.DataFrame([self._strongest(*place) for place in self.order()[:k]])

    def order(self) -> list[tuple[int, int, int]]:
        """Layer, head and index of the query in the order of effects, the largest first, up or down."""
        flat = self._with_queries(self.effects).abs()
        ranks = flat.flatten().argsort(descending=True, stable=True)
        layers, heads, queries = torch.unravel_index(ranks, flat.shape)
        return list(zip(layers.tolist(), heads.tolist(), queries.tolist(), strict=True))

    def to_frame(self) -> pd.DataFrame:
        """All numbers as a table with a row for each head, query and key."""
        import pandas as pd

        values = self.contributions.values[0]
        layer, head, query, key = (one.flatten().tolist() for one in torch.meshgrid(
            *(torch.arange(size) for size in values.shape), indexing="ij"
        ))  # fmt: skip
        effects = self._with_queries(self.effects)[..., None].expand_as(values)
        return pd.DataFrame({
            "layer": layer,
            "head": head,
            "name": list(map(head_name, layer, head)),
            "query": [self.queries[number] for number in query],
            "key": key,
            "token": [self.keys[number] for number in key],
            "effect": effects.flatten().tolist(),
            "attention": self.contributions.attention[0].flatten().tolist(),
            "contribution": values.flatten().tolist(),
            "signed": self.signed.reshape(values.shape).flatten().tolist(),
        })  # fmt: skip

    def _strongest(self, layer: int, head: int, query: int) -> dict[str, object]:
        effect = self._with_queries(self.effects)[layer, head, query].item()
        row: dict[str, object] = {"head": head_name(layer, head), "effect": effect}
        if len(self.queries) > 1:
            row["query"] = self.queries[query]
        contributions = self.contributions
        for name, values in {
            "attention": contributions.attention,
            "contribution": contributions.values,
        }.items():
            share, key = values[0, layer, head, query].max(-1)
            row |= {f"{name} from": self.keys[int(key)], f"{name} share": share.item()}
        return row

    def _with_queries(self, effects: Tensor) -> Tensor:
        """``[layer, head, query]``."""
        return effects if effects.dim() == 3 else effects[..., None]


def head_effects(
    model: Model,
    text: Text,
    token: int | str,
    against: int | str | None = None,
    queries: int | slice | Sequence[int] = -1,
) -> HeadEffects:
    r"""The direct effect of every head on a logit, and the source tokens that it takes this effect from.

    A head adds :math:`z^\top v` to the logit of token ``t`` directly, not through later blocks, with
    :math:`v = W_O\, \Gamma\, u_t / \sigma`: its output projection, the final norm with its scale
    :math:`\sigma` frozen at this text, and the column :math:`u_t` of the model's own unembedding. Norms
    behind the sublayers (Gemma 2) are frozen too. The source tokens are those of the input contribution,
    along ``v``.

    It takes one backward pass for each layer, for all its heads at once; :func:`effects_plan` tells the cost
    before.

    Args:
        model: An adapter around a decoder with its language modelling head.
        text: A text, or token ids.
        token: The token whose logit is explained: its id, or a text that is exactly one token (many begin
            with a blank).
        against: Another token, whose logit is subtracted. Default: ``None``.
        queries: Positions at which the logit is read, negative ones from the end: an int, a slice, or a list.
            Default: ``-1``, the last, whose logits predict the next token.

    Returns:
        The effects of heads and of all other parts, and the source tokens of each head.

    Raises:
        ValueError: If the model has no logits of tokens, a token is not one token of it, a query lies outside
            the text, or the parts of the model do not add up to the logit.
        TypeError: If the text, a token or the queries are of a wrong type.

    References:
        Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021 (direct effects); Wang et
        al., "Interpretability in the Wild", ICLR 2023 (logit differences).
    """
    check_model(model)
    if not model.reader.accepts(text):
        raise TypeError(f"text must be {model.reader.reads}, got {reprlib.repr(text)}")
    named = [token] if against is None else [token, against]
    columns = _Columns(model, *(token_id(model, one) for one in named))
    encoding = encoded(model, text, 0)
    positions = _positions(queries, len(encoding))
    plan = effects_plan(model, len(encoding), len(positions))
    logger.info("%s", plan)
    with full_precision():
        batch = model.batch([encoding])
        stream = residual_stream(model, batch, positions)
        vectors = stream.readout.vectors(columns.vector)
        directions = [one.directions(vectors) for one in stream.attention]
        found = _pulled_back(model, batch, directions, positions)
        rows = _contributions(model, encoding, model.attention(batch), found, positions, plan)
    parts, logit = _parts(model, stream, columns, directions)
    labels = [_label(model, one) for one in named]
    result = HeadEffects(
        **parts,
        contributions=rows,
        signed=torch.stack([one.signed for one in found]).to(rows.values),
        logit=logit,
        token=labels[0],
        against=None if against is None else labels[1],
        queries=positions.tolist(),
        is_capped=stream.readout.is_capped,
        model=model.name,
        plan=plan,
    )
    return _single(result) if is_integer(queries) else result


def effects_plan(model: Model, tokens: int, queries: int = 1) -> Plan:
    """What :func:`head_effects` will cost, without running the model.

    Args:
        model: The adapter.
        tokens: Tokens of the text.
        queries: Number of queries.
    """
    planned = forecast(
        model.size,
        tokens,
        queries=queries,
        norm="sum",
        mode="reverse",
        dtype=model.dtype,
        device=model.device,
    )  # with the norm "sum", too, each head and query has one cotangent
    rows = model.num_heads * queries
    return replace(planned, chunk=min(rows, planned.chunk or rows), reason="one pass a layer")


@dataclass(frozen=True)
class _Columns:
    """The columns of the unembedding that make a logit, or the difference of two.

    Attributes:
        model: The model.
        token, against: Ids.
    """

    model: Model
    token: int
    against: int | None = None

    @property
    def vector(self) -> Tensor:
        """The column, or the difference of two, ``[width]``."""
        weight = self.model.unembedding.weight
        weight = weight[[self.token, self.token if self.against is None else self.against]]
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return wide[0] if self.against is None else wide[0] - wide[1]

    def of(self, logits: Tensor) -> Tensor:
        """The logit or the difference, ``[query]`` from ``[query, token]``."""
        first = logits[:, self.token]
        return first if self.against is None else first - logits[:, self.against]

    def bias(self, stream: ResidualStream) -> float:
        """What the biases of the final norm and of the unembedding add."""
        readout = stream.readout
        subtracted = 0.0 if self.against is None else readout.bias(self.against)
        return readout.constant(self.vector) + readout.bias(self.token) - subtracted


def _positions(queries: int | slice | Sequence[int], length: int) -> Tensor:
    """Positions ``[query]``."""
    found = query_positions(queries, length, torch.device("cpu"), "queries")
    return torch.arange(length, device="cpu") if found is None else found


def _pulled_back(model: Model, batch: Batch, directions: Sequence[Tensor], queries: Tensor) -> list[Pullback]:
    layers = range(model.num_layers)
    forward_pass = ForwardPass(
        model.forward,
        batch.inputs,
        batch.extra,
        [model.target(layer, "head") for layer in layers],
        model.source(model.first_entry),
        num_heads=model.num_heads,
    )
    return pulled_back(forward_pass, directions, queries)


def _contributions(
    model: Model,
    encoding: Encoding,
    attention: Sequence[Attention],
    found: Sequence[Pullback],
    queries: Tensor,
    plan: Plan,
) -> Contributions:
    """The contributions along the directions: queries are those asked for, keys all tokens of the text."""
    patterns = torch.stack([one.pattern[0][:, queries] for one in attention])[None]
    values, _ = shares(Energy(torch.stack([one.energy for one in found])))
    dtype = torch.promote_types(model.dtype, torch.float32)
    return Contributions(
        values=values[None].to("cpu", dtype),
        standard_error=None,
        attention=patterns.to("cpu", dtype),
        tokens=[[encoding.tokens[query] for query in queries.tolist()]],
        layers=list(range(model.num_layers)),
        source="input",
        target="head",
        norm="frobenius",
        model=model.name,
        plans=[plan],
        keys=[encoding.tokens],
    )


def _label(model: Model, token: int | str) -> str:
    """What to call a token: the text that names it, or its label in texts."""
    if isinstance(token, str):
        return token
    try:
        return model.encode([as_int(token)]).tokens[0]
    except ValueError:  # the padding token, which texts do not contain
        return str(token)


def _parts(
    model: Model, stream: ResidualStream, columns: _Columns, directions: Sequence[Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """The effects of all parts, by the name of their attribute, and the logit; with a query axis.

    Raises:
        ValueError: If the parts do not add up to the logit.
    """
    vectors = stream.readout.vectors(columns.vector)
    biases = torch.stack([one.bias for one in stream.attention]).sum(0)
    effects = [(one.z * v).sum(-1) for one, v in zip(stream.attention, directions, strict=True)]
    parts = {
        "effects": torch.stack(effects),
        "mlps": (stream.mlps * vectors).sum(-1),
        "embedding": (stream.embedding * vectors).sum(-1),
        "others": (stream.others * vectors).sum(-1),
        "biases": (biases * vectors).sum(-1) + columns.bias(stream),
    }
    logit = columns.of(stream.readout.logits)
    _require_sum(model, parts, logit)
    return {name: part.cpu() for name, part in parts.items()}, logit.cpu()


def _require_sum(model: Model, parts: dict[str, Tensor], logit: Tensor) -> None:
    """Raise a ``ValueError`` if the parts do not add up to the logit."""
    flat = torch.cat([part.reshape(-1, len(logit)) for part in parts.values()])
    error, size = (flat.sum(0) - logit).abs(), flat.abs().sum(0)
    if (error > max(TOLERANCE, 32 * torch.finfo(model.dtype).eps) * size).any():
        raise ValueError(
            f"heads, MLPs, embedding and biases of {model.name} add up to {flat.sum(0).tolist()}, but the "
            f"logit is {logit.tolist()}: something else acts on the hidden embeddings, such as a hook or an "
            "adapter; remove it"
        )


def _single(result: HeadEffects) -> HeadEffects:
    """The result of one query, without the query axis."""
    return replace(
        result,
        effects=result.effects[..., 0],
        signed=result.signed[:, :, 0],
        mlps=result.mlps[:, 0],
        **{name: getattr(result, name)[0] for name in ("embedding", "others", "biases", "logit")},
    )
