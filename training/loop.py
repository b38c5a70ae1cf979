"""The training loop that all heads share: boxed in time, with the acceptance of the drafts simulated on the way."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from training.answers import VALIDATION, Batch, Dataset
from training.export import round_weights
from training.heads import Head, Seen, logits_of
from training.target import Teacher

WARM_UP = 50  # steps until the learning rate is reached
GLANCE = 16  # answers whose acceptance is simulated during training


@dataclass(frozen=True)
class Options:
    """`minutes`: of optimisation; loading the target and its hidden states come before. `tokens` and `anchors`: of a
    batch. `decay`: weight of a draft in relation to the one before it. `hard`: share of the true ids in the loss; the
    rest is of the target's probabilities."""

    minutes: float = 2.0
    tokens: int = 8_192
    anchors: int = 1_024
    rate: float = 4e-3
    decay: float = 0.8
    hard: float = 0.5
    seed: int = 0


def pick_device() -> tuple[torch.device, torch.dtype]:
    """bfloat16 on a GPU, float32 elsewhere."""
    cuda = torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32


class SparseCrossEntropy(torch.autograd.Function):
    """-sum(weights * log softmax(logits)[ids]) where the logits are a sum of products, which are computed once and kept
    as probabilities in the type of the factors: with 49,152 ids memory traffic is what a step waits for."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weights: torch.Tensor, *flat: torch.Tensor
                ) -> tuple[torch.Tensor, torch.Tensor]:
        """ids, weights [N, L]; x, w of each factor. Returns the sum, and the likeliest id of each row, [N]."""
        factors = list(zip(flat[::2], flat[1::2], strict=True))
        p = logits_of(factors).softmax(-1)
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


class Trainer:
    """Trains one head on the answers of a file."""

    def __init__(self, head: Head, data: Dataset, teacher: Teacher, options: Options):
        self.head, self.data, self.teacher, self.options = head, data, teacher, options
        self.memory = teacher.remember(data)
        self.weight = options.decay ** torch.arange(data.width, device=data.device)
        self.own_ids: torch.Tensor | None = None  # [V] int64: the head's id of each of the target's, -1: none
        if head.ids is not None:
            self.own_ids = torch.full((len(teacher.head),), -1, device=data.device)
            self.own_ids[head.ids] = torch.arange(len(head.ids), device=data.device)
        self.optimizers = optimizers_of(head, options.rate)
        self.parameters = [p for optimizer in self.optimizers for group in optimizer.param_groups
                           for p in group["params"]]

    def run(self) -> int:
        """Returns the number of steps."""
        options, data = self.options, self.data
        began, steps, said = time.monotonic(), 0, 0.0
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, refresh_per_second=1) as progress:
            task = progress.add_task("training", total=1.0)
            for batch in data.batches(options.tokens, options.anchors, options.seed):
                share = (time.monotonic() - began) / (60 * options.minutes)
                if share >= 1 and steps:
                    break
                loss = self.step(batch, min(1, (steps + 1) / WARM_UP) * max(1 - share, 0.01))
                steps += 1
                if share - said > 0.2 or steps == 1:
                    said = share
                    progress.console.print(f"{time.monotonic() - began:6.1f} s  step {steps:6d}  loss {loss.item():.3f}"
                                           f"  accepted length {self.accepted_length(GLANCE):.3f}")
                progress.update(task, completed=share)
        return steps

    def step(self, batch: Batch, rate: float) -> torch.Tensor:
        """One step at this share of the learning rate. Returns the loss before it."""
        loss = self.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def seen(self, batch: Batch) -> Seen:
        ids, embedding = self.data.ids, self.teacher.embedding
        before = ids[batch.label_rows]  # label_rows are the positions before each draft
        return Seen(self.memory.taps[batch.rows], embedding[ids[batch.rows]], batch.anchors, embedding[before], before)

    def loss(self, batch: Batch) -> torch.Tensor:
        seen = self.seen(batch)
        with torch.autocast(self.data.device.type, torch.bfloat16, enabled=self.data.device.type == "cuda"):
            hidden, before = self.head.drafts(seen).flatten(0, 2), seen.before.flatten()
            ids, weights = self._targets(batch)
            flat = [part for pair in self.head.factors(hidden, before) for part in pair]
            loss, best = SparseCrossEntropy.apply(ids, weights, *flat)
            sure = self.head.confidence(hidden, before)
        if sure is None:
            return loss
        right = (best == batch.labels.flatten()).float()
        weight = weights.sum(1)
        return loss + (F.binary_cross_entropy_with_logits(sure.float(), right, reduction="none") * weight).sum()

    def _targets(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of the head's vocabulary and their weights, [N, 1 + LIKELY]: the true id, and what the target finds
        likely. All weights of a batch sum up to 1."""
        rows, labels = batch.label_rows.flatten(), batch.labels.flatten()
        likely = self.memory.probabilities[rows]
        ids = torch.cat([labels[:, None], self.memory.ids[rows].long()], 1)
        hard = torch.full_like(likely[:, :1], self.options.hard)
        weights = torch.cat([hard, (1 - self.options.hard) * likely / likely.sum(1, keepdim=True)], 1)
        if self.own_ids is not None:
            ids = self.own_ids[ids]
            weights, ids = weights * (ids >= 0), ids.clamp(min=0)
        weights = weights * (self.weight * batch.valid).view(-1, 1)
        return ids, weights / weights.sum().clamp(min=1e-9)

    @torch.no_grad()
    def accepted_length(self, most: int = VALIDATION) -> float:
        """Tokens a step in greedy answers, up to `most` of those that were not trained on: each is walked as an engine
        would walk it."""
        tokens = steps = 0
        for chosen in self.data.validation[:most].split(8):
            for run in self._runs(chosen):
                at = 0
                while at < len(run):
                    at += 1 + int(run[at])
                    steps += 1
                tokens += len(run)
        return tokens / max(steps, 1)

    def _runs(self, chosen: torch.Tensor) -> list[list[int]]:
        """For each sequence: how many drafts would be accepted after each id of its answer."""
        data, sequences = self.data, chosen.to(self.data.device)
        first, lengths = data.prompt[sequences], data.stop[sequences] - data.start[sequences] - data.prompt[sequences]
        most = int(lengths.max()) - 1
        anchors = first[:, None] + torch.minimum(torch.arange(most, device=data.device), lengths[:, None] - 2)
        batch = data.batch(chosen, anchors)
        seen = self.seen(batch)
        with torch.autocast(data.device.type, torch.bfloat16, enabled=data.device.type == "cuda"):
            hidden = self.head.drafts(seen).flatten(0, 2)
            before = seen.before.flatten()
            best = torch.cat([logits_of(self.head.factors(h, b)).argmax(-1) for h, b in
                              zip(hidden.split(16_384), before.split(16_384), strict=True)])
        if self.head.ids is not None:
            best = self.head.ids[best]
        right = (best.view_as(batch.labels) == batch.labels) & batch.valid
        runs = right.int().cumprod(-1).sum(-1)
        return [row[: int(n) - 1].tolist() for row, n in zip(runs, lengths, strict=True)]


def optimizers_of(head: Any, rate: float) -> list[torch.optim.Optimizer]:
    """Muon (K. Jordan, 2024) for matrices between hidden states; AdamW for vectors and what has a row for each id."""
    matrices, rest = [], []
    for name, weight in head.named_parameters():
        inner = weight.ndim == 2 and min(weight.shape) > 1 and not name.startswith(("lm_head", "markov_head"))
        (matrices if inner else rest).append(weight)
    made = [torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=rate / 2, betas=(0.9, 0.95), weight_decay=0.0, fused=rest[0].is_cuda)]
    for optimizer in made:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return made


def frequent_ids(data: Dataset, count: int, vocab: int) -> torch.Tensor:
    """The ids that occur most often in the answers, in order of id. [count] int64."""
    return data.answer_ids.bincount(minlength=vocab).topk(count).indices.sort().values


def prepare(answers: Path, model: str | None, taps: tuple[int, ...], width: int) -> tuple[Dataset, Teacher]:
    device, dtype = pick_device()
    torch.manual_seed(0)
    data, teacher = Dataset(answers, width, device), Teacher(model, taps, device, dtype)
    print(f"{len(data.train)} answers to train on, {len(data.validation)} to validate, {len(data.ids)} ids;"
          f" target {teacher.name} on {device}", flush=True)
    return data, teacher


def train(head: Any, data: Dataset, teacher: Teacher, options: Options) -> None:
    """Trains the head in place and rounds its weights to what a checkpoint holds; says what either is worth."""
    began = time.monotonic()
    trainer = Trainer(head, data, teacher, options)
    ready = time.monotonic()
    print(f"hidden states of {len(data.ids)} positions in {ready - began:.1f} s", flush=True)
    steps = trainer.run()
    exact = trainer.accepted_length()
    round_weights(head)
    print(f"{steps} steps, {(time.monotonic() - ready) / steps * 1e3:.1f} ms each; accepted length {exact:.3f},"
          f" with weights of 8 bits {trainer.accepted_length():.3f}", flush=True)
