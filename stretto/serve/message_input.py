"""From a Messages body to a chat request."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from stretto.serve.errors import bad_request
from stretto.serve.request_fields import refuse
from stretto.serve.schemas import CountTokensRequest

# chat's field -> this API's, for errors
CHAT_NAMES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "response_format": "output_config"}
_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")  # at the beginning of a system prompt
_OWN = frozenset(("messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice", "thinking",
                  "output_config", "output_format", "service_tier", "container", "mcp_servers", "context_management",
                  "inference_geo", "betas"))
_NOT_SHOWN = "an answer has no place for it here; /v1/chat/completions has"
_REFUSED = {"max_completion_tokens": "use max_tokens", "stop": "use stop_sequences",
            "response_format": "use output_config", "n": "an answer is one message; /v1/chat/completions has it",
            **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids",
                             "return_tokens_as_token_ids"), _NOT_SHOWN),
            "container": "there are no containers here", "mcp_servers": "the server calls no tools by itself"}


def to_chat(body: CountTokensRequest, system_anywhere: bool = True) -> dict[str, Any]:
    """Fields of a ChatRequest. What the Messages API does not know is handed on under its own name, so that the
    extensions of chat (min_p, seed, speculation, ...) are those of this API too. `system_anywhere`: the chat template
    takes system messages behind others; where it does not, the user says what they say, marked as Claude Code marks
    what is not the user's own. Raises ApiError."""
    extra = body.model_extra or {}
    refuse(extra, _REFUSED)
    _check_edits(extra.get("context_management"))
    fields = {name: getattr(body, name) for name in type(body).model_fields if name not in _OWN}
    fields |= {name: value for name, value in extra.items() if name not in _OWN}
    messages = _system(body.system)
    for i, message in enumerate(body.messages):
        new = _message(message, f"messages[{i}]")
        messages += new if system_anywhere or not messages else [_said_by_user(one) for one in new]
    fields |= {"messages": messages, "max_completion_tokens": getattr(body, "max_tokens", None), "n": 1,
               "stop": getattr(body, "stop_sequences", None), **_thinking(body.thinking), **_tools(body),
               "response_format": _format(body)}
    if body.messages[-1].get("role") == "assistant":  # the answer goes on where the client has begun it
        fields["continue_final_message"] = True
    if getattr(body, "stream", None):
        fields["stream_options"] = {"include_usage": True}
    return fields


def _system(system: Any) -> list[dict[str, Any]]:
    """The system prompt, without the line by which Claude Code tells Anthropic whom to bill: it is no instruction, and
    differs from call to call, so that no two prompts of a session would have a beginning in common."""
    if system is None:
        return []
    if isinstance(system, list):
        system = _text([block for block in system if not _bills(block)], "system")
    else:
        system = system[found.end():] if (found := _BILLING.match(system)) else system
    return [{"role": "system", "content": system}] if system else []


def _bills(block: Any) -> bool:
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and _BILLING.fullmatch(text) is not None


def _text(blocks: list[dict[str, Any]], place: str) -> str:
    """Text blocks as one text."""
    for i, block in enumerate(blocks):
        _check_text(block, f"{place}[{i}]")
    return "\n".join(block["text"] for block in blocks)


def _check_text(block: Any, place: str) -> None:
    if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        raise bad_request(f"{place} has the type {str(kind)[:64]!r}; the model reads text only", f"{place}.type",
                          "unsupported_content")


def _message(message: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """One message; the results of tools in a user's message become messages of their own, before what it says."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{place}.role is {str(role)[:64]!r}; it must be user or assistant", f"{place}.role")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        at, kind = f"{place}.content[{i}]", block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            calls.append(_call(block, at))
        elif kind == "tool_result" and role == "user":
            results.append(_result(block, at))
        elif kind in ("thinking", "redacted_thinking") and role == "assistant":
            continue  # what was thought before earlier answers is not part of the conversation
        else:
            _check_text(block, at)
            texts.append({"type": "text", "text": block["text"]})
    said = texts[0]["text"] if len(texts) == 1 else texts or None
    if calls:
        return [{"role": role, "content": said, "tool_calls": calls}]
    return [*results, {"role": role, "content": said}] if texts or not results else results


def _said_by_user(message: dict[str, Any]) -> dict[str, Any]:
    """Another message than a system message stays as it is."""
    if message["role"] != "system":
        return message
    content = message["content"]
    text = "\n".join(part["text"] for part in content) if isinstance(content, list) else content
    return {"role": "user", "content": f"<system-reminder>\n{text}\n</system-reminder>"}


def _call(block: dict[str, Any], place: str) -> dict[str, Any]:
    if not (isinstance(block.get("id"), str) and isinstance(block.get("name"), str)):
        raise bad_request(f"{place} needs an id and a name", place)
    arguments = msgspec.json.encode(block.get("input") or {}).decode()
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def _result(block: dict[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(block.get("tool_use_id"), str):
        raise bad_request(f"{place} needs a tool_use_id", place)
    content = block.get("content")
    text = _text(content, f"{place}.content") if isinstance(content, list) else content or ""
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}


def left_out(body: CountTokensRequest) -> list[str]:
    """What Anthropic's clients must or always do say and nobody here honours: the budget without which thinking cannot
    be asked for, and how much of earlier thinking is kept, of which there is none."""
    names = ["thinking.budget_tokens"] if (body.thinking or {}).get("budget_tokens") is not None else []
    return names + [name for name in ("context_management",) if (body.model_extra or {}).get(name)]


def _check_edits(management: Any) -> None:
    edits = management.get("edits") or [] if isinstance(management, dict) else [management] if management else []
    if not isinstance(edits, list):
        edits = [edits]
    for i, edit in enumerate(edits):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not str(kind).startswith("clear_thinking_"):
            raise bad_request(f"context_management.edits[{i}] has the type {str(kind)[:64]!r}; of a conversation"
                              " thinking alone is left out here", "context_management", "unsupported_parameter")


def _thinking(thinking: dict[str, Any] | None) -> dict[str, Any]:
    return {"reasoning_effort": "none"} if (thinking or {}).get("type") == "disabled" else {}


def _format(body: CountTokensRequest) -> dict[str, Any] | None:
    wanted = (body.output_config or {}).get("format") or body.output_format
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.get("schema")}}
    return wanted


def _tools(body: CountTokensRequest) -> dict[str, Any]:
    tools = []
    for i, tool in enumerate(body.tools or []):
        if tool.get("type", "custom") != "custom":
            raise bad_request(f"tools[{i}] has the type {str(tool['type'])[:64]!r}; the server has no tools of its own",
                              f"tools[{i}].type", "unsupported_parameter")
        function = {"name": tool.get("name"), "description": tool.get("description"),
                    "parameters": tool.get("input_schema")}
        tools.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    choice = body.tool_choice or {}
    kinds = {"auto": "auto", "any": "required", "none": "none",
             "tool": {"type": "function", "function": {"name": choice.get("name")}}}
    if choice and str(choice.get("type")) not in kinds:
        raise bad_request(f"tool_choice.type is {str(choice.get('type'))[:64]!r}; it must be one of {', '.join(kinds)}",
                          "tool_choice.type")
    parallel = False if choice.get("disable_parallel_tool_use") else None
    return {"tools": tools or None, "tool_choice": kinds[str(choice["type"])] if choice else None,
            "parallel_tool_calls": parallel}
