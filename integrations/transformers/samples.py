"""Variants of the tokens that an adapter is proven on."""

from __future__ import annotations

from dataclasses import replace

from captum_hta.model.encoding import Encoding


def turned(encoding: Encoding, part: str | None) -> Encoding:
    """Other tokens in the same number: those of a text in another order, an image or audio reversed.

    Args:
        encoding: The tokens.
        part: For ``"cross"``, what the encoder reads is changed, which the sources are of.
    """
    if part == "cross" and encoding.context is not None:
        return replace(encoding, context=turned(encoding.context, None))
    if encoding.content is not None:
        return replace(encoding, content=encoding.content.flip(-1))
    return replace(encoding, ids=[*encoding.ids[1:], encoding.ids[0]])


def shortened(encoding: Encoding) -> Encoding:
    """The same text without its last two tokens, and so what the encoder reads, if that is a text."""
    context = encoding.context
    if context is not None and context.ids:
        context = shortened(context)
    return replace(encoding.first(len(encoding) - 2), context=context)
