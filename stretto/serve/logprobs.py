"""Log-probabilities in the API's shapes. They are the model's own, before any sampling parameter acts.

JSON knows no infinity: what is less likely than FLOOR is reported as FLOOR, which is OpenAI's number for it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Sequence

import msgspec

from stretto.protocol import TokenLogprob

FLOOR = -9999.0
TokenBytes = Callable[[int], bytes]
Part = tuple[Sequence[TokenLogprob], Container[int]]  # entries, and which ids are left out of their text


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Four lists of one length. `text_offset` counts characters of the choice's text."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class PromptLogprob(msgspec.Struct):
    """vLLM's shape: by token id. `rank` is known for the best ones only."""

    logprob: float
    rank: int | None
    decoded_token: str


def floored(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR  # NaN too


def token_text(raw: bytes) -> str:
    """A token as text. Part of a character is shown as OpenAI shows it, `bytes:\\xf0\\x9f`, so it stays distinct."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class LogprobShaper:
    """Turns the engine's entries into the API's; knows the tokens' bytes. `as_ids`: tokens appear as ids."""

    def __init__(self, token_bytes: TokenBytes, as_ids: bool):
        self._bytes, self._as_ids = token_bytes, as_ids

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else token_text(self._bytes(token))

    def chat(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
        content = []
        for e in entries:
            top = [TopLogprob(self.name(i), floored(p), list(self._bytes(i)))
                   for i, p in zip(e.top_ids, e.top_logprobs, strict=True)]
            logprob = floored(e.logprob) if e.logprob is not None else FLOOR
            content.append(ChatTokenLogprob(self.name(e.token_id), logprob, list(self._bytes(e.token_id)), top))
        return ChatLogprobs(content)

    def completion(self, parts: Sequence[Part], offsets: OffsetCounter) -> CompletionLogprobs:
        """The entries of all parts in one."""
        out = CompletionLogprobs()
        for e, silent in ((entry, silent) for entries, silent in parts for entry in entries):
            out.tokens.append(self.name(e.token_id))
            out.text_offset.append(offsets.step(e.token_id, b"" if e.token_id in silent else self._bytes(e.token_id)))
            if e.logprob is None:  # the first token of a prompt
                out.token_logprobs.append(None)
                out.top_logprobs.append(None)
                continue
            top: dict[str, float] = {}
            for i, p in zip(e.top_ids, e.top_logprobs, strict=True):
                top.setdefault(self.name(i), floored(p))
            top.setdefault(self.name(e.token_id), floored(e.logprob))
            out.token_logprobs.append(floored(e.logprob))
            out.top_logprobs.append(top)
        return out

    def prompt(self, entries: Sequence[TokenLogprob]) -> list[dict[str, PromptLogprob] | None]:
        """vLLM's prompt_logprobs; null for the first token."""
        out: list[dict[str, PromptLogprob] | None] = []
        for e in entries:
            if e.logprob is None:
                out.append(None)
                continue
            ranked = {str(i): PromptLogprob(floored(p), rank, self.name(i))
                      for rank, (i, p) in enumerate(zip(e.top_ids, e.top_logprobs, strict=True), 1)}
            ranked.setdefault(str(e.token_id), PromptLogprob(floored(e.logprob), None, self.name(e.token_id)))
            out.append(ranked)
        return out


class OffsetCounter:
    """Where each token of one text begins, in characters: a character counts when its last byte has come. `lost`: how
    many bytes a token loses where it begins the text: the space that some tokenizers put in front of a text."""

    def __init__(self, lost: Callable[[int], int] | None = None) -> None:
        self._lost = lost
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def step(self, token: int, raw: bytes) -> int:
        start = self._characters
        if raw and self._lost is not None:
            raw, self._lost = raw[self._lost(token) :], None
        self._characters += len(self._decoder.decode(raw))
        return start
