"""Trains a DFLASH head: `python -m training.dflash answers.npz heads/dflash`. z-lab's layout."""

from __future__ import annotations

from pathlib import Path

import cyclopts

from training import export
from training.heads import DFlash, shape_of
from training.loop import Options, prepare, train

TAPS = (1, 10, 19, 28)  # after which of the target's layers
INNER, LAYERS, BLOCK, MASK = 576, 2, 8, 3  # MASK: an id that no text holds


def main(answers: Path, output: Path, *, model: str | None = None, taps: tuple[int, ...] = TAPS, inner: int = INNER,
         layers: int = LAYERS, block: int = BLOCK, mask: int = MASK, minutes: float = Options.minutes,
         anchors: int = Options.anchors, rate: float = Options.rate, hard: float = Options.hard,
         tokens: int = Options.tokens,
         start: Path | None = None) -> None:
    """answers: made by training.generate.  output: folder of the checkpoint.  block: positions of a block, the last
    known id included.  mask: an id that no text holds.  minutes: of training alone.
    start: checkpoint to go on from.  Others: see loop.Options."""
    data, teacher = prepare(answers, model, taps, block - 1)
    shape = shape_of(teacher.config, inner, layers, len(taps))
    head = DFlash(shape, block, teacher.embedding[mask], teacher.norm, teacher.head).to(data.device)
    if start is not None:
        export.load(head, start)
    train(head, data, teacher, Options(minutes, tokens, anchors, rate, hard=hard))
    export.dflash(output, head, teacher, shape, mask)


if __name__ == "__main__":
    cyclopts.run(main)
