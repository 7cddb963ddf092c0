"""The studies of both papers on any model and corpus."""
