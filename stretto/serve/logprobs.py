"""Log-probabilities in the API's shapes. They are the model's own, before any sampling parameter acts.

JSON knows no infinity: what is less likely than FLOOR is reported as FLOOR, which is OpenAI's number for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from stretto.protocol import TokenLogprob

FLOOR = -9999.0
REPLACEMENT = "\ufffd"
TokenText = Callable[[int], str]


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


def id_text(token: int) -> str:
    """The form of tokens that return_tokens_as_token_ids asks for."""
    return f"token_id:{token}"


def _utf8(token: int, text: TokenText) -> list[int] | None:
    """The token's bytes; None for a token that is no whole character."""
    plain = text(token)
    return None if REPLACEMENT in plain else list(plain.encode())


def chat_logprobs(entries: Sequence[TokenLogprob], text: TokenText, as_ids: bool) -> ChatLogprobs:
    name = id_text if as_ids else text
    content = []
    for e in entries:
        top = [TopLogprob(name(i), floored(p), _utf8(i, text)) for i, p in zip(e.top_ids, e.top_logprobs)]
        logprob = floored(e.logprob) if e.logprob is not None else FLOOR
        content.append(ChatTokenLogprob(name(e.token_id), logprob, _utf8(e.token_id, text), top))
    return ChatLogprobs(content)


def completion_logprobs(entries: Sequence[TokenLogprob], text: TokenText, as_ids: bool, offset: int
                        ) -> CompletionLogprobs:
    """`offset`: characters of the choice's text before the first entry."""
    name = id_text if as_ids else text
    out = CompletionLogprobs()
    for e in entries:
        out.tokens.append(name(e.token_id))
        out.text_offset.append(offset)
        offset += len(text(e.token_id))
        if e.logprob is None:  # the first token of a prompt
            out.token_logprobs.append(None)
            out.top_logprobs.append(None)
            continue
        top: dict[str, float] = {}
        for i, p in zip(e.top_ids, e.top_logprobs):
            top.setdefault(name(i), floored(p))  # two ids of one text: the likelier stands
        top.setdefault(name(e.token_id), floored(e.logprob))
        out.token_logprobs.append(floored(e.logprob))
        out.top_logprobs.append(top)
    return out


def prompt_logprobs(entries: Sequence[TokenLogprob], text: TokenText) -> list[dict[str, PromptLogprob] | None]:
    out: list[dict[str, PromptLogprob] | None] = []
    for e in entries:
        if e.logprob is None:
            out.append(None)
            continue
        ranked = {str(i): PromptLogprob(floored(p), rank, text(i))
                  for rank, (i, p) in enumerate(zip(e.top_ids, e.top_logprobs), 1)}
        ranked.setdefault(str(e.token_id), PromptLogprob(floored(e.logprob), None, text(e.token_id)))
        out.append(ranked)
    return out
