"""The error that every command turns into one line."""


class UserError(Exception):
    """Bad input or configuration: one line that says what, where, and what to do."""
