"""Elastic speculation with real drafters on the default model: never slower than no speculation?

    python -m benchmarks.elastic_real ../shared/data --output real.json                      the device that is found
    python -m benchmarks.elastic_real ../shared/data --device cpu --rows 1 --rows 4 --tokens 32 --waves 4

Questions of Spec-Bench, spread over all its categories, so many at a time; answers end by themselves or at `tokens`.
Engines without drafts and with each drafter (auto: every step decides) answer the same wave after each other, in an
order that rotates; with equal seeds their texts are equal, at any temperature. Told is the median over waves of the
seconds without drafts over those with, and its span from the lower to the upper quarter. A round before warms up.
Where others use the machine, `processor` says more: the same of the seconds that its processors worked for the wave.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import cyclopts
import torch

from benchmarks.drafters import LONGEST, _spread, questions
from stretto import __version__
from stretto.engine.llm import LLM
from stretto.params import SamplingParams

DRAFTERS = ("ngram", "eagle3", "dflash", "dspark")


class Wave(NamedTuple):
    seconds: float
    processor: float  # seconds
    ids: list[list[int]]  # of each answer


def wave(llm: LLM, prompts: Sequence[list[int]], temperature: float, tokens: int) -> Wave:
    sampling = [SamplingParams(temperature=temperature, max_tokens=tokens, seed=i) for i in range(len(prompts))]
    began, worked = time.perf_counter(), time.process_time()
    answers = llm.generate(prompts, sampling)
    return Wave(time.perf_counter() - began, time.process_time() - worked, [answer.token_ids for answer in answers])


def paired(engines: dict[str, LLM], prompts: list[list[int]], rows: int, temperature: float, tokens: int,
           waves: int) -> dict[str, dict[str, object]]:
    """By drafter: the seconds of "off" over its own, wave by wave; and the share of answers that are equal."""
    names, equal = list(engines), dict.fromkeys(engines, 0)
    ratios, worked = ({name: list[float]() for name in engines} for _ in range(2))
    chosen = {name: _chosen(llm) for name, llm in engines.items()}
    for i in range(-1, waves):
        part = [prompts[(max(i, 0) * rows + k) % len(prompts)] for k in range(rows)]
        shift = i % len(names)
        found = {name: wave(engines[name], part, temperature, tokens) for name in names[shift:] + names[:shift]}
        for name in names if i >= 0 else ():
            ratios[name].append(found["off"].seconds / found[name].seconds)
            worked[name].append(found["off"].processor / found[name].processor)
            equal[name] += sum(a == b for a, b in zip(found["off"].ids, found[name].ids, strict=True))
    told: dict[str, dict[str, object]] = {}
    for name in names[1:]:
        low, _, high = quantiles(ratios[name], n=4, method="inclusive") if waves > 1 else [ratios[name][0]] * 3
        counts = [b - a for a, b in zip(chosen[name], _chosen(engines[name]))]
        told[name] = {"speed_up": round(median(ratios[name]), 3), "quarters": [round(low, 3), round(high, 3)],
                      "processor": round(median(worked[name]), 3), "equal": round(equal[name] / (rows * waves), 3),
                      "chosen": counts}
    return told


def _chosen(llm: LLM) -> list[float]:
    """Rows that decode, by the number of drafts that their steps gave them, until now."""
    counters = llm.core.stats().counters
    return [counters[f"elastic_chosen.{n}"] for n in range(64) if f"elastic_chosen.{n}" in counters]


def main(data: Path, *, model: str | None = None, drafters: tuple[str, ...] = DRAFTERS, device: str = "auto",
         dtype: str = "auto", rows: tuple[int, ...] = (1, 4, 16, 64), temperatures: tuple[float, ...] = (0.0, 1.0),
         tokens: int = 96, waves: int = 6, seconds: float = 3600, kv_tokens: int = 131_072,
         output: Path | None = None) -> None:
    """data: the folder with eval/.  drafters: as after --speculation.  rows: questions at a time, each in turn.
    tokens: most of an answer.  waves: that count.  seconds: after which no further cell is begun."""
    ends = time.perf_counter() + seconds
    options: dict[str, Any] = dict(device=device, dtype=dtype, max_num_seqs=max(rows), max_model_len=LONGEST,
                                   kv_tokens=kv_tokens)
    engines = {name: LLM(model, speculation=name, **options) for name in ("off", *drafters)}
    tokenizer = engines["off"].tokenizer
    asked = _spread(questions(data, None, 0), max(max(rows), 24))
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": q.turns[0]}])[-(LONGEST - tokens - 8) :]
               for q in asked]
    resolved = engines["off"].prepared.resolved
    facts = {"model": resolved.model_name, "dtype": resolved.dtype, "stretto": __version__, "torch": torch.__version__,
             "device": torch.cuda.get_device_name() if resolved.device == "cuda" else platform.processor(),
             "threads": torch.get_num_threads(), "date": time.strftime("%Y-%m-%d"), "tokens": tokens, "waves": waves}
    print(json.dumps(facts), flush=True)
    cells = []
    for n in rows:
        for temperature in temperatures:
            if time.perf_counter() > ends:
                break
            cells.append({"rows": n, "temperature": temperature,
                          "drafters": paired(engines, prompts, n, temperature, tokens, waves)})
            print(json.dumps(cells[-1]), flush=True)
            if output is not None:
                output.write_text(json.dumps({"facts": facts, "cells": cells}, indent=1))
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    cyclopts.run(main)
