"""Norms of Jacobian blocks: which mode is the cheapest, and each of the modes."""
