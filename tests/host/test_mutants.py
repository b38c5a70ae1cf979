"""Each law of the host half, and of the device half it relies on, is broken once; the worlds must notice.

A mutant patches the real classes (or the fake device); no switch for it exists in the product. Survivors stand in
SURVIVORS with the reason why they change nothing that anybody could see.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from llguidance import LLMatcher
from msgspec import structs

from stretto.host import planner as planner_module
from stretto.host import slots as slots_module
from stretto.host.copies import NO_PLAN, CopiesInFlight
from stretto.host.grammar import GrammarState
from stretto.host.half import HostHalf
from stretto.host.intake import Intake
from stretto.host.lease import Lease
from stretto.host.ledger import Ledger
from stretto.host.ops import Ops
from stretto.host.planner import Planner
from stretto.host.prefix import PrefixTree
from stretto.host.results import Results
from stretto.host.session import ROLLED_BACK, Sessions
from stretto.host.share import share_budget
from stretto.host.slots import Slots
from stretto.host.states import KeptStates
from stretto.host.tier import HostTier
from stretto.host.turn import Turn
from stretto.text.masks import MaskMaker
from stretto.text.regex_places import RegexPlaces
from stretto.wire import NEVER, STATE, Goal, Int, Moved, Seam
from tests.host.fake_device import EVERY, FakeDevice
from tests.host.harness import Harness, World, make_world

Patch = pytest.MonkeyPatch

SPEC = dict(width=3, depth=1, prefix_cache=True)
EAGLE = dict(SPEC, drafter="eagle", page_size=4)
WINDOW = dict(SPEC, windows=(None, 5), small_windows=False)
TIGHT = dict(room=1.0, eager=True)
LATE = dict(depth=2)
TIER = dict(room=1.0, eager=True, host_room=4.0, page_size=4, prefix_cache=True, session_share=0.6)
GRAMMAR = dict(SPEC, grammar_share=0.9, accept=0.95)
STATES = dict(SPEC, windows=(None, STATE), session_share=0.6, page_size=4)
SESSIONS = dict(session_share=1.0, most_waiting=4)


@contextmanager
def changed(lease: Lease, **values):
    """A lease whose facts are other ones for the length of a call."""
    before = {name: getattr(lease, name) for name in values}
    for name, value in values.items():
        setattr(lease, name, value)
    yield
    for name, value in before.items():
        setattr(lease, name, value)


def wrapped(m: Patch, owner: type, name: str, wrapper: Callable) -> None:
    """wrapper(original, self, *args, **kwargs) instead of a method."""
    original = getattr(owner, name)
    m.setattr(owner, name, lambda self, *args, **kwargs: wrapper(original, self, *args, **kwargs))


# ------------------------------------------------------------------------------------------------ bounds and pages
def unclipped_hi(m: Patch) -> None:
    wrapped(m, Ledger, "_lease_on", lambda f, self, root, path, lo, draft_lo, top: (
        f(self, root, path, lo, draft_lo, 1 << 30)))
    m.setattr(Ledger, "limit", lambda self, lease, top: None)


def reserve_against_lo(m: Patch) -> None:
    def reserve(f, self, lease, q_cap, lookahead):
        with changed(lease, flying=0):
            return f(self, lease, q_cap, lookahead)
    wrapped(m, Ledger, "reserve", reserve)


def reserve_one_token(m: Patch) -> None:
    wrapped(m, Ledger, "reserve", lambda f, self, lease, q_cap, lookahead: (
        (got := f(self, lease, 1, lookahead)) and structs.replace(got, q_cap=q_cap)))


def lookahead_clipped(m: Patch) -> None:
    wrapped(m, Ledger, "reserve", lambda f, self, lease, q_cap, lookahead: (
        (got := f(self, lease, q_cap + lookahead, 0)) and structs.replace(got, q_cap=q_cap)))


def reserve_first_group_only(m: Patch) -> None:
    def reserve(f, self, lease, q_cap, lookahead):
        got = f(self, lease, q_cap, lookahead)
        return got and structs.replace(got, mapped=[entry for entry in got.mapped if entry[0] == 0])
    wrapped(m, Ledger, "reserve", reserve)


def slide_at(cells: int) -> Callable[[Patch], None]:
    def slide(f, self, lease):
        with changed(lease, lo=min(lease.hi, lease.lo + lease.flying) + cells if cells > 1 else lease.lo + 1):
            return f(self, lease)
    return lambda m: wrapped(m, Ledger, "slide", slide)


def slide_keeps_the_pin(m: Patch) -> None:
    def let_go(f, self, lease, group, index):
        if index >= len(lease.nodes) or self.windows[group] is None:
            f(self, lease, group, index)
    wrapped(m, Ledger, "_let_go", let_go)


def publish_up_to_known(m: Patch) -> None:
    def publish(f, self, lease, tokens):
        with changed(lease, lo=min(len(tokens), lease.hi)):
            return f(self, lease, tokens)
    wrapped(m, Ledger, "publish", publish)


def publish_up_to_hi(m: Patch) -> None:
    """Also above what is known: with the ids that are given."""
    def publish(f, self, lease, tokens):
        with changed(lease, lo=lease.hi):
            return f(self, lease, list(tokens) + [1] * 64)
    wrapped(m, Ledger, "publish", publish)


def swap_without_remapping(m: Patch) -> None:
    """The duplicate of a shared page is freed while the device's table still names it."""
    wrapped(m, Ledger, "_share_page", lambda f, *args: f(*args) and [])


def adopt_over_a_window_gap(m: Patch) -> None:
    def longest(f, self, path, has):
        return f(self, path, lambda node, g: self.windows[g] is not None or has(node, g))
    wrapped(m, Ledger, "_longest", longest)


def adopt_without_reference(m: Patch) -> None:
    m.setattr(PrefixTree, "pin", lambda self, node, group: None)


def settle_keeps_length(m: Patch) -> None:
    def settle(self, lease, n):
        lease.flight.clear()
        lease.flying = 0
    m.setattr(Ledger, "settle", settle)


def settle_keeps_flight(m: Patch) -> None:
    def settle(self, lease, n):
        lease.lo = lease.draft_lo = min(lease.lo, n)
    m.setattr(Ledger, "settle", settle)


def fork_shares_last_page(m: Patch) -> None:
    def copy_page(self, parent, child, index):
        for g in self._groups:
            child.pages[g].append(parent.pages[g][index])
        return True
    m.setattr(Ledger, "_copy_page", copy_page)


def fork_without_copy(m: Patch) -> None:
    m.setattr(Ops, "copy", lambda self, group, source, target: None)


def seam_lost(m: Patch) -> None:
    m.setattr(Ledger, "seam", lambda self, lease: Seam.UNKNOWN if lease.lo else Seam.START)


def seam_of_a_page_end_everywhere(m: Patch) -> None:
    m.setattr(Ledger, "seam", lambda self, lease: lease.pages[0][(lease.lo - 1) // self.page_size] if lease.lo else 0)


def truncate_keeps_a_shared_page(m: Patch) -> None:
    def truncate(self, lease, n):
        lease.lo = lease.draft_lo = min(lease.lo, n)
        return lease.lo
    m.setattr(Ledger, "truncate", truncate)


def pins_cannot_be_reclaimed(m: Patch) -> None:
    m.setattr(Planner, "_reclaim", lambda self, keep=None: False)


def drop_forgets_the_last_page(m: Patch) -> None:
    def drop(f, self, lease, useful=None):
        for pages in lease.pages:
            del pages[max(len(lease.nodes), len(pages) - 1):]
        f(self, lease, useful)
    wrapped(m, Ledger, "drop", drop)


# ------------------------------------------------------------------------------------------------ slots and epochs
def results_without_epochs(m: Patch) -> None:
    m.setattr(Slots, "owner", lambda self, slot, epoch: self._occupants[slot])


def reseat_keeps_epoch(m: Patch) -> None:
    def reseat(f, self, old, new, seam, log_from):
        epoch, self._epochs = self._epochs, old.epoch - 1
        f(self, old, new, seam, log_from)
        self._epochs = epoch
    wrapped(m, Slots, "reseat", reseat)


def release_keeps_pending_maps(m: Patch) -> None:
    def release(self, slot):
        self._seats.pop(slot, None)
        self._releases[slot] = None
    m.setattr(Ops, "release", release)
    m.setattr("stretto.host.ops.need", lambda ok, message: None)


def release_keeps_pending_seat(m: Patch) -> None:
    def release(self, slot):
        self._maps.pop(slot, None)
        self._releases[slot] = None
    m.setattr(Ops, "release", release)
    m.setattr("stretto.host.ops.need", lambda ok, message: None)


def seat_without_pages(m: Patch) -> None:
    """The pages of a prefix hit are not mapped."""
    wrapped(m, Slots, "seat", lambda f, self, turn, seam: (
        f(self, turn, seam), self._ops._maps.pop(turn.slot, None))[0])


def slots_taken_by_others_are_remembered(m: Patch) -> None:
    m.setattr(Slots, "_forget", lambda self, session: None)


def a_slot_keeps_the_pages_it_had(m: Patch) -> None:
    m.setattr(slots_module, "_changes", lambda had, has: list(enumerate(has))[len(had):])


def a_log_is_taken_as_it_was_left(m: Patch) -> None:
    m.setattr(slots_module, "common", lambda a, b: min(len(a), len(b)))


def a_slot_keeps_its_seam_wherever_the_turn_goes_on(m: Patch) -> None:
    m.setattr(Slots, "holds_seam", lambda self, turn: turn.session in self._left)


# ------------------------------------------------------------------------------------------------- columns of seats
def column(name: Int, value: Callable[[int, Turn], int]) -> Callable[[Patch], None]:
    def seat_of(f, turn, lease, **kwargs):
        seat = f(turn, lease, **kwargs)
        seat.ints[name] = value(seat.ints[name], turn)
        return seat

    def patch(m: Patch) -> None:
        original = slots_module.seat_of
        m.setattr(slots_module, "seat_of", lambda *args, **kwargs: seat_of(original, *args, **kwargs))
    return patch


def score_limit_is_known(m: Patch) -> None:
    column(Int.LIMIT, lambda old, turn: old - (turn.job.goal == Goal.SCORE))(m)


def a_seed_for_each_seating(m: Patch) -> None:
    numbers = iter(range(1 << 30))
    column(Int.SEED_LOW, lambda old, turn: next(numbers) % 1000)(m)


# ------------------------------------------------------------------------------------------------ prompts and scores
def score_row_adopts_all(m: Patch) -> None:
    m.setattr(Turn, "adoptable", property(lambda self: len(self.tokens) - 1))


def adopt_the_whole_prompt(m: Patch) -> None:
    m.setattr(Turn, "adoptable", property(lambda self: len(self.tokens)))


def scores_from_the_start_again(m: Patch) -> None:
    column(Int.SCORE_FROM, lambda old, turn: NEVER if turn.scores is None else turn.job.scores_from)(m)


# ------------------------------------------------------------------------------------------------- ends of turns
def ids_behind_a_stop_string(m: Patch) -> None:
    wrapped(m, Results, "_deliver", lambda f, self, turn, row, outputs: _deliver_all(f, self, turn, row, outputs))


def _deliver_all(deliver, self, turn, row, outputs):
    before, count = len(turn.tokens), len(outputs)
    ending = deliver(self, turn, row, outputs)
    kept = len(turn.tokens) - before
    turn.tokens += row.new[kept:]
    for out in outputs[count:]:
        out.token_ids = list(row.new)
    return ending


def text_of_a_stop_id(m: Patch) -> None:
    m.setattr(Results, "_readable", staticmethod(lambda turn, new, ending: new))


def abort_keeps_the_lease(m: Patch) -> None:
    def abort(f, self, rid, received=None):
        for turn in self._live.of(rid):
            if turn.slot >= 0:
                turn.lease = self._ledger.adopt([], 0, 1)
        return f(self, rid, received)
    wrapped(m, Results, "abort", abort)


def abort_keeps_the_slot(m: Patch) -> None:
    """The row goes on; its ids go to a client that has heard of the end."""
    def unseat(f, self, turn, returns=False):
        if turn.slot < 0:
            f(self, turn, returns)
    wrapped(m, Results, "_unseat", unseat)


def retraction_forgets_what_was_delivered(m: Patch) -> None:
    def retract(f, self, turn):
        f(self, turn)
        del turn.tokens[turn.job.prompt:]
    wrapped(m, Planner, "_retract", retract)


def choices_without_index(m: Patch) -> None:
    column(Int.CHOICE, lambda old, turn: 0)(m)


def choices_lost_at_the_first_id(m: Patch) -> None:
    m.setattr(Results, "_fork", lambda self, turn, new: None)


def session_keeps_an_aborted_turn(m: Patch) -> None:
    def roll_back(f, self, session, how):
        if how == ROLLED_BACK:
            self._commit(session, session.turn, how)
        else:
            f(self, session, how)
    wrapped(m, Sessions, "_roll_back", roll_back)


def rewind_keeps_the_lease(m: Patch) -> None:
    m.setattr(Ledger, "truncate", lambda self, lease, n: n)


# ------------------------------------------------------------------------------------------------------- planning
def budget_ignored(m: Patch) -> None:
    m.setattr(planner_module, "share_budget", lambda fills, drafts, **k: share_budget(
        fills, drafts, **{**k, "budget": k["budget"] + 3}))
    m.setattr(planner_module, "need", lambda ok, message: None)


def chunk_ignored_for_forked_rows(m: Patch) -> None:
    """A chunk row that asks for more than is owed."""
    m.setattr(Planner, "_caps", lambda self, fills, drafts: ([n + 1 for n in fills], [1 + n for n in drafts]))
    m.setattr(planner_module, "need", lambda ok, message: None)


def cap_policy_unheeded(m: Patch) -> None:
    m.setattr(planner_module, "share_budget", lambda fills, drafts, **k: share_budget(
        fills, drafts, **{**k, "policy": "full"}))


def mixing_off_unheeded(m: Patch) -> None:
    def decide(f, self):
        object.__setattr__(self._limits, "mixed", True)
        try:
            return f(self)
        finally:
            object.__setattr__(self._limits, "mixed", False)
    wrapped(m, Planner, "_decide", decide)


def victims_keep_their_row(m: Patch) -> None:
    def reserve(f, self, turn, cap, rows):
        return f(self, turn, cap, dict(rows))  # a copy: what is retracted stays in the plan
    wrapped(m, Planner, "_retract_for", reserve)


def rows_beyond_the_limit(m: Patch) -> None:
    def decide(f, self):
        flights = [(turn.lease, turn.lease.flight) for turn in self._slots.running]
        for lease, _ in flights:
            lease.flight = ()
        decided = f(self)
        for lease, flight in flights:
            lease.flight = flight
        return decided
    wrapped(m, Planner, "_decide", decide)


def host_drafts_not_longer(m: Patch) -> None:
    def propose(f, self, drafter, turn):
        depth = self._limits.depth
        object.__setattr__(self._limits, "depth", 0)
        f(self, drafter, turn)
        object.__setattr__(self._limits, "depth", depth)
    wrapped(m, Planner, "_propose", propose)


def eos_ignored(m: Patch) -> None:
    m.setattr(Intake, "_stop_ids", lambda self, sampling: tuple(sampling.stop_token_ids))


# ------------------------------------------------------------------------------------------------------- host tier
def pages_read_before_they_have_come(m: Patch) -> None:
    m.setattr(Ledger, "arrived", lambda self, lease: True)


def step_does_not_wait_for_what_it_reads(m: Patch) -> None:
    m.setattr(Ledger, "wait_for", lambda self, lease: None)


def pages_taken_before_they_are_saved(m: Patch) -> None:
    """Whoever takes a page overwrites what is still to be copied from it."""
    m.setattr(CopiesInFlight, "plan_of", lambda self, group, page: NO_PLAN)


def a_page_that_comes_back_is_not_fenced(m: Patch) -> None:
    """Dropped and taken by another, it is overwritten by the late copy."""
    def come_back(f, self, *args):
        before = dict(self._copies._plans)
        f(self, *args)
        self._copies._plans.clear()
        self._copies._plans.update(before)
    wrapped(m, Ledger, "_come_back", come_back)


def told_of_copies(ahead: int, waits: bool) -> Callable[[Patch], None]:
    """The books run `ahead` of what the device has told; whether the next step `waits` for what it has told."""
    def moved(f, self, done):
        fence = self._ops._fence
        f(self, Moved(done.seq + ahead, 0.0, 0.0))
        self._ops._fence = max(fence, done.seq) if waits else fence
    return lambda m: wrapped(m, Ledger, "moved", moved)


def another_pages_copy_comes_back(m: Patch) -> None:
    def restore(f, self, node, group, page):
        other = node.parent if node.parent is not None and node.parent.saved[group] else node
        f(self, other, group, page)
    wrapped(m, HostTier, "restore", restore)


def a_host_page_with_two_owners(m: Patch) -> None:
    wrapped(m, HostTier, "_make_room", lambda f, self, group: (
        f(self, group), self.free[group].appendleft(self.free[group][-1]))[0])


def a_forgotten_copy_is_still_used(m: Patch) -> None:
    def forget(f, self, node, group):
        host_page = node.saved[group]
        f(self, node, group)
        node.saved = [*node.saved[:group], host_page, *node.saved[group + 1 :]]
    wrapped(m, HostTier, "_forget_page", forget)


def the_end_of_a_sequence_is_not_copied(m: Patch) -> None:
    """Whoever goes on from a tail gets a page of his own, and nothing in it."""
    m.setattr(HostTier, "restore", lambda self, node, group, page: None)
    m.setattr(Ops, "copy", lambda self, group, source, target: None)


def a_tail_needs_no_earlier_window(m: Patch) -> None:
    """Its last cell is fed again, and reads one cell further back."""
    m.setattr(Ledger, "_hit_start", lambda self, group, lo: self._window_start(group, lo))


def a_tail_that_ends_above_what_is_proved(m: Patch) -> None:
    def share_tail(f, self, lease, tokens):
        with changed(lease, lo=min(len(tokens), lease.lo + 3)):
            f(self, lease, tokens)
    wrapped(m, Ledger, "_share_tail", share_tail)


def homes_are_not_left(m: Patch) -> None:
    """Pages of a sequence that shares none stay for ever when it is aborted."""
    m.setattr(Ledger, "forget", lambda self, home: None)


# -------------------------------------------------------------------------------------------- grammars and late masks
def mask_one_step_stale(m: Patch) -> None:
    """Made before the result of the step in flight has been processed."""
    before: dict[int, LLMatcher] = {}

    def ask(f, self, row, turn, drafts):
        got = f(self, row, turn, drafts)
        now = before.get(id(turn), got.matcher)
        before[id(turn)] = got.matcher.deep_copy()
        return replace(got, matcher=now)
    wrapped(m, HostHalf, "_mask_ask", ask)


def mask_of_the_next_row(m: Patch) -> None:
    def make(f, self, seq, n_rows, asks):
        mask, stuck = f(self, seq, n_rows, asks)
        mask.index = np.roll(mask.index, 1, axis=0)
        return mask, stuck
    wrapped(m, MaskMaker, "make", make)


def mask_of_the_wrong_turn(m: Patch) -> None:
    """The masks of two rows are exchanged."""
    def make(f, self, seq, n_rows, asks):
        matchers = [ask.matcher for ask in asks]
        return f(self, seq, n_rows, [replace(ask, matcher=matcher) for ask, matcher in zip(asks, matchers[::-1])])
    wrapped(m, MaskMaker, "make", make)


def drafts_without_masks(m: Patch) -> None:
    """The window is not cut at a draft that the grammar refuses, and goes on behind it without a mask."""
    wrapped(m, HostHalf, "_mask_ask", lambda f, self, row, turn, drafts: f(self, row, turn, []))


def one_mask_for_the_window(m: Patch) -> None:
    def make(f, self, seq, n_rows, asks):
        mask, stuck = f(self, seq, n_rows, asks)
        mask.index = np.where(mask.index >= 0, mask.index[:, :1], -1)
        return mask, stuck
    wrapped(m, MaskMaker, "make", make)


def offered_drafts_of_an_earlier_step(m: Patch) -> None:
    """What the device offers is noted once."""
    original = GrammarState.__setattr__

    def note(self, name, value):
        if name != "offered" or not getattr(self, "offered", (-1, []))[1]:
            original(self, name, value)
    m.setattr(GrammarState, "__setattr__", note)


def choices_share_a_place(m: Patch) -> None:
    m.setattr(GrammarState, "another", lambda self: self)


def retraction_starts_the_grammar_again(m: Patch) -> None:
    def retract(f, self, turn):
        f(self, turn)
        turn.grammar = turn.grammar and turn.grammar.another()
    wrapped(m, Planner, "_retract", retract)


def grammar_takes_ids_twice(m: Patch) -> None:
    wrapped(m, GrammarState, "take", lambda f, self, ids: f(self, [*ids, *ids[-1:]]))


def ids_behind_the_grammars_end(m: Patch) -> None:
    def take(f, self, ids):
        f(self, ids)
        return len(ids) if self.matcher.is_stopped() else None
    wrapped(m, GrammarState, "take", take)


def all_places_are_alike(m: Patch) -> None:
    """The mask that was made first is taken for every place of an expression."""
    m.setattr(RegexPlaces, "key", lambda self, place: (0, b""))


def places_stay_behind(m: Patch) -> None:
    wrapped(m, GrammarState, "_after", lambda f, self, place, token: place)


def min_tokens_forgotten_by_a_grammar(m: Patch) -> None:
    wrapped(m, HostHalf, "_mask_ask", lambda f, self, row, turn, drafts: replace(
        f(self, row, turn, drafts), withheld=0))


def forced_text_that_was_dropped(m: Patch) -> None:
    """The host takes its proposal for what the row finds, where the device has refused it."""
    def drafts(turn, plan):
        return next((d.ids[len(turn.tokens) - d.at:] for d in plan.drafts if d.slot == turn.slot), [])
    m.setattr(HostHalf, "_drafts", staticmethod(drafts))


# --------------------------------------------------------------------------------- the device half's share of the laws
class TailsWithoutQuery(FakeDevice):
    """The decode rows of a mixed step feed nothing, and sample all the same."""

    def step_row(self, s, epoch, q_cap):
        self.chunked = getattr(self, "chunked", -1) if self._row else -1
        slot = self.slots[s]
        if slot[Int.KNOWN] - slot[Int.LEN] > 1:
            self.chunked = self._row
        elif self.chunked >= 0 and not slot[Int.DONE] and slot[Int.GOAL] == Goal.GENERATE:
            slot.log[slot[Int.KNOWN] - 1] = 0  # what is sampled follows another row's last token
        return super().step_row(s, epoch, q_cap)


class RelayReadBeforeItIsWritten(FakeDevice):
    def _commit(self, slot, base, q, n_out, new):
        super()._commit(slot, base, q, n_out, new)
        if new and not slot[Int.DONE]:
            slot.log[slot[Int.KNOWN] - 1] = slot.log[slot[Int.KNOWN] - 2]


class LengthsOneStepStale(FakeDevice):
    """Rows are bound to the lengths of the step before."""

    def step_row(self, s, epoch, q_cap):
        slot, kept = self.slots[s], vars(self).setdefault("kept", {})
        now = (slot[Int.LEN], slot[Int.KNOWN])
        before = kept.get((s, epoch), now)
        kept[s, epoch] = now
        slot[Int.LEN], slot[Int.KNOWN] = before
        return super().step_row(s, epoch, q_cap)


class WindowsBeyondTheirMask(FakeDevice):
    """Only the first place of a window is masked."""

    def allowed(self, place):
        return super().allowed(place) if place == 0 else EVERY


class SeamNotRestored(FakeDevice):
    def restore(self, group, host_page, page):
        super().restore(group, host_page, page)
        self.page_tap.pop(page, None)


class DraftCellsStay(FakeDevice):
    """Only the target's KV travels."""

    def save(self, group, page, host_page):
        super().save(group, page, host_page)
        self.host[group][host_page].draft_cells = [None] * self.world.page


class CopiesWhenAwaited(FakeDevice):
    """No mutant: copies are made when a step waits for them, and not before."""

    slow = True


class CopiesToldByAnotherRank(FakeDevice):
    """No mutant: the rank that tells what is done is ahead of this one, which copies when a step waits for it."""

    slow, told = True, -1

    def finish_copies(self, fence):
        done = {moved.seq for moved in super().finish_copies(fence)} | {seq for seq, _ in self.copies}
        news = sorted(seq for seq in done if seq > self.told)
        self.told = max(news, default=self.told)
        return [Moved(seq, 1e-5, 1e-5) for seq in news]


class CopiesInAnyOrder(FakeDevice):
    def finish_copies(self, fence):
        self.rng.shuffle(self.copies)
        return super().finish_copies(fence)


class UnguardedOffer(FakeDevice):
    def may_offer(self, slot, n_out):
        return True

    def offer(self, slot, ids, n_out):
        self.write_offer(slot, ids)


class LateDraftUnchecked(FakeDevice):
    def host_draft(self, slot, epoch, at, ids):
        if slot[Int.EPOCH] == epoch and not slot[Int.DONE] and slot[Int.KNOWN] - slot[Int.LEN] == 1:
            self.offer(slot, ids[: slot[Int.SPECULATION]], 1)


class CellStoredAtI(FakeDevice):
    def ingest(self, slot, base, final, shift=0):
        super().ingest(slot, base, final, shift=1)


class SeamNotKept(FakeDevice):
    def _seat_seam(self, slot, seam):
        slot.seam = None if slot[Int.LEN] else 0


class IngestsOnlySpeculatingRows(FakeDevice):
    def ingests(self, slot):
        return slot[Int.SPECULATION] > 0


class CapIgnored(FakeDevice):
    def q_of(self, slot, q_cap):
        wide = slot[Int.KNOWN] - slot[Int.LEN] == 1
        return super().q_of(slot, 1 + slot[Int.NDRAFT] if wide else q_cap)


class ScoreRowSamples(FakeDevice):
    def n_out(self, slot, base, q):
        return max(0, base + q - slot[Int.KNOWN] + 1)


SLOW = dict(TIER, device=CopiesWhenAwaited)

# ---------------------------------------------------------------------------------------------------------- states
def rest_forgets_what_flies(m: Patch) -> None:
    wrapped(m, Ledger, "rest", lambda f, self, lease, slot, exact=False: f(self, lease, slot, True))


def rest_keeps_the_length(m: Patch) -> None:
    wrapped(m, Ledger, "rest", lambda f, self, lease, slot, exact=False: None)


def rested_though_it_ran(m: Patch) -> None:
    def launch(f, self, reservation, seq):
        rested = reservation.lease.rested
        f(self, reservation, seq)
        reservation.lease.rested = rested
    wrapped(m, Ledger, "launch", launch)


def in_place_where_the_device_went_on(m: Patch) -> None:
    m.setattr(Ledger, "has_states", False)


def adopt_without_a_state(m: Patch) -> None:
    wrapped(m, Ledger, "_longest", lambda f, self, path, has: (
        f(self, path, lambda node, g: g == self._state or has(node, g))))


def rewind_between_states(m: Patch) -> None:
    wrapped(m, KeptStates, "below", lambda f, self, lease, n, rested=True: (
        n if rested else f(self, lease, n, rested)))


class LastStateOnly(FakeDevice):
    """It keeps the state behind the row's last token alone, accepted or not."""

    def _states(self, slot, group, base, q, hashes):
        before = dict(slot.states)
        super()._states(slot, group, base, q, hashes)
        last = (base + q) % self.cells
        slot.states = before | {last: slot.states[last]}


class StateOfTheDraft(FakeDevice):
    """What was left behind a rejected draft is not written again."""

    def _states(self, slot, group, base, q, hashes):
        kept = dict(self.page_tap)
        super()._states(slot, group, base, q, hashes)
        self.page_tap |= kept


MUTANTS: dict[str, tuple[Callable[[Patch], None] | type[FakeDevice], dict]] = {
    "unclipped_hi": (unclipped_hi, dict(
        width=7, depth=2, page_size=1, room=2.0, cap_policy="full", drafter="ngram", windows=(None,), long_share=0.5)),
    "reserve_against_lo": (reserve_against_lo, SPEC),
    "reserve_one_token": (reserve_one_token, SPEC),
    "reserve_first_group_only": (reserve_first_group_only, WINDOW),
    "lookahead_clipped": (lookahead_clipped, EAGLE),
    "slide_against_hi": (slide_at(2), WINDOW),
    "slide_without_the_cell_fed_again": (slide_at(1), dict(
        EAGLE, windows=(None, 16), small_windows=False, session_share=1.0)),
    "slide_keeps_the_pin": (slide_keeps_the_pin, dict(WINDOW, small_windows=True, page_size=4)),
    "publish_up_to_known": (publish_up_to_known, SPEC),
    "publish_up_to_hi": (publish_up_to_hi, dict(SPEC, page_size=4)),
    "swap_without_remapping": (swap_without_remapping, dict(SPEC, page_size=4, room=3.0)),
    "adopt_over_a_window_gap": (adopt_over_a_window_gap, dict(WINDOW, page_size=4, room=3.0, small_windows=True)),
    "adopt_without_reference": (adopt_without_reference, dict(SPEC, page_size=4)),
    "settle_keeps_length": (settle_keeps_length, dict(width=7, depth=2, accept=1.0, session_share=1.0)),
    "settle_keeps_flight": (settle_keeps_flight, dict(LATE, session_share=1.0)),
    "fork_shares_last_page": (fork_shares_last_page, dict(fork_share=0.5)),
    "fork_without_copy": (fork_without_copy, dict(fork_share=0.5, page_size=8)),
    "seam_lost": (seam_lost, EAGLE),
    "seam_of_a_page_end_everywhere": (seam_of_a_page_end_everywhere, EAGLE),
    "truncate_keeps_a_shared_page": (truncate_keeps_a_shared_page, dict(SPEC, **SESSIONS, page_size=4)),
    "pins_cannot_be_reclaimed": (pins_cannot_be_reclaimed, dict(TIGHT, session_share=0.8)),
    "drop_forgets_the_last_page": (drop_forgets_the_last_page, {}),
    "results_without_epochs": (results_without_epochs, LATE),
    "reseat_keeps_epoch": (reseat_keeps_epoch, dict(LATE, session_share=1.0)),
    "release_keeps_pending_maps": (release_keeps_pending_maps, dict(SPEC, page_size=4, eager=True)),
    "release_keeps_pending_seat": (release_keeps_pending_seat, TIGHT),
    "seat_without_pages": (seat_without_pages, dict(page_size=4, prefix_cache=True)),
    "slots_taken_by_others_are_remembered": (slots_taken_by_others_are_remembered, SESSIONS),
    "a_slot_keeps_the_pages_it_had": (a_slot_keeps_the_pages_it_had, dict(SPEC, **SESSIONS, page_size=4)),
    "a_log_is_taken_as_it_was_left": (a_log_is_taken_as_it_was_left, SESSIONS),
    "a_slot_keeps_its_seam_wherever_the_turn_goes_on": (a_slot_keeps_its_seam_wherever_the_turn_goes_on, dict(
        EAGLE, **SESSIONS)),
    "score_limit_is_known": (score_limit_is_known, {}),
    "score_row_samples": (ScoreRowSamples, {}),
    "score_row_adopts_all": (score_row_adopts_all, dict(page_size=4, prefix_cache=True)),
    "adopt_the_whole_prompt": (adopt_the_whole_prompt, dict(page_size=1, prefix_cache=True)),
    "scores_from_the_start_again": (scores_from_the_start_again, dict(TIGHT, page_size=8)),
    "a_seed_for_each_seating": (a_seed_for_each_seating, TIGHT),
    "min_tokens_ignored": (column(Int.FIRST_STOP, lambda old, turn: turn.job.prompt), {}),
    "known_of_the_prompt_only": (column(Int.KNOWN, lambda old, turn: turn.job.prompt), TIGHT),
    "draft_length_of_the_prompt": (column(Int.DRAFT_LEN, lambda old, turn: len(turn.tokens)), EAGLE),
    "log_probabilities_column": (column(Int.LOGPROBS, lambda old, turn: -1), {}),
    "ids_behind_a_stop_string": (ids_behind_a_stop_string, dict(SPEC, accept=1.0)),
    "text_of_a_stop_id": (text_of_a_stop_id, {}),
    "eos_ignored": (eos_ignored, {}),
    "abort_keeps_the_lease": (abort_keeps_the_lease, {}),
    "abort_keeps_the_slot": (abort_keeps_the_slot, {}),
    "retraction_forgets_what_was_delivered": (retraction_forgets_what_was_delivered, TIGHT),
    "choices_without_index": (choices_without_index, dict(fork_share=0.5)),
    "choices_lost_at_the_first_id": (choices_lost_at_the_first_id, dict(fork_share=0.5)),
    "session_keeps_an_aborted_turn": (session_keeps_an_aborted_turn, SESSIONS),
    "rewind_keeps_the_lease": (rewind_keeps_the_lease, SESSIONS),
    "budget_ignored": (budget_ignored, dict(budget=8)),
    "more_than_is_owed": (chunk_ignored_for_forked_rows, dict(SPEC, drafter="ngram")),
    "cap_policy_unheeded": (cap_policy_unheeded, dict(SPEC, cap_policy="one_in_mixed", mixed=True)),
    "mixing_off_unheeded": (mixing_off_unheeded, dict(mixed=False)),
    "victims_keep_their_row": (victims_keep_their_row, TIGHT),
    "rows_beyond_the_limit": (rows_beyond_the_limit, dict(depth=3)),
    "host_drafts_not_longer": (host_drafts_not_longer, dict(SPEC, depth=2, drafter="host")),
    "unguarded_offer": (UnguardedOffer, dict(SPEC, drafter="ngram")),
    "late_draft_unchecked": (LateDraftUnchecked, dict(SPEC, drafter="host", accept=1.0)),
    "drafter_cell_stored_at_i": (CellStoredAtI, dict(EAGLE, session_share=0)),
    "seam_not_kept": (SeamNotKept, EAGLE),
    "ingests_only_speculating_rows": (IngestsOnlySpeculatingRows, EAGLE),
    "pages_read_before_they_have_come": (pages_read_before_they_have_come, SLOW),
    "step_does_not_wait_for_what_it_reads": (step_does_not_wait_for_what_it_reads, dict(
        TIER, room=1.3, most_waiting=1, poison=False, budget=8, device=CopiesWhenAwaited)),
    "pages_taken_before_they_are_saved": (pages_taken_before_they_are_saved, TIER),
    "a_page_that_comes_back_is_not_fenced": (a_page_that_comes_back_is_not_fenced, dict(SLOW, poison=False)),
    "copies_count_as_done_too_early": (told_of_copies(ahead=1, waits=True), SLOW),
    "other_ranks_are_not_waited_for": (told_of_copies(ahead=0, waits=False), dict(
        TIER, device=CopiesToldByAnotherRank)),
    "another_pages_copy_comes_back": (another_pages_copy_comes_back, TIER),
    "a_host_page_with_two_owners": (a_host_page_with_two_owners, dict(TIER, host_room=0.3)),
    "a_forgotten_copy_is_still_used": (a_forgotten_copy_is_still_used, dict(TIER, host_room=0.3)),
    "the_end_of_a_sequence_is_not_copied": (the_end_of_a_sequence_is_not_copied, TIER),
    "a_tail_needs_no_earlier_window": (a_tail_needs_no_earlier_window, dict(
        TIER, windows=(None, 5, 16), room=1.3, session_share=0.3)),
    "a_tail_that_ends_above_what_is_proved": (a_tail_that_ends_above_what_is_proved, dict(TIER, page_size=8)),
    "homes_are_not_left": (homes_are_not_left, dict(TIER, prefix_cache=False)),
    "seam_not_restored": (SeamNotRestored, TIER | EAGLE),
    "draft_cells_stay": (DraftCellsStay, TIER | EAGLE),
    "copies_in_any_order": (CopiesInAnyOrder, TIER),
    "mask_one_step_stale": (mask_one_step_stale, GRAMMAR),
    "mask_of_the_next_row": (mask_of_the_next_row, GRAMMAR),
    "mask_of_the_wrong_turn": (mask_of_the_wrong_turn, GRAMMAR),
    "drafts_without_masks": (drafts_without_masks, dict(GRAMMAR, drafter="ngram")),
    "one_mask_for_the_window": (one_mask_for_the_window, dict(GRAMMAR, drafter="eagle")),
    "offered_drafts_of_an_earlier_step": (offered_drafts_of_an_earlier_step, dict(GRAMMAR, drafter="eagle")),
    "choices_share_a_place": (choices_share_a_place, dict(GRAMMAR, fork_share=0.6)),
    "retraction_starts_the_grammar_again": (retraction_starts_the_grammar_again, dict(TIGHT, grammar_share=0.9)),
    "grammar_takes_ids_twice": (grammar_takes_ids_twice, GRAMMAR),
    "ids_behind_the_grammars_end": (ids_behind_the_grammars_end, dict(GRAMMAR, drafter="ngram", accept=1.0)),
    "all_places_are_alike": (all_places_are_alike, GRAMMAR),
    "places_stay_behind": (places_stay_behind, dict(GRAMMAR, drafter="ngram")),
    "min_tokens_forgotten_by_a_grammar": (min_tokens_forgotten_by_a_grammar, GRAMMAR),
    "forced_text_that_was_dropped": (forced_text_that_was_dropped, dict(GRAMMAR, drafter="eagle")),
    "tails_without_query": (TailsWithoutQuery, dict(SPEC, mixed=True, cap_policy="one_in_mixed")),
    "relay_read_before_it_is_written": (RelayReadBeforeItIsWritten, SPEC),
    "lengths_one_step_stale": (LengthsOneStepStale, SPEC),
    "windows_beyond_their_mask": (WindowsBeyondTheirMask, dict(GRAMMAR, drafter="ngram")),
    "cap_ignored": (CapIgnored, dict(SPEC, accept=0.95, drafter="ngram", random_caps=True)),
    "rest_forgets_what_flies": (rest_forgets_what_flies, dict(STATES, width=0, depth=3)),
    "rest_keeps_the_length": (rest_keeps_the_length, STATES),
    "rested_though_it_ran": (rested_though_it_ran, STATES),
    "in_place_where_the_device_went_on": (in_place_where_the_device_went_on, dict(STATES, **SESSIONS)),
    "adopt_without_a_state": (adopt_without_a_state, STATES),
    "rewind_between_states": (rewind_between_states, STATES),
    "last_state_only": (LastStateOnly, dict(STATES, drafter="ngram")),
    "state_of_the_draft": (StateOfTheDraft, dict(STATES, drafter="ngram", accept=0.3, page_size=1)),
}

SURVIVORS = {
    "release_keeps_pending_seat": "a seated slot that no row names feeds nothing, and its next seat overwrites it",
    "publish_up_to_known": "the step in flight writes the cell before anybody who adopts the page can read it",
    "rows_beyond_the_limit": "the device answers them with nothing; it costs rows, not text",
    "host_drafts_not_longer": "late proposals run out of ids and offer fewer; it costs acceptance, not text",
}


def first_failure(world_of: Callable[[random.Random], World], worlds: int, steps: int) -> str | None:
    """What went wrong in the first world that shows anything."""
    for seed in range(worlds):
        try:
            Harness(world_of(random.Random(seed * 7919 + 1)), seed).run(steps)
        except (AssertionError, LookupError, ValueError) as failure:
            return f"{type(failure).__name__}: {failure}"
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_law_is_seen(name: str, monkeypatch: Patch):
    mutant, force = MUTANTS[name]
    device = FakeDevice
    if isinstance(mutant, type):
        device = mutant
    else:
        mutant(monkeypatch)
    worlds = 2 if name in SURVIVORS else 40
    seen = first_failure(lambda rng: make_world(rng, **{"device": device, "eager": False, **force}), worlds, 60)
    if name in SURVIVORS:
        assert seen is None, f"no survivor any more: {seen}"
    else:
        assert seen is not None, f"{name} is not noticed in {worlds} worlds"


@pytest.mark.parametrize("force", {repr(force): force for _, force in MUTANTS.values()}.values(), ids=repr)
def test_the_same_worlds_with_the_laws_intact(force: dict):
    """What the mutants are caught by is the mutation, not the world."""
    assert first_failure(lambda rng: make_world(rng, **{"eager": False, **force}), 1, 40) is None
