"""Sessions beside every drafter: what SGLang tests for one of them (and more), each cell for all of them.

The default run takes each cell with some drafters, so that every drafter occurs; the `full` marker takes the product.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest

from stretto.protocol import GetSession, RequestError
from tests.engine.chats import Chats, host_work
from tests.engine.matrix_run import DRAFTERS, Lab, make_lab
from tests.spec.suffix_trees import install

ALL = (None, *DRAFTERS)
CELLS = {  # settings beside which sessions run: chunks, pages, pools that are too small, steps in flight
    "base": dict(chunk=512, budget=512),
    "inline": dict(overlap=False),
    "retraction, page 256": dict(page_size=256, pool_tokens=5 * 256),
    "retraction, page 256, inline": dict(page_size=256, pool_tokens=5 * 256, overlap=False),
    "retraction, chunk 128": dict(chunk=128, budget=160, pool_tokens=560),
    "retraction, page 1": dict(page_size=1, chunk=16, pool_tokens=560),
}


@pytest.fixture(scope="module")
def labs(tmp_path_factory):
    kept: dict[tuple[bool, bool], Lab] = {}

    def get(window: bool = False, states: bool = False) -> Lab:
        if (window, states) not in kept:
            kept[window, states] = make_lab(tmp_path_factory.mktemp("tiny"), window, "float32", states=states)
        return kept[window, states]
    return get


@pytest.fixture(autouse=True)
def trees(monkeypatch) -> None:
    install(monkeypatch)


def some(*always: str | None):
    """All drafters; those that are not named run in the whole product."""
    return pytest.mark.parametrize("drafter", [
        pytest.param(name, id=name or "no drafter", marks=() if name in always else pytest.mark.full) for name in ALL])


windows = pytest.mark.parametrize("window", [pytest.param(False, id="all full"), pytest.param(True, id="window")])


def words(n: int, start: int) -> list[int]:
    return [(start + 7 * i) % 290 for i in range(n)]


# ------------------------------------------------------------------------------------------------------------- cells
@some(None, "eagle3", "dspark", "suffix")
@pytest.mark.parametrize("mode", ["append", "tag"])
def test_a_turn_inherits_all_that_was_computed(labs, drafter, mode: str) -> None:
    """Its cached tokens are the prompt and the answer of the turn before, but the last id, which was never fed."""
    chats = Chats(labs(), drafter, page_size=16)
    for turn in range(5):
        asked = [chats.ask(words(6 + turn, 11 * i), 4 + turn, f"s{i}", mode) for i in range(2)]
        before = [len(chats.histories.get(f"s{i}", [])) for i in range(2)]
        chats.finish()
        for one, history in zip(asked, before):
            assert one.usage.prompt_tokens == history + 6 + turn
            assert one.usage.cached_tokens == max(0, history - 1)
    assert drafter is None or chats.counters["drafted"]
    chats.end()


@some("mtp", "ngram")
def test_log_probabilities_of_sessions_side_by_side(labs, drafter) -> None:
    """Six of three kinds: appended, tagged, and plain requests that send the history."""
    chats = Chats(labs(), drafter, page_size=16, chunk=16)
    plain: dict[int, list[int]] = {}
    for turn in range(5):
        for i in range(6):
            new, kind = words(5, 13 * i + turn), ("append", "tag", None)[i % 3]
            if kind is None:
                plain[i] = plain.get(i, []) + new
            one = chats.ask(new if kind else plain[i], 6, f"s{i}" if kind else None, kind or "append", logprobs=3)
            one.number = i  # type: ignore[attr-defined]
        asked = list(chats.turns.values())[-6:]
        chats.finish()
        for one in asked:
            if one.sid is None:
                plain[one.number] += one.ids()  # type: ignore[attr-defined]
    chats.end()
    assert chats.replay.seen["scores"] == 5 * 6 * 6 and chats.counters["mixed_steps"]


@some("eagle", "dflash")
@windows
def test_stress(labs, drafter, window: bool) -> None:
    """Eight sessions of six turns beside plain requests; the next turn is sent while the last one still runs."""
    chats = Chats(labs(window), drafter, page_size=16, chunk=16, session_queue=8)
    for i in range(8):
        _queue_turns(chats, f"s{i}", [words(4 + i, 31 * i + turn) for turn in range(6)])
    for n in range(4):
        chats.ask(words(60, n), 12)
        for _ in range(6):
            chats.step()
    chats.finish()
    counters = chats.counters
    assert counters["session_turns"] == 48 and counters["in_place_turns"] > 8 and counters["mixed_steps"]
    chats.end()


@pytest.mark.full
@pytest.mark.parametrize("drafter", [None, "eagle3", "ngram", "suffix", "dspark"])
def test_stress_where_layers_keep_states(labs, drafter) -> None:
    test_stress(partial(labs, states=True), drafter, False)


def _queue_turns(chats: Chats, sid: str, news: list[list[int]]) -> None:
    """All at once: each waits behind the one before it, whose answer is in its prompt when it begins."""
    turns = [chats.ask(new, 7, sid) for new in news]

    def prompts() -> None:
        history: list[int] = []
        for turn, new in zip(turns, news):
            turn.prompt = history + new
            history = turn.prompt + turn.ids()
    finish = chats.finish
    chats.finish = lambda: (finish(), prompts())  # type: ignore[method-assign]


@some("dspark", "standalone", None)
@pytest.mark.parametrize("how", ["the third turn", "the first turn", "before it runs"])
def test_an_aborted_turn_leaves_the_history_as_it_was(labs, drafter, how: str) -> None:
    chats = Chats(labs(), drafter, page_size=16)
    for turn in range(2 if how == "the third turn" else 1 if how == "before it runs" else 0):
        chats.ask(words(9, turn), 6, "s")
        chats.finish()
    history = list(chats.histories.get("s", []))
    gone = chats.ask(words(30, 50), 40, "s")
    if how != "before it runs":
        chats.until(lambda: gone.answering)
    chats.abort(gone)
    assert gone.ended == "abort"
    after = chats.ask(words(5, 90), 6, "s")
    chats.finish()
    assert after.usage.prompt_tokens == len(history) + 5 and after.prompt == history + words(5, 90)
    assert after.usage.cached_tokens >= max(0, len(history) - 1)
    chats.end()


@some("eagle3")
@windows
def test_aborts_and_refusals_leak_nothing(labs, drafter, window: bool) -> None:
    """Four sessions, eight rounds, page 256, context 512: turns that are too long, aborts, and recovery."""
    chats = Chats(labs(window), drafter, page_size=256, context=512, chunk=512, budget=1024, pool_tokens=8 * 256)
    kept = {}
    for round_ in range(8):
        for i in range(4):
            sid = f"s{i}"
            with pytest.raises(RequestError, match="context"):
                chats.ask(words(600, i), 8, sid)
            gone = chats.ask(words(40, i), 60, sid)
            chats.until(lambda gone=gone: gone.answering)
            chats.abort(gone)
            kept[sid] = chats.ask(words(7, i + round_), 5, sid)
        chats.finish()
    assert all(turn.usage.cached_tokens > 0 for turn in kept.values())
    assert chats.counters["aborts"] == 32
    chats.end()


ALWAYS = (("dflash", True, "retraction, chunk 128"), ("ngram", False, "retraction, page 256"))


@pytest.mark.parametrize(("drafter", "window", "cell"), [
    pytest.param(*cell, id=f"{cell[0] or 'no drafter'}, window {cell[1]}, {cell[2]}",
                 marks=() if cell in ALWAYS else pytest.mark.full) for cell in product(ALL, (False, True), CELLS)])
def test_cells(labs, drafter, window: bool, cell: str) -> None:
    """Long turns of several sessions, in a pool that cannot hold them where the cell says retraction."""
    chats = Chats(labs(window), drafter, **CELLS[cell])
    # all are admitted at once, and then grow beyond what the pool holds
    new, answer = (225, 40) if "256" in cell else (60, 100)
    for turn in range(2):
        for i in range(4):
            chats.ask(words(new, 17 * i + turn), answer, f"s{i}")
        chats.finish()
    counters = chats.counters
    if "retraction" in cell:
        assert counters["retractions"] and counters["reclaimed"], counters
    assert drafter is None or counters["drafted"]
    chats.end()


HEAD, TAIL = range(5, 15), range(140, 150)


@some("ngram")
def test_the_last_turns_cost_no_more_than_the_first(labs, drafter) -> None:
    """150 turns of eight sessions: each feeds its two new ids and the one that had no KV yet, and no other; and the
    host works no more for a turn with 600 ids of history than for one with 30 (what it does, and what travels to the
    device, is counted exactly in tests/host/test_turn_cost.py). `benchmarks/session_turns.py` takes the time."""
    chats = Chats(labs(), drafter, page_size=16, chunk=256, budget=512, pool_tokens=8 * 640, poison=False)
    fed, work = [], []
    for turn in range(TAIL.stop):
        before = chats.counters["prefill_tokens"]
        for i in range(8):
            chats.ask([(turn + i) % 290, 5], 2, f"s{i}", rid=f"{i}.{turn}")
        run = partial(chats.until, lambda: not chats.core.has_work)
        work.append(host_work(run) if turn in HEAD or turn in TAIL else run())
        fed.append(chats.counters["prefill_tokens"] - before)
    assert fed[0] == 8 * 2 and set(fed[1:]) == {8 * 3}
    head, tail = (sum(work[turn] for turn in edge) for edge in (HEAD, TAIL))
    assert tail <= 1.10 * head, (head, tail)
    assert {info.turns for info in chats.core.manage(GetSession())[0]} == {150}
    chats.turns = dict(list(chats.turns.items())[-16:])  # those are checked, and all that they build on with them
    chats.end()


@some("standalone")
def test_a_streamed_session_says_what_plain_requests_say(labs, drafter) -> None:
    """30 turns, each compared with a request that sends everything, on an engine of its own without a drafter."""
    chats, plain = Chats(labs(), drafter, page_size=16), Chats(labs(), None, page_size=16, prefix_cache=False)
    for turn in range(30):
        one = chats.ask(words(3, turn), 5, "s")
        other = plain.ask(one.prompt, 5)
        chats.finish()
        plain.finish()
        assert one.ids() == other.ids() and len(one.outputs[0]) >= 1
    chats.end()
    plain.end()
