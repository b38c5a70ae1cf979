"""OpenAI's batch files, run to the end. No torch in this module.

    in    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    out   {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}},
           "error": null}

Each answer is a line, written the moment it is there, in whatever order they come. Run again with the same files, a
batch goes on where it was: what was answered is not asked again, what failed for the server's sake is.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx

from stretto.asking import Reply, Unreachable, ask, for_each

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")


@dataclass(frozen=True)
class BatchItem:
    custom_id: str
    url: str
    body: dict[str, Any]


class BatchError(ValueError):
    """A batch file that cannot be run; the message names the line."""


@dataclass
class Tally:
    """How the requests of a run ended."""

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_failure: str = ""


def read_items(path: Path) -> Iterator[BatchItem]:
    """The requests of a file, line by line. Raises BatchError."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _item(f"{path} line {number}", line)
    except OSError as e:
        raise BatchError(f"{path} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise BatchError(f"{path} is not UTF-8: {e}") from e


def _item(where: str, line: str) -> BatchItem:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise BatchError(f"{where} is not JSON: {e}") from e
    if not isinstance(record, dict):
        raise BatchError(f"{where} is no object")
    custom_id, url, body = record.get("custom_id"), record.get("url"), record.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise BatchError(f'{where} has no "custom_id"')
    if record.get("method", "POST") != "POST":
        raise BatchError(f'{where}: "method" is {record["method"]!r}; it must be "POST"')
    if url not in URLS:
        raise BatchError(f'{where}: "url" is {url!r}; it must be one of {", ".join(URLS)}')
    if not isinstance(body, dict):
        raise BatchError(f'{where} has no "body" object')
    if body.get("stream"):
        raise BatchError(f'{where}: "stream" cannot be true in a batch')
    return BatchItem(custom_id, url, body)


def check_items(path: Path) -> int:
    """Reads the whole file before anything is asked. Returns the number of requests. Raises BatchError."""
    seen: set[str] = set()
    for item in read_items(path):
        if item.custom_id in seen:
            raise BatchError(f"{path} has the custom_id {item.custom_id!r} twice")
        seen.add(item.custom_id)
    if not seen:
        raise BatchError(f"{path} has no requests")
    return len(seen)


def take_up(path: Path) -> set[str]:
    """custom_ids that an earlier run has answered. The file is left with their lines alone: without a line that was cut
    off, and without failures that were the server's (no answer, 429, 5xx), which will be asked again. Raises BatchError
    for a file that is no output of a batch."""
    if not path.exists():
        return set()
    done: set[str] = set()
    kept = path.with_name(path.name + ".kept")
    with path.open("rb") as lines, kept.open("wb") as out:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break  # the writer was stopped in the middle of it
            try:
                record = json.loads(line)
                custom_id, response = record["custom_id"], record["response"]
            except (ValueError, KeyError, TypeError) as e:
                kept.unlink()
                raise BatchError(f"{path} line {number} is no answer of a batch; name another output file") from e
            if response is not None and response["status_code"] < 500 and response["status_code"] != 429:
                out.write(line)
                done.add(custom_id)
    os.replace(kept, path)
    return done


async def run_batch(http: httpx.AsyncClient, items: Iterator[BatchItem], output: TextIO, concurrency: int,
                    on_answer: Callable[[Tally], None], patience: float = 600.0) -> Tally:
    """Asks for every item and writes a line for each. `on_answer` is called after each."""
    tally = Tally()

    async def one(item: BatchItem) -> None:
        record: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": item.custom_id,
                                  "response": None, "error": None}
        try:
            reply = await ask(http, item.url, item.body, patience)
        except Unreachable as e:
            record["error"] = {"code": "unreachable", "message": str(e)}
            _count(tally, None, str(e))
        else:
            record["response"] = {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}
            _count(tally, reply, f"{item.custom_id}: status {reply.status}: {_said(reply.body)}")
        output.write(json.dumps(record) + "\n")
        output.flush()
        on_answer(tally)

    await for_each(items, one, concurrency)
    return tally


def _said(body: Any) -> str:
    """What a refusal says, in its own words where they are where they should be."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else json.dumps(body)[:200]


def _count(tally: Tally, reply: Reply | None, failure: str) -> None:
    if reply is None or reply.status != 200:
        tally.failed += 1
        tally.first_failure = tally.first_failure or failure
        return
    tally.answered += 1
    usage = (reply.body.get("usage") if isinstance(reply.body, dict) else None) or {}
    tally.prompt_tokens += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
    tally.completion_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
