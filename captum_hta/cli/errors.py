"""Errors that the user of the command can fix."""


class UserError(Exception):
    """A mistake in how the command was called; the message says how to fix it."""
