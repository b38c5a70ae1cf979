"""Elastic speculation against fixed widths on one GPU: the whole engine, an 8B shape, drafters whose acceptance is
scripted, 1..256 rows at contexts of 300 to 8192.

    python -m benchmarks.elastic_gpu --json elastic.json --seconds 140     # as many points as fit; again: the others
    python -m benchmarks.elastic_gpu --only 64x1024 --rounds 7
    python -m benchmarks.elastic_gpu --shape toy --device cpu --only 8x300 idle --rounds 1 --json -

At each point the same rows run on while policies take turns: none, 1, 3, 5 and 7 drafts, a rule that knows only how
many tokens a step has, and elastic. Each round fills the rows anew and gives every policy so many steps, in an order
that rotates; a round before them captures graphs and does not count. Told is each policy's rate, and elastic's over
those of the best fixed width and of the rule, paired by round. Contexts grow during a round, so every policy has a
turn in its first half and one in its second, in the opposite order. Fixed widths that were far from the best one in
two rounds that follow each other have no more turns, and are told (`dropped`); one bad round removes none.

    round     | fill rows (no model runs) | none | 1 | 3 | 5 | 7 | tokens | elastic | elastic | tokens | ... | none |
    window    | lead: drafts of the policy before | steps that count                 |

Where prompts arrive, a window is work in place of steps, the same for every policy: so many prompts, each when 512 more
tokens were generated, and as many tokens. It ends when the tokens are there and the prompts are fed.

    tokens    |---- 256 ----|---- 512 ----|---- 512 ----|---- 256 ----|
    prompts              first         second        third

The model's last norm is zero, so all logits are equal, every sampled id is 0, and a drafter can be right as often as it
is told to be. KV memory holds noise. A window's tokens are those that its verified drafts bring on average at the
scripted acceptance, so that luck does not hide differences of a percent; `luck` is what was accepted over that. Steps
in which a graph is captured are left out, as they are a server's first ones (`left_out`: of elastic's); a prompt that
was fed in one comes again. `sizes` are elastic's steps by the tokens that were computed: their number, their mean time
in ms and what the cost model had said. Point `idle`: an engine without drafter against one whose drafter finds nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine_gpu import SHAPES, RandomSource
from stretto.attn.select import choose_backend
from stretto.device.graphs import GraphExecutor, tokens_bucket, usual_shapes
from stretto.device.kv import KVCache, group_layers
from stretto.device.runner import Runner
from stretto.device.slots import SlotTable
from stretto.device.streams import CudaDevice, DeviceHalf, InlineDevice
from stretto.engine.core import EngineCore
from stretto.engine.step_times import StepTimes
from stretto.host.cost import CostModel, StepWork
from stretto.host.elastic import Choice, Demand, Elastic
from stretto.host.half import HostHalf
from stretto.host.limits import HostLimits
from stretto.host.sizes import is_first
from stretto.host.turn import Turn
from stretto.model.api import CausalModel
from stretto.model.config import ModelConfig
from stretto.model.load import build_model
from stretto.params import SamplingParams
from stretto.protocol import EngineInfo, Request
from stretto.ragged import RaggedStep
from stretto.sample.noise import mix
from stretto.spec.api import DrafterCaps, Offer, SlotView
from stretto.wire import StepResult

WIDTH, PAGE, PROMPT = 7, 16, 512
FIXED = (0, 1, 3, 5, 7)
GROWTH = 1200  # cells that a row may grow by in a round
LEAD = 3  # steps of a window that do not count: they verify what the policy before had proposed
WARM = 48  # steps of elastic in each half of the first round: it gathers which sizes of steps pay
FAR, VERY_FAR = 0.85, 0.7  # of the best fixed width, below which one is far from it; in the round that warms up
FAR_ROUNDS = 2  # in a row, after which it has no more turns
TOKENS_A_ROW = 1.4  # of a step, about, so that windows with prompts are as long as those without
ARRIVING = 32  # rows for prompts that arrive meanwhile
TOY = dict(architectures=["LlamaForCausalLM"], hidden_size=64, intermediate_size=128, num_hidden_layers=2,
           num_attention_heads=4, num_key_value_heads=2, vocab_size=512, max_position_embeddings=16384,
           rope_theta=10000.0, tie_word_embeddings=False)


class ZeroNorm(RandomSource):
    """Random weights whose logits are all equal."""

    def tensor(self, name: str) -> torch.Tensor:
        return super().tensor(name) * (name != "model.norm.weight")


class Blind:
    """Stands in for a model while rows are filled: computes nothing, and every sampled id is 0."""

    def __init__(self, model: CausalModel):
        self.model = model

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def forward(self, ids: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.zeros(len(ids), self.model.hidden_size, dtype=self.model.dtype, device=ids.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), self.model.vocab_size, device=hidden.device)


class Lucky:
    """Proposes the right id, 0, with the chance of its slot; nothing at all where it is told to be silent."""

    def __init__(self, slots: int, device: torch.device):
        self.caps = DrafterCaps(shape="block", max_width=WIDTH, variable=True)
        self.chance = torch.zeros(slots, device=device)
        self.offers = torch.ones((), dtype=torch.int32, device=device)  # 0: silent

    def ingest(self, step: RaggedStep, taps: dict[str, torch.Tensor]) -> None:
        """Needs nothing."""

    def propose(self, step: RaggedStep, view: SlotView, width: int) -> Offer:
        slots = step.slots.long()
        at = view.known[slots].long()[:, None] + torch.arange(width, device=slots.device)
        luck = ((mix(at * 1_000_003 + slots[:, None]) >> 40) & 0xFFFFFF).float() / 2**24
        ids = (luck >= self.chance[slots][:, None]).long()
        return Offer(ids, (torch.full_like(step.slots, width) * self.offers).int())


# ------------------------------------------------------------------------------------------------------------ policies
class Fixed(Elastic):
    """The same number of drafts, always."""

    def __init__(self, cost: CostModel, slots: int, drafts: int):
        super().__init__(cost, slots, (0, WIDTH), exact=False)
        self.drafts = drafts

    def choose(self, demand: Demand) -> Choice:
        rows = len(demand.slots)
        drafts = min(self.drafts, self._drafted)
        work = StepWork(rows, rows * (1 + drafts), demand.context)
        width = WIDTH if self.drafts else 0
        return Choice([drafts] * rows, demand.chunk_tokens, width, self._drafted, 0, 0.0, work, 0.0, 0.0)


class ByTokens(Fixed):
    """A rule that knows how long a step of so many tokens takes (as measured at the start, on short contexts) and how
    often drafts are accepted by all rows together: one number of drafts for all, by the best rate of tokens."""

    def choose(self, demand: Demand) -> Choice:
        rows, offered = len(demand.slots), np.arange(1 + WIDTH)
        gains = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(self.acceptance.usual()))])
        seconds = self.cost.curve(StepWork(0, 0, 0), rows * (1 + offered) + demand.chunk_tokens)
        best = int((gains / seconds).argmax()) if rows else 0
        self.drafts = best or int(self.counters.steps % 64 < 2)  # now and then it looks whether drafts pay again
        return super().choose(demand)

    def ran(self, result: StepResult, seconds: float) -> None:
        flight = self._flights.pop(result.seq, None)
        rows = [(r.slot, r.verified, max(len(r.new) - 1, 0)) for r in result.rows
                if flight is not None and r.slot in flight.allowed]
        if rows:
            self.acceptance.note(*np.asarray(rows).T)


class Turns(Elastic):
    """Whichever policy has its turn; counts what the results bring, by `chance` [slots]."""

    def __init__(self, policies: dict[str, Elastic], slots: int):
        self.policies, self.now = policies, next(iter(policies.values()))
        self.widths, self.counters = self.now.widths, self.now.counters
        self.tokens = self.emitted = 0.0
        self.left_out = 0  # steps of elastic that do not count
        self.ours = policies["elastic"]
        self.counting, self.sizes = False, dict[int, list[float]]()  # of elastic: steps, seconds, seconds foretold
        self.table = np.ones((slots, 1 + WIDTH))  # [slots, drafts]: tokens that so many verified drafts bring

    def choose(self, demand: Demand) -> Choice:
        return self.now.choose(demand)

    def launched(self, *args: object) -> None:
        self.now.launched(*args)  # type: ignore[arg-type]

    def ran(self, result: StepResult, seconds: float) -> None:
        flight = self.now._flights.get(result.seq)
        if self.counting and self.now is self.ours and flight is not None:
            sums = self.sizes.setdefault(int(self.ours.cost.computed(flight.work, flight.work.tokens)), [0, 0.0, 0.0])
            sums[:] = [a + b for a, b in zip(sums, (1, seconds, self.ours.cost.seconds(flight.work)))]
        self.now.ran(result, seconds)
        rows = [(row.slot, row.verified, len(row.new)) for row in result.rows if row.new]
        if rows:
            slots, verified, new = np.asarray(rows).T
            self.tokens += float(self.table[slots, verified].sum())
            self.emitted += float(new.sum())

    def turn_to(self, name: str) -> None:
        """The next plan finds what the policy before had proposed."""
        before, self.now = self.now, self.policies[name]
        self.now._drafted = before._drafted

    def seated(self, slot: int, who: object, sampled: bool = False) -> None:
        for policy in self.policies.values():
            policy.seated(slot, who, sampled)  # type: ignore[arg-type]

    def expect(self, chance: np.ndarray) -> None:
        self.table = 1 + np.concatenate([np.zeros((len(chance), 1)),
                                         np.cumsum(chance[:, None] ** np.arange(1, 1 + WIDTH), axis=1)], axis=1)


# -------------------------------------------------------------------------------------------------------------- points
@dataclass(frozen=True)
class Point:
    rows: int
    context: int
    acceptance: str  # "0.3", "0.6", "0.85", "mixed" or "drifting"
    prompts: bool = False  # prompts arrive meanwhile, a token for each that is generated

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.context} {self.acceptance}{' prompts' if self.prompts else ''}"

    @property
    def drifts(self) -> bool:
        return self.acceptance == "drifting"

    def chances(self) -> list[tuple[float, ...]]:
        """Of rows 0, 1, ... in turn, in each part of a window."""
        if self.drifts:
            return [(0.3,), (0.85,)]
        return [(0.3, 0.6, 0.85) if self.acceptance == "mixed" else (float(self.acceptance),)]


POINTS = [Point(8, 1024, "0.3", True), Point(256, 300, "0.85"), Point(64, 1024, "mixed", True),
          Point(128, 1024, "drifting"), Point(256, 300, "0.3"), Point(128, 1024, "0.3", True),
          Point(32, 1024, "drifting"), Point(64, 300, "0.85", True), Point(32, 8192, "0.3", True),
          Point(8, 300, "mixed"), Point(64, 300, "0.3"), Point(64, 1024, "0.6"), Point(32, 300, "0.6"),
          Point(32, 1024, "0.85"), Point(128, 300, "0.6"), Point(1, 300, "0.3"), Point(8, 8192, "0.85"),
          Point(1, 8192, "0.6"),
          Point(1, 1024, "0.85"), Point(128, 1024, "mixed"), Point(64, 8192, "0.85"), Point(256, 1024, "0.6", True),
          Point(256, 1024, "mixed"), Point(64, 8192, "drifting")]
IDLE_ROWS, IDLE_CONTEXT = (1, 8, 64, 256), 1024


class Bench:
    """One model, KV memory, slot table and set of graphs for all points."""

    def __init__(self, shape: str, device: str, seqs: int, cells: int, context: int):
        settings = SHAPES.get(shape, TOY)
        config, self.where = ModelConfig.from_hf(settings), torch.device(device)
        self.model = build_model(config, ZeroNorm(config, False, device), torch.bfloat16, self.where, context=context)
        groups, pages = group_layers(self.model.layers), -(-cells // PAGE)
        kv = KVCache(self.model.layers, groups, [pages] * len(groups), PAGE, self.model.dtype, self.where)
        for tensor in (*kv.k, *kv.v):
            tensor.normal_()
        table = SlotTable(seqs + 1, context, PAGE, len(groups), self.where)
        self.drafter, self.seqs = Lucky(seqs + 1, self.where), seqs
        backend = choose_backend(self.model.layers, PAGE, self.where, self.model.dtype)
        self.runner = Runner(self.model, backend, kv, table, self.drafter)
        self.device: DeviceHalf = (CudaDevice(self.runner, self.where) if device == "cuda"
                                   else InlineDevice(self.runner))
        shapes = [s for s in usual_shapes(seqs - ARRIVING, 1 + WIDTH, WIDTH)
                  if not s.sampled and is_first(s.rows, s.tokens or 0)]
        self.device.warm_up([replace(s, draft_width=w) for s in shapes for w in (0, WIDTH)])
        self.limits = HostLimits(page_size=PAGE, pages=(pages,) * len(groups), windows=tuple(g.window for g in groups),
                                 max_slots=seqs + 1, max_model_len=context, chunk=2048, budget=8192, width=WIDTH,
                                 depth=1 if device == "cuda" else 0, prefix_cache=False)
        began = time.perf_counter()
        self.samples = StepTimes(self.device, self.limits, self.model.vocab_size).measure()
        print(f"{len(self.samples)} step times in {time.perf_counter() - began:.1f} s", flush=True)
        self.sent = 0
        gc.collect()  # as an engine's process does
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)

    def cost(self) -> CostModel:
        return CostModel(self.samples, self.limits.budget, tokens_bucket)

    def policies(self) -> dict[str, Elastic]:
        shared, slots = self.cost(), self.seqs + 1
        found: dict[str, Elastic] = {str(k): Fixed(shared, slots, k) for k in FIXED}
        found["tokens"] = ByTokens(self.cost(), slots, 0)
        found["elastic"] = Elastic(self.cost(), slots, (0, WIDTH), exact=False)
        return found

    def engine(self, policy: Elastic | None) -> EngineCore:
        limits = replace(self.limits, elastic=policy, width=WIDTH if policy else 0)
        info = EngineInfo(model_name="", vocab_size=self.model.vocab_size, max_model_len=limits.max_model_len,
                          max_num_seqs=self.seqs, kv_tokens=limits.kv_tokens, eos_token_ids=[])
        return EngineCore(HostHalf(limits, None), self.device, info, self.limits.depth)

    def submit(self, core: EngineCore, rid: str, prompt: list[int], new: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        core.submit(Request(rid=rid, tokens=prompt, sampling=sampling, want_text=False))

    def fill(self, core: EngineCore, rows: int, context: int) -> None:
        """Rows that decode at this context, whose KV is whatever the memory holds. They are the same to a policy each
        time, and their slots are, too."""
        execute, self.runner.execute = self.runner.execute, self.runner.run_now
        self.runner.model = Blind(self.model)  # type: ignore[assignment]
        for row in range(rows):
            self.submit(core, f"row {row}", [1] * context, self.limits.max_model_len - context - 1)
        while core.host.queue or any(map(_is_fed, core.host.slots.running)):
            core.step()
        self.runner.execute, self.runner.model = execute, self.model

    def empty(self, core: EngineCore, turns: Turns | None = None) -> None:
        """No policy learns from what follows, until one has its turn."""
        if turns is not None:
            turns.turn_to(str(FIXED[0]))
        for turn in [*core.host.slots.running, *core.host.queue]:
            core.abort(turn.job.request.rid)
        while core.has_work:
            core.step()

    # ------------------------------------------------------------------------------------------------------ a point
    def measure(self, point: Point, rounds: int, steps: int) -> dict[str, object]:
        policies = self.policies()
        turns, names = Turns(policies, self.seqs + 1), list(policies)
        core = self.engine(turns)
        rates: dict[str, list[float]] = {name: [] for name in names}
        far = Far()
        for round_ in range(-1, min(rounds, 2) if point.drifts else rounds):
            shift = round_ % len(names)
            found = self.round(core, turns, point, names[shift:] + names[:shift], steps, round_ < 0)
            for name, rate in found.items() if round_ >= 0 else ():
                rates[name].append(rate)
            dropped = far.note(found, VERY_FAR if round_ < 0 else FAR)
            names = [name for name in names if name not in dropped]
            if dropped:
                print(f"{point.name}: no more turns for {', '.join(dropped)} drafts", flush=True)
        self.empty(core, turns)
        return _told(point, rates, policies["elastic"], turns) | {"dropped": far.dropped}

    def round(self, core: EngineCore, turns: Turns, point: Point, names: list[str], steps: int,
              first: bool) -> dict[str, float]:
        """Tokens a second of each policy."""
        found = {name: [0.0, 0.0] for name in names}
        for i, name in enumerate(names if point.drifts else names + names[::-1]):
            if i == 0 or point.drifts:
                self.empty(core, turns)
                self.fill(core, point.rows, max(64, point.context - GROWTH // 4))
            turns.turn_to(name)
            turns.counting = not first
            window = self.window(core, turns, point, WARM if first and name == "elastic" else steps)
            turns.counting = False
            found[name] = [a + b for a, b in zip(found[name], window)]
        return {name: tokens / max(seconds, 1e-9) for name, (tokens, seconds) in found.items()}

    def window(self, core: EngineCore, turns: Turns, point: Point, steps: int) -> tuple[float, float]:
        """(tokens, seconds) of the steps that count. Where acceptance drifts, it changes within the window."""
        if point.prompts:
            self.set_chances(core, turns, point.chances()[0])
            return self.work(core, turns, max(1, round(TOKENS_A_ROW * point.rows * steps / PROMPT)))
        tokens = seconds = 0.0
        for part, chances in enumerate(point.chances()):
            self.set_chances(core, turns, chances)
            found = self.part(core, turns, LEAD if part == 0 else 0, 3 * steps if point.drifts else steps)
            tokens, seconds = tokens + found[0], seconds + found[1]
        return tokens, seconds

    def set_chances(self, core: EngineCore, turns: Turns, chances: tuple[float, ...]) -> None:
        chance = np.full(self.seqs + 1, chances[0])
        for turn in core.host.slots.running:
            if turn.job.request.rid.startswith("row "):
                chance[turn.slot] = chances[int(turn.job.request.rid[4:]) % len(chances)]
        self.drafter.chance.copy_(torch.from_numpy(chance))
        turns.expect(chance)

    def part(self, core: EngineCore, turns: Turns, lead: int, steps: int) -> tuple[float, float]:
        """(tokens, seconds) of `steps` steps after the first `lead`."""
        for _ in range(lead):
            core.step()
        clean, tokens, seconds = True, 0.0, 0.0
        for _ in range(steps):
            was_clean, (clean, came, took) = clean, self.step(core, turns)
            if clean and was_clean:
                tokens, seconds = tokens + came, seconds + took
            else:
                turns.left_out += turns.now is turns.ours
        return tokens, seconds

    def work(self, core: EngineCore, turns: Turns, prompts: int) -> tuple[float, float]:
        """(tokens, seconds) of so many prompts and the tokens that bring them about."""
        for _ in range(LEAD):
            core.step()
        counters, clean, sent = core.host.counters, True, 0
        tokens = seconds = fed = 0.0
        while tokens < prompts * PROMPT or fed < prompts * PROMPT:
            waiting = core.host.queue or any(map(_is_fed, core.host.slots.running))
            again = tokens >= prompts * PROMPT and not waiting  # one was fed in a step that does not count
            if again or (sent < prompts and tokens >= (sent + 0.5) * PROMPT):
                sent += 1
                self.send(core)
            before = counters.chunk_tokens
            was_clean, (clean, came, took) = clean, self.step(core, turns)
            if clean and was_clean:
                tokens, seconds, fed = tokens + came, seconds + took, fed + counters.chunk_tokens - before
            else:
                turns.left_out += turns.now is turns.ours
        return tokens, seconds

    def send(self, core: EngineCore) -> None:
        self.sent += 1
        self.submit(core, f"prompt {self.sent}", torch.randint(0, self.model.vocab_size, (PROMPT,)).tolist(), 16)

    def step(self, core: EngineCore, turns: Turns) -> tuple[bool, float, float]:
        """(whether no graph was captured, tokens, seconds)."""
        graphs, before, began = self.graphs(), turns.tokens, time.perf_counter()
        core.step()
        return self.graphs() == graphs, turns.tokens - before, time.perf_counter() - began

    def graphs(self) -> tuple[int, int]:
        """How many were captured, and how many shapes were seen."""
        if not isinstance(self.device, CudaDevice):
            return 0, 0
        executor = self.runner.execute
        assert isinstance(executor, GraphExecutor)
        return len(executor.graphs), len(executor.seen)

    # --------------------------------------------------------------------------------------------------------- idle
    def idle(self, rows: int, rounds: int, steps: int) -> dict[str, object]:
        """Seconds of a step with a drafter that finds nothing over those without any drafter."""
        policies = self.policies()
        turns = Turns(policies, self.seqs + 1)
        with_drafter, without = self.engine(turns), self.engine(None)
        self.drafter.offers.fill_(0)
        turns.counting = True
        taken: dict[str, list[float]] = {"on": [], "off": []}
        for round_ in range(-1, rounds):
            for name, core in (("on", with_drafter), ("off", without))[:: 1 - 2 * (round_ % 2)]:
                self.runner.drafter = None if name == "off" else self.drafter
                turns.turn_to(str(FIXED[0]))
                self.fill(core, rows, IDLE_CONTEXT)
                turns.turn_to("elastic")
                seconds = self.step_seconds(core, 4 * steps)
                turns.sizes = {} if round_ < 0 else turns.sizes
                self.empty(core, turns)
                if round_ >= 0:
                    taken[name].append(seconds)
        self.runner.drafter = self.drafter
        self.drafter.offers.fill_(1)
        paired = sorted(on / off for on, off in zip(taken["on"], taken["off"]))
        counters = policies["elastic"].counters
        return {"point": f"idle {rows}x{IDLE_CONTEXT}", "step_ms": {n: _ms(v) for n, v in taken.items()},
                "ratio": round(statistics.median(paired), 4), "ratio_span": [round(paired[0], 4), round(paired[-1], 4)],
                "probes": counters.probes, "chosen": counters.chosen, "sizes": _sizes(turns)}

    def step_seconds(self, core: EngineCore, steps: int) -> float:
        for _ in range(4 * LEAD):
            core.step()
        began = time.perf_counter()
        for _ in range(steps):
            core.step()
        return (time.perf_counter() - began) / steps


def _is_fed(turn: Turn) -> bool:
    """Some of its prompt is still to be fed."""
    return turn.lease is None or turn.lease.lo < turn.fill_to


class Far:
    """Which fixed widths are too far from the best one to go on with."""

    def __init__(self) -> None:
        self.dropped: list[str] = []
        self._rounds: dict[str, int] = {}  # in a row in which a width was far

    def note(self, rates: dict[str, float], share: float) -> list[str]:
        """The widths, by name, that have no more turns after this round: below `share` of the best, again."""
        fixed = {name: rate for name, rate in rates.items() if name.isdigit()}
        best = max(fixed.values())
        for name, rate in fixed.items():
            self._rounds[name] = self._rounds.get(name, 0) + 1 if rate < share * best else 0
        dropped = [name for name in fixed if self._rounds[name] >= FAR_ROUNDS]
        self.dropped += dropped
        return dropped


def _ms(values: list[float]) -> float:
    return round(1e3 * statistics.median(values), 4)


def _told(point: Point, rates: dict[str, list[float]], elastic: Elastic, turns: Turns) -> dict[str, object]:
    medians = {name: round(statistics.median(values)) for name, values in rates.items() if values}
    best = max((str(k) for k in FIXED if len(rates[str(k)]) == len(rates["elastic"])), key=lambda name: medians[name])
    counters = elastic.counters
    return {"point": point.name, **asdict(point), "rates": medians, "best": best, **_paired(rates, best, "ratio"),
            **_paired(rates, "tokens", "over_rule"), "chosen": counters.chosen, "probes": counters.probes,
            "left_out": turns.left_out, "sizes": _sizes(turns), "luck": round(turns.emitted / turns.tokens, 4),
            "predicted_over_measured": round(counters.predicted_seconds / max(counters.measured_seconds, 1e-9), 3)}


def _sizes(turns: Turns) -> dict[int, list[float]]:
    return {size: [int(n), round(1e3 * took / n, 2), round(1e3 * foretold / n, 2)]
            for size, (n, took, foretold) in sorted(turns.sizes.items())}


def _paired(rates: dict[str, list[float]], other: str, name: str) -> dict[str, object]:
    paired = sorted(ours / theirs for ours, theirs in zip(rates["elastic"], rates[other]))
    return {name: round(statistics.median(paired), 3), f"{name}_span": [round(paired[0], 3), round(paired[-1], 3)]}


def wanted(only: list[str], done: set[str]) -> Iterator[Point]:
    for point in POINTS:
        if point.name not in done and (not only or {point.name, f"{point.rows}x{point.context}"} & set(only)):
            yield point


def run(args: argparse.Namespace, found: list[dict[str, object]]) -> Iterator[dict[str, object]]:
    """The points that are not among `found`, while there is time for them."""
    ends = time.perf_counter() + args.seconds
    done = {str(entry["point"]) for entry in found}
    points = list(wanted(args.only, done))
    idle = [rows for rows in IDLE_ROWS if f"idle {rows}x{IDLE_CONTEXT}" not in done
            and (not args.only or "idle" in args.only) and rows <= args.most_rows]
    points = [p for p in points if p.rows <= args.most_rows]
    sizes = [(p.rows, p.context) for p in points] + [(rows, IDLE_CONTEXT) for rows in idle]
    if not sizes:
        return
    bench = Bench(args.shape, args.device, max(rows for rows, _ in sizes) + ARRIVING,
                  max(rows * (context + GROWTH) for rows, context in sizes) + ARRIVING * 2 * PROMPT,
                  max(context for _, context in sizes) + 4 * GROWTH)
    jobs: list[Callable[[], dict[str, object]]] = [lambda p=p: bench.measure(p, args.rounds, args.steps)  # type: ignore
                                                   for p in points]
    jobs += [lambda n=n: bench.idle(n, args.rounds, args.steps) for n in idle]  # type: ignore[misc]
    for job in jobs:
        began = time.perf_counter()
        if began > ends:
            break
        yield job() | {"seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="such as 64x1024 or '64x1024 0.6'; or idle")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of each window")
    parser.add_argument("--seconds", type=float, default=420, help="after which no further point is begun")
    parser.add_argument("--most-rows", type=int, default=256)
    parser.add_argument("--shape", default="llama-8b", help="of the model; toy: a tiny one")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="points that it holds are not measured again; new ones are added")
    args = parser.parse_args()
    kept = args.json is not None and args.json.exists()
    found: list[dict[str, object]] = json.loads(args.json.read_text())["points"] if kept else []
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    for entry in run(args, found):
        found.append(entry)
        print(json.dumps(entry), flush=True)
        if args.json:
            args.json.write_text(json.dumps({"device": name, "shape": args.shape, "points": found}, indent=1))
    ratios = [e for e in found if "best" in e]
    if ratios:
        low = min(ratios, key=lambda e: float(str(e["ratio"])))
        print(f"lowest ratio to the best fixed width: {low['ratio']} at {low['point']}")


if __name__ == "__main__":
    main()
