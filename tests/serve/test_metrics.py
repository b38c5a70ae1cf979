"""/metrics against what the answers say, and the probes in every state."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stretto.host.counters import Counters
from stretto.protocol import EngineDead, EngineInfo, EngineStats
from stretto.serve.metric_names import COUNTERS, GAUGES, TIME_TO_FIRST_TOKEN
from stretto.serve.metrics import Histogram, ServerMetrics
from tests.serve.conftest import Api, make_api, make_served
from tests.serve.fakes import CoreOptions

CONVENTIONAL = (  # what gateways, autoscalers and dashboards read
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:request_success_total", "vllm:num_preemptions_total",
    "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")


def samples(text: str) -> dict[str, float]:
    """name{labels without model_name and engine} -> value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + "".join(f"|{k}={v}" for k, v in sorted(labels.items()))] = sample.value
    return found


async def scrape(api: Api) -> dict[str, float]:
    answer = await api.http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return samples(answer.text)


async def test_names_that_others_look_for(api: Api):
    await api.chat()
    text = (await api.http.get("/metrics")).text
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    for name in CONVENTIONAL:
        assert f"\n{name}{{" in text, name
    assert 'model_name="fake/tiny"' in text


def test_every_number_says_what_it_is():
    """Of the engine's counters, its loop's, and its pages by group."""
    assert set(Counters.__slots__) - {"drafts"} <= set(COUNTERS)
    info = EngineInfo(model_name="m", vocab_size=1, max_model_len=1, max_num_seqs=1, kv_tokens=1, eos_token_ids=[])
    metrics = ServerMetrics(info, "m")
    gauges = dict.fromkeys(GAUGES, 1.0) | {"pages_total_1": 9.0, "pages_free_1": 4.0, "pages_used_1": 3.0,
                                           "pages_evictable_1": 2.0}
    metrics.take(EngineStats(counters=dict.fromkeys(COUNTERS, 1.0), gauges=gauges))
    text = metrics.render().decode()
    assert "Engine counter" not in text and "Engine gauge" not in text
    pages = {name: value for name, value in samples(text).items() if name.startswith("stretto_kv_pages")}
    assert pages == {"stretto_kv_pages|group=1|state=free": 4.0, "stretto_kv_pages|group=1|state=evictable": 2.0,
                     "stretto_kv_pages|group=1|state=used": 3.0}


async def test_case_17_03_counters_are_monotone_and_equal_the_usages():
    async with make_api(CoreOptions(block=3)) as api:
        before: dict[str, float] = {}
        prompt = completion = cached = drafted = accepted = 0
        for i in range(12):
            usage = (await api.chat(f"text {i % 5}", n=1 + i % 3, max_tokens=4 + i)).json()["usage"]
            prompt += usage["prompt_tokens"]
            completion += usage["completion_tokens"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            drafted += usage["speculation"]["drafted_tokens"]
            accepted += usage["speculation"]["accepted_tokens"]
            task = asyncio.create_task(api.complete("x", max_tokens=400))  # aborted half-way
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await api.until_idle()
            now = await scrape(api)
            grows = [name for name in now if name.split("|")[0].endswith(("_total", "_bucket", "_count", "_sum"))]
            assert all(now[name] >= before.get(name, 0) for name in grows) and set(before) <= set(now)
            before = now
        extra_prompt = before["vllm:prompt_tokens_total"] - prompt
        extra = before["vllm:generation_tokens_total"] - completion
        assert extra_prompt >= 0 and extra >= 0
        assert before["stretto_time_to_first_token_seconds_count"] >= 12
        assert before["vllm:request_success_total|finished_reason=length"] >= 12


@pytest.mark.parametrize("block, tokens", [(1, 10), (5, 10), (5, 11)])
async def test_case_17_05_draft_counts_are_exact(block: int, tokens: int):
    async with make_api(CoreOptions(block=block)) as api:
        usage = (await api.chat(max_tokens=tokens)).json()["usage"]
        found = await scrape(api)
    spec = usage["speculation"]
    steps = -(-tokens // block)
    assert (spec["drafted_tokens"], spec["accepted_tokens"], spec["steps"]) == (
        steps * (block - 1), tokens - steps, steps)
    assert sum(spec["accepted_runs"]) == (steps if block > 1 else 0) and sum(spec["drafted_at"]) == steps * (block - 1)
    assert sum(n * count for n, count in enumerate(spec["accepted_runs"])) == sum(spec["accepted_at"]) == tokens - steps
    assert spec["tokens_per_step"] == round(tokens / steps, 4)
    assert usage["completion_tokens"] == spec["steps"] + spec["accepted_tokens"] == tokens
    assert found["vllm:generation_tokens_total"] == tokens
    assert found["vllm:prompt_tokens_total"] == usage["prompt_tokens"]
    assert found["vllm:spec_decode_num_draft_tokens_total"] == spec["drafted_tokens"]
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == spec["accepted_tokens"]
    assert found["stretto_time_to_first_token_seconds_count"] == 1
    assert found["stretto_e2e_request_latency_seconds_count"] == 1
    assert found["vllm:request_success_total|finished_reason=length"] == 1


@pytest.mark.parametrize("cause", ["abort_request", "client_disconnected", "request_timeout"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_withdrawn_choices_are_counted_as_aborted(cause: str, stream: bool):
    """Each once, those that wait as well."""
    async with make_served(CoreOptions(step_seconds=0.005, max_num_seqs=4, max_model_len=200_000)) as api:
        more = {"timeout": 0.2} if cause == "request_timeout" else {}
        call = asyncio.create_task(api.complete(["x", "y"], n=3, max_tokens=100_000, ignore_eos=True, stream=stream,
                                                request_id="x", **more))
        async with asyncio.timeout(10):
            while (await api.gauges())["running"] < 4:
                await asyncio.sleep(0.01)
        if cause == "abort_request":
            assert (await api.http.post("/abort_request", json={"rid": "x"})).status_code == 200
        elif cause == "client_disconnected":
            call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await api.until_idle()
        assert (await api.complete("say:hi", max_tokens=8)).status_code == 200
        assert (await api.complete("x" * 300_000, max_tokens=8)).status_code == 400  # never ran: in no count
        found = await scrape(api)
    for name in ("vllm:request_success_total", "stretto_request_success_total"):
        assert [found[f"{name}|finished_reason={reason}"] for reason in ("abort", "stop", "length", "error")] == [
            6, 1, 0, 0]
    assert found[f"stretto_request_aborts_total|cause={cause}"] == 1


async def test_answers_are_counted_by_route_and_status(api: Api):
    await api.chat()
    await api.chat(temperature=-1)
    for i in range(3):
        await api.http.get(f"/nothing/{i}")
    found = await scrape(api)
    route = "stretto_http_responses_total|route="
    assert found[route + "/v1/chat/completions|status=200"] == found[route + "/v1/chat/completions|status=400"] == 1
    assert found[route + "unknown|status=404"] == 3


async def test_kv_usage_lies_between_0_and_1():
    async with make_api(CoreOptions(step_seconds=0.01, max_model_len=100_000)) as api:
        task = asyncio.create_task(api.complete("x", n=4, max_tokens=90_000))
        async with asyncio.timeout(10):
            while (await api.gauges())["running"] < 4:
                await asyncio.sleep(0.01)
        found = await scrape(api)
        assert found["vllm:kv_cache_usage_perc"] == 4 / 512 and found["vllm:num_requests_running"] == 4
        assert any(name.startswith("vllm:cache_config_info|block_size=") for name in found)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_snapshot_that_went_back_does_not_lower_a_counter():
    info = EngineInfo(model_name="m", vocab_size=1, max_model_len=1, max_num_seqs=1, kv_tokens=1, eos_token_ids=[])
    metrics = ServerMetrics(info, "m")
    for value, shown in ((5.0, 5.0), (3.0, 5.0), (6.0, 6.0)):
        metrics.take(EngineStats(counters={"steps": value}, histograms={"request_queue_time_seconds": [0.5]}))
        assert samples(metrics.render().decode())["stretto_steps_total"] == shown
    assert samples(metrics.render().decode())["vllm:request_queue_time_seconds_count"] == 3


def test_histogram_buckets_are_cumulative_and_include_their_bound():
    histogram = Histogram((1.0, 2.0))
    for value, times in ((1.0, 1), (1.5, 2), (9.0, 3)):
        histogram.observe(value, times)
    assert histogram.buckets() == [("1.0", 1.0), ("2.0", 3.0), ("+Inf", 6.0)] and histogram.sum == 31.0


async def test_features_are_told():
    report = {"features": [{"feature": "overlap", "asked": "auto", "now": "off", "why": 'said "no"', "changed": False}]}
    async with make_api(CoreOptions(server_info=report)) as api:
        text = (await api.http.get("/metrics")).text
    (line,) = [line for line in text.splitlines() if line.startswith("stretto_feature_info{")]
    assert 'asked="auto"' in line and 'now="off"' in line and r'why="said \"no\""' in line and line.endswith(" 1.0")


async def test_adapters_are_told_as_gateways_read_them():
    def line(text: str) -> str:
        return next(one for one in text.splitlines() if one.startswith("vllm:lora_requests_info{"))

    options = CoreOptions(step_seconds=0.01, max_num_seqs=1, max_model_len=9000, adapters={"sql": "/a", "legal": "/b"})
    async with make_api(options) as api:
        assert 'max_lora="4"' in line((await api.http.get("/metrics")).text)
        running = asyncio.create_task(api.complete("x", model="sql", max_tokens=8000))
        async with asyncio.timeout(10):
            while not sum(api.service.metrics.histograms[TIME_TO_FIRST_TOKEN].counts):
                await asyncio.sleep(0.01)
        waiting = asyncio.create_task(api.complete("x", model="legal", max_tokens=8000))
        async with asyncio.timeout(10):
            while api.service.live_calls < 2:
                await asyncio.sleep(0.01)
        told = line((await api.http.get("/metrics")).text)
        assert 'running_lora_adapters="sql"' in told and 'waiting_lora_adapters="legal"' in told
        assert float(told.split()[-1]) == pytest.approx(time.time(), abs=60)
        for task in (running, waiting):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        await api.until_idle()
        assert 'running_lora_adapters=""' in line((await api.http.get("/metrics")).text)
    async with make_api(CoreOptions()) as api:
        assert "lora_requests_info" not in (await api.http.get("/metrics")).text


async def test_probes_of_a_healthy_server(api: Api):
    for path in ("/health", "/readyz", "/ping", "/livez", "/startupz"):
        assert (await api.http.get(path)).json() == {"status": "ok"}
    assert set((await api.http.get("/version")).json()) == {"version"}


async def test_probes_while_draining(api: Api):
    api.service.draining = True
    for path in ("/health", "/readyz", "/ping"):
        answer = await api.http.get(path)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "draining"
    assert (await api.http.get("/livez")).status_code == 200
    assert (await api.chat()).json()["error"]["code"] == "draining"


@pytest.mark.parametrize("stream", [False, True])
async def test_case_17_01_clients_and_probes_of_a_dead_engine(stream: bool):
    async with make_api(CoreOptions(step_seconds=0.005, max_model_len=100_000)) as api:
        running = asyncio.create_task(api.chat("x", max_tokens=90_000, stream=stream))
        async with asyncio.timeout(10):
            while not sum(api.service.metrics.histograms[TIME_TO_FIRST_TOKEN].counts):  # its stream has begun
                await asyncio.sleep(0.01)
        failed = await api.chat("fault:boom", stream=stream)
        assert failed.status_code == 503 and "boom" in failed.json()["error"]["message"]
        other = await running
        if stream:  # it had begun: one error event ends it
            assert other.text.rstrip().splitlines()[-1].startswith('data: {"error":') and "[DONE]" not in other.text
        else:
            assert other.status_code == 503
        for path in ("/health", "/livez", "/readyz"):
            assert (await api.http.get(path)).status_code == 503
        late = await api.chat()
        assert late.status_code == 503 and late.json()["error"]["code"] == "engine_dead"
        assert late.json()["error"]["type"] == "overloaded_error" and late.headers["retry-after"]
        assert (await api.http.get("/metrics")).status_code == 200  # the last numbers
        with contextlib.suppress(EngineDead):
            await api.engine.stats()
