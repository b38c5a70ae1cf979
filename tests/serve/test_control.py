"""The routes of gateways and operators, the admin key, and the step trace."""

from __future__ import annotations

import asyncio
import json

import pytest

from stretto.protocol import StepRecord
from stretto.serve.middleware import _is_own
from stretto.serve.trace import chrome_trace
from tests.serve.conftest import Api, make_api
from tests.serve.fakes import CoreOptions

GATEWAY_PROBES = ("/health", "/v1/models", "/version", "/server_info", "/model_info", "/get_model_info", "/v1/loads",
                  "/get_load", "/metrics", "/health_generate")


@pytest.mark.parametrize("path", GATEWAY_PROBES)
async def test_what_gateways_ask_on_registration(api: Api, path: str):
    assert (await api.http.get(path)).status_code == 200


async def test_loads_say_what_runs():
    async with make_api(CoreOptions(step_seconds=0.01, max_model_len=100_000)) as api:
        task = asyncio.create_task(api.complete("x", n=3, max_tokens=90_000))
        async with asyncio.timeout(10):
            while (await api.gauges())["running"] < 3:
                await asyncio.sleep(0.01)
        found = (await api.http.get("/v1/loads")).json()
        (load,) = found["loads"]
        assert load["num_running_reqs"] == 3 == found["aggregate"]["total_running_reqs"]
        assert load["num_waiting_reqs"] == 0
        assert load["live_requests"] == 1 and 0 <= load["token_usage"] <= 1
        assert (await api.http.get("/get_load")).json()[0]["num_reqs"] == 3
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_generation_probe_generates_or_says_that_it_could_not():
    async with make_api() as api:
        before = (await api.engine.stats()).counters["generated_tokens"]
        assert (await api.http.get("/health_generate")).json()["status"] == "ok"
        assert (await api.engine.stats()).counters["generated_tokens"] == before + 1
        api.service.draining = True
        assert (await api.http.get("/health_generate")).json()["error"]["code"] == "draining"
    async with make_api(CoreOptions(step_seconds=0.5), generation_probe_timeout=0.05) as api:
        answer = await api.http.get("/health_generate")
        assert answer.status_code == 503 and "0.05 s" in answer.json()["error"]["message"]
        await api.until_idle()


async def test_a_flushed_cache_is_cold(api: Api):
    cached = []
    for flush in (False, False, True):
        if flush:
            assert (await api.http.post("/flush_cache")).json()["success"]
        cached.append((await api.chat("say:x")).json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 < cached[1] and cached[2] == 0


@pytest.mark.parametrize("keys", [("user",), ()])
async def test_the_admin_key(keys: tuple[str, ...]):
    async with make_api(api_keys=keys, admin_keys=("root",)) as api:
        user, root = {"Authorization": "Bearer user"}, {"Authorization": "Bearer root"}
        for path in ("/flush_cache", "/start_profile", "/stop_profile"):
            assert (await api.http.post(path)).status_code == 403
            refused = await api.http.post(path, headers=user)
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_key_required"
            assert (await api.http.post(path, headers=root)).status_code == 200
        for several in ({"abort_all": True}, {"rid_prefix": "r"}, {"rid_prefix": "r", "rid": "x"}):
            refused = await api.http.post("/abort_request", json=several, headers=user)
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_key_required"
            assert (await api.http.post("/abort_request", json=several, headers=root)).status_code == 200
        assert (await api.http.post("/abort_request", json={"rid": "x"}, headers=user)).status_code == 200
        assert (await api.http.get("/v1/models", headers=root)).status_code == 200
        assert (await api.http.get("/v1/models")).status_code == (401 if keys else 200)


async def test_an_api_key_is_enough_where_there_is_no_admin_key():
    async with make_api(api_keys=("user",)) as api:
        assert (await api.http.post("/flush_cache")).status_code == 401
        assert (await api.http.post("/flush_cache", headers={"x-api-key": "user"})).status_code == 200


async def test_a_trace_is_asked_for_and_fetched(api: Api):
    assert (await api.http.post("/start_profile")).json()["recording"]
    assert (await api.http.post("/start_profile", json={"num_steps": 2})).json()["num_steps"] == 2
    await api.chat("say:abcdef")
    trace = (await api.http.post("/stop_profile")).json()
    assert len([event for event in trace["traceEvents"] if event["name"] == "plan"]) == 2
    assert (await api.http.post("/start_profile", json={"num_steps": 0})).status_code == 400


def test_spans_of_a_trace_nest_and_do_not_overlap():
    records = [StepRecord(0, 2, 10.0, 10.1, 10.2, 10.5, 10.9, 11.0, {"prefill_tokens": 5, "decode_tokens": 1}),
               StepRecord(1, 1, 10.3, 10.4, 10.5, 11.1, 11.3, 11.4, {"verify_tokens": 3})]
    trace = json.loads(json.dumps(chrome_trace(records, "m")))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["args"]["step"] == 0]
    assert [(span["name"], span["ts"]) for span in spans] == [
        ("plan", 0.0), ("launch", 100000.0), ("wait", 500000.0), ("process", 900000.0)]
    begins = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "b"}
    ends = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "e"}
    assert begins[0]["name"] == "prefill + decode" and begins[1]["name"] == "verify" and begins[0]["ts"] < ends[0]["ts"]
    counters = [event["args"] for event in trace["traceEvents"] if event["ph"] == "C"]
    assert counters == [{"prefill": 5, "decode": 1, "verify": 0}, {"prefill": 0, "decode": 0, "verify": 3}]


async def test_pages_of_allowed_origins_may_call():
    """A browser asks first, without a key; and may read what helps it when it was refused."""
    page, other = "https://chat.example", "https://else.example"
    async with make_api(CoreOptions(), allowed_origins=(page,), api_keys=("secret",)) as api:
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
        allowed = await api.http.options("/v1/chat/completions", headers=asks | {"Origin": page})
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == page
        refused = await api.http.options("/v1/chat/completions", headers=asks | {"Origin": other})
        assert "access-control-allow-origin" not in refused.headers
        answer = await api.http.post("/v1/completions", json={"prompt": "say:hi", "stream": True},
                                     headers={"Origin": page, "Authorization": "Bearer secret"})
        assert answer.headers["access-control-allow-origin"] == page and answer.text.endswith("[DONE]\n\n")
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        keyless = await api.http.post("/v1/completions", json={"prompt": "x"}, headers={"Origin": page})
        assert keyless.status_code == 401 and keyless.headers["access-control-allow-origin"] == page
    async with make_api(CoreOptions()) as api:
        assert "access-control-allow-origin" not in (await api.http.get("/version", headers={"Origin": page})).headers


@pytest.mark.parametrize("origin", ["https://else.example", "http://test:81", "http://test.else.example", "null", "",
                                    "http://else.example/http://test", "http://user@test", "chrome-extension://abc"])
@pytest.mark.parametrize("method, path", [("POST", "/v1/completions"), ("POST", "/v1/messages"),
                                          ("POST", "/flush_cache"), ("DELETE", "/v1/requests/x")])
async def test_pages_of_other_sites_may_not_act(api: Api, method: str, path: str, origin: str):
    """Although the browser would send such a request without asking first: its body may be called text."""
    refused = await api.http.request(method, path, headers={"Origin": origin, "Content-Type": "text/plain"},
                                     content=b'{"prompt": "x"}')
    error = refused.json()["error"]
    assert refused.status_code == 403 and refused.headers["x-request-id"] and error["code"] == "origin_not_allowed"
    assert origin in error["message"] and "--allowed-origins" in error["message"]
    assert (await api.http.get("/v1/models", headers={"Origin": origin})).status_code == 200  # not readable there
    assert (await api.engine.stats()).counters["generated_tokens"] == 0
    assert api.service.metrics.responses["unknown", 403] == 1


@pytest.mark.parametrize("origins, allowed", [(["http://test"], ()), (["https://TEST"], ()), ([], ()),
                                              (["https://chat.example"], ("https://chat.example",)),
                                              (["null"], ("null",)), (["https://else.example"], ("*",))])
async def test_the_servers_own_page_and_allowed_ones_act(origins: list[str], allowed: tuple[str, ...]):
    async with make_api(allowed_origins=allowed) as api:
        answer = await api.http.post("/v1/completions", json={"prompt": "say:hi"},
                                     headers=[("Origin", origin) for origin in origins])
        assert answer.json()["choices"][0]["text"] == "hi"


@pytest.mark.parametrize("origin, host, own", [
    ("http://127.0.0.1:8000", "127.0.0.1:8000", True), ("http://localhost:8000", "127.0.0.1:8000", False),
    ("http://[::1]:8000", "[::1]:8000", True), ("https://a.example", "a.example:443", True),
    ("https://a.example", "a.example:80", False), ("http://a.example", "a.example:8000", False),
    ("http://", "", False), ("a.example", "a.example", False), ("null", "null", False)])
def test_what_is_a_servers_own_origin(origin: str, host: str, own: bool):
    assert _is_own(origin, host) == own
