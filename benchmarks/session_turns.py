"""Do late turns of a conversation take longer than early ones? 150 turns of eight sessions at once, tiny model, CPU.

    python benchmarks/session_turns.py [--speculation ngram] [--turns 150] [--sessions 8]

Prints the mean time of a turn among the first and among the last ones, and their ratio (1.10 at most is the goal); and
the same of the processor's time, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from stretto.bench.tiny import write_tiny
from stretto.model.load import load_model
from stretto.protocol import Request, SessionTurn
from stretto.testing import Setup, greedy, make_engine, target_of

EDGE = 20  # turns at either end that are compared, after the first few


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculation", default="off", help="off, or a drafter of the tiny model: ngram, eagle3, ...")
    parser.add_argument("--turns", type=int, default=150)
    parser.add_argument("--sessions", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny = write_tiny(Path(folder), context=32 + 4 * args.turns)
        model = load_model(tiny.path, dtype=torch.float32, device=torch.device("cpu"))
        setup = Setup(context=tiny.context, pool_tokens=args.sessions * (tiny.context + 16), slots=args.sessions + 1,
                      overlap=True, poison=False)
        engine = make_engine(model, tiny.drafters.get(args.speculation), target_of(model, tiny.path), setup)
        seconds, busy = [], []
        for turn in range(args.turns):
            started, began = time.perf_counter(), time.process_time()
            for i in range(args.sessions):
                order = SessionTurn(sid=f"s{i}", mode="append")
                engine.submit(Request(rid=f"{i}.{turn}", tokens=[turn % 290, 5], sampling=greedy(2, ignore_eos=True),
                                      want_text=False, session=order))
            while engine.has_work:
                engine.step()
            seconds.append(time.perf_counter() - started)
            busy.append(time.process_time() - began)
        engine.close()
    print(f"{args.turns} turns of {args.sessions} sessions, speculation {args.speculation}:")
    for name, times in (("time", seconds), ("processor's time", busy)):
        head, tail = statistics.mean(times[5 : 5 + EDGE]), statistics.mean(times[-EDGE:])
        print(f"  {name}: {head * 1000:.2f} ms at the beginning, {tail * 1000:.2f} ms at the end, ratio"
              f" {tail / head:.3f}")


if __name__ == "__main__":
    main()
