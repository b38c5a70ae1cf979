"""Masks that take long are shared out, those of one place are made once, and nobody's mask changes by it."""

from __future__ import annotations

import gc
import json
import random
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from stretto.host import grammar as grammar_module
from stretto.host.grammar import Grammars, GrammarState
from stretto.params import Grammar, SamplingParams
from stretto.protocol import Request
from stretto.text import masks as masks_module
from stretto.text import regex_places as places_module
from stretto.text.grammar import vocabulary
from stretto.text.masks import MaskAsk, MaskMaker
from tests.host.fake_device import EOS, VOCAB
from tests.host.harness import Characters, Harness, make_world
from tests.host.test_mutants import GRAMMAR, TIGHT

WORDS, HEX = Grammar("regex", "([A-Z]{1,5}[0-9]){40}"), Grammar("regex", "[0-9A-F]{200}")


class Panic(BaseException):
    """As those of Rust are."""


@pytest.fixture
def impatient(monkeypatch) -> None:
    """Every mask takes too long."""
    monkeypatch.setattr(masks_module, "PATIENCE", -1.0)
    monkeypatch.setattr(grammar_module, "SLOW_STEPS", 1)


@pytest.fixture
def made():
    grammars = Grammars(lambda: vocabulary(Characters(), VOCAB, [EOS]), VOCAB)
    yield grammars
    grammars.close()


def started(grammars: Grammars, grammar: Grammar, n: int) -> list[GrammarState]:
    states = [grammars.state(grammar) for _ in range(n)]
    states[0].compiled.result(timeout=30)
    return states


def ask(row: int, state: GrammarState) -> MaskAsk:
    return MaskAsk(row, state.matcher, [], automaton=state.automaton, grammar=id(state.grammar))


def allowed(bits: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


@pytest.mark.parametrize("most", [1, 3, 16])
def test_rows_of_one_automaton_come_apart(impatient, made, most: int) -> None:
    """Until each of them, or `most` of them, have one; the masks are those of a matcher that nobody moved."""
    states, maker, rng = started(made, WORDS, 8), MaskMaker(VOCAB, threads=4), random.Random(1)
    still = [state.compiled.result().deep_copy() for state in states]
    for step in range(40):
        mask, stuck = maker.make(step, 8, [ask(i, state) for i, state in enumerate(states)])
        assert not stuck
        for rows in list(maker.slow):
            assert len({states[row].automaton for row in rows}) == 1 < len(rows)
            made.spread([states[row] for row in rows], most)
        if coming := states[0].grammar.coming:
            coming.result(timeout=30)
        for i, (state, other) in enumerate(zip(states, still)):
            assert mask.bits[i].tobytes() == other.compute_bitmask()[: mask.bits[i].nbytes]
            token = int(rng.choice(allowed(mask.bits[i])))
            state.take([token])
            assert other.try_consume_tokens([token]) == 1
    assert len({state.automaton for state in states}) == min(most, 8)
    maker.close()


def noted(monkeypatch) -> list[tuple[str, list[int], int]]:
    """How rows were filled: one by one or together, which rows, and by how many threads."""
    calls: list[tuple[str, list[int], int]] = []
    one, together = MaskMaker._fill_row, MaskMaker._fill_together

    def alone(self, ask, start, memory):
        calls.append(("alone", [ask.row], 1))
        one(self, ask, start, memory)

    def shared(self, rows, memory, threads):
        calls.append(("together", [ask.row for ask, _ in rows], threads))
        together(self, rows, memory, threads)

    monkeypatch.setattr(MaskMaker, "_fill_row", alone)
    monkeypatch.setattr(MaskMaker, "_fill_together", shared)
    return calls


def test_slow_masks_are_made_by_automaton_in_one_call(impatient, made, monkeypatch) -> None:
    calls = noted(monkeypatch)
    states = [state for pair in zip(started(made, WORDS, 3), started(made, HEX, 3)) for state in pair]
    maker = MaskMaker(VOCAB, threads=4)
    maker.make(0, 6, [ask(i, state) for i, state in enumerate(states)])
    assert calls == [("together", [0, 2, 4, 1, 3, 5], 2)]
    assert sorted(map(sorted, maker.slow)) == [[0, 2, 4], [1, 3, 5]]
    maker.close()


def test_slow_masks_are_shared_out_at_once_and_timed_again_later(made, monkeypatch) -> None:
    monkeypatch.setattr(masks_module, "SHARED", 3)
    calls, states = noted(monkeypatch), started(made, WORDS, 3) + started(made, HEX, 3)
    maker, asks = MaskMaker(VOCAB, threads=2), [ask(i, state) for i, state in enumerate(states)]
    for step, (patience, one_by_one) in enumerate([(-1.0, 0), (60.0, 0), (60.0, 0), (60.0, 0), (60.0, 6), (-1.0, 0)]):
        monkeypatch.setattr(masks_module, "PATIENCE", patience)
        calls.clear()
        mask, _ = maker.make(step, 6, asks)
        assert sum(how == "alone" for how, _, _ in calls) == one_by_one and len(calls) == (one_by_one or 1)
        for i, state in enumerate(states):
            assert mask.bits[i].tobytes() == state.matcher.compute_bitmask()[: mask.bits[i].nbytes]
    maker.close()


@pytest.mark.parametrize("automata", [2, 3, 5])
def test_each_automaton_has_a_thread_as_far_as_there_are_threads(impatient, made, monkeypatch, automata: int) -> None:
    calls, maker = noted(monkeypatch), MaskMaker(VOCAB, threads=4)
    states = [state for n in range(automata) for state in started(made, Grammar("regex", f"[A-Z]{{{20 + n}}}"), 2)]
    maker.make(0, len(states), [ask(i, state) for i, state in enumerate(states)])
    assert [threads for _, _, threads in calls] == [min(4, automata)]
    maker.close()


def sleepy(monkeypatch, state: GrammarState, seconds: float) -> None:
    """By a clock of its own: masks of its automaton take so long, and so do those of all that are made in one call."""
    fill, together, slow = MaskMaker._fill_row, MaskMaker._fill_together, state.matcher and state.automaton
    clock = SimpleNamespace(now=0.0)

    def wait(seconds: float) -> None:
        clock.now += seconds

    def one(self, ask, start, memory):
        wait(seconds if ask.automaton == slow else 0)
        fill(self, ask, start, memory)

    monkeypatch.setattr(masks_module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(MaskMaker, "_fill_row", one)
    monkeypatch.setattr(MaskMaker, "_fill_together", lambda *args: (wait(seconds), together(*args)))


@pytest.mark.parametrize("timed", [1, 2])
def test_an_automaton_that_was_never_timed_is_not_held_to_be_slow(made, monkeypatch, timed: int) -> None:
    """As many rows are timed, all of the slow grammar; where none of it is left, it is slow the next time."""
    states = started(made, WORDS, 2) + started(made, HEX, 4)
    maker, asks = MaskMaker(VOCAB, threads=2), [ask(i, state) for i, state in enumerate(states)]
    sleepy(monkeypatch, states[0], 0.04)
    monkeypatch.setattr(masks_module, "PATIENCE", 0.04 * timed - 0.02)
    maker.make(0, 6, asks)
    assert maker.slow == []
    monkeypatch.setattr(masks_module, "PATIENCE", 0.02)
    for step in range(2):
        maker._at_once = 1
        maker.make(step, 6, asks)
        assert [sorted(rows) for rows in maker.slow] == [[0, 1]]
    asks[:2] = [replace(one, automaton="another, of the same grammar") for one in asks[:2]]
    maker._at_once = 1
    maker.make(2, 6, asks)
    assert [sorted(rows) for rows in maker.slow] == [[0, 1]]
    maker.close()


def test_only_those_that_take_long_are_to_have_more_automata(made, monkeypatch) -> None:
    """Timed one by one: of the two grammars the words take long, whatever the other one's rows are."""
    states = started(made, WORDS, 2) + started(made, HEX, 4)
    maker, asks = MaskMaker(VOCAB, threads=2), [ask(i, state) for i, state in enumerate(states)]
    sleepy(monkeypatch, states[0], 0.02)
    monkeypatch.setattr(masks_module, "PATIENCE", 0.015)
    for step in (3, 0, 6):  # the first row that is timed: of the quick ones, then of the slow ones
        maker._at_once = 0
        maker.make(step, 6, asks)
    for step in range(3):
        maker._at_once = 1
        maker.make(step, 6, asks)
        assert maker.slow == [[0, 1]] or maker.slow == [[1, 0]]
    maker.close()


def test_masks_that_are_quick_are_made_where_they_are_asked_for(made, monkeypatch) -> None:
    monkeypatch.setattr(masks_module, "PATIENCE", 60.0)
    states, maker = started(made, WORDS, 6), MaskMaker(VOCAB, threads=4)
    maker.make(0, 6, [ask(i, state) for i, state in enumerate(states)])
    assert maker.slow == [] and not maker._executors


def test_a_turn_moves_to_the_same_place_or_stays(made) -> None:
    (state,), (other,) = started(made, WORDS, 1), started(made, HEX, 1)
    state.take([state_id for state_id in Characters().encode_inside("AB")])
    before = state.automaton
    state.move(other.compiled.result())  # it cannot come to the same place
    assert state.automaton == before and state.matcher.compute_bitmask() != other.matcher.compute_bitmask()
    state.move(made._compile(WORDS))
    assert state.automaton != before
    assert state.take(Characters().encode_inside("C4D")) is None


def test_an_automaton_that_cannot_be_made_changes_nothing(impatient, made, monkeypatch) -> None:
    states = started(made, WORDS, 4)
    automata = [(state.matcher, state.automaton)[1] for state in states]
    asked: list[Grammar] = []
    monkeypatch.setattr(made, "_compile", lambda grammar: asked.append(grammar) or 1 / 0)
    for _ in range(5):
        made.spread(states, 8)
        assert states[0].grammar.coming is not None
        states[0].grammar.coming.exception(timeout=30)
    assert [state.automaton for state in states] == automata and states[0].grammar.more == []
    assert asked == [WORDS], "a failure is tried again and again"


def test_all_automata_together_are_bounded(impatient, made, monkeypatch) -> None:
    """Those of the grammars that were used least recently go; turns keep theirs, and get no others that nobody counts.
    A grammar that is asked for again starts anew."""
    monkeypatch.setattr(grammar_module, "CACHED", 6)
    bounded = [Grammar("regex", f"[A-Z]{{{n}}}") for n in range(20, 24)]
    worlds = []
    for grammar in bounded:
        states = started(made, grammar, 4)
        worlds.append(states)
        for _ in range(8):
            assert [state.matcher for state in states]
            made.spread(states, 4)
            if coming := states[0].grammar.coming:
                coming.result(timeout=30)
            assert sum(1 + len(known.more) for known in made._cache.values()) <= 6
        assert len(states[0].grammar.more) == 3
    assert bounded[0] not in made._cache and bounded[3] in made._cache
    old = worlds[0][0].grammar
    for _ in range(4):
        made.spread(worlds[0], 16)
    assert old.coming is None and len(old.more) == 3 and worlds[0][1].take(Characters().encode_inside("AB")) is None
    assert started(made, bounded[0], 1)[0].grammar is not old


@pytest.mark.parametrize("seed", range(6))
def test_worlds_where_every_mask_takes_too_long(impatient, seed: int) -> None:
    """With drafts, late results, choices and retractions."""
    force = dict(GRAMMAR, drafter="ngram" if seed % 2 else "eagle", eager=False) | (TIGHT if seed > 3 else {})
    Harness(make_world(random.Random(seed), **force), seed).run(60)


# ------------------------------------------------------------------------------------------------------ masks once made
def with_keys(row: int, state: GrammarState, drafts: Sequence[int] = ()) -> MaskAsk:
    return replace(ask(row, state), drafts=list(drafts), keys=state.keys(drafts), places=state.grammar.places)


def test_rows_at_one_place_have_one_mask_made(made, monkeypatch) -> None:
    """In the same step, and in a later one by another way; the masks are the matchers' own."""
    calls, states, maker = noted(monkeypatch), started(made, WORDS, 6), MaskMaker(VOCAB, threads=4)
    rng = random.Random(3)
    for step in range(60):
        mask, stuck = maker.make(step, 6, [with_keys(i, state) for i, state in enumerate(states)])
        assert not stuck
        for i, state in enumerate(states):
            assert mask.bits[i].tobytes() == state.matcher.compute_bitmask()[: mask.bits[i].nbytes]
            state.take([int(rng.choice(allowed(mask.bits[i])))])
    rows = sum(len(rows) for _, rows, _ in calls)
    assert maker.reused == 6 * 60 - rows and 0 < rows <= 6  # behind a digit, and behind one to five letters
    maker.close()


def test_windows_take_masks_as_far_as_their_drafts_lead(made, monkeypatch) -> None:
    calls, (state,), maker = noted(monkeypatch), started(made, WORDS, 1), MaskMaker(VOCAB, threads=4)
    encode, (other,) = Characters().encode_inside, started(made, WORDS, 1)
    for text, known in (("AB1C", False), ("AB1C", True), ("AB1", True), ("A1", True), ("AB11", True), ("12", True),
                        ("ABCDE2", False), ("ABCDEF2", True)):
        calls.clear()
        drafts = encode(text)
        mask, stuck = maker.make(0, 1, [with_keys(0, state, drafts)])
        assert not stuck and bool(calls) != known, text
        fresh, _ = MaskMaker(VOCAB, threads=1).make(0, 1, [replace(ask(0, other), drafts=drafts)])
        led = next((i for i in range(len(drafts)) if other.matcher.validate_tokens(drafts[: i + 1]) <= i), len(drafts))
        assert mask.bits[: led + 1].tobytes() == fresh.bits[: led + 1].tobytes(), text
    maker.close()


def test_drafts_that_are_no_ids_lead_nowhere(made) -> None:
    (state,), maker = started(made, WORDS, 1), MaskMaker(VOCAB, threads=1)
    maker.make(0, 1, [with_keys(0, state)])
    for draft in (VOCAB + 31, 10**6, -1):
        mask, stuck = maker.make(0, 1, [with_keys(0, state, [draft])])
        assert not stuck and mask.bits[0].tobytes() == state.matcher.compute_bitmask()[: mask.bits[0].nbytes]
    assert maker.reused == 3
    maker.close()


def test_min_tokens_change_no_mask_that_is_kept(made) -> None:
    """Of two rows at one place, one may not end yet."""
    grammar = Grammar("regex", "[A-Z]{1,40}")
    states, maker = started(made, grammar, 3), MaskMaker(VOCAB, threads=4)
    for state in states:
        state.take(Characters().encode_inside("AB"))
    for step in range(2):
        asks = [with_keys(i, state) for i, state in enumerate(states)]
        asks[1] = replace(asks[1], withheld=1, stop_ids=[EOS])
        mask, _ = maker.make(step, 3, asks)
        assert [EOS in allowed(bits) for bits in mask.bits] == [True, False, True]
    assert maker.reused == 2 + 3
    maker.close()


# -------------------------------------------------------------------------------------------------- bytes of automata
def test_an_automaton_that_has_grown_gets_no_new_turns(made, monkeypatch) -> None:
    monkeypatch.setattr(grammar_module, "BYTES_A_SECOND", 1000)
    monkeypatch.setattr(grammar_module, "WORN_BYTES", 1500)
    (state,), maker = started(made, HEX, 1), MaskMaker(VOCAB, threads=1)
    known = state.grammar
    maker.make(0, 1, [ask(0, state)])
    assert list(maker.work) == [state.automaton] and 0 < maker.work[state.automaton] < 10
    made.worked(state, 1.0)
    assert started(made, HEX, 1)[0].grammar is known and known.size >= 1000
    made.worked(state, 0.6)
    (later,) = started(made, HEX, 1)
    assert later.grammar is not known and later.keys([]) == state.keys([])
    made.worked(state, 9.0)  # of a turn that still runs
    assert started(made, HEX, 1)[0].grammar is later.grammar and state.take(Characters().encode_inside("AB")) is None
    maker.close()


def test_the_bytes_of_all_automata_are_bounded(made, monkeypatch) -> None:
    monkeypatch.setattr(grammar_module, "SMALL_BYTES", 1)
    monkeypatch.setattr(grammar_module, "BYTES_A_SECOND", 1000)
    monkeypatch.setattr(grammar_module, "CACHED_BYTES", 3500)
    monkeypatch.setattr(places_module, "ENTRY_BYTES", 0)
    bounded = [Grammar("regex", f"[A-Z]{{{n}}}") for n in range(30, 35)]
    for grammar in bounded:
        made.worked(started(made, grammar, 1)[0], 1.0)
        assert sum(known.size for known in made._cache.values()) <= 3500 + 1000
    made.state(bounded[4])
    assert list(made._cache) == bounded[2:]
    monkeypatch.setattr(places_module, "ENTRY_BYTES", 1000)  # what is known of their places counts, too
    made.state(bounded[4])
    assert list(made._cache) == bounded[4:]
    assert made.state(bounded[0]).grammar.size < 1000  # begun anew


def test_masks_that_are_shared_out_count_as_work(impatient, made) -> None:
    states, maker = started(made, WORDS, 3) + started(made, HEX, 1), MaskMaker(VOCAB, threads=2)
    maker.make(0, 4, [ask(i, state) for i, state in enumerate(states)])
    words, numbers = (maker.work[state.automaton] for state in (states[0], states[3]))
    assert words == pytest.approx(3 * numbers) and set(maker.work) == {state.automaton for state in states}
    maker.close()


# ------------------------------------------------------------------------------------------------- quick ones and slow
def test_quick_grammars_do_not_wait_for_slow_ones(made, monkeypatch) -> None:
    """All threads for slow ones are held, and others wait for them, whose time has not begun."""
    go, compile_ = threading.Event(), grammar_module.compiled
    slow = [Grammar("choice", json.dumps(["A" * n, "B" * 20_000])) for n in range(1, 6)]

    def held(grammar, tokens):
        assert grammar.kind == "regex" or go.wait(60)
        return compile_(grammar, tokens)

    monkeypatch.setattr(grammar_module, "compiled", held)
    monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 0.0)
    waiting = [made.state(grammar) for grammar in slow]
    assert started(made, WORDS, 1)[0].ready and started(made, HEX, 1)[0].ready
    begun = [state for state in waiting if state.grammar.begun is not None]
    assert len(begun) <= grammar_module.COMPILE_THREADS and not any(state.ready for state in waiting)
    for state in waiting:
        assert (state.fault is not None) == (state.grammar.begun is not None)
    go.set()
    for state in waiting:
        assert state.compiled.result(timeout=30) and state.fault is None


@pytest.fixture
def held(made, monkeypatch):
    """Slow grammars are compiled when the event is set; the list tells which were begun."""
    go, compile_, begun = threading.Event(), grammar_module.compiled, []

    def compile_later(grammar, tokens):
        begun.append(grammar)
        assert go.wait(60)
        return compile_(grammar, tokens)

    monkeypatch.setattr(grammar_module, "compiled", compile_later)
    monkeypatch.setattr(grammar_module, "is_quick", lambda grammar: False)
    yield go, begun
    go.set()


def numbered(n: int) -> list[Grammar]:
    return [Grammar("regex", f"A[0-9]{{{i}}}") for i in range(2, 2 + n)]


def awaited(grammars: Grammars, grammar: Grammar) -> GrammarState:
    """Of a turn that waits for it."""
    state = grammars.state(grammar)
    grammars.wait(state)
    return state


def until(condition) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come about")


def test_grammars_that_no_turn_waits_for_are_not_begun(made, held) -> None:
    go, begun = held
    first, gone, asked_again, last = numbered(grammar_module.COMPILE_THREADS), *numbered(9)[-3:]
    running = [awaited(made, grammar) for grammar in first]
    until(lambda: len(begun) == len(first))
    left, again, stays = awaited(made, gone), awaited(made, asked_again), awaited(made, last)
    other = awaited(made, asked_again)  # a second turn
    made.state(gone)  # of one that is refused
    for state in (left, again, *running):
        made.leave(state)
    assert left.compiled.cancelled() and gone not in made._cache and not other.compiled.done()
    assert not left.ready and left.fault is None
    go.set()
    assert stays.compiled.result(timeout=30) and other.compiled.result(timeout=30) and other.ready
    assert all(state.compiled.result(timeout=30) for state in running)  # begun already
    assert set(begun) == {*first, asked_again, last}
    back = awaited(made, gone)
    assert back.compiled.result(timeout=30) and back.ready


def test_a_grammar_does_not_wait_for_others_without_end(held, made) -> None:
    go, begun = held
    made.patience = 0.0
    running = [awaited(made, grammar) for grammar in numbered(grammar_module.COMPILE_THREADS)]
    until(lambda: len(begun) == len(running))
    waiting = awaited(made, numbered(9)[-1])
    until(lambda: waiting.crowded)
    assert waiting.fault is None and not any(state.crowded for state in running)
    made.leave(waiting)
    made.patience = 1000.0
    later = awaited(made, waiting.grammar.grammar)
    assert later.grammar is not waiting.grammar and not later.crowded
    go.set()
    assert later.compiled.result(timeout=30)


def test_an_abort_takes_its_grammar_along_and_patience_ends_requests(held) -> None:
    go, begun = held
    world = make_world(random.Random(3), **GRAMMAR)
    h = Harness(world, 3)
    half = h.half
    half.bound_patience(1000.0)

    def submit(rid: str, grammar: Grammar) -> None:
        half.submit(Request(rid=rid, tokens=[1, 2, 3], sampling=SamplingParams(max_tokens=4, grammar=grammar)))
    many = numbered(grammar_module.COMPILE_THREADS + 2)
    known = half._grammars
    try:
        for i, grammar in enumerate(many):
            submit(str(i), grammar)
        until(lambda: len(begun) == grammar_module.COMPILE_THREADS)
        assert half.abort(str(len(many) - 1))
        half.plan()
        assert many[-1] not in known._cache and [known._cache[grammar].waiting for grammar in many[:-1]] == [1] * 3
        assert not half.take_outputs()
        for turn in half._intake.compiling:
            turn.grammar._patience = 0.0  # it is over
        until(lambda: (half.plan(), told := half.take_outputs()) and
              [(o.rid, o.error_code) for o in told] == [(str(len(many) - 2), "queue_full")])
        assert half.counters.grammars_crowded == 1 and half.counters.grammar_errors == 0
    finally:
        for i in range(len(many)):
            half.abort(str(i))
        half.plan()
        go.set()


@pytest.mark.parametrize("step", ["is_quick", "compiled"])
@pytest.mark.parametrize("error", [RecursionError("too deep"), Panic("index out of bounds")], ids=["Error", "Panic"])
def test_whatever_breaks_tells_the_turns_and_is_tried_again(made, monkeypatch, caplog, step: str, error) -> None:
    def broken(*_):
        raise error
    with monkeypatch.context() as m:
        m.setattr(grammar_module, step, broken)
        state = made.state(WORDS)
        assert state.compiled.exception(timeout=30) is not None
        assert str(error) in (state.fault or "") and type(error).__name__ in (state.fault or "")
    assert "could not be compiled" in caplog.text
    assert started(made, WORDS, 1)[0].ready


def test_grammars_that_go_leave_no_cycles(made, impatient, monkeypatch) -> None:
    """Where the engine runs, nothing is freed that only the collector could free."""
    started(made, WORDS, 1)  # the vocabulary
    gone: list[weakref.ref] = []
    gc.collect()
    gc.disable()
    try:
        for source in ["([A-Z]{1,5}[0-9]){40}x*", "(A", "A|B*"]:
            state = made.state(Grammar("regex", source))
            if state.compiled.exception(timeout=30) is None:
                for token in Characters().encode_inside("ABC"):
                    if state.keys([]) and allowed(np.frombuffer(state.matcher.compute_bitmask(), np.int32)).size:
                        state.keys([token])
                with monkeypatch.context() as m:
                    m.setattr(made, "_compile", lambda grammar: 1 / 0)
                    m.setattr(grammar_module.logger, "disabled", True)  # the test's own log keeps what it is told
                    made.spread([state, state], 4)
                    assert state.grammar.coming is not None and state.grammar.coming.result(timeout=30) is None
            made.forget(state)
            gone.append(weakref.ref(state.grammar))
            del state
            until(lambda: not any(each() for each in gone))
    finally:
        gc.enable()


def test_a_grammar_that_does_not_hold_tells_its_turns(made) -> None:
    state = made.state(Grammar("regex", "(a"))
    assert state.compiled.exception(timeout=30) is not None and "cannot be used" in (state.fault or "")
    assert made.state(Grammar("regex", "(a")).grammar is not state.grammar  # tried again
