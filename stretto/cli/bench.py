"""`stretto bench latency`, `throughput` and `startup`: an engine in this process, or in processes of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from cyclopts import Group, Parameter
from rich.table import Table

from stretto.bench.engines import BenchEngine, EngineMissing, Stretto, open_rival
from stretto.bench.measure import Series, measure_latency, measure_throughput
from stretto.bench.memory import Opener, peak_memory
from stretto.bench.results import machine, now, start_figures, summary, table
from stretto.bench.startup import StartFailed, measure_start
from stretto.bench.workload import Workload, WorkloadError, from_file, synthetic
from stretto.cli.failures import CommandFailed
from stretto.cli.findings import at_least, tell
from stretto.cli.options import ENGINE, EngineOptions, Json
from stretto.cli.screen import error_screen
from stretto.cli.starting import expected_failures, prepare_or_fail
from stretto.config import Config, DeviceFacts
from stretto.engine.prepare import Prepared
from stretto.text.tokenizer import load_tokenizer


@dataclass(frozen=True)
class BenchOptions:
    """What is measured, and how often."""

    against: tuple[Literal["transformers", "llama-cpp"], ...] = ()
    """Another engine to measure in turns with this one; may be given several times."""
    input_len: int = 128
    """Tokens of each prompt; prompts of a file are cut to it."""
    output_len: int = 128
    """Tokens of each answer."""
    num_prompts: int | None = None
    """Prompts in a round. Default: 4 (latency), 32 (throughput)."""
    dataset_path: Path | None = None
    """File with prompts, one JSON object a line, instead of synthetic ones."""
    rounds: int = 5
    """How often each engine runs the work, after a warm-up."""
    threads: int | None = None
    """Threads of every engine. Default: PyTorch's choice."""
    batch_size: int = 16
    """Prompts that transformers answers at once (throughput)."""
    memory: bool = True
    """Measure each engine's peak memory in a process of its own."""
    output_json: Path | None = None
    """File for the figures."""


Options = Annotated[BenchOptions, Parameter(name="*", group=Group("Benchmark", sort_key=0), negative_iterable=())]
BENCH = BenchOptions()
Measure = Callable[..., list[Series]]


def latency(engine: EngineOptions = ENGINE, *, bench: Options = BENCH, as_json: Json = False) -> int:
    """One request at a time: seconds to the first token, then tokens a second.

    Parameters
    ----------
    as_json
        Print the figures as JSON instead of a table.
    """
    return _run("latency", measure_latency, engine.config(), bench, 4, as_json)


def throughput(engine: EngineOptions = ENGINE, *, bench: Options = BENCH, as_json: Json = False) -> int:
    """Many requests at once: generated tokens a second.

    Parameters
    ----------
    as_json
        Print the figures as JSON instead of a table.
    """
    return _run("throughput", measure_throughput, engine.config(), bench, 32, as_json)


def startup(engine: EngineOptions = ENGINE, *, rounds: int = 3, output_json: Path | None = None,
            as_json: Json = False) -> int:
    """From nothing to the first answer, each time in a process of its own.

    Parameters
    ----------
    rounds
        How often.
    output_json
        File for the figures.
    as_json
        Print the figures as JSON instead of a table.
    """
    if rounds < 1:
        raise CommandFailed(f"--rounds is {rounds}; it must be 1 or more")
    prepared = prepare_or_fail(engine.config())
    try:
        starts = [measure_start(engine.config()) for _ in range(rounds)]
    except StartFailed as e:
        raise CommandFailed(str(e)) from e
    found = {"benchmark": "startup", "date": now(), "model": prepared.resolved.model_name, "rounds": rounds,
             "machine": machine(_device(prepared)), **start_figures(starts)}
    tell(found, output_json, as_json, _start_table)
    return 0


def _start_table(found: dict[str, Any]) -> Table:
    shown = Table(title=f"startup: {found['model']}, {found['rounds']} rounds", title_justify="left", box=None,
                  padding=(0, 2))
    for column in ("seconds", "median", "low", "high", "first round"):
        shown.add_column(column, justify="left" if column == "seconds" else "right")
    rows = {**found["phases"], "ready": found["ready"], "first answer": found["first_answer"]}
    for name, one in rows.items():
        shown.add_row(name, *(f"{one[key]:.2f}" for key in ("median", "low", "high", "first")))
    return shown


def _run(kind: str, measure: Measure, config: Config, options: BenchOptions, count: int, as_json: bool) -> int:
    _check(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    prepared = prepare_or_fail(config)
    work = _workload(prepared, options, options.num_prompts or count)
    openers = _openers(config, prepared, options, work)
    engines = " and ".join(("stretto", *dict.fromkeys(options.against)))
    error_screen().print(f"{kind} of {engines}: a warm-up and {options.rounds} rounds of {len(work.prompts)} prompts"
                         f" with {max(map(len, work.prompts))} tokens, {work.output_tokens} tokens of answer each"
                         + (", then peak memory in processes of their own" if options.memory else ""),
                         style="dim", soft_wrap=True)  # minutes may pass before anything else is said
    series = _measure(measure, openers, work, options)
    if options.memory:
        for one, opener in zip(series, openers, strict=True):
            one.peak_memory = peak_memory(opener, work, prepared.resolved.device)
    found = summary(kind, prepared.resolved.model_name, work, _device(prepared), series)
    tell(found, options.output_json, as_json, table)
    return 0


def _device(prepared: Prepared) -> DeviceFacts:
    return next(d for d in prepared.facts.devices if d.kind == prepared.resolved.device)


def _check(options: BenchOptions) -> None:
    at_least(options, dict.fromkeys(
        ("input_len", "output_len", "rounds", "batch_size", "threads", "num_prompts"), 1))


def _workload(prepared: Prepared, options: BenchOptions, count: int) -> Workload:
    room = prepared.resolved.max_model_len - options.output_len
    if options.input_len > room:
        raise CommandFailed(f"{options.input_len} input and {options.output_len} output tokens exceed the context"
                            f" of {prepared.resolved.max_model_len}: lower --input-len or --output-len")
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    try:
        if options.dataset_path is not None:
            return from_file(tokenizer, options.dataset_path, count, options.input_len, options.output_len)
    except WorkloadError as e:
        raise CommandFailed(str(e)) from e
    return synthetic(tokenizer, count, options.input_len, options.output_len)


def _openers(config: Config, prepared: Prepared, options: BenchOptions, work: Workload) -> list[Opener]:
    """How to open each engine, ours first; picklable, so that a child process can do it too."""
    resolved, path = prepared.resolved, prepared.path
    ours = replace(config, model=replace(config.model, model=str(path)))
    context = max(len(prompt) for prompt in work.prompts) + work.output_tokens
    rivals = [partial(open_rival, name, path, resolved.dtype, resolved.device, context, options.batch_size)
              for name in dict.fromkeys(options.against)]
    return [partial(Stretto, ours), *rivals]


def _measure(measure: Measure, openers: list[Opener], work: Workload, options: BenchOptions) -> list[Series]:
    with ExitStack() as opened:
        engines: list[BenchEngine] = []
        try:
            with expected_failures():
                for opener in openers:
                    engines.append(opener())
                    opened.callback(engines[-1].close)
        except EngineMissing as e:
            raise CommandFailed(str(e)) from e
        return measure(engines, work, options.rounds)
