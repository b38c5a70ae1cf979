"""The training loop: several heads side by side, boxed in time, with the acceptance of their drafts simulated.

All heads read the same batches and the same states of the target, of which there is one copy. On a GPU the step of
each head, optimisers included, is captured as one CUDA graph: a step has a thousand small kernels, whose launches
would take ten times as long as their work.

    batch -> inputs (always in the same memory) -> graph of head 1 -> graph of head 2 -> ...
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.nn.utils import parametrize

from training.answers import VALIDATION, WINDOWS, Batch, Dataset
from training.export import round_weights, train_rounded
from training.heads import Head, Seen, logits_of
from training.optim import optimizers_of
from training.target import Memory, Teacher

WARM_UP = 50  # steps until the learning rate is reached
BEFORE_CAPTURE = 3  # steps of each shape that are run as they are
GLANCE = 16  # answers whose acceptance is simulated during training


@dataclass(frozen=True)
class Options:
    """`minutes`: of optimisation; the target's hidden states come before. `tokens` and `anchors`: of a batch. `decay`:
    weight of a draft in relation to the one before it. `hard`: share of the true ids in the loss; the rest is of the
    target's probabilities."""

    minutes: float = 2.0
    tokens: int = 8_192
    anchors: int = 1_024
    rate: float = 4e-3
    decay: float = 0.8
    hard: float = 0.5
    seed: int = 0
    windows: tuple[int, ...] = WINDOWS


class SparseCrossEntropy(torch.autograd.Function):
    """-sum(weights * log softmax(logits)[ids]) where the logits are a sum of products, which are computed once and kept
    as probabilities in the type of the factors: with many ids memory traffic is what a step waits for."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weights: torch.Tensor, *flat: torch.Tensor
                ) -> tuple[torch.Tensor, torch.Tensor]:
        """ids, weights [N, L]; x, w of each factor. Returns the sum, and the likeliest id of each row, [N]."""
        factors = list(zip(flat[::2], flat[1::2], strict=True))
        logits = logits_of(factors)
        p = torch.softmax(logits, -1, dtype=logits.dtype)
        ctx.save_for_backward(p, ids, weights, *flat)
        return -(weights * p.gather(1, ids).float().clamp(min=1e-20).log()).sum(), p.argmax(-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        p, ids, weights, *flat = ctx.saved_tensors
        weights = weights * grads[0]
        d = p.mul_(weights.sum(1, keepdim=True).to(p.dtype)).scatter_add_(1, ids, -weights.to(p.dtype))
        out: list[torch.Tensor | None] = [None, None]
        for i, (x, w) in enumerate(zip(flat[::2], flat[1::2], strict=True)):
            of_x, of_w = ctx.needs_input_grad[2 + 2 * i : 4 + 2 * i]
            out.append((d @ w.to(d.dtype)).to(x.dtype) if of_x else None)
            out.append((d.t() @ x.to(d.dtype)).to(w.dtype) if of_w else None)
        return tuple(out)


@dataclass(frozen=True)
class Inputs:
    """All that a step of any head reads. N anchors and drafts: B * A * K."""

    seen: Seen
    labels: torch.Tensor  # [B, A, K] int64
    valid: torch.Tensor  # [B, A, K] bool
    likely: torch.Tensor  # [B, A, K, L] int64: what the target finds likely
    probabilities: torch.Tensor  # [B, A, K, L]

    def cut(self, drafts: int) -> Inputs:
        """Of the first drafts only."""
        seen = replace(self.seen, following=self.seen.following[:, :, :drafts], before=self.seen.before[:, :, :drafts])
        return Inputs(seen, self.labels[:, :, :drafts], self.valid[:, :, :drafts], self.likely[:, :, :drafts],
                      self.probabilities[:, :, :drafts])

    def as_float(self) -> Inputs:
        """What heads read, in 32 bits."""
        seen = self.seen
        return replace(self, seen=replace(seen, taps=seen.taps.float(), embedded=seen.embedded.float(),
                                          following=seen.following.float()))

    def fill(self, other: Inputs) -> None:
        """Takes over the values of another, in place."""
        for field in fields(self.seen):
            getattr(self.seen, field.name).copy_(getattr(other.seen, field.name))
        for name in ("labels", "valid", "likely", "probabilities"):
            getattr(self, name).copy_(getattr(other, name))


def inputs_of(batch: Batch, data: Dataset, teacher: Teacher, memory: Memory) -> Inputs:
    before = data.ids[batch.label_rows]  # label_rows are the positions before each draft
    seen = Seen(memory.taps[batch.rows], teacher.embedding[data.ids[batch.rows]], batch.owner, batch.position,
                batch.anchors, teacher.embedding[before], before)
    return Inputs(seen, batch.labels, batch.valid, memory.ids[batch.label_rows].long(),
                  memory.probabilities[batch.label_rows])


class Trainer:
    """Trains one head, of `drafts` drafts."""

    def __init__(self, head: Head, drafts: int, teacher: Teacher, options: Options):
        self.head, self.drafts, self.options = head, drafts, options
        self.device = teacher.embedding.device
        self.weight = options.decay ** torch.arange(drafts, device=self.device)
        self.own_ids = torch.full((len(teacher.head),), -1, device=self.device)  # of each of the target's; -1: none
        self.own_ids[head.ids] = torch.arange(len(head.ids), device=self.device)
        train_rounded(head)
        self.optimizers = optimizers_of(head, options.rate)
        self.parameters = [p for optimizer in self.optimizers for group in optimizer.param_groups
                           for p in group["params"]]
        self._done: Counter[torch.Size] = Counter()  # steps, by the shape of their inputs
        self._graphs: dict[torch.Size, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}  # and the loss of each

    def step(self, inputs: Inputs, rate: float) -> torch.Tensor:
        """One step at this share of the learning rate. On CUDA inputs of one shape must lie in the same memory every
        time. Returns the loss before it."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"].fill_(group["initial_lr"] * rate)
        shape = inputs.seen.embedded.shape
        self._done[shape] += 1
        if self.device.type != "cuda":
            return self._one(inputs)
        if self._done[shape] <= BEFORE_CAPTURE:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = self._one(inputs)
            torch.cuda.current_stream().wait_stream(side)
            return loss
        if shape not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = self._one(inputs)
            self._graphs[shape] = graph, loss
        graph, loss = self._graphs[shape]
        graph.replay()
        return loss

    def _one(self, inputs: Inputs) -> torch.Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss = self.loss(inputs.cut(self.drafts))
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False)

    def loss(self, inputs: Inputs) -> torch.Tensor:
        with self._autocast(), parametrize.cached():
            hidden, before = self.head.drafts(inputs.seen).flatten(0, 1), inputs.seen.before.flatten(0, 1)
            ids, weights = self._targets(inputs)
            flat = [part for pair in self.head.factors(hidden, before) for part in pair]
            loss, best = SparseCrossEntropy.apply(ids, weights, *flat)
            sure = self.head.confidence(hidden, before)
        if sure is None:
            return loss
        right = (self.head.ids[best] == inputs.labels.flatten()).float()
        weight = weights.sum(1)
        return loss + (F.binary_cross_entropy_with_logits(sure.float(), right, reduction="none") * weight).sum()

    def _targets(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of the head's vocabulary and their weights, [N, 1 + L]: the true id, and what the target finds likely.
        All weights of a batch sum up to 1."""
        likely = inputs.probabilities.flatten(0, 2)
        ids = torch.cat([inputs.labels.flatten()[:, None], inputs.likely.flatten(0, 2)], 1)
        hard = torch.full_like(likely[:, :1], self.options.hard)
        soft = (1 - self.options.hard) * likely / likely.sum(1, keepdim=True).clamp(min=1e-9)
        weights = torch.cat([hard, soft], 1)
        ids = self.own_ids[ids]
        weights, ids = weights * (ids >= 0), ids.clamp(min=0)
        weights = weights * (self.weight * inputs.valid).view(-1, 1)
        return ids, weights / weights.sum().clamp(min=1e-9)

    @torch.no_grad()
    def right(self, inputs: Inputs) -> torch.Tensor:
        """How many drafts would be accepted after each anchor, [B, A]."""
        inputs = inputs.cut(self.drafts)
        with self._autocast(), parametrize.cached():
            hidden, before = self.head.drafts(inputs.seen).flatten(0, 1), inputs.seen.before.flatten(0, 1)
            best = torch.cat([logits_of(self.head.factors(h, b)).argmax(-1) for h, b in
                              zip(hidden.split(2048), before.split(2048), strict=True)])
        right = (self.head.ids[best].view_as(inputs.labels) == inputs.labels) & inputs.valid
        return right.int().cumprod(-1).sum(-1)


class Race:
    """Trains heads side by side on the same answers."""

    def __init__(self, trainers: dict[str, Trainer], data: Dataset, teacher: Teacher, options: Options):
        self.trainers, self.data, self.teacher, self.options = trainers, data, teacher, options
        self.memory = teacher.remember(data)

    def run(self) -> int:
        """Returns the number of steps of each head."""
        options, steps, said, kept = self.options, 0, 0.0, dict[torch.Size, Inputs]()
        began = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, refresh_per_second=1) as progress:
            task = progress.add_task("training", total=1.0)
            for batch in self.data.batches(options.tokens, options.anchors, options.seed, options.windows):
                share = (time.monotonic() - began) / (60 * options.minutes)
                if share >= 1 and steps:
                    break
                fresh = inputs_of(batch, self.data, self.teacher, self.memory)
                inputs = kept.setdefault(fresh.seen.embedded.shape, fresh)
                if inputs is not fresh:
                    inputs.fill(fresh)
                rate = min(1, (steps + 1) / WARM_UP) * max(1 - share, 0.01)
                losses = {name: trainer.step(inputs, rate) for name, trainer in self.trainers.items()}
                steps += 1
                if share - said > 0.2 or steps in (1, 2 * WARM_UP):
                    said = share
                    for name, loss in losses.items():
                        progress.console.print(
                            f"{time.monotonic() - began:6.1f} s  step {steps:6d}  {name:7s} loss {loss.item():.3f}"
                            f"  accepted length {self.accepted_length(name, GLANCE):.3f}")
                elif steps % 8 == 0 and self.data.device.type == "cuda":
                    torch.cuda.current_stream().synchronize()  # the clock is of steps that are done
                progress.update(task, completed=share)
        return steps

    def accepted_length(self, name: str, most: int = VALIDATION) -> float:
        """Tokens a step in greedy answers, up to `most` of those that were not trained on: each is walked as an engine
        would walk it."""
        tokens = steps = 0
        for chosen in self.data.validation[:most].split(4):
            batch = self.data.whole(chosen)
            found = self.trainers[name].right(inputs_of(batch, self.data, self.teacher, self.memory))
            for more, taken in walked(found, batch.valid[..., 0].sum(1)):
                tokens, steps = tokens + more, steps + taken
        return tokens / max(steps, 1)

    def finish(self, name: str) -> None:
        """Rounds the weights to what a checkpoint holds, as they were in training; says what the head is worth."""
        round_weights(self.trainers[name].head)
        print(f"{name}: accepted length {self.accepted_length(name):.3f}", flush=True)


def walked(right: torch.Tensor, lengths: torch.Tensor) -> list[tuple[int, int]]:
    """Ids of each answer, and the steps that they take. `right` [B, A]: drafts that are accepted after each of the
    `lengths` [B] anchors of an answer."""
    found = []
    for row, length in zip(right.tolist(), lengths.tolist(), strict=True):
        at = steps = 0
        while at < length:
            at += 1 + row[at]
            steps += 1
        found.append((length, steps))
    return found


def pick_device() -> tuple[torch.device, torch.dtype]:
    """bfloat16 on a GPU, float32 elsewhere."""
    cuda = torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32


def frequent_ids(data: Dataset, count: int, vocab: int, known: torch.Tensor | None = None) -> torch.Tensor:
    """The ids that occur most often in the answers, in order of id, those that are `known` first. [count] int64."""
    often = data.answer_ids.bincount(minlength=vocab).double()
    if known is not None:
        often[known] += often.sum()
    return often.topk(max(count, 0 if known is None else len(known))).indices.sort().values


def prepare(answers: Sequence[Any], model: str | None, taps: tuple[int, ...], width: int) -> tuple[Dataset, Teacher]:
    device, dtype = pick_device()
    torch.manual_seed(0)
    data, teacher = Dataset(answers, width, device), Teacher(model, taps, device, dtype)
    print(f"{len(data.train)} answers to train on, {len(data.validation)} to validate, {len(data.ids)} ids,"
          f" {len(data.answer_ids)} of answers; target {teacher.name} on {device}", flush=True)
    return data, teacher
