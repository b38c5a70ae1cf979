"""The training loop that all heads share: boxed in time, with the acceptance of the drafts simulated on the way."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from training.answers import VALIDATION, Batch, Dataset
from training.export import round_weights
from training.heads import Head, Seen
from training.target import Teacher

WARM_UP = 100  # steps until the learning rate is reached
GLANCE = 16  # answers whose acceptance is simulated during training


@dataclass(frozen=True)
class Options:
    """`minutes`: of optimisation; loading the target and its hidden states come before. `tokens` and `anchors`: of a
    batch. `decay`: weight of a draft in relation to the one before it. `hard`: share of the true ids in the loss; the
    rest is of the target's probabilities."""

    minutes: float = 2.0
    tokens: int = 16_384
    anchors: int = 2_048
    rate: float = 1e-3
    decay: float = 0.8
    hard: float = 0.5
    seed: int = 0


def pick_device() -> tuple[torch.device, torch.dtype]:
    """bfloat16 on a GPU, float32 elsewhere."""
    cuda = torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32


class Trainer:
    """Trains one head on the answers of a file. `states`: what `Teacher.remember` gave, for the whole data."""

    def __init__(self, head: Head, data: Dataset, teacher: Teacher, options: Options):
        self.head, self.data, self.teacher, self.options = head, data, teacher, options
        self.taps, self.last = teacher.remember(data)
        self.weight = options.decay ** torch.arange(data.width, device=data.device)
        assert isinstance(head, nn.Module)
        self.optimizer = torch.optim.AdamW(head.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.01,
                                           fused=data.device.type == "cuda")
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

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
                rate = options.rate * min(1, (steps + 1) / WARM_UP) * max(0.5 + 0.5 * math.cos(math.pi * share), 0.01)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                loss = self.loss(batch)
                loss.backward()
                nn.utils.clip_grad_norm_(self.parameters, 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                steps += 1
                if share - said > 0.2 or steps == 1:
                    said = share
                    progress.console.print(f"{time.monotonic() - began:6.1f} s  step {steps:6d}  loss {loss.item():.3f}"
                                           f"  accepted length {self.accepted_length(GLANCE):.3f}")
                progress.update(task, completed=share)
        return steps

    def seen(self, batch: Batch) -> Seen:
        ids = self.data.ids
        place = batch.label_rows  # of the positions before each draft
        before = ids[place]
        return Seen(self.taps[batch.rows], self.teacher.embedding[ids[batch.rows]], batch.anchors,
                    self.teacher.embedding[before], before)

    def loss(self, batch: Batch) -> torch.Tensor:
        seen = self.seen(batch)
        with torch.autocast(self.data.device.type, torch.bfloat16, enabled=self.data.device.type == "cuda"):
            hidden = self.head.drafts(seen)
            weight = (self.weight * self._learnable(batch)).flatten()
            chosen = weight.nonzero().flatten()
            hidden, before = hidden.flatten(0, 2)[chosen], seen.before.flatten()[chosen]
            logits = self.head.logits(hidden, before)
            places, labels = batch.label_rows.flatten()[chosen], batch.labels.flatten()[chosen]
            with torch.no_grad():
                rows = self.teacher.head if self.head.ids is None else self.teacher.head[self.head.ids]
                target = (self.last[places] @ rows.t()).float().softmax(-1)
            if self.head.ids is not None:
                labels = self._own_ids()[labels]
            log_p = logits.float().log_softmax(-1)
            hard = -log_p.gather(1, labels[:, None])[:, 0]
            soft = -(target * log_p).sum(-1)
            each = self.options.hard * hard + (1 - self.options.hard) * soft
            more = self.head.loss(hidden, before, logits.argmax(-1) == labels)
        loss = (each * weight[chosen]).sum() / weight[chosen].sum()
        return loss if more is None else loss + more

    def _learnable(self, batch: Batch) -> torch.Tensor:
        """[B, A, K]: drafts inside the answer that the head's vocabulary holds."""
        if self.head.ids is None:
            return batch.valid.float()
        return (batch.valid & (self._own_ids()[batch.labels] >= 0)).float()

    def _own_ids(self) -> torch.Tensor:
        """[V] int64: the head's id of each of the target's, -1 where it has none."""
        assert self.head.ids is not None
        own = torch.full((len(self.teacher.head),), -1, device=self.data.device)
        own[self.head.ids] = torch.arange(len(self.head.ids), device=self.data.device)
        return own

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
            best = torch.cat([self.head.logits(h, b).argmax(-1) for h, b in
                              zip(hidden.split(16_384), before.split(16_384), strict=True)])
        if self.head.ids is not None:
            best = self.head.ids[best]
        right = (best.view_as(batch.labels) == batch.labels) & batch.valid
        runs = right.int().cumprod(-1).sum(-1)
        return [row[: int(n) - 1].tolist() for row, n in zip(runs, lengths, strict=True)]


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
