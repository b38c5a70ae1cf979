"""The text of one answer, as it grows: whole characters, stop strings, several ids a push.

    ids      "The"  " end"  "."  "\\n#"  "#"         stop string "\\n##"
    text     "The"  " end"  "."  ""     stop         "\\n#" is held back: it could become the stop string

However the ids are cut into pushes, the joined deltas are the same text, and the stop is found at the same id. What the
text is, is defined by ids alone: what the answer's ids up to the stop add to the tokenizer's decoding of the prompt, so
prompt and answer together are the text of both (`detokenize` says where an answer begins a text of its own).

No torch in this module, and nothing of the host half, which uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from stretto.params import SamplingParams
from stretto.text.detokenize import Decoder


class TextDelta(msgspec.Struct, gc=False):
    """What a push added. `stop`: the stop string that is now complete, else None. `kept`: how many of the pushed ids
    belong to the answer, that is up to and including the one that completes the stop; all of them if none does."""

    text: str
    stop: str | None
    kept: int


class TextStream(Protocol):
    """Ids to text, one stream a choice; finds stop strings."""

    def follow(self, prompt: Sequence[int]) -> None:
        """What the answer stands behind; said before the first push."""
        ...

    def push(self, ids: list[int], final: bool) -> TextDelta:
        """`final`: no more ids will come; whatever was held back is released."""
        ...


class MakesDecoders(Protocol):
    """The part of a tokenizer that is needed here."""

    def decoder(self, skip_special_tokens: bool) -> Decoder: ...


class StopStrings:
    """Finds the first place where any stop string is complete, reading every character once.

    One Knuth-Morris-Pratt automaton for each string; the state is how much of it the text ends with, so the largest
    state is what must be held back. Where two strings end at the same character, the longer one counts."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(dict.fromkeys(s for s in stops if s))
        self._borders = [_borders(s) for s in self._stops]
        self._states = [0] * len(self._stops)
        self._first = frozenset(s[0] for s in self._stops)
        self._held = ""

    def feed(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """(text that can go out, the stop string that became complete or None). What goes out ends before the stop
        string; what follows it is dropped. Unless `armed`, complete strings are text like any other."""
        if not self._held and self._first.isdisjoint(text):
            return text, None
        held = len(self._held)
        buffer = self._held + text
        for end, char in enumerate(text, held + 1):
            found = self._advance(char)
            if found and armed:
                self._held = ""
                return buffer[: end - len(found)], found
        out = len(buffer) - max(self._states)
        self._held = buffer[out:]
        return buffer[:out], None

    def flush(self) -> str:
        """The text held back, which will not become a stop string any more."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        found: str | None = None
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            state = self._states[i]
            while state and stop[state] != char:
                state = borders[state - 1]
            state += stop[state] == char
            if state == len(stop):
                found = stop if found is None or len(stop) > len(found) else found
                state = borders[state - 1]
            self._states[i] = state
        return found


def _borders(text: str) -> list[int]:
    """For every prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        length += text[i] == text[length]
        borders[i] = length
    return borders


class IncrementalText:
    """The text of one choice of a request. Push only ids whose text belongs to the answer: not a stop id.

    Stop strings count from the id on with which `min_tokens` ids are reached; earlier ones are text."""

    def __init__(self, decoder: Decoder, stop: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0):
        self._decoder, self._include_stop, self._min_tokens = decoder, include_stop, min_tokens
        self._stops = StopStrings(stop) if stop else None
        self._count = 0
        self._ended = False

    @classmethod
    def for_request(cls, tokenizer: MakesDecoders, params: SamplingParams) -> IncrementalText:
        return cls(tokenizer.decoder(params.skip_special_tokens), params.stop, include_stop=params.include_stop,
                   min_tokens=params.min_tokens)

    def follow(self, prompt: Sequence[int]) -> None:
        self._decoder.follow(prompt)

    def push(self, ids: Sequence[int], final: bool = False) -> TextDelta:
        """The text that became certain. `final`: no ids follow, so everything held back is released. After a stop, or
        a final push, the stream has ended. Raises RuntimeError for a push after the end."""
        if self._ended:
            raise RuntimeError("a push after the end of the text")
        if self._stops is None and not final:  # most pushes of most requests: nothing to look for
            return TextDelta("".join(map(self._decoder.feed, ids)), None, len(ids))
        parts: list[str] = []
        for i, token_id in enumerate(ids):
            self._count += 1
            if stop := self._take(self._decoder.feed(token_id), parts):
                return TextDelta("".join(parts), stop, i + 1)
        if final:
            self._ended = True
            if stop := self._take(self._decoder.flush(), parts):
                return TextDelta("".join(parts), stop, len(ids))
            if self._stops:
                parts.append(self._stops.flush())
        return TextDelta("".join(parts), None, len(ids))

    def _take(self, text: str, parts: list[str]) -> str | None:
        """Appends to `parts` what may go out. The stop string, if `text` completes one."""
        if self._stops is None or not text:
            parts.append(text)
            return None
        out, stop = self._stops.feed(text, armed=self._count >= self._min_tokens)
        parts.append(out)
        if stop is not None:
            self._ended = True
            if self._include_stop:
                parts.append(stop)
        return stop
