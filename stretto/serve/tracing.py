"""OpenTelemetry traces: a span for each call, below the span of whoever called, with what happened in it.

    client's span (traceparent)
      `- chat MODEL                                 gen_ai.* attributes, counts of tokens
           |- queue     arrival .. admitted         one of each for every prompt of the call
           |- prefill   admitted .. first token     prompt tokens, those found in the cache
           `- decode    first token .. last token   tokens of all choices, drafts verified and accepted

Spans are made when a call ends, from the times that were noted anyway, and exported on a thread: a step waits for
nothing. They hold no text of prompts or answers. Names follow the GenAI conventions of OpenTelemetry.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from typing import Any, Protocol

from stretto import __version__
from stretto.protocol import Request
from stretto.serve.clock import CallClock
from stretto.serve.schemas import ChatRequest, GenerationBody

NANO = 10**9
PACKAGES = "pip install 'stretto[otel]'"
PROTOCOL = "http/protobuf"
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")  # that ask for one
PARENT_HEADERS = ("traceparent", "tracestate", "baggage")


class Traced(Protocol):
    """What is told of a call: its Generation."""

    id: str
    body: GenerationBody
    requests: list[Request]
    trace_parent: Mapping[str, str]  # PARENT_HEADERS that the call came with


def available() -> bool:
    """The packages that traces need are installed."""
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter") is not None
    except ModuleNotFoundError:
        return False


def otlp_provider(endpoint: str) -> Any:
    """A TracerProvider that exports to `endpoint` by OTLP over HTTP, on a thread of its own. Its sampler, and headers
    of the export, come from the usual OTEL_ variables."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    own = Resource({SERVICE_NAME: "stretto", SERVICE_VERSION: __version__})
    provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class Tracing:
    """Makes the spans of calls. Used on the event loop."""

    def __init__(self, provider: Any, model_name: str):
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._model = provider, model_name
        self._tracer = provider.get_tracer("stretto", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, call: Traced, clock: CallClock, error: BaseException | None) -> None:
        """The spans of a call that has ended; `error`: how, where it did not end well."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        wall = time.time_ns() - round(time.monotonic() * NANO)  # of the zero of time.monotonic
        operation = _operation(call)
        root = self._tracer.start_span(
            f"{operation} {self._model}", self._propagator.extract(call.trace_parent), SpanKind.SERVER,
            _attributes(call, clock, operation, self._model), start_time=wall + round(clock.arrival * NANO))
        if error is not None:
            root.set_attribute("error.type", getattr(error, "code", None) or type(error).__name__)
            root.set_status(Status(StatusCode.ERROR, str(error)))
        below = set_span_in_context(root)
        for prompt in range(len(call.requests)):
            for name, start, end, attributes in _phases(prompt, call, clock):
                span = self._tracer.start_span(name, below, SpanKind.INTERNAL, attributes,
                                               start_time=wall + round(start * NANO))
                span.end(wall + round(end * NANO))
        root.end(wall + round(clock.ended * NANO))

    def close(self) -> None:
        """Exports what is left."""
        self._provider.shutdown()


def _operation(call: Traced) -> str:
    if call.requests[0].pooling is not None:
        return "embeddings"
    return "chat" if isinstance(call.body, ChatRequest) else "text_completion"


def _attributes(call: Traced, clock: CallClock, operation: str, model: str) -> dict[str, Any]:
    sampling, session = call.requests[0].sampling, call.requests[0].session
    usages = clock.usages.values()
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation, "gen_ai.provider.name": "stretto", "gen_ai.request.model": model,
        "gen_ai.response.model": model, "gen_ai.response.id": call.id, "gen_ai.request.choice.count": sampling.n,
        "gen_ai.request.temperature": sampling.temperature, "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k, "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty, "gen_ai.request.seed": sampling.seed,
        "gen_ai.conversation.id": session.sid if session is not None else None,
        "gen_ai.response.finish_reasons": clock.reasons,
        "gen_ai.usage.input_tokens": sum(_prompt_tokens(p, call, clock) for p in range(len(call.requests))),
        "gen_ai.usage.output_tokens": sum(usage.completion_tokens for usage in usages),
        "stretto.prompts": len(call.requests), "stretto.stream": bool(call.body.stream)}
    if clock.first:
        found["gen_ai.latency.time_to_first_token"] = min(clock.first.values()) - clock.arrival
    return {name: value for name, value in found.items() if value is not None}


def _prompt_tokens(prompt: int, call: Traced, clock: CallClock) -> int:
    """With a session's history, once the engine has told."""
    usage = clock.usages.get((prompt, 0))
    return usage.prompt_tokens if usage is not None and usage.prompt_tokens else len(call.requests[prompt].tokens)


def _phases(prompt: int, call: Traced, clock: CallClock) -> list[tuple[str, float, float, dict[str, Any]]]:
    """(name, start, end, attributes) of the phases that a prompt has reached."""
    mine = {index: usage for (p, index), usage in clock.usages.items() if p == prompt}
    usage = mine.get(0)
    where = {"stretto.prompt": prompt}
    if usage is None or not (usage.queue_seconds or clock.first):
        return [("queue", clock.arrival, clock.ended, where)]  # nothing of it has run, as far as anybody was told
    admitted = min(clock.arrival + usage.queue_seconds, clock.ended)
    starts = [time for (p, _), time in clock.first.items() if p == prompt]
    first = min(starts, default=clock.ended)
    phases = [("queue", clock.arrival, admitted, where),
              ("prefill", admitted, max(first, admitted), where | {
                  "gen_ai.usage.input_tokens": _prompt_tokens(prompt, call, clock),
                  "stretto.cached_tokens": usage.cached_tokens})]
    if starts:
        last = max(time for (p, _), time in clock.last.items() if p == prompt)
        totals = {name: sum(getattr(one, name) for one in mine.values())
                  for name in ("drafted_tokens", "accepted_tokens", "steps", "retractions")}
        phases.append(("decode", first, last, where | {
            "gen_ai.usage.output_tokens": sum(one.completion_tokens for one in mine.values()),
            **{f"stretto.{name}": value for name, value in totals.items()}}))
    return phases
