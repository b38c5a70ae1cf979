"""How commands end: exit codes, and failures that are told in one line without a traceback. No torch in this module."""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_USAGE = 2  # the command line cannot be understood
EXIT_REFUSED = 3  # it can be, and cannot be done as asked


class CommandFailed(RuntimeError):
    """A command that could not do its work. The message says why and what to do."""


class UsageError(ValueError):
    """A command line, variable or file that cannot be understood."""
