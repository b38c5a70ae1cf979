"""Grammars on the host: compiled in the background, one matcher a turn, and the late mask of a step.

    submit      the grammar goes to a thread, which builds it and makes its first mask; its turn waits in the queue,
                others pass it. One that takes long goes on to other threads, so that quick ones never wait for it;
                it is left out where no turn waits for it any more when its time has come
    result N    the turn's matcher takes the emitted ids; where the grammar ends, so does the turn
    mask N+1    for each position of each window: what may follow, the drafts offered before it taken as given.
                The device runs the forward pass of step N+1 meanwhile.

A draft that the grammar refuses is not in the mask of its position, so verification cuts the window there.

What a compiled grammar takes cannot be asked of llguidance. It grows with the work that is done on it (new states of
its lexer take 10 MB a second at most, on a core of a server), and so it is estimated, by time, from above.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import count

from llguidance import LLMatcher, LLTokenizer

from stretto.host.faults import HostFault
from stretto.params import Grammar
from stretto.text.grammar import GrammarError, compiled, definition, fault_of, is_dead, is_quick, places_in, texts_of
from stretto.text.masks import is_dead_end
from stretto.text.regex_places import Numbers, Place, RegexPlaces, TokenTexts

logger = logging.getLogger(__name__)

COMPILE_THREADS = 2  # for those that take long
COMPILE_SECONDS = 20.0  # for one grammar
CACHED = 256  # automata, of all grammars together
CACHED_BYTES = 1 << 30  # that they take together, as it is estimated
WORN_BYTES = 64 << 20  # one that takes more gets no new turns: its grammar is compiled anew for them
SMALL_BYTES = 1 << 20  # of one that was just compiled, at least
BYTES_A_SECOND = 32 << 20  # of work
CROWDED = "the grammar takes long to compile, and others that do were compiled before it; try again"
SLOW_STEPS = 4  # with slow masks, after which another automaton is worth its memory


class Compiled:
    """A grammar, and its automata: one, or more where masks are slow and rows are many (`Grammars.spread`). Copies of a
    matcher have one automaton in common, which is slower to use at once than one after another."""

    def __init__(self, grammar: Grammar):
        self.grammar, self.first = grammar, Future[LLMatcher]()
        self.begun: float | None = None  # when a thread began to compile it
        self.waiting = 0  # turns that wait for it
        self.places: RegexPlaces | None = None  # known when the first one is ready
        self.more: list[LLMatcher] = []
        self.worked: dict[int, float] = {}  # seconds, by id of an automaton
        self.coming: Future[LLMatcher | None] | None = None  # stays where it has failed: the next one would as well
        self.slow = 0  # how often its masks took too long since the last one came
        self._turns = count()

    @property
    def automata(self) -> int:
        return 1 + len(self.more) + (self.coming is not None)

    @property
    def size(self) -> int:
        """Bytes, estimated."""
        places = self.places.size if self.places is not None else 0
        return self.automata * SMALL_BYTES + int(sum(tuple(self.worked.values())) * BYTES_A_SECOND) + places

    @property
    def worn(self) -> bool:
        return max(tuple(self.worked.values()), default=0.0) * BYTES_A_SECOND > WORN_BYTES

    def next(self) -> LLMatcher:
        """Each of them in turn; the first one must be ready."""
        all_of_them = [self.first.result(timeout=0), *self.more]
        return all_of_them[next(self._turns) % len(all_of_them)]


class GrammarState:
    """A turn's place in its grammar: the ids of the turn that were delivered, and the drafts offered after them."""

    def __init__(self, grammar: Compiled, patience: float = math.inf):
        self.grammar = grammar
        self._patience = time.monotonic() + patience  # until when its grammar may wait for others
        self._matcher: LLMatcher | None = None
        self._automaton: LLMatcher | None = None  # that its matcher is a copy of
        self._place: Place | None = None  # for as long as it can be followed
        self._taken: list[int] = []
        self._forced: list[int] | None = None  # until the next id is taken
        self.offered: tuple[int, list[int]] = (-1, [])  # epoch, ids: as the device last reported them

    def another(self) -> GrammarState:
        """For another choice of the same request: at the grammar's beginning."""
        return GrammarState(self.grammar)

    @property
    def ready(self) -> bool:
        return self.compiled.done() and not self.compiled.cancelled() and self.compiled.exception() is None

    @property
    def crowded(self) -> bool:
        """Its grammar has waited too long for others, which is not its own fault."""
        return not self.compiled.done() and self.grammar.begun is None and time.monotonic() > self._patience

    @property
    def fault(self) -> str | None:
        """Why it will not become ready."""
        if not self.compiled.done():
            late = self.grammar.begun is not None and time.monotonic() > self.grammar.begun + COMPILE_SECONDS
            return f"the grammar was not compiled within {COMPILE_SECONDS:g} s: simplify it" if late else None
        error = self.compiled.exception() if not self.compiled.cancelled() else None
        return None if error is None else f"the grammar cannot be used: {error}"

    @property
    def compiled(self) -> Future[LLMatcher]:
        return self.grammar.first

    @property
    def matcher(self) -> LLMatcher:
        return self._matcher or self._begin()

    def _begin(self) -> LLMatcher:
        self._automaton = self.grammar.next()
        self._matcher = self._automaton.deep_copy()
        self._place = self.grammar.places.start if self.grammar.places is not None else None
        return self._matcher

    @property
    def automaton(self) -> Hashable:
        """Equal for turns whose masks cannot be made at once."""
        return id(self._automaton)

    def move(self, automaton: LLMatcher) -> None:
        """On to another automaton of the same grammar, to the same place."""
        there = automaton.deep_copy()
        if there.try_consume_tokens(self._taken) == len(self._taken) and not there.is_error() \
                and there.compute_bitmask() == self.matcher.compute_bitmask():
            self._automaton, self._matcher = automaton, there

    def take(self, ids: Sequence[int]) -> int | None:
        """Advances by emitted ids. Returns how many belong to the answer where the grammar ended, else None.

        Raises GrammarError where the grammar has led into a dead end or past llguidance's limits, and HostFault where
        an id was sampled that the mask of its position excluded."""
        self._forced = None
        self._taken += ids
        for i, token in enumerate(ids):
            if self.matcher.try_consume_tokens([token]) != 1:
                raise self._refusal(token)
            self._place = self._after(self._place, token)
            if self.matcher.is_stopped():
                return i + 1
        return None

    def _after(self, place: Place | None, token: int) -> Place | None:
        return self.grammar.places.after(place, token) if place is not None and self.grammar.places else None

    def keys(self, drafts: Sequence[int]) -> list[Hashable]:
        """Of the masks behind what was taken and behind each draft, as far as they are known."""
        if self._matcher is None:
            self._begin()
        found: list[Hashable] = []
        place = self._place
        for draft in (*drafts, None):
            if place is None or self.grammar.places is None:
                break
            found.append(self.grammar.places.key(place))
            place = self._after(place, draft) if draft is not None else None
        return found

    def forced(self) -> list[int]:
        """Ids of the text that must follow, as the tokenizer would cut it; the model may cut it otherwise."""
        if self._forced is None:
            self._forced = self.matcher.compute_ff_tokens()
        return self._forced

    def _refusal(self, token: int) -> Exception:
        return self.error() or HostFault(f"id {token} was sampled; the grammar does not allow it there")

    def error(self) -> GrammarError | None:
        """Why nothing can follow, where nothing can."""
        fault = fault_of(self.matcher)
        empty = fault is None and is_dead_end(self.matcher)
        if empty or is_dead(self.matcher):
            return GrammarError("the grammar leaves no token that could continue, or end, the answer here")
        return None if fault is None else GrammarError(fault)


class Grammars:
    """Compiles and remembers grammars of one vocabulary. `tokens` makes it: called once, on a thread."""

    def __init__(self, tokens: Callable[[], LLTokenizer], vocab_size: int):
        self._tokens, self.vocab_size = tokens, vocab_size
        self._built: LLTokenizer | None = None
        self._texts: TokenTexts | None = None
        self._numbers = Numbers()
        self._lock = threading.Lock()
        self._quick = ThreadPoolExecutor(1, "grammar")  # its thread begins with the first grammar
        self._slow = ThreadPoolExecutor(COMPILE_THREADS, "slow grammar")
        self._cache: OrderedDict[Grammar, Compiled] = OrderedDict()
        self.patience = math.inf  # seconds that a turn waits until its grammar's time has come

    def state(self, grammar: Grammar) -> GrammarState:
        """Starts to compile, if need be. Raises GrammarError for what is wrong at first sight."""
        known = self._cache.get(grammar)
        if known is None or (known.first.done() and known.first.exception() is not None):
            definition(grammar)
            self._cache[grammar] = known = Compiled(grammar)
            self._quick.submit(self._begin, known)
        self._cache.move_to_end(grammar)
        self._let_go()
        return GrammarState(known, self.patience)

    def wait(self, state: GrammarState) -> None:
        """A turn waits for it, until it says that it does not any more (`leave`)."""
        state.grammar.waiting += 1

    def leave(self, state: GrammarState) -> None:
        """Its turn does not wait any more. A grammar that no turn waits for is not begun."""
        state.grammar.waiting -= 1
        if not state.grammar.waiting and state.compiled.cancel():
            self.forget(state)

    def _let_go(self) -> None:
        """Grammars that were used least recently are forgotten until all automata together are few and small enough.
        Their turns keep what they have."""
        kept = sum(known.automata for known in self._cache.values())
        size = sum(known.size for known in self._cache.values())
        while (kept > CACHED or size > CACHED_BYTES) and len(self._cache) > 1:
            _, known = self._cache.popitem(last=False)
            kept -= known.automata
            size -= known.size

    def worked(self, state: GrammarState, seconds: float) -> None:
        """So long masks were made on the state's automaton."""
        known, automaton = state.grammar, id(state._automaton)
        known.worked[automaton] = known.worked.get(automaton, 0.0) + seconds
        if known.worn:
            self.forget(state)

    def forget(self, state: GrammarState) -> None:
        """The state's grammar is compiled anew for the next turn that asks for it."""
        if self._cache.get(state.grammar.grammar) is state.grammar:
            del self._cache[state.grammar.grammar]

    def spread(self, states: Sequence[GrammarState], most: int) -> None:
        """The masks of these turns, which have one automaton, took too long together. Where that happens again and
        again, another one is compiled, of `most` in all, and every second turn moves there: until they are few enough
        on each."""
        grammar = states[0].grammar
        if self._cache.get(grammar.grammar) is not grammar:
            return  # nobody would count what it gets
        self._cache.move_to_end(grammar.grammar)
        grammar.slow += 1
        if grammar.coming is None:
            if grammar.slow >= SLOW_STEPS and len(grammar.more) + 1 < most:
                grammar.coming = self._slow.submit(self._spare, grammar)
                self._let_go()
        elif grammar.coming.done() and (made := grammar.coming.result()) is not None:
            grammar.more.append(made)
            grammar.coming, grammar.slow = None, 0
            for state in states[1::2]:
                state.move(grammar.more[-1])

    def _begin(self, known: Compiled) -> None:
        try:
            if known.first.cancelled():
                return
            if is_quick(known.grammar):
                self._finish(known)
            else:
                self._slow.submit(self._finish, known)
        except BaseException as e:  # a panic of llguidance is no Exception
            _tell(known, e)

    def _finish(self, known: Compiled) -> None:
        if not known.first.set_running_or_notify_cancel():
            return
        try:
            known.begun = time.monotonic()
            matcher = self._another(known)
            with self._lock:
                assert self._built is not None
                self._texts = self._texts or texts_of(self._built)
            known.places = places_in(known.grammar, self._texts, self._numbers)
            known.first.set_result(matcher)
        except BaseException as e:
            _tell(known, e)

    def _spare(self, known: Compiled) -> LLMatcher | None:
        """Another automaton; None where it cannot be made."""
        try:
            return self._another(known)
        except BaseException:
            logger.exception("a second automaton of a grammar cannot be made; its rows share the first one")
            return None

    def _another(self, known: Compiled) -> LLMatcher:
        before = time.thread_time()
        matcher = self._compile(known.grammar)
        known.worked[id(matcher)] = time.thread_time() - before
        return matcher

    def _compile(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            self._built = self._built or self._tokens()
        return compiled(grammar, self._built)

    def close(self) -> None:
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)


def _tell(known: Compiled, error: BaseException) -> None:
    """Whatever it is, the turns that wait are told: by an error of its own, since the other one's frames hold what the
    grammar holds, and such a cycle would stay."""
    told = str(error)
    if not isinstance(error, GrammarError):
        logger.error("a grammar of the kind %s could not be compiled", known.grammar.kind, exc_info=error)
        told = f"{type(error).__name__}: {error}"
    with suppress(InvalidStateError):  # no turn waits
        known.first.set_exception(GrammarError(told))


def wait_for(states: Sequence[GrammarState], seconds: float) -> None:
    """Until one of them is compiled, or has failed to; at most so long."""
    wait([state.compiled for state in states], timeout=seconds, return_when=FIRST_COMPLETED)
