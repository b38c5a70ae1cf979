"""Times single steps of the device half on one GPU, without a host: any mixture of decoded tokens, verify windows and
chunks of prompts, at any context, beside the serial limit of its bytes and operations.

    python -m benchmarks.step_gpu --scan --json benchmarks/results/step_scan_h200.json
    python -m benchmarks.step_gpu --timeline 64x1024 256x1024        # what runs when in one layer of a decode step
    python -m benchmarks.step_gpu --kernels 64x1024+2048             # kernels of a step by time, and how long none ran

The slot table is set to the state before the step, a graph of the step's bucket is captured and replayed; the table is
set back before each replay. Weights, keys, values and ids are random. `--scan` writes the step time over rows, tokens a
row, contexts and prompt tokens: what a cost model of speculation is fitted to.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.engine_gpu import SHAPES, RandomSource, print_kernels, read_rate
from stretto.attn.select import choose_backend
from stretto.device.graphs import GraphExecutor, bucketed
from stretto.device.kv import KVCache, group_layers
from stretto.device.runner import Runner
from stretto.device.slots import SlotTable
from stretto.device.streams import LARGEST_GRAPH
from stretto.model.config import ModelConfig
from stretto.model.load import build_model
from stretto.sample.features import SHORT, StepShape
from stretto.spec.api import Drafter
from stretto.wire import Int, Real

REPEATS = 24


@dataclass(frozen=True)
class Rows:
    """`count` rows alike: each feeds `tokens` tokens of which the last stands at cell `context` - 1; its last `sampled`
    positions are sampled (0: a chunk that is not the last of its prompt)."""

    count: int
    tokens: int
    context: int
    sampled: int = 1


def decode(count: int, context: int) -> Rows:
    return Rows(count, 1, context)


def verify(count: int, context: int, drafts: int) -> Rows:
    return Rows(count, 1 + drafts, context, 1 + drafts)


def chunk(tokens: int, context: int) -> Rows:
    return Rows(1, tokens, context, 0)


class Lab:
    """Steps of a runner whose slot table, with its first `context` positions, may be overwritten."""

    def __init__(self, runner: Runner, graphs: GraphExecutor, config: ModelConfig):
        self.runner, self.graphs, self.config = runner, graphs, config
        self.table, self.page, self.pages = runner.table, runner.table.page_size, min(runner.kv.pages)

    def prepare(self, rows: list[Rows], sampled: bool = False, drafts: int = 0) -> tuple[torch.Tensor, StepShape]:
        """Sets the slot table to the state before the step. Returns the plan's rows and the shape of the step, which
        ends with proposals of `drafts` ids."""
        each = [r for r in rows for _ in range(r.count)]
        table, n = self.table, len(each)
        ints = table.ints[:, 1 : n + 1]
        end = torch.tensor([r.context for r in each], dtype=torch.int32)
        fed = torch.tensor([r.tokens for r in each], dtype=torch.int32)
        out = torch.tensor([r.sampled for r in each], dtype=torch.int32)
        ints.zero_()
        ints[Int.LEN] = (end - fed).cuda()
        ints[Int.KNOWN] = (end - out + 1).cuda()  # n_out = len + q - known + 1
        ints[Int.NDRAFT] = (out - 1).clamp(min=0).cuda()
        ints[Int.LIMIT] = table.context
        ints[Int.EPOCH] = 1
        ints[Int.LOGPROBS] = -1
        ints[Int.SPECULATION] = drafts
        table.reals[Real.TEMPERATURE] = 1.0 if sampled else 0.0
        table.reals[Real.TOP_P] = 1.0
        table.log.random_(0, self.config.vocab_size)
        pool, at = torch.randperm(self.pages) + 1, 0
        for i, r in enumerate(each):
            needed = -(-r.context // self.page)
            table.tables[:, i + 1, :needed] = pool[at : at + needed].int().cuda()
            at += needed
        plan = torch.tensor([[i + 1, 1, r.tokens] for i, r in enumerate(each)], dtype=torch.int32).cuda()
        tokens, logits = int(fed.sum()), sum(max(r.sampled, 1) for r in each)
        return plan, StepShape(rows=n, tokens=tokens, logits=logits, width=max(1, *out.tolist(), 1), draft_width=drafts,
                               short=int(fed.max()) <= SHORT, single=int(fed.max()) <= 1, sampled=sampled)

    @torch.inference_mode()
    def time(self, rows: list[Rows], sampled: bool = False, drafts: int = 0, repeats: int = REPEATS,
             rest: float = 0.0) -> float:
        """Seconds of the step, median of `repeats`, each after `rest` seconds in which the device has nothing to do:
        replay after replay, large steps reach the limit of its power and lower its clock."""
        plan, shape = self.prepare(rows, sampled, drafts)
        bucket = bucketed(shape)
        padded = torch.zeros(bucket.rows, 3, dtype=torch.int32, device="cuda")
        padded[: len(plan)] = plan
        saved = self.table.ints.clone()
        if (bucket.tokens or 0) <= LARGEST_GRAPH:
            captured = self.graphs.graphs.get(bucket) or self.graphs.capture(bucket)
            captured.rows.copy_(padded)
            run = captured.graph.replay
        else:
            def run() -> None:
                self.runner.run(padded, bucket)
        times = []
        warm = min(repeats, 3)
        for _ in range(repeats + warm):
            self.table.ints.copy_(saved)
            if rest:
                torch.cuda.synchronize()
                time.sleep(rest)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            times.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(s.elapsed_time(e) for s, e in times[warm:]) / 1e3

    def limit(self, rows: list[Rows], read: float, multiply: float) -> float:
        """Seconds of the step at the device's rates (bytes a second, operations a second), one part after another:
        matrices of the layers, head, keys and values of rows of few tokens, attention of chunks."""
        c = self.config
        q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        layer = c.hidden_size * (2 * q + 2 * kv + 3 * c.intermediate_size)
        tokens, out = sum(r.count * r.tokens for r in rows), sum(r.count * max(r.sampled, 1) for r in rows)
        head = c.hidden_size * c.vocab_size
        few = sum(r.count * r.context for r in rows if r.tokens <= 17) * 4 * kv * c.n_layers
        long = [(r.tokens, r.context) for r in rows if r.tokens > 17]
        pairs = sum(t * (n - t) + t * (t + 1) / 2 for t, n in long)
        return (c.n_layers * max(2 * layer / read, 2 * layer * tokens / multiply)
                + max(2 * head / read, 2 * head * out / multiply) + few / read
                + max(sum(n for _, n in long) * 4 * kv * c.n_layers / read, 4 * c.n_layers * q * pairs / multiply))

    @torch.inference_mode()
    def record(self, rows: list[Rows], drafts: int = 0) -> torch.profiler.profile:
        """One replay of the step's graph, alone: a step that runs again and again may run slower, where the device
        lowers its clock under its limit of power."""
        self.time(rows, drafts=drafts, repeats=3)
        plan, shape = self.prepare(rows, drafts=drafts)
        captured = self.graphs.graphs[bucketed(shape)]
        captured.rows[: len(plan)] = plan
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
            captured.graph.replay()
            torch.cuda.synchronize()
        return recorded

    def timeline(self, rows: list[Rows]) -> None:
        """Prints the kernels of one layer in the middle of the step: start, duration, both in us. A kernel that starts
        early waits for the one before: its duration holds the wait."""
        recorded = self.record(rows)
        events = sorted((e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA),
                        key=lambda e: e.time_range.start)
        layers = [i for i, e in enumerate(events)
                  if e.name == "attend_kernel" and (i == 0 or events[i - 1].name != "attend_kernel")]
        a, b = layers[len(layers) // 2], layers[len(layers) // 2 + 1]
        zero, ended = events[a].time_range.start, events[a - 1].time_range.end
        print(f"== {rows}: one layer {events[b].time_range.end - events[a].time_range.end:.1f} us")
        for e in events[a : b + 1]:
            span = e.time_range
            print(f"{span.start - zero:8.1f} .. {span.end - zero:8.1f}  ran {span.elapsed_us():7.1f}  ended"
                  f" {span.end - ended:6.1f} after the one before  {e.name[:60]}", flush=True)
            ended = span.end


def make_lab(shape: str, seqs: int, cells: int, context: int, page: int = 16, drafter: Drafter | None = None) -> Lab:
    """A model of random weights with a slot table and KV memory for `seqs` rows of together `cells` cells."""
    config, device = ModelConfig.from_hf(SHAPES[shape]), torch.device("cuda")
    model = build_model(config, RandomSource(config, SHAPES[shape]["tie_word_embeddings"]), torch.bfloat16, device,
                        context=context)
    groups = group_layers(model.layers)
    kv = KVCache(model.layers, groups, [-(-cells // page) + seqs] * len(groups), page, model.dtype, device)
    for part in (*kv.k, *kv.v):
        part.normal_()
    table = SlotTable(seqs + 1, context, page, len(groups), device)
    runner = Runner(model, choose_backend(model.layers, page, device, model.dtype), kv, table, drafter)
    return Lab(runner, GraphExecutor(runner, LARGEST_GRAPH), config)


def multiply_rate(least: float = 0.0) -> float:
    """Operations a second of torch's product at 2048 rows of the 8B shape's largest matrix, random data: the median of
    24; of the last ones of as many as take `least` seconds, in which the device may lower its clock."""
    x = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(28672, 4096, device="cuda", dtype=torch.bfloat16)
    times: list[float] = []
    while len(times) < 24 or sum(times) < least:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(25)]
        for event in events:
            event.record()
            torch.nn.functional.linear(x, w)
        torch.cuda.synchronize()
        times += [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
    return 2 * x.numel() * w.shape[0] / statistics.median(times[-24:])


def scan_cases() -> Iterator[list[Rows]]:
    """Rows 1..256, 1..8 tokens a row, contexts to 8k, with and without a chunk of a prompt beside them."""
    for context in (256, 1024, 4096, 8192):
        for count in (1, 4, 16, 64, 256):
            if count * context <= 1 << 18:
                yield from ([verify(count, context, drafts)] for drafts in (0, 3, 7))
    for count in (0, 16, 64, 256):
        for tokens in (256, 2048):
            yield [*([decode(count, 1024)] if count else []), chunk(tokens, tokens)]


def parse_case(text: str) -> list[Rows]:
    """"64x1024": 64 rows at context 1024; "64x1024x8": verify windows of 8 tokens; "+2048": and a chunk of 2048."""
    first, _, prompt = text.partition("+")
    count, context, *tokens = map(int, first.split("x"))
    rows = [verify(count, context, tokens[0] - 1 if tokens else 0)]
    return rows + ([chunk(int(prompt), int(prompt))] if prompt else [])


def measure(lab: Lab, cases: list[list[Rows]], read: float, multiply: float, quiet: bool = False) -> list[dict]:
    found = []
    for rows in cases:
        seconds, limit = lab.time(rows), lab.limit(rows, read, multiply)
        few = [r for r in rows if r.tokens <= 17]
        found.append({"rows": sum(r.count for r in few), "tokens_a_row": few[0].tokens if few else 0,
                      "context": few[0].context if few else 0, "prompt_tokens": sum(
                          r.tokens for r in rows if r.tokens > 17), "step_us": round(seconds * 1e6, 1),
                      "limit_us": round(limit * 1e6, 1), "share": round(limit / seconds, 3)})
        if not quiet:
            print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--cases", nargs="*", default=[], help="such as 64x1024, 64x1024x8, 64x1024+2048")
    parser.add_argument("--timeline", nargs="*", default=[], help="cases of which one layer is printed")
    parser.add_argument("--kernels", nargs="*", default=[], help="cases whose kernels are printed by time")
    parser.add_argument("--scan", action="store_true", help="rows x tokens x contexts x prompt tokens")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.cuda.set_stream(torch.cuda.Stream())  # graphs are not captured on the default stream
    read, multiply = read_rate(), multiply_rate()
    print(f"{torch.cuda.get_device_name()}: reads {read / 1e12:.2f} TB/s, multiplies {multiply / 1e12:.0f} TFLOP/s")
    lab = make_lab(args.shape, 257, (1 << 19) + 4096, 8192 + 64)
    for text in args.timeline:
        lab.timeline(parse_case(text))
    for text in args.kernels:
        print_kernels(lab.record(parse_case(text)), text, 1)
    cases = [parse_case(text) for text in args.cases] + (list(scan_cases()) if args.scan else [])
    found = measure(lab, cases, read, multiply, quiet=args.scan)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(
            {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "shape": args.shape,
             "time": time.strftime("%Y-%m-%d %H:%M"), "read_bytes_s": read, "multiply_ops_s": multiply,
             "steps": found}, indent=1))


if __name__ == "__main__":
    main()
