"""Rounds trained heads to 4 bits by the inputs that their matrices meet, without training them further:

    python -m training.calibrate heads answers.npz --start stretto/spec/trained

GPTQ (Frantar et al. 2022, arXiv 2210.17323): columns are rounded one after another, and what a column loses is made up
for by those after it, as far as their inputs go together. The scale of a group is the one of a few that loses least.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cyclopts
import torch
from torch import nn

from training import export
from training.answers import Batch, Dataset
from training.heads import Seen
from training.recipes import RECIPES
from training.target import Teacher

CLIPS = (1.0, 0.92, 0.84, 0.76)  # of the largest number of a group, which becomes the largest code
DAMPING = 0.01  # of the mean of the diagonal: directions in which there were few inputs
SEQUENCES = 4  # whose states exist at a time


def seen_of(batch: Batch, data: Dataset, teacher: Teacher) -> Seen:
    """As `loop.inputs_of`, with states that are computed now."""
    taps, _ = teacher.states(data.ids[batch.rows])
    before = data.ids[batch.label_rows]
    return Seen(taps.float(), teacher.embedding[data.ids[batch.rows]].float(), batch.owner, batch.position,
                batch.anchors, teacher.embedding[before].float(), before)


class Moments:
    """Of the inputs of each matrix of a head that will be rounded: sums of x^T x, [I, I]."""

    def __init__(self, head: nn.Module):
        self.of: dict[str, torch.Tensor] = {}
        for name, part in head.named_modules():
            if isinstance(part, nn.Linear) and export.is_rounded(part.weight):
                part.register_forward_pre_hook(lambda _, inputs, name=name: self.add(name, inputs[0]))

    def add(self, name: str, x: torch.Tensor) -> None:
        x = x.detach().flatten(0, -2).float()
        self.of[name] = self.of.get(name, 0) + x.t() @ x


@torch.no_grad()
def moments_of(head: Any, batches: Iterator[Seen], drafts: int) -> dict[str, torch.Tensor]:
    moments = Moments(head)
    for seen in batches:
        hidden = head.drafts(seen).flatten(0, 1)[:, :drafts]
        factors = head.factors(hidden, seen.before.flatten(0, 1)[:, : hidden.shape[1]])
        for name, part in head.named_modules():  # what is multiplied by its weight alone
            for x, weight in factors:
                if weight is getattr(part, "weight", None) and export.is_rounded(weight):
                    moments.add(name, x)
    return moments.of


def best_scale(group: torch.Tensor) -> torch.Tensor:
    """group [O, GROUP] -> [O] bfloat16: the scale of those tried with which it loses least."""
    most, best, least = group.abs().amax(1) / export.MOST, None, None
    for clip in CLIPS:
        scale = (most * clip).clamp(min=1e-8).bfloat16()
        codes = (group / scale.float()[:, None]).round().clamp(-export.MOST, export.MOST)
        lost = (codes * scale.float()[:, None] - group).square().sum(1)
        best = scale if best is None else torch.where(lost < least, scale, best)
        least = lost if least is None else torch.minimum(lost, least)
    assert best is not None
    return best


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
            out[:, i] = (left[:, i] / scale).round().clamp(-export.MOST, export.MOST) * scale
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
        if (not isinstance(weight, nn.Parameter) or not export.is_rounded(weight)
                or export.has_eight_bits(head, name)):
            continue
        if name in moments:
            value, scales[f"{name}.weight"] = rounded_by(weight, moments[name])
        else:  # rows that are looked up
            groups = weight.unflatten(1, (-1, export.GROUP))
            scale = best_scale(groups.flatten(0, 1).float()).view(len(weight), -1)
            scales[f"{name}.weight"], value = scale, export.rounded(weight, scale)
        weight.copy_(value)
    return scales


def main(output: Path, *answers: Path, start: Path, model: str | None = None, heads: tuple[str, ...] = tuple(RECIPES),
         ids: int = 8_000) -> None:
    """output: the folder of the heads' folders.  answers: made by training.generate.  start: trained heads.
    ids: of answers and their prompts that are read."""
    torch.manual_seed(0)
    recipes = {name: RECIPES[name] for name in heads}
    taps = tuple(sorted({layer for recipe in recipes.values() for layer in recipe.taps}))
    cpu = torch.device("cpu")
    data = Dataset(answers, max(recipe.drafts for recipe in recipes.values()), cpu, most=ids)
    teacher = Teacher(model, taps, cpu, torch.bfloat16)
    began = time.monotonic()
    batches = [seen_of(data.whole(chosen), data, teacher) for chosen in data.train.split(SEQUENCES)]
    print(f"{len(data.train)} answers, {len(data.ids)} ids: states in {time.monotonic() - began:.0f} s", flush=True)
    for name, recipe in recipes.items():
        head = recipe.make(teacher, export.vocabulary_of(start / name)).float()
        export.load(head, start / name)
        before = {key: weight.detach().clone() for key, weight in head.named_parameters()}
        scales = round_head(head, moments_of(head, iter(batches), recipe.drafts))
        lost = {key: float((weight.detach() - before[key]).norm() / before[key].norm())
                for key, weight in head.named_parameters() if key in scales}
        print(f"{name}: lost of its weights {min(lost.values()):.3f} to {max(lost.values()):.3f}", flush=True)
        recipe.save(output / name, head, teacher, scales)


if __name__ == "__main__":
    cyclopts.run(main)
