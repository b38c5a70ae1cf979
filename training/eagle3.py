"""Trains an EAGLE3 head: `python -m training.eagle3 answers.npz heads/eagle3`. Original layout, reduced vocabulary."""

from __future__ import annotations

from pathlib import Path

import cyclopts
import torch

from training import export
from training.heads import Eagle3, shape_of
from training.loop import Options, frequent_ids, prepare, train

TAPS = (1, 15, 28)  # after which of the target's layers
INNER, VOCABULARY, DRAFTS = 768, 6144, 5


def main(answers: Path, output: Path, *, model: str | None = None, taps: tuple[int, ...] = TAPS, inner: int = INNER,
         vocabulary: int = VOCABULARY, drafts: int = DRAFTS, minutes: float = Options.minutes,
         anchors: int = Options.anchors, rate: float = Options.rate, hard: float = Options.hard,
         tokens: int = Options.tokens, start: Path | None = None) -> None:
    """answers: made by training.generate.  output: folder of the checkpoint.  vocabulary: how many ids can be drafted,
    the most frequent ones, or those of the start.  drafts: of a chain in training.  minutes: of training alone.
    start: checkpoint to go on from.  Others: see loop.Options."""
    data, teacher = prepare(answers, model, taps, drafts)
    ids = (frequent_ids(data, vocabulary, len(teacher.head)) if start is None else
           export.vocabulary_of(start).to(data.device))
    covered = torch.isin(data.answer_ids, ids).float().mean().item()
    print(f"{len(ids)} ids cover {100 * covered:.1f} % of the answers", flush=True)
    shape = shape_of(teacher.config, inner, 1, len(taps))
    head = Eagle3(shape, ids, teacher.norm, teacher.head).to(data.device)
    if start is not None:
        export.load(head, start)
    train(head, data, teacher, Options(minutes, tokens, anchors, rate, hard=hard))
    export.eagle3(output, head, teacher, shape)


if __name__ == "__main__":
    cyclopts.run(main)
