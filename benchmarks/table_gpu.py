"""The table of targets on one GPU, in one call: decode steps of the whole engine beside bare replays of its graphs and
the serial limit; mixed steps, verify windows, drafts that are never found; many requests at once, paced arrivals, the
next turn of a long session; Qwen3-0.6B; transformers' continuous batching. Random weights of public shapes, bf16.

    python -m benchmarks.table_gpu --json benchmarks/results/table_h200.json --markdown table.md
    python -m benchmarks.table_gpu --only decode steps             # some parts: see PARTS

A part that fails is reported and the others go on. Each figure says what it was measured against in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.engine_gpu import SHAPES, build_core, read_rate
from benchmarks.step_gpu import REPEATS, Lab, Rows, chunk, decode, make_lab, multiply_rate, verify
from stretto.engine.core import EngineCore
from stretto.host.half import HostHalf
from stretto.model.config import ModelConfig
from stretto.params import SamplingParams
from stretto.protocol import Output, Request, SessionTurn
from stretto.spec.ngram import NgramDrafter

LONGEST = 32768  # prompt of the 8B parts
DRAFTS, ACCEPTED = 7, 3.7  # widest window, and the mean of what a step of the scripted acceptance emits


@dataclass
class Figure:
    """One row of the table; times in ms unless the name says otherwise."""

    what: str
    measured: float
    unit: str = "ms"
    target: str = ""
    limit: float | None = None  # serial, of the same unit
    peer: str = ""  # vLLM 0.26.0 on the same kind of card in another hour, or what is said
    note: str = ""

    def row(self) -> str:
        limit = f"{self.limit:.2f}" if self.limit is not None else ""
        share = f"{self.limit / self.measured:.2f}" if self.limit is not None else ""
        return f"| {self.what} | {self.target} | {self.measured:.4g} {self.unit} | {limit} | {share} | {self.peer} |" \
               f" {self.note} |"


class Bench:
    """One device's rates, and the figures so far."""

    def __init__(self) -> None:
        self.read, self.multiply, self.lasting = read_rate(), multiply_rate(), multiply_rate(1.0)
        self.figures: list[Figure] = []
        self.facts: dict[str, object] = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "time": time.strftime("%Y-%m-%d %H:%M"),
            "read_bytes_s": self.read, "multiply_ops_s": self.multiply, "lasting_multiply_ops_s": self.lasting}
        self.serial = 0

    def add(self, figure: Figure) -> None:
        self.figures.append(figure)
        print(figure.row(), flush=True)

    def limit(self, lab: Lab, rows: list[Rows], lasting: bool = False) -> float:
        """Milliseconds. `lasting`: at the rate of products that go on for a second, as steps do that are replayed one
        after another; without, at that of a few, which a step alone may have."""
        return lab.limit(rows, self.read, self.lasting if lasting else self.multiply) * 1e3

    def step(self, lab: Lab, what: str, rows: list[Rows], target: str = "", repeats: int = REPEATS) -> float:
        """Adds the time of a step, replayed one after another; notes that of one alone. Milliseconds, of the former."""
        ms, limit = lab.time(rows, repeats=repeats) * 1e3, self.limit(lab, rows, lasting=True)
        alone, bound = lab.time(rows, repeats=min(repeats, 8), rest=0.03) * 1e3, self.limit(lab, rows)
        self.add(Figure(what, ms, "ms", target, limit, "", f"bare replays, {ms / limit:.3f} of the limit; alone"
                        f" {alone:.2f} of {bound:.2f} ms, {alone / bound:.3f}"))
        return ms

    # --------------------------------------------------------------------------------------------------- requests
    def submit(self, core: EngineCore, prompt: int | list[int], new: int,
               session: SessionTurn | None = None) -> Request:
        """A greedy request of random ids (or these) that never stops early."""
        self.serial += 1
        if isinstance(prompt, int):
            generator = torch.Generator().manual_seed(self.serial)
            prompt = torch.randint(0, core.info.vocab_size, (prompt,), generator=generator).tolist()
        request = Request(rid=str(self.serial), tokens=prompt, want_text=False, session=session,
                          sampling=SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True))
        core.submit(request)
        return request

    def steps(self, core: EngineCore, lengths: list[int], steps: int = 32) -> float:
        """Milliseconds of a step in which requests of these prompt lengths all decode."""
        rids = [self.submit(core, n, 4096).rid for n in lengths]
        waiting = set(rids)
        while waiting:
            waiting -= {o.rid for o in core.step()}
        for _ in range(4):
            core.step()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            core.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        for rid in rids:
            core.abort(rid)
        drain(core)
        return seconds / steps * 1e3


def drain(core: EngineCore) -> list[Output]:
    outputs = []
    while core.has_work:
        outputs += core.step()
    return outputs


def rehost(core: EngineCore, **changes: object) -> EngineCore:
    """The same device half under a new host half with other limits."""
    limits = replace(core.host.limits, **changes)
    return EngineCore(HostHalf(limits, None), core.device, core.info, limits.depth)


# ------------------------------------------------------------------------------------------------ parts, 8B engine
CASES = {"1 row": ([1024], ">= 0.90", "4.82"), "8 rows": ([1024] * 8, ">= 0.90", "5.19"),
         "32 rows": ([1024] * 32, ">= 0.90", "6.37"), "64 rows": ([1024] * 64, ">= 0.90", "7.57"),
         "128 rows": ([1024] * 128, ">= 0.90", "10.55"), "256 rows": ([1024] * 256, ">= 0.90", "17.62"),
         "8 rows at 8k": ([8160] * 8, ">= 0.90", ""), "32 rows at 8k": ([8160] * 32, ">= 0.90", ""),
         "64 rows, skewed 1:32": ([int(256 * 32 ** (i / 63)) for i in range(64)], ">= 0.84", "")}
"""Prompt lengths, target as a share of the limit, milliseconds of vLLM."""


def engine_steps(bench: Bench, core: EngineCore, lab: Lab) -> None:
    """Decode steps of the engine, then the same graphs replayed without one."""
    measured = {name: bench.steps(core, lengths) for name, (lengths, _, _) in CASES.items()}
    for name, (lengths, target, peer) in CASES.items():
        rows = [decode(1, n + 24) for n in lengths]
        bare = lab.time(rows) * 1e3
        idle = (measured[name] - bare) * 1e3
        bench.add(Figure(f"8B decode, {name}", measured[name], "ms", target, bench.limit(lab, rows), peer,
                         f"bare replay {bare:.2f} ms, engine {measured[name] / bare:.3f} of it, {idle:.0f} us"))


def device_steps(bench: Bench, core: EngineCore, lab: Lab) -> None:
    """Steps that the engine makes under load, one by one."""
    prompt = chunk(2048, 2048)
    plain, mixed = [decode(64, 1024)], [decode(64, 1024), prompt]
    wide, both = [verify(64, 1024, DRAFTS)], [verify(64, 1024, DRAFTS), prompt]
    times = {name: bench.step(lab, f"8B step, {name}", rows, "<= 1.15 of the limit" if name != "64 rows" else "")
             for name, rows in (("mixed: chunk of 2048, 64 rows", mixed), ("verify: 64 rows of 8", wide),
                                ("mixed verify: chunk of 2048, 64 rows of 8", both), ("64 rows", plain))}
    for name, of, against in (("in mixed steps", "mixed verify: chunk of 2048, 64 rows of 8",
                               "mixed: chunk of 2048, 64 rows"), ("alone", "verify: 64 rows of 8", "64 rows")):
        bench.add(Figure(f"8B decode tokens/s with {ACCEPTED} of {DRAFTS + 1} a step, over one token a row, {name}",
                         ACCEPTED * times[against] / times[of], "x", ">= 2.0 x", note="from the steps above"))
    bench.step(lab, "8B step, 512 tokens on 8192", [Rows(1, 512, 8192 + 512)], "<= 1.15 of the limit")
    for tokens, share, repeats in ((2048, 0.86, 8), (8192, 0.80, 5), (32768, 0.76, 1)):
        bench.step(lab, f"8B prompt of {tokens}", [Rows(1, tokens, tokens)], f">= {share} of the limit", repeats)


def at_once(bench: Bench, core: EngineCore, lab: Lab) -> None:
    """512 requests, prompts 64..2048 and answers 16..512, log-uniform. Of the first 4,000 seeds this one has the sums
    nearest to the peer's draw."""
    rng = random.Random(2648)
    sizes = [(int(64 * 32 ** rng.random()), int(16 * 32 ** rng.random())) for _ in range(512)]
    for prompt, new in sizes:
        bench.submit(core, prompt, new)
    started = time.perf_counter()
    drain(core)
    seconds = time.perf_counter() - started
    new, total = sum(n for _, n in sizes), sum(p + n for p, n in sizes)
    bench.add(Figure("8B, 512 requests at once", new / seconds, "output tokens/s", ">= 8,200", None, "6,590",
                     f"{total - new} + {new} tokens in {seconds:.1f} s, {total / seconds:.0f} tokens/s in all (the"
                     " peer: 265,941 + 75,339, 29,850 tokens/s)"))


def paced(bench: Bench, core: EngineCore, lab: Lab) -> None:
    """Poisson arrivals of the peer's two loads, fewer requests of each."""
    for name, count, rate, longest, least, peer in (
            ("16 a second, prompts 64..2048", 192, 16.0, 2048, 16, "TTFT p99 85, ITL p99 26.5"),
            ("8 a second, prompts 64..8000", 96, 8.0, 8000, 64, "TTFT p99 340, ITL p99 51.4")):
        rng = random.Random(1)
        sizes = [(int(64 * (longest / 64) ** rng.random()), int(least * (512 / least) ** rng.random()))
                 for _ in range(count)]
        first, gaps = arrivals(bench, rehost(core, chunk=512, budget=512), sizes, rate, rng)
        for what, values, target in (("TTFT", first, "<= 1.0 x"), ("ITL", gaps, "<= 0.6 x")):
            p50, p90, p99 = (sorted(values)[min(int(q * len(values)), len(values) - 1)] * 1e3 for q in (0.5, 0.9, 0.99))
            bench.add(Figure(f"8B, {name}: {what} p99", p99, "ms", target, None, peer,
                             f"p50 {p50:.1f}, p90 {p90:.1f}; {count} requests, chunks of 512"))


def arrivals(bench: Bench, core: EngineCore, sizes: list[tuple[int, int]], rate: float,
             rng: random.Random) -> tuple[list[float], list[float]]:
    """(seconds to each first token, seconds between tokens), of all but the first quarter: graphs of steps that mix are
    captured when their sizes come for the second time."""
    due, at = [], 0.0
    for size in sizes:
        at += rng.expovariate(rate)
        due.append((at, size))
    began, arrived, last, warm = time.perf_counter(), {}, {}, due[len(due) // 4][0]
    first, gaps = [], []
    while due or core.has_work:
        now = time.perf_counter() - began
        while due and due[0][0] <= now:
            at, (prompt, new) = due.pop(0)
            arrived[bench.submit(core, prompt, new).rid] = at
        if not core.has_work:
            time.sleep(0.0005)
            continue
        outputs = core.step()
        now = time.perf_counter() - began
        for output in outputs:
            if arrived[output.rid] >= warm and output.rid not in last:
                first.append(now - arrived[output.rid])
            elif arrived[output.rid] >= warm and output.token_ids:
                gaps.append(now - last[output.rid])
            last[output.rid] = now
    return first, gaps


def session_turn(bench: Bench, core: EngineCore, lab: Lab) -> None:
    """The next 512 tokens on 8192 whose keys and values are kept: time to the first token."""
    keeping = rehost(core, prefix_cache=True)
    seconds = []
    for _ in range(7):
        history = bench.submit(keeping, 8192, 1).tokens
        drain(keeping)
        more = torch.randint(0, core.info.vocab_size, (512,)).tolist()
        started = time.perf_counter()
        bench.submit(keeping, history + more, 1)
        drain(keeping)
        seconds.append(time.perf_counter() - started)
    limit = bench.limit(lab, [Rows(1, 512, 8192 + 512)])
    bench.add(Figure("8B, turn of 512 tokens on 8192: first token", statistics.median(seconds) * 1e3, "ms",
                     "<= 1.15 of the limit", limit, "", "through the prefix cache"))


def conversations(bench: Bench, core: EngineCore, lab: Lab) -> None:
    """150 turns of eight sessions at once: are the last as quick as the first?"""
    keeping = rehost(core, prefix_cache=True)
    seconds = []
    for _ in range(150):
        started = time.perf_counter()
        for i in range(8):
            bench.submit(keeping, 4, 4, SessionTurn(sid=f"turns-{i}", mode="append"))
        drain(keeping)
        seconds.append(time.perf_counter() - started)
    head, tail = (statistics.median(part) * 1e3 for part in (seconds[5:45], seconds[-40:]))
    bench.add(Figure("8B, 150 turns of 8 sessions: the last 40 over turns 6 to 45", tail / head, "x", "<= 1.10",
                     note=f"{tail:.1f} and {head:.1f} ms a turn of 4 new and 4 answered ids, up to 1,200 of context"))


# ------------------------------------------------------------------------------------------------ parts, on their own
def ngram_idle(bench: Bench) -> None:
    """What it costs to look for drafts where none are found."""
    lab = make_lab("llama-8b", 64, 64 * 1200, 2048, drafter=NgramDrafter(4))
    for count in (1, 64):
        off, on = (lab.time([decode(count, 1024)], drafts=drafts) * 1e3 for drafts in (0, 4))
        bench.add(Figure(f"8B decode, {count} rows, n-gram drafts looked for and none found", on / off, "x of off",
                         "<= 1.01", note=f"{on:.3f} and {off:.3f} ms, bare replays"))


def small_model(bench: Bench) -> None:
    core, facts = build_core("qwen3-0.6b", 256, 256 * 320, 640)
    lab = Lab(core.device.runner, core.device.graphs, ModelConfig.from_hf(SHAPES["qwen3-0.6b"]))
    bench.facts["qwen3-0.6b"] = facts
    cases = ((1, 0.60, "1.62"), (8, 0.70, "1.56"), (64, 1.5, "2.41"), (256, 4.2, "6.3"))
    collect_as_served()
    measured = {count: bench.steps(rehost(core, max_model_len=640), [128] * count, 48) for count, _, _ in cases}
    for count, target, peer in cases:
        rows = [decode(count, 160)]
        bare = lab.time(rows) * 1e3
        bench.add(Figure(f"0.6B decode, {count} rows, prompt 128", measured[count], "ms", f"<= {target}",
                         bench.limit(lab, rows), peer,
                         f"bare replay {bare:.3f} ms, engine {measured[count] / bare:.3f} of it"))


def beside_transformers(bench: Bench) -> None:
    """32 requests of 512 tokens, 64 new ones each, in both engines; the same shape, random weights."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM  # an optional peer of this script

    core, _ = build_core("llama-8b", 32, 32 * 700, 1024)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, core.info.vocab_size, (32, 512), generator=generator).tolist()
    times = []
    for _ in range(2):
        for prompt in prompts:
            bench.submit(core, prompt, 64)
        started = time.perf_counter()
        drain(core)
        times.append(time.perf_counter() - started)
    ours = 32 * 64 / times[-1]
    core.close()
    del core
    free()
    settings = {k: v for k, v in SHAPES["llama-8b"].items() if k != "architectures"}
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**settings, attn_implementation="sdpa")).eval()
    torch.set_default_dtype(torch.float32)
    config = GenerationConfig(max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=0)
    for _ in range(2):
        started = time.perf_counter()
        found = model.generate_batch(inputs=prompts, generation_config=config)
        seconds = time.perf_counter() - started
    made = sum(len(o.generated_tokens) for o in found.values())
    theirs = made / seconds
    bench.add(Figure("8B, 32 requests of 512 + 64 tokens", ours, "output tokens/s", ">= 3 x transformers", None,
                     f"transformers {theirs:.0f}", f"{ours / theirs:.1f} x; it made {made} tokens"))


PARTS: dict[str, Callable[[Bench, EngineCore, Lab], None]] = {
    "decode": engine_steps, "at_once": at_once, "paced": paced, "session": session_turn, "turns": conversations,
    "steps": device_steps}
ALONE: dict[str, Callable[[Bench], None]] = {
    "small": small_model, "ngram": ngram_idle, "transformers": beside_transformers}


# --------------------------------------------------------------------------------------------------------------- all
def collect_as_served() -> None:
    """Python's cycle collector as in an engine's process: it looks at what was made since, and seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def compile_for(job: tuple[str, int, bool]) -> str | None:
    """Compiles the kernels of a shape at a number of rows into the cache on disk; the message where that fails."""
    shape, count, sampled = job
    try:
        torch.cuda.set_stream(torch.cuda.Stream())
        SHAPES[shape] = SHAPES[shape] | {"num_hidden_layers": 2}
        lab = make_lab(shape, 256, 256 * 64 + 4096, 4096)
        rows = [chunk(3000, 3000)] if count == 0 else [decode(count, 32)]
        with torch.inference_mode():
            lab.runner.run(*lab.prepare(rows, sampled))
        torch.cuda.synchronize()
    except Exception as e:  # reported: the parts that need it will say so again
        return f"{job}: {type(e).__name__}: {str(e)[:200]}"
    return None


def compile_all(workers: int) -> None:
    jobs = [(shape, count, count == 16) for shape in ("llama-8b", "qwen3-0.6b") for count in (0, 1, 8, 16, 32, 64, 256)]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for failure in pool.map(compile_for, jobs):
            if failure:
                print(failure, flush=True)


def attempt(name: str, part: Callable[..., None], *given: object) -> None:
    started = time.perf_counter()
    try:
        part(*given)
    except Exception:
        print(f"{name} failed:\n{traceback.format_exc()[-1500:]}", flush=True)
    free()
    print(f"-- {name}: {time.perf_counter() - started:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*PARTS, *ALONE], default=[*PARTS, *ALONE])
    parser.add_argument("--workers", type=int, default=12, help="processes that compile first (default 12; 0: none)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    if args.workers:
        compile_all(args.workers)
    torch.cuda.set_stream(torch.cuda.Stream())  # graphs are not captured on the default stream
    bench = Bench()
    print(json.dumps(bench.facts), flush=True)
    wanted = [name for name in PARTS if name in args.only]
    if wanted:
        core, facts = build_core("llama-8b", 512, 420_000, LONGEST + 1024)
        bench.facts["llama-8b"] = facts
        print(json.dumps(facts), flush=True)
        lab = Lab(core.device.runner, core.device.graphs, ModelConfig.from_hf(SHAPES["llama-8b"]))
        collect_as_served()
        for name in wanted:
            attempt(name, PARTS[name], bench, core, lab)
        core.close()
        del core, lab
        free()
    for name in args.only:
        if name in ALONE:
            attempt(name, ALONE[name], bench)
    write(bench, args.json, args.markdown)


def write(bench: Bench, to_json: Path | None, to_markdown: Path | None) -> None:
    if to_json:
        to_json.parent.mkdir(parents=True, exist_ok=True)
        to_json.write_text(json.dumps(bench.facts | {"figures": [vars(f) for f in bench.figures]}, indent=1))
    head = "| what | target | measured | limit | share | vLLM 0.26.0 | |\n|---|--:|--:|--:|--:|--:|---|\n"
    table = head + "\n".join(f.row() for f in bench.figures) + "\n"
    if to_markdown:
        to_markdown.write_text(table)
    assert all(math.isfinite(f.measured) for f in bench.figures), "a figure is no number"


if __name__ == "__main__":
    main()
