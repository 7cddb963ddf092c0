"""Adapters between model libraries and the core of ``captum_hta``."""
