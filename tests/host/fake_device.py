"""A device half without a model: it speaks the real messages, and its KV cells hold hashes of their prefix.

A stale, freed, misplaced, or shared-then-overwritten cell is seen by the next read. Copies to and from host memory are
made as late as the plans' fences allow, or at any time before. The target model is a fixed
function of (prefix, seed, choice), and so is every log-probability: an oracle without an engine says what must come
out.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from stretto.wire import (
    HEADER,
    N_INT,
    NULL_PAGE,
    STATE,
    Goal,
    Int,
    LateMask,
    Moved,
    PackedPlan,
    PageOp,
    RowResult,
    Seam,
    StepPlan,
    StepResult,
    TokenScore,
    pack_plan,
    split_plan,
    state_cells,
)

WORD = (1 << 64) - 1
DRAFT_SALT = 0x5DEECE66D
VOCAB = 50
EOS = 7


class DeviceFault(AssertionError):
    """The fake device saw something that a real one would have computed wrongly from."""


def need(ok: object, message: str) -> None:
    if not ok:
        raise DeviceFault(message)


def mix(state: int, token: int) -> int:
    x = ((state ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & WORD
    x ^= x >> 29
    x = (x * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 32)


def prefix_hashes(tokens: list[int]) -> list[int]:
    """Element p: the hash of tokens[0:p]; it is also the tap of position p-1."""
    out = [0]
    for t in tokens:
        out.append(mix(out[-1], t))
    return out


def draft_cell(tap: int, token: int) -> int:
    """A drafter's cell, from (taps of i, token i+1)."""
    return mix(tap ^ DRAFT_SALT, token)


EVERY = frozenset(range(VOCAB))


def next_token(prefix_hash: int, seed: int, choice: int, masked: frozenset[int] = frozenset(),
               allowed: frozenset[int] = EVERY) -> int:
    """The target model, sampled: `masked` ids are not sampled, and only `allowed` ones are."""
    x = mix(mix(prefix_hash, 1000 + choice), seed & 0xFFFF)
    token = EOS if x % 37 == 0 else (x >> 8) % VOCAB
    need(allowed - masked, "a mask that allows nothing")
    while token in masked or token not in allowed:
        token = (token + 1) % VOCAB
    return token


def score(prefix_hash: int, token: int, alternatives: int) -> TokenScore:
    """The log-probability of `token` after a prefix, and of the alternatives."""
    x = mix(prefix_hash, token)
    return TokenScore(-float(x % 1000) / 100, [(prefix_hash + i) % VOCAB for i in range(alternatives)],
                      [-float((prefix_hash >> i) % 100) for i in range(alternatives)])


@dataclass
class DeviceWorld:
    page: int
    windows: tuple[int | None, ...]
    context: int
    slots: int
    k: int = 0
    drafter: str = "none"  # none | ngram (from the log) | eagle (own KV at the target's pages) | host
    accept: float = 1.0  # quality of the drafts; 1.0: a perfect drafter
    lookahead: int = 0


@dataclass
class Slot:
    ints: list[int] = field(default_factory=lambda: [0] * N_INT)
    log: list[int] = field(default_factory=list)
    stops: frozenset[int] = frozenset()
    seam: int | None = 0  # tap of position len-1
    tables: list[dict[int, int]] = field(default_factory=list)
    states: dict[int, int | None] = field(default_factory=dict)  # cell -> state; that of n tokens is their hash

    def __getitem__(self, column: Int) -> int:
        return self.ints[column]

    def __setitem__(self, column: Int, value: int) -> None:
        self.ints[column] = int(value)

    @property
    def seed(self) -> int:
        return (self[Int.SEED_LOW] & 0xFFFFFFFF) | (self[Int.SEED_HIGH] & 0xFFFFFFFF) << 32


@dataclass
class HostPage:
    """A copy of a page of a group; draft cells and the tap of the last position are those of group 0."""

    cells: list[int | None]
    draft_cells: list[int | None]
    tap: int | None


class FakeDevice:
    """Runs a step at once; whoever drives it lets the results travel late. Methods named after the laws they keep, so
    that a test can break one by overriding it."""

    slow = False  # copies are made only when a step waits for them

    def __init__(self, world: DeviceWorld, rng: random.Random):
        self.world, self.rng = world, rng
        self.slots = [self._empty() for _ in range(world.slots)]
        self.kv: list[dict[tuple[int, int], int]] = [{} for _ in world.windows]
        self.draft_kv: dict[tuple[int, int], int] = {}  # at the pages of group 0
        self.page_tap: dict[int, int | None] = {}  # page of the group with taps -> tap of its last position, or state
        self.with_taps = world.windows.index(STATE) if STATE in world.windows else 0
        self.cells = state_cells(world.k)
        self.published: list[set[int]] = [set() for _ in world.windows]  # read-only pages, by the driver's record
        self.host: list[dict[int, HostPage]] = [{} for _ in world.windows]
        self.copies: deque[tuple[int, list[list[int]]]] = deque()  # page operations of plans that are not yet done
        self.count: Counter[str] = Counter()
        self._mask: LateMask | None = None  # of the step that runs
        self._row = 0

    def _empty(self) -> Slot:
        slot = Slot(tables=[{} for _ in self.world.windows])
        slot[Int.DONE], slot[Int.EPOCH] = 1, -1
        return slot

    # ------------------------------------------------------------------------------------------------------ a step
    def run(self, plan: StepPlan, mask: LateMask | None = None) -> StepResult:
        need(plan.late_mask == (mask is not None), "a plan and its mask do not come together")
        need(mask is None or mask.seq == plan.seq, "the mask of another plan")
        packed, self._mask = pack_plan(plan), mask
        views = split_plan(packed[:HEADER], packed)
        if views.moves:
            self.copies.append((views.seq, views.page_ops.tolist()))
        moved = self.finish_copies(views.fence)
        self.apply(views)
        slots = [row[0] for row in views.rows.tolist()]
        need(len(slots) == len(set(slots)), "two rows of one slot in a step")
        fitting, rows = self.fit(views.rows.tolist(), views.tokens), []
        for self._row, row in enumerate(fitting):
            rows.append(self.step_row(*row))
        return StepResult(views.seq, rows, 1e-3 * len(rows), moved)

    def fit(self, rows: list[list[int]], tokens: int) -> list[list[int]]:
        """In a step with room for so many tokens (0: for all), drafts that do not fit wait, those of later rows first;
        what is pending must fit."""
        if not tokens:
            return rows
        parts = []
        for s, epoch, q_cap in rows:
            slot = self.slots[s]
            live = slot[Int.EPOCH] == epoch and not slot[Int.DONE]
            q = self.q_of(slot, q_cap) if live else 0
            needed = min(q, slot[Int.KNOWN] - slot[Int.LEN]) if live else 0
            parts.append((needed, q - needed))
        room = tokens - sum(needed for needed, _ in parts)
        need(room >= 0, "a step has no room for what is pending")
        for i, (needed, drafts) in enumerate(parts):
            kept = min(drafts, room)
            room -= kept
            self.count["waiting_drafts"] += drafts - kept
            if kept < drafts:
                rows[i] = [*rows[i][:2], needed + kept]
        return rows

    def finish_copies(self, fence: int) -> list[Moved]:
        """Makes the copies that the step must wait for, and perhaps others that have had their time."""
        self.count["fenced"] += bool(self.copies) and self.copies[0][0] <= fence
        moved = []
        while self.copies and (self.copies[0][0] <= fence or (not self.slow and self.rng.random() < 0.2)):
            seq, ops = self.copies.popleft()
            for op in ops:
                self.page_op(*op)
            moved.append(Moved(seq, 1e-5 * len(ops), 1e-5 * len(ops)))
        return moved

    def page_op(self, kind: int, group: int, source: int, target: int) -> None:
        if kind == PageOp.COPY:
            self._copy(group, source, target)
        elif kind == PageOp.POISON:
            self._poison(group, target)
        elif kind == PageOp.KEEP_STATE:
            self.count["kept_states"] += 1
            self.page_tap[target] = self.slots[source // self.cells].states.get(source % self.cells)
        elif kind == PageOp.SAVE:
            self.save(group, source, target)
        else:
            self.restore(group, source, target)

    def apply(self, plan: PackedPlan) -> None:
        for s in plan.releases.tolist():
            self.slots[s][Int.DONE], self.slots[s][Int.EPOCH] = 1, -1
        self._seats(plan)
        world = self.world
        table = -(-(world.context - 1 + world.lookahead) // world.page)
        need(all(i < table for _, _, i, _ in plan.maps.tolist()), "a page beyond the context and the lookahead")
        named = [(s, g, i) for s, g, i, _ in plan.maps.tolist()]
        need(len(named) == len(set(named)), "one table entry is mapped twice in a plan")
        for s, g, i, page in plan.maps.tolist():
            need(self.slots[s][Int.EPOCH] != -1, "pages mapped into an empty slot")
            self.slots[s].tables[g][i] = page
        for op in plan.page_ops.tolist() if not plan.moves else ():
            self.page_op(*op)
        for s in plan.seats[:, 0].tolist():
            self._seat_seam(self.slots[s], self.slots[s][Int.SEAM])
        start, ids = 0, plan.draft_ids.tolist()
        for s, epoch, at, n in plan.draft_heads.tolist():
            self.host_draft(self.slots[s], epoch, at, ids[start : start + n])
            start += n

    def _seats(self, plan: PackedPlan) -> None:
        named = plan.seats[:, 0].tolist()
        need(len(named) == len(set(named)), "one slot is seated twice in a plan")
        for row in plan.seats.tolist():
            s, fresh, log_from, n = row[:4]
            slot = self.slots[s]
            cells = [token for at, _, token in plan.log_cells.tolist() if at == s]
            need(len(cells) == n, "log cells of a seat")
            slot.ints = row[4 : 4 + N_INT]
            slot.log = slot.log[:log_from] + cells
            need(len(slot.log) == slot[Int.KNOWN] <= self.world.context, "a seat's log does not end at known")
            slot.stops = frozenset(token for at, _, token in plan.stops.tolist() if at == s)
            if fresh:
                need(log_from == 0, "a fresh seat brings its whole log")
                slot.tables = [{} for _ in self.world.windows]

    def _seat_seam(self, slot: Slot, seam: int) -> None:
        if seam == Seam.UNKNOWN:
            slot.seam = None
        elif seam == Seam.START:
            need(slot[Int.LEN] == 0, "a seam at the start of a text that has a length")
            slot.seam = 0
        elif seam != Seam.KEEP:
            slot.seam = self.page_tap.get(seam)
        if seam != Seam.KEEP:
            slot.states[slot[Int.LEN] % self.cells] = slot.seam  # a state and a tap are the same hash

    def _copy(self, group: int, source: int, target: int) -> None:
        for cells in (self.kv[group], self.draft_kv) if group == 0 else (self.kv[group],):
            for offset in range(self.world.page):
                if (source, offset) in cells:
                    cells[target, offset] = cells[source, offset]
        if self.world.windows[group] == STATE:
            self.page_tap[target] = self.page_tap.get(source)

    def _poison(self, group: int, page: int) -> None:
        for cells in (self.kv[group], self.draft_kv) if group == 0 else (self.kv[group],):
            for offset in range(self.world.page):
                cells.pop((page, offset), None)
        if group == self.with_taps:
            self.page_tap.pop(page, None)

    def save(self, group: int, page: int, host_page: int) -> None:
        self.count["saved_pages"] += 1
        offsets = range(self.world.page)
        own = self.draft_kv if group == 0 else {}
        self.host[group][host_page] = HostPage([self.kv[group].get((page, i)) for i in offsets],
                                               [own.get((page, i)) for i in offsets],
                                               self.page_tap.get(page) if group == self.with_taps else None)

    def restore(self, group: int, host_page: int, page: int) -> None:
        self.count["restored_pages"] += 1
        need(host_page in self.host[group], "a page is restored from host memory that nobody wrote")
        copy = self.host[group][host_page]
        self._poison(group, page)
        for cells, values in ((self.kv[group], copy.cells), (self.draft_kv, copy.draft_cells)):
            cells.update({(page, i): value for i, value in enumerate(values) if value is not None})
        if group == self.with_taps and copy.tap is not None:
            self.page_tap[page] = copy.tap

    def host_draft(self, slot: Slot, epoch: int, at: int, ids: list[int]) -> None:
        """Always late: it must agree with what was confirmed since, and only its rest is offered."""
        behind = slot[Int.KNOWN] - at
        if slot[Int.EPOCH] != epoch or slot[Int.DONE] or slot[Int.KNOWN] - slot[Int.LEN] != 1:
            self.count["late_ignored"] += 1
        elif ids[:behind] != slot.log[at : slot[Int.KNOWN]]:
            self.count["late_dropped"] += 1
        else:
            self.count["late_kept" if behind else "late_on_time"] += 1
            self.offer(slot, ids[behind : behind + slot[Int.SPECULATION]], 1)

    # ------------------------------------------------------------------------------------------------------- cells
    def cell(self, slot: Slot, group: int, position: int, writing: bool) -> tuple[int, int]:
        page = slot.tables[group].get(position // self.world.page, NULL_PAGE)
        need(page != NULL_PAGE, f"{'write' if writing else 'read'} through an unmapped page (group {group})")
        need(not writing or page not in self.published[group], f"write into a published page (group {group})")
        return page, position % self.world.page

    def q_of(self, slot: Slot, q_cap: int) -> int:
        """The row formula."""
        base, pend = slot[Int.LEN], slot[Int.KNOWN] - slot[Int.LEN]
        need(pend >= 1, "live row with nothing to feed")
        need(slot[Int.NDRAFT] == 0 or pend == 1, "drafts on a row that does not sample")
        need(slot[Int.NDRAFT] == 0 or slot[Int.KNOWN] + slot[Int.NDRAFT] < slot[Int.LIMIT], "drafts past the limit")
        return min(q_cap, pend + slot[Int.NDRAFT], slot[Int.LIMIT] - 1 - base)

    def step_row(self, s: int, epoch: int, q_cap: int) -> RowResult:
        slot = self.slots[s]
        need(slot[Int.EPOCH] == epoch or slot[Int.DONE], "row for a slot of another epoch")
        if slot[Int.DONE] or slot[Int.EPOCH] != epoch:
            self.count["empty_rows"] += 1
            same = slot[Int.EPOCH] == epoch
            return RowResult(s, epoch if same else -1, 0, 0, slot[Int.LEN], slot[Int.KNOWN], True, [], [])
        base = slot[Int.LEN]
        q = self.q_of(slot, q_cap)
        need(q >= 1, "the bounds made a live row empty")
        self.count["rows"] += 1
        hashes = prefix_hashes(slot.log[: base + q])
        self._forward(slot, base, q, hashes)
        n_out = self.n_out(slot, base, q)
        verified = max(0, n_out - 1)
        prompt_scores = self._prompt_scores(slot, base, q, hashes)
        new = self._verify(slot, hashes, n_out)
        new_scores = self._new_scores(slot, new)
        self._commit(slot, base, q, n_out, new)
        offered = self._draft(slot, base, n_out, prefix_hashes(slot.log[: slot[Int.LEN] + 1]))
        return RowResult(s, epoch, q, verified, slot[Int.LEN], slot[Int.KNOWN], bool(slot[Int.DONE]), new, offered,
                         new_scores, prompt_scores)

    def n_out(self, slot: Slot, base: int, q: int) -> int:
        return max(0, base + q - slot[Int.KNOWN] + 1) if slot[Int.GOAL] == Goal.GENERATE else 0

    def _forward(self, slot: Slot, base: int, q: int, hashes: list[int]) -> None:
        """Writes the cells, then reads all that any query of the row may read."""
        size = self.world.page
        for g, window in enumerate(self.world.windows):
            if window == STATE:
                self._states(slot, g, base, q, hashes)
                continue
            for p in range(base, base + q):
                page, offset = self.cell(slot, g, p, True)
                self.kv[g][page, offset] = hashes[p + 1]
                if g == self.with_taps and offset == size - 1:
                    self.page_tap[page] = hashes[p + 1]
            for p in range(0 if window is None else max(0, base - window + 1), base + q):
                need(self.kv[g].get(self.cell(slot, g, p, False)) == hashes[p + 1], f"foreign or stale KV (group {g})")

    def _states(self, slot: Slot, group: int, base: int, q: int, hashes: list[int]) -> None:
        """Reads the state of the cells before the row; leaves those behind every position where the row may end, and
        behind the ends of pages."""
        need(slot.states.get(base % self.cells) == hashes[base], "a row begins with a state that is not its own")
        ends = max(1, self.n_out(slot, base, q))
        slot.states.update({n % self.cells: hashes[n] for n in range(base + q - ends + 1, base + q + 1)})
        for n in range(base + 1, base + q + 1):
            page = slot.tables[group].get((n - 1) // self.world.page, NULL_PAGE)
            if n % self.world.page == 0 and page != NULL_PAGE:
                need(page not in self.published[group], "a state is written beside a published page")
                self.page_tap[page] = hashes[n]

    def allowed(self, place: int) -> frozenset[int]:
        """What the step's mask allows its present row at a place of its window."""
        if self._mask is None or place >= self._mask.index.shape[1]:
            return EVERY
        at = int(self._mask.index[self._row, place])
        if at < 0:
            return EVERY
        return frozenset(np.flatnonzero(np.unpackbits(self._mask.bits[at].view(np.uint8), bitorder="little")).tolist())

    def _masked(self, slot: Slot, position: int) -> frozenset[int]:
        return slot.stops if position < slot[Int.FIRST_STOP] else frozenset()

    def _verify(self, slot: Slot, hashes: list[int], n_out: int) -> list[int]:
        new: list[int] = []
        x, known = hashes[slot[Int.KNOWN]] if n_out else 0, slot[Int.KNOWN]
        for i in range(n_out):
            allowed = self.allowed(i)
            t = next_token(x, slot.seed, slot[Int.CHOICE], self._masked(slot, known + i), allowed)
            new.append(t)
            x = mix(x, t)
            if t in slot.stops or i == n_out - 1:
                break
            if slot.log[known + i] != t:
                need(self.world.accept < 1.0 or allowed != EVERY,
                     "a perfect proposal was refused (offered at a wrong position)")
                break
        self.count["accepted"] += max(0, len(new) - 1)
        return new

    def _commit(self, slot: Slot, base: int, q: int, n_out: int, new: list[int]) -> None:
        if n_out:
            slot.log = slot.log[: slot[Int.KNOWN]] + new
            slot[Int.KNOWN] += len(new)
            slot[Int.LEN], slot[Int.NDRAFT] = slot[Int.KNOWN] - 1, 0
            slot[Int.DONE] = new[-1] in slot.stops or slot[Int.KNOWN] >= slot[Int.LIMIT]
        else:
            slot[Int.LEN] = base + q
            if slot[Int.GOAL] == Goal.SCORE:
                slot[Int.DONE] = slot[Int.LEN] == slot[Int.KNOWN]

    # ------------------------------------------------------------------------------------------------------ scores
    def _prompt_scores(self, slot: Slot, base: int, q: int, hashes: list[int]) -> dict[int, TokenScore]:
        n = max(0, slot[Int.LOGPROBS])
        return {p + 1: score(hashes[p + 1], slot.log[p + 1], n)
                for p in range(base, base + q) if slot[Int.SCORE_FROM] <= p and p + 1 < slot[Int.PROMPT]}

    def _new_scores(self, slot: Slot, new: list[int]) -> list[TokenScore]:
        if slot[Int.LOGPROBS] < 0 or not new:
            return []
        known = slot[Int.KNOWN]
        hashes = prefix_hashes(slot.log[:known] + new)
        return [score(hashes[known + i], t, slot[Int.LOGPROBS]) for i, t in enumerate(new)]

    # ------------------------------------------------------------------------------------------------------ drafts
    def _draft(self, slot: Slot, base: int, n_out: int, final: list[int]) -> list[int]:
        """`final`: hashes of the log up to len + 1 ids."""
        world = self.world
        if world.drafter == "eagle" and self.ingests(slot):
            self.ingest(slot, base, final)
        slot.seam = final[slot[Int.LEN]]
        if slot[Int.SPECULATION] and world.drafter in ("ngram", "eagle") and self.may_offer(slot, n_out):
            if world.drafter == "eagle":
                self._write_lookahead(slot)
            width = slot[Int.SPECULATION] if world.drafter == "eagle" else self.rng.randint(0, slot[Int.SPECULATION])
            self.offer(slot, self.guess(slot.log[: slot[Int.KNOWN]], slot, width), n_out)
        return slot.log[slot[Int.KNOWN] : slot[Int.KNOWN] + slot[Int.NDRAFT]]

    def ingests(self, slot: Slot) -> bool:
        return True

    def may_offer(self, slot: Slot, n_out: int) -> bool:
        return n_out > 0 and not slot[Int.DONE]

    def offer(self, slot: Slot, ids: list[int], n_out: int) -> None:
        if not self.may_offer(slot, n_out):
            return
        self.write_offer(slot, ids[: max(0, slot[Int.LIMIT] - 1 - slot[Int.KNOWN])])

    def write_offer(self, slot: Slot, ids: list[int]) -> None:
        need(slot[Int.KNOWN] + len(ids) <= self.world.context, "log write outside its row")
        slot.log = slot.log[: slot[Int.KNOWN]] + ids
        slot[Int.NDRAFT] = len(ids)
        self.count["offered"] += len(ids)

    def guess(self, tokens: list[int], slot: Slot, n: int) -> list[int]:
        """A proposal of n ids after `tokens`: the target's own, some of them spoilt."""
        x, out = prefix_hashes(tokens)[-1], []
        for i in range(n):
            t = next_token(x, slot.seed, slot[Int.CHOICE], self._masked(slot, len(tokens) + i))
            if self.rng.random() > self.world.accept:
                t = (t + 1) % VOCAB
            out.append(t)
            x = mix(x, t)
        return out

    def ingest(self, slot: Slot, base: int, final: list[int], shift: int = 0) -> None:
        """Cell i+1 is written from (taps of i, token i+1): a function of tokens[0..i+1], as the prefix property asks.
        A shift of 1 would store it at i, which the test of that mutant does."""
        end = min(slot[Int.LEN] + shift, slot[Int.KNOWN])
        for p in range(max(base, slot[Int.DRAFT_LEN] + shift), end):
            tap = slot.seam if p == base else final[p]
            need(tap is not None, "seam lost: the taps of position len-1 are unknown")
            assert tap is not None
            self.draft_kv[self.cell(slot, 0, p - shift, True)] = draft_cell(tap, slot.log[p])
        slot[Int.DRAFT_LEN] = end - shift
        for p in range(shift, end):
            if self.world.windows[0] is None or p > slot[Int.LEN] - self.world.windows[0]:
                got = self.draft_kv.get(self.cell(slot, 0, p - shift, False))
                need(got == draft_cell(final[p], slot.log[p]), "foreign or stale KV (draft)")

    def _write_lookahead(self, slot: Slot) -> None:
        """The fixed loop of the drafter writes scratch past len."""
        for p in range(slot[Int.LEN], slot[Int.LEN] + self.world.lookahead):
            self.draft_kv[self.cell(slot, 0, p, True)] = -1


