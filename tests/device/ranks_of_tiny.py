"""What a rank of a tiny model runs; a module of its own, since spawned processes import it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from stretto.attn.torch_ragged import TorchRagged
from stretto.device.kv import KVCache
from stretto.device.ranks import RankShard
from stretto.device.runner import Runner
from stretto.device.slots import SlotTable
from stretto.device.states import kv_groups
from stretto.device.streams import DeviceHalf, make_device
from stretto.model.api import CausalModel
from stretto.model.load import load_model
from stretto.ragged import RaggedStep
from stretto.spec.api import Drafter, Offer, SlotView
from stretto.spec.ngram import NgramDrafter
from stretto.spec.plugin import GuardedDrafter

SLOTS, CONTEXT, PAGES, PAGE = 9, 256, 128, 4


@dataclass(frozen=True)
class Tiny:
    """What travels to the ranks."""

    folder: Path
    overlap: bool = True
    drafts: int = 0
    broken: int = -1  # this rank reads the logits of the others wrongly
    dies: int = -1  # this rank ends before its first step
    unloaded: int = -1  # this rank does not come so far
    host_pages: int = 0  # of each group
    faulty: tuple[int, ...] = ()  # these ranks' drafter raises at times, and says something else at others


class Faulty:
    """A third party's drafter, which has faults of its own."""

    def __init__(self, drafter: Drafter):
        self.caps, self._drafter, self._calls = drafter.caps, drafter, 0

    def ingest(self, step: RaggedStep, taps: dict[str, torch.Tensor]) -> None:
        self._drafter.ingest(step, taps)

    def propose(self, step: RaggedStep, view: SlotView, width: int) -> Offer:
        self._calls += 1
        if self._calls % 4 == 0:
            raise ValueError("a fourth step")
        offer = self._drafter.propose(step, view, width)
        return Offer(offer.ids + 1, offer.width) if self._calls % 4 == 1 else offer


def half_of(tiny: Tiny, shard: RankShard) -> tuple[DeviceHalf, int]:
    if shard.rank == tiny.unloaded:
        raise MemoryError("no room for the weights")
    half, _ = rank_half(tiny, shard)
    if shard.rank == tiny.dies:
        half.launch = lambda packed: (_ for _ in ()).throw(RuntimeError("out of luck"))  # type: ignore[method-assign]
    return half, int(tiny.overlap)


def rank_half(tiny: Tiny, shard: RankShard) -> tuple[DeviceHalf, CausalModel]:
    if shard.rank == tiny.broken:
        shard.join = lambda x: RankShard.join(shard, x).roll(1, -1)  # type: ignore[method-assign]
    model = load_model(tiny.folder, dtype=torch.float32, device=torch.device("cpu"), shard=shard)
    groups = kv_groups(model)
    kv = KVCache(model.layers, groups, [PAGES] * len(groups), PAGE, model.dtype, model.device)
    table = SlotTable(SLOTS, CONTEXT, PAGE, len(groups), model.device)
    drafter: Drafter | None = NgramDrafter(tiny.drafts) if tiny.drafts else None
    if drafter is not None and tiny.faulty:
        own = Faulty(drafter) if shard.rank in tiny.faulty else drafter
        drafter = GuardedDrafter("faulty", own, model.vocab_size, shard)
    runner = Runner(model, TorchRagged(), kv, table, drafter, tiny.drafts)
    if tiny.host_pages:
        runner.keep_on_host([tiny.host_pages] * len(groups))
    return make_device(runner, tiny.overlap), model
