"""The page at `/`, in a real Chromium: chat, coloured tokens, charts, the configuration, keys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.browser import CHROMEDRIVER, CHROMIUM, Browser, browser
from tests.serve.conftest import Api
from tests.serve.test_server import Program, program

needs_chromium = pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), 
                                    reason="chromium and chromedriver are not installed")
INFO = {"features": [{"feature": "mixed chunk", "asked": "on", "now": "on"}], "limits": {"chunk": 512}}


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[Program]:
    with program({"block": 4, "step_seconds": 0.02, "server_info": INFO}) as made:
        made.until("/readyz", 200)
        yield made


def ask(window: Browser, text: str) -> None:
    window.run("document.querySelector('#text').value = arguments[0]", text)  # the driver types no emoji
    window.type("#text", "\ue007")  # Enter
    window.until("return document.querySelector('#stop').disabled && document.querySelector('#text').value === ''")


def answer(window: Browser) -> str:
    return window.run("return [...document.querySelectorAll('.message.assistant .body')].at(-1).textContent")


def keep(window: Browser, name: str) -> None:
    """Keeps a picture where the variable names a folder."""
    if folder := os.environ.get("STRETTO_TEST_SCREENSHOTS"):
        Path(folder, f"{name}.png").write_bytes(window.screenshot())


async def test_files_and_their_headers(api: Api):
    index = await api.http.get("/")
    assert index.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in index.headers["content-security-policy"]
    for name in ("main.js", "style.css"):
        assert f"page/{name}" in index.text and (await api.http.get(f"/page/{name}")).status_code == 200
    assert (await api.http.get("/page/nothing.js")).status_code == 404
    assert (await api.http.get("/page/..%2f..%2fapp.py")).status_code == 404


@needs_chromium
@pytest.mark.slow
def test_chat_streams_and_colours_tokens(window: Browser, server: Program):
    window.open(f"http://127.0.0.1:{server.port}/")
    window.until("return document.querySelector('#state').className.includes('up')")
    for text in ("plain words, quickly", "삼겹살 🙂 with <b>&amp; marks"):
        ask(window, f"say:{text}")
        assert answer(window) == text
    accepted, own, joined = window.run(
        "const first = document.querySelector('.message.assistant');"
        "return ['accepted', 'own', 'joined'].map(kind => first.querySelectorAll('.' + kind).length)")
    assert accepted + own + joined == len("plain words, quickly")  # joined: of chunks that hold several steps
    assert accepted + joined >= 2 * own and accepted  # of each step's four tokens, three are drafts
    about = window.text(".message.assistant .about")
    assert "drafts accepted" in about and "stop" in about and "first after" in about
    keep(window, "chat")
    assert window.complaints() == []


@needs_chromium
@pytest.mark.slow
def test_the_conversation_goes_on_and_can_be_stopped_and_cleared(window: Browser, server: Program):
    window.open(f"http://127.0.0.1:{server.port}/")
    window.until("return document.querySelector('#state').className.includes('up')")
    ask(window, "say:one")
    ask(window, "say:two")
    first, second = window.run("return [...document.querySelectorAll('.assistant .about')].map(x => x.innerText)")
    assert int(second.split()[0]) > int(first.split()[0])  # the second prompt holds the first turn
    window.click("#clear")
    assert window.text("#messages") == ""
    window.type("#text", "words without an end\ue007")
    window.until("return [...document.querySelectorAll('.message.assistant .body')].at(-1).textContent.length > 20")
    window.click("#stop")
    window.until("return document.querySelector('#stop').disabled")
    assert window.run("return [...document.querySelectorAll('.about')].at(-1).innerText") == "stopped"
    ask(window, "crash:x")
    assert "failed" in window.run("return document.querySelector('.message.failed .about').innerText")


@needs_chromium
@pytest.mark.slow
def test_charts_move_and_the_configuration_is_shown(window: Browser, server: Program):
    window.open(f"http://127.0.0.1:{server.port}/")
    window.click("[data-view=live]")
    window.run("document.querySelector('#limit').value = 300; document.querySelector('#text').value = 'words';"
               "document.querySelector('#ask').requestSubmit()")
    label = "[data-title='Tokens a second'] .now"
    window.until(f"return parseFloat(document.querySelector(`{label}`).innerText.replace(/[^0-9.]/g, '')) > 0")
    window.until("return document.querySelector(`[data-title='Drafts'] .now`).innerText.includes('100 %')")
    drawn = window.run("const c = document.querySelector(`[data-title='Tokens a second'] canvas`);"
                       "return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(x => x)")
    assert drawn
    keep(window, "live")
    window.click("[data-view=config]")
    window.until("return document.querySelector('#settings').innerText.includes('mixed chunk')")
    assert "max_model_len" in window.text("#settings")
    keep(window, "config")


@needs_chromium
@pytest.mark.slow
def test_a_key_is_asked_for_and_used(window: Browser):
    with program(api_keys=["secret"]) as locked:
        locked.until("/readyz", 200)
        window.open(f"http://127.0.0.1:{locked.port}/")
        window.until("return !document.querySelector('#key').hidden")
        window.type("#key", "secret\ue007")
        window.until("return document.querySelector('#state').className.includes('up')")
        ask(window, "say:open")
        assert answer(window) == "open"
