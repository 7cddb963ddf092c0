"""Models of TransformerLens: bridges of version 4, and the hooked classes of versions 2 and 3."""
