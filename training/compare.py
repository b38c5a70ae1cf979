"""What heads are worth against each other, without an engine: greedy answers to Spec-Bench and GSM8K's test set, which
training never saw, are made once and walked with each head as an engine walks them.

    python -m training.compare ../shared/data before/eagle3 heads/eagle3 --answers evaluation.npz

Answers are the same for all heads, so differences are known far better than the lengths themselves; the deviation of a
difference is that of answers drawn anew from these (bootstrap).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import cyclopts
import numpy as np
import torch

from benchmarks.drafters import questions
from stretto.model.hub import resolve_model
from stretto.text.tokenizer import Tokenizer, load_tokenizer
from training import export
from training.answers import Answered, Answers, Dataset
from training.calibrate import TOKENS
from training.heads import Head, logits_of
from training.loop import Inputs, inputs_of, walked
from training.recipes import RECIPES, Recipe
from training.target import Memory, Teacher

ROWS = 32  # answered at once
DRAWS = 4000  # of the bootstrap


@torch.no_grad()
def answered(teacher: Teacher, tokenizer: Tokenizer, prompts: Sequence[list[int]], most: int) -> Answers:
    """Greedily, `most` ids each, in the order of the prompts."""
    found, pad = Answers(), 0
    for at in range(0, len(prompts), ROWS):
        some = prompts[at : at + ROWS]
        longest = max(map(len, some))
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in some])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in some])
        made = teacher.network.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=most,
                                        eos_token_id=list(tokenizer.eos_token_ids), pad_token_id=pad)
        for prompt, row in zip(some, made[:, longest:].tolist(), strict=True):
            ends = [i for i, one in enumerate(row) if one in tokenizer.eos_token_ids]
            found.add(Answered(prompt, row[: ends[0] + 1] if ends else row, greedy=True))
        print(f"{len(found)} of {len(prompts)} answers, {found.tokens} ids", flush=True)
    return found


def prompts_of(data: Path, tokenizer: Tokenizer, gsm8k: int, longest: int) -> list[list[int]]:
    """Spec-Bench's first questions and `gsm8k` of GSM8K's test set, those of at most `longest` ids, in random order."""
    asked = [[{"role": "user", "content": q.turns[0]}] for q in questions(data, None, gsm8k)]
    found = [prompt for one in asked if len(prompt := tokenizer.apply_chat_template(one)) <= longest]
    random.Random(0).shuffle(found)
    return found


@torch.no_grad()
def right(head: Head, inputs: Inputs) -> torch.Tensor:
    """How many drafts would be accepted after each anchor, [B, A]. Products in bfloat16, as an engine's."""
    before = inputs.seen.before.flatten(0, 1)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = head.drafts(inputs.seen).flatten(0, 1)
        best = torch.cat([logits_of(head.factors(h, b)).argmax(-1)
                          for h, b in zip(hidden.split(256), before.split(256), strict=True)])
    found = (head.ids[best].view_as(inputs.labels) == inputs.labels) & inputs.valid
    return found.int().cumprod(-1).sum(-1)


def counts(heads: Sequence[Head], recipe: Recipe, data: Dataset, teacher: Teacher, memory: Memory) -> np.ndarray:
    """Ids and steps of each answer, [heads, answers, 2]."""
    found: list[list[tuple[int, int]]] = [[] for _ in heads]
    for chosen in data.groups(data.lengths.argsort(), TOKENS):
        batch = data.whole(chosen)
        inputs = inputs_of(batch, data, teacher, memory).cut(recipe.drafts).as_float()
        for head, own in zip(heads, found, strict=True):
            own += walked(right(head, inputs), batch.valid[..., 0].sum(1))
    return np.array(found)


def compared(first: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """[answers, 2] each, ids and steps. By which share `other` gives more ids a step, and the deviation of that."""
    drawn = np.random.default_rng(0).integers(len(first), size=(DRAWS, len(first)))
    gains = [first[at, 1].sum(-1) / other[at, 1].sum(-1) - 1 for at in (np.arange(len(first)), drawn)]
    return float(gains[0]), float(gains[1].std())


def main(data: Path, *folders: Path, answers: Path, model: str | None = None, gsm8k: int = 90, longest: int = 640,
         tokens: int = 200) -> None:
    """data: the folder with eval/.  folders: heads of one kind; others are compared with the first.  answers: an .npz
    file; they are made and written if it is not there.  gsm8k: questions of its test set.  longest: prompt.
    tokens: most of an answer."""
    recipe = RECIPES[folders[0].name]
    cpu = torch.device("cpu")
    teacher = Teacher(model, recipe.taps, cpu, torch.bfloat16)
    if not answers.is_file():
        tokenizer = load_tokenizer(resolve_model(model))
        answered(teacher, tokenizer, prompts_of(data, tokenizer, gsm8k, longest), tokens).save(answers)
    stored = Dataset([answers], recipe.drafts, cpu)
    heads = []
    for folder in folders:
        heads.append(recipe.make(teacher, export.vocabulary_of(folder)).float().requires_grad_(False))
        export.load(heads[-1], folder)
    found = counts(heads, recipe, stored, teacher, teacher.remember(stored, TOKENS))
    for folder, own in zip(folders, found, strict=True):
        gain, deviation = compared(found[0], own)
        print(f"{folder}: {own[:, 0].sum() / own[:, 1].sum():.3f} ids a step over {len(own)} answers of"
              f" {own[:, 0].sum()} ids; {100 * gain:+.2f} % ({100 * deviation:.2f})", flush=True)


if __name__ == "__main__":
    cyclopts.run(main)
