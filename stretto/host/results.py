"""Applies the result of a step: lengths to the ledger, ids to the turns, outputs to the clients.

    confirm -> prompt scores -> fork of n choices -> text and stop strings -> deliver -> end, or publish and slide

What is delivered is final. Ids behind the end of a turn were never delivered, so there is nothing to take back.
"""

from __future__ import annotations

import logging
from collections import deque

from stretto.host.counters import Counters
from stretto.host.faults import HostFault, need
from stretto.host.grammar import CROWDED
from stretto.host.intake import Intake
from stretto.host.ledger import Ledger
from stretto.host.limits import HostLimits
from stretto.host.live import Live
from stretto.host.ops import Ops
from stretto.host.queue import Queue
from stretto.host.session import Sessions
from stretto.host.slots import Slots
from stretto.host.turn import ABORT, ERROR, LENGTH, POOL_FULL, STOP, Turn
from stretto.protocol import Output, TokenLogprob, Usage
from stretto.text.grammar import GrammarError
from stretto.wire import Goal, RowResult, StepResult, TokenScore

logger = logging.getLogger(__name__)

Ending = tuple[str, int | str | None]  # finish reason, stop reason


class _Fed:
    """What the rows of one step fed, by what it was for; `stale`: rows of turns that had left. A row that began among
    ids that were there when its turn was seated is `prefill`."""

    __slots__ = ("plain", "plain_rows", "prefill", "prefill_rows", "stale", "verify", "verify_rows")

    def __init__(self) -> None:
        self.plain = self.plain_rows = self.prefill = self.prefill_rows = 0
        self.verify = self.verify_rows = self.stale = 0


class Results:
    """Ends turns, for whatever reason: by a result, by the client, for want of pages, by a broken check."""

    def __init__(self, limits: HostLimits, ledger: Ledger, slots: Slots, queue: Queue, live: Live, intake: Intake,
                 sessions: Sessions, ops: Ops, counters: Counters):
        self._limits, self._ledger, self._slots, self._queue, self._live = limits, ledger, slots, queue, live
        self._intake, self._sessions, self._ops, self._counters = intake, sessions, ops, counters
        self._next_seq = 0
        self._recent: deque[StepResult] = deque(maxlen=8)  # logged with a broken check

    @property
    def recent(self) -> list[StepResult]:
        """The last results, for a log."""
        return list(self._recent)

    def process(self, result: StepResult) -> list[Output]:
        need(result.seq == self._next_seq, f"the result of step {result.seq} came; {self._next_seq} is next")
        self._next_seq += 1
        self._recent.append(result)
        outputs: list[Output] = []
        for done in result.moved:
            self._ledger.moved(done)
        fed, owner = _Fed(), self._slots.owner
        for row in result.rows:
            turn = owner(row.slot, row.epoch)
            if turn is None:
                fed.stale += 1
                continue
            try:
                self._apply(turn, row, result.seq, fed, outputs)
            except GrammarError as error:
                outputs += self.fail(turn, str(error))
            except Exception as error:  # whatever it is, it is of this request
                outputs += self.quarantine(turn, error)
        self._count(fed)
        tokens = fed.prefill + fed.plain + fed.verify
        if result.seconds and 2 * fed.prefill >= tokens > 0 and not fed.stale:
            self._limits.rates.computing.add(tokens, result.seconds)
        return outputs

    # ---------------------------------------------------------------------------------------------------- one row
    def _apply(self, turn: Turn, row: RowResult, seq: int, fed: _Fed, outputs: list[Output]) -> None:
        lease = turn.lease
        assert lease is not None
        if lease.lo < turn.fill_to:
            fed.prefill += row.fed
            fed.prefill_rows += row.fed > 0
        elif row.verified:
            fed.verify += row.fed
            fed.verify_rows += 1
        else:
            fed.plain += row.fed
            fed.plain_rows += row.fed > 0
        self._ledger.confirm(lease, seq, row.length)
        if row.known != len(turn.tokens) + len(row.new):
            raise HostFault(f"the device knows {row.known} ids; {len(turn.tokens)} were known, {len(row.new)} emitted")
        if row.fault:
            self._ledger.settle(lease, len(turn.tokens))
            outputs += self.fail_processor(turn, row.fault)
            return
        if turn.grammar is not None:
            turn.grammar.offered = (turn.epoch, row.offered)
        if row.prompt_scores and turn.scores is not None:
            self._collect_scores(turn, row.prompt_scores)
        if row.new:
            if turn.unforked:
                self._fork(turn, row.new)
            ending = self._deliver(turn, row, outputs)
            if ending is not None:
                self._finish(turn, ending, outputs, exact=row.done and row.known == len(turn.tokens))
                return
        elif row.done:
            need(turn.job.goal != Goal.GENERATE, "a turn that generates was ended without an id")
            outputs += self._outputs_at_end(turn, (LENGTH, None), scores=self._take_scores(turn))
            if turn.job.goal != Goal.SCORE:
                need(row.pooled is not None, "no vector came of a turn that embeds")
                assert row.pooled is not None
                outputs[-1].embedding = row.pooled.astype("<f4").tobytes()
            self._finish(turn, (LENGTH, None), outputs, exact=True)
            return
        if swapped := self._ledger.publish(lease, turn.tokens):
            self._ops.map(turn.slot, swapped)
        if gone := self._ledger.slide(lease):
            self._ops.map(turn.slot, gone)

    def _count(self, fed: _Fed) -> None:
        counters = self._counters
        counters.stale_results += fed.stale
        counters.fed_tokens += fed.prefill + fed.verify + fed.plain
        counters.prefill_tokens += fed.prefill
        counters.verify_tokens += fed.verify
        counters.decode_tokens += fed.plain
        counters.prefill_rows += fed.prefill_rows
        counters.verify_rows += fed.verify_rows
        counters.plain_rows += fed.plain_rows

    def _deliver(self, turn: Turn, row: RowResult, outputs: list[Output]) -> Ending | None:
        """Appends what the client gets of this row; says whether, and how, the turn has ended."""
        new, usage, request = row.new, turn.usage, turn.job.request
        ending = self._device_ending(turn, new[-1]) if row.done else None
        kept = turn.grammar.take(new) if turn.grammar is not None else None
        if kept is not None and (ending is None or ending[0] != STOP or kept < len(new)):
            ending, new = (STOP, None), new[:kept]
            self._counters.grammar_ends += 1
        text = ""
        if turn.text is not None:
            read = new if ending is None else self._readable(turn, new, ending)
            delta = turn.text.push(read, ending is not None)
            text = delta.text if request.want_text else ""
            if delta.stop is not None:  # its place is before, or at, whatever ended the turn on the device
                ending, new = (STOP, delta.stop), new[: delta.kept]
                self._counters.host_stops += 1
        n = len(new)
        turn.tokens += new
        usage.completion_tokens += n
        usage.steps += n > 0
        self._counters.generated_tokens += n
        if row.verified:
            self._count_drafts(usage, row.verified, max(n - 1, 0))  # a grammar may have ended before all of the ids
        reason, stop = ending or (None, None)
        scored = request.sampling.logprobs
        outputs.append(Output(request.rid, turn.job.index, new, text, reason, stop, usage.snapshot(),
                              None if scored is None else self._logprobs(row, new, scored),
                              None if turn.scores is None else self._take_scores(turn)))
        return ending

    def _count_drafts(self, usage: Usage, verified: int, accepted: int) -> None:
        usage.note_drafts(verified, accepted)
        counters = self._counters
        counters.drafted += verified
        counters.accepted += accepted
        counters.note_drafts(verified, accepted)

    def _device_ending(self, turn: Turn, last: int) -> Ending:
        """A stop id, or the limit. A stop id below min_tokens cannot be sampled."""
        job = turn.job
        if last in job.stop_ids:
            is_eos = last in self._limits.eos_token_ids and not job.request.sampling.ignore_eos
            return STOP, None if is_eos else last
        if job.pool_bound:
            self._counters.pool_bound += 1
        return LENGTH, POOL_FULL if job.pool_bound else None

    def _readable(self, turn: Turn, new: list[int], ending: Ending) -> list[int]:
        """The ids whose text is delivered: not that of a matched stop id, unless the request asked for it. A grammar
        may end with an end-of-sequence id that the request ignores."""
        stopped = ending[0] == STOP and (
            new[-1] in turn.job.stop_ids or new[-1] in self._limits.eos_token_ids)
        return new[:-1] if stopped and not turn.job.request.sampling.include_stop else new

    @staticmethod
    def _logprobs(row: RowResult, new: list[int], alternatives: int) -> list[TokenLogprob]:
        need(len(row.new_scores) == len(row.new), f"{len(row.new_scores)} log-probabilities of {len(row.new)} ids")
        return [_token_logprob(token, score, alternatives) for token, score in zip(new, row.new_scores)]

    # ------------------------------------------------------------------------------------------------ prompt scores
    @staticmethod
    def _collect_scores(turn: Turn, scores: dict[int, TokenScore]) -> None:
        """In order of position, each once: a seat asks from the first that is owed, so a retraction repeats none."""
        alternatives = turn.job.request.sampling.prompt_logprobs
        assert turn.scores is not None and alternatives is not None
        for position in sorted(scores):
            due = turn.job.scores_from + 1 + len(turn.scores)
            need(position == due < turn.job.prompt, f"the score of the prompt's id {position} came; {due} is due")
            turn.scores.append(_token_logprob(turn.tokens[position], scores[position], alternatives))

    @staticmethod
    def _take_scores(turn: Turn) -> list[TokenLogprob] | None:
        """All of them, once; the first prompt id has none."""
        job, scores = turn.job, turn.scores
        if scores is None:
            return None
        need(len(scores) == job.prompt - 1 - job.scores_from or job.scores_from >= job.prompt,
             f"{len(scores)} scores of a prompt of {job.prompt} from position {job.scores_from}")
        turn.scores = None
        first = [TokenLogprob(turn.tokens[0], None, [], [])] if job.scores_from == 0 else []
        return first + scores

    # ---------------------------------------------------------------------------------------------------- choices
    def _fork(self, turn: Turn, new: list[int]) -> None:
        """The other choices of the request, on the same prompt's pages."""
        assert turn.lease is not None
        job, known = turn.job, turn.tokens + new
        for index in range(1, 1 + turn.unforked):
            child = self._intake.choice(turn, index)
            child.lease, swaps = self._ledger.fork(turn.lease, known, job.prompt, job.limit - 1)
            self._ops.map(turn.slot, swaps)
            self._counters.forks += 1
            self._counters.forks_without_pages += child.lease is None
            self._live.add(child)
            self._queue.push(child)
        turn.unforked = 0

    # -------------------------------------------------------------------------------------------------------- ends
    def _finish(self, turn: Turn, ending: Ending, outputs: list[Output], exact: bool) -> None:
        """`exact`: the device ended the turn where the client sees it end."""
        lease = turn.lease
        assert lease is not None
        if exact:
            need(lease.lo == len(turn.tokens) - (turn.job.goal == Goal.GENERATE), "an inexact length at a turn's end")
        self._ledger.settle(lease, len(turn.tokens))
        if turn.session is not None:
            outputs += self._sessions.ended(turn, exact)
        else:
            self._slots.leave(turn)
            self._release(turn)
        self._retire(turn)

    def abort(self, rid: str, received: int | None = None) -> list[Output]:
        """Releases every choice of the request at once; what is in flight will find nobody. `received`: generated ids
        that the client surely has (None: all), of a session's turn that may keep them."""
        outputs: list[Output] = []
        for turn in self._live.of(rid):
            self._counters.aborts += 1
            outputs += self._outputs_at_end(turn, (ABORT, None))
            self._unseat(turn, returns=True)
            if turn.session is not None:
                self._retire(turn)
                outputs += self._sessions.aborted(turn, received)
            else:
                self._let_go(turn)
        if not outputs and self._sessions.cancel(rid):
            outputs.append(Output(rid, 0, [], "", ABORT))
        return outputs

    def fail(self, turn: Turn, cause: str) -> list[Output]:
        """Ends one turn whose grammar cannot be used, or has led into a dead end: the request's own fault."""
        self._counters.grammar_errors += 1
        return self._fail(turn, cause, "invalid_grammar", None)

    def crowd_out(self, turn: Turn) -> list[Output]:
        """Ends one turn whose grammar has waited too long for others."""
        self._counters.grammars_crowded += 1
        return self._fail(turn, CROWDED, "queue_full", None)

    def fail_processor(self, turn: Turn, cause: str) -> list[Output]:
        """Ends one turn whose logit processor has failed. Code of the client's is the client's own fault."""
        self._counters.processor_errors += 1
        uses = turn.job.request.sampling.logit_processors
        own = any(use.source for use in uses)
        code = "custom_logit_processor_failed" if own else "logit_processor_failed"
        return self._fail(turn, cause, code, uses[-1].param if uses else None)

    def _fail(self, turn: Turn, cause: str, code: str, param: str | None) -> list[Output]:
        outputs = self._outputs_at_end(turn, (ERROR, None), error=cause)
        for output in outputs:
            output.error_code, output.error_param = code, param
        self._unseat(turn)
        self._let_go(turn)
        return outputs + (self._sessions.failed(turn) if turn.session is not None else [])

    def expire(self, turn: Turn) -> list[Output]:
        """The pool cannot hold one more token of this turn, which has it to itself."""
        self._counters.pool_bound += 1
        outputs = self._outputs_at_end(turn, (LENGTH, POOL_FULL))
        if turn.text is not None and turn.job.request.want_text:
            outputs[0].text = turn.text.push([], True).text  # what was held back
        self._unseat(turn)
        self._let_go(turn)
        return outputs + (self._sessions.finished_without_pages(turn) if turn.session is not None else [])

    def _unseat(self, turn: Turn, returns: bool = False) -> None:
        if turn.slot >= 0:
            self._slots.leave(turn, returns)
        else:
            self._queue.remove(turn)

    def _let_go(self, turn: Turn) -> None:
        if turn.lease is not None:
            self._release(turn)
        self._retire(turn)

    def _release(self, turn: Turn) -> None:
        assert turn.lease is not None
        self._ledger.publish(turn.lease, turn.tokens)
        self._ledger.drop(turn.lease)
        turn.lease = None

    def _retire(self, turn: Turn) -> None:
        if turn.home is not None and turn.session is None:
            self._ledger.forget(turn.home)
        self._live.remove(turn)
        self._slots.ended += 1
        self._counters.turns += 1

    def _outputs_at_end(self, turn: Turn, ending: Ending, error: str | None = None,
                        scores: list[TokenLogprob] | None = None) -> list[Output]:
        """The last output of a turn, and of the choices that were to be forked from it."""
        indices = (turn.job.index, *range(1, 1 + turn.unforked))
        return [Output(turn.job.request.rid, index, [], "", *ending, turn.usage.snapshot(), error=error,
                       prompt_logprobs=scores if index == turn.job.index else None) for index in indices]

    def quarantine(self, turn: Turn, cause: Exception) -> list[Output]:
        """A broken check, text that cannot be made, or a drafter that fails ends one request; the engine serves on."""
        if self._limits.strict:
            raise cause
        self._counters.faults += 1
        rid = turn.job.request.rid
        logger.error("request %s: %s; the last results: %s", rid, cause, list(self._recent), exc_info=cause,
                     extra={"request_id": rid})
        outputs: list[Output] = []
        for other in self._live.of(rid):
            outputs += self._outputs_at_end(other, (ERROR, None), error=f"internal error: {cause}")
            outputs += self._withdraw_broken(other)
        return outputs

    def _withdraw_broken(self, turn: Turn) -> list[Output]:
        if turn.slot >= 0:
            self._slots.leave(turn)
        elif turn in self._queue:
            self._queue.remove(turn)
        lease, turn.lease = turn.lease, None
        if lease is not None:
            try:
                self._ledger.drop(lease)
            except HostFault:
                self._ledger.fence(lease)
        self._retire(turn)
        return self._sessions.failed(turn) if turn.session is not None else []


def _token_logprob(token: int, score: TokenScore, alternatives: int) -> TokenLogprob:
    return TokenLogprob(token, score.logprob, score.top_ids[:alternatives], score.top_logprobs[:alternatives])
