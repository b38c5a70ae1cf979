"""Commands that speak to a running server: `bench serve`, `chat`, `ps`, against a scripted one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from stretto import __version__
from stretto.bench.load import (
    Conversation,
    Load,
    Run,
    Sample,
    Target,
    _Client,
    conversations_of,
    run_load,
    synthetic_conversations,
)
from stretto.bench.load_report import percentile, report
from stretto.bench.plots import draw
from stretto.cli.main import run_app
from tests.serve.conftest import make_served
from tests.serve.fakes import CoreOptions
from tests.serve.test_load import real_core
from tests.serve.test_server import Program, program


@pytest.fixture(scope="module")
def server() -> Iterator[Program]:
    with program({"block": 3, "step_seconds": 0.005, "max_model_len": 4000}, api_keys=["k"]) as made:
        made.until("/readyz", 200)
        yield made


def stretto(server: Program, *tokens: str, key: str = "k", **variables: str) -> tuple[int, str]:
    """(exit code, what was said on stderr)."""
    notes = Console(record=True, width=300, file=open("/dev/null", "w"))  # noqa: SIM115
    code = run_app([*tokens, "--url", f"http://127.0.0.1:{server.port}", "--api-key", key], variables, notes)
    return code, notes.export_text()


def test_bench_serve_prints_and_writes(server: Program, tmp_path: Path, capsys: pytest.CaptureFixture):
    code, said = stretto(server, "bench", "serve", "--num-prompts", "6", "--output-len", "9", "--turns", "2",
                         "--json", "--output-json", str(tmp_path / "f.json"), "--plot", str(tmp_path / "p.svg"),
                         "--goodput", "ttft:10000", STRETTO_MAX_MODEL_LEN="4k")
    assert code == 0 and said == ""  # a variable of the server's is none of a client's
    found = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "f.json").read_text()) == found
    (one,) = found["servers"]
    assert (one["requests"], one["failed"], one["output_tokens"]) == (12, 0, 12 * 9) and one["tokens_counted_by_server"]
    assert one["prompt_tokens"] > 0 and one["goodput"] == pytest.approx(one["requests_per_second"])
    assert one["ttft"]["p50"] <= one["ttft"]["p99"] <= one["e2e"]["max"] and "api_key" not in one
    assert one["version"] == __version__
    ElementTree.parse(tmp_path / "p.svg")
    code, _ = stretto(server, "bench", "serve", "--num-prompts", "4", "--output-len", "3", "--request-rate", "50")
    assert code == 0 and "output tokens a second" in capsys.readouterr().out


@pytest.mark.parametrize("tokens, key, words", [
    (["--num-prompts", "0"], "k", "num-prompts"), (["--request-rate", "0"], "k", "request-rate"),
    (["--goodput", "itl:3"], "k", "ttft, tpot, e2el"),
    (["--dataset-path", "/nowhere"], "k", "cannot be read"), ([], "wrong", "API key"),
    (["--model", "other"], "k", "not served here")])
def test_bench_serve_refuses(server: Program, tokens: list[str], key: str, words: str):
    code, said = stretto(server, "bench", "serve", *tokens, key=key)
    assert code == 1 and words in said


def test_chat_and_ps(server: Program, capsys: pytest.CaptureFixture):
    assert stretto(server, "chat", "say:hello there")[0] == 0
    assert capsys.readouterr().out == "hello there\n"
    code, said = stretto(server, "chat", "x", "--temperature", "-1")
    assert code == 1 and "temperature" in said
    assert stretto(server, "ps", "--json")[0] == 0
    found = json.loads(capsys.readouterr().out)
    assert found["models"] == ["fake/tiny"] and found["counters"]["stretto_generated_tokens_total"] > 0
    assert offline("ps", f"127.0.0.1:{server.port}/v1", "--api-key", "k")[0] == 0
    assert "drafts accepted" in capsys.readouterr().out
    code, said = offline("ps", f"127.0.0.1:{server.port}/behind/a/gateway", "--api-key", "k")
    assert code == 1 and "is no server of Stretto: a gateway's replicas can be asked one by one" in said


async def test_what_is_measured_is_what_was_served():
    """Steps of 20 ms with two tokens each, four clients of eight places: every figure is known beforehand."""
    async with make_served(CoreOptions(block=2, step_seconds=0.02, max_model_len=4000)) as api:
        target = Target("x", api.url, "fake/tiny")
        load = Load(synthetic_conversations(8, words=5, output_tokens=20), concurrency=4)
        run = await run_load(target, load)
    (found,) = report([run], load, "w")["servers"]
    assert found["output_tokens"] == 160 and found["failed"] == 0
    assert 0 < found["tpot"]["p50"] < 0.5 and 0.4 <= run.seconds < 20 and found["drafts_accepted"] == 1.0
    for sample in run.samples:  # at most ten pieces, fewer where some were joined on the way; their gaps are the time
        assert sample.first is not None and 1 <= len(sample.gaps) <= 9
        assert sum(sample.gaps) == pytest.approx(sample.end - sample.first, rel=0.01) and sample.end >= 10 * 0.02
        assert sample.per_token == pytest.approx((sample.end - sample.first) / 19)


async def test_an_open_loop_counts_from_the_moment_that_was_due():
    """All arrive at once and one place is free at a time: who waits is charged for it."""
    async with make_served(CoreOptions(step_seconds=0.02)) as api:
        load = Load(synthetic_conversations(4, words=3, output_tokens=5), rate=1e6, concurrency=1)
        run = await run_load(Target("x", api.url, "fake/tiny"), load)
    firsts = sorted(sample.first or 0.0 for sample in run.samples)
    assert all(first >= before * 5 * 0.02 for before, first in enumerate(firsts))  # five steps of each one before it


async def test_conversations_are_sessions_where_asked_for():
    core = real_core()
    async with make_served(lambda: core, served_model_names=("tiny",)) as api:
        work = Load((Conversation(("a", "b", "c"), 4),) * 2, api="completions", sessions=True)
        run = await run_load(Target("x", api.url, "tiny"), work)
        assert not any(sample.error for sample in run.samples) and len(run.samples) == 6
        assert (await api.engine.stats()).counters["session_turns"] == 6
        assert (await api.http.get("/v1/sessions")).json()["data"] == [], "the last turn of each closes it"


async def test_a_poisson_process_has_its_rate_and_failures_are_counted():
    async with make_served() as api:
        load = Load(synthetic_conversations(60, words=1, output_tokens=1), rate=200.0, concurrency=100)
        ended: list[Sample] = []
        run = await run_load(Target("x", api.url, "fake/tiny"), load, ended.append)
        assert len(ended) == 60 and {id(one) for one in ended} == {id(one) for one in run.samples}
        broken = await run_load(Target("x", api.url, "fake/tiny"), Load((Conversation(("fault:x",), 4),)), ended.append)
        assert ended[60:] == broken.samples
    assert 0.15 < run.seconds < 5 and not any(sample.error for sample in run.samples)
    assert broken.samples[0].error is not None and broken.samples[0].error.startswith("status 50")


def test_percentiles_are_numpys():
    values = list(np.random.default_rng(0).exponential(size=37))
    for share in (0, 1, 50, 90, 99, 100):
        assert percentile(values, share) == pytest.approx(np.percentile(values, share))


def test_conversations(tmp_path: Path):
    made = synthetic_conversations(6, words=4, output_tokens=1, turns=2, shared=3, long_every=3, long_words=50)
    assert made == synthetic_conversations(6, words=4, output_tokens=1, turns=2, shared=3, long_every=3, long_words=50)
    assert [len(one.turns[0].split()) for one in made] == [7, 7, 53, 7, 7, 53]
    assert len({" ".join(one.turns[0].split()[:3]) for one in made}) == 1
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"},
                                                   {"from": "human", "value": "c"}]}, {"other": 1}]))
    assert conversations_of(path, 5, 3) == (Conversation(("a", "c"), 3),)
    path.write_text('{"turns": ["a", "b"]}\n{"prompt": "c"}\n')
    assert [one.turns for one in conversations_of(path, 5, 3)] == [("a", "b"), ("c",)]
    path.write_text('{"text": "a"}')
    with pytest.raises(ValueError, match="no record"):
        conversations_of(path, 5, 3)


def test_goodput_keeps_every_limit():
    """First token, time a later token (0.1 s of 10 more), end: each limit alone, and all together."""
    sample = Sample(first=1.0, end=2.0, output_tokens=11)
    run = [Run(Target("a", "u", "m"), [sample, Sample(error="x"), Sample(end=0.5)], 1.0, 0.1)]
    for limits, good in (({"ttft": 1.0}, 1), ({"ttft": 0.9}, 0), ({"tpot": 0.1}, 2), ({"tpot": 0.09}, 1),
                         ({"e2el": 2.0}, 2), ({"ttft": 1.0, "tpot": 0.1, "e2el": 1.9}, 0)):
        assert report(run, Load(()), "w", limits)["servers"][0]["goodput"] == good, limits


def test_arrivals_of_a_gamma_process_keep_the_rate():
    """The spread of the gaps, over their mean, is 1 / sqrt(burstiness)."""
    for burstiness in (0.25, 1.0, 4.0):
        client = _Client(None, None, Load((), 50.0, burstiness), [], print)  # type: ignore[arg-type]
        gaps = np.diff(list(itertools.islice(client._arrivals(50.0), 20_000)))
        assert gaps.mean() == pytest.approx(0.02, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


# ------------------------------------------------------------------------------------------- sweep, plot, compare
def test_a_sweep_its_plot_and_its_comparison(server: Program, tmp_path: Path, capsys: pytest.CaptureFixture):
    made = tmp_path / "a.json"
    code, _ = stretto(server, "bench", "sweep", "--concurrencies", "1,4", "--num-prompts", "4", "--output-len", "6",
                      "--output-json", str(made), "--plot", str(tmp_path / "s.svg"))
    shown = capsys.readouterr().out
    assert code == 0 and "output tokens/s" in shown
    found = json.loads(made.read_text())
    assert [point["concurrency"] for point in found["points"]] == [1, 4] and found["over"] == "concurrency"
    slow, fast = (point["servers"][0] for point in found["points"])
    assert slow["output_tokens"] == fast["output_tokens"] == 24
    assert 0 <= slow["server_cpu_seconds_per_token"] < 0.1  # the system counts it in hundredths of a second
    assert slow["cached_share"] == fast["cached_share"] == 0, "earlier points, and the warm-up, do not help later ones"
    assert "first token" in (tmp_path / "s.svg").read_text()

    for point in found["points"]:
        point["servers"][0]["output_tokens_per_second"] *= 0.5
    (tmp_path / "b.json").write_text(json.dumps(found))
    code, _ = offline("bench", "compare", str(made), str(tmp_path / "b.json"), "--tolerance", "10")
    shown = capsys.readouterr().out
    assert code == 4 and "(0.50x)" in shown and "concurrency 4: output tokens a second" in shown
    assert shown.count("worse by more than 10 %") == 2
    assert offline("bench", "compare", str(made), str(made), "--tolerance", "0")[0] == 0
    code, _ = offline("bench", "plot", str(made), str(tmp_path / "b.json"), "--output", str(tmp_path / "p.png"))
    assert code == 0 and (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def offline(*tokens: str) -> tuple[int, str]:
    notes = Console(record=True, width=300, file=open("/dev/null", "w"))  # noqa: SIM115
    return run_app(tokens, {}, notes), notes.export_text()


@pytest.mark.parametrize("tokens, words", [
    (["sweep"], "--rates 1,2,4 or"), (["sweep", "--rates", "1,x"], "numbers above 0"),
    (["sweep", "--concurrencies", "1.5"], "numbers above 0"),
    (["sweep", "--rates", "1", "--request-rate", "2"], "sets --request-rate"),
    (["compare", "FILE"], "nothing to compare it with"), (["compare", "/nowhere"], "cannot be read"),
    (["plot", "FILE", "--output", "x.gif"], ".svg, .png, .pdf"), (["plot", "OTHER", "--output", "x.svg"], "no result"),
    (["plot", "FILE", "START", "--output", "x.svg"], "serve and startup"),
    (["compare", "FILE", "START"], "no figure in common"), (["plot", "--output", "x.svg"], "name one or more files")])
def test_bench_says_what_it_cannot_do(tmp_path: Path, tokens: list[str], words: str):
    one = report([Run(Target("a <b>", "u", "m"), [Sample(first=0.1, end=0.2, gaps=[0.01])], 1.0, 0.1)], Load(()), "w")
    files = {"FILE": one, "OTHER": {"x": 1}, "START": {"benchmark": "startup", "model": "m", "ready": {"median": 1.0}}}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    code, said = offline("bench", *(str(tmp_path / token) if token in files else token for token in tokens))
    assert code == 1 and words in said


def test_a_plot_of_nothing_and_of_one(tmp_path: Path):
    for samples in ([], [Sample(first=0.1, end=0.2, gaps=[0.01, 0.02])]):
        found = report([Run(Target("a <b>", "u", "m"), samples, 1.0, 0.1)], Load(()), "x & y")
        draw([found], tmp_path / "p.svg")
        ElementTree.parse(tmp_path / "p.svg")


def test_plots_of_engines_and_starts(tmp_path: Path):
    spread = {"median": 2.0, "low": 1.0, "high": 4.0}
    engines = {"benchmark": "latency", "model": "m", "engines": [{"name": "a", "tokens_per_second": spread}]}
    start = {"benchmark": "startup", "model": "m", "ready": spread, "label": "x"}
    for found in (engines, start):
        draw([found, found], tmp_path / "p.svg")
        assert (tmp_path / "p.svg").stat().st_size > 1000
