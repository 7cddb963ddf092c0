"""Contributions compared with other methods, and with what heads do."""
