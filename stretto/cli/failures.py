"""How commands end: exit codes, and failures that are told in one line without a traceback. No torch in this module."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from stretto.compat import ConfigError
from stretto.config import UsageError

EXIT_FAILED = 1
EXIT_USAGE = 2  # the command line cannot be understood
EXIT_REFUSED = 3  # it can be, and cannot be done as asked
EXIT_PIPE = 128 + 13  # as a shell reports SIGPIPE: nobody reads on


class CommandFailed(RuntimeError):
    """A command that could not do its work. The message says why and what to do."""


def told(command: Callable[[], object], errors: Console) -> int:
    """Runs a command. Returns its exit code; what can be expected to fail is told in a line each."""
    try:
        code = command()
    except UsageError as e:
        _print(errors, f"error: {e}")
        return EXIT_USAGE
    except CommandFailed as e:
        _print(errors, f"error: {e}")
        return EXIT_FAILED
    except ConfigError as e:
        for refusal in e.refusals:
            _print(errors, f"refused: {refusal}")
        return EXIT_REFUSED
    return code if isinstance(code, int) else 0


def _print(errors: Console, line: str) -> None:
    errors.print(line, highlight=False, markup=False, soft_wrap=True, style="red")
