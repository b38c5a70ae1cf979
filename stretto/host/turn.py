"""A turn: one choice of one request, from its submission to its last output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stretto.protocol import Request, TokenLogprob, Usage
from stretto.text.stream import TextStream
from stretto.wire import NEVER, Goal

if TYPE_CHECKING:
    from stretto.host.grammar import GrammarState
    from stretto.host.lease import Lease
    from stretto.host.prefix import Node
    from stretto.host.session import Session

STOP, LENGTH, ABORT, ERROR = "stop", "length", "abort", "error"  # finish reasons
POOL_FULL = "kv_cache_full"  # stop_reason of a turn that ended because the KV cache holds no more of it


@dataclass(frozen=True, slots=True)
class Job:
    """What a turn asks. Fixed at submission."""

    request: Request
    index: int  # of the choice
    rank: tuple[int, int, int]  # (priority, serial, index): smaller runs first, the largest is retracted first
    goal: Goal
    prompt: int  # ids that were given
    limit: int  # ids in the end, at most
    width: int  # most drafts a step
    lookahead: int  # cells that the drafter writes past the committed length
    seed: int  # unsigned 64 bits
    stop_ids: tuple[int, ...]
    scores_from: int = NEVER  # prompt log-probabilities from the logits of this position on
    adapter: int = 0  # its number on the device; 0: none
    pool_bound: bool = False  # the limit is what the KV cache holds, less than what was asked
    processed: bool = False  # it has logit processors
    width_is_named: bool = False  # the request says its number of drafts


@dataclass(eq=False, slots=True)
class Turn:
    """`tokens` are the given ids and every id that was delivered, nothing else."""

    job: Job
    tokens: list[int]
    text: TextStream | None = None
    usage: Usage = field(default_factory=Usage)
    scores: list[TokenLogprob] | None = None  # of the prompt, until delivered; None: nothing is wanted
    unforked: int = 0  # choices that wait for this turn's first sampled id
    session: Session | None = None
    expected: int = 0  # ids whose KV the session held, or would hold had it not been taken
    begins: tuple[list[int], int] | None = None  # (a session's ids, how many of them it begins with)
    grammar: GrammarState | None = None
    lease: Lease | None = None
    home: Node | None = None  # where its pages are once it gave them up, of ledgers that share none
    slot: int = -1
    epoch: int = -1
    fill_to: int = 0  # ids of the log at seating; rows below it only feed

    @property
    def ready(self) -> bool:
        """It may be seated: nothing that it needs is still being made."""
        return self.grammar is None or self.grammar.ready

    @property
    def next_score(self) -> int:
        """The first position whose logits still owe a prompt score; NEVER where none does."""
        if self.scores is None:
            return NEVER
        position = self.job.scores_from + len(self.scores)
        return position if position < self.job.prompt - 1 else NEVER

    @property
    def adoptable(self) -> int:
        """Tokens that a prefix hit may cover: one must be fed, every owed prompt score needs its position fed, and a
        mean needs them all."""
        return 0 if self.job.goal == Goal.EMBED_MEAN else min(len(self.tokens) - 1, self.next_score)
