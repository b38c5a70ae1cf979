"""Trains a DSPARK head: `python -m training.dspark answers.npz heads/dspark`. DeepSpec's layout."""

from __future__ import annotations

from pathlib import Path

import cyclopts

from training import export
from training.dflash import INNER, LAYERS, MASK, TAPS
from training.heads import DSpark, shape_of
from training.loop import Options, prepare, train

BLOCK, RANK = 7, 16


def main(answers: Path, output: Path, *, model: str | None = None, taps: tuple[int, ...] = TAPS, inner: int = INNER,
         layers: int = LAYERS, block: int = BLOCK, mask: int = MASK, rank: int = RANK, minutes: float = Options.minutes,
         anchors: int = Options.anchors, rate: float = Options.rate, hard: float = Options.hard,
         tokens: int = Options.tokens,
         start: Path | None = None) -> None:
    """answers: made by training.generate.  output: folder of the checkpoint.  block: drafts of a block.  rank: of the
    Markov head.  mask: an id that no text holds.  minutes: of training alone.
    start: checkpoint to go on from.  Others: see loop.Options."""
    data, teacher = prepare(answers, model, taps, block)
    shape = shape_of(teacher.config, inner, layers, len(taps))
    head = DSpark(shape, block, teacher.embedding[mask], teacher.norm, teacher.head, rank).to(data.device)
    if start is not None:
        export.load(head, start)
    train(head, data, teacher, Options(minutes, tokens, anchors, rate, hard=hard))
    export.dspark(output, head, teacher, shape, mask)


if __name__ == "__main__":
    cyclopts.run(main)
