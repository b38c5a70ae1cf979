"""Requests become turns: limits, seeds, ranks, stop ids, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

from stretto.host.grammar import Grammars, GrammarState
from stretto.host.limits import HostLimits
from stretto.host.turn import Job, Turn
from stretto.params import SamplingParams
from stretto.protocol import Request, RequestError, Usage
from stretto.text.grammar import GrammarError
from stretto.text.stream import TextStream
from stretto.wire import NEVER, Goal

TextStreamOf = Callable[[SamplingParams], TextStream]


class Intake:
    """`compiling` lists the turns whose grammar was not ready when they came."""

    def __init__(self, limits: HostLimits, text_stream: TextStreamOf | None, grammars: Grammars | None = None):
        self._limits, self._text_stream, self._grammars = limits, text_stream, grammars
        self.compiling: list[Turn] = []
        self._serials = count()

    def serial(self) -> int:
        """A request's place in the order in which they came."""
        return next(self._serials)

    def turn(self, request: Request, tokens: list[int], serial: int, scores_from: int = 0,
             capacity: int | None = None) -> Turn:
        """The first choice of a request on `tokens` (the request's own, after a session's history of at most
        `capacity` ids).

        Raises RequestError where it can never run; no seed is drawn for it then."""
        limits, sampling, prompt = self._limits, request.sampling, len(tokens)
        if not 1 <= prompt < limits.max_model_len:
            raise RequestError(f"the prompt has {prompt} tokens; it must have 1..{limits.max_model_len - 1}",
                               param="prompt", code="context_length_exceeded")
        if sampling.stop and self._text_stream is None:
            raise RequestError("stop strings need the text, and this engine has no tokenizer: use stop_token_ids",
                               param="stop")
        self._check_processors(sampling)
        goal = _goal(request)
        asked = self._asked(prompt, sampling) if goal == Goal.GENERATE else prompt + 1
        if capacity is not None and goal == Goal.GENERATE:
            if prompt >= capacity:
                raise RequestError(f"the prompt has {prompt} tokens; this session was opened for {capacity}: rewind it,"
                                   " or open a larger one", param="prompt", code="context_length_exceeded")
            asked = min(asked, capacity)
        limit = min(asked, limits.kv_tokens + 1)  # the last id needs no cell
        if limit <= prompt:
            raise RequestError(f"the prompt has {prompt} tokens; the KV cache holds {limits.kv_tokens}: shorten the"
                               " prompt, or give the server more KV memory",
                               param="prompt", code="context_length_exceeded")
        width = limits.width if sampling.speculation is None else min(limits.width, sampling.speculation)
        scored = sampling.prompt_logprobs is not None
        lookahead = limits.lookahead if width and goal == Goal.GENERATE else 0
        adapter = 0 if request.adapter is None else limits.adapter(request.adapter).number
        grammar = self._grammar(sampling) if goal == Goal.GENERATE else None
        job = Job(request, 0, (request.priority, serial, 0), goal, prompt, limit, width, lookahead,
                  self._seed(sampling), self._stop_ids(sampling), scores_from if scored else NEVER, adapter,
                  limit < asked, bool(sampling.logit_processors), sampling.speculation is not None)
        turn = Turn(job, list(tokens), self._stream(request, tokens), scores=[] if scored else None,
                    unforked=sampling.n - 1, grammar=grammar)
        if turn.grammar is not None and self._grammars is not None and not turn.ready:
            self._grammars.wait(turn.grammar)
            self.compiling.append(turn)
        return turn

    def _check_processors(self, sampling: SamplingParams) -> None:
        for use in sampling.logit_processors:
            if self._limits.check_processor is None:
                raise RequestError("this engine runs no logit processors", param=use.param)
            try:
                self._limits.check_processor(use)
            except ValueError as e:
                raise RequestError(str(e), param=use.param, code="invalid_logit_processor") from e

    def choice(self, turn: Turn, index: int) -> Turn:
        """Another choice of the same request, on the same prompt."""
        job = turn.job
        rank = (*job.rank[:2], index)
        prompt = turn.tokens[: job.prompt]
        return Turn(replace(job, index=index, rank=rank, scores_from=NEVER), prompt,
                    self._stream(job.request, prompt), usage=Usage(prompt_tokens=job.prompt),
                    grammar=turn.grammar.another() if turn.grammar else None)

    def _grammar(self, sampling: SamplingParams) -> GrammarState | None:
        if sampling.grammar is None:
            return None
        if self._grammars is None:
            raise RequestError("a grammar needs the text of the ids, and this engine has no tokenizer", param="grammar")
        try:
            return self._grammars.state(sampling.grammar)
        except GrammarError as e:
            raise RequestError(str(e), param="grammar") from e

    def _asked(self, prompt: int, sampling: SamplingParams) -> int:
        room = self._limits.max_model_len
        return room if sampling.max_tokens is None else min(room, prompt + sampling.max_tokens)

    def _seed(self, sampling: SamplingParams) -> int:
        seed = self._limits.seeds.getrandbits(64) if sampling.seed is None else sampling.seed
        return seed & (2**64 - 1)

    def _stop_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        eos = () if sampling.ignore_eos else sorted(self._limits.eos_token_ids)
        return tuple(dict.fromkeys((*eos, *sampling.stop_token_ids)))

    def _stream(self, request: Request, prompt: list[int]) -> TextStream | None:
        if self._text_stream is None or not (request.want_text or request.sampling.stop):
            return None
        stream = self._text_stream(request.sampling)
        stream.follow(prompt)
        return stream


def _goal(request: Request) -> Goal:
    if request.pooling is not None:
        return Goal.EMBED_MEAN if request.pooling == "mean" else Goal.EMBED
    return Goal.SCORE if request.sampling.max_tokens == 0 else Goal.GENERATE
