"""Logs of the server: lines of text for people, or one JSON object a line for collectors.

What is logged while a request is served carries its id, in either form: the id is that of X-Request-Id, of the answer
and of /abort_request. The engine's process says which request a line is about with `extra={"request_id": ...}`.
"""

from __future__ import annotations

import logging
import re
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
# Of a record, what is no `extra`; the last is uvicorn's message once more, for terminals.
_BARE = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id", "color_message"}


class JsonLines(logging.Formatter):
    """time, level, logger, message, request_id, whatever was given as `extra`, and the traceback of an exception."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process or "server"

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage(),
            "process": self._process, "pid": record.process}
        if (id := _id_of(record)) is not None:
            entry["request_id"] = id
        entry |= {name: value for name, value in vars(record).items() if name not in _BARE}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=str).decode()


def _id_of(record: logging.LogRecord) -> str | None:
    """As the client knows it: between processes an id has a serial number behind it."""
    told = getattr(record, "request_id", None)
    return request_id.get() if told is None else re.sub(r"#\d+$", "", told)


class TextLines(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__("%(levelname)s:     " + (f"[{process}] " if process else "") + "%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        id = request_id.get()
        return text if id is None or id in text else f"{text}  [{id}]"


def set_up_logging(level: str | int, form: Literal["text", "json"], process: str = "") -> None:
    """Of this process, which the lines name: everything goes to stderr in this form."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(process) if form == "json" else TextLines(process))
    logging.basicConfig(level=level if isinstance(level, int) else level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
