"""What grammars cost a decode step on a GPU, and whether the forward pass still overlaps the making of masks.

    python -m benchmarks.grammars_gpu [--shape llama-8b] [--rows 64] [--drafts 0] [--steps 200] [--json out.json]

Random weights of a public shape, and a vocabulary as large as the shape's, made of pieces of the standard library's
source. Each kind of answer is timed REPEATS times, in turn with free text: the median over steps in which every row
decodes. `overlapped` counts the late masks that were made while the device ran: all but the first of each run.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_gpu import build_core
from benchmarks.grammars import record, schema
from stretto.engine.core import EngineCore
from stretto.host.grammar import Grammars
from stretto.host.half import HostHalf
from stretto.params import Grammar, SamplingParams
from stretto.protocol import Request
from stretto.spec.ngram import NgramDrafter
from stretto.text.grammar import vocabulary

REPEATS, PROMPT, LEAD = 3, 256, 12  # LEAD: steps before those that are timed
SOURCE_FILES = 1500
KINDS: list[dict[str, Any]] = [
    {"type": "string"}, {"type": "integer", "minimum": 0, "maximum": 999}, {"type": "boolean"}, {"type": "number"},
    {"type": "string", "format": "date-time"}, {"enum": ["red", "green", "blue"]},
    {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}]
OWN = 64  # schemas, of which each row has one
GRAMMARS: dict[str, list[Grammar | None]] = {
    "free text": [None],
    "objects of 7 kinds": [schema({"type": "array", "minItems": 2000, "items": {
        "type": "object", "properties": {f"f{i}": kind for i, kind in enumerate(KINDS)},
        "required": [f"f{i}" for i in range(len(KINDS))], "additionalProperties": False}})],
    "objects of 10 strings": [schema({"type": "array", "minItems": 2000, "items": record(10, {"type": "string"})})],
    "a schema of its own each": [schema({"type": "array", "minItems": 2000, "items": record(
        3 + n % 7, KINDS[n % len(KINDS)] if n % 2 else {"type": "string", "maxLength": 30 + n})}) for n in range(OWN)],
    "regex": [Grammar("regex", r"([a-z]{1,9}[ .,])*!{2000}")],
}


class Pieces:
    """A tokenizer of so many ids: the bytes, the most frequent pieces of the standard library, and pairs of them."""

    bos_token_id: int | None = None

    def __init__(self, size: int):
        self.end, self.special_ids = size - 1, frozenset({size - 1})
        self._bytes = [bytes([i]) for i in range(256)]
        known = set(self._bytes)
        for piece in self._pieces():
            if len(self._bytes) == size - 1:
                break
            if piece not in known:
                known.add(piece)
                self._bytes.append(piece)

    @staticmethod
    def _pieces() -> Iterator[bytes]:
        found: Counter[str] = Counter()
        for file in islice(sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")), SOURCE_FILES):
            text = file.read_text(encoding="utf-8", errors="ignore")
            found.update(re.findall(r" ?[A-Za-z]{1,12}|[0-9]{1,3}|[^\w\s]{1,4}|\s{1,16}", text))
        frequent = [piece.encode() for piece, _ in found.most_common()]
        yield from frequent
        for first in frequent[:2000]:
            for second in frequent[:2000]:
                yield first + second

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == self.end else self._bytes[token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())  # bytes are ids; nothing here depends on a better cut


def with_grammars(core: EngineCore) -> EngineCore:
    size = core.info.vocab_size
    tokenizer = Pieces(size)
    before = time.perf_counter()
    grammars = Grammars(lambda: vocabulary(tokenizer, size, [tokenizer.end]), size)
    core.host = HostHalf(replace(core.host.limits, eos_token_ids=frozenset({tokenizer.end})), None, grammars)
    all_of_them = [grammar for of in GRAMMARS.values() for grammar in of if grammar is not None]
    for grammar in all_of_them:
        grammars.state(grammar).compiled.result(timeout=120)
    print(f"{size:,} ids and {len(all_of_them)} grammars in {time.perf_counter() - before:.1f} s", flush=True)
    return core


def times(core: EngineCore, name: str, rows: int, steps: int, serial: list[int]) -> tuple[list[float], int]:
    """Seconds of each step in which every row decodes, and automata that made the masks in the end."""
    generator = torch.Generator().manual_seed(serial[0])
    grammars = GRAMMARS[name]
    for i in range(rows):
        serial[0] += 1
        tokens = torch.randint(0, 256, (PROMPT,), generator=generator).tolist()
        sampling = SamplingParams(temperature=0.8, seed=serial[0], max_tokens=LEAD + steps * 8 + 64, ignore_eos=True,
                                  grammar=grammars[i % len(grammars)])
        core.submit(Request(rid=str(serial[0]), tokens=tokens, want_text=False, sampling=sampling))
    for _ in range(-(-rows * PROMPT // core.host.limits.budget) + LEAD):
        core.step()
    found = []
    for _ in range(steps):
        before = time.perf_counter()
        core.step()
        found.append(time.perf_counter() - before)
    turns = core.host.slots.running
    assert len(turns) == rows, f"of {rows} rows {len(turns)} still run"
    automata = len({turn.grammar.automaton for turn in turns if turn.grammar is not None})
    for i in range(rows):
        core.abort(str(serial[0] - i))
    while core.has_work:
        core.step()
    return found, automata


def measure(core: EngineCore, rows: int, steps: int) -> list[dict]:
    medians: dict[str, list[float]] = {name: [] for name in GRAMMARS}
    counts: dict[str, Counter[str]] = {name: Counter() for name in GRAMMARS}
    serial = [0]
    for repeat in range(REPEATS + 1):
        for name in GRAMMARS:
            before = core.late_masks, core.late_masks_overlapped, core.mask_seconds
            found, automata = times(core, name, rows, steps, serial)
            counts[name]["automata"] = automata
            if repeat:  # the first one captures and warms up
                medians[name].append(statistics.median(found))
                counts[name]["masks"] += core.late_masks - before[0]
                counts[name]["overlapped"] += core.late_masks_overlapped - before[1]
                counts[name]["us"] += round(1e6 * (core.mask_seconds - before[2]))
    free = min(medians["free text"])
    return [{"answers": name, "rows": rows, "step_ms": 1e3 * min(of), "steps_ms": [1e3 * s for s in of],
             "overhead": min(of) / free - 1, "late_masks": counts[name]["masks"],
             "overlapped": counts[name]["overlapped"], "automata": counts[name]["automata"],
             "mask_ms": counts[name]["us"] / 1e3 / max(counts[name]["masks"], 1)}
            for name, of in medians.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    context = PROMPT + LEAD + 8 * args.steps + 80
    core, _ = build_core(args.shape, args.rows, args.rows * (context + 64), context,
                         drafter=NgramDrafter(args.drafts) if args.drafts else None)
    with_grammars(core)
    found = measure(core, args.rows, args.steps)
    print("| answers | a step, ms | more than free text | late masks | made beside the step | each, ms | automata |\n"
          "|---|--:|--:|--:|--:|--:|--:|")
    for row in found:
        print(f"| {row['answers']} | {row['step_ms']:.2f} | {100 * row['overhead']:.1f} % | {row['late_masks']} |"
              f" {row['overlapped']} | {row['mask_ms']:.2f} | {row['automata']} |")
    if args.json:
        args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "shape": args.shape,
                                         "drafts": args.drafts, "cases": found}, indent=1))
    core.close()


if __name__ == "__main__":
    main()
