"""What a request must have answered, by one plain forward pass of transformers' model over prompt and answer.

No engine, no cache, no chunk, no batch: the logits of every position at once, then the processors and the noise in
the order that `stretto.params` documents, written down again in the simplest way. Every id that was delivered must be
the best one there, up to rounding; every log-probability must be the model's own.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from stretto.ops.fp8 import dequantize_heads, quantize_heads
from stretto.params import SamplingParams
from stretto.protocol import TokenLogprob
from stretto.sample.noise import gumbel, noise_keys

# How far log-probabilities of the tiny model may lie from those of transformers. Seen: 2.5e-5, 0.12 and 0.6.
TOLERANCE = {"float32": 2e-4, "float16": 0.25, "bfloat16": 1.0}
# The same with an 8-bit KV cache: a number next to the middle of two codes may become either. That bfloat16's are
# rounding and nothing else was seen on 54,463 log-probabilities, against the reference with rounded cells in float64:
#                                               root mean square    99 %    99.9 %    most
#   this engine in bfloat16                          0.19            0.67     1.14     2.93 (of an id at -33)
#   transformers' model in bfloat16, same cells      0.23            0.89     1.90     2.59
#   the reference in float32                         0.00007                           0.002
# One id may be so far off; many are not, see `SPREAD`.
EIGHT_BITS = {"float32": 0.1, "float16": 1.5, "bfloat16": 3.5}
SPREAD = 0.25  # of the tolerance: how large the root mean square of all differences may be
RARE = 16.0  # an id whose logit lies so far below the best one is not drawn in a thousand places
Allowed = Callable[[int], Sequence[int]]  # ids that a grammar allows at a place of the answer
Processor = Callable[[list[int], torch.Tensor], torch.Tensor]  # ids before a position, its logits [V] -> [V]


@dataclass
class Replay:
    """`seen` counts, over all answers: ids, places where penalties or a processor changed the likeliest one, ids that
    were drawn and are not the likeliest, positions whose log-probabilities were compared, of answers and of prompts;
    `off` is the largest difference."""

    reference: transformers.PreTrainedModel
    tolerance: float

    def __post_init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.off = self._squares = 0.0

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """[T, V], float32."""
        return self.reference(torch.tensor([ids])).logits[0].float()

    def check(self, prompt: list[int], answer: list[int], sampling: SamplingParams, choice: int = 0,
              scores: list[TokenLogprob] | None = None, prompt_scores: list[TokenLogprob] | None = None,
              allowed: Allowed | None = None, processor: Processor | None = None, rejection: bool = False) -> None:
        """Raises AssertionError where an id or a log-probability is not what it must be. `rejection`: drawn ids come
        of other chances than the noise; they have to be likely enough to be drawn at all."""
        whole = prompt + answer
        logits = self.logits(whole)
        for place, chosen in enumerate(answer):
            at = len(prompt) + place
            raw = logits[at - 1]
            values = plain = penalised(raw, prompt, answer[:place], sampling)
            if processor is not None:
                values = processor(whole[:at], values)
            if allowed is not None:
                mask = torch.full_like(values, float("-inf"))
                mask[list(allowed(place))] = 0
                values, plain, raw = values + mask, plain + mask, raw + mask
            keys, noisy = values, sampling.temperature > 0
            slack = self.tolerance * 2 / (sampling.temperature if noisy else 1)
            if noisy and not rejection:
                keys = values / sampling.temperature + noise(sampling.seed or 0, choice, at, len(values))
            elif noisy:
                keys, slack = values / sampling.temperature, slack + RARE
            assert float(keys.max() - keys[chosen]) <= slack, (
                f"id {chosen} at place {place} of {answer}; {int(keys.argmax())} is better by"
                f" {float(keys.max() - keys[chosen]):.4f} (choice {choice})")
            self.seen["ids"] += 1
            self.seen["penalised"] += int(raw.argmax()) != int(plain.argmax())
            self.seen["processed"] += int(plain.argmax()) != int(values.argmax())
            self.seen["drawn"] += noisy and chosen != int(values.argmax())
        if scores is not None:
            assert [s.token_id for s in scores] == answer
            self.seen["scores"] += self._compare(scores, logits, len(prompt))
        if prompt_scores is not None:
            known = [s for s in prompt_scores if s.logprob is not None]
            first = len(prompt) - len(known)
            assert first <= 1 or len(known) < len(prompt_scores) or prompt_scores[0].logprob is not None
            assert [s.token_id for s in known] == prompt[first:]
            self.seen["prompt scores"] += self._compare(known, logits, first)

    def check_spread(self) -> None:
        """At the end: no log-probability is far off, and hardly any is off by much."""
        count = self.seen["scores"] + self.seen["prompt scores"]
        spread = (self._squares / max(count, 1)) ** 0.5
        assert spread <= SPREAD * self.tolerance, f"the root mean square of {count} differences is {spread}"

    def _compare(self, scores: list[TokenLogprob], logits: torch.Tensor, first: int) -> int:
        """Scores of the ids from position `first` on. Returns how many."""
        own = logits.log_softmax(-1)
        for i, score in enumerate(scores):
            row = own[first + i - 1]
            assert score.logprob is not None
            off = max([abs(score.logprob - float(row[score.token_id]))]
                      + [abs(value - float(row[other])) for other, value in zip(score.top_ids, score.top_logprobs)])
            self.off, self._squares = max(self.off, off), self._squares + off**2
            assert off <= self.tolerance, f"log-probability {i} of {score} is off by {off}"
        return len(scores)


def penalised(raw: torch.Tensor, prompt: list[int], output: list[int], sampling: SamplingParams) -> torch.Tensor:
    """Repetition over prompt and output, presence and frequency over the output. [V] -> [V]."""
    values = raw.clone()
    for token in set(prompt + output):
        values[token] = raw[token] / sampling.repetition_penalty if raw[token] > 0 else \
            raw[token] * sampling.repetition_penalty
    for token, times in Counter(output).items():
        values[token] -= times * sampling.frequency_penalty + sampling.presence_penalty
    return values


def noise(seed: int, choice: int, position: int, vocab: int) -> torch.Tensor:
    """[V] of one sampled position; a seed below 2^31."""
    one = [torch.tensor([value]) for value in (seed, 0, choice, position)]
    return gumbel(noise_keys(*one), torch.arange(vocab))[0]


def with_rounded_cells(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """A copy whose keys and values are rounded as an 8-bit KV cache rounds them."""
    transformers.AttentionInterface.register("eight_bits", _attention_of_rounded)
    transformers.AttentionMaskInterface.register("eight_bits", sdpa_mask)
    made = copy.deepcopy(model)
    made.set_attn_implementation("eight_bits")
    return made


def _attention_of_rounded(module, query, key, value, attention_mask, **more):
    key, value = (dequantize_heads(*quantize_heads(x), torch.float32) for x in (key, value))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
