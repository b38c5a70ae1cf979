"""What a benchmark runs: prompts as token ids, and how many tokens each answer has. No torch in this module."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# Plain words, so that a prompt of any length has the statistics of text rather than of random ids.
WORDS = """
the of and to in that was his with for had not but at which they from all she been one so were when there what her an
him would who will more if no out do my said then could time only some very into other now than little upon its about
old house day long great again never before water morning light river stone window garden voice letter road winter
summer music paper table story hand night door tree field song cloud bird city
""".split()  # noqa: SIM905


class Encoder(Protocol):
    """The part of a tokenizer that a workload needs."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Workload:
    """Each prompt is answered with exactly `output_tokens` tokens, greedily; ends of text are ignored."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


class WorkloadError(ValueError):
    """Prompts that cannot be had."""


def synthetic(encoder: Encoder, count: int, input_tokens: int, output_tokens: int, seed: int = 0) -> Workload:
    """`count` different prompts of exactly `input_tokens` tokens, the same ones for the same seed."""
    chance = random.Random(seed)
    prompts = []
    for _ in range(count):
        ids: list[int] = []
        while len(ids) < input_tokens:
            sentence = " ".join(chance.choices(WORDS, k=12)).capitalize() + ". "
            ids += encoder.encode(sentence)
        prompts.append(tuple(ids[:input_tokens]))
    return Workload(f"{count} synthetic prompts of {input_tokens} tokens", tuple(prompts), output_tokens)


def from_file(encoder: Encoder, path: Path, count: int, longest: int, output_tokens: int) -> Workload:
    """The first `count` prompts of a file with one JSON object a line: "prompt", "question", or the first of "turns".
    Prompts are cut to `longest` tokens. Raises WorkloadError."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:count]
    except OSError as e:
        raise WorkloadError(f"{path} cannot be read: {e.strerror}") from e
    prompts = tuple(tuple(encoder.encode(_text(path, number, line))[:longest]) for number, line in enumerate(lines, 1))
    if not prompts or not all(prompts):
        raise WorkloadError(f"{path} has {'an empty prompt' if prompts else 'no prompts'}")
    return Workload(f"{len(prompts)} prompts of {path.name}", prompts, output_tokens)


def _text(path: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as e:
        raise WorkloadError(f"{path} line {number} is not JSON: {e}") from e
    for key in ("prompt", "question", "turns"):
        value = record.get(key) if isinstance(record, dict) else None
        if isinstance(value, str):
            return value
        if isinstance(value, Sequence) and value and isinstance(value[0], str):
            return value[0]
    raise WorkloadError(f'{path} line {number} has neither "prompt", "question" nor "turns"')
