"""What the host half is built for: sizes, policies and hooks, frozen at start-up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stretto.host.adapters import Adapter, Adapters
from stretto.host.elastic import Elastic
from stretto.host.rates import Rates
from stretto.params import ProcessorUse
from stretto.wire import STATE

CAP_POLICIES = ("full", "one_in_mixed", "budget")

HostDrafter = Callable[[Sequence[int], int], list[int]]
"""(confirmed ids, width) -> at most `width` ids that may follow; of drafters that propose on the host."""


@dataclass(frozen=True, kw_only=True)
class HostLimits:
    """Sizes are in tokens unless said otherwise. Raises ValueError naming both sides where they cannot work together.

    Groups are the KV groups of the model and the drafter, group 0 first; a window of None is full attention, one of
    wire.STATE is of layers that keep a state."""

    page_size: int
    pages: tuple[int, ...]  # pages of each group, numbered 1..n
    windows: tuple[int | None, ...] = (None,)
    max_slots: int  # rows of the slot table; slot 0 is reserved for padding
    max_model_len: int
    chunk: int = 2048  # most prompt tokens of one row in one step
    budget: int = 8192  # most tokens of one step
    cap_policy: str = "full"  # how wide decode rows are: one of CAP_POLICIES
    mixed: bool = True  # False: no step holds both a prompt's chunk and a decode row
    depth: int = 1  # steps in flight while the next one is planned
    width: int = 0  # K: most drafts a row and step
    lookahead: int = 0  # cells past the committed length that the drafter writes
    prefix_cache: bool = True
    state_every: int = 1  # pages from one kept state to the next, of the `state` group
    eos_token_ids: frozenset[int] = frozenset()
    seeds: random.Random = field(default_factory=random.SystemRandom)  # of requests that name no seed
    strict: bool = True  # a failed check raises; otherwise it is counted and ends the request with "error"
    drafter: HostDrafter | None = None
    adapters: Adapters | None = None  # LoRA adapters; None: this engine has no room for any
    elastic: Elastic | None = None  # decides each step's drafts; None: every row has as many as it may
    check_processor: Callable[[ProcessorUse], None] | None = None  # ValueError for one that cannot run; None: none can
    host_pages: tuple[int, ...] = ()  # of each group, in host memory, numbered 1..n; (): no tier
    page_bytes: tuple[int, ...] = ()  # of a page of each group; (): all alike
    rates: Rates = field(default_factory=Rates)  # whether host copies are worth their way
    poison: bool = False  # debug: freed pages are made unreadable
    max_sessions: int = 4096
    session_ttl: float = 3600.0  # seconds idle until a session closes, unless it was opened with its own
    session_queue: int = 8  # turns that may wait behind a session's live one
    clock: Callable[[], float] = time.monotonic  # of idle sessions
    step_clock: Callable[[], float] = time.monotonic  # by which `elastic` knows what steps cost
    step_work: bool = False  # it tells seconds of work; False: of the clock, as results tell them too

    def __post_init__(self) -> None:
        self._check_positive()
        if len(self.pages) != len(self.windows):
            raise ValueError(f"pages names {len(self.pages)} groups, windows {len(self.windows)}: name the same groups")
        for name, of_groups in (("host_pages", self.host_pages), ("page_bytes", self.page_bytes)):
            if of_groups and (len(of_groups) != len(self.windows) or min(of_groups) < 1):
                raise ValueError(f"{name} is {of_groups}; each of {len(self.windows)} groups needs 1 or more: give the"
                                 " host tier more memory, or none")
        if self.cap_policy not in CAP_POLICIES:
            raise ValueError(f"cap_policy is {self.cap_policy!r}; it must be one of {', '.join(CAP_POLICIES)}")
        if self.kv_tokens < 2:
            raise ValueError(f"{min(self.pages)} pages of {self.page_size} tokens leave {self.kv_tokens} tokens beside"
                             f" a lookahead of {self.lookahead}; at least 2 are needed: give the KV cache more memory")
        for pages, window in zip(self.pages, self.windows):
            least = self.window_pages(window)
            if window is not None and pages < least:
                raise ValueError(f"a window of {window} tokens needs at least {least} pages of {self.page_size} tokens"
                                 f" in its group; {pages} were given: give the KV cache more memory")

    def _check_positive(self) -> None:
        for name, least in (("page_size", 1), ("max_slots", 2), ("max_model_len", 2), ("chunk", 1), ("budget", 2),
                            ("depth", 0), ("width", 0), ("lookahead", 0), ("state_every", 1), ("max_sessions", 0),
                            ("session_queue", 0), ("session_ttl", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not self.pages or min(self.pages) < 1 or any(w is not None and w < 1 and w != STATE for w in self.windows):
            raise ValueError(f"pages {self.pages}, windows {self.windows}: a group needs a page, a window a token")

    def adapter(self, name: str) -> Adapter:
        """Raises RequestError where it is not loaded."""
        return (self.adapters or Adapters(0)).of(name)

    @property
    def kv_tokens(self) -> int:
        """Cells that one sequence can commit when it has the pool to itself."""
        full = [n for n, window in zip(self.pages, self.windows) if window is None]
        return min(full) * self.page_size - self.lookahead if full else self.max_model_len - 1

    def window_pages(self, window: int | None) -> int:
        """Pages that a lone sequence holds at most while it is fed one token a step in a window group (0: full, and of
        states, which it can do without)."""
        if window is None or window == STATE:
            return 0
        # cells lo - W .. lo + lookahead, with both ends inside a page, and a page to spare; the whole sequence at most
        whole = -(-(self.kv_tokens + self.lookahead) // self.page_size)
        return min(whole, -(-(max(window, 2) + 1 + self.lookahead) // self.page_size) + 2)
