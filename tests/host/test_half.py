"""The facade, its limits, its numbers, and the seats it makes."""

from __future__ import annotations

import ast
import gc
import itertools
import math
import random
from pathlib import Path

import pytest

from stretto.host import half as half_module
from stretto.host.cost import CostModel, StepWork
from stretto.host.elastic import Elastic
from stretto.host.faults import HostFault
from stretto.host.half import HostHalf
from stretto.host.limits import HostLimits
from stretto.params import SamplingParams
from stretto.protocol import Request, RequestError
from stretto.wire import HEADER, NEVER, Goal, Int, Real, RowResult, Seam, StepResult, pack_plan, split_plan
from tests.host.harness import Harness, PieceStream, make_world, plain_world

HOST = Path(half_module.__file__).parent
SIZES = dict(page_size=4, pages=(10,), max_slots=4, max_model_len=100)


# ------------------------------------------------------------------------------------------------------------- limits
@pytest.mark.parametrize(("wrong", "says"), [
    (dict(page_size=0), "page_size is 0; it must be at least 1"),
    (dict(max_slots=1), "max_slots is 1; it must be at least 2"),
    (dict(budget=1), "budget is 1; it must be at least 2"),
    (dict(depth=-1), "depth is -1"),
    (dict(pages=(10, 10)), "pages names 2 groups, windows 1"),
    (dict(cap_policy="half"), "'half'; it must be one of full, one_in_mixed, budget"),
    (dict(lookahead=39), "leave 1 tokens beside a lookahead of 39"),
    (dict(pages=(40, 3), windows=(None, 9)), "a window of 9 tokens needs at least 5 pages of 4 tokens"),
    (dict(windows=(0,)), "a window a token"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_limits_that_cannot_work_are_refused(wrong: dict, says: str):
    with pytest.raises(ValueError, match=says):
        HostLimits(**(SIZES | wrong))


def test_what_a_lone_sequence_may_commit():
    assert HostLimits(**SIZES, lookahead=3).kv_tokens == 37
    assert HostLimits(**(SIZES | dict(pages=(10, 6), windows=(None, 8)))).kv_tokens == 40
    assert HostLimits(**(SIZES | dict(windows=(8,)))).kv_tokens == 99


# -------------------------------------------------------------------------------------------------------------- seats
def seat_of(sampling: SamplingParams, tokens=(1, 2, 3), **limits):
    limits = dict(SIZES, pages=(100,), width=7, eos_token_ids=frozenset({7, 9}), seeds=random.Random(3)) | limits
    half = HostHalf(HostLimits(**limits), PieceStream)
    half.submit(Request(rid="r", tokens=list(tokens), sampling=sampling))
    plan = half.plan()
    assert plan is not None
    packed = pack_plan(plan)
    split_plan(packed[:HEADER], packed)
    return plan.seats[0], plan


def test_columns_of_a_seat():
    seat, plan = seat_of(SamplingParams(
        temperature=0.5, top_p=0.9, min_p=0.1, top_k=5, repetition_penalty=1.5, presence_penalty=0.25,
        frequency_penalty=-0.5, logit_bias={8: 2.0, 3: -1.0}, min_tokens=2, max_tokens=20, seed=2**64 - 2,
        stop_token_ids=(9, 12), logprobs=1, prompt_logprobs=4, speculation=3))
    ints = dict(zip(Int, seat.ints))
    assert ints == {
        Int.LEN: 0, Int.KNOWN: 3, Int.NDRAFT: 0, Int.LIMIT: 23, Int.GOAL: Goal.GENERATE, Int.DONE: 0, Int.EPOCH: 1,
        Int.DRAFT_LEN: 0, Int.PROMPT: 3, Int.FIRST_STOP: 5, Int.TOP_K: 5, Int.SEED_LOW: -2, Int.SEED_HIGH: -1,
        Int.CHOICE: 0, Int.SPECULATION: 3, Int.LOGPROBS: 4, Int.SCORE_FROM: 0, Int.SEAM: Seam.START, Int.ADAPTER: 0}
    assert dict(zip(Real, seat.reals)) == {
        Real.TEMPERATURE: 0.5, Real.TOP_P: 0.9, Real.MIN_P: 0.1, Real.REPETITION: 1.5, Real.PRESENCE: 0.25,
        Real.FREQUENCY: -0.5}
    assert seat.stop_ids == (7, 9, 12) and seat.bias == ((3, -1.0), (8, 2.0))
    assert (seat.slot, seat.fresh, seat.log_from, seat.log) == (1, True, 0, [1, 2, 3])
    assert plan.rows == [(1, 1, 3)] and plan.draft_width == 3 and plan.maps == [(1, 0, 0, 1)]


def test_columns_of_a_score_row():
    seat, plan = seat_of(SamplingParams(max_tokens=0, top_k=-1, ignore_eos=True, prompt_logprobs=0))
    ints = dict(zip(Int, seat.ints))
    assert (ints[Int.GOAL], ints[Int.LIMIT], ints[Int.TOP_K], ints[Int.LOGPROBS]) == (Goal.SCORE, 4, 0, 0)
    assert seat.stop_ids == () and plan.rows == [(1, 1, 3)]


@pytest.mark.parametrize(("max_tokens", "context", "limit"), [(None, 100, 100), (200, 100, 100), (7, 100, 10)])
def test_the_limit_is_what_was_asked_or_the_context(max_tokens, context, limit):
    assert seat_of(SamplingParams(max_tokens=max_tokens), max_model_len=context)[0].ints[Int.LIMIT] == limit


def test_seeds():
    fields = [Int.SEED_LOW, Int.SEED_HIGH]
    def words(**sampling):
        return [seat_of(SamplingParams(**sampling))[0].ints[c] for c in fields]
    assert words(seed=5) == [5, 0] and words(seed=-1) == [-1, -1] and words(seed=1 << 40) == [0, 256]
    assert words() == words() != [0, 0], "from the given source"
    half = HostHalf(HostLimits(**SIZES))
    for n in range(2):
        half.submit(Request(rid=str(n), tokens=[1, 2, 3], sampling=SamplingParams()))
    plan = half.plan()
    assert plan is not None
    assert plan.seats[0].ints[Int.SEED_LOW] != plan.seats[1].ints[Int.SEED_LOW]
    assert plan.seats[0].ints[Int.SCORE_FROM] == NEVER and plan.seats[0].ints[Int.LOGPROBS] == -1


# ----------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(("tokens", "sampling", "says"), [
    ([], {}, "the prompt has 0 tokens"),
    ([1] * 100, {}, r"it must have 1\.\.99"),
    ([1] * 41, {}, "the KV cache holds 40"),
    ([1], dict(stop=("x",)), "no tokenizer"),
])
def test_what_can_never_run_is_refused(tokens, sampling, says):
    half = HostHalf(HostLimits(**SIZES))
    with pytest.raises(RequestError, match=says):
        half.submit(Request(rid="r", tokens=tokens, sampling=SamplingParams(**sampling)))
    assert not half.has_work and half.plan() is None and half.abort("r") == []


# ------------------------------------------------------------------------------------------------------------ numbers
@pytest.mark.parametrize("work", [False, True])
def test_what_a_device_says_of_a_step_counts_unless_steps_are_timed_by_their_work(work: bool):
    """Whatever clock the host has. A device tells seconds of the clock, which are not those that a thread worked."""
    cost = CostModel([(StepWork(1, 1, 0), 0.01), (StepWork(1, 64, 0), 0.02)], 64)
    now = itertools.count()
    policy = Elastic(cost, 9, (0,), exact=True)
    limits = HostLimits(**SIZES, elastic=policy, step_clock=lambda: next(now) / 1e3, step_work=work)
    half = HostHalf(limits)
    half.submit(Request(rid="r", tokens=[1, 2, 3], sampling=SamplingParams()))
    plan = half.plan()
    assert plan is not None
    half.process(StepResult(plan.seq, [RowResult(1, 1, 3, 0, 3, 4, False, [5], [])], seconds=0.25))
    assert policy.counters.measured_seconds == pytest.approx(0.001 if work else 0.25)


def test_numbers():
    h = Harness(plain_world("ngram", 0.8, width=3, eos_token_ids=frozenset()), 0)
    for n in range(5):
        h.submit([n] * 30, SamplingParams(max_tokens=12, seed=1, n=2), priority=0, cache_salt="")
    h.step()
    counters, gauges = h.half.stats()
    assert gauges["running"] == 5 and gauges["waiting"] == 0
    assert gauges["pages_used_0"] == 1000 - gauges["pages_free_0"] - gauges["pages_evictable_0"] > 0
    h.drain()
    counters, gauges = h.half.stats()
    assert counters["requests"] == 5 and counters["turns"] == 10
    assert counters["generated_tokens"] == sum(len(c.tokens) for c in h.clients.values()) == 120
    assert counters["drafted"] == sum(c.last.usage.drafted_tokens for c in h.clients.values()) > 0
    assert counters["accepted"] == sum(c.last.usage.accepted_tokens for c in h.clients.values()) > 0
    assert counters["planned_tokens"] >= counters["fed_tokens"] > 0
    assert gauges["pages_used_0"] == 0 and all(math.isfinite(v) for v in (*counters.values(), *gauges.values()))


class BrokenStream(PieceStream):
    def push(self, ids, final):
        if len(self.text) > 20:
            raise RuntimeError("no such piece")
        return super().push(ids, final)


def test_text_that_cannot_be_made_ends_one_request():
    world = plain_world(strict=False)
    h = Harness(world, 0)
    h._check = lambda out, client: None if out.finish_reason == "error" else Harness._check(h, out, client)
    streams = iter([PieceStream, BrokenStream, PieceStream])
    h.half._intake._text_stream = lambda sampling: next(streams)(sampling)
    rids = [h.submit([n] * 9, SamplingParams(max_tokens=20, ignore_eos=True), want_text=True) for n in range(3)]
    h.drain()
    assert [h.clients[rid, 0].finish for rid in rids] == ["length", "error", "length"]
    assert h.clients[rids[1], 0].last.error == "internal error: no such piece"
    assert h.half.counters.faults == 1


@pytest.mark.parametrize("where", ["drafter", "ledger"])
def test_what_fails_while_a_row_is_planned_ends_one_request(where: str):
    h = Harness(plain_world("host", width=3, strict=False), 0)
    h._check = lambda out, client: None if out.finish_reason == "error" else Harness._check(h, out, client)
    rids = [h.submit([n] * 9, SamplingParams(max_tokens=20, ignore_eos=True)) for n in range(3)]
    for _ in range(4):
        h.step()
    broken = h.half._live.of(rids[1])[0]
    if where == "drafter":
        drafter = h._propose
        def failing(tokens, width):
            return 1 // 0 if tokens is broken.tokens else drafter(tokens, width)
        object.__setattr__(h.half.limits, "drafter", failing)
    else:
        reserve = h.half.ledger.reserve
        def failing_reserve(lease, q_cap, lookahead):
            if lease is broken.lease:
                raise HostFault("a broken book")
            return reserve(lease, q_cap, lookahead)
        h.half.ledger.reserve = failing_reserve
    h.drain()
    assert [h.clients[rid, 0].finish for rid in rids] == ["length", "error", "length"]
    assert h.half.counters.faults == 1


def test_a_turn_that_the_pool_cannot_hold_any_longer_ends():
    """Pages were lost to a broken lease: what was promised at submission no longer fits."""
    h = Harness(plain_world(pages=(20,)), 0)
    rid = h.submit([3] * 9, SamplingParams(max_tokens=60, ignore_eos=True, seed=1, stop=("<>",)), want_text=True)
    h._check = lambda out, client: None
    for _ in range(5):
        h.step()
    assert h.half.ledger._take(0, 10)
    for _ in range(100):
        h.step()
    client = h.clients[rid, 0]
    assert (client.finish, client.stop) == ("length", "kv_cache_full")
    assert client.text == "".join(f"<{t}>" for t in client.tokens) and not h.half.has_work


def test_books_that_do_not_add_up_are_counted_by_a_server():
    half = HostHalf(HostLimits(**SIZES, strict=False))
    half.ledger.free[0].pop()
    half.submit(Request(rid="r", tokens=[1, 2, 3], sampling=SamplingParams()))
    assert half.plan() is not None
    assert half.counters.broken_books == 1


@pytest.mark.parametrize("world", [{"eager": True}, {"eager": True, "grammar_share": 0.7}], ids=["plain", "grammars"])
def test_the_host_half_leaves_no_cycles(world: dict):
    """Reference counts free everything, so a server may hold Python's cycle collector off while it is busy."""
    h = Harness(make_world(random.Random(2), drafter="ngram", width=3, **world), 2)
    gc.collect()
    gc.disable()
    try:
        total = h.run(40)
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert total["retractions"] and total["session_turns"] and total["forks"]
    assert bool(h.half.counters.masked_steps) == ("grammar_share" in world)


# ------------------------------------------------------------------------------------------------------------ sources
def calls(name: str) -> set[str]:
    """Modules of the host half that call a name."""
    return {path.name for path in HOST.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", None)) == name}


def test_one_maker_of_leases_and_reservations_and_of_rows():
    assert calls("Lease") == calls("Reservation") == {"ledger.py"}
    assert calls("launch") == {"planner.py"}  # of a Reservation
    assert calls("PrefixTree") == {"ledger.py"}
    assert calls("StepPlan") == {"ops.py"}
    assert calls("Seat") == {"seat.py"}


def test_one_writer_of_what_was_delivered():
    """Only results extends a turn's ids; nobody else assigns or changes them."""
    writers = set()
    for path in HOST.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] \
                if isinstance(node, ast.AugAssign) else []
            writers |= {path.name for t in targets if ast.unparse(t) in ("turn.tokens", "old.tokens", "new.tokens")}
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("turn.tokens."):
                writers.add(path.name)
    assert writers == {"results.py"}


def test_the_host_half_imports_no_torch():
    names = {alias.name for path in HOST.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for path in HOST.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))
              if isinstance(node, ast.ImportFrom)}
    assert not {name for name in names if name.partition(".")[0] in ("torch", "triton")}
    allowed = ("stretto.host", "stretto.wire", "stretto.params", "stretto.protocol", "stretto.text")
    assert not {name for name in names if name.startswith("stretto") and not name.startswith(allowed)}
