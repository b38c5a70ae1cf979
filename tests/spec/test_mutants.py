"""Bugs that other engines have had, planted one by one: the kit must catch each. Verification hides all of them from
the text, so they show in what is offered and accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import stretto.device.runner as runner
import stretto.ops.bind as bind
import stretto.spec.chain as chain
from stretto.device.drafting import Chooser, Drafting
from stretto.device.host_pages import HostPages
from stretto.device.kv import KVCache
from stretto.device.seams import Seams
from stretto.device.slots import SlotTable
from stretto.host.faults import HostFault
from stretto.spec.block import Backbone
from stretto.spec.steps import Stream
from stretto.testing import (
    NEW,
    SAMPLED,
    Lab,
    check_choices,
    check_greedy_text,
    check_host_tier,
    check_mixed_steps,
    check_prefix_hits,
    check_retraction,
)
from stretto.wire import Int
from tests.spec import checkpoints as made


@pytest.fixture(scope="module")
def labs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mutants")
    tiny = made.make_target(folder / "target")
    drafters = {"eagle3": f"eagle3:{made.eagle3(folder / 'eagle3')[0]}",
                "dflash": f"dflash:{made.dflash(folder / 'dflash')[0]}",
                "standalone": f"standalone:{folder / 'target'}"}
    return {kind: Lab(tiny.model, tiny.target, asked) for kind, asked in drafters.items()}


def seam_of_a_hit_is_lost(monkeypatch) -> None:
    def seat(self, slots, ints):
        for own in self.of_slot.values():
            own[slots] = 0
    monkeypatch.setattr(Seams, "seat", seat)


def taps_of_pages_are_not_kept(monkeypatch) -> None:
    record = Seams.record

    def without_pages(self, step, taps, length):
        pages, self.of_page = self.of_page, {n: torch.zeros_like(t) for n, t in self.of_page.items()}
        record(self, step, taps, length)
        self.of_page = pages
    monkeypatch.setattr(Seams, "record", without_pages)


def only_rows_that_sample_are_ingested(monkeypatch) -> None:
    """A drafter that is primed from the last chunk alone."""
    cells = chain.extension

    def of_sampling_rows(step, stream, length, stands, *rest):
        return cells(step, stream, length, torch.where(step.n_out > 0, stands, 1 << 20), *rest)
    monkeypatch.setattr(chain, "extension", of_sampling_rows)


def context_of_chunks_is_forgotten(monkeypatch) -> None:
    remember = Backbone.remember
    monkeypatch.setattr(Backbone, "remember",
                        lambda self, step, taps: remember(self, step, taps) if bool((step.n_out > 0).all()) else None)


def copies_of_pages_miss_the_drafter(monkeypatch) -> None:
    monkeypatch.setattr(Drafting, "copy_page", lambda self, group, source, target: None)


def hidden_states_of_pages_do_not_travel(monkeypatch) -> None:
    monkeypatch.setattr(Seams, "page_tensors", lambda self, group: [])


def a_drafters_cells_do_not_travel(monkeypatch) -> None:
    monkeypatch.setattr(Drafting, "page_tensors", lambda self, group: self.seams.page_tensors(group)
                        if self.seams is not None else [])


def pages_come_back_in_another_order(monkeypatch) -> None:
    restore = HostPages.restore
    monkeypatch.setattr(HostPages, "restore", lambda self, group, host_pages, pages: restore(
        self, group, host_pages[::-1], pages))


def values_do_not_travel(monkeypatch) -> None:
    monkeypatch.setattr(KVCache, "page_tensors", lambda self, group: [self.k[i] for i in self.groups[group].layers])


def a_cell_that_stands_is_written_again(monkeypatch) -> None:
    """A fork feeds its last position again, and has no taps of the one before."""
    monkeypatch.setattr(SlotTable, "draft_length", property(lambda self: torch.zeros_like(self.ints[Int.LEN])))


def cells_lie_one_place_early(monkeypatch) -> None:
    """The cell of (hidden of i, id i+1) at i: a shared page then holds an answer to somebody else's next id."""
    cells = Stream.cells
    monkeypatch.setattr(Stream, "cells", lambda self, owners, positions, written: cells(
        self, owners, (positions - self.shift).clamp(min=0), written))
    stream_of = chain.stream_of

    def early(step, shift, items):
        right = stream_of(step, shift, items)
        first = [(table[step.slots.long(), :1] * step.page_size).to(torch.int32) for table in step.page_tables]
        return replace(right, tables=tuple(torch.cat([cell, table[:, :-1]], 1)
                                           for cell, table in zip(first, right.tables, strict=True)))
    monkeypatch.setattr(chain, "stream_of", early)


@pytest.mark.parametrize(("kind", "mutant", "check"), [
    ("eagle3", seam_of_a_hit_is_lost, check_prefix_hits),
    ("eagle3", seam_of_a_hit_is_lost, check_retraction),
    ("eagle3", taps_of_pages_are_not_kept, check_prefix_hits),
    ("eagle3", only_rows_that_sample_are_ingested, check_greedy_text),
    ("standalone", only_rows_that_sample_are_ingested, check_greedy_text),
    ("dflash", context_of_chunks_is_forgotten, check_greedy_text),
    ("eagle3", copies_of_pages_miss_the_drafter, check_choices),
    ("dflash", copies_of_pages_miss_the_drafter, check_choices),
    ("eagle3", a_cell_that_stands_is_written_again, check_choices),
    ("eagle3", cells_lie_one_place_early, check_prefix_hits),
    ("eagle3", hidden_states_of_pages_do_not_travel, check_host_tier),
    ("dflash", a_drafters_cells_do_not_travel, check_host_tier),
    ("eagle3", pages_come_back_in_another_order, check_host_tier),
    pytest.param("standalone", values_do_not_travel, check_host_tier, marks=pytest.mark.full),
])
def test_the_kit_catches(labs, monkeypatch, kind: str, mutant, check) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check(labs[kind])


# -------------------------------------------------- what went wrong when SGLang brought mixed chunk and drafts together
def tails_of_mixed_steps_have_no_query(monkeypatch) -> None:
    """They sample from the last token of the row before them."""
    lengths = bind.row_lengths

    def without_tails(rows, ints):
        slots, base, q, n_out = lengths(rows, ints)
        tail = (n_out > 0) & (ints[Int.KNOWN, slots] - base == 1)
        q = torch.where(tail & bool(((q > 0) & (n_out == 0)).any()), 0, q)
        return slots, base, q, n_out
    monkeypatch.setattr(bind, "row_lengths", without_tails)
    monkeypatch.setattr(bind.native, "takes", lambda *_: False)  # kernels of their own have lengths of their own


def ids_reach_the_log_a_step_late(monkeypatch) -> None:
    """The relay of the sampled id is read before it is written."""
    commit, late = SlotTable.commit, []

    def commit_late(self, slots, outcome):
        before = self.log.clone()
        commit(self, slots, outcome)
        changed = self.log != before
        now = (changed, self.log[changed])
        self.log.copy_(before)
        for cells, ids in late:
            self.log[cells] = ids
        late[:] = [now]
    monkeypatch.setattr(SlotTable, "commit", commit_late)


def lengths_are_those_of_the_step_before(monkeypatch) -> None:
    """As of the plan's making, not of the forward's start."""
    bound, last = runner.bind, []

    def bind_stale(rows, ints, *rest, **sizes):
        stale = ints.clone()
        for before in last:
            same = before[Int.EPOCH] == ints[Int.EPOCH]
            for column in (Int.LEN, Int.KNOWN, Int.NDRAFT):
                stale[column] = torch.where(same, before[column], ints[column])
        last[:] = [ints.clone()]
        return bound(rows, stale, *rest, **sizes)
    monkeypatch.setattr(runner, "bind", bind_stale)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "standalone"])
@pytest.mark.parametrize("mutant", [tails_of_mixed_steps_have_no_query, ids_reach_the_log_a_step_late,
                                    lengths_are_those_of_the_step_before])
def test_the_kit_catches_what_mixed_steps_may_break(labs, monkeypatch, kind: str, mutant) -> None:
    labs[kind].plain([*labs[kind].asks(wave="a"), *labs[kind].asks(wave="b")])  # before the mutant
    mutant(monkeypatch)
    with pytest.raises((AssertionError, HostFault, IndexError)):
        check_mixed_steps(labs[kind])


def test_drafts_that_do_not_count_are_seen(labs, monkeypatch) -> None:
    """Penalties that forget the drafts of the same proposal: the target's own copy is refused now and then."""
    lab = labs["standalone"]
    asks = lab.asks(40, **SAMPLED | {"frequency_penalty": 1.0})
    assert all(a.accepted == a.drafted for a in lab.drafted(asks)[0].values())
    monkeypatch.setattr(SlotTable, "sketch", lambda *_: None)
    assert any(a.accepted < a.drafted for a in lab.drafted(asks)[0].values())


def test_greedy_proposals_are_seen(labs, monkeypatch) -> None:
    """case_1_07: a drafter that proposes its best id where the request samples."""
    lab = labs["standalone"]
    monkeypatch.setattr(Chooser, "__call__", lambda self, logits, rows, offset, ids=None: logits.argmax(-1))
    got, _ = lab.drafted(lab.asks(NEW, temperature=20.0))
    assert any(a.accepted < a.drafted for a in got.values())
