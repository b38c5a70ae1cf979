"""`stretto plan`: how many GPUs a load needs. Nothing is loaded, and no GPU is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from stretto.cli.failures import EXIT_REFUSED, CommandFailed
from stretto.cli.options import Json
from stretto.cli.screen import error_screen, show
from stretto.config import UsageError, parse_size
from stretto.plan.hardware import Hardware, engine, find_hardware
from stretto.plan.load import Load, Talk, parse_load, read_trace
from stretto.plan.options import MOST_SEATS, Goals, Question, plan
from stretto.plan.report import as_data, render
from stretto.plan.shapes import find_shape

PROBE = "stretto.bench.rates"
PROBE_SECONDS = 300


@dataclass(frozen=True)
class OwnHardware:
    """Figures of a GPU, instead of the catalogue's."""

    memory: str | None = None
    """Memory of a GPU, such as 80GB."""
    read_tb_s: float | None = None
    """TB/s at which a program reads it."""
    tflops: float | None = None
    """TFLOP/s of a large product in 16 bits."""
    link_gb_s: float | None = None
    """GB/s that a sum of large tensors reaches to another GPU of the host, one way."""
    gpus_per_host: int | None = None
    """GPUs that a model can be spread over."""

    def given(self) -> dict[str, Any]:
        """As find_hardware takes it. Raises ValueError for a size that is none."""
        return {"memory": None if self.memory is None else parse_size(self.memory),
                "read": _scaled(self.read_tb_s, 1e12), "multiply": _scaled(self.tflops, 1e12),
                "link": _scaled(self.link_gb_s, 1e9), "node": self.gpus_per_host}


@dataclass(frozen=True)
class Serving:
    """How replicas are run."""

    weight_bits: int | None = None
    """Of each weight on the GPU: 16, 8 or 4. Default: as the checkpoint has them."""
    kv_bits: int = 16
    """Of each number in the KV cache: 16 or 8."""
    max_num_seqs: int = MOST_SEATS
    """Most sequences that run at once in a replica."""
    headroom: float = 0.8
    """Share of what a replica bears that it is given to do."""
    drafts: int = 0
    """Drafts that a drafter proposes for a sequence in a step."""
    accepted: float = 1.0
    """Tokens that a sequence gains in a step that verifies them, its own included: measured on such texts."""

    def check(self) -> None:
        if not 0 < self.headroom <= 1:
            raise UsageError(f"--headroom {self.headroom:g}: it is a share, above 0 and up to 1")
        if self.max_num_seqs < 1:
            raise UsageError(f"--max-num-seqs {self.max_num_seqs}: it must be 1 or more")
        if not (self.drafts >= 0 and 1 <= self.accepted <= self.drafts + 1):
            raise UsageError(f"--accepted {self.accepted:g}: from 1 to the {self.drafts} of --drafts and one more")


OWN, SERVING = OwnHardware(), Serving()
Own = Annotated[OwnHardware, Parameter(name="*", group=Group("Hardware", sort_key=3))]
Served = Annotated[Serving, Parameter(name="*", group=Group("Replicas", sort_key=2))]


def run(model: str, *, hw: str = "h200", load: str = "rate=1,prompt=64..2048,output=16..512", ttft_ms: float = 2000.0,
        itl_ms: float = 100.0, serving: Served = SERVING, own: Own = OWN, as_json: Json = False) -> int:
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
    as_json
        Print one JSON object.
    """
    serving.check()
    if not (ttft_ms > 0 and itl_ms > 0):
        raise UsageError("--ttft-ms and --itl-ms must be above 0")
    try:
        hardware = _here(own.given()) if hw == "here" else find_hardware(hw, **own.given())
        question = Question(find_shape(model, serving.weight_bits, serving.kv_bits), hardware, engine(), _load(load),
                            Goals(ttft_ms / 1e3, itl_ms / 1e3), serving.headroom, serving.max_num_seqs, serving.drafts,
                            serving.accepted)
    except ValueError as e:
        raise UsageError(str(e)) from e
    with error_screen().status("simulating"):
        options = plan(question)
    if as_json:
        print(json.dumps(as_data(question, options), indent=2))
    else:
        show(render(question, options))
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


def _here(given: dict[str, Any]) -> Hardware:
    """This machine's GPU, measured in a process of its own, since torch takes seconds to load."""
    try:
        asked = subprocess.run([sys.executable, "-m", PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        raise CommandFailed(f"this machine's GPU was not measured within {PROBE_SECONDS} s: look at nvidia-smi, or name"
                            " the GPU with --hw") from None
    if asked.returncode != 0:
        said = asked.stderr.strip().splitlines()
        raise CommandFailed(f"this machine's GPU cannot be measured: {said[-1] if said else asked.returncode}")
    found = json.loads(asked.stdout)
    measured = {key: found[key] for key in ("memory", "read", "multiply", "node")}
    return find_hardware(found["name"], **measured | {k: v for k, v in given.items() if v is not None})
