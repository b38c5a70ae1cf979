"""For authors of drafters: whole engines over any model, small and fast, without text.

    engine = make_engine(model, "mine:settings", target, Setup(page_size=1, chunk=8))
    answers = run(engine, [Ask("a", [1, 2, 3], greedy(20))])

`stretto.conformance` runs a drafter through everything that it must stand; docs/drafters.md shows how.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stretto.attn.select import choose_backend
from stretto.device.kv import KVCache, group_layers
from stretto.device.runner import Runner
from stretto.device.slots import SlotTable
from stretto.device.streams import make_device
from stretto.engine.core import EngineCore
from stretto.host.half import HostHalf
from stretto.host.limits import HostLimits
from stretto.model.api import CausalModel
from stretto.params import SamplingParams
from stretto.protocol import EngineInfo, Output, Request
from stretto.spec.api import Drafter
from stretto.spec.context import Target
from stretto.spec.registry import drafter_sizes, make_drafter


@dataclass(frozen=True)
class Setup:
    """Sizes and switches of a test engine. `pool_tokens` are held by every KV group."""

    width: int = 4
    page_size: int = 16
    pool_tokens: int = 4096
    chunk: int = 256
    budget: int = 1024
    cap_policy: str = "full"
    mixed: bool = True
    overlap: bool = False
    prefix_cache: bool = True
    slots: int = 9
    context: int = 256
    poison: bool = True  # freed pages become unreadable


@dataclass(frozen=True)
class Ask:
    """One request."""

    rid: str
    tokens: Sequence[int]
    sampling: SamplingParams


@dataclass
class Answer:
    """What came back for one request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    cached: int = 0

    def add(self, output: Output) -> None:
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        if output.usage is not None:
            usage = output.usage
            self.drafted, self.accepted, self.steps = usage.drafted_tokens, usage.accepted_tokens, usage.steps
            self.cached = usage.cached_tokens


def greedy(n: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n, **more)


def target_of(model: CausalModel, path: Path, name: str = "target") -> Target:
    """What a drafter may know of a loaded model whose files are at `path`."""
    return Target(name, path, model.vocab_size, model.hidden_size, len(model.layers), model.max_position)


def make_engine(model: CausalModel, drafter: str | Drafter | None, target: Target,
                setup: Setup | None = None) -> EngineCore:
    """`drafter`: as after --speculation, or an object that needs no memory of its own, or None."""
    s, named = setup or Setup(), drafter if isinstance(drafter, str) else None
    sizes = drafter_sizes(named, target, s.width) if named else None
    draft_windows = [window for window, _ in sizes.kv_groups] if sizes else []
    groups = group_layers(model.layers, draft_windows)
    context = min(s.context, model.max_position)
    caps = sizes.caps if sizes else None if drafter is None or named else drafter.caps  # type: ignore[union-attr]
    width = min(s.width, caps.max_width) if caps else 0
    pages = (-(-s.pool_tokens // s.page_size),) * len(groups)
    kv = KVCache(model.layers, groups, pages, s.page_size, model.dtype, model.device)
    table = SlotTable(s.slots, context, s.page_size, len(groups), model.device, caps.lookahead if caps else 0)
    runner = Runner(model, choose_backend(model.layers, s.page_size, model.device, model.dtype), kv, table)
    if named:
        runner.adopt(make_drafter(named, runner.drafting.context(width, context, target)))
    else:
        runner.adopt(drafter)  # type: ignore[arg-type]
    limits = HostLimits(
        page_size=s.page_size, pages=pages, windows=tuple(g.window for g in groups), max_slots=s.slots,
        max_model_len=context, width=width, depth=int(s.overlap), chunk=s.chunk, budget=s.budget,
        cap_policy=s.cap_policy, mixed=s.mixed, prefix_cache=s.prefix_cache, poison=s.poison,
        lookahead=caps.lookahead if caps and width else 0, seeds=random.Random(0))
    info = EngineInfo(model_name=target.name, vocab_size=model.vocab_size, max_model_len=context,
                      max_num_seqs=s.slots - 1, kv_tokens=limits.kv_tokens, eos_token_ids=[], speculation_tokens=width)
    return EngineCore(HostHalf(limits), make_device(runner, s.overlap), info, int(s.overlap))


def run(engine: EngineCore, asks: Sequence[Ask], *, later: Sequence[Ask] = (),
        between: Callable[[int], None] | None = None, most: int = 50_000) -> dict[str, Answer]:
    """Runs the requests to their ends; `later` ones come when the first output has. `between(step)` is called after
    every step. Then no page may be held by anybody, page by page."""
    answers = {ask.rid: Answer() for ask in (*asks, *later)}
    waiting = list(later)

    def submit(ask: Ask) -> None:
        engine.submit(Request(rid=ask.rid, tokens=list(ask.tokens), sampling=ask.sampling, want_text=False))

    for ask in asks:
        submit(ask)
    for step in range(most):
        if not engine.has_work:
            break
        outputs = engine.step()
        for output in outputs:
            answers[output.rid].add(output)
        if outputs and waiting:
            for ask in waiting:
                submit(ask)
            waiting = []
        if between is not None:
            between(step)
    if engine.has_work:
        raise AssertionError(f"not idle after {most} steps")
    engine.host.audit()
    _, gauges = engine.host.stats()
    held = {name: value for name, value in gauges.items() if name.startswith("pages_used") and value}
    if held:
        raise AssertionError(f"pages are held with nothing running: {held}")
    return answers


def counters(engine: EngineCore) -> dict[str, float]:
    return engine.host.stats()[0]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
