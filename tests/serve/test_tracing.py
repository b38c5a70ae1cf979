"""OpenTelemetry: the spans of calls, below their clients' spans, with times and counts that agree with the answers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from stretto.engine.inprocess import InProcessEngine
from stretto.serve.app import build_app
from stretto.serve.settings import ServeSettings
from tests.serve.conftest import Api
from tests.serve.fakes import ByteTokenizer, CoreOptions
from tests.serve.test_server import program

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
Spans = dict[str, list[ReadableSpan]]


@contextlib.asynccontextmanager
async def traced(options: CoreOptions) -> AsyncIterator[tuple[Api, InMemorySpanExporter]]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = await InProcessEngine.start(options)
    app = build_app(engine, ByteTokenizer(), ServeSettings(), provider)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield Api(http, engine, app.state.service, "http://test"), exporter
    await engine.close()
    app.state.service.close()


def by_name(exporter: InMemorySpanExporter) -> Spans:
    found: Spans = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    exporter.clear()
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_the_spans_of_a_call(stream: bool):
    async with traced(CoreOptions(block=3, step_seconds=0.01)) as (api, exporter):
        answer = await api.http.post("/v1/chat/completions", headers=HEADERS, json={
            "messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "n": 2, "seed": 3, "temperature": 0.5,
            "stream": stream})
        assert answer.status_code == 200
        spans = by_name(exporter)
    (root,), (queue,), (prefill,), (decode,) = (spans[n] for n in ("chat fake/tiny", "queue", "prefill", "decode"))
    assert root.parent is not None and f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT
    assert all(span.parent == root.context for span in (queue, prefill, decode))
    assert root.start_time == queue.start_time <= queue.end_time <= prefill.end_time == decode.start_time
    assert decode.end_time <= root.end_time and decode.end_time - decode.start_time >= 50e6  # seven steps
    said = root.attributes
    assert said["gen_ai.operation.name"] == "chat" and said["gen_ai.response.id"] == "mine"
    assert said["gen_ai.response.finish_reasons"] == ("length", "length")
    assert said["gen_ai.usage.output_tokens"] == decode.attributes["gen_ai.usage.output_tokens"] == 40
    assert said["gen_ai.usage.input_tokens"] == prefill.attributes["gen_ai.usage.input_tokens"] > 10
    assert said["gen_ai.request.seed"] == 3 and said["gen_ai.request.temperature"] == 0.5
    assert said["stretto.stream"] is stream and 0 < said["gen_ai.latency.time_to_first_token"] < 5
    assert decode.attributes["stretto.drafted_tokens"] > decode.attributes["stretto.accepted_tokens"] > 0
    assert root.status.status_code is StatusCode.UNSET
    assert not any("<|im_start|>" in str(value) for span in (root, queue, prefill, decode)
                   for value in span.attributes.values())


async def test_prompts_embeddings_and_traces_of_ones_own():
    async with traced(CoreOptions()) as (api, exporter):
        await api.complete(["say:a", "say:bcd"])
        spans = by_name(exporter)
        assert [span.attributes["gen_ai.usage.output_tokens"] for span in spans["decode"]] == [2, 4]
        assert [span.attributes["stretto.prompt"] for span in spans["prefill"]] == [0, 1]
        (root,) = spans["text_completion fake/tiny"]
        assert root.parent is None and root.attributes["gen_ai.usage.output_tokens"] == 6
        await api.http.post("/v1/embeddings", json={"input": "hello"}, headers=HEADERS)
        spans = by_name(exporter)
        assert "embeddings fake/tiny" in spans and "decode" not in spans
        await api.http.post("/tokenize", json={"prompt": "x"})
        assert by_name(exporter) == {}


async def test_failures_are_told():
    async with traced(CoreOptions(step_seconds=0.02, max_model_len=5000)) as (api, exporter):
        await api.complete("refuse:this")
        (refused,) = by_name(exporter)["text_completion fake/tiny"]
        assert refused.status.status_code is StatusCode.ERROR and refused.attributes["error.type"] == "refused_by_core"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await api.complete("x", max_tokens=4000)
        await api.until_idle()
        (gone,) = by_name(exporter)["text_completion fake/tiny"]
        assert gone.status.status_code is StatusCode.ERROR and "gen_ai.usage.output_tokens" in gone.attributes


def test_spans_are_exported_by_otlp():
    """Through the whole program, to a collector; those of the last call as well, at the end."""
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    try:
        with program(otlp_traces_endpoint=f"http://127.0.0.1:{collector.server_port}/v1/traces") as server:
            server.until("/readyz", 200)
            assert server.complete("say:hi").status_code == 200
            server.process.terminate()
            assert server.process.wait(15) == 0
    finally:
        collector.shutdown()
    found = ExportTraceServiceRequest()
    found.ParseFromString(bodies[0])
    resource = {pair.key: pair.value.string_value for pair in found.resource_spans[0].resource.attributes}
    assert resource["service.name"] == "stretto" and resource["service.version"]
    assert {span.name for span in found.resource_spans[0].scope_spans[0].spans} == {
        "text_completion fake/tiny", "queue", "prefill", "decode"}
