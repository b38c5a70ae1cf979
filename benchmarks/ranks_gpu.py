"""Tensor parallelism: decode steps of one engine on one GPU and over several, beside what a sum over the ranks takes.

    python -m benchmarks.ranks_gpu --json ranks.json                # two GPUs, at most 150 s
    python -m benchmarks.ranks_gpu --ranks 4
    python -m benchmarks.ranks_gpu --device cpu                     # a small model over gloo: whether it runs

Three engines of the same random weights, each in processes of its own: ranks that sum through symmetric memory; one
rank; ranks that sum through NCCL alone. Milliseconds of a step in which all rows decode, at a prompt of 512, the host's
work included. Then the sums by themselves, in microseconds of one of 64 in a captured graph. Every figure is printed,
and written, when it is there; the first engine begins with the largest batch, and what does not fit --seconds is left
out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engine_gpu import SHAPES, RandomSource
from stretto.attn.select import choose_backend
from stretto.device.kv import KVCache, group_layers
from stretto.device.ranks import RankShard
from stretto.device.runner import Runner
from stretto.device.slots import SlotTable
from stretto.device.streams import DeviceHalf, make_device
from stretto.engine.core import EngineCore
from stretto.engine.ranks import Ranks
from stretto.host.half import HostHalf
from stretto.host.limits import HostLimits
from stretto.model.config import ModelConfig
from stretto.model.load import build_model
from stretto.params import SamplingParams
from stretto.protocol import EngineInfo, Request
from stretto.sample.features import SHORT, StepShape

TINY = SHAPES["llama-8b"] | dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                                 num_key_value_heads=2, vocab_size=512)
PAGE, CHAIN = 16, 64
STARTED = time.perf_counter()
MODES = ("symmetric memory", "one rank", "NCCL alone")


@dataclass(frozen=True)
class Spec:
    """What travels to the ranks."""

    device: str
    rows: tuple[int, ...]
    prompt: int
    steps: int
    ranks: int = 2
    nccl: bool = False

    @property
    def shape(self) -> dict:
        return SHAPES["llama-8b"] if self.device == "cuda" else TINY

    @property
    def context(self) -> int:
        return self.prompt + 4 * self.steps

    @property
    def pages(self) -> int:
        return max(self.rows) * -(-self.context // PAGE) + 64

    @property
    def slots(self) -> int:
        return max(self.rows) + 1


def half_of(spec: Spec, shard: RankShard | None) -> tuple[DeviceHalf, int]:
    """A rank's half of the engine; None: of all of it."""
    device = shard.device if shard else torch.device(spec.device, 0) if spec.device == "cuda" else torch.device("cpu")
    if shard is not None and spec.nccl:
        shard = RankShard(shard.rank, shard.ranks, device, nccl=device.type == "cuda")
    torch.manual_seed(0)  # every rank cuts the same tensors
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = RandomSource(ModelConfig.from_hf(spec.shape), False, str(device))
    model = build_model(ModelConfig.from_hf(spec.shape), source, dtype, device, context=spec.context, shard=shard)
    kv = KVCache(model.layers, group_layers(model.layers), [spec.pages], PAGE, dtype, device)
    table = SlotTable(spec.slots, spec.context, PAGE, 1, device)
    return make_device(Runner(model, choose_backend(model.layers, PAGE, device, dtype), kv, table), True), 1


def engine(spec: Spec, half: DeviceHalf) -> EngineCore:
    half.warm_up([StepShape(rows=n, tokens=n, logits=n, width=1, draft_width=0, short=SHORT >= 1, single=True)
                  for n in spec.rows])
    limits = HostLimits(page_size=PAGE, pages=(spec.pages,), windows=(None,), max_slots=spec.slots,
                        max_model_len=spec.context, chunk=2048, budget=8192, width=0, depth=1, prefix_cache=False)
    info = EngineInfo(model_name="random", vocab_size=spec.shape["vocab_size"], max_model_len=spec.context,
                      max_num_seqs=spec.slots - 1, kv_tokens=spec.pages * PAGE, eos_token_ids=[])
    return EngineCore(HostHalf(limits, None), half, info, 1)


def step_ms(core: EngineCore, rows: int, spec: Spec) -> float:
    """Of a step in which so many requests decode, the median of four spans."""
    generator, waiting = torch.Generator().manual_seed(rows), set()
    for i in range(rows):
        ids = torch.randint(0, core.info.vocab_size, (spec.prompt,), generator=generator).tolist()
        core.submit(Request(rid=f"{rows}.{i}", tokens=ids, want_text=False, sampling=SamplingParams(
            temperature=0.0, max_tokens=4 * spec.steps, ignore_eos=True)))
        waiting.add(f"{rows}.{i}")
    rids = set(waiting)
    while waiting:
        waiting -= {output.rid for output in core.step()}
    spans = []
    for _ in range(4):
        started = time.perf_counter()
        for _ in range(spec.steps // 2):
            core.step()
        spans.append((time.perf_counter() - started) / (spec.steps // 2) * 1e3)
    for rid in rids:
        core.abort(rid)
    while core.has_work:
        core.step()
    return statistics.median(spans)


def run_mode(mode: str, spec: Spec) -> None:
    """Step times of one engine, then the sums of its ranks by themselves; a line each."""
    if mode == "one rank":
        core = engine(spec, half_of(spec, None)[0])
    else:
        ranks = Ranks(spec.ranks, spec.device, spec, half_of)
        shard = ranks.join()
        half = ranks.lead(half_of(spec, shard)[0])
        core = engine(spec, half)
    say("ready", round(time.perf_counter() - STARTED, 1))
    for rows in spec.rows:
        say(f"step of {rows} rows, ms", round(step_ms(core, rows, spec), 3))
    if mode != "one rank" and spec.device == "cuda":
        sums = Sums()
        half.between(sums)
        for name, us in sums.us.items():
            say(f"{name}, us", round(us, 2))
    core.close()


def say(name: str, value: float) -> None:
    print(json.dumps([name, value]), flush=True)


class Sums:
    """An action between steps, on every rank at the same time: sums and joins by themselves. `us`: what they took on
    the rank that asked."""

    def __init__(self) -> None:
        self.us: dict[str, float] = {}

    def __call__(self, runner: Runner) -> None:
        shard = runner.model.decoder[0].attn.out._shard  # type: ignore[attr-defined]
        for rows in (1, 8, 32, 128, 512):
            x = torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda")
            base, logits = torch.zeros_like(x), torch.zeros(rows, 64128, device="cuda")
            self.us[f"sum, {rows} rows"] = replay_us(lambda x=x, base=base: shard.add(base, x))
            if rows <= 128:
                self.us[f"join of logits, {rows} rows"] = replay_us(lambda logits=logits: shard.join(logits))


def replay_us(run: Callable[[], object]) -> float:
    """Of one of CHAIN runs, captured together."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    for _ in range(CHAIN):
        run()
    graph.capture_end()
    times = []
    for _ in range(8):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) * 1e3 / CHAIN)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=150, help="of all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mode", choices=MODES, help="this one alone, a line a figure")
    options = parser.parse_args()
    rows, prompt, steps = ((128, 1, 32, 8), 512, 32) if options.device == "cuda" else ((4, 1), 32, 8)
    if options.mode:
        with torch.inference_mode() if options.mode == "one rank" else nullcontext():
            run_mode(options.mode, Spec(options.device, rows, prompt, steps, options.ranks,
                                        options.mode == "NCCL alone"))
        return
    found: dict = {"time": time.strftime("%Y-%m-%d %H:%M"), "torch": torch.__version__, "ranks": options.ranks,
                   "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU"}
    for mode in MODES:
        made: dict[str, float] = {}
        found[mode] = made
        for name, value in figures(mode, options, STARTED + options.seconds):
            made[name] = value
            print(f"{time.perf_counter() - STARTED:5.1f} s  {mode}: {name}: {value}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    table(found, rows)


def figures(mode: str, options: argparse.Namespace, ends: float) -> Iterator[tuple[str, float]]:
    """What a process of its own measures, until it or the time is over."""
    if ends < time.perf_counter():
        return
    command = [sys.executable, "-m", "benchmarks.ranks_gpu", "--device", options.device, "--ranks", str(options.ranks),
               "--mode", mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        late = threading.Timer(ends - time.perf_counter(), child.kill)  # its ranks end with it
        late.start()
        assert child.stdout is not None
        for line in child.stdout:
            yield tuple(json.loads(line))
        late.cancel()
    if child.returncode:
        print(f"{mode} has ended with {child.returncode}: {'no time is left' if child.returncode < 0 else 'see above'}")


def table(found: dict, rows: tuple[int, ...]) -> None:
    """As in docs/scaling.md."""
    several, one, nccl = (found[mode] for mode in MODES)
    ranks = found["ranks"]
    print(f"| rows | one GPU | {ranks}, symmetric memory | share | {ranks}, NCCL alone |\n|--:|--:|--:|--:|--:|")
    for n in sorted(rows):
        name = f"step of {n} rows, ms"
        cells = [f"{ms[name]:.2f} ms" if name in ms else "-" for ms in (one, several, nccl)]
        share = f"{several[name] / one[name]:.2f}" if name in several and name in one else "-"
        print(f"| {n} | {cells[0]} | {cells[1]} | {share} | {cells[2]} |")


if __name__ == "__main__":
    main()
