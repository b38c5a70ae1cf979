"""Small steps that the tests of single cases are made of."""

from __future__ import annotations

import random

from stretto.params import SamplingParams
from stretto.protocol import Request
from tests.host.fake_device import VOCAB
from tests.host.harness import Harness, oracle, plain_world

GREEDY = dict(temperature=0.0, seed=1)
ALL_DRAFTERS = ("none", "ngram", "eagle", "host")


def prompt_of(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def submit(h: Harness, prompt: list[int], **sampling) -> str:
    fields = {name: sampling.pop(name) for name in ("rid", "priority", "cache_salt", "want_text") if name in sampling}
    plain = {"priority": 0, "cache_salt": "", "want_text": True}
    return h.submit(prompt, SamplingParams(**{**GREEDY, "ignore_eos": True, **sampling}), **{**plain, **fields})


def answer_of(prompt: list[int], **sampling) -> list[int]:
    """What the target says after a prompt, without an engine."""
    h = Harness(plain_world(), 0)
    rid = submit(h, prompt, **sampling)
    asked = h.asked[rid]
    h.half.abort(rid)
    return oracle(prompt, asked.request, 0, asked.seed, h.limits).tokens


def ended(h: Harness, rid: str, index: int = 0):
    client = h.clients[rid, index]
    assert client.finish is not None
    return client


def counters(h: Harness):
    return h.half.counters


def session_turn(h: Harness, sid: str, ids: list[int], **sampling) -> str:
    """The session's next turn, noted for the oracle."""
    h.rids += 1
    fields = {**GREEDY, "ignore_eos": True, **sampling}
    request = Request(rid=f"t{h.rids}", tokens=ids, sampling=SamplingParams(**fields))
    h.half.sessions.append(sid, request)
    h._note(request, h.history[sid] + ids, sid, len(h.history[sid]))
    return request.rid


def opened(h: Harness, sid: str) -> str:
    h.half.sessions.open(sid)
    h.history[sid] = []
    return sid


def run_dry(h: Harness) -> None:
    for _ in range(3000):
        if not (h.half.has_work or h.flight):
            return
        h.step()
        h.half.audit()
    raise AssertionError("did not come to an end")
