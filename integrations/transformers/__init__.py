"""Models of ``transformers``, without TransformerLens."""
