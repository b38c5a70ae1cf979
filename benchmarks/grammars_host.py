"""What grammars cost the host in a decode step, in processor time, and whether masks come in time for the device.

    python -m benchmarks.grammars_host --tokenizer FOLDER [--rows 64] [--steps 60] [--threads 1] [--without]

No model: each row's id is drawn from its mask, as by a model that knows nothing. Timed of each step, after a warm-up:
what the host does between a result and its mask, for all rows. The grammars take the ids, tell what is forced, and the
masks are made. Processor time counts all threads; the wall time is what the device would wait for, where it is longer
than the forward pass beside which masks are made (`--step`, less the tail of a step that needs the mask).

    result N | take ids, masks N + 1 .......... |  plan N + 2
    forward of N + 1 ....................| sample N + 1
                                         ^ BESIDE of a step: masks that take longer hold it up

`--without` gives no row a place (stretto/text/regex_places.py): each mask is made anew. `benchmarks.grammars` trains
tokenizers.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from benchmarks.grammars import record, schema
from stretto.host.grammar import Grammars, GrammarState
from stretto.params import Grammar
from stretto.text.grammar import vocabulary
from stretto.text.masks import MaskAsk, MaskMaker
from stretto.text.tokenizer import load_tokenizer

BESIDE = 0.85
REGEX = {
    "words": r"([a-z]{1,9}[ .,])*!{2000}",
    "addresses": r"([\w.+-]{1,64}@[\w-]{1,63}(\.[\w-]{1,63})+ )*!{2000}",
    "sentences": r"([A-Z][a-z ,]{10,80}\. )*!{2000}",
    "any letters, counted": r"(\w{1,2000} ){500}",
    "dates": r"(\d{4}-\d{2}-\d{2},)*!{2000}",
}
KINDS = [{"type": "string"}, {"type": "integer", "minimum": 0, "maximum": 999}, {"type": "boolean"}, {"type": "number"},
         {"type": "string", "format": "date-time"}, {"enum": ["red", "green", "blue"]}]


def listed(item: dict) -> Grammar:
    return schema({"type": "array", "minItems": 2000, "items": item})


GRAMMARS: dict[str, list[Grammar]] = {
    "objects of 6 kinds": [listed({"type": "object", "properties": {f"f{i}": kind for i, kind in enumerate(KINDS)},
                                   "required": [f"f{i}" for i in range(len(KINDS))], "additionalProperties": False})],
    "objects of 10 strings": [listed(record(10, {"type": "string"}))],
    "a schema of its own each": [listed(record(3 + n % 7, KINDS[n % 6] if n % 2 else {
        "type": "string", "maxLength": 30 + n})) for n in range(64)],
    "objects with a pattern of words": [listed(record(1, {"type": "string", "pattern": "^([a-z]{1,9}[ .,]){5,40}$"}))],
    **{f"regex: {name}": [Grammar("regex", source)] for name, source in REGEX.items()},
    "regex: one of its own each": [Grammar("regex", rf"([a-z]{{1,{n}}}[ .,])*!{{2000}}") for n in range(5, 69)],
    "ebnf: words": [Grammar("ebnf", 'root ::= (word " ")+\nword ::= [a-z]+')],
}


class Rows:
    """So many turns of the same grammars, in turn; none of them draws one of `ends`."""

    def __init__(self, grammars: Grammars, of: Sequence[Grammar], rows: int, threads: int, with_places: bool,
                 ends: Collection[int]):
        self.grammars, self.maker, self._ends = grammars, MaskMaker(grammars.vocab_size, threads), list(ends)
        self.states: list[GrammarState] = []
        for i in range(rows):
            state = grammars.state(of[i % len(of)])
            state.compiled.result(timeout=120)
            if not with_places:
                state.grammar.places = None
            self.states.append(state)
        self._random = random.Random(1)
        self.ids: list[list[int]] = [[] for _ in range(rows)]

    def step(self, seq: int) -> tuple[float, float]:
        """Seconds of processors and of the clock."""
        before = time.process_time(), time.perf_counter()
        for state, ids in zip(self.states, self.ids):
            state.take(ids)
            state.forced()
        mask, _ = self.maker.make(seq, len(self.states), [
            MaskAsk(i, state.matcher, [], automaton=state.automaton, grammar=id(state.grammar), keys=state.keys([]),
                    places=state.grammar.places) for i, state in enumerate(self.states)])
        took = time.process_time() - before[0], time.perf_counter() - before[1]
        for rows in self.maker.slow:
            self.grammars.spread([self.states[row] for row in rows], self.maker.threads)
        for i, bits in enumerate(mask.bits):
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            self.ids[i] = [int(self._random.choice(np.setdiff1d(allowed, self._ends, assume_unique=True)))]
        return took


def measure(name: str, rows: Rows, steps: int, step: float) -> str:
    for seq in range(steps):
        rows.step(seq)
    found = [rows.step(steps + seq) for seq in range(steps)]
    used, wall = (statistics.median(each) for each in zip(*found))
    late = max(0.0, wall - BESIDE * step)
    return (f"| {name} | {1e3 * used:.2f} | {1e6 * used / len(rows.states):.0f} | {100 * used / step:.0f} % |"
            f" {1e3 * wall:.2f} | {1e3 * late:.2f} ({100 * late / step:.0f} %) |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--step", type=float, default=5.6, help="milliseconds of the device")
    parser.add_argument("--answers", nargs="+", help="only those whose names contain one of these")
    parser.add_argument("--without", action="store_true")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.tokenizer)
    size = tokenizer.vocab_size
    print(f"{size:,} tokens, {args.rows} rows, {args.threads} threads\n")
    print(f"| answers | processor, ms a step | us a row | of {args.step:g} ms | wall, ms | the device waits, ms |\n"
          "|---|--:|--:|--:|--:|--:|")
    for name, of in GRAMMARS.items():
        if args.answers and not any(part in name for part in args.answers):
            continue
        grammars = Grammars(lambda: vocabulary(tokenizer, size, tokenizer.eos_token_ids), size)
        rows = Rows(grammars, of, args.rows, args.threads, not args.without,
                    tokenizer.eos_token_ids)
        print(measure(name, rows, args.steps, args.step / 1e3), flush=True)
        rows.maker.close()
        grammars.close()


if __name__ == "__main__":
    main()
