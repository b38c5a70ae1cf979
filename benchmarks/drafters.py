"""What drafters are worth for the default model: how many ids a step they give, and how much faster text comes.

    python benchmarks/drafters.py ../shared/data --output drafters.json          the device that is found
    python benchmarks/drafters.py ../shared/data --device cpu --questions 5      a part of the questions, on the CPU

Questions: Spec-Bench by category and GSM8K's test set, in the chat format, second turns with the drafter's own first
answer before them. `length` is generated ids a step, without the first id, which is that of the prompt's last step:
1 without drafts. Speed is that of greedy answers, all drafters in turns, round by round. Of a step, `verify` is what
it takes with as many wrong drafts that cost nothing, `draft` the rest of it; `host` runs beside both.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import cyclopts
import torch

from stretto import __version__
from stretto.engine.llm import LLM, Completion
from stretto.facts import device_facts
from stretto.params import SamplingParams

DRAFTERS = ("off", "ngram@4", "eagle3@4", "dflash@7", "dspark@7")
CONVERSATION = "conversation"  # Spec-Bench's questions of MT-bench, of eight kinds
TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
LONGEST = 3072  # tokens of prompt and answers
WAVES = 8  # most that are timed at a time


@dataclass(frozen=True)
class Question:
    category: str
    turns: tuple[str, ...]


@dataclass
class Counts:
    """Of the answers to one category."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, answer: Completion) -> None:
        usage = answer.usage
        self.tokens += max(usage.completion_tokens - 1, 0)
        self.steps += max(usage.steps - 1, 0)
        self.drafted += usage.drafted_tokens
        self.accepted += usage.accepted_tokens

    @property
    def length(self) -> float:
        return self.tokens / max(self.steps, 1)


@dataclass
class Speed:
    """One drafter with so many rows at once, a value a round. Rates in tokens a second, steps in milliseconds; of the
    steps the share that ran without a graph where there are some."""

    rates: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    ids: list[float] = field(default_factory=list)  # a row and step
    eager: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # milliseconds of processor time a token, whoever else uses the CPU


def questions(data: Path, each: int | None, gsm8k: int) -> list[Question]:
    """`each` of every category of Spec-Bench (None: all), and `gsm8k` of GSM8K's test set."""
    lines = (data / "eval/spec_bench/question.jsonl").read_text().splitlines()
    found = [Question(q["category"] if q["category"] in TASKS else CONVERSATION, tuple(q["turns"]))
             for q in map(json.loads, lines)]
    chosen = [q for kind in (CONVERSATION, *TASKS) for q in _spread([f for f in found if f.category == kind], each)]
    tests = [json.loads(line)["question"] for line in (data / "eval/gsm8k/test.jsonl").read_text().splitlines()]
    return chosen + [Question("gsm8k", (text,)) for text in _spread(tests, gsm8k)]


def _spread(items: list, count: int | None) -> list:
    """`count` of them, evenly from all over."""
    if count is None or count >= len(items):
        return items
    return [items[i * len(items) // count] for i in range(count)]


# ---------------------------------------------------------------------------------------------------------- the lengths
def answer_all(llm: LLM, asked: Sequence[Question], temperature: float, tokens: int) -> tuple[dict[str, Counts], list]:
    """Answers everything, turn by turn, all questions at once. Returns counts by category, and the answers' ids."""
    talks = [[{"role": "user", "content": q.turns[0]}] for q in asked]
    counts, ids = {q.category: Counts() for q in asked}, []
    for turn in range(max(len(q.turns) for q in asked)):
        live = [i for i, q in enumerate(asked) if len(q.turns) > turn]
        prompts = [llm.tokenizer.apply_chat_template(talks[i])[-(LONGEST - tokens) :] for i in live]
        sampling = [SamplingParams(temperature=temperature, max_tokens=tokens, seed=1000 * turn + i) for i in live]
        for i, answer in zip(live, llm.generate(prompts, sampling), strict=True):
            counts[asked[i].category].add(answer)
            ids.append(answer.token_ids)
            talks[i].append({"role": "assistant", "content": answer.text})
            if len(asked[i].turns) > turn + 1:
                talks[i].append({"role": "user", "content": asked[i].turns[turn + 1]})
    return counts, ids


def overall(counts: dict[str, Counts], kinds: Sequence[str]) -> float:
    return sum(counts[k].tokens for k in kinds) / max(sum(counts[k].steps for k in kinds), 1)


def same_share(ids: list, others: list) -> float:
    """Share of answers that are equal to the last id."""
    return sum(a == b for a, b in zip(ids, others, strict=True)) / len(ids)


# ------------------------------------------------------------------------------------------------------------ the speed
def time_waves(llm: LLM, prompts: Sequence[list[int]], rows: int, tokens: int, speed: Speed) -> None:
    """Answers the prompts, `rows` at a time, with exactly `tokens` tokens each."""
    core, sampling = llm.core, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    busy, waited, before = core.busy_seconds, core.wait_seconds, core.device.counts()
    started, processor, made, steps, taken = time.perf_counter(), time.process_time(), 0, 0, 0
    for i in range(0, len(prompts), rows):
        answers = llm.generate(prompts[i : i + rows], sampling)
        made += sum(len(a.token_ids) for a in answers)
        steps += max(a.usage.steps for a in answers)
        taken += sum(a.usage.steps for a in answers)
    seconds = time.perf_counter() - started
    speed.cpu.append(1e3 * (time.process_time() - processor) / made)
    speed.ids.append(made / taken)
    speed.eager.append((core.device.counts().get("eager_steps", 0.0) - before.get("eager_steps", 0.0)) / steps)
    speed.rates.append(made / seconds)
    speed.steps.append(1e3 * seconds / steps)
    speed.host.append(1e3 * ((core.busy_seconds - busy) - (core.wait_seconds - waited)) / steps)


def prompts_of(llm: LLM, asked: Sequence[Question], count: int, tokens: int) -> list[list[int]]:
    """First turns of `count` questions, evenly from all of them, in the chat format; short enough for `tokens` more."""
    return [llm.tokenizer.apply_chat_template([{"role": "user", "content": q.turns[0]}])[: LONGEST - tokens - 8]
            for q in _spread(list(asked), count)]


def measure_speed(engines: dict[str, LLM], prompts: Sequence[list[int]], rows: int, tokens: int,
                  rounds: int) -> dict[str, Speed]:
    """All engines in turns; the first round warms up. Prompts are found in the prefix cache from then on."""
    names, found, prompts = list(engines), {name: Speed() for name in engines}, prompts[: WAVES * rows]
    for round_ in range(rounds + 1):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            time_waves(engines[name], prompts, rows, tokens, found[name] if round_ else Speed())
    return found


def scripted(llm: LLM, prompts: Sequence[list[int]], tokens: int, folder: Path) -> str:
    """A drafter of wrong ids that costs nothing: as after --speculation."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    answers = [p + a.token_ids + [0] * 64 for p, a in zip(prompts, llm.generate(prompts, sampling), strict=True)]
    (folder / "script.json").write_text(json.dumps({"answers": answers, "accuracy": 0.0}))
    return f"scripted:{folder / 'script.json'}"


# ---------------------------------------------------------------------------------------------------------- the figures
def lengths_of(engines: dict[str, LLM], asked: list[Question], temperatures: Sequence[float], tokens: int) -> dict:
    found: dict = {}
    spec_bench = [k for k in (CONVERSATION, *TASKS) if any(q.category == k for q in asked)]
    for temperature in temperatures:
        plain: list | None = None
        for name, llm in engines.items():
            began = time.perf_counter()
            counts, ids = answer_all(llm, asked, temperature, tokens)
            plain = plain or ids
            kinds = list(counts)
            entry = {kind: {**asdict(c), "length": c.length} for kind, c in counts.items()}
            entry |= {"spec_bench": overall(counts, spec_bench), "all": overall(counts, kinds),
                      "same_text": same_share(ids, plain), "seconds": time.perf_counter() - began}
            found.setdefault(f"{temperature:g}", {})[name] = entry
            print(f"T={temperature:g} {name}: " + ", ".join(f"{k} {counts[k].length:.2f}" for k in kinds)
                  + f"; spec-bench {entry['spec_bench']:.3f}, all {entry['all']:.3f}; equal to {next(iter(engines))}:"
                    f" {100 * entry['same_text']:.0f} %; {entry['seconds']:.1f} s", flush=True)
    return found


def speeds_of(engines: dict[str, LLM], prompts: Sequence[list[int]], rows: Sequence[int], tokens: int,
              rounds: int, parts: bool) -> dict:
    found: dict = {}
    with tempfile.TemporaryDirectory() as folder:
        asked = scripted(engines["off"], prompts, tokens, Path(folder)) if parts else ""
        widths = sorted({llm.info.speculation_tokens for llm in engines.values()} - {0}) if parts else []
        wrong = {f"{width} wrong": _engine(engines["off"], asked, width) for width in widths}
        for n in rows:
            speeds = measure_speed({**engines, **wrong}, prompts, n, tokens, rounds)
            found[n] = {name: _speed_entry(name, engines, speeds) for name in speeds}
            for name, entry in found[n].items():
                print(f"{n} rows, {name}: " + ", ".join(f"{k} {v:.3g}" for k, v in entry.items()), flush=True)
        for llm in wrong.values():
            llm.close()
    return found


def _engine(like: LLM, speculation: str, width: int) -> LLM:
    config = like.prepared.resolved.config
    return LLM(config.model.model, device=like.prepared.resolved.device, dtype=like.prepared.resolved.dtype,
               max_num_seqs=config.schedule.max_num_seqs, max_model_len=LONGEST, kv_tokens=config.kv.kv_tokens,
               speculation=speculation, speculation_tokens=width)


def _speed_entry(name: str, engines: dict[str, LLM], speeds: dict[str, Speed]) -> dict[str, float]:
    own, plain = speeds[name], speeds["off"]
    entry = {"tokens_s": median(own.rates), "step_ms": median(own.steps), "host_ms": median(own.host),
             "ids": median(own.ids), "eager": median(own.eager), "cpu_ms": median(own.cpu),
             "cpu_speed_up": median(b / a for a, b in zip(own.cpu, plain.cpu, strict=True)),
             "speed_up": median(a / b for a, b in zip(own.rates, plain.rates, strict=True))}
    width = engines[name].info.speculation_tokens if name in engines else 0
    if f"{width} wrong" in speeds:
        verify = speeds[f"{width} wrong"]
        entry |= {"drafts": width, "verify_ms": median(verify.steps),
                  "draft_ms": median(a - b for a, b in zip(own.steps, verify.steps, strict=True))}
    return entry


def main(data: Path, *, model: str | None = None, drafters: tuple[str, ...] = DRAFTERS, device: str = "auto",
         dtype: str = "auto", questions_each: int | None = None, gsm8k: int = 1319,
         temperatures: tuple[float, ...] = (0.0, 1.0), tokens: int = 512, seqs: int = 128,
         rows: tuple[int, ...] = (1, 8, 32), speed_prompts: int = 32, speed_tokens: int = 128, rounds: int = 3,
         parts: bool = True, kv_tokens: int = 262_144, output: Path | None = None) -> None:
    """data: the folder with eval/.  drafters: as after --speculation; NAME@K offers K drafts, NAME alone
    what each step finds worth it; "off" is needed for speeds, and first.
    questions_each: of every category of Spec-Bench (default: all).  gsm8k: questions of its test set.
    tokens: most of an answer.  seqs: answers at once for the lengths.  rows: for the speed, each in turn; none for no
    speeds.  speed_prompts, speed_tokens, rounds: of the speed.  parts: whether to tell verifying from drafting, which
    takes an engine more for each number of drafts."""
    asked = questions(data, questions_each, gsm8k)
    engines: dict[str, LLM] = {}
    for name in drafters:
        spec, _, width = name.partition("@")
        options = {"speculation_tokens": int(width)} if width else {}
        engines[name] = LLM(model, device=device, dtype=dtype, speculation=spec, max_num_seqs=seqs,
                            max_model_len=LONGEST, kv_tokens=kv_tokens, **options)
        print(f"{name}: {engines[name].info.speculation_tokens} drafts, ready", flush=True)
    resolved = next(iter(engines.values())).prepared.resolved
    facts = {"model": resolved.model_name, "dtype": resolved.dtype, "stretto": __version__, "torch": torch.__version__,
             "device": next(d.name for d in device_facts() if d.kind == resolved.device),
             "threads": torch.get_num_threads(), "date": time.strftime("%Y-%m-%d"), "questions": len(asked)}
    print(json.dumps(facts), flush=True)
    figures: dict = {"facts": facts}
    if temperatures:
        figures["lengths"] = lengths_of(engines, asked, temperatures, tokens)
    if rows:
        prompts = prompts_of(engines[drafters[0]], asked, speed_prompts, tokens)
        figures["speeds"] = speeds_of(engines, prompts, rows, speed_tokens, rounds, parts)
    for llm in engines.values():
        llm.close()
    if output is not None:
        output.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    cyclopts.run(main)
