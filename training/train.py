"""Trains heads side by side: `python -m training.train heads answers.npz`, or some of them with `--heads eagle3`."""

from __future__ import annotations

import time
from pathlib import Path

import cyclopts

from training import export
from training.loop import Options, Race, Trainer, frequent_ids, prepare
from training.recipes import RECIPES


def main(output: Path, *answers: Path, model: str | None = None, heads: tuple[str, ...] = tuple(RECIPES),
         minutes: float = Options.minutes, tokens: int = Options.tokens, anchors: int = Options.anchors,
         rate: float = Options.rate, hard: float = Options.hard, start: Path | None = None) -> None:
    """output: the folder of the heads' folders.  answers: made by training.generate.  minutes: of training alone.
    start: a folder like the output, of heads to go on from.  Others: see loop.Options."""
    began = time.monotonic()
    recipes = {name: RECIPES[name] for name in heads}
    taps = tuple(sorted({layer for recipe in recipes.values() for layer in recipe.taps}))
    data, teacher = prepare(answers, model, taps, max(recipe.drafts for recipe in recipes.values()))
    options, trainers = Options(minutes, tokens, anchors, rate, hard=hard), {}
    for name, recipe in recipes.items():
        known = None if start is None else export.vocabulary_of(start / name).to(data.device)
        ids = frequent_ids(data, recipe.vocabulary, len(teacher.head), known)
        head = recipe.make(teacher, ids)
        if start is not None:
            export.load(head, start / name)
        trainers[name] = Trainer(head, recipe.drafts, teacher, options)
    ready = time.monotonic()
    race = Race(trainers, data, teacher, options)
    print(f"loaded in {ready - began:.1f} s, states of {len(data.ids)} positions in"
          f" {time.monotonic() - ready:.1f} s", flush=True)
    began = time.monotonic()
    steps = race.run()
    print(f"{steps} steps of {len(trainers)} heads, {(time.monotonic() - began) / steps * 1e3:.1f} ms each", flush=True)
    for name, recipe in recipes.items():
        race.finish(name)
        recipe.save(output / name, trainers[name].head, teacher)


if __name__ == "__main__":
    cyclopts.run(main)
