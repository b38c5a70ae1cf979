"""Asks a server every example of a task and counts what is right. No torch in this module."""

from __future__ import annotations

import asyncio
import datetime
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import httpx

from stretto.asking import Unreachable, ask, for_each, message_of
from stretto.evals.tasks import Record, Task, Verdict

Z = 1.959964  # of a 95 % interval


@dataclass(frozen=True)
class Asking:
    """How examples are asked."""

    model: str
    api: Literal["chat", "completions"] = "chat"
    max_tokens: int | None = None  # None: the task's
    temperature: float = 0.0
    seed: int = 0
    concurrency: int = 16
    patience: float = 600.0
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of every request


@dataclass
class Answered:
    """One example. `error`: the server's; such an example counts as wrong."""

    number: int
    reply: str = ""
    verdict: Verdict | None = None
    finish_reason: str | None = None
    completion_tokens: int = 0
    error: str | None = None


async def evaluate(http: httpx.AsyncClient, task: Task, examples: Sequence[Record], shots: Sequence[Record],
                   asking: Asking, on_answer: Callable[[], None]) -> dict[str, Any]:
    """JSON-ready: accuracy, its interval, and every answer."""
    answers = [Answered(number) for number in range(1, len(examples) + 1)]
    started = time.perf_counter()

    async def one(answered: Answered) -> None:
        record = examples[answered.number - 1]
        await _ask(http, task, record, shots, asking, answered)
        if answered.error is None:
            answered.verdict = await asyncio.to_thread(task.judge, record, answered.reply)
        on_answer()

    await for_each(answers, one, asking.concurrency)
    return _report(task, asking, len(shots), answers, time.perf_counter() - started)


async def _ask(http: httpx.AsyncClient, task: Task, record: Record, shots: Sequence[Record], asking: Asking,
               answered: Answered) -> None:
    body = {"model": asking.model, "temperature": asking.temperature, "seed": asking.seed,
            "max_tokens": asking.max_tokens or task.max_tokens} | asking.extra
    chat = asking.api == "chat"
    asked = {"messages": task.messages(record, shots)} if chat else {"prompt": task.prompt(record, shots),
                                                                     "stop": list(task.stop)[:4]}
    try:
        reply = await ask(http, "/v1/chat/completions" if chat else "/v1/completions", body | asked, asking.patience)
    except Unreachable as e:
        answered.error = str(e)
        return
    if reply.status != 200:
        answered.error = f"status {reply.status}: {message_of(reply)}"
        return
    choice = reply.body["choices"][0]
    answered.reply = (choice["message"].get("content") if chat else choice["text"]) or ""
    answered.finish_reason = choice.get("finish_reason")
    answered.completion_tokens = (reply.body.get("usage") or {}).get("completion_tokens") or 0


def _report(task: Task, asking: Asking, shots: int, answers: Sequence[Answered], seconds: float) -> dict[str, Any]:
    correct = sum(a.verdict is not None and a.verdict.correct for a in answers)
    tokens = sum(a.completion_tokens for a in answers)
    return {
        "benchmark": "eval", "task": task.name, "date": datetime.datetime.now(datetime.UTC).isoformat(
            timespec="seconds"), "model": asking.model, "api": asking.api, "shots": shots,
        "temperature": asking.temperature, "examples": len(answers), "correct": correct,
        "accuracy": correct / len(answers), "interval": list(wilson(correct, len(answers))),
        "unreadable": sum(a.verdict is not None and a.verdict.answer is None for a in answers),
        "cut_off": sum(a.finish_reason == "length" for a in answers),
        "failed": sum(a.error is not None for a in answers),
        "seconds": seconds, "completion_tokens": tokens,
        "answers": [asdict(answer) for answer in answers]}


def wilson(correct: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share, by Wilson's score ("Probable inference", 1927): right also near 0 and 1."""
    share, z2 = correct / count, Z * Z
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count)) / (1 + z2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def choose(records: Sequence[Record], count: int | None, seed: int) -> list[Record]:
    """So many of them, the same ones for the same seed; all where `count` is None or not smaller."""
    if count is None or count >= len(records):
        return list(records)
    picked = sorted(random.Random(seed).sample(range(len(records)), count))
    return [records[i] for i in picked]
