"""`stretto run-batch`: OpenAI's batch files against a scripted server, a server that fails, and a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from rich.console import Console

from stretto.asking import Unreachable, ask
from stretto.batch import BatchError, check_items, read_items, run_batch, take_up
from stretto.cli import run_batch as run_batch_command
from stretto.cli.main import run_app
from stretto.engine.inprocess import InProcessEngine
from tests.serve.fakes import ByteTokenizer, CoreOptions
from tests.serve.test_server import Program, program

MODEL = Path(__file__).resolve().parents[2] / "../shared/data/models/stories260k"


def line(custom_id: str, prompt: str, **fields: object) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": {
        "messages": [{"role": "user", "content": prompt}], "max_tokens": 20, **fields}})


def command(*tokens: object, **variables: str) -> tuple[int, str]:
    notes = Console(record=True, width=300, file=open("/dev/null", "w"))  # noqa: SIM115
    return run_app(["run-batch", *map(str, tokens)], variables, notes), notes.export_text()


def answers(path: Path) -> dict[str, dict]:
    return {record["custom_id"]: record for record in map(json.loads, path.read_text().splitlines())}


@pytest.fixture(scope="module")
def server() -> Iterator[Program]:
    with program() as made:
        made.until("/readyz", 200)
        yield made


def test_a_batch_is_answered_and_taken_up_again(server: Program, tmp_path: Path, capfd: pytest.CaptureFixture):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    url = f"http://127.0.0.1:{server.port}/v1"
    given.write_text("\n".join([line("a", "say:one"), line("b", "say:two", temperature=-1), line("c", "say:three")]))
    # what the answers held already: one answer, a server's failure, and a line that was cut off
    kept = {"id": "x", "custom_id": "a", "response": {"status_code": 200, "body": "earlier"}, "error": None}
    failed = {"id": "y", "custom_id": "c", "response": {"status_code": 503, "body": ""}, "error": None}
    out.write_text(json.dumps(kept) + "\n" + json.dumps(failed) + "\n" + '{"id": "z", "custom')
    code = command("-i", given, "-o", out, "--base-url", url, STRETTO_MAX_MODEL_LEN="not for clients")[0]
    said, found = capfd.readouterr().err, answers(out)
    assert code == 1 and "1 answered" in said and "1 failed, 1 were there" in said and "temperature" in said
    assert found["a"] == kept and set(found) == {"a", "b", "c"}
    assert found["c"]["response"]["body"]["choices"][0]["message"]["content"] == "three"
    assert found["c"]["response"]["request_id"] and found["c"]["error"] is None
    assert found["b"]["response"]["status_code"] == 400
    before = out.read_text()
    assert command("-i", given, "-o", out, "--base-url", url)[0] == 0 and out.read_text() == before


@pytest.mark.parametrize("text, words", [
    ("", "has no requests"), ("[1]", "line 1 is no object"), ("{", "line 1 is not JSON"),
    (line("a", "x") + "\n" + line("a", "y"), "'a' twice"), (line("", "x"), 'no "custom_id"'),
    (line("a", "x", stream=True), '"stream" cannot be true'),
    (line("a", "x").replace("POST", "GET"), 'must be "POST"'), (line("a", "x").replace("chat/", ""), "fine"),
    (line("a", "x").replace("/v1/chat/completions", "/v1/files"), "must be one of"),
    (json.dumps({"custom_id": "a", "url": "/v1/completions"}), 'no "body"')])
def test_files_are_checked_before_anything_is_asked(tmp_path: Path, text: str, words: str):
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    if words == "fine":
        assert check_items(path) == 1
        return
    with pytest.raises(BatchError, match=words):
        check_items(path)
    with pytest.raises(BatchError, match="cannot be read"):
        list(read_items(tmp_path))


def test_an_output_file_of_something_else_is_left_alone(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n")
    with pytest.raises(BatchError, match="another output file"):
        take_up(path)
    assert path.read_text() == "dear diary\n" and list(tmp_path.iterdir()) == [path]


def test_a_server_that_is_not_there_is_told_at_once(tmp_path: Path):
    (tmp_path / "in").write_text(line("a", "x"))
    code, said = command("-i", tmp_path / "in", "-o", tmp_path / "out", "--base-url", "http://127.0.0.1:1/v1")
    assert code == 1 and "no server answers at http://127.0.0.1:1" in said and "another --base-url" in said


def test_a_server_and_an_engine_exclude_each_other(tmp_path: Path):
    (tmp_path / "in").write_text(line("a", "x"))
    code, said = command("m", "-i", tmp_path / "in", "-o", tmp_path / "out", "--base-url", "http://127.0.0.1:1")
    assert code == 1 and "settings of an engine" in said


def flaky(failures: list[int | Exception], asked: list[str]) -> httpx.AsyncClient:
    """Fails as listed, then answers."""
    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if failures:
            failure = failures.pop(0)
            if isinstance(failure, Exception):
                raise failure
            return httpx.Response(failure, headers={"retry-after": "0.01"}, json={"error": {"message": "busy"}})
        return httpx.Response(200, json={"usage": {"prompt_tokens": 2, "completion_tokens": 3}})

    return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://x")


async def test_a_busy_server_is_asked_again(tmp_path: Path):
    (tmp_path / "in").write_text("\n".join(line(str(i), "x") for i in range(3)))
    asked: list[str] = []
    with (tmp_path / "out").open("w") as output:
        async with flaky([429, httpx.ConnectError("no"), 503], asked) as http:
            tally = await run_batch(http, read_items(tmp_path / "in"), output, 2, lambda tally: None)
    assert (tally.answered, tally.failed, tally.prompt_tokens, tally.completion_tokens) == (3, 0, 6, 9)
    assert len(asked) == 6


async def test_patience_ends():
    async with flaky([503] * 99, []) as http:
        assert (await ask(http, "/x", {}, patience=0.05)).status == 503
    async with flaky([httpx.ConnectError("no")] * 99, []) as http:
        with pytest.raises(Unreachable, match="no"):
            await ask(http, "/x", {}, patience=0.05)
    asked: list[str] = []
    async with flaky([400, 503], asked) as http:
        assert (await ask(http, "/x", {})).status == 400 and len(asked) == 1


def test_an_engine_that_dies_ends_the_batch_which_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def start(core: object) -> InProcessEngine:
        return await InProcessEngine.start(CoreOptions())

    monkeypatch.setattr(run_batch_command, "locate", lambda config: SimpleNamespace(tokenizer_path=None))
    monkeypatch.setattr(run_batch_command, "load_tokenizer", lambda path: ByteTokenizer())
    monkeypatch.setattr(run_batch_command.EngineClient, "start", start)
    given, out = tmp_path / "in", tmp_path / "out"
    given.write_text("\n".join([line("a", "say:one"), line("b", "fault:x"), line("c", "say:three")]))
    code, said = command("m", "-i", given, "-o", out, "--max-concurrency", 1)
    assert code == 1 and "step failed" in said and "run the same command again" in said
    assert answers(out)["a"]["response"]["status_code"] == 200
    given.write_text("\n".join([line("a", "say:one"), line("b", "say:two"), line("c", "say:three")]))
    assert command("m", "-i", given, "-o", out)[0] == 0
    assert {name: one["response"]["status_code"] for name, one in answers(out).items()} == dict.fromkeys("abc", 200)


@pytest.mark.skipif(not MODEL.is_dir(), reason="stories260k is not beside the repository")
def test_an_engine_of_its_own(tmp_path: Path):
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "model": "tale"}
    (tmp_path / "in").write_text("\n".join(
        json.dumps({"custom_id": str(i), "url": "/v1/completions", "body": body}) for i in range(5)))
    code, _ = command(MODEL, "-i", tmp_path / "in", "-o", tmp_path / "out", "--served-model-name", "tale",
                      "--device", "cpu")
    found = answers(tmp_path / "out")
    texts = {one["response"]["body"]["choices"][0]["text"] for one in found.values()}
    assert code == 0 and len(found) == 5 and len(texts) == 1 and texts.pop().strip()
