"""Times grammars over a real vocabulary: its index, each grammar's compilation, and the masks along random answers.

    python -m benchmarks.grammars --tokenizer FOLDER
    python -m benchmarks.grammars --train peps.txt.xz books.txt.xz --tokenizer FOLDER      trains one of 151,936 tokens

"refused" is what the limits of `stretto.text.grammar` make of a grammar that costs too much. No torch, no model.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLTokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from stretto.params import Grammar
from stretto.text.grammar import MAX_CHOICES, GrammarError, compiled, vocabulary
from stretto.text.masks import MaskAsk, MaskMaker
from stretto.text.tokenizer import load_tokenizer

SIZE, END = 151_936, "<|endoftext|>"
WALKS, STEPS = 4, 60  # answers of each grammar, tokens of each
ROWS = 64


def schema(value: Any, **more: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value), **more)


def record(n: int, each: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {f"field_{i}": each for i in range(n)},
            "required": [f"field_{i}" for i in range(n)], "additionalProperties": False}


TREE = {"$ref": "#/$defs/node", "$defs": {"node": record(2, {"anyOf": [
    {"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/node"}}]})}}
GRAMMARS: dict[str, Grammar] = {
    "any JSON object": schema({"type": "object"}),
    "10 strings": schema(record(10, {"type": "string"})),
    "100 fields of 8 kinds": schema({"type": "object", "properties": {f"f{i}": kind for i in range(100) for kind in [[
        {"type": "string"}, {"type": "integer", "minimum": 0, "maximum": 999}, {"type": "boolean"},
        {"type": "string", "format": "date-time"}, {"enum": ["red", "green", "blue"]}, {"type": "number"},
        {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
        {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}][i % 8]]}}),
    "recursive": schema(TREE), "maxLength 100,000": schema({"type": "string", "maxLength": 100_000}),
    "multipleOf 1,000": schema({"type": "integer", "multipleOf": 1000}),
    "multipleOf 20,000": schema({"type": "integer", "multipleOf": 20_000}),
    "enum of 10,000": schema({"enum": [f"choice number {i}" for i in range(10_000)]}),
    "100 choices": Grammar("choice", json.dumps([f"choice number {i}" for i in range(100)])),
    f"{MAX_CHOICES:,} choices": Grammar("choice", json.dumps([f"choice number {i}" for i in range(MAX_CHOICES)])),
    "regex, e-mail": Grammar("regex", r"[\w.+-]{1,64}@[\w-]{1,63}(\.[\w-]{1,63})+"),
    "regex, 5 words of 2,000": Grammar("regex", r"(\w{1,2000} ){5}"),
    "free text, then a call": Grammar("lark", 'start: before %json {"type": "object"} REST\n'
                                              "before[lazy]: /(.|\\n)*CALL/\nREST: /(.|\\n)*/"),
    "bomb": Grammar("regex", "(c{1000}){1000}{1000}"),
}


def lines(files: list[Path]) -> Iterator[str]:
    for file in files:
        with lzma.open(file, "rt", encoding="utf-8") if file.suffix == ".xz" else open(file, encoding="utf-8") as text:
            yield from text.read(40_000_000).splitlines()


def train(files: list[Path], folder: Path) -> None:
    """A byte-level BPE tokenizer of SIZE tokens, about a minute."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(lines(files), trainers.BpeTrainer(
        vocab_size=SIZE, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


def walk(matcher: Any, rng: random.Random, times: list[float]) -> None:
    """One random answer; the time of each of its masks, in microseconds, is added to `times`."""
    for _ in range(STEPS):
        before = time.perf_counter()
        mask = matcher.compute_bitmask()
        times.append((time.perf_counter() - before) * 1e6)
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        if not allowed.size or matcher.is_stopped():
            return
        matcher.try_consume_tokens([int(rng.choice(allowed))])


def batch(matcher: Any, maker: MaskMaker) -> float:
    """Milliseconds for the masks of ROWS rows at once."""
    asks = [MaskAsk(i, matcher.deep_copy(), []) for i in range(ROWS)]
    times = []
    for seq in range(5):
        before = time.perf_counter()
        maker.make(seq, ROWS, asks)
        times.append((time.perf_counter() - before) * 1e3)
    return statistics.median(times)


def measure(name: str, grammar: Grammar, tokens: LLTokenizer, maker: MaskMaker) -> str:
    before = time.perf_counter()
    try:
        matcher = compiled(grammar, tokens)
    except GrammarError as e:
        return f"| {name} | {time.perf_counter() - before:.3f} | refused: {str(e).partition(':')[0]} | | | |"
    took, times = time.perf_counter() - before, list[float]()
    for seed in range(WALKS):
        walk(matcher.deep_copy(), random.Random(seed), times)
    times.sort()
    return (f"| {name} | {took:.3f} | {statistics.median(times):.0f} | {times[int(0.99 * (len(times) - 1))]:.0f} |"
            f" {times[-1]:.0f} | {batch(matcher, maker):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--train", type=Path, nargs="+", default=[])
    args = parser.parse_args()
    if args.train:
        train(args.train, args.tokenizer)
    tokenizer = load_tokenizer(args.tokenizer)
    before = time.perf_counter()
    tokens = vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    print(f"{tokenizer.vocab_size:,} tokens, indexed in {time.perf_counter() - before:.2f} s\n")
    print(f"| grammar | compiled, s | mask, us: median | 99 % | most | {ROWS} rows, ms |\n|---|--:|--:|--:|--:|--:|")
    maker = MaskMaker(tokenizer.vocab_size)
    for name, grammar in GRAMMARS.items():
        print(measure(name, grammar, tokens, maker), flush=True)


if __name__ == "__main__":
    main()
