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
INFO = {"features": [{"feature": "mixed chunk", "asked": "on", "now": "on", "why": "", "changed": False},
                     {"feature": "max_model_len", "asked": "auto", "now": "512", "why": "fits", "changed": True}],
        "limits": {"chunk": 512}}


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[Program]:
    with program({"block": 4, "miss_every": 3, "step_seconds": 0.02, "server_info": INFO}) as made:
        made.until("/readyz", 200)
        yield made
# How many pixels of each chart have the colour of a series: a grid and its numbers alone have none.
SHOWN = """Object.fromEntries([...document.querySelectorAll('figure')].map(f => {
  const style = getComputedStyle(document.documentElement);
  const series = [0, 1, 2, 3].map(i => parseInt(style.getPropertyValue(`--c${i}`).trim().slice(1), 16))
    .map(c => [c >> 16, (c >> 8) & 255, c & 255]);
  const c = f.querySelector('canvas'), data = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
  let found = 0;
  for (let i = 0; i < data.length; i += 4)
    found += data[i + 3] > 150 && series.some(s => s.every((v, k) => Math.abs(v - data[i + k]) < 4));
  return [f.dataset.title, found]; }))"""


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
    accepted, own, corrected, joined = window.run(
        "const first = document.querySelector('.message.assistant');"
        "return ['accepted', 'own', 'corrected', 'joined'].map(kind => first.querySelectorAll('.' + kind).length)")
    assert accepted + own + corrected + joined == len("plain words, quickly")  # joined: chunks of several steps
    assert accepted and accepted + joined >= 2 * own  # of a step's four tokens three are drafts, of every third one is
    assert corrected or joined  # what stands in the place of a rejected draft
    colours = window.run("return ['own', 'accepted', 'corrected', 'joined'].map(kind => getComputedStyle("
                         "document.querySelector(`.legend .${kind}`)).backgroundColor)")
    assert len(set(colours)) == 4
    about = window.text(".message.assistant .about")
    assert "drafts accepted" in about and "rejected" in about and "stop" in about and "first after" in about
    assert "a second" in about
    keep(window, "chat")
    assert window.complaints() == []


CODE = "First:\n```python\nif x:\n    y = 1  # ```\n```\nthen `z`."


@needs_chromium
@pytest.mark.slow
def test_code_is_set_as_code(window: Browser, server: Program):
    window.open(f"http://127.0.0.1:{server.port}/")
    window.until("return document.querySelector('#state').className.includes('up')")
    for text, code, after in ((CODE, "if x:\n    y = 1  # ```\n", "fence"), ("```\na\n```", "a\n", "fence"),
                              ("no ``` fence", None, None), ("```js\nnever closed", "never closed", None)):
        ask(window, f"say:{text}")
        assert answer(window) == text, "nothing is lost, so that it can be copied"
        shown = window.run("const code = [...document.querySelectorAll('.assistant')].at(-1).querySelector('pre');"
                           "return code && [code.textContent, code.nextSibling && code.nextSibling.className,"
                           "getComputedStyle(code).fontFamily]")
        assert shown == (code and [code, after, "ui-monospace, monospace"])
    keep(window, "code")


REASONED = """
const modules = Promise.all([import('/page/tokens.js'), import('/page/answer.js')]);
return modules.then(([{ TokenPainter }, { AnswerText }]) => {
  const bytes = (text) => [...new TextEncoder().encode(text)];
  const chunk = (delta, ...tokens) => ({ choices: [{ delta, logprobs: { content: tokens.map(
    (token) => ({ token, bytes: bytes(token), logprob: 0 })) } }], usage: null });
  const body = document.createElement('div'), all = document.createElement('div');
  all.append(body);
  const painter = new TokenPainter(), text = new AnswerText(body);
  for (const one of [chunk({}, '<think>'), chunk({ reasoning_content: 'hm ' }, 'hm '),
                     chunk({ reasoning_content: 'so' }, 'so', '</think>'), chunk({ content: 'Yes.' }, 'Yes', '.')]) {
    const { thought, said } = painter.paint(one);
    thought.forEach((piece) => text.think(piece));
    said.forEach((piece) => text.say(piece));
  }
  const details = all.querySelector('details');
  return [details.textContent, details.open, body.textContent, body.querySelectorAll('span').length];
});"""


@needs_chromium
@pytest.mark.slow
def test_reasoning_is_shown_apart_and_keeps_its_tokens(window: Browser, server: Program):
    window.open(f"http://127.0.0.1:{server.port}/")
    assert window.run(REASONED) == ["reasoninghm so", False, "Yes.", 2]


@needs_chromium
@pytest.mark.slow
def test_narrow_windows_scroll_nothing_sideways(window: Browser, server: Program):
    window.open(f"http://127.0.0.1:{server.port}/")
    window.until("return document.querySelector('#state').className.includes('up')")
    window.resize(390, 800)
    try:
        ask(window, f"say:{'x' * 300} ```")
        for view in ("chat", "live", "config"):
            window.click(f"[data-view={view}]")
            wide, room, cards = window.run("return [document.documentElement.scrollWidth, innerWidth, Math.max(0, "
                                           "...[...document.querySelectorAll('.card')].map(x => x.offsetWidth))]")
            assert wide <= room and cards <= room, view
            keep(window, f"narrow-{view}")
    finally:
        window.resize(1200, 900)


@needs_chromium
@pytest.mark.slow
def test_the_reference_shows_every_route_and_loads_nothing_from_elsewhere(window: Browser):
    with program(api_keys=["secret"]) as locked:
        locked.until("/readyz", 200)
        window.open(f"http://127.0.0.1:{locked.port}/docs")
        window.until("return !document.querySelector('#key').hidden")
        window.complaints()  # of the call without a key
        window.type("#key", "secret\ue007")
        window.until("return document.querySelectorAll('details').length > 30")
        spec = locked.http.get("/openapi.json", headers={"x-api-key": "secret"}).json()
        assert window.run("return document.querySelectorAll('details').length") == sum(map(len, spec["paths"].values()))
        assert window.run("for (const one of document.querySelectorAll('details')) one.open = true; return 1")
        window.until("return [...document.querySelectorAll('details')].every((one) => one.dataset.shown)")
        text = window.run("return document.querySelector('#routes').textContent")
        shown = [name for name in spec["components"]["schemas"] if name in text]
        assert "most drafts per step" in text and "list of Message" in text and len(shown) > 40
        window.type("#search", "rerank top_n")
        left = window.run("return [...document.querySelectorAll('details')].filter((x) => !x.hidden).length")
        assert left == 2  # with /v1 and without
        keep(window, "docs")
        loaded = window.run("return performance.getEntriesByType('resource').map((x) => new URL(x.name).host)")
        assert set(loaded) == {f"127.0.0.1:{locked.port}"} and window.complaints() == []


@needs_chromium
@pytest.mark.slow
def test_a_server_that_is_gone_is_told(window: Browser):
    with program() as gone:
        gone.until("/readyz", 200)
        window.open(f"http://127.0.0.1:{gone.port}/")
        window.until("return document.querySelector('#state').className.includes('up')")
    window.until("return document.querySelector('#state').innerText.includes('does not answer')")
    ask(window, "hello")
    assert window.text(".message.failed .about") == "the server does not answer"
    window.complaints()  # of connections that were refused


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
    window.until("return document.querySelector(`[data-title='Drafts'] .now`).innerText.includes(' %')")
    window.until(f"return Object.keys({SHOWN}).every(title => {SHOWN}[title] >= 12)", 30)
    shown = window.run(f"return {SHOWN}")
    assert set(shown) == {"Tokens a second", "Tokens a step, by kind", "Requests", "KV cache in use", "Drafts",
                          "Time to first token", "Between tokens", "Accepted by place in the draft"}
    verify = window.text("[data-title='Tokens a step, by kind'] .now")
    assert all(kind in verify for kind in ("prefill", "decode", "verify")) and "verify 0" not in verify
    server.http.post("/v1/sessions", json={"session_id": "a-session"})
    window.until("return document.querySelector('#sessions').innerText.includes('a-session')")
    assert "in the cache" in window.text("#sessions") and "idle" in window.text("#sessions")
    keep(window, "live")
    window.click("[data-view=config]")
    window.until("return document.querySelector('#settings').innerText.includes('mixed chunk')")
    assert "max_model_len" in window.text("#settings")
    assert "auto" in window.text("tr.changed") and "fits" in window.text("tr.changed")
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


@needs_chromium
@pytest.mark.slow
def test_an_engine_that_died_is_told(window: Browser):
    with program({"start_seconds": 1.5}) as mortal:
        mortal.until("/readyz", 200)
        window.open(f"http://127.0.0.1:{mortal.port}/")
        window.until("return document.querySelector('#state').className.includes('up')")
        mortal.engine().kill()
        window.until("return document.querySelector('#state').innerText.includes('being started again')")
        assert "down" in window.run("return document.querySelector('#state').className")
        window.until("return document.querySelector('#state').className.includes('up')", 30)
        ask(window, "say:again")
        assert answer(window) == "again", window.text("body")
