"""`stretto plan`: how many GPUs a load needs. Nothing is loaded, and no GPU is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from stretto.cli.failures import EXIT_REFUSED, CommandFailed, UsageError
from stretto.cli.options import Json
from stretto.config import parse_size
from stretto.plan.hardware import Hardware, engine, find_hardware
from stretto.plan.load import Load, Talk, parse_load, read_trace
from stretto.plan.options import MOST_SEATS, Goals, Question, plan
from stretto.plan.report import as_data, render
from stretto.plan.shapes import find_shape

PROBE = "stretto.bench.rates"
PROBE_SECONDS = 300


def run(model: str, *, hw: str = "h200", load: str = "rate=1,prompt=64..2048,output=16..512", ttft_ms: float = 2000.0,
        itl_ms: float = 100.0, weight_bits: int | None = None, kv_bits: int = 16, headroom: float = 0.8,
        max_num_seqs: int = MOST_SEATS, memory: str | None = None, read_tb_s: float | None = None,
        tflops: float | None = None, link_gb_s: float | None = None, gpus_per_host: int | None = None,
        as_json: Json = False) -> int:
    """Plan how many GPUs a load needs, how a model is spread over them, and what users would see.

    Exits with 3 if nothing fits.

    Parameters
    ----------
    model
        A public shape such as llama-3.1-8b, a folder, a config.json, or a hub id that has been fetched.
    hw
        h200, h100, a100, l40s, l4, rtx4090 ...; `here`: measure this machine's GPU; another name: with its figures.
    load
        NAME=VALUE,... with rate (requests/s) or users, prompt, output (tokens, LEAST..MOST), turns, think (s), shared;
        or a file with a trace, one JSON object a line: at (s), prompt, output, session.
    ttft_ms
        Milliseconds within which 99 of 100 first tokens must come.
    itl_ms
        Milliseconds within which 99 of 100 next tokens must come.
    weight_bits
        Of each weight on the GPU: 16, 8 or 4. Default: as the checkpoint has them.
    kv_bits
        Of each number in the KV cache: 16 or 8.
    headroom
        Share of what a replica bears that it is given to do.
    max_num_seqs
        Most sequences that run at once in a replica.
    memory
        Memory of a GPU, such as 80GB, instead of the catalogue's.
    read_tb_s
        TB/s at which a program reads it.
    tflops
        TFLOP/s of a large product in 16 bits.
    link_gb_s
        GB/s to another GPU of the host, one way.
    gpus_per_host
        GPUs that a model can be spread over.
    as_json
        Print one JSON object.
    """
    if not 0 < headroom <= 1:
        raise UsageError(f"--headroom {headroom:g}: it is a share, above 0 and up to 1")
    if not (ttft_ms > 0 and itl_ms > 0 and max_num_seqs > 0):
        raise UsageError("--ttft-ms, --itl-ms and --max-num-seqs must be above 0")
    try:
        bytes_ = None if memory is None else parse_size(memory)
        given = {"memory": bytes_, "read": _scaled(read_tb_s, 1e12), "multiply": _scaled(tflops, 1e12),
                 "link": _scaled(link_gb_s, 1e9), "node": gpus_per_host}
        hardware = _here(given) if hw == "here" else find_hardware(hw, **given)  # type: ignore[arg-type]
        question = Question(find_shape(model, weight_bits, kv_bits), hardware, engine(), _load(load),
                            Goals(ttft_ms / 1e3, itl_ms / 1e3), headroom, max_num_seqs)
    except ValueError as e:
        raise UsageError(str(e)) from e
    options = plan(question)
    if as_json:
        print(json.dumps(as_data(question, options), indent=2))
    else:
        Console(file=sys.stdout).print(render(question, options))
    return 0 if options[0].fits else EXIT_REFUSED


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _load(text: str) -> Load | list[Talk]:
    path = Path(text)
    if "=" not in text:
        if not path.is_file():
            raise UsageError(f"--load {text} is neither a file nor NAME=VALUE,...")
        return read_trace(path)
    return parse_load(text)


def _here(given: dict[str, float | int | None]) -> Hardware:
    """This machine's GPU, measured in a process of its own, since torch takes seconds to load."""
    asked = subprocess.run([sys.executable, "-m", PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS)
    if asked.returncode != 0:
        said = asked.stderr.strip().splitlines()
        raise CommandFailed(f"this machine's GPU cannot be measured: {said[-1] if said else asked.returncode}")
    found = json.loads(asked.stdout)
    measured = {key: found[key] for key in ("memory", "read", "multiply", "node")}
    return find_hardware(found["name"], **measured | {k: v for k, v in given.items() if v is not None})
