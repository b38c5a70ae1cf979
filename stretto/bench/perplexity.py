"""Perplexity of a text: exp of the mean negative log-probability of its tokens, in windows that do not overlap.

    text    | window | window | ... |       each window begins anew; its first token is context only

The same windows for an engine and for transformers make two numbers that only differ by how they compute. Windows go
through the engine as any prompt does, whose log-probabilities are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from stretto.bench.engines import from_gguf
from stretto.engine.llm import LLM
from stretto.params import SamplingParams

Advance = Callable[[int], None]  # told how many tokens were scored


@dataclass(frozen=True)
class Perplexity:
    """Of so many scored tokens."""

    tokens: int
    nats: float  # negative log-probabilities, summed

    @property
    def value(self) -> float:
        return math.exp(self.nats / self.tokens)

    def off(self, reference: Perplexity) -> float:
        """How much larger it is than another of the same windows; 0.01: one per cent."""
        if self.tokens != reference.tokens:
            raise ValueError(f"{self.tokens} and {reference.tokens} tokens were scored: take the same windows")
        return self.value / reference.value - 1


def windows_of(ids: Sequence[int], size: int, most: int | None = None) -> list[list[int]]:
    """Windows of `size` ids, up to `most` ids in all; a last one that is shorter is left out. ValueError where none is
    left."""
    end = len(ids) if most is None else min(len(ids), most)
    made = [list(ids[at : at + size]) for at in range(0, end - size + 1, size)]
    if not made or size < 2:
        raise ValueError(f"{end} tokens make no window of {size}: take a longer text, or windows of 2 tokens or more")
    return made


def engine_perplexity(llm: LLM, windows: Sequence[list[int]], advance: Advance | None = None) -> Perplexity:
    """As the engine computes it, all windows at once. Raises RequestError for a window that does not fit."""
    asked, nats, tokens = SamplingParams(max_tokens=0, prompt_logprobs=0), 0.0, 0
    for found in llm.generate([list(window) for window in windows], asked):
        scores = [score.logprob for score in found.prompt_logprobs if score.logprob is not None]
        nats, tokens = nats - sum(scores), tokens + len(scores)
        if advance is not None:
            advance(len(scores))
    return Perplexity(tokens, nats)


@torch.inference_mode()
def reference_perplexity(model: transformers.PreTrainedModel, windows: Sequence[list[int]],
                         advance: Advance | None = None) -> Perplexity:
    """As transformers computes it, one window after another; log-probabilities from float32 logits."""
    nats, tokens = 0.0, 0
    for window in windows:
        ids = torch.tensor([window], device=model.device)
        logits = model(ids).logits[0, :-1].float()
        nats += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        tokens += len(window) - 1
        if advance is not None:
            advance(len(window) - 1)
    return Perplexity(tokens, nats)


def reference_model(path: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """transformers' own model of a folder, or of a GGUF file with the numbers that its weights stand for."""
    made = (from_gguf(path, dtype) if path.suffix == ".gguf" else
            transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype))
    return made.eval()
