"""The Response object and its typed events, built from chat chunks. One builder for both forms: a whole answer is a
stream of one chunk whose events nobody reads.

    response.created, .in_progress
      for each item:  output_item.added, [content_part.added, ...delta*, ...done, content_part.done,] output_item.done
    response.completed | .incomplete | .failed
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from stretto.serve.errors import ApiError
from stretto.serve.response_input import is_whole
from stretto.serve.schemas import ResponsesRequest
from stretto.serve.streaming import named_event

_ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature", "top_p", "user",
           "reasoning", "text", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs", "store",
           "prompt_cache_key", "safety_identifier")


def failure_event(error: ApiError) -> bytes:
    """Ends a stream whose response could not begin."""
    return named_event("error", {"type": "error", "code": error.code, "message": error.message, "param": error.param,
                                 "sequence_number": 0})


class ResponseBuilder:
    """Grows `response` by chat chunks and says each time what changed, as events."""

    def __init__(self, id: str, body: ResponsesRequest, model: str):
        self._sequence = 0
        self._open: dict[str, Any] | None = None  # the item that grows
        self._call = -1  # which of chat's tool calls it is
        self._finish_reason: str | None = None
        echoed = {name: getattr(body, name) for name in _ECHOED}
        defaults = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}, "store": True,
                    "text": {"format": {"type": "text"}}, "temperature": 1.0, "top_p": 1.0}
        self.response: dict[str, Any] = {
            "id": id, "object": "response", "created_at": int(time.time()), "status": "in_progress", "model": model,
            "error": None, "incomplete_details": None, "output": [], "usage": None, "truncation": "disabled",
            "background": False, "service_tier": "default", **echoed,
            **{name: value for name, value in defaults.items() if echoed[name] is None}}

    # -------------------------------------------------------------------------------------------------- events
    def opening(self) -> bytes:
        return self._state("created") + self._state("in_progress")

    def take(self, chunk: dict[str, Any]) -> bytes:
        """One chunk of the chat answer."""
        if chunk.get("usage"):
            self.response["usage"] = _usage(chunk["usage"])
        if not chunk["choices"]:
            return b""
        choice = chunk["choices"][0]
        delta, events = choice["delta"], b""
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            events += self._text("reasoning", thought, [])
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        if delta.get("content") or logprobs:
            events += self._text("message", delta.get("content") or "", logprobs)
        for call in delta.get("tool_calls") or []:
            events += self._call_delta(call)
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        return events

    def finish(self) -> bytes:
        """After the last chunk."""
        incomplete = self._finish_reason == "length"
        events = b"" if self.response["output"] or self._open else self._text("message", "", [])  # an empty answer
        events += self._close("incomplete" if incomplete else "completed")
        self.response["status"] = "incomplete" if incomplete else "completed"
        self.response["incomplete_details"] = {"reason": "max_output_tokens"} if incomplete else None
        self.response["completed_at"] = None if incomplete else int(time.time())
        return events + self._state(self.response["status"])

    def failed(self, error: ApiError) -> bytes:
        """The end of a response that cannot go on."""
        self._close("incomplete")
        self.response["status"] = "failed"
        self.response["error"] = {"code": error.code or "server_error", "message": error.message}
        return self._state("failed")

    def message(self) -> dict[str, Any]:
        """The answer as a chat message, for whoever goes on from it: without a call that the limit has cut."""
        texts, calls = [], []
        for item in self.response["output"]:
            if item["type"] == "message":
                texts.append(item["content"][0]["text"])
            elif item["type"] == "function_call" and is_whole(item["arguments"]):
                calls.append({"id": item["call_id"], "type": "function",
                              "function": {"name": item["name"], "arguments": item["arguments"]}})
        content = "".join(texts)
        return {"role": "assistant", "content": content or ("" if not calls else None)} | (
            {"tool_calls": calls} if calls else {})

    # --------------------------------------------------------------------------------------------------- items
    @property
    def _index(self) -> int:
        return len(self.response["output"])

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = named_event(kind, {"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return event

    def _state(self, state: str) -> bytes:
        return self._event(f"response.{state}", response=self.response)

    def _begin(self, item: dict[str, Any]) -> bytes:
        events = self._close("completed")
        self._open = item
        shown = {**item, "content": []} if "content" in item else item
        events += self._event("response.output_item.added", output_index=self._index, item=shown)
        if "content" in item:
            events += self._event("response.content_part.added", item_id=item["id"], output_index=self._index,
                                  content_index=0, part=item["content"][0])
        return events

    def _text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        events = b""
        if self._open is None or self._open["type"] != kind:
            events += self._begin(_message() if kind == "message" else _reasoning())
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        name, extra = "response.reasoning_text.delta", {}
        if kind == "message":
            name, extra = "response.output_text.delta", {"logprobs": logprobs}
            part["logprobs"] += logprobs
        return events + self._event(name, item_id=self._open["id"], output_index=self._index, content_index=0,
                                    delta=text, **extra)

    def _call_delta(self, call: dict[str, Any]) -> bytes:
        function, events = call.get("function") or {}, b""
        if self._open is None or self._open["type"] != "function_call" or call["index"] != self._call:
            self._call = call["index"]
            events += self._begin({"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress",
                                   "call_id": call.get("id"), "name": function.get("name"), "arguments": ""})
        assert self._open is not None
        if arguments := function.get("arguments"):
            self._open["arguments"] += arguments
            events += self._event("response.function_call_arguments.delta", item_id=self._open["id"],
                                  output_index=self._index, delta=arguments)
        return events

    def _close(self, status: str) -> bytes:
        """Ends the item that grows, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return b""
        place = {"item_id": item["id"], "output_index": self._index}
        if item["type"] == "function_call":
            events = self._event("response.function_call_arguments.done", **place, name=item["name"],
                                 arguments=item["arguments"])
        else:
            part = item["content"][0]
            name, extra = "response.reasoning_text.done", {}
            if item["type"] == "message":
                name, extra = "response.output_text.done", {"logprobs": part["logprobs"]}
            events = self._event(name, **place, content_index=0, text=part["text"], **extra)
            events += self._event("response.content_part.done", **place, content_index=0, part=part)
        item["status"] = status
        events += self._event("response.output_item.done", output_index=self._index, item=item)
        self.response["output"].append(item)
        return events


def _message() -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "in_progress",
            "content": [part]}


def _reasoning() -> dict[str, Any]:
    return {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "status": "in_progress", "summary": [],
            "content": [{"type": "reasoning_text", "text": ""}]}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    details = usage.get("completion_tokens_details") or {}
    return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                                     "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
            "speculation": usage["speculation"]}
