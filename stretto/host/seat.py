"""A turn in the words of the slot table: the columns of a `wire.Seat`."""

from __future__ import annotations

import msgspec

from stretto.host.lease import Lease
from stretto.host.turn import Job, Turn
from stretto.wire import Goal, Seat


def seat_of(turn: Turn, lease: Lease, *, fresh: bool, seam: int, log_from: int) -> Seat:
    """`lease` is the turn's own, without steps in flight: no step can move a length named here."""
    sampling = turn.job.request.sampling
    return Seat(turn.slot, fresh, _ints(turn, lease, seam), _reals(turn.job), log_from, turn.tokens[log_from:],
                turn.job.stop_ids if turn.job.goal == Goal.GENERATE else (), tuple(sorted(sampling.logit_bias.items())),
                sampling.allowed_token_ids, sampling.bad_words, _processors(turn.job))


def _processors(job: Job) -> bytes:
    uses = job.request.sampling.logit_processors if job.goal == Goal.GENERATE else ()
    return msgspec.json.encode(uses) if uses else b""


def _ints(turn: Turn, lease: Lease, seam: int) -> list[int]:
    """In the order of `wire.Int`."""
    job, sampling = turn.job, turn.job.request.sampling
    return [
        lease.lo,  # LEN
        len(turn.tokens),  # KNOWN
        0,  # NDRAFT
        job.limit,  # LIMIT
        int(job.goal),  # GOAL
        0,  # DONE
        turn.epoch,  # EPOCH
        lease.draft_lo,  # DRAFT_LEN
        job.prompt,  # PROMPT
        job.prompt + (0 if turn.grammar else sampling.min_tokens),  # FIRST_STOP: of a grammar, its mask sees to it
        max(0, sampling.top_k),  # TOP_K
        _signed(job.seed),  # SEED_LOW
        _signed(job.seed >> 32),  # SEED_HIGH
        job.index,  # CHOICE
        job.width,  # SPECULATION
        _alternatives(turn),  # LOGPROBS
        turn.next_score,  # SCORE_FROM
        seam,  # SEAM
        job.adapter,  # ADAPTER
    ]


def _reals(job: Job) -> list[float]:
    """In the order of `wire.Real`."""
    s = job.request.sampling
    return [s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty]


def _alternatives(turn: Turn) -> int:
    """One column serves prompt and output: the wider of the two is computed, and cut where it is delivered."""
    sampling = turn.job.request.sampling
    wanted = (sampling.logprobs, sampling.prompt_logprobs if turn.scores is not None else None)
    return max(-1 if n is None else n for n in wanted)


def _signed(word: int) -> int:
    """The low 32 bits as the wire's int32."""
    low = word & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low
