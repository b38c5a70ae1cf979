"""Times the ragged paged attention on one CUDA device, against the device's own read rate and against SDPA.

    python -m benchmarks.attention --out attention.json            the configuration of the table
    python -m benchmarks.attention --sweep --out sweep.json        every configuration of `sweep_configs`

Each figure is the median of replays of a CUDA graph, in microseconds. The KV of a batch is many times the L2 cache.
"floor" is the batch's KV bytes at the read rate measured in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

from stretto.attn.api import LayerSpec
from stretto.attn.tiles import FewTokens, KernelConfig, Tile, kernel_config
from stretto.attn.triton_ragged import TritonRagged
from stretto.ops.kv_write import write_kv, write_kv_reference
from stretto.ragged import RaggedStep
from stretto.wire import NEVER

LLAMA_8B = LayerSpec(n_heads=32, n_kv_heads=8, head_dim=128, scale=128**-0.5)
PAGE = 16
REPEATS = 20
LAUNCHES = 8  # in one graph, as the layers of a model: the start of the graph itself costs about 10 us


# ---------------------------------------------------------------------------------------------------------- batches
@dataclass
class Batch:
    name: str
    step: RaggedStep
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    @property
    def kv_bytes(self) -> int:
        cells = int(self.step.kv_len.sum())
        return 2 * cells * self.k_cache.shape[2] * self.k_cache.shape[3] * self.k_cache.element_size()


def lengths(name: str) -> tuple[list[int], list[int]]:
    """(q, kv) of each row. decode, verify and mixed are drawn with a fixed seed; `prompt N` is one whole prompt,
    `decode R x N` R rows of N cells."""
    g = torch.Generator().manual_seed(1)
    if name == "decode":
        return [1] * 128, torch.randint(500, 4000, (128,), generator=g).tolist()
    if name == "verify":
        return [5] * 64, torch.randint(500, 4000, (64,), generator=g).tolist()
    if name in ("mixed", "tails", "chunks"):  # mixed = tails + chunks
        kv = torch.randint(200, 4000, (120,), generator=g).tolist()
        tails, chunks = ([1] * 96 + [5] * 24, kv), ([512, 1024], [512, 3000])
        parts = {"mixed": (tails, chunks), "tails": (tails,), "chunks": (chunks,)}[name]
        return [n for q, _ in parts for n in q], [n for _, kv in parts for n in kv]
    words = name.split()
    if words[0] == "prompt":
        return [int(words[1])], [int(words[1])]
    rows, cells = int(words[1]), int(words[3])
    return [1] * rows, [cells] * rows


def make_batch(name: str, layer: LayerSpec, dtype: torch.dtype = torch.bfloat16) -> Batch:
    """Random data; the pages of all rows in random order."""
    q_len, kv_len = lengths(name)
    g = torch.Generator().manual_seed(1)
    pages = [-(-n // PAGE) for n in kv_len]
    order = torch.randperm(sum(pages), generator=g).int() + 1
    tables = torch.zeros(len(q_len), -(-max(pages) // 16) * 16, dtype=torch.int32)
    for row, part in enumerate(order.split(pages)):
        tables[row, : len(part)] = part
    q, kv = torch.tensor(q_len, dtype=torch.int32), torch.tensor(kv_len, dtype=torch.int32)
    cu_q = torch.cat([q.new_zeros(1), q.cumsum(0)]).int()
    rows = torch.repeat_interleave(torch.arange(len(q_len)), q)
    positions = torch.arange(len(rows)) - cu_q[rows] + (kv - q)[rows]
    cells = tables[rows, positions // PAGE].long() * PAGE + positions % PAGE
    none = torch.zeros(0, dtype=torch.int64)
    n_out = torch.zeros_like(q)
    tensors = dict(slots=torch.arange(len(q_len)).int(), q_len=q, cu_q=cu_q, base=kv - q, kv_len=kv, n_out=n_out,
                   cu_out=torch.zeros_like(cu_q), ids=torch.zeros_like(rows), positions=positions, rows=rows,
                   out_tokens=none, out_rows=none)
    step = RaggedStep(**{k: v.cuda() for k, v in tensors.items()}, cells=(cells.cuda(),),
                      page_tables=(tables.cuda(),), page_size=PAGE)
    torch.manual_seed(1)
    shape = (sum(pages) + 1, PAGE, layer.n_kv_heads, layer.head_dim)
    k_cache, v_cache = (torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2))
    return Batch(name, step, torch.randn(len(rows), layer.n_heads, layer.head_dim, dtype=dtype, device="cuda"),
                 k_cache, v_cache)


def reference(batch: Batch, layer: LayerSpec) -> torch.Tensor:
    """Dense float32 attention, row by row. [T, H, D]"""
    out, group = torch.empty(batch.q.shape, dtype=torch.float32, device="cuda"), layer.n_heads // layer.n_kv_heads
    for r, (n, kv) in enumerate(zip(*lengths(batch.name), strict=True)):
        t = torch.arange(kv, device="cuda")
        page = batch.step.page_tables[0][r].long()[t // PAGE]
        k, v = (c[page, t % PAGE].float().repeat_interleave(group, 1) for c in (batch.k_cache, batch.v_cache))
        start = int(batch.step.cu_q[r])
        for first in range(0, n, 512):  # bounds the memory of long prompts
            q = batch.q[start + first : start + min(first + 512, n)].float()
            s = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
            if layer.softcap is not None:
                s = layer.softcap * torch.tanh(s / layer.softcap)
            pos = kv - n + first + torch.arange(q.shape[0], device="cuda")[:, None]
            hidden = (t > pos) if layer.window is None else (t > pos) | (t <= pos - layer.window)
            out[start + first : start + first + q.shape[0]] = torch.einsum(
                "hqk,khd->qhd", s.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return out


# ----------------------------------------------------------------------------------------------------------- timing
def graph_time(launch: Callable[[], object], launches: int = 1, repeats: int = REPEATS) -> float:
    """Median microseconds of one replay of a CUDA graph of some launches, divided by their number."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            launch()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


@triton.jit
def _read(x, out, n, BLOCK: tl.constexpr):
    acc = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        acc ^= tl.load(x + start + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.xor_sum(acc, 0))


def read_rate() -> float:
    """Bytes per microsecond of a read-only sweep over 4 GiB."""
    x = torch.randint(-(2**31), 2**31 - 1, (1 << 30,), dtype=torch.int32, device="cuda")
    programs = 8 * torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(programs, dtype=torch.int32, device="cuda")
    return 4 * x.numel() / graph_time(lambda: _read[(programs,)](x, out, x.numel(), 8192, num_warps=8))


def measure(batch: Batch, layer: LayerSpec, config: KernelConfig | None, ref: torch.Tensor | None) -> dict:
    """Times of plan and of attend; error against the reference, after all the timed launches."""
    backend = TritonRagged(torch.device("cuda"), batch.q.dtype, config)
    meta = backend.metadata(batch.step, 0, layer)

    def attend() -> torch.Tensor:
        return backend.attend(layer, batch.q, batch.k_cache, batch.v_cache, batch.step, 0, meta)

    result = {"batch": batch.name, "window": layer.window, "softcap": layer.softcap,
              "tiles": [dataclasses.asdict(t) for t in meta.tiles], "items": meta.counts[:2].tolist()}
    result["attend_us"] = graph_time(attend, LAUNCHES)
    result["attend_once_us"] = graph_time(attend)
    result["plan_us"] = graph_time(lambda: backend.metadata(batch.step, 0, layer), LAUNCHES)
    if ref is not None:
        result["error"] = float((attend().float() - ref).norm() / ref.norm())
    return result


def sdpa_times(n: int) -> dict:
    """One whole prompt of n tokens through torch's cuDNN attention; K and V gathered from pages or already dense."""
    batch = make_batch(f"prompt {n}", LLAMA_8B)
    pages = batch.step.page_tables[0][0, : n // PAGE].long()

    def gather(cache: torch.Tensor) -> torch.Tensor:
        return cache[pages].view(1, n, 8, 128).transpose(1, 2)

    q, k, v = batch.q.view(1, n, 32, 128).transpose(1, 2), gather(batch.k_cache), gather(batch.v_cache)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        dense = graph_time(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        paged = graph_time(lambda: F.scaled_dot_product_attention(
            q, gather(batch.k_cache), gather(batch.v_cache), is_causal=True, enable_gqa=True))
    return {"batch": f"prompt {n}", "sdpa_dense_us": dense, "sdpa_gathered_us": paged,
            "tflops_dense": 2 * n * n * 32 * 128 / dense / 1e6}


def write_times(n: int) -> dict:
    """The write of n tokens' keys and values into random cells: one Triton launch, and torch's two."""
    cache = torch.empty(2, 4096, PAGE, 8, 128, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, n, 8, 128, dtype=torch.bfloat16, device="cuda")
    cells = torch.randperm(4096 * PAGE, device="cuda")[:n]
    return {"batch": f"write {n}", "triton_us": graph_time(lambda: write_kv(k, v, cache[0], cache[1], cells), LAUNCHES),
            "torch_us": graph_time(lambda: write_kv_reference(k, v, cache[0], cache[1], cells), LAUNCHES)}


# ------------------------------------------------------------------------------------------------------------ sweep
def sweep_configs() -> Iterator[KernelConfig]:
    """The table's entry with other splits, then with other tiles: edit at will."""
    base = kernel_config(128, 2, 90)
    for keys, programs, registers in ((64, 2, 255), (32, 3, 168)):
        for split in (128, 256, 512, 1024):
            tile = Tile(64, keys, 3, 4, programs, registers)
            yield dataclasses.replace(base, few=(FewTokens(NEVER, tile, split),))


def _compile(job: tuple[LayerSpec, int, KernelConfig | None]) -> str | None:
    """Compiles the kernels of a layer and a number of rows into the cache on disk; the message where that fails."""
    layer, rows, config = job
    try:
        batch = make_batch(f"decode {rows} x 64", layer)
        backend = TritonRagged(torch.device("cuda"), torch.bfloat16, config, workspace_bytes=1 << 20)
        plan = backend.metadata(batch.step, 0, layer)
        backend.attend(layer, batch.q, batch.k_cache, batch.v_cache, batch.step, 0, plan)
        torch.cuda.synchronize()
    except Exception as e:  # a configuration may be too large for the device: reported, not timed
        return f"{type(e).__name__}: {str(e)[:200]}"
    return None


def compile_all(jobs: list[tuple[LayerSpec, int, KernelConfig | None]], workers: int) -> list[str | None]:
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return pool.map(_compile, jobs, chunksize=1)


def run_sweep(configs: list[KernelConfig], workers: int) -> list[dict]:
    failures = compile_all([(LLAMA_8B, 2, config) for config in configs], workers)
    names = ("decode", "verify", "mixed", "decode 1 x 1024", "decode 1 x 8192", "decode 4 x 2048", "decode 8 x 1024",
             "decode 16 x 2048", "decode 32 x 1024", "decode 32 x 4096", "decode 64 x 1024", "decode 64 x 2048")
    batches = [make_batch(name, LLAMA_8B) for name in names]
    refs = [reference(b, LLAMA_8B) for b in batches]
    results = []
    for config, failure in zip(configs, failures, strict=True):
        if failure is not None:
            results.append({"config": dataclasses.asdict(config), "failed": failure})
            print(short_name(config), failure, flush=True)
            continue
        rows = [measure(b, LLAMA_8B, config, ref) for b, ref in zip(batches, refs, strict=True)]
        results += rows
        print(short_name(config), *(f"{r['attend_us']:7.1f}" for r in rows),
              f" error {max(r['error'] for r in rows):.1e}", flush=True)
    return results


def short_name(config: KernelConfig) -> str:
    tiles = " ".join(f"{t.rows}x{t.keys}/{t.stages} w{t.warps} p{t.programs} r{t.registers}"
                     for t in (*(f.tile for f in config.few), config.chunk))
    return f"{tiles} s{[f.split for f in config.few]}"


def run_table(workers: int) -> list[dict]:
    """The configuration of the table on the three batches, with windows and soft-cap, at small batches, on prompts."""
    window = dataclasses.replace(LLAMA_8B, window=1024)
    softcap = dataclasses.replace(LLAMA_8B, softcap=30.0)
    cases = [(name, LLAMA_8B) for name in ("decode", "verify", "mixed")]
    cases += [("mixed", window), ("mixed", softcap)]
    cases += [(f"decode {rows} x {cells}", LLAMA_8B)
              for rows, cells in ((1, 1024), (1, 8192), (8, 1024), (16, 2048), (32, 4096), (64, 1024))]
    cases += [(f"prompt {n}", LLAMA_8B) for n in (2048, 8192, 32768)]
    compile_all([(layer, rows, None) for layer, rows in {(x, r) for _, x in cases for r in (1, 4, 16, 122)}], workers)
    results = []
    for name, layer in cases:
        batch = make_batch(name, layer)
        ref = None if name == "prompt 32768" else reference(batch, layer)
        result = measure(batch, layer, None, ref)
        result["kv_gb"] = batch.kv_bytes / 1e9
        if name.startswith("prompt"):
            result["tflops"] = 2 * batch.q.shape[0] ** 2 * 32 * 128 / result["attend_us"] / 1e6
        results.append(result)
        shown = {k: v if isinstance(v, str) else round(v, 5) for k, v in result.items()
                 if k not in ("tiles", "items") and v is not None}
        print(shown, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    parser.add_argument("--sweep", action="store_true", help="time the configurations of sweep_configs")
    parser.add_argument("--sdpa", action="store_true", help="time torch's cuDNN attention on whole prompts as well")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile (default 12)")
    parser.add_argument("--no-table", action="store_true", help="leave out the configuration of the table")
    args = parser.parse_args()
    report: dict = {"torch": torch.__version__, "triton": triton.__version__, "time": time.strftime("%Y-%m-%d")}
    if args.sweep:
        report["sweep"] = run_sweep(list(sweep_configs()), args.workers)
    rate = read_rate()
    report |= {"device": torch.cuda.get_device_name(0), "read_tb_per_s": rate / 1e6}
    print(report["device"], f"read sweep {rate / 1e6:.3f} TB/s", flush=True)
    report["table"] = [] if args.no_table else run_table(args.workers)
    if args.sdpa:
        report["sdpa"] = [sdpa_times(n) for n in (2048, 8192, 32768)]
    report["write"] = [write_times(n) for n in (1, 256, 2048)]
    for row in report.get("sdpa", []) + report["write"]:
        print({k: v if isinstance(v, str) else round(v, 1) for k, v in row.items()})
    for result in report["table"]:
        result["floor_us"] = result["kv_gb"] * 1e9 / rate
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
