"""What grammars cost a decode step on a GPU, and whether the forward pass still overlaps the making of masks.

    python -m benchmarks.grammars_gpu [--shape llama-8b] [--rows 64] [--drafts 0] [--steps 100] [--json out.json]

Random weights of a public shape, and a vocabulary as large as the shape's, made of pieces of the standard library's
source. Each kind of answer is timed REPEATS times, in turn with free text: the median over steps in which every row
decodes. Of a step: how long its masks took to make, and to make and send; how long the host then waited for the device
(a step that waits is as long as the device's work, so its masks cost nothing but what the device does with them).
`beside the step` counts the late masks that were made while the device ran: all but the first of each run.
"""

from __future__ import annotations

import argparse
import json
import os
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
from stretto.wire import LateMask, StepPlan

REPEATS, PROMPT, LEAD = 2, 256, 24  # LEAD: steps before those that are timed
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
    "regex of addresses": [Grammar("regex", r"([\w.+-]{1,64}@[\w-]{1,63}(\.[\w-]{1,63})+ )*!{2000}")],
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

    def encode_inside(self, text: str) -> list[int]:
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
    cores = f"{len(os.sched_getaffinity(0))} cores of {os.cpu_count()}"
    print(f"{cores}; {size:,} ids and {len(all_of_them)} grammars in {time.perf_counter() - before:.1f} s",
          flush=True)
    return core


class Clock:
    """Seconds of each step, and of its parts: `masks` made, made and `sent`, the host's `wait` for the device."""

    def __init__(self, core: EngineCore):
        self.core, self.steps = core, list[dict[str, float]]()
        self._masks, make = 0.0, core.host.mask

        def timed(plan: StepPlan) -> LateMask:
            before = time.perf_counter()
            mask = make(plan)
            self._masks += time.perf_counter() - before
            return mask

        core.host.mask = timed  # type: ignore[method-assign]

    def step(self) -> None:
        core = self.core
        before = time.perf_counter(), self._masks, core.mask_seconds, core.wait_seconds
        core.step()
        after = time.perf_counter(), self._masks, core.mask_seconds, core.wait_seconds
        self.steps.append(dict(zip(("step", "masks", "sent", "wait"), (b - a for a, b in zip(before, after)))))

    def medians(self) -> dict[str, float]:
        """In milliseconds, of the steps since the last time."""
        steps, self.steps = self.steps, []
        return {part: 1e3 * statistics.median(step[part] for step in steps) for part in steps[0]}


def run(clock: Clock, name: str, rows: int, steps: int, serial: list[int]) -> dict[str, float]:
    """Medians of steps in which every row decodes, late masks, and automata that made the masks in the end."""
    core, grammars = clock.core, GRAMMARS[name]
    generator = torch.Generator().manual_seed(serial[0])
    for i in range(rows):
        serial[0] += 1
        tokens = torch.randint(0, 256, (PROMPT,), generator=generator).tolist()
        sampling = SamplingParams(temperature=0.8, seed=serial[0], max_tokens=LEAD + steps * 8 + 64, ignore_eos=True,
                                  grammar=grammars[i % len(grammars)])
        core.submit(Request(rid=str(serial[0]), tokens=tokens, want_text=False, sampling=sampling))
    for _ in range(-(-rows * PROMPT // core.host.limits.budget) + LEAD):
        core.step()
    before = core.late_masks, core.late_masks_overlapped
    for _ in range(steps):
        clock.step()
    found = clock.medians() | {"late_masks": core.late_masks - before[0],
                               "overlapped": core.late_masks_overlapped - before[1]}
    turns = core.host.slots.running
    assert len(turns) == rows, f"of {rows} rows {len(turns)} still run"
    found["automata"] = len({turn.grammar.automaton for turn in turns if turn.grammar is not None})
    for i in range(rows):
        core.abort(str(serial[0] - i))
    while core.has_work:
        core.step()
    return found


def measure(core: EngineCore, rows: int, steps: int) -> list[dict]:
    """The quickest run of each kind of answer. The first round captures and warms up."""
    best: dict[str, dict] = {}
    clock, serial = Clock(core), [0]
    for repeat in range(REPEATS + 1):
        for name in GRAMMARS:
            found = run(clock, name, rows, steps, serial)
            print(f"{repeat} {name}: " + ", ".join(f"{k} {v:.2f}" for k, v in found.items()), flush=True)
            if repeat and (name not in best or found["step"] < best[name]["step"]):
                best[name] = found
    free = best["free text"]["step"]
    return [{"answers": name, "rows": rows, "overhead": found["step"] / free - 1} | found
            for name, found in best.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--answers", nargs="+", help="only those whose names contain one of these; free text always")
    args = parser.parse_args()
    for name in list(GRAMMARS):
        if args.answers and name != "free text" and not any(part in name for part in args.answers):
            del GRAMMARS[name]
    context = PROMPT + LEAD + 8 * args.steps + 80
    core, _ = build_core(args.shape, args.rows, args.rows * (context + 64), context,
                         drafter=NgramDrafter(args.drafts) if args.drafts else None)
    with_grammars(core)
    found = measure(core, args.rows, args.steps)
    print("| answers | a step, ms | more than free text | masks made, ms | and sent | wait | beside the step |"
          " automata |\n"
          "|---|--:|--:|--:|--:|--:|--:|--:|")
    for row in found:
        print(f"| {row['answers']} | {row['step']:.2f} | {100 * row['overhead']:.1f} % | {row['masks']:.2f} |"
              f" {row['sent']:.2f} | {row['wait']:.2f} | {row['overlapped']} of {row['late_masks']} |"
              f" {row['automata']} |")
    if args.json:
        args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "shape": args.shape,
                                         "drafts": args.drafts, "cases": found}, indent=1))
    core.close()


if __name__ == "__main__":
    main()
