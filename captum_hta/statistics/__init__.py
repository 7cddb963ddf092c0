"""Statistics over many examples."""
