"""The prompt of the two commands that chat in the terminal: `run`, with a model, and `chat`, with a server."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

HELP = "/clear starts a new conversation, /exit (or Ctrl-D) ends, Ctrl-C stops an answer"


def converse(name: str, answer: Callable[[str], object], clear: Callable[[], None], notes: Console) -> int:
    """Asks for lines and answers them until the user leaves. `name` is who answers. Returns the exit code."""
    notes.print(f"{name}: {HELP}", style="dim")
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if text == "/exit":
            return 0
        if text == "/clear":
            clear()
        elif text.startswith("/"):
            notes.print(HELP, style="dim")
        elif text:
            answer(text)
