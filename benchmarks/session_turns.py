"""Do late turns of a conversation take longer than early ones? 150 turns of eight sessions at once, tiny model, CPU.

    python -m benchmarks.session_turns [--speculation ngram] [--turns 150] [--sessions 8] [--new 2] [--answer 2]

Prints the mean processor time of a turn among the first and among the last ones, in all, and without what reads the
context: the model's own attention over it grows with it, whoever serves. What is left is what a server adds to a turn,
and its ratio is the one that counts (1.10 at most is the goal). Processor time, since wall time counts whatever else
the machine does; it includes both threads, so overlap hides nothing. tests/host/test_turn_cost.py counts the same.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stretto.attn.torch_ragged import TorchRagged
from stretto.bench.tiny import Tiny, write_tiny
from stretto.engine.core import EngineCore
from stretto.model.load import load_model
from stretto.protocol import Request, SessionTurn
from stretto.testing import Setup, greedy, make_engine, target_of

EDGE, SKIPPED = 40, 5  # turns at either end that are compared; those before the first of them


class Attention:
    """Processor time of all attention over KV, the drafter's included."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("attend", "metadata"):
            setattr(TorchRagged, name, self._timed(getattr(TorchRagged, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - before
        return timed


def turn(engine: EngineCore, number: int, args: argparse.Namespace) -> None:
    """The next turn of every session, to its end."""
    for i in range(args.sessions):
        order = SessionTurn(sid=f"s{i}", mode="append")
        engine.submit(Request(rid=f"{i}.{number}", tokens=[number % 290] + [5] * (args.new - 1), session=order,
                              sampling=greedy(args.answer, ignore_eos=True), want_text=False))
    while engine.has_work:
        engine.step()


def compare(engines: list[EngineCore], args: argparse.Namespace) -> list[list[tuple[float, float]]]:
    """(processor time, that of attention) of the turns at either end, for two engines of the same kind: one plays the
    first turns while the other plays the last ones, in turn, so that both meet the machine in the same mood."""
    attention = Attention()
    starts = (SKIPPED, args.turns - EDGE)
    for engine, start in zip(engines, starts):
        for number in range(start):
            turn(engine, number, args)
    found: list[list[tuple[float, float]]] = [[], []]
    for number in range(EDGE):
        for engine, start, times in zip(engines, starts, found):
            began, attended = time.process_time(), attention.seconds
            turn(engine, start + number, args)
            times.append((time.process_time() - began, attention.seconds - attended))
    return found


def make(tiny: Tiny, args: argparse.Namespace) -> EngineCore:
    model = load_model(tiny.path, dtype=torch.float32, device=torch.device("cpu"))
    setup = Setup(context=tiny.context, pool_tokens=args.sessions * (tiny.context + 16), slots=args.sessions + 1,
                  overlap=True, poison=False)
    return make_engine(model, tiny.drafters.get(args.speculation), target_of(model, tiny.path), setup)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculation", default="off", help="off, or a drafter of the tiny model: ngram, eagle3, ...")
    parser.add_argument("--turns", type=int, default=150)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--new", type=int, default=2, help="ids of each prompt")
    parser.add_argument("--answer", type=int, default=2, help="ids of each answer")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tiny = write_tiny(Path(folder), context=32 + (args.new + args.answer) * args.turns)
        engines = [make(tiny, args) for _ in range(2)]
        found = compare(engines, args)
        for engine in engines:
            engine.close()
    print(f"{args.turns} turns of {args.sessions} sessions, speculation {args.speculation}:")
    for name, part in (("in all", lambda whole, part: whole), ("attention", lambda whole, part: part),
                       ("without it", lambda whole, part: whole - part)):
        head, tail = (statistics.median(part(*times) for times in end) for end in found)
        print(f"  {name}: {head * 1000:.2f} ms at the beginning, {tail * 1000:.2f} ms at the end, ratio"
              f" {tail / head:.3f}")


if __name__ == "__main__":
    main()
