"""`stretto bench serve` and `sweep`: load on one server, or on several in turns. Loads no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
from cyclopts import Group, Parameter
from rich.console import Console
from rich.table import Table

from stretto.bench.load import (
    Conversation,
    Load,
    Run,
    Sample,
    Target,
    conversations_of,
    marked,
    run_load,
    synthetic_conversations,
)
from stretto.bench.load_report import LIMITS, report, table
from stretto.bench.plots import PlotError, draw
from stretto.cli.failures import CommandFailed
from stretto.cli.findings import at_least, tell
from stretto.cli.options import Json
from stretto.cli.remote import find_model, key_of, server_address
from stretto.cli.screen import error_screen


@dataclass(frozen=True)
class LoadOptions:
    """What is sent, and how. Names are vLLM's where it has the option."""

    url: Annotated[tuple[str, ...], Parameter(alias="--base-url")] = ("http://127.0.0.1:8000",)
    """A server with OpenAI's API; may be given several times, also as NAME=URL. They are measured one after another."""
    model: str | None = None
    """Name of the model. Default: the first that the server lists."""
    api_key: str | None = None
    """Key of the servers. Default: the variable STRETTO_API_KEY, then OPENAI_API_KEY."""
    api: Literal["chat", "completions"] = "chat"
    """Which API."""
    request_rate: float | None = None
    """Open loop: requests that arrive in a second; inf: all at once. Default: a closed loop."""
    burstiness: float = 1.0
    """Open loop: 1 is a Poisson process; below it requests come in bursts, above it more evenly."""
    max_concurrency: int | None = None
    """Closed loop: clients, 8 by default. Open loop: most requests in flight, 1000 by default."""
    num_prompts: int = 100
    """Conversations in all."""
    input_words: int = 100
    """Words of each synthetic turn, about 1.1 tokens each."""
    output_len: int = 64
    """Tokens of each answer."""
    dataset_path: Path | None = None
    """File with conversations instead: one JSON object a line, or a ShareGPT list."""
    turns: int = 1
    """User turns of each conversation, as an agent's: each prompt holds all that was said."""
    sessions: bool = False
    """Name each conversation in the header X-Session-Id, by which gateways keep it at one server."""
    shared_prefix: int = 0
    """Words that all conversations begin with."""
    long_every: int = 0
    """Each so many conversations one has a long prompt, which disturbs the others."""
    long_words: int = 2000
    """Words of those long prompts."""
    num_warmups: int = 2
    """Conversations that are sent before, and not counted."""
    ignore_eos: bool = True
    """Ask for answers of full length; servers that do not know ignore_eos may refuse it."""
    goodput: tuple[str, ...] = ()
    """A limit in milliseconds that good requests keep: ttft:500, tpot:50 or e2el:9000; may be given several times."""
    seed: int = 0
    """Of prompts and arrivals."""
    output_json: Path | None = None
    """File for the figures."""
    plot: Path | None = None
    """File for a plot: .svg, .png or .pdf (needs the extra `plot`)."""


Options = Annotated[LoadOptions, Parameter(name="*", group=Group("Load", sort_key=0), negative_iterable=())]
LOAD = LoadOptions()
LEAST = {"max_concurrency": 1, "num_prompts": 1, "input_words": 1, "output_len": 1, "turns": 1, "shared_prefix": 0,
         "long_every": 0, "long_words": 1, "num_warmups": 0}


def serve(load: Options = LOAD, *, as_json: Json = False) -> int:
    """Send load to a running server, or to several for comparison, and say what its clients see.

    Parameters
    ----------
    as_json
        Print the figures as JSON instead of a table.
    """
    bench = _Bench(load)
    found = bench.run(bench.load(load.request_rate, load.max_concurrency))
    bench.tell(found, as_json, table)
    return 1 if any(server["failed"] for server in found["servers"]) else 0


def sweep(load: Options = LOAD, *, rates: str | None = None, concurrencies: str | None = None,
          as_json: Json = False) -> int:
    """The same load again and again, heavier each time: where does a server stop keeping up?

    Parameters
    ----------
    rates
        Open loops with these request rates: 1,2,4,8.
    concurrencies
        Closed loops with so many clients: 1,4,16,64.
    as_json
        Print the figures as JSON instead of a table.
    """
    if (rates is None) == (concurrencies is None):
        raise CommandFailed("give either --rates 1,2,4 or --concurrencies 1,4,16")
    if load.request_rate is not None or load.max_concurrency is not None:
        raise CommandFailed("a sweep sets --request-rate or --max-concurrency itself, from --rates or --concurrencies")
    over = "request_rate" if rates is not None else "concurrency"
    values = _numbers(rates or concurrencies or "", "--rates" if rates is not None else "--concurrencies")
    bench, points = _Bench(load), []
    for number, value in enumerate(values, 1):
        work = bench.load(value, None) if rates is not None else bench.load(None, int(value))
        points.append(bench.run(replace(work, conversations=marked(work.conversations, str(number)))))
    found = {"benchmark": "sweep", "date": points[0]["date"], "workload": points[0]["workload"], "over": over,
             "points": points}
    bench.tell(found, as_json, _sweep_table)
    return 1 if any(server["failed"] for point in points for server in point["servers"]) else 0


def _numbers(text: str, flag: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0 or (flag == "--concurrencies" and any(n != int(n) for n in found)):
        raise CommandFailed(f"{flag} is {text!r}; it must be numbers above 0, separated by commas")
    return found


def _sweep_table(found: dict[str, Any]) -> Table:
    """One line for each load and server."""
    made = Table(title=f"sweep: {found['workload']}", title_justify="left")
    for column in (found["over"].replace("_", " "), "server", "failed", "requests/s", "output tokens/s", "goodput",
                   "first token p50 (ms)", "p99", "later token p50 (ms)", "p99", "cached"):
        made.add_column(column, justify="left" if column == "server" else "right")
    for point in found["points"]:
        for server in point["servers"]:
            times = ["-" if server[key] is None else f"{1000 * server[key][share]:.1f}"
                     for key in ("ttft", "tpot") for share in ("p50", "p99")]
            good = "-" if server["goodput"] is None else f"{server['goodput']:.2f}"
            made.add_row(f"{point[found['over']]:g}", server["name"], str(server["failed"]),
                         f"{server['requests_per_second']:.2f}", f"{server['output_tokens_per_second']:.1f}", good,
                         *times, f"{100 * server['cached_share']:.0f} %")
    return made


class _Bench:
    """One workload and the servers that get it. Raises CommandFailed for options that cannot be."""

    def __init__(self, options: LoadOptions):
        self.options, self.notes = options, error_screen()
        self.limits = _check(options)
        self.conversations, self.workload = _conversations(options)
        self.targets = [_target(url, options) for url in options.url]

    def load(self, rate: float | None, concurrency: int | None) -> Load:
        options = self.options
        return Load(self.conversations, rate, options.burstiness, concurrency or (8 if rate is None else 1000),
                    options.api, ignore_eos=options.ignore_eos, sessions=options.sessions, seed=options.seed)

    def run(self, work: Load) -> dict[str, Any]:
        """The report of all servers under this load."""
        runs = [_measure(target, work, self.options.num_warmups, self.notes) for target in self.targets]
        found = report(runs, work, self.workload, self.limits)
        _warn(found, self.notes)
        return found

    def tell(self, found: dict[str, Any], as_json: bool, table: Any) -> None:
        tell(found, self.options.output_json, as_json, table)
        if self.options.plot is not None:
            try:
                draw([found], self.options.plot)
            except (PlotError, OSError) as e:
                raise CommandFailed(str(e)) from e


def _check(load: LoadOptions) -> dict[str, float]:
    """The limits of goodput, in seconds."""
    at_least(load, LEAST)
    for name in ("request_rate", "burstiness"):
        value = getattr(load, name)
        if value is not None and not value > 0:
            raise CommandFailed(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    return _limits(load.goodput)


def _limits(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for text in (part for one in given for part in one.split(",")):
        name, _, value = text.partition(":")
        try:
            found[name] = float(value) / 1000
        except ValueError:
            name = ""
        if name not in LIMITS:
            raise CommandFailed(f"--goodput is {text!r}; it must be NAME:MILLISECONDS, with {', '.join(LIMITS)}")
    return found


def _conversations(load: LoadOptions) -> tuple[tuple[Conversation, ...], str]:
    if load.dataset_path is not None:
        try:
            found = conversations_of(load.dataset_path, load.num_prompts, load.output_len)
        except ValueError as e:
            raise CommandFailed(str(e)) from e
        return found, f"{len(found)} conversations of {load.dataset_path.name}"
    found = synthetic_conversations(
        load.num_prompts, words=load.input_words, output_tokens=load.output_len, turns=load.turns, seed=load.seed,
        shared=load.shared_prefix, long_every=load.long_every, long_words=load.long_words)
    name = f"{load.num_prompts} conversations of {load.turns} x {load.input_words} words"
    name += f" after {load.shared_prefix} shared ones" if load.shared_prefix else ""
    return found, name + (f", each {load.long_every}th with {load.long_words}" if load.long_every else "")


def _target(given: str, load: LoadOptions) -> Target:
    name, is_named, url = given.partition("=")
    if not is_named or "://" in name:
        name, url = given, given
    base, key = server_address(url), key_of(load.api_key)
    return Target(name, base, load.model or find_model(base, key), key)


def _measure(target: Target, work: Load, warmups: int, notes: Console) -> Run:
    wanted = sum(len(conversation.turns) for conversation in work.conversations)
    ended = failed = 0

    def note(sample: Sample) -> None:
        nonlocal ended, failed
        ended, failed = ended + 1, failed + (sample.error is not None)
        failures = f", {failed} failed" if failed else ""
        status.update(f"measuring {target.name}: {ended} of {wanted} answers{failures}")

    with notes.status(f"measuring {target.name}") as status:
        if warmups:
            some = marked(work.conversations[:warmups], "warm-up")
            first = asyncio.run(run_load(target, replace(work, conversations=some, rate=None)))
            broken = next((sample.error for sample in first.samples if sample.error is not None), None)
            if broken is not None:
                raise CommandFailed(f"{target.name} does not answer as it should: {broken}")
        try:
            return asyncio.run(run_load(target, work, note))
        except httpx.HTTPError as e:
            raise CommandFailed(f"{target.name} cannot be reached: {e}") from e


def _warn(found: dict[str, Any], notes: Console) -> None:
    for server in found["servers"]:
        if server["client_cpu"] > 0.8:
            notes.print(f"note: the client used {100 * server['client_cpu']:.0f} % of a core: what is measured of"
                        f" {server['name']} may be the client", style="yellow")
        if not server["tokens_counted_by_server"]:
            notes.print(f"note: {server['name']} reports no usage: pieces of text are counted as tokens",
                        style="yellow")
        for error in server["errors"][:1]:
            notes.print(f"{server['failed']} requests to {server['name']} failed; the first: {error}", style="red")
