"""What --deterministic costs: whole engines of one random model, with and without it, on a GPU or a CPU.

    python -m benchmarks.deterministic                     # on a GPU: an 8B shape; on a CPU: the default model's
    python -m benchmarks.deterministic --shape qwen3-0.6b --json results.json

Cases are (requests, tokens of each prompt, tokens of each answer), greedy. Every case runs once to warm up, then
REPEATS times in turn with the other mode; the best wall time and the best processor time count.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch

from benchmarks.engine_gpu import SHAPES, RandomSource
from stretto.attn.select import choose_backend
from stretto.device.kv import KVCache, group_layers
from stretto.device.runner import Runner
from stretto.device.slots import SlotTable
from stretto.device.streams import make_device
from stretto.engine.core import EngineCore
from stretto.host.half import HostHalf
from stretto.host.limits import HostLimits
from stretto.model.api import CausalModel
from stretto.model.config import ModelConfig
from stretto.model.load import build_model
from stretto.params import SamplingParams
from stretto.protocol import EngineInfo, Request

REPEATS, PAGE, CONTEXT = 3, 16, 4608
SMALL = dict(architectures=["LlamaForCausalLM"], rms_norm_eps=1e-5, max_position_embeddings=8192, hidden_size=576,
             intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
             vocab_size=49152, tie_word_embeddings=True)  # SmolLM2-135M
CASES = {"cuda": [(1, 64, 256), (16, 64, 256), (64, 64, 256), (256, 64, 128), (1, 4096, 64), (16, 4096, 64),
                  (8, 4096, 1)],
         "cpu": [(1, 16, 32), (8, 16, 32), (1, 512, 2), (16, 64, 16)]}


def make_engine(model: CausalModel, fixed: bool, tokens: int, slots: int) -> EngineCore:
    """An engine whose pool holds so many tokens."""
    groups, pages = group_layers(model.layers), -(-tokens // PAGE) + 1
    kv = KVCache(model.layers, groups, (pages,) * len(groups), PAGE, model.dtype, model.device)
    table = SlotTable(slots + 1, CONTEXT, PAGE, len(groups), model.device)
    runner = Runner(model, choose_backend(model.layers, PAGE, model.device, model.dtype, fixed), kv, table)
    host = HostLimits(page_size=PAGE, pages=(pages,) * len(groups), windows=tuple(g.window for g in groups),
                      max_slots=slots + 1, max_model_len=CONTEXT, prefix_cache=False,
                      budget=8192 if model.device.type == "cuda" else 512,
                      chunk=2048 if model.device.type == "cuda" else 512)
    info = EngineInfo(model_name="random", vocab_size=model.vocab_size, max_model_len=CONTEXT, max_num_seqs=slots,
                      kv_tokens=host.kv_tokens, eos_token_ids=[])
    return EngineCore(HostHalf(host), make_device(runner, True), info, 1)


def play(engine: EngineCore, case: tuple[int, int, int], seed: int) -> tuple[float, float]:
    """(wall, processor) seconds of one case."""
    count, prompt, answer = case
    rng = random.Random(seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=answer)
    started, used = time.perf_counter(), time.process_time()
    for i in range(count):
        tokens = [rng.randrange(engine.info.vocab_size) for _ in range(prompt)]
        engine.submit(Request(rid=f"{seed}-{i}", tokens=tokens, sampling=sampling, want_text=False))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started, time.process_time() - used


def measure(models: dict[bool, CausalModel], case: tuple[int, int, int]) -> dict:
    count, prompt, answer = case
    best: dict[bool, tuple[float, float]] = {}
    engines = {fixed: make_engine(model, fixed, count * (prompt + answer + PAGE), count)
               for fixed, model in models.items()}
    for repeat in range(REPEATS + 1):
        for fixed, engine in engines.items():
            wall, cpu = play(engine, case, repeat)
            if repeat:  # the first one compiles, captures and warms up
                old = best.get(fixed, (wall, cpu))
                best[fixed] = min(old[0], wall), min(old[1], cpu)
    for engine in engines.values():
        engine.close()
    return {"requests": count, "prompt": prompt, "answer": answer, "wall": best[False][0],
            "wall_deterministic": best[True][0], "ratio": best[True][0] / best[False][0],
            "cpu_ratio": best[True][1] / best[False][1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    shape = SHAPES[options.shape] if on_gpu else SMALL
    config = ModelConfig.from_hf(shape)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    found = []
    with torch.inference_mode():
        models = {}
        for fixed in (False, True):
            source = RandomSource(config, bool(shape["tie_word_embeddings"]), device.type)
            models[fixed] = build_model(config, source, dtype, device, context=CONTEXT, fixed=fixed)
        print("| requests | prompt | answer | usual | deterministic | ratio | processor time |")
        print("|--:|--:|--:|--:|--:|--:|--:|")
        for case in CASES[device.type]:
            found.append(row := measure(models, case))
            print(f"| {row['requests']} | {row['prompt']} | {row['answer']} | {row['wall']:.3f} s |"
                  f" {row['wall_deterministic']:.3f} s | {row['ratio']:.2f} | {row['cpu_ratio']:.2f} |", flush=True)
            if options.json:
                options.json.write_text(json.dumps({"device": str(device), "cases": found}, indent=1))


if __name__ == "__main__":
    main()
