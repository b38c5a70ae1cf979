"""Grammars on the host: compiled in the background, one matcher a turn, and the late mask of a step.

    submit      the grammar goes to a thread, which builds it and makes its first mask; its turn waits in the queue,
                others pass it
    result N    the turn's matcher takes the emitted ids; where the grammar ends, so does the turn
    mask N+1    for each position of each window: what may follow, the drafts offered before it taken as given.
                The device runs the forward pass of step N+1 meanwhile.

A draft that the grammar refuses is not in the mask of its position, so verification cuts the window there.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count

from llguidance import LLMatcher, LLTokenizer

from stretto.host.faults import HostFault
from stretto.params import Grammar
from stretto.text.grammar import GrammarError, compiled, definition, fault_of, is_dead
from stretto.text.masks import is_dead_end

COMPILE_THREADS = 2
COMPILE_SECONDS = 20.0  # from submission on
CACHED = 256  # automata, of all grammars together
SLOW_STEPS = 4  # with slow masks, after which another automaton is worth its memory


class Compiled:
    """A grammar, and its automata: one, or more where masks are slow and rows are many (`Grammars.spread`). Copies of a
    matcher have one automaton in common, which is slower to use at once than one after another."""

    def __init__(self, grammar: Grammar, first: Future[LLMatcher]):
        self.grammar, self.first = grammar, first
        self.more: list[LLMatcher] = []
        self.coming: Future[LLMatcher] | None = None  # stays where it has failed: the next one would fail as well
        self.slow = 0  # how often its masks took too long since the last one came
        self._turns = count()

    @property
    def automata(self) -> int:
        return 1 + len(self.more) + (self.coming is not None)

    def next(self) -> LLMatcher:
        """Each of them in turn; the first one must be ready."""
        all_of_them = [self.first.result(timeout=0), *self.more]
        return all_of_them[next(self._turns) % len(all_of_them)]


class GrammarState:
    """A turn's place in its grammar: the ids of the turn that were delivered, and the drafts offered after them."""

    def __init__(self, grammar: Compiled):
        self.grammar, self._deadline = grammar, time.monotonic() + COMPILE_SECONDS
        self._matcher: LLMatcher | None = None
        self._automaton: LLMatcher | None = None  # that its matcher is a copy of
        self._taken: list[int] = []
        self._forced: list[int] | None = None  # until the next id is taken
        self.offered: tuple[int, list[int]] = (-1, [])  # epoch, ids: as the device last reported them

    def another(self) -> GrammarState:
        """For another choice of the same request: at the grammar's beginning."""
        return GrammarState(self.grammar)

    @property
    def ready(self) -> bool:
        return self.compiled.done() and self.compiled.exception() is None

    @property
    def fault(self) -> str | None:
        """Why it will not become ready."""
        if not self.compiled.done():
            late = time.monotonic() > self._deadline
            return f"the grammar was not compiled within {COMPILE_SECONDS:g} s: simplify it" if late else None
        error = self.compiled.exception()
        return None if error is None else f"the grammar cannot be used: {error}"

    @property
    def compiled(self) -> Future[LLMatcher]:
        return self.grammar.first

    @property
    def matcher(self) -> LLMatcher:
        if self._matcher is None:
            self._automaton = self.grammar.next()
            self._matcher = self._automaton.deep_copy()
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
            if self.matcher.is_stopped():
                return i + 1
        return None

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
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._cache: OrderedDict[Grammar, Compiled] = OrderedDict()

    def state(self, grammar: Grammar) -> GrammarState:
        """Starts to compile, if need be. Raises GrammarError for what is wrong at first sight."""
        known = self._cache.get(grammar)
        if known is None or (known.first.done() and known.first.exception() is not None):
            definition(grammar)
            self._cache[grammar] = known = Compiled(grammar, self._submit(grammar))
        self._cache.move_to_end(grammar)
        self._let_go()
        return GrammarState(known)

    def _let_go(self) -> None:
        """Grammars that were used least recently are forgotten until all automata together are few enough. Their turns
        keep what they have."""
        kept = sum(known.automata for known in self._cache.values())
        while kept > CACHED and len(self._cache) > 1:
            _, known = self._cache.popitem(last=False)
            kept -= known.automata

    def _submit(self, grammar: Grammar) -> Future[LLMatcher]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(COMPILE_THREADS, "grammar")
        return self._pool.submit(self._compile, grammar)

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
                grammar.coming = self._submit(grammar.grammar)
                self._let_go()
        elif grammar.coming.done() and grammar.coming.exception() is None:
            grammar.more.append(grammar.coming.result())
            grammar.coming, grammar.slow = None, 0
            for state in states[1::2]:
                state.move(grammar.more[-1])

    def _compile(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            self._built = self._built or self._tokens()
        return compiled(grammar, self._built)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def wait_for(states: Sequence[GrammarState], seconds: float) -> None:
    """Until one of them is compiled, or has failed to; at most so long."""
    wait([state.compiled for state in states], timeout=seconds, return_when=FIRST_COMPLETED)
