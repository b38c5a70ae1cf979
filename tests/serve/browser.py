"""A browser for tests: Chromium behind chromedriver, spoken to in WebDriver's own JSON."""

from __future__ import annotations

import base64
import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx

CHROMEDRIVER, CHROMIUM = shutil.which("chromedriver"), shutil.which("chromium")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id in WebDriver's answers


class Browser:
    def __init__(self, http: httpx.Client):
        self._http = http
        options = {"binary": CHROMIUM, "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-proxy-server",
                                                "--disable-dev-shm-usage", "--window-size=1200,900"]}
        capabilities = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options,
                                        "goog:loggingPrefs": {"browser": "ALL"}}}
        self._session = ""
        self._session = self._post("/session", capabilities=capabilities)["sessionId"]

    def _post(self, path: str, **body: Any) -> Any:
        answer = self._http.post(f"/session/{self._session}{path}" if self._session else path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def open(self, url: str) -> None:
        self._post("/url", url=url)

    def resize(self, width: int, height: int) -> None:
        """The size of the page; windows of their own are wider."""
        self._post("/goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride",
                   params={"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a piece of JavaScript returns."""
        return self._post("/execute/sync", script=script, args=list(arguments))

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def element(self, selector: str) -> str:
        return self._post("/element", using="css selector", value=selector)[_ELEMENT]

    def click(self, selector: str) -> None:
        self._post(f"/element/{self.element(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        self._post(f"/element/{self.element(selector)}/value", text=text)

    def until(self, script: str, seconds: float = 15.0) -> Any:
        """Waits until the script returns something."""
        deadline = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, f"never true: {script}\n{self.complaints()}\n{self.text('body')}"
            time.sleep(0.1)
        return found

    def complaints(self) -> list[str]:
        """Warnings and errors of the console, since the last call."""
        entries = self._post("/se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self) -> bytes:
        answer = self._http.get(f"/session/{self._session}/screenshot")
        return base64.b64decode(answer.json()["value"])

    def close(self) -> None:
        self._http.delete(f"/session/{self._session}")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    assert CHROMEDRIVER is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen([CHROMEDRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            deadline = time.monotonic() + 20
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if http.get("/status").json()["value"]["ready"]:
                        break
                assert time.monotonic() < deadline, "chromedriver does not answer"
                time.sleep(0.1)
            with contextlib.closing(Browser(http)) as made:
                yield made
    finally:
        driver.terminate()
        driver.wait(10)
