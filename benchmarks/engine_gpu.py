"""The whole engine on one GPU with random weights of a public shape: decode step times over rows and contexts, prefill
rate, start-up and graphs; beside the serial limit of the bytes and operations, at rates measured in the same run.

    python benchmarks/engine_gpu.py --shape llama-8b --rows 1 8 64 256 --prompt 1024 --new 64 --json out.json

    python benchmarks/engine_gpu.py --rows 1 64 256 --profile      # and where a decode step's and a prefill's time goes

`step_ms` is (time of 1 + N tokens - time of 1 token) / N for R equal requests, medians of `--repeat`: what mixing with
the prompts of later requests costs is in it. `decode_ms` is one of the steps in which every row decodes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable

import torch

from stretto.attn.select import choose_backend
from stretto.device.graphs import chunk_shapes, usual_shapes
from stretto.device.kv import KVCache, bytes_per_token, group_layers
from stretto.device.runner import Runner
from stretto.device.slots import SlotTable
from stretto.device.streams import CudaDevice
from stretto.engine.core import EngineCore
from stretto.host.half import HostHalf
from stretto.host.limits import HostLimits
from stretto.model.config import ModelConfig
from stretto.model.load import build_model
from stretto.params import SamplingParams
from stretto.protocol import EngineInfo, Request
from stretto.spec.api import Drafter
from stretto.spec.ngram import NgramDrafter

LLAMA = dict(architectures=["LlamaForCausalLM"], hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
             num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
             rope_theta=500000.0, tie_word_embeddings=False)
QWEN = dict(architectures=["Qwen3ForCausalLM"], head_dim=128, max_position_embeddings=40960, rope_theta=1e6,
            vocab_size=151936, num_attention_heads=16, num_key_value_heads=8)
SHAPES = {"llama-8b": LLAMA,
          "qwen3-0.6b": QWEN | dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                                    tie_word_embeddings=True),
          "qwen3-8b": QWEN | dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
                                  num_attention_heads=32, tie_word_embeddings=False)}


class RandomTensors:
    """A WeightSource of random tensors, never zeros: zeros draw less power and run faster."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: str):
        self._shapes, self._device = shapes, device

    def names(self) -> Iterable[str]:
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=self._device, dtype=torch.bfloat16)
        return torch.randn(shape, device=self._device, dtype=torch.bfloat16) * shape[1] ** -0.5


class RandomSource(RandomTensors):
    """Of a dense model with the tensors of Llama or Qwen3."""

    def __init__(self, config: ModelConfig, tied: bool, device: str = "cuda"):
        super().__init__({}, device)
        c = config
        q, kv, h, f = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size
        per_layer = {"self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
                     "self_attn.o_proj": (h, q), "mlp.gate_proj": (f, h), "mlp.up_proj": (f, h),
                     "mlp.down_proj": (h, f), "input_layernorm": (h,), "post_attention_layernorm": (h,)}
        if c.architecture.startswith("Qwen3"):
            per_layer |= {"self_attn.q_norm": (c.head_dim,), "self_attn.k_norm": (c.head_dim,)}
        for i in range(c.n_layers):
            self._shapes |= {f"model.layers.{i}.{n}.weight": s for n, s in per_layer.items()}
        self._shapes |= {"model.embed_tokens.weight": (c.vocab_size, h), "model.norm.weight": (h,)}
        if not tied:
            self._shapes["lm_head.weight"] = (c.vocab_size, h)


def read_rate() -> float:
    """Bytes a second of reading memory, best of several sums over 4 GiB."""
    x = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        x.sum()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return x.numel() * 4 / min(times)


def make_core(args: argparse.Namespace) -> tuple[EngineCore, dict]:
    context, seqs = args.prompt + args.new + 64, max(args.rows)
    drafter = NgramDrafter(args.drafts) if args.drafts else None
    return build_core(args.shape, seqs, seqs * (context + 64), context, page=args.page, chunk=args.chunk,
                      budget=args.budget, drafter=drafter, graphs=not args.eager)


def build_core(shape: str, seqs: int, cells: int, context: int, *, page: int = 16, chunk: int = 8192,
               budget: int = 8192, drafter: Drafter | None = None, graphs: bool = True) -> tuple[EngineCore, dict]:
    """An engine of random weights with KV memory for `cells` tokens, its usual graphs captured; and what that took."""
    started, config, device = time.perf_counter(), ModelConfig.from_hf(SHAPES[shape]), torch.device("cuda")
    model = build_model(config, RandomSource(config, SHAPES[shape]["tie_word_embeddings"]), torch.bfloat16, device,
                        context=context)
    torch.cuda.synchronize()
    built = time.perf_counter()
    groups, pages, width = group_layers(model.layers), -(-cells // page) + 1, drafter.caps.max_width if drafter else 0
    kv = KVCache(model.layers, groups, [pages] * len(groups), page, model.dtype, device)
    table = SlotTable(seqs + 1, context, page, len(groups), device)
    runner = Runner(model, choose_backend(model.layers, page, device, model.dtype), kv, table, drafter)
    half = CudaDevice(runner, device, graphs=graphs)
    free = torch.cuda.mem_get_info()[0]
    if graphs:
        half.warm_up(usual_shapes(seqs, 1 + width, width) + chunk_shapes(budget, width))
    torch.cuda.synchronize()
    facts = {"build_s": built - started, "graphs": len(half.graphs.graphs), "capture_s": half.graphs.capture_seconds,
             "graph_memory_gib": (free - torch.cuda.mem_get_info()[0]) / 2**30,
             "weights_bytes": _bytes_read(model, SHAPES[shape]),
             "kv_token_bytes": sum(bytes_per_token(model.layers, g, model.dtype) for g in groups)}
    limits = HostLimits(page_size=page, pages=(pages,) * len(groups), windows=tuple(g.window for g in groups),
                        max_slots=seqs + 1, max_model_len=context, chunk=chunk, budget=budget, width=width, depth=1,
                        prefix_cache=False)
    info = EngineInfo(model_name=shape, vocab_size=model.vocab_size, max_model_len=context, max_num_seqs=seqs,
                      kv_tokens=cells, eos_token_ids=[])
    return EngineCore(HostHalf(limits, None), half, info, 1), facts


def _bytes_read(model: object, shape: dict) -> int:
    """Bytes of weights that a step reads: all but an embedding that is no head."""
    total = sum(t.numel() * t.element_size() for t in _tensors(model))
    return total - (0 if shape["tie_word_embeddings"] else 2 * shape["vocab_size"] * shape["hidden_size"])


def _tensors(model: object) -> list[torch.Tensor]:
    seen: dict[int, torch.Tensor] = {}

    def walk(x: object, depth: int = 0) -> None:
        if isinstance(x, torch.Tensor):
            seen[x.data_ptr()] = x
        elif depth < 6 and hasattr(x, "__dict__"):
            for v in vars(x).values():
                walk(v, depth + 1)
        elif isinstance(x, (list, tuple)):
            for v in x:
                walk(v, depth + 1)
    walk(model)
    return list(seen.values())


def submit(core: EngineCore, rows: int, prompt: int, new: int, serial: list[int]) -> None:
    generator = torch.Generator().manual_seed(serial[0])
    for _ in range(rows):
        serial[0] += 1
        tokens = torch.randint(0, core.info.vocab_size, (prompt,), generator=generator).tolist()
        core.submit(Request(rid=str(serial[0]), tokens=tokens, want_text=False,
                            sampling=SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)))


def run(core: EngineCore, rows: int, prompt: int, new: int, serial: list[int]) -> tuple[float, float]:
    """(seconds in all, seconds that the host spent outside waiting) for `rows` requests that start together."""
    submit(core, rows, prompt, new, serial)
    torch.cuda.synchronize()
    busy, waited, started = core.busy_seconds, core.wait_seconds, time.perf_counter()
    while core.has_work:
        core.step()
    return time.perf_counter() - started, (core.busy_seconds - busy) - (core.wait_seconds - waited)


def profile(core: EngineCore, rows: int, prompt: int, decode: bool, serial: list[int], steps: int = 4) -> None:
    """Prints kernels by time in `steps` decode steps of `rows` requests, or in the first step of their prompts."""
    submit(core, rows, prompt, 24, serial)
    for _ in range(-(-rows * prompt // core.host.limits.budget) + 4 if decode else 0):
        core.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps if decode else 2):
            core.step()
        torch.cuda.synchronize()
    print_kernels(recorded, f"{rows} rows, {'decode' if decode else 'prefill'}", steps if decode else 1)
    while core.has_work:
        core.step()


def print_kernels(recorded: torch.profiler.profile, title: str, steps: int) -> None:
    """Kernels by the time they ran, a step; those that overlap count in full, but once in the time that was busy."""
    events = sorted((e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA),
                    key=lambda e: e.time_range.start)
    totals: dict[str, list[float]] = {}
    busy, reached = 0.0, events[0].time_range.start
    for e in events:
        entry = totals.setdefault(e.name[:90], [0, 0.0])
        entry[0] += 1
        entry[1] += e.time_range.elapsed_us()
        busy += max(0.0, e.time_range.end - max(reached, e.time_range.start))
        reached = max(reached, e.time_range.end)
    span = reached - events[0].time_range.start
    print(f"== {title}: {len(events) / steps:.0f} kernels a step, busy {busy / steps:.0f} us of {span / steps:.0f} us")
    for name, (count, us) in sorted(totals.items(), key=lambda item: -item[1][1])[:28]:
        print(f"{us / steps:9.1f} us {count / steps:7.1f} x  {name}", flush=True)


def decode_step(core: EngineCore, rows: int, prompt: int, steps: int, serial: list[int]) -> float:
    """Seconds of one of `steps` steps in which all rows decode."""
    submit(core, rows, prompt, steps + -(-rows * prompt // core.host.limits.budget) + 16, serial)
    for _ in range(-(-rows * (prompt + 8) // core.host.limits.budget) + 6):
        core.step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        core.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    while core.has_work:
        core.step()
    return seconds / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    rate = read_rate()
    core, facts = make_core(args)
    results, serial = [], [0]
    print(f"{torch.cuda.get_device_name()}: reads {rate / 1e12:.2f} TB/s; {facts}", flush=True)
    for rows in args.rows:
        decode = decode_step(core, rows, args.prompt, 32, serial)
        ones, fulls, host = [], [], []
        for _ in range(args.repeat):
            ones.append(run(core, rows, args.prompt, 1, serial)[0])
            seconds, busy = run(core, rows, args.prompt, 1 + args.new, serial)
            fulls.append(seconds)
            host.append(busy / args.new)
        step = (statistics.median(fulls) - statistics.median(ones)) / args.new
        context = args.prompt + args.new / 2
        limit = (facts["weights_bytes"] + rows * context * facts["kv_token_bytes"]) / rate
        results.append({"rows": rows, "step_ms": step * 1e3, "decode_ms": decode * 1e3, "limit_ms": limit * 1e3,
                        "share": limit / step, "decode_share": limit / decode,
                        "host_ms": statistics.median(host) * 1e3, "prefill_tok_s": rows * args.prompt / min(ones)})
        print(json.dumps(results[-1]), flush=True)
    graphs = core.device.graphs
    facts |= {"replays": graphs.replays, "eager_steps": graphs.eager_steps, "graphs": len(graphs.graphs)}
    print(json.dumps(facts))
    if args.json:
        with open(args.json, "w") as out:
            json.dump({"read_bytes_s": rate, "shape": args.shape, **facts, "results": results}, out, indent=1)
    if args.profile:
        for rows in args.rows:
            profile(core, rows, args.prompt, True, serial)
        profile(core, max(args.budget // args.prompt, 1), args.prompt, False, serial)


if __name__ == "__main__":
    main()
