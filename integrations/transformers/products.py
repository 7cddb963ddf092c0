"""Observation of attention that is written out: softmaxes whose results multiply values.

Models whose attention does not go through the attention interface of ``transformers`` compute it by functions
of PyTorch. These are recorded here as they are called, in the dtypes and with the masks of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PRODUCTS = ("matmul", "__matmul__", "bmm", "einsum")
_ATTENTION = "scaled_dot_product_attention"


@dataclass(frozen=True)
class Product:
    """A pattern and the values that it multiplies.

    Attributes:
        pattern: ``[batch, head, query, key]``.
        value: ``[batch, head, key, d_head]``, with one head, or one for each group, where heads share values.
    """

    pattern: Tensor
    value: Tensor


class ProductObserver(TorchFunctionMode):
    """Within the context, passes every product of a softmax and values to a function.

    Fused attention (``scaled_dot_product_attention``) is computed by its definition, so that its pattern is
    seen.

    Args:
        record: Called with every product.
        batch: Number of examples, to tell the axes of batch and heads where they are one.
    """

    def __init__(self, record: Callable[[Product], object], batch: int) -> None:
        super().__init__()
        self.record, self.batch = record, batch
        self._patterns: dict[int, Tensor] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of PyTorch, and note what it does to patterns."""
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == _ATTENTION:
            return self._attention(*args, **kwargs)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            self._follow(name, out, args, kwargs)
        return out

    def _follow(self, name: str, out: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note a softmax, what is made of one without other factors, and its product with values."""
        if name in ("softmax", "_safe_softmax"):
            self._patterns[id(out)] = out
            return
        given = [*args, *kwargs.values()]
        found = next((one for one in given if id(one) in self._patterns), None)
        if found is None and name != "einsum":
            return
        if name in _PRODUCTS:
            self._multiply(name, args)
        elif out.dim() >= 3 and out.is_floating_point():
            self._patterns[id(out)] = out

    def _multiply(self, name: str, args: Sequence[Any]) -> None:
        """Record a product whose left factor is a pattern."""
        if name == "einsum":
            product = self._of_einsum(args)
        else:
            left, right = args[:2]
            is_pattern = id(left) in self._patterns and left.dim() >= 3
            product = self._split(left, right) if is_pattern else None
        if product is not None:
            self.record(product)

    def _of_einsum(self, args: Sequence[Any]) -> Product | None:
        """The product that an equation such as ``bhqk,bhkd->bhqd`` stands for."""
        if not isinstance(args[0], str) or len(args) != 3 or id(args[1]) not in self._patterns:
            return None
        inputs, _, out = args[0].replace(" ", "").partition("->")
        left, _, right = inputs.partition(",")
        keys = [label for label in left if label in right and label not in out]
        queries = [label for label in left if label in out and label not in right]
        widths = [label for label in right if label in out and label not in left]
        shared = [label for label in left if label in right and label in out]
        if [len(keys), len(queries), len(widths), len(shared)] != [1, 1, 1, 2]:
            return None
        pattern = args[1].permute([left.index(label) for label in (*shared, *queries, *keys)])
        return Product(pattern, args[2].permute([right.index(label) for label in (*shared, *keys, *widths)]))

    def _split(self, pattern: Tensor, value: Tensor) -> Product | None:
        """A product with axes of batch and heads."""
        if pattern.dim() == 3 and value.dim() == 3 and len(pattern) % self.batch == 0:
            pattern, value = (torch.unflatten(one, 0, (self.batch, -1)) for one in (pattern, value))
        is_whole = pattern.dim() == value.dim() == 4 and pattern.shape[3] == value.shape[2]
        return Product(pattern, value) if is_whole else None

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Scaled dot-product attention by its definition in PyTorch's documentation."""
        if enable_gqa:
            key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
        scores = (query @ key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        if attn_mask is not None:
            is_bool = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if is_bool else scores + attn_mask
        pattern = scores.softmax(-1).nan_to_num(0.0)
        self.record(Product(pattern, value))
        return pattern @ value
