"""Logit processors that are not the engine's own: which there are, whose rows they see, what happens when they fail.

    request -> ProcessorUse (name or code, parameters) -> seat of a plan -> `CustomProcessors.seat`
    step    -> StepShape.processors (keys) -> `CustomProcessors.apply`, once for each key, over all its rows

A processor that raises fails the requests for which it raises, no other: the call is repeated for each of them alone.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec
import torch

from stretto.logit_processors import LogitProcessor, Params, ProcessorContext, Rows
from stretto.params import ProcessorUse
from stretto.sample.processors import Positions
from stretto.wire import Int

GROUP = "stretto.logit_processors"
_Uses = msgspec.json.Decoder(list[ProcessorUse])


class ProcessorError(ValueError):
    """A processor that cannot be loaded, or does not take the parameters that a request gives it."""


def read_uses(packed: bytes) -> list[ProcessorUse]:
    """Of a seat (`wire.Seat.processors`)."""
    return _Uses.decode(packed)


@dataclass(frozen=True)
class Registry:
    """The processors that requests may name, and whether they may bring code."""

    named: Mapping[str, type[LogitProcessor]] = field(default_factory=dict)
    allow_code: bool = False

    @classmethod
    def installed(cls, allow_code: bool) -> Registry:
        """Those of every installed package. Raises ProcessorError for one that does not load."""
        return cls({point.name: _loaded(point) for point in entry_points(group=GROUP)}, allow_code)

    def check(self, use: ProcessorUse) -> None:
        """Raises ProcessorError, in words for the client."""
        kind = self._kind(use)
        try:
            kind.check(use.params)
        except Exception as e:  # whatever it raises, it does not take them
            raise ProcessorError(f"logit processor {use.name or kind.__name__} refuses its parameters: {e}") from e

    def make(self, use: ProcessorUse, context: ProcessorContext) -> LogitProcessor:
        return self._kind(use)(context)

    def _kind(self, use: ProcessorUse) -> type[LogitProcessor]:
        if use.name in self.named:
            return self.named[use.name]
        if use.name or not self.allow_code:
            raise ProcessorError(f"there is no logit processor {use.name!r}" if use.name else
                                 "this server runs no code of requests")
        return client_code(use.source)


def _loaded(point: EntryPoint) -> type[LogitProcessor]:
    try:
        kind = point.load()
    except (ImportError, AttributeError) as e:
        raise ProcessorError(f"logit processor {point.name}: its package gives no {point.value} ({e})") from e
    if not (isinstance(kind, type) and issubclass(kind, LogitProcessor)):
        raise ProcessorError(f"logit processor {point.name}: {point.value} is no class derived from"
                             " stretto.logit_processors.LogitProcessor")
    return kind


@lru_cache(maxsize=64)
def client_code(source: str) -> type[LogitProcessor]:
    """A processor around a client's pickled class. This runs the client's code: only where the operator allows it.

    Raises ProcessorError."""
    try:
        kind = pickle.loads(bytes.fromhex(json.loads(source)["callable"]))
        call = kind() if isinstance(kind, type) else kind
    except Exception as e:  # a pickle may do anything
        raise ProcessorError(f"custom_logit_processor cannot be loaded: {type(e).__name__}: {e}") from e
    if not callable(call):
        raise ProcessorError(f"custom_logit_processor is a {type(call).__name__}, which cannot be called")

    class ClientCode(LogitProcessor):
        def __call__(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
            told = [{**params, "__req__": _RequestSoFar(*history)}
                    for params, history in zip(rows.params, rows.histories, strict=True)]
            return call(logits, told)

    ClientCode.__name__ = type(call).__name__
    return ClientCode


@dataclass(frozen=True)
class _RequestSoFar:
    """SGLang's `Req`, as far as processors read it, as of one position."""

    origin_input_ids: list[int]
    output_ids: list[int]


@dataclass
class _Active:
    """A processor that some slot uses."""

    processor: LogitProcessor
    mine: torch.Tensor  # [S] bool
    params: dict[int, Params] = field(default_factory=dict)  # by slot


class CustomProcessors:
    """The processors of one slot table. `faults`: what went wrong and was not taken yet, by slot."""

    def __init__(self, n_slots: int, device: torch.device, registry: Registry | None = None, vocab_size: int = 0):
        self.registry, self.device = registry or Registry(), device
        self.context = ProcessorContext(vocab_size, device, n_slots)
        self.active: dict[str, _Active] = {}
        self.dead = torch.zeros(n_slots, dtype=torch.int32, device=device)  # positions with nothing left to sample
        self.faults: dict[int, str] = {}

    # ------------------------------------------------------------------------------------------------------ slots
    def seat(self, slot: int, packed: bytes) -> None:
        """`packed`: JSON of the occupant's uses; b"" where it has none."""
        self.release(slot)
        for use in read_uses(packed) if packed else ():
            try:
                one = self.active.get(use.key) or self._activate(use)
                one.processor.seat(slot, use.params)
                one.params[slot] = use.params
                one.mine[slot] = True
            except Exception as e:  # of the processor's own code
                self.faults[slot] = _described(use.name or "of the request", e)

    def _activate(self, use: ProcessorUse) -> _Active:
        processor = self.registry.make(use, self.context)
        self.active[use.key] = one = _Active(processor, torch.zeros_like(self.dead, dtype=torch.bool))
        return one

    def release(self, slot: int) -> None:
        self.faults.pop(slot, None)
        for key, one in list(self.active.items()):
            if slot in one.params:
                del one.params[slot]
                one.mine[slot] = False
                with suppress(Exception):  # of code that is not ours, about a request that has ended
                    one.processor.release(slot)
                if not one.params and key not in self.registry.named:
                    del self.active[key]  # of a client: it has left


    def graph_safe(self, keys: Sequence[str]) -> bool:
        return all(key in self.active and self.active[key].processor.graph_safe for key in keys)

    def take_faults(self, slots: Sequence[int]) -> list[tuple[int, str]]:
        """(row, what went wrong) of a step's rows; `slots`: the slot of each."""
        return [(row, self.faults.pop(slot)) for row, slot in enumerate(slots) if slot in self.faults]

    # ------------------------------------------------------------------------------------------------------ a step
    def apply(self, logits: torch.Tensor, where: Positions, log: torch.Tensor, keys: Sequence[str],
              proposing: bool) -> torch.Tensor:
        """logits [L, V], which may be changed in place. `proposing`: they are a drafter's; what fails there costs
        acceptance only, and is found again at the target's own positions."""
        touched = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        for key in keys:
            one = self.active.get(key)
            if one is None:  # it could not be made: its requests have a fault already
                continue
            mine = one.mine[where.slots]
            if (used := where.used) is not None:
                mine = mine & used
            touched = touched | mine
            if one.processor.graph_safe:
                found = self._call(key, one, logits.clone(), where, log, mine, proposing)
                logits = torch.where(mine[:, None], found, logits)
            elif len(index := mine.nonzero().flatten()):
                part = where.take(index)
                logits[index] = self._call(key, one, logits[index], part, log, mine[index], proposing)
        if not proposing:
            self._note_dead(logits, where, touched)
        return logits

    def _note_dead(self, logits: torch.Tensor, where: Positions, touched: torch.Tensor) -> None:
        """Rows of which nothing can be sampled: noted on the device, so that nobody waits for it."""
        best = logits.amax(-1)  # NaN where there is one
        dead = touched & ~(best.isfinite())
        self.dead.zero_()
        self.dead.index_add_(0, where.slots, dead.to(torch.int32))

    def _call(self, key: str, one: _Active, logits: torch.Tensor, where: Positions, log: torch.Tensor,
              mine: torch.Tensor, proposing: bool) -> torch.Tensor:
        """As the processor leaves them; rows for which it fails stay as they are, and get a fault."""
        try:
            return self._made(one, logits.clone(), where, log, mine)
        except Exception as e:
            slots = where.slots[mine].unique().tolist()
            if len(slots) == 1:
                self._fail(slots[0], one, e, proposing)
                return logits
        for slot in slots:
            index = (mine & (where.slots == slot)).nonzero().flatten()
            try:
                logits[index] = self._made(one, logits[index], where.take(index), log, mine[index])
            except Exception as e:
                self._fail(slot, one, e, proposing)
        return logits

    @staticmethod
    def _made(one: _Active, logits: torch.Tensor, where: Positions, log: torch.Tensor,
              mine: torch.Tensor) -> torch.Tensor:
        rows = Rows(where.slots, where.at.long(), torch.minimum(where.int(Int.PROMPT), where.at).long(), mine, log,
                    one.params.__getitem__)
        shape = logits.shape
        found: Any = one.processor(logits, rows)
        if not isinstance(found, torch.Tensor) or found.shape != shape:
            what = f"a tensor of {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise TypeError(f"it returned {what} for logits of {tuple(shape)}")
        return found.to(torch.float32)

    def _fail(self, slot: int, one: _Active, error: Exception, proposing: bool) -> None:
        if not proposing:
            self.faults.setdefault(slot, _described(type(one.processor).__name__, error))


def _described(name: str, error: Exception) -> str:
    """The same in every process: without addresses of objects."""
    said = re.sub(r"\b0x[0-9a-f]+\b", "0x...", str(error))
    return f"logit processor {name} failed: {type(error).__name__}: {said}"[:1000]
