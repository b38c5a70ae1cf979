"""`stretto parity A B`: do two configurations give the same text? And where they do not, why?

Both answer the same prompts greedily. At the first id that differs both have seen the same ids, so their two best
log-probabilities there tell whether rounding explains it: both find the two ids about equally good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stretto.bench.rounding import TOLERANCE
from stretto.config import Config
from stretto.engine.llm import LLM, Completion
from stretto.params import SamplingParams
from stretto.protocol import TokenLogprob


@dataclass
class Difference:
    """Where the answers to one prompt part. Gaps: log-probability of the best id minus that of the second."""

    prompt: int
    at: int
    ids: tuple[int | None, int | None]  # None: the answer had ended
    texts: tuple[str, str]
    gaps: tuple[float, float]
    rounding: bool


@dataclass
class Parity:
    prompts: int
    tokens: int
    dtypes: tuple[str, str]
    drafted: tuple[int, int]
    differences: list[Difference] = field(default_factory=list)

    @property
    def explained(self) -> bool:
        """No difference, or none that rounding does not explain."""
        return all(d.rounding for d in self.differences)


@dataclass
class _Side:
    dtype: str
    answers: list[Completion]
    texts: list[list[str]]


def compare(a: Config, b: Config, prompts: Sequence[list[int]] | Sequence[str], tokens: int) -> Parity:
    """Runs both, one after the other. Raises ValueError where their tokenizers read a prompt differently, and whatever
    an engine raises that cannot start."""
    sides = [_answers(config, prompts, tokens) for config in (a, b)]
    first, second = sides
    out = Parity(len(prompts), tokens, (first.dtype, second.dtype), (_drafted(first), _drafted(second)))
    tolerance = max(TOLERANCE[side.dtype] for side in sides)
    for number, pair in enumerate(zip(first.answers, second.answers, strict=True)):
        if pair[0].prompt_tokens != pair[1].prompt_tokens:
            raise ValueError(f"the two models read prompt {number} as different tokens: they have to share a tokenizer")
        at = _first_difference(pair[0].token_ids, pair[1].token_ids)
        if at is not None:
            out.differences.append(_describe(number, at, pair, (first.texts[number], second.texts[number]), tolerance))
    return out


def _answers(config: Config, prompts: Sequence, tokens: int) -> _Side:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=2)
    with LLM(config=config) as llm:
        answers = llm.generate(list(prompts), sampling)
        texts = [[llm.tokenizer.decode([i], skip_special_tokens=False) for i in one.token_ids] for one in answers]
        return _Side(llm.prepared.resolved.dtype, answers, texts)


def _drafted(side: _Side) -> int:
    return sum(one.usage.drafted_tokens for one in side.answers if one.usage is not None)


def _first_difference(a: list[int], b: list[int]) -> int | None:
    at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
    return at if at is not None or len(a) == len(b) else min(len(a), len(b))


def _describe(number: int, at: int, pair: tuple[Completion, Completion], texts: tuple[list[str], list[str]],
              tolerance: float) -> Difference:
    ids = tuple(one.token_ids[at] if at < len(one.token_ids) else None for one in pair)
    words = tuple(text[at] if at < len(text) else "" for text in texts)
    gaps = tuple(_gap(one.logprobs, at) for one in pair)
    swapped = None not in ids and all(other in _top(one.logprobs, at) for one, other in zip(pair, reversed(ids)))
    return Difference(number, at, ids, words, gaps, swapped and max(gaps) <= tolerance)  # type: ignore[arg-type]


def _gap(scores: list[TokenLogprob], at: int) -> float:
    best = scores[at].top_logprobs if at < len(scores) else []
    return best[0] - best[1] if len(best) > 1 else float("inf")


def _top(scores: list[TokenLogprob], at: int) -> list[int]:
    return scores[at].top_ids if at < len(scores) else []
