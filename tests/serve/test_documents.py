"""The curl examples of the documents, as they stand, and the metrics that they name."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from stretto.serve.page import FOLDER
from tests.serve.conftest import Api, make_api
from tests.serve.fakes import CoreOptions

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = [(name, block) for name in ("api.md", "operations.md")
            for block in re.findall(r"```sh\n(curl .*?)```", (DOCS / name).read_text(), re.DOTALL)]


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


async def test_every_route_is_documented():
    text = (DOCS / "api.md").read_text() + (DOCS / "operations.md").read_text()
    async with make_api(CoreOptions()) as api:
        paths = (await api.http.get("/openapi.json")).json()["paths"]
    others = ("/get_", "/v1/sessions", "/open_session", "/close_session")  # older names; a document of their own
    missing = [path for path in paths if path.split("{")[0].rstrip("/") not in text and not path.startswith(others)]
    assert missing == []


def test_the_page_loads_nothing_from_elsewhere():
    for file in FOLDER.iterdir():
        assert not re.search(r"https?://", file.read_text()), file.name
