"""Single steps of many kinds of models on one GPU, each beside the serial limit of its bytes and operations: dense
families at one shape, models of experts, weights and KV caches of 8 and 4 bits.

    python -m benchmarks.families_gpu --json out.json
    python -m benchmarks.families_gpu --only experts cells --kernels

Weights are random. Models have fewer layers than those they are named after, so that many fit a short run; what one
layer costs does not change. Of experts only those count that a step touches: they are counted, since with random
weights many tokens choose the same. The limit adds up one part after another: matrices, head, keys and values.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.engine_gpu import LLAMA, RandomTensors, print_kernels, read_rate
from benchmarks.step_gpu import Lab, Rows, chunk, decode, multiply_rate
from stretto.attn.select import choose_backend
from stretto.device.graphs import GraphExecutor, bucketed
from stretto.device.kv import KVCache, bytes_per_token, group_layers, kv_dtype
from stretto.device.runner import Runner
from stretto.device.slots import SlotTable
from stretto.device.streams import LARGEST_GRAPH
from stretto.model.config import ModelConfig
from stretto.model.experts import ExpertMLP, Route
from stretto.model.load import build_model
from stretto.model.registry import NATIVE
from stretto.model.weights import Weights
from stretto.ops.packed import Layout, Packed

EIGHT = LLAMA | dict(num_hidden_layers=8, head_dim=128)
WINDOWS = dict(sliding_window=4096, layer_types=["sliding_attention", "full_attention"] * 4)
GEMMA = WINDOWS | dict(query_pre_attn_scalar=128, hidden_activation="gelu_pytorch_tanh")
FAMILIES = {"Llama": EIGHT, "Qwen3": EIGHT, "Mistral": EIGHT | dict(sliding_window=4096),
            "Gemma3": EIGHT | GEMMA | dict(rope_local_base_freq=10000.0), "Olmo2": EIGHT, "Phi3": EIGHT, "Qwen2": EIGHT,
            "Gemma2": EIGHT | GEMMA | dict(final_logit_softcapping=30.0)}
EXPERTS = {
    "Qwen3Moe": dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=12,
                     num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
                     num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
                     vocab_size=151936, max_position_embeddings=40960, rope_theta=1e6, tie_word_embeddings=False),
    "GptOss": dict(hidden_size=2880, intermediate_size=2880, num_hidden_layers=12, num_attention_heads=64,
                   num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
                   sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 6, vocab_size=201088,
                   max_position_embeddings=131072, rope_theta=150000.0, attention_bias=True,
                   tie_word_embeddings=False)}
PACKED = {"bfloat16": None, "fp8, inputs too": Layout("fp8", 0, eight_bit_inputs=True), "fp8": Layout("fp8", 0),
          "int8": Layout("int8", 0), "int4 by 128": Layout("int4", 128, True), "int4 by 32": Layout("int4", 32, True)}
CASES = [[decode(1, 1024)], [decode(32, 1024)], [chunk(2048, 2048)]]


class RandomWeights(RandomTensors):
    """A `PackedSource` of whatever a model asks for. `layout`: of the layers' matrices; its group 0: a scale a row."""

    def __init__(self, config: ModelConfig, device: str, layout: Layout | None = None):
        self._only_experts = bool(config.value("num_experts_per_tok"))
        asked = Weights(_Nothing(), torch.bfloat16, torch.device("meta"))
        NATIVE[config.architecture](config, asked, 16)
        super().__init__({copy.name: copy.shape for copy in asked._copies}, device)
        self._layout = layout

    def layout(self, name: str) -> Layout | None:
        shape, expert = self._shapes[name], "experts" in name
        dimensions = 3 if self._layout is not None and self._layout.kind == "fp4" else 2
        if self._layout is None or ".layers." not in name or len(shape) != dimensions or name.endswith("bias"):
            return None
        if self._only_experts and not expert:
            return None
        group = self._layout.group or shape[1]
        return Layout(self._layout.kind, group, self._layout.offsets, self._layout.eight_bit_inputs)

    def packed(self, name: str) -> Packed:
        layout, shape = self.layout(name), self._shapes[name]
        assert layout is not None
        outputs, inputs = shape if len(shape) == 2 else (shape[0] * shape[2], shape[1])
        made = Packed.empty(layout, outputs, inputs, torch.float32, torch.device(self._device))
        if layout.kind == "fp8":
            made.codes.copy_(torch.randn(outputs, inputs, device=self._device).to(made.codes.dtype))
        else:
            made.codes.view(torch.uint8).random_(0, 256)
        made.scales.fill_(inputs**-0.5 / {"int4": 4, "fp4": 2, "int8": 64, "fp8": 1}[layout.kind])
        if made.offsets is not None:
            made.offsets.fill_(0.5 * inputs**-0.5 / 4)
        return made

    def told(self, dtype: torch.dtype) -> None:
        """Nothing was stored in another way than asked for."""


class _Nothing:
    """A source that has no tensor."""

    def names(self) -> Iterable[str]:
        return ()


@dataclass(frozen=True)
class Made:
    """A model that can be timed, and what a step of it moves at least."""

    lab: Lab
    config: ModelConfig
    weights: int  # bytes of the layers, experts left out
    numbers: int  # in them
    expert: int  # bytes of one expert
    expert_numbers: int
    cell: int  # bytes of KV of a token, of layers without a window
    window_cell: int
    rate: float = 1.0  # how many times as fast as in bfloat16 the layers' matrices may be multiplied

    @torch.inference_mode()
    def touched(self, rows: list[Rows]) -> float:
        """Experts of a layer that the step asks for, on average over the layers: counted in a run of the step."""
        counts: list[int] = []
        tokens = sum(r.count * r.tokens for r in rows)
        layers = [layer.mlp for layer in self.lab.runner.model.decoder if isinstance(layer.mlp, ExpertMLP)]

        def counting(route: Route, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
            weights, chosen = route(logits, k)
            counts.append(len(chosen[:tokens].unique()))
            return weights, chosen

        routes = [mlp._route for mlp in layers]
        for mlp, route in zip(layers, routes, strict=True):
            mlp._route = partial(counting, route)
        plan, shape = self.lab.prepare(rows)
        bucket = bucketed(shape)
        padded = torch.zeros(bucket.rows, 3, dtype=torch.int32, device="cuda")
        padded[: len(plan)] = plan
        self.lab.runner.run(padded, bucket)
        for mlp, route in zip(layers, routes, strict=True):
            mlp._route = route
        return sum(counts) / max(1, len(counts))

    def limit(self, rows: list[Rows], read: float, multiply: float) -> float:
        """Seconds at the rates of the device."""
        c = self.config
        tokens, out = sum(r.count * r.tokens for r in rows), sum(r.count * max(r.sampled, 1) for r in rows)
        n, chosen = experts_of(self.config)
        touched = self.touched(rows) if n else 0.0
        active = 2 * (self.numbers + chosen * self.expert_numbers * c.n_layers)
        stored = self.weights + touched * self.expert * c.n_layers
        head = 2 * c.hidden_size * c.vocab_size
        window = next((w for w in c.windows if w is not None), 0)
        cells = sum(r.count * (r.context * self.cell + min(r.context, window) * self.window_cell) for r in rows)
        pairs = sum(r.tokens * (r.tokens + 1) / 2 for r in rows if r.tokens > 17)
        return (max(stored / read, active * tokens / multiply / self.rate) + max(head / read, head * out / multiply)
                + max(cells / read, 4 * c.n_layers * c.n_heads * c.head_dim * pairs / multiply))


def experts_of(config: ModelConfig) -> tuple[int, int]:
    """How many experts a layer has, and how many a token chooses."""
    count = config.raw.get("num_experts") or config.raw.get("num_local_experts") or 0
    return count, config.raw.get("num_experts_per_tok", 0) if count else 0


def make(architecture: str, shape: dict, seqs: int, cells: int, context: int, layout: Layout | None = None,
         cell_type: str = "bfloat16", page: int = 16) -> Made:
    """A model of random weights, with slot table and KV memory for `seqs` rows of together `cells` cells."""
    config = ModelConfig.from_hf(shape | {"architectures": [f"{architecture}ForCausalLM"]})
    source, device = RandomWeights(config, "cuda", layout), torch.device("cuda")
    parts = parts_of(config, source)
    model = build_model(config, source, torch.bfloat16, device, context=context)
    groups = group_layers(model.layers)
    kv = KVCache(model.layers, groups, [-(-cells // page) + seqs] * len(groups), page, kv_dtype(cell_type), device)
    for part in (*kv.k, *kv.v):
        part.copy_(torch.randn(part.shape, device=device, dtype=torch.bfloat16).to(part.dtype))
    for pair in kv.scales:
        for exponents in pair or ():
            exponents.fill_(127)
    backend = choose_backend(model.layers, page, device, model.dtype, kv_dtype=cell_type)
    runner = Runner(model, backend, kv, SlotTable(seqs + 1, context, page, len(groups), device))
    each = {group.window is None: bytes_per_token(model.layers, group, kv.dtype) for group in groups}
    eight = layout is not None and layout.eight_bit_inputs
    return Made(Lab(runner, GraphExecutor(runner, LARGEST_GRAPH), config), config, *parts, each.get(True, 0),
                each.get(False, 0), 2.0 if eight else 1.0)


def parts_of(config: ModelConfig, source: RandomWeights) -> tuple[int, int, int, int]:
    """Bytes of the layers without experts, and numbers in them; bytes of one expert, and numbers in it."""
    declared = Weights(source, torch.bfloat16, torch.device("meta"), kernels="cuda")
    NATIVE[config.architecture](config, declared, 16)
    layers = [copy for copy in declared._copies if ".layers." in copy.name]
    rest, experts = ([c.target for c in layers if ("experts" in c.name) == wanted] for wanted in (False, True))
    count = max(1, experts_of(config)[0] * config.n_layers)
    return (sum(t.nbytes for t in rest), sum(t.numel() for t in rest), sum(t.nbytes for t in experts) // count,
            sum(t.numel() for t in experts) // count)


def measure(name: str, made: Made, cases: list[list[Rows]], rates: tuple[float, float]) -> Iterable[dict]:
    for rows in cases:
        seconds, limit = made.lab.time(rows), made.limit(rows, *rates)
        (first,) = rows
        yield {"model": name, "rows": first.count, "tokens": first.tokens, "context": first.context,
               "us": round(seconds * 1e6, 1), "limit_us": round(limit * 1e6, 1), "share": round(limit / seconds, 3)}


def families() -> Iterable[tuple[str, Callable[[], Made], list[list[Rows]]]]:
    for name, shape in FAMILIES.items():
        yield name, lambda name=name, shape=shape: make(name, shape, 33, 40_000, 2200), CASES


def experts() -> Iterable[tuple[str, Callable[[], Made], list[list[Rows]]]]:
    for name, layouts in {"Qwen3Moe": (None, Layout("fp8", 128)), "GptOss": (None, Layout("fp4", 32))}.items():
        for layout in layouts:
            title = name if layout is None else f"{name}, experts {layout.kind} by {layout.group}"
            yield title, lambda name=name, layout=layout: make(name, EXPERTS[name], 33, 40_000, 2200, layout), CASES


def packed() -> Iterable[tuple[str, Callable[[], Made], list[list[Rows]]]]:
    for name, layout in PACKED.items():
        yield f"Llama, weights {name}", lambda layout=layout: make("Llama", EIGHT, 33, 40_000, 2200, layout), CASES


def cells() -> Iterable[tuple[str, Callable[[], Made], list[list[Rows]]]]:
    for kind in ("bfloat16", "fp8_e4m3"):
        yield f"Llama, cells {kind}", lambda kind=kind: make(
            "Llama", EIGHT, 65, 65 * 4160, 8256, None, kind), [[decode(1, 8192)], [decode(64, 4096)],
                                                               [chunk(2048, 2048)]]


SECTIONS = {"packed": packed, "experts": experts, "cells": cells, "families": families}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--kernels", action="store_true", help="print the kernels of each step by time")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.cuda.set_stream(torch.cuda.Stream())  # graphs are not captured on the default stream
    rates, found = (read_rate(), multiply_rate()), []
    print(f"{torch.cuda.get_device_name()}: reads {rates[0] / 1e12:.2f} TB/s, multiplies {rates[1] / 1e12:.0f} TFLOP/s")
    for section in args.only:
        for name, built, cases in SECTIONS[section]():
            try:
                made = built()
                for row in measure(name, made, cases, rates):
                    found.append(row)
                    print(json.dumps(row), flush=True)
                for rows in cases if args.kernels else ():
                    print_kernels(made.lab.record(rows), f"{name}, {rows}", 1)
            except Exception as e:  # the others are still worth their time
                print(f"{name}: {type(e).__name__}: {e}", flush=True)
            torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(
            {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
             "time": time.strftime("%Y-%m-%d %H:%M"), "read_bytes_s": rates[0], "multiply_ops_s": rates[1],
             "steps": found}, indent=1))


if __name__ == "__main__":
    main()
