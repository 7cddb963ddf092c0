"""Names of heads, such as ``L18H6`` for head 6 of layer 18."""

from __future__ import annotations

import re

_NAME = re.compile(r"[Ll](\d+)[Hh](\d+)")


def head_name(layer: int, head: int) -> str:
    """The name of a head.

    Example:
        >>> head_name(18, 6)
        'L18H6'
    """
    return f"L{layer}H{head}"


def named_head(name: str) -> tuple[int, int]:
    """The layer and the head that a name stands for.

    Raises:
        ValueError: If it is no name of a head.

    Example:
        >>> named_head("L18H6")
        (18, 6)
    """
    found = _NAME.fullmatch(name.strip())
    if found is None:
        raise ValueError(f"{name!r} is no head: write its layer and its number, as in L18H6")
    layer, head = map(int, found.groups())
    return layer, head
