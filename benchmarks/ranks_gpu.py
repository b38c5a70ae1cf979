"""Tensor parallelism: decode steps of one engine on one GPU and over two, beside what a sum over the ranks takes.

    python -m benchmarks.ranks_gpu --json benchmarks/results/ranks_h200.json
    python -m benchmarks.ranks_gpu --device cpu              # a small model over gloo: whether it runs

Three engines of the same random weights, each in processes of its own: one rank; two ranks that sum through symmetric
memory; two ranks that sum through NCCL alone. Milliseconds of a step in which all rows decode, at a prompt of 512, the
host's work included. Then the sums by themselves, in microseconds of one of 64 in a captured graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
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
MODES = ("one rank", "symmetric memory", "NCCL alone")
MOST_SECONDS = 150  # of one mode


@dataclass(frozen=True)
class Spec:
    """What travels to the ranks."""

    device: str
    rows: tuple[int, ...]
    prompt: int
    steps: int
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
    half.warm_up([StepShape(rows=n, tokens=n, logits=n, width=1, draft_width=0, short=SHORT >= 1) for n in spec.rows])
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


def run_mode(mode: str, spec: Spec) -> dict:
    """Step times of one engine, and the sums of its ranks by themselves."""
    if mode == "one rank":
        core = engine(spec, half_of(spec, None)[0])
        return {"ms": {rows: step_ms(core, rows, spec) for rows in spec.rows}}
    ranks = Ranks(2, spec.device, spec, half_of)
    shard = ranks.join()
    half = ranks.lead(half_of(spec, shard)[0])
    core = engine(spec, half)
    found = {}
    for rows in spec.rows:
        found[rows] = step_ms(core, rows, spec)
        print(f"{mode}, {rows} rows: {found[rows]:.3f} ms", file=sys.stderr, flush=True)
    made: dict = {"ms": found}
    if spec.device == "cuda":
        sums = Sums(nccl=spec.nccl)
        half.between(sums)
        made["us"] = {name: round(us, 2) for name, us in sums.us.items()}
    core.close()
    return made


class Sums:
    """An action between steps, on every rank at the same time: sums and joins by themselves. `us`: what they took on
    the rank that asked."""

    def __init__(self, nccl: bool):
        self.nccl, self.us = nccl, {}

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
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mode", choices=MODES, help="this one alone, as JSON")
    options = parser.parse_args()
    spec = Spec(options.device, (1, 8, 32, 128), 512, 32, options.mode == "NCCL alone")
    if options.device == "cpu":
        spec = Spec("cpu", (1, 4), 32, 8, options.mode == "NCCL alone")
    if options.mode:
        with torch.inference_mode() if options.mode == "one rank" else nullcontext():
            print(json.dumps(run_mode(options.mode, spec)), flush=True)
        return
    found: dict = {"time": time.strftime("%Y-%m-%d %H:%M"), "torch": torch.__version__,
                   "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU"}
    for mode in MODES:
        command = [sys.executable, "-m", "benchmarks.ranks_gpu", "--device", options.device, "--mode", mode]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=MOST_SECONDS, check=True)
            found[mode] = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.SubprocessError, ValueError, IndexError) as e:
            found[mode] = {"failed": str(e)[:200]}
        print(mode, json.dumps(found[mode]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    table(found)


def table(found: dict) -> None:
    """As in docs/scaling.md."""
    one, two, nccl = (found[mode].get("ms", {}) for mode in MODES)
    print("| rows | one GPU | two, symmetric memory | share | two, NCCL alone |\n|--:|--:|--:|--:|--:|")
    for rows in one:
        cells = [f"{ms[rows]:.2f} ms" if rows in ms else "-" for ms in (one, two, nccl)]
        share = f"{two[rows] / one[rows]:.2f}" if rows in two else "-"
        print(f"| {rows} | {cells[0]} | {cells[1]} | {share} | {cells[2]} |")


if __name__ == "__main__":
    main()
