"""From token ids to text, one id at a time, equal to decoding all of them at once, behind the prompt they follow.

    ids        [F0 9F]  [99]  [82]  [" ok"]  end
    feed       ""       ""    "🙂"   " ok"    flush -> ""

Two ways, chosen by the tokenizer's decoder:

* byte-level (GPT-2, Llama 3, Qwen...): every token is bytes, and an incremental UTF-8 decoder holds back at most the
  three bytes of an unfinished character. Invalid bytes become U+FFFD at once, as in the whole.
* anything else (SentencePiece with byte fallback, ...): the library decodes a window of the last token and the new
  ones, and the new text is what the window gained; where that depends on the token alone it is looked up. A run of byte
  tokens is held until it ends, because one bad byte turns all of the run into U+FFFD.

What a decoder does to the first token of a text alone (drop the space that the tokenizer put in front) it does to an
answer's only where that begins a text: behind nothing, or behind an added token, as tokenizers put their space.

    prompt "Once upon"       ids  [ a] [ time]    " a time"        prompt "... <|assistant|>"    "a time"

No torch in this module.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MOST_HELD = 64  # tokens that may wait for an unfinished character in a decoder whose rules are not known here


class Decoder(Protocol):
    """Turns the ids of one answer into text."""

    def follow(self, prompt: Sequence[int]) -> None:
        """What the answer stands behind; said before the first id, or not at all where it stands alone."""
        ...

    def feed(self, token_id: int) -> str:
        """Text that became certain with this id; often empty or several characters. Never raises for an unknown id."""
        ...

    def flush(self) -> str:
        """The text still held; an unfinished character becomes U+FFFD."""
        ...


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2): printable Latin-1 bytes
    stand for themselves, the others follow from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(0x100) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


class TokenBytes(dict[int, bytes]):
    """The bytes of each token of a vocabulary, looked up once per id; b"" for an id that no token has."""

    def __init__(self, backend: Tokenizer, kinds: frozenset[str]):
        super().__init__()
        self._backend, self._kinds = backend, kinds
        self._alphabet = byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._read(token_id)
        return found

    def _read(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if "ByteLevel" in self._kinds:
            values = [self._alphabet.get(c, -1) for c in token]
            return token.encode() if -1 in values else bytes(values)
        if "ByteFallback" in self._kinds and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()


class ByteLevelDecoder:
    def __init__(self, token_bytes: TokenBytes, skipped: frozenset[int]):
        self._bytes, self._skipped = token_bytes, skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def follow(self, prompt: Sequence[int]) -> None:
        """A token's bytes are the same everywhere."""

    def feed(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._utf8.decode(self._bytes[token_id])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class InnerTexts(dict[int, str | None]):
    """What each token adds to a text behind another token, looked up once per id, of decoders of which
    `is_token_by_token` holds. None: that is not said by the token alone."""

    def __init__(self, backend: Tokenizer):
        super().__init__()
        self._backend = backend

    def __missing__(self, token_id: int) -> str | None:
        found = self[token_id] = self._read(token_id)
        return found

    def _read(self, token_id: int) -> str | None:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if not token or _BYTE_TOKEN.fullmatch(token):
            return None
        alone, twice = (self._backend.decode([token_id] * n, skip_special_tokens=False) for n in (1, 2))
        return twice[len(alone) :]


def is_token_by_token(steps: Sequence[dict[str, Any]]) -> bool:
    """Whether a decoder of these steps turns each token into a text of its own, whatever stands around it: all but
    bytes, and a text's first one, of which it may drop a space."""
    for i, step in enumerate(steps):
        fused = any(before["type"] == "Fuse" for before in steps[:i])
        inside = {"Replace": not fused and "String" in step.get("pattern", {}), "Metaspace": not fused,
                  "ByteFallback": True, "Fuse": True,
                  "Strip": fused and step.get("start") == 1 and step.get("stop") == 0}
        if not inside.get(step["type"], False):
            return False
    return bool(steps)


class WindowDecoder:
    """Decodes [context | pending]: `context` is the last token whose text is out, the prompt's at first, so that what a
    decoder does to the first token of a text (drop its space) is not done to the ones after it. `openers`: a text
    begins behind these. `inner`: of decoders that need no window for most tokens."""

    def __init__(self, backend: Tokenizer, kinds: frozenset[str], skipped: frozenset[int], openers: frozenset[int],
                 inner: InnerTexts | None = None):
        self._backend, self._skipped, self._openers, self._inner = backend, skipped, openers, inner
        self._byte_fallback, self._byte_level = "ByteFallback" in kinds, "ByteLevel" in kinds
        self._context: list[int] = []
        self._pending: list[int] = []

    def follow(self, prompt: Sequence[int]) -> None:
        if prompt and prompt[-1] not in self._openers:
            self._context = [prompt[-1]]

    def feed(self, token_id: int) -> str:
        if self._inner is not None and self._context and not self._pending:
            inner = self._inner[token_id]
            if inner is not None and token_id not in self._skipped:
                self._context = [token_id]
                return inner
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if not token or token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._decode(self._context + self._pending)
        if self._byte_level and text.endswith(_REPLACEMENT) and len(self._pending) < _MOST_HELD:
            return ""
        return self._release(text)

    def flush(self) -> str:
        return self._release(self._decode(self._context + self._pending)) if self._pending else ""

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def _release(self, text: str) -> str:
        new = text[len(self._decode(self._context)) :] if self._context else text
        self._context, self._pending = self._pending[-1:], []
        return new


def _steps(backend: Tokenizer) -> list[dict[str, Any]]:
    """Of the decoder, in order."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def decoder_kinds(backend: Tokenizer) -> frozenset[str]:
    """Types of the decoder's steps, e.g. {"ByteLevel"} or {"Replace", "ByteFallback", "Fuse", "Strip"}."""
    return frozenset(step["type"] for step in _steps(backend))


def decoder_factory(backend: Tokenizer, special: frozenset[int]) -> Callable[[bool], Decoder]:
    """make(skip_special_tokens) -> a fresh decoder. Tables are shared by all decoders it makes."""
    kinds = decoder_kinds(backend)
    table = TokenBytes(backend, kinds)
    inner = InnerTexts(backend) if is_token_by_token(_steps(backend)) else None
    openers = frozenset(backend.get_added_tokens_decoder())

    def make(skip_special_tokens: bool) -> Decoder:
        skipped = special if skip_special_tokens else frozenset()
        if kinds == {"ByteLevel"}:
            return ByteLevelDecoder(table, skipped)
        return WindowDecoder(backend, kinds, skipped, openers, inner)

    return make
