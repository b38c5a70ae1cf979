"""Elastic speculation against fixed widths on one GPU: the whole engine, an 8B shape, drafters whose acceptance is
scripted, 1..256 rows at contexts of 300 to 8192.

    python -m benchmarks.elastic_gpu --json elastic.json                 # every point, about seven minutes
    python -m benchmarks.elastic_gpu --only 64x1024 --rounds 5

At each point the same requests run on while policies take turns: none, 1, 3, 5 and 7 drafts, and elastic. A round gives
every policy so many steps; the first round warms graphs up and does not count. Told is each policy's rate (medians of
rounds) and the median of elastic over the best fixed one, paired by round. The model's last norm is zero, so that all
logits are equal, every sampled id is 0, and a drafter can be right as often as it is told to be.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.engine_gpu import SHAPES, RandomSource
from stretto.attn.select import choose_backend
from stretto.device.graphs import bucket_of, usual_shapes
from stretto.device.kv import KVCache, group_layers
from stretto.device.runner import Runner
from stretto.device.slots import SlotTable
from stretto.device.streams import CudaDevice
from stretto.engine.core import EngineCore
from stretto.engine.step_times import Samples, StepTimes
from stretto.host.cost import CostModel
from stretto.host.elastic import Choice, Demand, Elastic
from stretto.host.half import HostHalf
from stretto.host.limits import HostLimits
from stretto.model.config import ModelConfig
from stretto.model.load import build_model
from stretto.params import SamplingParams
from stretto.protocol import EngineInfo, Request
from stretto.ragged import RaggedStep
from stretto.sample.noise import mix
from stretto.spec.api import DrafterCaps, Offer, SlotView

WIDTH, PAGE, PROMPT = 7, 16, 512
FIXED = (0, 1, 3, 5, 7)
SHAPE = "llama-8b"


class ZeroNorm(RandomSource):
    """Random weights whose logits are all equal."""

    def tensor(self, name: str) -> torch.Tensor:
        return super().tensor(name) * (name != "model.norm.weight")


class Lucky:
    """Proposes the right id, 0, with the chance of its slot."""

    def __init__(self, slots: int):
        self.caps = DrafterCaps(shape="block", max_width=WIDTH)
        self.chance = torch.zeros(slots, device="cuda")

    def ingest(self, step: RaggedStep, taps: dict[str, torch.Tensor]) -> None:
        """Needs nothing."""

    def propose(self, step: RaggedStep, view: SlotView, width: int) -> Offer:
        at = view.known[step.slots].long()[:, None] + torch.arange(width, device="cuda")
        luck = ((mix(at * 1_000_003 + step.slots.long()[:, None]) >> 40) & 0xFFFFFF).float() / 2**24
        ids = (luck >= self.chance[step.slots][:, None]).long()
        return Offer(ids, torch.full((len(ids),), width, dtype=torch.int32, device="cuda"))


class Fixed(Elastic):
    """The same number of drafts, always."""

    def __init__(self, cost: CostModel, slots: int, drafts: int):
        super().__init__(cost, slots, (0, WIDTH), exact=False)
        self.drafts = drafts

    def choose(self, demand: Demand) -> Choice:
        choice = super().choose(demand)
        return replace(choice, drafts=[self.drafts] * len(demand.slots), draft_width=WIDTH if self.drafts else 0)


class Turns(Elastic):
    """Whichever policy has its turn."""

    def __init__(self, policies: dict[str, Elastic]):
        self.policies, self.now = policies, next(iter(policies.values()))

    def choose(self, demand: Demand) -> Choice:
        return self.now.choose(demand)

    def launched(self, *args: object) -> None:
        self.now.launched(*args)  # type: ignore[arg-type]

    def ran(self, *args: object) -> None:
        self.now.ran(*args)  # type: ignore[arg-type]

    def seated(self, slot: int, who: object) -> None:
        for policy in self.policies.values():
            policy.seated(slot, who)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Point:
    rows: int
    context: int
    acceptance: str  # "0.3", "0.6", "0.85", "mixed" or "drifting"
    prompts: bool = False  # prompts arrive meanwhile

    def chance(self, round_: int, slots: int) -> torch.Tensor:
        if self.acceptance == "mixed":
            return torch.tensor([0.3, 0.6, 0.85]).repeat(slots)[:slots]
        value = (0.3, 0.85)[round_ % 2] if self.acceptance == "drifting" else float(self.acceptance)
        return torch.full((slots,), value)


POINTS = [Point(1, 300, "0.3"), Point(1, 1024, "0.85"), Point(1, 8192, "0.6"), Point(8, 300, "mixed"),
          Point(8, 1024, "0.3", True), Point(8, 8192, "0.85"), Point(32, 300, "0.6"), Point(32, 1024, "0.85"),
          Point(32, 1024, "drifting"), Point(32, 8192, "0.3", True), Point(64, 300, "0.3"),
          Point(64, 300, "0.85", True), Point(64, 1024, "0.6"), Point(64, 1024, "mixed", True),
          Point(64, 8192, "0.85"), Point(64, 8192, "drifting"),
          Point(128, 300, "0.6"), Point(128, 1024, "0.3", True), Point(128, 1024, "mixed"),
          Point(128, 1024, "drifting"),
          Point(256, 300, "0.3"), Point(256, 300, "0.85"), Point(256, 1024, "0.6", True), Point(256, 1024, "mixed")]


class Bench:
    def __init__(self, seqs: int, cells: int, context: int):
        config, device = ModelConfig.from_hf(SHAPES[SHAPE]), torch.device("cuda")
        model = build_model(config, ZeroNorm(config, False), torch.bfloat16, device, context=context)
        groups, pages = group_layers(model.layers), -(-cells // PAGE)
        kv = KVCache(model.layers, groups, [pages] * len(groups), PAGE, model.dtype, device)
        table = SlotTable(seqs + 1, context, PAGE, len(groups), device)
        self.drafter, self.vocab_size, self.seqs = Lucky(seqs + 1), model.vocab_size, seqs
        runner = Runner(model, choose_backend(model.layers, PAGE, device, model.dtype), kv, table, self.drafter)
        self.device = CudaDevice(runner, device)
        self.device.warm_up(usual_shapes(seqs, 1 + WIDTH, WIDTH))
        self.limits = HostLimits(page_size=PAGE, pages=(pages,) * len(groups), windows=tuple(g.window for g in groups),
                                 max_slots=seqs + 1, max_model_len=context, chunk=2048, budget=8192, width=WIDTH,
                                 depth=1, prefix_cache=False)
        began = time.perf_counter()
        self.samples: Samples = StepTimes(self.device, self.limits, model.vocab_size).measure()
        print(f"{len(self.samples)} step times in {time.perf_counter() - began:.1f} s", flush=True)
        self.sent = 0

    def engine(self, policy: Elastic) -> EngineCore:
        info = EngineInfo(model_name=SHAPE, vocab_size=self.vocab_size, max_model_len=self.limits.max_model_len,
                          max_num_seqs=self.seqs, kv_tokens=self.limits.kv_tokens, eos_token_ids=[])
        return EngineCore(HostHalf(replace(self.limits, elastic=policy), None), self.device, info, 1)

    def submit(self, core: EngineCore, prompt: int, new: int) -> None:
        self.sent += 1
        tokens = torch.randint(0, self.vocab_size, (prompt,)).tolist()
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        core.submit(Request(rid=str(self.sent), tokens=tokens, sampling=sampling, want_text=False))

    def measure(self, point: Point, rounds: int, steps: int) -> dict[str, object]:
        """Rates of every policy, tokens a second."""
        names = [*map(str, FIXED), "elastic"]
        cost = CostModel(self.samples, self.limits.budget, bucket_of)
        policies: dict[str, Elastic] = {name: Fixed(cost, self.seqs + 1, k) for name, k in zip(names, FIXED)}
        policies["elastic"] = Elastic(CostModel(self.samples, self.limits.budget, bucket_of), self.seqs + 1, (0, WIDTH),
                                      exact=False)
        turns = Turns(policies)
        core = self.engine(turns)
        new = self.limits.max_model_len - point.context - 1
        for _ in range(point.rows):
            self.submit(core, point.context, new)
        while core.host.counters.decode_rows < 2 * point.rows:
            core.step()
        rates: dict[str, list[float]] = {name: [] for name in names}
        for round_ in range(1 + rounds):
            self.drafter.chance.copy_(point.chance(round_, self.seqs + 1))
            for name in names:
                turns.now = policies[name]
                rate = self.rate(core, point, steps if round_ else 3 * steps)
                if round_:
                    rates[name].append(rate)
        for rid in range(self.sent + 1):
            core.abort(str(rid))
        while core.has_work:
            core.step()
        return _told(point, rates, policies["elastic"])

    def rate(self, core: EngineCore, point: Point, steps: int) -> float:
        """Of the steps after the first few, which still verify what the policy before had proposed."""
        for _ in range(4):
            core.step()
        torch.cuda.synchronize()
        before, began = core.host.counters.generated_tokens, time.perf_counter()
        for step in range(steps):
            if point.prompts and step % 8 == 0:
                self.submit(core, PROMPT, 16)
            core.step()
        return (core.host.counters.generated_tokens - before) / (time.perf_counter() - began)


def _told(point: Point, rates: dict[str, list[float]], elastic: Elastic) -> dict[str, object]:
    medians = {name: round(statistics.median(values)) for name, values in rates.items()}
    best = max(map(str, FIXED), key=lambda name: medians[name])
    paired = sorted(ours / theirs for ours, theirs in zip(rates["elastic"], rates[best]))
    counters = elastic.counters
    return {"rows": point.rows, "context": point.context, "acceptance": point.acceptance, "prompts": point.prompts,
            "rates": medians, "best": best, "ratio": round(statistics.median(paired), 3),
            "ratio_span": [round(paired[0], 3), round(paired[-1], 3)], "chosen": counters.chosen,
            "predicted_over_measured": round(counters.predicted_seconds / max(counters.measured_seconds, 1e-9), 3)}


def wanted(only: list[str]) -> Iterator[Point]:
    for point in POINTS:
        if not only or f"{point.rows}x{point.context}" in only:
            yield point


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="such as 64x1024: these rows and contexts")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=32, help="of each policy in a round")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    points = list(wanted(args.only))
    seqs = max(p.rows for p in points) + 8
    cells = max(p.rows * (p.context + 1536) for p in points) + 16 * 1024
    bench = Bench(seqs, cells, max(p.context for p in points) + 2048)
    found = []
    for point in points:
        found.append(bench.measure(point, args.rounds, args.steps))
        print(json.dumps(found[-1]), flush=True)
    low = min(found, key=lambda f: f["ratio"])
    print(f"lowest ratio to the best fixed width: {low['ratio']} at {low['rows']} rows, context {low['context']}")
    if args.json:
        args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "shape": SHAPE, "points": found},
                                        indent=1))


if __name__ == "__main__":
    main()
