"""`stretto chat` and `stretto ps`: a running server from the terminal. Loads no torch."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any

import httpx
from cyclopts import Group, Parameter
from rich.console import Console
from rich.live import Live
from rich.table import Table

from stretto.cli.failures import CommandFailed
from stretto.cli.prompting import converse
from stretto.cli.screen import error_screen, screen


@dataclass(frozen=True)
class RemoteOptions:
    """Which server."""

    url: Annotated[str, Parameter(alias="--base-url")] = "http://127.0.0.1:8000"
    """Its address."""
    _: KW_ONLY
    api_key: str | None = None
    """Its key. Default: the variable STRETTO_API_KEY, then OPENAI_API_KEY."""


Options = Annotated[RemoteOptions, Parameter(name="*", group=Group("Server", sort_key=0))]
SERVER = RemoteOptions()


def server_address(url: str) -> str:
    """The address without a trailing slash or /v1, which users of OpenAI's clients are used to give."""
    if "://" not in url:
        url = f"http://{url}"
    return url.rstrip("/").removesuffix("/v1")


def key_of(given: str | None) -> str | None:
    """The key that was given, or that of a variable."""
    return given or os.environ.get("STRETTO_API_KEY", "").split(",")[0] or os.environ.get("OPENAI_API_KEY") or None


def find_model(base: str, api_key: str | None) -> str:
    """The first model that the server lists. Raises CommandFailed."""
    models = _get(_client(base, api_key), "/v1/models").json()["data"]
    if not models:
        raise CommandFailed(f"{base} serves no model; name one with --model")
    return models[0]["id"]


def _client(base: str, api_key: str | None) -> httpx.Client:
    key = key_of(api_key)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=base, headers=headers, timeout=httpx.Timeout(10.0, read=600.0), trust_env=False)


def check_answers(base: str, flag: str) -> None:
    """Raises CommandFailed where nobody listens; whatever else a server says is its word. `flag` names it."""
    with _client(base, None) as http:
        _ask(http, "/livez", flag)


def _ask(http: httpx.Client, path: str, flag: str = "--url") -> httpx.Response:
    try:
        return http.get(path)
    except httpx.HTTPError as e:
        raise CommandFailed(f"no server answers at {http.base_url}: {e}; start one with `stretto serve`, or give"
                            f" {flag}") from e


def _get(http: httpx.Client, path: str) -> httpx.Response:
    return _told(http, _ask(http, path))


def _told(http: httpx.Client, answer: httpx.Response) -> httpx.Response:
    """Raises CommandFailed with the server's own words where it refuses."""
    if answer.status_code != 200:
        raise CommandFailed(f"{http.base_url} answers {answer.url.path} with {answer.status_code}: {_message(answer)}")
    return answer


def _message(answer: httpx.Response) -> str:
    try:
        return answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


# ------------------------------------------------------------------------------------------------------------- chat
@dataclass
class _Conversation:
    http: httpx.Client
    model: str
    settings: dict[str, Any]
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> Iterator[str]:
        """Pieces of the answer. What was said so far stays in the history when the iterator is closed."""
        messages = [*self.messages, {"role": "user", "content": text}]
        body = {"model": self.model, "messages": messages, "stream": True, **self.settings}
        said: list[str] = []
        try:
            with self.http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise CommandFailed(_message(answer))
                for line in answer.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    payload = json.loads(line[6:])
                    if "error" in payload:
                        raise CommandFailed(payload["error"]["message"])
                    piece = payload["choices"][0]["delta"].get("content") if payload["choices"] else None
                    if piece:
                        said.append(piece)
                        yield piece
        except httpx.HTTPError as e:
            raise CommandFailed(f"the connection broke: {e}") from e
        finally:
            if said:
                self.messages = [*messages, {"role": "assistant", "content": "".join(said)}]


def chat(prompt: str | None = None, *, server: Options = SERVER, model: str | None = None, system: str | None = None,
         temperature: float | None = None, max_tokens: int | None = None) -> int:
    """Chat with a running server in the terminal, or ask it one question.

    Parameters
    ----------
    prompt
        Answer this and exit. Without it, a conversation; or one answer to standard input, where that is no terminal.
    model
        Name of the model. Default: the first that the server lists.
    system
        System message.
    temperature
        Default: the server's.
    max_tokens
        Longest answer. Default: the server's.
    """
    base = server_address(server.url)
    named = {"temperature": temperature, "max_completion_tokens": max_tokens}
    settings = {name: value for name, value in named.items() if value is not None}
    with _client(base, server.api_key) as http:
        talk = _Conversation(http, model or find_model(base, server.api_key), settings, system)
        text = prompt if prompt is not None or sys.stdin.isatty() else sys.stdin.read()
        if text is not None:
            _print_answer(talk, text)
            return 0
        notes = error_screen()
        return converse(talk.model, lambda line: _answer(talk, line, notes), talk.clear, notes)


def _answer(talk: _Conversation, text: str, notes: Console) -> None:
    """A server's refusal ends this answer, not the conversation."""
    try:
        _print_answer(talk, text)
    except CommandFailed as e:
        notes.print(f"error: {e}", style="red")


def _print_answer(talk: _Conversation, text: str) -> None:
    pieces = talk.ask(text)
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(pieces):  # type: ignore[type-var]
        for piece in pieces:
            print(piece, end="", flush=True)
    print()


# --------------------------------------------------------------------------------------------------------------- ps
def ps(server: Options = SERVER, *, watch: Annotated[bool, Parameter(negative=())] = False,
       as_json: Annotated[bool, Parameter(name="--json", negative=())] = False) -> int:
    """Show what a running server does: requests, KV cache, sessions, speed.

    Parameters
    ----------
    watch
        Go on until Ctrl-C, with what happens in each second.
    as_json
        Print JSON instead of a table.
    """
    base = server_address(server.url)
    with _client(base, server.api_key) as http:
        found = _status(http)
        if as_json:
            print(json.dumps(found, indent=2))
            return 0
        console = screen()
        if not watch:
            console.print(_table(found, None))
            return 0
        with contextlib.suppress(KeyboardInterrupt), Live(_table(found, None), console=console) as live:
            while True:
                time.sleep(1.0)
                before, found = found, _status(http)
                live.update(_table(found, before))
    return 0


def _status(http: httpx.Client) -> dict[str, Any]:
    """Of /v1/loads, /server_info and /metrics."""
    answer = _ask(http, "/v1/loads")
    if answer.status_code == 404:
        raise CommandFailed(f"{http.base_url} is no server of Stretto: a gateway's replicas can be asked one by one, at"
                            " the addresses that it was started with, or 127.0.0.1 and the ports after its own")
    load = _told(http, answer).json()["loads"][0]
    info = _get(http, "/server_info").json()
    counters: dict[str, float] = {}
    for line in _get(http, "/metrics").text.splitlines():
        if line.startswith("stretto_") and "_total{" in line and "le=" not in line:
            name, _, value = line.partition("{")
            counters[name] = counters.get(name, 0.0) + float(value.rpartition(" ")[2])
        elif line.startswith("stretto_sessions{"):
            load["sessions"] = int(float(line.rpartition(" ")[2]))
    return {"url": str(http.base_url), "models": info["served_model_names"], "load": load, "counters": counters,
            "speculation_tokens": info["speculation_tokens"], "time": time.time()}


def _table(found: dict[str, Any], before: dict[str, Any] | None) -> Table:
    load, counters = found["load"], found["counters"]
    table = Table(title=f"{', '.join(found['models'])} at {found['url']}", title_justify="left", show_header=False)

    def delta(name: str) -> float:
        old = before["counters"].get(name, 0.0) if before is not None else 0.0
        return counters.get(name, 0.0) - old

    table.add_row("requests", f"{load['num_running_reqs']} running of {load['max_running_requests']},"
                              f" {load['num_waiting_reqs']} waiting")
    table.add_row("KV cache", f"{100 * load['token_usage']:.1f} % of {load['max_total_num_tokens']} tokens")
    table.add_row("sessions", str(load.get("sessions", 0)))
    if before is not None:
        seconds = found["time"] - before["time"]
        table.add_row("generated", f"{delta('stretto_generated_tokens_total') / seconds:.1f} tokens a second")
        table.add_row("prompts", f"{delta('stretto_prompt_tokens_total') / seconds:.1f} tokens a second")
    else:
        table.add_row("generated", f"{delta('stretto_generated_tokens_total'):.0f} tokens since the start")
        table.add_row("prompts", f"{delta('stretto_prompt_tokens_total'):.0f} tokens since the start")
    table.add_row("prompt tokens cached", _share(delta("stretto_cached_tokens_total"),
                                                 delta("stretto_prompt_tokens_total")))
    if found["speculation_tokens"]:
        table.add_row("drafts accepted", _share(delta("stretto_accepted_total"), delta("stretto_drafted_total")))
    table.add_row("retractions", f"{delta('stretto_retractions_total'):.0f}")
    return table


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
