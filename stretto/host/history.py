"""What a session remembers of its turns: a tree, stored as what each turn added.

    first ---- second ---- third            a turn may follow any earlier one (`after`), or a cut of its history:
         \\                                  every line from a leaf to the root is one history
          \\--- other second
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stretto.protocol import RequestError, SessionTurn


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first ids are equal."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


@dataclass(eq=False, slots=True)
class Past:
    """A turn that became history: the first `kept` ids of the history that it followed, then `ids`."""

    after: Past | None
    kept: int
    ids: list[int]
    prompt: int  # ids of the whole history that were its prompt

    def line(self) -> Iterator[Past]:
        """This turn and those before it."""
        past: Past | None = self
        while past is not None:
            yield past
            past = past.after

    def tokens(self) -> list[int]:
        parts, upto = [], self.kept + len(self.ids)
        for past in self.line():
            parts.append(past.ids[: max(0, upto - past.kept)])
            upto = min(upto, past.kept)
        return [i for part in reversed(parts) for i in part]


@dataclass(slots=True)
class History:
    """`tokens` is the line that the next turn follows unless it says otherwise; `prompt` of them were the prompt of
    the last turn."""

    tokens: list[int] = field(default_factory=list)
    prompt: int = 0
    head: Past | None = None
    named: dict[str, Past] = field(default_factory=dict)

    def base(self, turn: SessionTurn) -> tuple[Past | None, list[int]]:
        """The turn that a new one follows and the ids that stay of its history. Raises RequestError."""
        past, tokens, prompt = self.head, self.tokens, self.prompt
        if turn.after is not None:
            past = self.named.get(turn.after)
            if past is None:
                raise RequestError(f"session {turn.sid!r} has no turn {turn.after!r} in its history", param="session",
                                   code="session_turn_not_found")
            tokens, prompt = past.tokens(), past.prompt
        elif turn.replace:
            past, tokens, prompt = None, [], 0
        if turn.drop_previous_output:
            tokens = tokens[:prompt]
        if turn.offset is not None:
            if not -len(tokens) <= turn.offset <= len(tokens):
                raise RequestError(f"offset is {turn.offset}; the history of session {turn.sid!r} has {len(tokens)}"
                                   " tokens", param="offset")
            tokens = tokens[: turn.offset]
        return past, tokens

    def prompt_of(self, turn: SessionTurn, given: list[int]) -> tuple[Past | None, list[int], int]:
        """(turn followed, whole prompt, ids of it that are history)."""
        if turn.mode == "tag":
            kept = common(self.tokens, given)
            return self.head if kept else None, given, kept
        past, base = self.base(turn)
        more = given
        if base and turn.continuation is not None:
            more = turn.continuation
            if turn.join and more[:1] == base[-1:]:
                more = more[1:]
            if not more:
                raise RequestError("the turn adds nothing to the session's history", param="prompt")
        return past, base + more, len(base)

    def commit(self, name: str, turn: SessionTurn, past: Past | None, kept: int, tokens: list[int],
               prompt: int) -> None:
        """`tokens` are the whole history of a turn that ended; its first `kept` ids are of the turn it followed."""
        if turn.replace:
            self._forget(past)
        self.head = self.named[name] = Past(past, kept, tokens[kept:], prompt)
        self.tokens, self.prompt = tokens, prompt

    def _forget(self, past: Past | None) -> None:
        """What followed this turn; None: everything."""
        self.named = {name: p for name, p in self.named.items()
                      if past is not None and (p is past or past not in p.line())}

    def cut(self, n: int) -> None:
        """The first `n` ids of the line stay."""
        self.tokens, self.prompt = self.tokens[:n], min(self.prompt, n)

    def branch(self, n: int) -> History:
        return History(self.tokens[:n], min(self.prompt, n), self.head, dict(self.named))
