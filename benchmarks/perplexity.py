"""Perplexity of a text under ways of keeping and computing a model, beside transformers.

    python -m benchmarks.perplexity --data ../shared/data/corpora/wikitext-2/test.txt
    python -m benchmarks.perplexity Qwen/Qwen3-0.6B --data text.txt --tokens 65536 --ways float32 bfloat16 fp8-cells

Ways whose weights are quantised here write a checkpoint in the layout of compressed-tensors, rounded to nearest without
calibration, and read it back: what they cost is rounding alone, and more than calibrated checkpoints cost.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from stretto.bench.perplexity import (
    Perplexity,
    engine_perplexity,
    reference_model,
    reference_perplexity,
    windows_of,
)
from stretto.config import Config, ModelSection
from stretto.engine.llm import LLM
from stretto.engine.locate import locate
from stretto.text.tokenizer import load_tokenizer

GROUP = 32


@dataclass(frozen=True)
class Way:
    """Options of the engine; `stored`: how the weights are stored first; `beside`: the type of transformers' model that
    it is measured against."""

    options: dict = field(default_factory=dict)
    stored: str | None = None
    beside: str = "float32"


WAYS = {
    "float32": Way({"dtype": "float32"}),
    "bfloat16": Way({"dtype": "bfloat16"}, beside="bfloat16"),
    "fp8-cells": Way({"dtype": "float32", "kv_cache_dtype": "fp8_e4m3"}),
    "bfloat16-cells": Way({"dtype": "float32", "kv_cache_dtype": "bfloat16"}),
    "bfloat16-fp8-cells": Way({"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}),
    "int8": Way({"dtype": "bfloat16"}, "int8"),
    "int4": Way({"dtype": "bfloat16"}, "int4"),
    "fp8": Way({"dtype": "bfloat16"}, "fp8"),
}


def quantised(model: transformers.PreTrainedModel, folder: Path, kind: str) -> Path:
    """A checkpoint of the model whose projections are int8 or fp8 with a scale a row, or int4 with a scale a group."""
    tensors = {}
    for name, weight in model.state_dict().items():
        base = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            tensors[name] = weight.clone()
        elif kind == "int4":
            groups = weight.float().view(len(weight), -1, GROUP)
            scale = groups.abs().amax(-1) / 7
            values = (groups / scale[..., None]).round().clamp(-8, 7).add(8).view(weight.shape).to(torch.int64)
            words = sum(values[:, i::8] << (4 * i) for i in range(8))
            tensors |= {f"{base}.weight_packed": (words - ((words >> 31) << 32)).to(torch.int32),
                        f"{base}.weight_scale": scale.bfloat16(), f"{base}.weight_shape": torch.tensor(weight.shape)}
        else:
            top, dtype = (127, torch.int8) if kind == "int8" else (448, torch.float8_e4m3fn)
            scale = weight.float().abs().amax(1, keepdim=True) / top
            values = weight.float() / scale
            tensors |= {name: (values.round() if kind == "int8" else values).to(dtype), f"{base}.weight_scale": scale}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    weights = {"int8": {"num_bits": 8, "type": "int", "strategy": "channel"},
               "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
               "fp8": {"num_bits": 8, "type": "float", "strategy": "channel"}}[kind]
    given = {"quant_method": "compressed-tensors", "format": {
        "int8": "int-quantized", "int4": "pack-quantized", "fp8": "float-quantized"}[kind],
        "config_groups": {"group_0": {"weights": weights}}}
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "quantization_config": given}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder


def run(way: Way, path: Path, tokenizer: Path, windows: list[list[int]], device: str) -> tuple[Perplexity, float]:
    """Perplexity and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        if way.stored is not None:
            path = quantised(reference_model(path, torch.float32), Path(folder), way.stored)
            gc.collect()
        with LLM(str(path), tokenizer=str(tokenizer), device=device, max_model_len=len(windows[0]) + 1,
                 **way.options) as llm:
            started = time.perf_counter()
            return engine_perplexity(llm, windows), time.perf_counter() - started


def rows(args: argparse.Namespace) -> Iterable[dict]:
    located = locate(Config(model=ModelSection(args.model)))
    tokenizer = load_tokenizer(located.tokenizer_path)
    windows = windows_of(tokenizer.encode(args.data.read_text()), args.window, args.tokens)
    references: dict[str, Perplexity] = {}
    for dtype in dict.fromkeys(["float32", *(WAYS[name].beside for name in args.ways)]):
        model = reference_model(located.path, getattr(torch, dtype)).to(args.device)
        references[dtype] = reference_perplexity(model, windows)
        del model
        gc.collect()
        yield {"what": f"transformers, {dtype}", "tokens": references[dtype].tokens,
               "perplexity": round(references[dtype].value, 4)}
    for name in args.ways:
        found, seconds = run(WAYS[name], located.path, located.tokenizer_path, windows, args.device)
        yield {"what": name, "tokens": found.tokens, "perplexity": round(found.value, 4), "beside": WAYS[name].beside,
               "off": round(found.off(references[WAYS[name].beside]), 6),
               "off_float32": round(found.off(references["float32"]), 6), "tokens_s": round(found.tokens / seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder, .gguf file or hub id; the default model")
    parser.add_argument("--data", type=Path, required=True, help="a text file")
    parser.add_argument("--tokens", type=int, default=16384, help="at most so many, from the beginning")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for row in rows(args):
        found.append(row)
        print(json.dumps(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "data": args.data.name, "window": args.window,
                                         "torch": torch.__version__, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
