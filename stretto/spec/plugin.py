"""A third party's drafter behind a guard: it may be wrong in any way, and costs drafts then, never text or the engine
(on ranks with one exception).

    at start    what it raises, and what it returns of a wrong kind, is a refusal that names it
    later       a step in which it raises or returns nonsense is offered nothing; that is logged and counted, as
                `drafter_faults`. Of ids that the target does not know, those before the first one are offered.
    on ranks    each has a drafter of its own; a row for which they differ, as where only one of them has raised, is
                offered nothing on any of them. What the ranks make together, as logits, it must ask for on all of them
                or on none: else they wait for each other, and the engine ends

Built-in drafters go without: on a device each check of values is a launch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch

from stretto.attn.api import LayerSpec
from stretto.model.shard import Shard
from stretto.ragged import RaggedStep
from stretto.spec.api import Drafter, DrafterCaps, Offer, SlotView
from stretto.spec.context import DrafterContext, DrafterError, DrafterKind, DrafterSizes, DraftKV, Target

log = logging.getLogger(__name__)

TOLD = 5  # faults that are logged with all that is known; then every TOLD_EVERY-th in a line
TOLD_EVERY = 1000
Propose = Callable[[Sequence[int], int], list[int]]  # confirmed ids and a number -> ids that may follow


class Plugin:
    """`spec.context.DrafterKind` and the optional methods of one, around what an entry point gave."""

    def __init__(self, name: str, kind: object):
        self._name, self._kind = name, kind

    def caps(self, settings: str) -> DrafterCaps:
        return _sane(self._name, self._typed("caps", DrafterCaps, settings))

    def sizes(self, settings: str, target: Target) -> DrafterSizes:
        if not hasattr(self._kind, "sizes"):
            return DrafterSizes(self.caps(settings))
        sizes: DrafterSizes = self._typed("sizes", DrafterSizes, settings, target)
        _sane(self._name, sizes.caps)
        return sizes

    def make(self, settings: str, context: DrafterContext) -> Drafter:
        assert context.target is not None
        declared = self.sizes(settings, context.target)
        drafter = self._called("make", settings, _held_to(self._name, declared, context))
        for method in ("ingest", "propose"):
            if not callable(getattr(drafter, method, None)):
                raise DrafterError(f"drafter {self._name}: make gave a {type(drafter).__name__}, which has no method"
                                   f" {method}")
        own = getattr(drafter, "caps", None)
        if own != declared.caps:
            raise DrafterError(f"drafter {self._name} declares {_difference(declared.caps, own)} before it is made than"
                               " after: both must be what it does")
        return GuardedDrafter(self._name, cast(Drafter, drafter), context.vocab_size, context.shard)

    def host(self, settings: str, vocab_size: int | None = None) -> Propose:
        """`vocab_size`: of the target; None: not known yet."""
        if not hasattr(self._kind, "host"):
            raise DrafterError(f"drafter {self._name} declares that it proposes on the host, and has no method"
                               " host(settings)")
        propose = self._called("host", settings)
        if not callable(propose):
            raise DrafterError(f"drafter {self._name}: host gave a {type(propose).__name__}, no function")
        return GuardedProposals(self._name, propose, vocab_size)

    def _called(self, method: str, *arguments: Any) -> Any:
        with _named(self._name, method):
            return getattr(self._kind, method)(*arguments)

    def _typed(self, method: str, kind: type, *arguments: Any) -> Any:
        made = self._called(method, *arguments)
        if not isinstance(made, kind):
            raise DrafterError(f"drafter {self._name}: {method} gave a {type(made).__name__}, no {kind.__name__}")
        return made


@contextmanager
def _named(name: str, method: str) -> Iterator[None]:
    """Whatever it raises is its refusal."""
    try:
        yield
    except DrafterError:
        raise
    except Exception as e:
        raise DrafterError(f"drafter {name}: {method} raised {type(e).__name__}: {e}") from e


def _sane(name: str, caps: DrafterCaps) -> DrafterCaps:
    """Raises DrafterError for numbers that mean nothing."""
    if caps.max_width < 1 or caps.lookahead < 0 or not isinstance(caps.taps, frozenset | set):
        raise DrafterError(f"drafter {name} declares max_width {caps.max_width}, lookahead {caps.lookahead} and taps"
                           f" {caps.taps!r}: at least one draft, no negative number of cells and a set of names are"
                           " wanted")
    return caps


def _difference(before: DrafterCaps, after: object) -> str:
    if not isinstance(after, DrafterCaps):
        return f"{before}, and has caps {after!r}: other ones"
    names = [name for name in vars(before) if getattr(before, name) != getattr(after, name)]
    return ", ".join(f"another {name} ({getattr(before, name)!r}, then {getattr(after, name)!r})" for name in names)


def _held_to(name: str, declared: DrafterSizes, context: DrafterContext) -> DrafterContext:
    """The context, whose KV memory is what was planned for."""
    def own_kv(layers: Sequence[LayerSpec]) -> DraftKV:
        assert context.own_kv is not None
        taken: dict[int | None, int] = {}
        for spec in layers:
            taken[spec.window] = taken.get(spec.window, 0) + 2 * spec.n_kv_heads * spec.head_dim
        planned = {window: values for window, values, _ in declared.kv_groups}
        if declared.caps.kv != "own" or taken != planned:
            raise DrafterError(f"drafter {name} asks for KV memory of {taken} numbers a token by window; it declares"
                               f" kv {declared.caps.kv!r} and {planned}")
        return context.own_kv(layers)
    return replace(context, own_kv=own_kv)


class _Faults:
    def __init__(self, name: str):
        self.name, self.count = name, 0

    def note(self, what: str, error: Exception | None = None) -> None:
        self.count += 1
        if self.count <= TOLD or self.count % TOLD_EVERY == 0:
            log.error("drafter %s: %s; its step goes without drafts (fault %d)", self.name, what, self.count,
                      exc_info=error if self.count <= TOLD else None)


class GuardedDrafter:
    """`spec.api.Drafter`."""

    def __init__(self, name: str, drafter: Drafter, vocab_size: int, shard: Shard | None = None):
        self.caps, self._drafter, self._vocab_size, self._shard = drafter.caps, drafter, vocab_size, shard or Shard()
        self._faults, self._ingested = _Faults(name), True

    @property
    def faults(self) -> int:
        return self._faults.count

    def ingest(self, step: RaggedStep, taps: dict[str, torch.Tensor]) -> None:
        self._ingested = False
        with self._guarded("ingest", step):
            self._drafter.ingest(step, taps)
            self._ingested = True

    def propose(self, step: RaggedStep, view: SlotView, width: int) -> Offer:
        offer = self._own(step, view, min(width, self.caps.max_width))
        return offer if self._shard.ranks == 1 else self._agreed(offer, min(width, self.caps.max_width))

    def _own(self, step: RaggedStep, view: SlotView, width: int) -> Offer:
        """Nothing after an ingest that failed: what it remembers may be half written."""
        if self._ingested:
            with self._guarded("propose", step):
                return self._checked(self._drafter.propose(step, view, width), step, width)
        device = step.slots.device
        return Offer(torch.zeros(len(step.slots), width, dtype=torch.int64, device=device),
                     torch.zeros(len(step.slots), dtype=torch.int32, device=device))

    def _agreed(self, offer: Offer, width: int) -> Offer:
        """What all ranks offer: a result must be the same on each of them."""
        rows, columns = offer.ids.shape
        ids = torch.where(torch.arange(columns, device=offer.ids.device) < offer.width[:, None], offer.ids, 0)
        mine = torch.zeros(rows, 1 + width, device=ids.device)  # float32, as logits: exact for ids below 2 ** 24
        mine[:, 0], mine[:, 1 : 1 + columns] = offer.width, ids
        all_of_them = self._shard.join(mine).view(rows, self._shard.ranks, 1 + width)
        same = (all_of_them == all_of_them[:, :1]).all(2).all(1)
        return Offer(torch.where(same[:, None], ids, 0), torch.where(same, offer.width, 0))

    @contextmanager
    def _guarded(self, method: str, step: RaggedStep) -> Iterator[None]:
        """While a graph is captured, what failed would be missing from it for ever: that is no fault of one step."""
        try:
            yield
        except Exception as e:
            if step.slots.is_cuda and torch.cuda.is_current_stream_capturing():
                raise DrafterError(f"drafter {self._faults.name}: {method} cannot be captured in a CUDA graph"
                                   f" ({type(e).__name__}: {e}): start with --enforce-eager") from e
            self._faults.note(f"{method} raised {type(e).__name__}: {e}", e)

    def _checked(self, offer: object, step: RaggedStep, width: int) -> Offer:
        """Raises TypeError and ValueError."""
        rows, device = len(step.slots), step.slots.device
        if not isinstance(offer, Offer) or not all(isinstance(t, torch.Tensor) for t in (offer.ids, offer.width)):
            raise TypeError(f"a {type(offer).__name__} is no Offer of two tensors")
        ids, counts = offer.ids, offer.width
        if ids.ndim != 2 or len(ids) != rows or ids.shape[1] > width or counts.shape != (rows,):
            raise ValueError(f"ids {list(ids.shape)} and widths {list(counts.shape)} for {rows} rows of at most {width}"
                             " drafts")
        if any(t.is_floating_point() or t.is_complex() or t.device != device for t in (ids, counts)):
            raise TypeError(f"ids are {ids.dtype} on {ids.device} and widths {counts.dtype} on {counts.device}; whole"
                            f" numbers on {device} are wanted")
        known = ((ids >= 0) & (ids < self._vocab_size)).to(torch.int32).cumprod(1).sum(1)
        return Offer(ids.clamp(0, self._vocab_size - 1).long(),
                     torch.minimum(counts, known).clamp(min=0).to(torch.int32))


class GuardedProposals:
    """`host.limits.HostDrafter`."""

    def __init__(self, name: str, propose: Callable[[Sequence[int], int], Any], vocab_size: int | None):
        self._propose, self._vocab_size, self._faults = propose, vocab_size, _Faults(name)

    @property
    def faults(self) -> int:
        return self._faults.count

    def __call__(self, tokens: Sequence[int], width: int) -> list[int]:
        try:
            ids = [int(i) for i in self._propose(tokens, width)]
        except Exception as e:
            self._faults.note(f"its proposal raised {type(e).__name__}: {e}", e)
            return []
        known = next((n for n, i in enumerate(ids) if i < 0 or i >= (self._vocab_size or i + 1)), len(ids))
        return ids[: min(known, width)]


def faults_of(drafter: object) -> int:
    """How often a drafter has failed until now; 0 of one that is not guarded."""
    return drafter.faults if isinstance(drafter, GuardedDrafter | GuardedProposals) else 0


def as_plugin(name: str, loaded: object) -> DrafterKind:
    """What an entry point gave: a class, of which one is made, or the object itself. Raises DrafterError."""
    with _named(name, "its class"):
        kind = loaded() if isinstance(loaded, type) else loaded
    if not callable(getattr(kind, "caps", None)):
        raise DrafterError(f"drafter {name}: {type(kind).__name__} has no method caps(settings)")
    return Plugin(name, kind)
