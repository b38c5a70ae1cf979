"""Rounds trained heads to 4 bits by the inputs that their matrices meet, without training them further:

    python -m training.calibrate heads answers.npz --start stretto/spec/trained

GPTQ (Frantar et al. 2022, arXiv 2210.17323): columns are rounded one after another, and what a column loses is made up
for by those after it, as far as their inputs go together. The scale of a group is the one of a few that loses least.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import cyclopts
import torch
from torch import nn

from training import export
from training.answers import Dataset
from training.heads import Seen
from training.loop import inputs_of
from training.recipes import RECIPES
from training.target import Memory, Teacher

CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of a group's largest number, which becomes the largest code
DAMPING = 0.01  # of the mean of the diagonal: directions in which there were few inputs
TOKENS, ANCHORS = 1_024, 128  # of a batch
MEASURED = 48  # batches whose inputs matrices are rounded by


def batches_of(data: Dataset, teacher: Teacher, memory: Memory, drafts: int) -> Iterator[Seen]:
    """Endlessly: what a head reads."""
    for batch in data.batches(TOKENS, ANCHORS):
        yield inputs_of(batch, data, teacher, memory).cut(drafts).as_float().seen


class Moments:
    """Of the inputs of each matrix of a head that will be rounded: sums of x^T x, [I, I]."""

    def __init__(self, head: nn.Module):
        self.of: dict[str, torch.Tensor] = {}
        self.hooks = [part.register_forward_pre_hook(lambda _, inputs, name=name: self.add(name, inputs[0]))
                      for name, part in head.named_modules()
                      if isinstance(part, nn.Linear) and export.is_rounded(part.weight)]

    def add(self, name: str, x: torch.Tensor) -> None:
        x = x.detach().flatten(0, -2).float()
        if name == "fc":  # what it makes is normalised, and states of first ids are a thousand times as long as others
            x = x / x.norm(dim=1, keepdim=True)
        with torch.autocast("cpu", enabled=False):
            self.of[name] = self.of.get(name, 0) + x.t() @ x


@torch.no_grad()
def moments_of(head: Any, batches: Iterable[Seen]) -> dict[str, torch.Tensor]:
    moments = Moments(head)
    for seen in batches:
        with torch.autocast("cpu", torch.bfloat16):
            factors = head.factors(head.drafts(seen).flatten(0, 1), seen.before.flatten(0, 1))
        for name, part in head.named_modules():  # what is multiplied by its weight alone
            for x, weight in factors:
                if weight is getattr(part, "weight", None) and export.is_rounded(weight):
                    moments.add(name, x)
    for hook in moments.hooks:
        hook.remove()
    return moments.of


def best_scale(group: torch.Tensor) -> torch.Tensor:
    """group [O, GROUP] -> [O] bfloat16: the scale of those tried with which it loses least."""
    scales = (export.largest_scale(group).float() * torch.tensor(CLIPS)[:, None]).bfloat16()  # [CLIPS, O]
    codes = (group / scales.float()[..., None]).round().clamp(export.LEAST, export.MOST)
    lost = (codes * scales.float()[..., None] - group).square().sum(2)
    return scales.gather(0, lost.argmin(0)[None])[0]


@torch.no_grad()
def rounded_by(weight: torch.Tensor, moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [O, I], moments [I, I] of its inputs -> the rounded weight, and its scales [O, I / GROUP] bfloat16."""
    left, out, scales = weight.float().clone(), torch.empty_like(weight, dtype=torch.float32), []
    damped = moments + DAMPING * moments.diagonal().mean().clamp(min=1e-6) * torch.eye(len(moments))
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    for start in range(0, weight.shape[1], export.GROUP):
        stop = start + export.GROUP
        scales.append(best_scale(left[:, start:stop]))
        scale, lost = scales[-1].float(), torch.empty(len(weight), export.GROUP)
        for i in range(start, stop):
            out[:, i] = (left[:, i] / scale).round().clamp(export.LEAST, export.MOST) * scale
            lost[:, i - start] = (left[:, i] - out[:, i]) / upper[i, i]
            left[:, i + 1 : stop] -= lost[:, i - start, None] * upper[i, i + 1 : stop]
        left[:, stop:] -= lost @ upper[start:stop, stop:]
    return out, torch.stack(scales, 1)


@torch.no_grad()
def round_head(head: nn.Module, moments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rounds in place. Returns the scales, by the names of the weights."""
    scales = {}
    for name, part in head.named_modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, nn.Parameter) and export.is_rounded(weight) and not export.has_eight_bits(head, name):
            measured = moments[name] if name in moments else moments_of_readers(head, name)
            value, scales[f"{name}.weight"] = rounded_by(weight, measured)
            weight.copy_(value)
    return scales


def moments_of_readers(head: Any, name: str) -> torch.Tensor:
    """For rows that are looked up: what a row loses, x, changes what is made of it by W x; hence W^T W, [r, r]."""
    assert name == "markov_head.markov_w1", name
    rank = head.markov_head.markov_w1.embedding_dim
    reader = head.markov_head.joint_proj.weight[:, rank : 2 * rank]
    return reader.t() @ reader


def main(output: Path, *answers: Path, start: Path, model: str | None = None, heads: tuple[str, ...] = tuple(RECIPES),
         ids: int = 60_000) -> None:
    """output: the folder of the heads' folders.  answers: made by training.generate.  start: trained heads.
    ids: of answers and their prompts that are read."""
    torch.manual_seed(0)
    recipes = {name: RECIPES[name] for name in heads}
    taps = tuple(sorted({layer for recipe in recipes.values() for layer in recipe.taps}))
    cpu, began = torch.device("cpu"), time.monotonic()
    data = Dataset(answers, max(recipe.drafts for recipe in recipes.values()), cpu, most=ids)
    teacher = Teacher(model, taps, cpu, torch.bfloat16)
    memory = teacher.remember(data, TOKENS)
    print(f"{len(data.train)} answers, {len(data.ids)} ids: states in {time.monotonic() - began:.0f} s", flush=True)
    for name, recipe in recipes.items():
        head = recipe.make(teacher, export.vocabulary_of(start / name)).float()
        export.load(head, start / name)
        before = {key: weight.detach().clone() for key, weight in head.named_parameters()}
        batches = islice(batches_of(data, teacher, memory, recipe.drafts), MEASURED)
        scales = round_head(head, moments_of(head, batches))
        lost = {key: float((weight.detach() - before[key]).norm() / before[key].norm())
                for key, weight in head.named_parameters() if key in scales}
        print(f"{name}: lost of its weights {min(lost.values()):.3f} to {max(lost.values()):.3f}", flush=True)
        recipe.save(output / name, head, teacher, scales)


if __name__ == "__main__":
    cyclopts.run(main)
