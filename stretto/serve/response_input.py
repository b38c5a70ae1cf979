"""From a Responses body to a chat request."""

from __future__ import annotations

import json
import uuid
from typing import Any

from stretto.serve.errors import bad_request, unsupported
from stretto.serve.request_fields import refuse
from stretto.serve.schemas import ResponsesRequest

# chat's field -> the field of the Responses API that it came from, for errors
CHAT_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format",
              "reasoning_effort": "reasoning.effort"}
_OWN = frozenset(("input", "instructions", "max_output_tokens", "previous_response_id", "store", "text", "reasoning",
                  "tools", "tool_choice", "include", "truncation", "background", "conversation", "prompt",
                  "max_tool_calls", "top_logprobs", "stream_options", "service_tier"))
_NOT_SHOWN = "an answer has no place for it here; /v1/chat/completions has"
_OTHER_NAMES = {"messages": "use input", "max_completion_tokens": "use max_output_tokens",
                "response_format": "use text.format", "reasoning_effort": "use reasoning.effort",
                "n": "an answer is one response; /v1/chat/completions has it",
                **dict.fromkeys(("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"), _NOT_SHOWN)}
INCLUDES = ("message.output_text.logprobs", "reasoning.encrypted_content")
_CALL, _CALL_OUTPUT = "function_call", "function_call_output"


def conversation(body: ResponsesRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(the input as items with ids, the same as chat messages). Raises ApiError."""
    given = body.input
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not given:
        raise bad_request("input is an empty list; give at least one item", "input")
    items = [{"id": _item_id(item), **item} for item in given]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        _add(messages, item, f"input[{i}]")
    return items, messages


def _item_id(item: dict[str, Any]) -> str:
    prefix = {_CALL: "fc", _CALL_OUTPUT: "fco", "reasoning": "rs"}.get(str(item.get("type")), "msg")
    return f"{prefix}_{uuid.uuid4().hex}"


def _add(messages: list[dict[str, Any]], item: dict[str, Any], place: str) -> None:
    """One item as a message, or as a part of the assistant's message before it."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _content(item.get("content"), f"{place}.content")})
    elif kind == _CALL:
        if any(not isinstance(item.get(name), str) for name in ("call_id", "name", "arguments")):
            raise bad_request(f"{place} needs call_id, name and arguments, all of them strings", place)
        if not is_whole(item["arguments"]):
            if item.get("status") == "incomplete":
                return
            raise bad_request(f"{place}.arguments is not JSON; an answer's limit may have cut it: leave the call out",
                              f"{place}.arguments")
        call = {"id": item["call_id"], "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]}}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == _CALL_OUTPUT:
        output = item.get("output")
        if not isinstance(item.get("call_id"), str) or not isinstance(output, (str, list)):
            raise bad_request(f"{place} needs a call_id and an output", place)
        messages.append({"role": "tool", "tool_call_id": item["call_id"],
                         "content": _content(output, f"{place}.output")})
    elif kind != "reasoning":  # what was thought before earlier answers is not part of the conversation
        raise bad_request(f"{place} has the type {str(kind)[:64]!r}; message, reasoning, {_CALL} and {_CALL_OUTPUT} are"
                          " understood", f"{place}.type", "unsupported_content")


def is_whole(arguments: str) -> bool:
    """Of a call: whether all of its JSON is there. One that was cut was never made, and no template can print it."""
    try:
        json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return False
    return True


def _content(content: Any, place: str) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "refusal"):
            raise bad_request(f"{place}[{i}] has the type {str(kind)[:64]!r}; the model reads text only",
                              f"{place}[{i}].type", "unsupported_content")
        parts.append({"type": "text", "text": part.get("refusal" if kind == "refusal" else "text")})
    if all(isinstance(part["text"], str) for part in parts):
        return parts[0]["text"] if len(parts) == 1 else parts
    raise bad_request(f"{place} has a part without text", place)


def to_chat(body: ResponsesRequest, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Fields of a ChatRequest. What the Responses API does not know is handed on under its own name, so that the
    extensions of chat (top_k, seed, speculation, ...) are those of this API too."""
    _refuse(body)
    fields = {name: getattr(body, name) for name in type(body).model_fields if name not in _OWN}
    fields |= {name: value for name, value in (body.model_extra or {}).items() if name not in _OWN}
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    fields |= {"messages": messages, "max_completion_tokens": body.max_output_tokens,
               "reasoning_effort": (body.reasoning or {}).get("effort"), "n": 1,
               "tools": _functions(body) or None,
               "tool_choice": _tool_choice(body.tool_choice), **_format(body)}
    if body.stream:
        fields["stream_options"] = {"include_usage": True}
    if body.top_logprobs is not None or INCLUDES[0] in (body.include or []):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return fields


def _refuse(body: ResponsesRequest) -> None:
    extra = body.model_extra or {}
    refuse(extra, _OTHER_NAMES)
    if extra.get("max_tokens") is not None and body.max_output_tokens not in (None, extra["max_tokens"]):
        raise bad_request(f"max_tokens is {extra['max_tokens']} and max_output_tokens is {body.max_output_tokens}; give"
                          " one of them", "max_tokens")
    if body.background:
        raise unsupported("background", "an answer is made while its client waits; use stream")
    for name, reason in (("conversation", "use previous_response_id"), ("prompt", "there are no prompt templates here"),
                         ("max_tool_calls", "the server calls no tools by itself")):
        if getattr(body, name) is not None:
            raise unsupported(name, reason)
    if body.truncation not in (None, "disabled"):
        raise unsupported("truncation", "nothing of a conversation is left out; shorten it, or take a longer context")
    for name in body.include or []:
        if name not in INCLUDES:
            raise unsupported("include", f"{name[:64]!r} does not exist here; {', '.join(INCLUDES)} do")


def _format(body: ResponsesRequest) -> dict[str, Any]:
    text = body.text or {}
    fields: dict[str, Any] = {} if text.get("verbosity") is None else {"verbosity": text["verbosity"]}
    wanted = text.get("format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        schema = {name: value for name, value in wanted.items() if name != "type"}
        return fields | {"response_format": {"type": "json_schema", "json_schema": schema}}
    return fields | {"response_format": wanted}


def _functions(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The tools that the client calls itself. Agents name tools of OpenAI's servers beside theirs, always: those are
    left out (see `left_out`), unless there is nothing else, or the answer must be one of them."""
    tools = body.tools or []
    missing = left_out(body)
    if missing and (len(missing) == len(tools) or body.tool_choice not in (None, "auto", "none")):
        _tool(tools[missing[0]], missing[0])
    return [_tool(tool, i) for i, tool in enumerate(tools) if i not in missing]


def left_out(body: ResponsesRequest) -> list[int]:
    """Which of the tools are no functions, so that nobody here would run them."""
    return [i for i, tool in enumerate(body.tools or []) if tool.get("type") != "function"]


def _tool(tool: dict[str, Any], i: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad_request(f"tools[{i}] has the type {str(tool.get('type'))[:64]!r}; the server has no tools of its own,"
                          " only functions that the client calls", f"tools[{i}].type", "unsupported_parameter")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice
