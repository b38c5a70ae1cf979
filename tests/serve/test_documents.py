"""The curl and Python examples of the documents, as they stand, and the metrics that they name."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path

import pytest

from stretto.serve.page import FOLDER
from tests.serve.conftest import Api, make_api, make_served
from tests.serve.fakes import CoreOptions

DOCS = Path(__file__).resolve().parents[2] / "docs"
SERVER = "http://127.0.0.1:8000"  # of every example
EXAMPLES = [(name, block) for name in ("api.md", "operations.md", "quickstart.md")
            for block in re.findall(r"```sh\n(curl .*?)```", (DOCS / name).read_text(), re.DOTALL)]


@pytest.mark.parametrize("document", sorted(path.name for path in DOCS.glob("*.md") if "$URL" in path.read_text()))
def test_examples_say_where_the_server_is(document: str):
    assert f"\nURL={SERVER}\n" in (DOCS / document).read_text().partition("$URL")[0]


@pytest.mark.parametrize("document, command", EXAMPLES, ids=lambda value: value.split("$URL")[-1][:40])
async def test_examples_work(api: Api, document: str, command: str):
    words = shlex.split(command)
    body = words[words.index("-d") + 1] if "-d" in words else None
    path = next(word for word in words if word.startswith("$URL")).removeprefix("$URL")
    answer = await api.http.post(path, content=body)
    assert answer.status_code == 200, answer.text
    assert "x-stretto-ignored" not in answer.headers
    if body is not None and json.loads(body).get("stream"):
        assert answer.text.rstrip().endswith("[DONE]")


PROGRAMS = [(path.name, block) for path in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
            for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
            if SERVER in block and re.search(r"^from (openai|anthropic) ", block)]  # tests/clients runs the others


@pytest.mark.parametrize("document, program", PROGRAMS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(PROGRAMS)])
async def test_client_programs_work(document: str, program: str, capsys: pytest.CaptureFixture):
    options = CoreOptions(model_name="SmolLM2-135M-Instruct", block=3, max_model_len=4000)
    async with make_served(options) as api:
        await asyncio.to_thread(exec, compile(program.replace(SERVER, api.url), document, "exec"), {})
    assert capsys.readouterr().out.strip(), "it printed nothing"


async def test_every_route_is_documented():
    text = "".join((DOCS / f"{name}.md").read_text() for name in ("api", "operations", "adapters"))
    async with make_api(CoreOptions()) as api:
        paths = (await api.http.get("/openapi.json")).json()["paths"]
    others = ("/get_", "/v1/sessions", "/open_session", "/close_session")  # older names; a document of their own
    missing = [path for path in paths if path.split("{")[0].rstrip("/") not in text and not path.startswith(others)]
    assert missing == []


def test_the_page_loads_nothing_from_elsewhere():
    for file in FOLDER.iterdir():
        assert not re.search(r"https?://", file.read_text()), file.name
