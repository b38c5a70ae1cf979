"""`stretto bench serve`: load on one server, or on several in turns. Loads no torch."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import httpx
from cyclopts import Group, Parameter
from rich.console import Console

from stretto.bench.load import (
    Conversation,
    Load,
    Run,
    Target,
    conversations_of,
    run_load,
    synthetic_conversations,
)
from stretto.bench.load_report import plot, report, table
from stretto.cli.failures import CommandFailed
from stretto.cli.remote import find_model, key_of, server_address


@dataclass(frozen=True)
class LoadOptions:
    """What is sent, and how."""

    url: tuple[str, ...] = ("http://127.0.0.1:8000",)
    """A server with OpenAI's API; may be given several times, also as NAME=URL. They are measured one after another."""
    model: str | None = None
    """Name of the model. Default: the first that the server lists."""
    api_key: str | None = None
    """Key of the servers. Default: the variable STRETTO_API_KEY, then OPENAI_API_KEY."""
    api: Literal["chat", "completions"] = "chat"
    """Which API."""
    request_rate: float | None = None
    """Open loop: requests that arrive in a second, by a Poisson process. Default: a closed loop."""
    concurrency: int | None = None
    """Closed loop: clients, 8 by default. Open loop: most requests in flight, 1000 by default."""
    num_prompts: int = 100
    """Conversations in all."""
    input_words: int = 100
    """Words of each synthetic turn, about 1.1 tokens each."""
    output_tokens: int = 64
    """Tokens of each answer."""
    prompts: Path | None = None
    """File with conversations instead: one JSON object a line, or a ShareGPT list."""
    turns: int = 1
    """User turns of each conversation, as an agent's: each prompt holds all that was said."""
    shared_prefix: int = 0
    """Words that all conversations begin with."""
    long_every: int = 0
    """Each so many conversations one has a long prompt, which disturbs the others."""
    long_words: int = 2000
    """Words of those long prompts."""
    warm_up: int = 2
    """Conversations that are sent before, and not counted."""
    ignore_eos: bool = True
    """Ask for answers of full length; servers that do not know ignore_eos may refuse it."""
    slo_ttft: float | None = None
    """Milliseconds until the first token that still count as good."""
    slo_tpot: float | None = None
    """Milliseconds for each later token that still count as good."""
    seed: int = 0
    """Of prompts and arrivals."""
    output: Path | None = None
    """File for the figures, as JSON."""
    plot: Path | None = None
    """File for a plot, as SVG."""


Options = Annotated[LoadOptions, Parameter(name="*", group=Group("Load", sort_key=0), negative_iterable=())]
LOAD = LoadOptions()
Json = Annotated[bool, Parameter(name="--json", negative=())]


def serve(load: Options = LOAD, *, as_json: Json = False) -> int:
    """Send load to a running server, or to several for comparison, and say what its clients see.

    Parameters
    ----------
    as_json
        Print the figures as JSON instead of a table.
    """
    _check(load)
    conversations, name = _conversations(load)
    concurrency = load.concurrency or (8 if load.request_rate is None else 1000)
    work = Load(conversations, load.request_rate, concurrency, load.api, ignore_eos=load.ignore_eos, seed=load.seed)
    targets = [_target(url, load) for url in load.url]
    notes = Console(stderr=True, highlight=False)
    runs = [_measure(target, work, load.warm_up, notes) for target in targets]
    found = report(runs, work, name, *(limit / 1000 if limit is not None else None
                                       for limit in (load.slo_ttft, load.slo_tpot)))
    if load.output is not None:
        load.output.write_text(json.dumps(found, indent=2) + "\n")
    if load.plot is not None:
        load.plot.write_text(plot(runs, f"{name}, {found['loop']} loop"))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160).print(table(found))
    _warn(found, notes)
    return 1 if any(server["failed"] for server in found["servers"]) else 0


def _check(load: LoadOptions) -> None:
    for name, least in (("concurrency", 1), ("num_prompts", 1), ("input_words", 1), ("output_tokens", 1), ("turns", 1),
                        ("shared_prefix", 0), ("long_every", 0), ("long_words", 1), ("warm_up", 0)):
        value = getattr(load, name)
        if value is not None and value < least:
            raise CommandFailed(f"--{name.replace('_', '-')} is {value}; it must be {least} or more")
    if load.request_rate is not None and not load.request_rate > 0:
        raise CommandFailed(f"--request-rate is {load.request_rate}; it must be above 0")


def _conversations(load: LoadOptions) -> tuple[tuple[Conversation, ...], str]:
    if load.prompts is not None:
        try:
            found = conversations_of(load.prompts, load.num_prompts, load.output_tokens)
        except ValueError as e:
            raise CommandFailed(str(e)) from e
        return found, f"{len(found)} conversations of {load.prompts.name}"
    found = synthetic_conversations(
        load.num_prompts, words=load.input_words, output_tokens=load.output_tokens, turns=load.turns, seed=load.seed,
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


def _measure(target: Target, work: Load, warm_up: int, notes: Console) -> Run:
    with notes.status(f"measuring {target.name}"):
        if warm_up:
            first = asyncio.run(run_load(target, replace(work, conversations=work.conversations[:warm_up], rate=None)))
            broken = next((sample.error for sample in first.samples if sample.error is not None), None)
            if broken is not None:
                raise CommandFailed(f"{target.name} does not answer as it should: {broken}")
        try:
            return asyncio.run(run_load(target, work))
        except httpx.HTTPError as e:
            raise CommandFailed(f"{target.name} cannot be reached: {e}") from e


def _warn(found: dict, notes: Console) -> None:
    for server in found["servers"]:
        if server["client_cpu"] > 0.8:
            notes.print(f"note: the client used {100 * server['client_cpu']:.0f} % of a core: what is measured of"
                        f" {server['name']} may be the client", style="yellow", markup=False)
        if not server["tokens_counted_by_server"]:
            notes.print(f"note: {server['name']} reports no usage: pieces of text are counted as tokens",
                        style="yellow", markup=False)
        for error in server["errors"][:1]:
            notes.print(f"{server['failed']} requests to {server['name']} failed; the first: {error}", style="red",
                        markup=False)
