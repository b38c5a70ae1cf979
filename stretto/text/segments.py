"""Token ids of long texts, of which only what is new is tokenised.

A chat client sends the whole conversation with every turn; a hundred thousand tokens take a fifth of a second to
tokenise, and all but the last message were there before. Chat templates put special tokens between messages, and a
tokenizer takes those out of a text before it does anything else (`tokenizers` looks for added tokens that are not
normalised, then handles each piece between them for itself). So a text is cut in front of each of them,

    text      | <|im_start|>user\\nHi<|im_end|> | \\n<|im_start|>assistant\\n ...
    segments  |  <|im_start|>user\\nHi | <|im_end|>\\n | <|im_start|>assistant\\n ...

and the ids of a segment do not depend on its neighbours: they are remembered by its text. That holds for tokens that
are found wherever their text occurs, whatever stands beside it (`cutting_tokens`). No torch in this module.
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

KEPT = 16 << 20  # characters of all remembered segments, about four bytes of memory each with their ids
ENTRY = 256  # characters that a segment counts for beside its own
LEAST = 2048  # characters of a text below which there is nothing to gain


def cutting_tokens(backend: Backend) -> list[str]:
    """Added tokens that a text may be cut in front of.

    Such a token is looked for before normalisation, neither takes whitespace beside it nor asks what stands there, and
    no added token can overlap its beginning or hold all of it: then it is always found, by leftmost-longest search."""
    if backend.encode_special_tokens:  # they are ordinary text
        return []
    added = list(backend.get_added_tokens_decoder().values())
    texts = [token.content for token in added]
    return [token.content for token in added if _stands_alone(token) and not any(
        _hides(other, token.content) for other in texts)]


def _stands_alone(token: AddedToken) -> bool:
    text = token.content
    return not (token.normalized or token.lstrip or token.rstrip or token.single_word) and text == text.strip() != ""


def _hides(other: str, text: str) -> bool:
    """An occurrence of `other` may begin before one of `text` and overlap it, or begin with it and be longer."""
    if other != text and text in other:
        return True
    return any(other.endswith(text[:n]) for n in range(1, min(len(other), len(text))))


def without_added_space(backend: Backend) -> Backend:
    """The tokenizer itself; where it puts a space in front of a text, as SentencePiece does ("yes" is "▁yes"), a copy
    that does not."""
    steps = [json.loads(step.__getstate__()) for step in (backend.normalizer, backend.pre_tokenizer) if step]
    if not any([_drop_space(step) for step in steps]):
        return backend
    state = json.loads(backend.to_str())
    for name in ("normalizer", "pre_tokenizer"):
        if state[name] is not None and _drop_space(state[name]) and state[name]["type"] == "Prepend":
            state[name] = None
    return Backend.from_str(json.dumps(state))


def _drop_space(step: dict[str, Any]) -> bool:
    """Takes the space in front out of a normalizer or pre-tokenizer, in place, save one that is nothing else. Whether
    there was one."""
    if step["type"] == "Sequence":
        parts = next(name for name in ("normalizers", "pretokenizers") if name in step)
        found = [_drop_space(part) for part in step[parts]]
        step[parts] = [part for part in step[parts] if part["type"] != "Prepend"]
        return any(found)
    if step["type"] == "Metaspace":
        added, step["prepend_scheme"] = step.get("prepend_scheme") != "never", "never"
    elif step["type"] == "ByteLevel":
        added, step["add_prefix_space"] = step.get("add_prefix_space", False), False
    else:
        added = step["type"] == "Prepend"
    return added


class Segments:
    """Encodes as the tokenizer does, and remembers the parts. Used from several threads at once."""

    def __init__(self, backend: Backend, kept: int = KEPT):
        self._backend, self._kept = backend, kept
        self._cuts = re.compile("|".join(map(re.escape, sorted(cutting_tokens(backend), key=len, reverse=True)))
                                or r"(?!)")
        self._before, self._after = self._around()
        self._ids: OrderedDict[str, array[int]] = OrderedDict()  # those used last at the end
        self._size = 0
        self._lock = threading.Lock()

    def _around(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and behind a text where it shall."""
        plain = self._backend.encode("x", add_special_tokens=False).ids
        whole = self._backend.encode("x", add_special_tokens=True).ids
        at = next((i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain), 0)
        return whole[:at], whole[at + len(plain) :]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < LEAST:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        ids = list(self._before) if add_special_tokens else []
        for segment in self._cut(text):
            ids += self._of(segment)
        return ids + self._after if add_special_tokens else ids

    def _cut(self, text: str) -> Iterator[str]:
        start = 0
        for found in self._cuts.finditer(text):
            if found.start() > start:
                yield text[start : found.start()]
                start = found.start()
        yield text[start:]

    def _of(self, segment: str) -> array[int]:
        with self._lock:
            known = self._ids.get(segment)
            if known is not None:
                self._ids.move_to_end(segment)
                return known
        ids = array("i", self._backend.encode(segment, add_special_tokens=False).ids)
        with self._lock:
            if segment not in self._ids:
                self._ids[segment] = ids
                self._size += len(segment) + ENTRY
            while self._size > self._kept:
                self._size -= len(self._ids.popitem(last=False)[0]) + ENTRY
        return ids
