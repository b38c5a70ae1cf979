"""Records of steps as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

One track for the host's loop (plan, launch, wait, process), one for the steps that the device has (from launch to
result), one counter of tokens a step by kind.
"""

from __future__ import annotations

from typing import Any

from stretto.protocol import StepRecord

_PID, _HOST, _DEVICE = 1, 1, 2
KINDS = ("prefill_tokens", "decode_tokens", "verify_tokens")


def chrome_trace(records: list[StepRecord], model: str) -> dict[str, Any]:
    """The JSON Object Format of trace events; times in microseconds from the first record on."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": _PID, "name": "process_name", "args": {"name": f"stretto engine, {model}"}},
        {"ph": "M", "pid": _PID, "tid": _HOST, "name": "thread_name", "args": {"name": "host loop"}},
        {"ph": "M", "pid": _PID, "tid": _DEVICE, "name": "thread_name", "args": {"name": "steps in flight"}}]
    origin = min((record.planning for record in records), default=0.0)
    for record in records:
        events += _of(record, origin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _of(record: StepRecord, origin: float) -> list[dict[str, Any]]:
    def at(seconds: float) -> float:
        return round((seconds - origin) * 1e6, 3)

    def span(name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "pid": _PID, "tid": _HOST, "name": name, "cat": "host", "ts": at(start),
                "dur": round((end - start) * 1e6, 3), "args": {"step": record.seq, **args}}

    flight = {"pid": _PID, "tid": _DEVICE, "name": _name(record), "cat": "device", "id": record.seq}
    return [
        span("plan", record.planning, record.planned, rows=record.rows),
        span("launch", record.planned, record.launched), span("wait", record.waiting, record.collected),
        span("process", record.collected, record.processed, **record.counts),
        {"ph": "b", "ts": at(record.launched), "args": {"rows": record.rows, **record.counts}, **flight},
        {"ph": "e", "ts": at(record.collected), **flight},
        {"ph": "C", "pid": _PID, "name": "tokens a step", "ts": at(record.collected),
         "args": {kind.removesuffix("_tokens"): record.counts.get(kind, 0) for kind in KINDS}}]


def _name(record: StepRecord) -> str:
    kinds = [kind.removesuffix("_tokens") for kind in KINDS if record.counts.get(kind)]
    return " + ".join(kinds) or "nothing"
