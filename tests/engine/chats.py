"""Clients of sessions over the real engine and the tiny model, with any drafter. Every answer is checked by
`replay_oracle`, and the books after every step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stretto.engine.core import EngineCore
from stretto.params import SamplingParams
from stretto.protocol import CloseSession, GetSession, Output, Request, SessionTurn
from stretto.testing import Setup, make_engine
from tests.engine.matrix_run import CONTEXT, Asked, Lab
from tests.engine.replay_oracle import TOLERANCE, Replay


@dataclass
class Turn(Asked):
    """`history`: ids of the prompt that were the session's."""

    sid: str | None = None
    history: int = 0

    @property
    def usage(self):
        return self.outputs[0][-1].usage

    @property
    def ended(self) -> str | None:
        return self.outputs[0][-1].finish_reason if self.outputs else None


class Chats:
    """One engine. Turns are appended, or sent whole with mode "tag"."""

    def __init__(self, lab: Lab, drafter: str | None, **setup):
        limits = {name: setup.pop(name) for name in ("session_ttl", "session_queue", "clock") if name in setup}
        sizes = dict(context=CONTEXT, chunk=64, budget=128, slots=17, overlap=True) | setup
        self.core: EngineCore = make_engine(lab.model, lab.drafters[drafter] if drafter else None, lab.target,
                                            Setup(**sizes), **limits)
        self.replay = Replay(lab.reference, TOLERANCE["float32"])
        self.turns: dict[str, Turn] = {}
        self.histories: dict[str, list[int]] = {}

    def ask(self, tokens: list[int], n: int = 8, sid: str | None = None, mode: str = "append", rid: str = "",
            **more) -> Turn:
        """A turn of a session, or a plain request. Raises RequestError. `tokens`: what is new."""
        on_disconnect = more.pop("on_disconnect", "rollback")
        on_busy = more.pop("on_busy", "wait")
        sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": n} | more)
        history = self.histories.get(sid or "", [])
        rid = rid or f"t{len(self.turns)}"
        order = None
        if sid is not None:
            order = SessionTurn(sid=sid, mode=mode, on_disconnect=on_disconnect,  # type: ignore[arg-type]
                                on_busy=on_busy)
        self.core.submit(Request(rid=rid, tokens=history + tokens if mode == "tag" else tokens, sampling=sampling,
                                 session=order, want_text=False))
        turn = self.turns[rid] = Turn(history + tokens, sampling, sid=sid, history=len(history))
        return turn

    def step(self) -> None:
        self.note(self.core.step())

    def note(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            turn = self.turns[output.rid]
            turn.outputs.setdefault(output.index, []).append(output)
            if turn.ended in ("length", "stop") and turn.sid is not None:
                self.histories[turn.sid] = turn.prompt + turn.ids()

    def until(self, ready: Callable[[], bool], most: int = 5000) -> None:
        for _ in range(most):
            if ready():
                return
            self.step()
        raise AssertionError("nothing comes of it")

    def finish(self) -> None:
        self.until(lambda: not self.core.has_work)
        self.core.host.audit()

    def abort(self, turn: Turn, received: int | None = None) -> None:
        turn.aborted = True
        rid = next(rid for rid, other in self.turns.items() if other is turn)
        self.note(self.core.abort(rid, received))

    def end(self) -> None:
        """Every answer is checked; every session is closed, and then no page may be held."""
        self.finish()
        for info in self.core.manage(GetSession())[0]:
            self.core.manage(CloseSession(info.id))
        self.core.host.audit()
        held = {name: n for name, n in self.core.host.stats()[1].items() if n and name.startswith("pages_used")}
        assert not held, held
        counters = self.counters
        assert not counters["faults"] and not counters["broken_books"]
        self.core.close()
        for turn in self.turns.values():
            scores = None if turn.sampling.logprobs is None else [s for o in turn.outputs.get(0, [])
                                                                  for s in o.logprobs or []]
            self.replay.check(turn.prompt, turn.ids(), turn.sampling, 0, scores)

    @property
    def counters(self) -> dict[str, float]:
        return self.core.host.stats()[0]

    def used(self, group: int = 0) -> int:
        """Pages of a group that somebody holds."""
        return int(self.core.host.stats()[1][f"pages_used_{group}"])


def host_work(act: Callable[[], None]) -> int:
    """Python functions that the host half called meanwhile: its work, without a clock."""
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        if event == "call" and "/host/" in frame.f_code.co_filename:
            calls += 1
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls
