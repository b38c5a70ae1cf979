"""`stretto bench latency` and `stretto bench throughput`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
from cyclopts import Group, Parameter
from rich.console import Console

from stretto.bench.engines import BenchEngine, EngineMissing, Stretto, open_rival
from stretto.bench.measure import Series, measure_latency, measure_throughput
from stretto.bench.memory import Opener, peak_memory
from stretto.bench.results import summary, table
from stretto.bench.workload import Workload, WorkloadError, from_file, synthetic
from stretto.cli.failures import CommandFailed
from stretto.cli.options import ENGINE, EngineOptions, Json
from stretto.cli.starting import expected_failures, prepare_or_fail
from stretto.config import Config
from stretto.engine.build import Prepared
from stretto.text.tokenizer import load_tokenizer


@dataclass(frozen=True)
class BenchOptions:
    """What is measured, and how often."""

    against: tuple[Literal["transformers", "llama-cpp"], ...] = ()
    """Another engine to measure in turns with this one; may be given several times."""
    input_tokens: int = 128
    """Tokens of each prompt; prompts of a file are cut to it."""
    output_tokens: int = 128
    """Tokens of each answer."""
    num_prompts: int | None = None
    """Prompts in a round. Default: 4 (latency), 32 (throughput)."""
    prompts: Path | None = None
    """File with prompts, one JSON object a line, instead of synthetic ones."""
    rounds: int = 5
    """How often each engine runs the work, after a warm-up."""
    threads: int | None = None
    """Threads of every engine. Default: PyTorch's choice."""
    batch_size: int = 16
    """Prompts that transformers answers at once (throughput)."""
    memory: bool = True
    """Measure each engine's peak memory in a process of its own."""
    output: Path | None = None
    """File for the figures, as JSON."""


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


def _run(kind: str, measure: Measure, config: Config, options: BenchOptions, count: int, as_json: bool) -> int:
    _check(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    prepared = prepare_or_fail(config)
    work = _workload(prepared, options, options.num_prompts or count)
    openers = _openers(config, prepared, options, work)
    series = _measure(measure, openers, work, options)
    if options.memory:
        for one, opener in zip(series, openers, strict=True):
            one.peak_memory = peak_memory(opener, work, prepared.resolved.device)
    device = next(d for d in prepared.facts.devices if d.kind == prepared.resolved.device)
    found = summary(kind, prepared.resolved.model_name, work, device, series)
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=2) + "\n")
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160).print(table(found))
    return 0


def _check(options: BenchOptions) -> None:
    for name in ("input_tokens", "output_tokens", "rounds", "batch_size", "threads", "num_prompts"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise CommandFailed(f"--{name.replace('_', '-')} is {value}; it must be 1 or more")


def _workload(prepared: Prepared, options: BenchOptions, count: int) -> Workload:
    room = prepared.resolved.max_model_len - options.output_tokens
    if options.input_tokens > room:
        raise CommandFailed(f"{options.input_tokens} input and {options.output_tokens} output tokens exceed the context"
                            f" of {prepared.resolved.max_model_len}: lower --input-tokens or --output-tokens")
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    try:
        if options.prompts is not None:
            return from_file(tokenizer, options.prompts, count, options.input_tokens, options.output_tokens)
    except WorkloadError as e:
        raise CommandFailed(str(e)) from e
    return synthetic(tokenizer, count, options.input_tokens, options.output_tokens)


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
