"""From a request body to prompt token ids. Runs on the tokenizer threads, never on the event loop."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import cached_property
from typing import Any

from stretto.params import MAX_BAD_WORDS
from stretto.serve.errors import bad_request, unsupported
from stretto.serve.interfaces import ServeTokenizer
from stretto.serve.schemas import ChatBody, ContentPart, Message
from stretto.text.chat_template import NoChatTemplate

CHARACTERS_PER_TOKEN = 16  # a prompt with fewer characters per token of context is always tokenised
MAX_BAD_WORD_CHARACTERS = 1024  # of one word: far more than those few tokens hold that it may have


def _named_by(method: Callable[..., Any]) -> frozenset[str]:
    """The parameters of a method, which no keyword of a client may name."""
    return frozenset(name for name, parameter in inspect.signature(method).parameters.items()
                     if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL))


# of chat_template_kwargs; `tokenize` and `conversation` are parameters where others render the template
RESERVED = _named_by(ServeTokenizer.apply_chat_template) | {"continue_final_message", "tokenize", "conversation"}


class PromptReader:
    """Checks and tokenises prompts for one model."""

    def __init__(self, tokenizer: ServeTokenizer, vocab_size: int, context: int):
        self.tokenizer, self.vocab_size, self.context = tokenizer, vocab_size, context
        self._longest_token: int | None = None
        self._reserved = RESERVED | _named_by(type(tokenizer).apply_chat_template)

    # ---------------------------------------------------------------------------------------------------- text
    def encode(self, text: str, param: str, add_special_tokens: bool = True) -> list[int]:
        self._check_size(len(text), param)
        return self.tokenizer.encode(text, add_special_tokens)

    def encode_all(self, prompts: list[str | list[int]], param: str, add_special_tokens: bool = True
                   ) -> list[list[int]]:
        return [self.encode(prompt, param, add_special_tokens) if isinstance(prompt, str) else prompt
                for prompt in prompts]

    def prompts(self, prompt: str | list, add_special_tokens: bool) -> list[str | list[int]]:
        """The prompts of a completions call, texts still as texts."""
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if type(prompt[0]) is int else prompt

    def bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as its ids, as it is and behind a space. All are checked before one is tokenised."""
        if len(words) > MAX_BAD_WORDS:
            raise bad_request(f"bad_words has {len(words)} words; the limit is {MAX_BAD_WORDS}", "bad_words")
        for i, word in enumerate(words):
            if len(word) > MAX_BAD_WORD_CHARACTERS:
                raise bad_request(f"bad_words[{i}] has {len(word)} characters; the limit is {MAX_BAD_WORD_CHARACTERS}",
                                  f"bad_words[{i}]")
            if not word.strip():
                raise bad_request(f"bad_words[{i}] is empty", f"bad_words[{i}]")
        texts = dict.fromkeys(text for word in words for text in (word, f" {word.lstrip()}"))
        return tuple(dict.fromkeys(tuple(self.tokenizer.encode_inside(text)) for text in texts))

    def _check_size(self, characters: int, param: str) -> None:
        """Refuses what cannot fit before it is tokenised, so that a huge text costs nothing."""
        if characters <= self.context * CHARACTERS_PER_TOKEN:
            return
        if self._longest_token is None:
            self._longest_token = max(len(self.tokenizer.token_bytes(i)) for i in range(self.vocab_size))
        if characters > self.context * max(self._longest_token, CHARACTERS_PER_TOKEN):
            raise bad_request(f"the prompt has {characters} characters, far more than the {self.context} tokens of this"
                              " model's context can hold; shorten it", param, "context_length_exceeded")

    # ---------------------------------------------------------------------------------------------------- chat
    def chat(self, body: ChatBody) -> list[int]:
        """Token ids of the conversation, through the model's chat template."""
        messages = [self._message(i, message) for i, message in enumerate(body.messages)]
        self._check_size(sum(len(str(message.get("content") or "")) for message in messages), "messages")
        continued = bool(body.continue_final_message)
        generation = body.add_generation_prompt if body.add_generation_prompt is not None else not continued
        if continued and generation:
            raise bad_request("continue_final_message and add_generation_prompt exclude each other",
                              "continue_final_message")
        if continued and (body.messages[-1].role != "assistant" or not messages[-1].get("content")):
            raise bad_request("continue_final_message needs a final assistant message with content",
                              "continue_final_message")
        options = self._template_options(body)
        if continued:
            options["continue_final_message"] = True
        try:
            return self.tokenizer.apply_chat_template(messages, self._tools(body), add_generation_prompt=generation,
                                                      **options)
        except NoChatTemplate as e:
            raise bad_request(str(e), "messages") from e
        except ValueError as e:
            raise bad_request(f"the chat template refuses the conversation: {e}", "messages") from e

    @cached_property
    def system_anywhere(self) -> bool:
        """The chat template takes a system message behind others."""
        words = [{"role": role, "content": "x"} for role in ("user", "assistant", "system", "user")]
        try:
            self.tokenizer.apply_chat_template(words, None, add_generation_prompt=True)
        except ValueError:
            return False
        return True

    def _tools(self, body: ChatBody) -> list[dict[str, Any]] | None:
        """What the prompt says of tools: nothing where none may be called."""
        if not body.tools or body.tool_choice == "none":
            return None
        if "tools" not in (self.tokenizer.chat_template or ""):
            raise unsupported("tools", "this model's chat template does not read them")
        return body.tools

    def _template_options(self, body: ChatBody) -> dict[str, Any]:
        options = dict(body.chat_template_kwargs or {})
        for name in options:
            if name in self._reserved:
                raise bad_request(f"chat_template_kwargs may not set {name!r}: the name is the server's",
                                  "chat_template_kwargs")
        if body.reasoning_effort not in (None, "none"):
            if "reasoning_effort" not in (self.tokenizer.chat_template or ""):
                raise unsupported("reasoning_effort", "this model's chat template does not read it")
            options["reasoning_effort"] = body.reasoning_effort
        return options

    def _message(self, i: int, message: Message) -> dict[str, Any]:
        fields: dict[str, Any] = {**(message.model_extra or {}), "role": message.role}
        calls = fields.get("tool_calls") or fields.get("function_call")
        if message.content is None and not (message.role == "assistant" and calls):
            raise bad_request(f"messages[{i}].content is missing; only an assistant's tool calls come without",
                              f"messages[{i}].content")
        if message.role == "tool" and not isinstance(fields.get("tool_call_id"), str):
            raise bad_request(f"messages[{i}].tool_call_id is missing; it is the id of the call whose result this is",
                              f"messages[{i}].tool_call_id")
        if isinstance(message.content, list):
            fields["content"] = [_part(f"messages[{i}].content[{j}]", part) for j, part in enumerate(message.content)]
        else:
            fields["content"] = message.content
        if isinstance(made := fields.get("tool_calls"), list):
            fields["tool_calls"] = [_call(f"messages[{i}].tool_calls[{j}]", call) for j, call in enumerate(made)]
        if message.role == "developer" and "developer" not in (self.tokenizer.chat_template or ""):
            fields["role"] = "system"  # OpenAI's newer word for it
        return fields


def _part(place: str, part: ContentPart) -> dict[str, Any]:
    if part.type != "text":
        raise bad_request(f"{place} has the type {part.type[:64]!r}; the model reads text only", f"{place}.type",
                          "unsupported_content")
    if part.text is None:
        raise bad_request(f"{place}.text is missing", f"{place}.text")
    return {"type": "text", "text": part.text}


def _call(place: str, call: Any) -> dict[str, Any]:
    """A call that was made earlier, its arguments as an object: so templates expect them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{place} needs a function with a name", place)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise bad_request(f"{place}.function.arguments is not JSON", f"{place}.function.arguments") from None
    return {**call, "function": {**function, "arguments": arguments}}
