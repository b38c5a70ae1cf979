"""The messages between the host half and the device half. No torch in this module.

A step plan travels as one packed int32 array, so that the device half needs one copy and tensor-parallel ranks one
broadcast. It names no length of a live row: a row is (slot, epoch, q_cap), and exact lengths are read from the slot
table when the step starts ("late binding"). Lengths appear in a plan only where a slot is seated, that is when no
step in flight can move them.

Legend of shape suffixes used in the whole project: R rows, T packed tokens, L logit rows, S slots, P pages, K draft
width, H heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

NULL_PAGE = 0  # never allocated; the padding of a bucket and unmapped table entries point to it
STATE = -1  # in place of a KV group's window: its layers keep one state of a sequence, not cells (see `state_cells`)
NEVER = 2**31 - 1  # a position that no row reaches
NO_TOKEN = -1
MAX_STOP_IDS = 64  # stop ids of one request that are checked on the device


class Goal(IntEnum):
    """What a row is for. Not a phase: prefill, decode and verify rows of one goal differ in state only."""

    GENERATE = 0
    SCORE = 1  # log-probabilities of the given tokens; samples nothing
    EMBED = 2  # the hidden state of the last given token; samples nothing
    EMBED_MEAN = 3  # the mean of the hidden states of all of them


class Int(IntEnum):
    """Integer columns of the slot table, in wire order."""

    LEN = 0  # KV cells committed
    KNOWN = 1  # confirmed token ids in the log
    NDRAFT = 2  # draft ids in the log after `known`
    LIMIT = 3  # `known` never passes it
    GOAL = 4
    DONE = 5
    EPOCH = 6
    DRAFT_LEN = 7  # cells of the draft stream that are valid
    PROMPT = 8  # ids below this are prompt: repetition penalty reads them, presence and frequency do not
    FIRST_STOP = 9  # a stop id may not be sampled at a log position below this (min_tokens)
    TOP_K = 10  # 0: off
    SEED_LOW = 11  # the 64-bit seed of the request, as two 32-bit words
    SEED_HIGH = 12
    CHOICE = 13  # index of this choice among the request's n
    SPECULATION = 14  # most drafts that the row may be offered in one step
    LOGPROBS = 15  # -1: none; n: the log-probability of each emitted token and of the n best alternatives
    SCORE_FROM = 16  # prompt log-probabilities from the logits of this position on; NEVER: none
    SEAM = 17  # how the seam of the row is found at seating: a Seam value, or the number of a page (>= 1)
    ADAPTER = 18  # number of the adapter whose changes the row's tokens meet; 0: none


class Real(IntEnum):
    """Floating-point columns of the slot table, in wire order (sent as the bits of float32)."""

    TEMPERATURE = 0  # 0: greedy
    TOP_P = 1
    MIN_P = 2
    REPETITION = 3
    PRESENCE = 4
    FREQUENCY = 5


class Seam(IntEnum):
    """Where the taps of position len-1 come from when a slot is seated (a value >= 1 is a page of group 0)."""

    START = 0  # len is 0: there is no such position
    KEEP = -1  # the slot column still holds them
    UNKNOWN = -2  # nowhere: position len-1 is fed again


def state_cells(width: int) -> int:
    """States that a slot keeps for verify windows of `width` drafts: the state of the first n tokens stands in cell
    n % cells. Those of a window's positions, and the one before it, all at a time:

        base | base + 1 ... base + 1 + width         whatever is accepted, the state is there; so is the one where a
                                                     turn ends on the host while a step is in flight
    """
    return width + 2


class PageOp(IntEnum):
    COPY = 0  # copy page `source` to page `target`
    POISON = 1  # debug: make the cells of page `target` unreadable
    SAVE = 2  # copy page `source` to page `target` of host memory
    RESTORE = 3  # copy page `source` of host memory to page `target`
    KEEP_STATE = 4  # copy cell `source` of a slot's states (slot * state_cells + cell) to page `target`


N_INT, N_REAL = len(Int), len(Real)


@dataclass
class Seat:
    """A slot gets a new occupant, or a session's next turn: columns overwritten, stop ids and biases replaced.

    `log` is written from position `log_from` on; a fresh seat writes the whole log and clears the page tables. One
    that is not fresh finds below `log_from` the ids, and in the page tables the pages, that the plans before it left
    there."""

    slot: int
    fresh: bool
    ints: list[int]
    reals: list[float]
    log_from: int
    log: list[int]
    stop_ids: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] = ()  # the ids that may be sampled; (): all
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of ids that the log may not come to end with
    processors: bytes = b""  # logit processors of the request and their parameters, as JSON; the device half reads it


@dataclass
class HostDraft:
    """A proposal made on the host: it continues the log at position `at`, which confirmed ids may have passed."""

    slot: int
    epoch: int
    at: int
    ids: list[int]


@dataclass
class StepPlan:
    """One step: operations on slots, in stream order before the forward pass, then rows (slot, epoch, q_cap).

    Order on the device: releases, seats, maps, page_ops (among themselves in list order), drafts, rows. Page operations
    of a plan that saves or restores run beside the step instead, in list order, after every step before it. The plan of
    a step that needs their outcome, this one or a later one, names it as its `fence`."""

    seq: int
    draft_width: int = 0  # how many drafts to propose at the end of this step (verified by the next)
    releases: list[int] = field(default_factory=list)  # slots
    seats: list[Seat] = field(default_factory=list)
    maps: list[tuple[int, int, int, int]] = field(default_factory=list)  # (slot, group, index, page)
    page_ops: list[tuple[int, int, int, int]] = field(default_factory=list)  # (PageOp, group, source, target)
    drafts: list[HostDraft] = field(default_factory=list)
    rows: list[tuple[int, int, int]] = field(default_factory=list)  # (slot, epoch, q_cap)
    late_mask: bool = False  # sampling waits for the LateMask of this seq; the forward pass does not
    fence: int = -1  # the step begins once the page operations of plans up to this seq are done
    tokens: int = 0  # packed at most: drafts beyond it wait, those of later rows first; 0: the sum of the caps
    least: float = 0.0  # a drafter that knows its chances offers no id whose chance to be reached and right is lower


# Packed layout, int32: header, then the sections in the order of Sections, each as rows of a fixed width.
HEADER = 24
_TOKENS, _LEAST, _FENCE, _LATE_MASK = 20, 21, 22, 23  # of the header
_SEAT_WIDTH = 4 + N_INT + N_REAL  # slot, fresh, log_from, log count, columns


Array = TypeVar("Array")  # a numpy array on the host, a tensor on a device


@dataclass(frozen=True)
class PackedPlan(Generic[Array]):
    """Views into one packed plan; each field is an int32 array."""

    seq: int
    draft_width: int
    releases: Array  # [n]
    seats: Array  # [A, _SEAT_WIDTH]
    maps: Array  # [M, 4]
    page_ops: Array  # [C, 4]
    rows: Array  # [R, 3]
    log_cells: Array  # [N, 3]: slot, position, token id
    stops: Array  # [X, 3]: slot, index, token id
    biases: Array  # [B, 4]: slot, index, token id, bits of the float32 bias
    draft_heads: Array  # [D, 4]: slot, epoch, at, count
    draft_ids: Array  # [sum of counts]
    allowed: Array  # [W, 2]: slot, token id
    bad_words: Array  # [Y, 4]: slot, run, place from the run's end, token id
    processors: Array  # [words]: for each slot that has some: slot, bytes of JSON, the bytes padded to whole words
    late_mask: bool = False
    fence: int = -1
    tokens: int = 0
    least: float = 0.0

    @property
    def moves(self) -> bool:
        """Whether its page operations save or restore. Of a plan on the host."""
        if not len(self.page_ops):  # type: ignore[arg-type]
            return False
        kinds = self.page_ops[:, 0]  # type: ignore[index]
        return bool(((kinds == PageOp.SAVE) | (kinds == PageOp.RESTORE)).any())


_WIDTHS = (1, _SEAT_WIDTH, 4, 4, 3, 3, 3, 4, 4, 1, 2, 4, 1)
_FIELDS = ("releases", "seats", "maps", "page_ops", "rows", "log_cells", "stops", "biases", "draft_heads", "draft_ids",
           "allowed", "bad_words", "processors")


def _bits(values) -> np.ndarray:
    return np.asarray(values, dtype=np.float32).view(np.int32)


def _seat_rows(seats: list[Seat]) -> np.ndarray:
    out = np.zeros((len(seats), _SEAT_WIDTH), dtype=np.int32)
    for row, seat in zip(out, seats):
        row[:4] = (seat.slot, seat.fresh, seat.log_from, len(seat.log))
        row[4 : 4 + N_INT] = seat.ints
        row[4 + N_INT :] = _bits(seat.reals)
    return out


def _log_cells(seats: list[Seat]) -> np.ndarray:
    parts = []
    for seat in seats:
        cells = np.empty((len(seat.log), 3), dtype=np.int32)
        cells[:, 0] = seat.slot
        cells[:, 1] = np.arange(seat.log_from, seat.log_from + len(seat.log))
        cells[:, 2] = seat.log
        parts.append(cells)
    return np.concatenate(parts) if parts else np.empty((0, 3), dtype=np.int32)


def _restrictions(seats: list[Seat]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    return ([(s.slot, t) for s in seats for t in s.allowed],
            [(s.slot, i, j, t) for s in seats for i, run in enumerate(s.bad_words) for j, t in enumerate(run[::-1])])


def _words(raw: bytes) -> np.ndarray:
    """Bytes as int32, padded with zeros."""
    return np.frombuffer(raw + b"\0" * (-len(raw) % 4), dtype=np.int32)


def _processors(seats: list[Seat]) -> np.ndarray:
    parts = [np.concatenate([np.asarray([s.slot, len(s.processors)], dtype=np.int32), _words(s.processors)])
             for s in seats if s.processors]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def unpack_processors(words: np.ndarray) -> dict[int, bytes]:
    """Slot -> JSON, from a packed plan's section on the host."""
    found, at = {}, 0
    while at < len(words):
        slot, size = words[at : at + 2].tolist()
        count = -(-size // 4)
        found[slot] = words[at + 2 : at + 2 + count].tobytes()[:size]
        at += 2 + count
    return found


def pack_plan(plan: StepPlan) -> np.ndarray:
    """The plan as one contiguous int32 array."""
    stops = [(s.slot, i, t) for s in plan.seats for i, t in enumerate(s.stop_ids)]
    biases = [(s.slot, i, t, int(_bits(v))) for s in plan.seats for i, (t, v) in enumerate(s.bias)]
    heads = [(d.slot, d.epoch, d.at, len(d.ids)) for d in plan.drafts]
    ids = [t for d in plan.drafts for t in d.ids]
    maps = list({m[:3]: m for m in plan.maps}.values())  # one write a table entry: a scatter keeps no order
    parts = (plan.releases, _seat_rows(plan.seats), maps, plan.page_ops, plan.rows, _log_cells(plan.seats), stops,
             biases, heads, ids, *_restrictions(plan.seats), _processors(plan.seats))
    arrays = [np.asarray(p, dtype=np.int32).reshape(-1, w) for p, w in zip(parts, _WIDTHS)]
    header = np.zeros(HEADER, dtype=np.int32)
    header[0], header[1] = plan.seq, plan.draft_width
    header[2 : 2 + len(arrays)] = [len(a) for a in arrays]
    header[_FENCE], header[_LATE_MASK] = plan.fence, plan.late_mask
    header[_TOKENS], header[_LEAST] = plan.tokens, _bits(plan.least)
    return np.concatenate([header, *(a.reshape(-1) for a in arrays)])


def split_plan(header: np.ndarray, packed: Any) -> PackedPlan[Any]:
    """Views of a packed plan. `header` is on the host; `packed` is a numpy array or a tensor with the same cells."""
    at, views = HEADER, {}
    for name, width, count in zip(_FIELDS, _WIDTHS, header[2 : 2 + len(_FIELDS)].tolist()):
        view = packed[at : at + count * width]
        views[name] = view.reshape(count, width) if width > 1 else view
        at += count * width
    return PackedPlan(seq=int(header[0]), draft_width=int(header[1]), late_mask=bool(header[_LATE_MASK]),
                      fence=int(header[_FENCE]), tokens=int(header[_TOKENS]),
                      least=float(header[_LEAST : _LEAST + 1].view(np.float32)[0]), **views)


# ------------------------------------------------------------------------------------------------------- late masks
@dataclass
class LateMask:
    """Which ids the rows of a plan may sample, sent after the plan: it depends on the result of the step before, while
    the forward pass does not. Bit i of a position's mask, in words of 32, lowest bit first, allows token id i.

        plan N+1 -> forward N+1 ............ sample N+1
        result N -> grammar -> mask N+1 ----^"""

    seq: int
    index: np.ndarray  # [R, W] int32: the row of `bits` for each row of the plan and offset in its window; -1: no mask
    bits: np.ndarray  # [M, ceil(V / 32)] int32

    @classmethod
    def nothing(cls, seq: int, rows: int) -> LateMask:
        """Every row may sample what it likes."""
        return cls(seq, np.full((rows, 1), -1, dtype=np.int32), np.zeros((0, 0), dtype=np.int32))


MASK_HEADER = 4  # seq, R, W, M


def pack_mask(mask: LateMask) -> np.ndarray:
    """As one contiguous int32 array: header, index, bits."""
    header = np.asarray([mask.seq, *mask.index.shape, len(mask.bits)], dtype=np.int32)
    return np.concatenate([header, mask.index.reshape(-1), mask.bits.reshape(-1)])


def split_mask(header: np.ndarray, packed: Any) -> tuple[Any, Any]:
    """(index, bits) as views of a packed mask. `header` is on the host; `packed` has the same cells, anywhere."""
    _, rows, width, count = header[:MASK_HEADER].tolist()
    end = MASK_HEADER + rows * width
    words = (len(packed) - end) // count if count else 0
    return packed[MASK_HEADER:end].reshape(rows, width), packed[end:].reshape(count, words)


# ---------------------------------------------------------------------------------------------------------- results
@dataclass
class TokenScore:
    """Log-probability of one token, and of the best alternatives at its position, best first."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass
class Moved:
    """The page operations of a plan that saved or restored are done, and so are those of every plan before it."""

    seq: int
    save_seconds: float
    restore_seconds: float


class RowResult(msgspec.Struct):
    """What one row of a step did. Exact values, valid for the step that produced them."""

    slot: int
    epoch: int  # -1: the row was empty (its slot had been released or re-seated)
    fed: int  # tokens fed
    verified: int  # draft ids among them
    length: int  # KV cells committed after the step
    known: int
    done: bool
    new: list[int]  # emitted ids
    offered: list[int]  # drafts now in the log after `known`
    new_scores: list[TokenScore] = []  # one per emitted id where log-probabilities are wanted
    prompt_scores: dict[int, TokenScore] = {}  # by position of the scored token
    pooled: np.ndarray | None = None  # [hidden_size] float32, of a step with rows that embed; means nothing for others
    fault: str = ""  # what a logit processor of this request did wrong; then `new` means nothing


@dataclass
class StepResult:
    seq: int
    rows: list[RowResult]
    seconds: float = 0.0  # that the step ran on the device; 0: not measured
    moved: list[Moved] = field(default_factory=list)  # since the last result
    heads: np.ndarray | None = field(default=None, repr=False, compare=False)  # see `counts`: as they travelled

    def counts(self) -> np.ndarray:
        """[R, _ROW_INTS] int32, the first words of each packed row, for sums over rows: see ROW_SLOT and the others."""
        if self.heads is not None:
            return self.heads
        return np.asarray([(row.slot, row.epoch, row.fed, row.verified, row.length, row.known, row.done, len(row.new),
                            len(row.offered)) for row in self.rows], dtype=np.int32).reshape(-1, _ROW_INTS)


# seq, rows, width of `new`, width of `offered`, alternatives (-1: no scores), prompt scores, numbers of each vector,
# microseconds, plans of `moved`, words of faults
RESULT_HEADER = 10
_ROW_INTS = 9
ROW_SLOT, ROW_FED, ROW_VERIFIED, ROW_FLAGS, ROW_NEW, ROW_OFFERED = 0, 2, 3, 6, 7, 8  # of them; flags & 1: done
_MICROSECONDS, _MOVED, FAULT_WORDS = 7, 8, 9  # of the header
NOTHING_LEFT = 1 << 29  # in `wants`: a logit processor of the row left nothing that can be sampled


@dataclass(frozen=True)
class ResultLayout:
    """Sizes of one packed result, known before the step runs."""

    rows: int
    width: int  # most ids that one row can emit
    offers: int  # most drafts that one row can be offered
    alternatives: int = -1  # -1: no row wants log-probabilities
    prompt_scores: int = 0
    pooled: int = 0  # numbers of each row's vector; 0: no row wants one

    @property
    def row_words(self) -> int:
        return _ROW_INTS + self.width + self.offers

    @property
    def score_words(self) -> int:
        return 1 + 2 * max(self.alternatives, 0)

    @property
    def words(self) -> int:
        scored = self.rows * self.width if self.alternatives >= 0 else 0
        return (RESULT_HEADER + self.rows * self.row_words + scored * self.score_words
                + self.prompt_scores * (2 + self.score_words) + self.rows * self.pooled)

    def header(self, seq: int) -> list[int]:
        return [seq, self.rows, self.width, self.offers, self.alternatives, self.prompt_scores, self.pooled, 0, 0, 0]


def _score(words: np.ndarray, wanted: int, alternatives: int) -> TokenScore:
    """[1 + 2 * alternatives] words: log-probability bits, ids, log-probability bits."""
    n = min(wanted, alternatives)
    bits = np.ascontiguousarray(words).view(np.float32)
    return TokenScore(float(bits[0]), words[1 : 1 + n].tolist(), bits[1 + alternatives : 1 + alternatives + n].tolist())


def pack_faults(faults: Sequence[tuple[int, str]]) -> np.ndarray:
    """(row, what went wrong) -> the last words of a packed result."""
    parts = [np.zeros(0, dtype=np.int32)]
    for row, message in faults:
        raw = message.encode()
        parts += [np.asarray([row, len(raw)], dtype=np.int32), _words(raw)]
    return np.concatenate(parts)


def with_times(packed: np.ndarray, seconds: float, moved: Sequence[Moved]) -> np.ndarray:
    """A packed result that also tells how long its step took, and which plans' pages have been moved."""
    packed[_MICROSECONDS], packed[_MOVED] = round(1e6 * seconds), len(moved)
    if not moved:
        return packed
    words = [(m.seq, round(1e6 * m.save_seconds), round(1e6 * m.restore_seconds)) for m in moved]
    return np.concatenate([packed, np.asarray(words, dtype=np.int32).reshape(-1)])


def without_times(packed: np.ndarray) -> np.ndarray:
    """What a packed result tells of the rows: the same on every rank, however long each of them took."""
    return split_times(packed)[0][RESULT_HEADER:]


def split_times(packed: np.ndarray) -> tuple[np.ndarray, float, list[Moved]]:
    """The packed result without its times, and the times."""
    count = int(packed[_MOVED])
    end = len(packed) - 3 * count
    moved = [Moved(seq, saved / 1e6, restored / 1e6) for seq, saved, restored in packed[end:].reshape(-1, 3).tolist()]
    return packed[:end], int(packed[_MICROSECONDS]) / 1e6, moved


def unpack_result(packed: np.ndarray) -> StepResult:
    """Inverse of what the device half packs. Row words: slot, epoch, fed, verified, length, known, done | wants << 1,
    number of new ids, number of offered ids, new ids, offered ids. `wants` is the row's LOGPROBS column + 1, perhaps
    with NOTHING_LEFT. Then per row and new id a score; then prompt scores as (row, position of the scored token,
    score); then a vector for each row where some row embeds; then faults as (row, bytes, text); then what `with_times`
    adds."""
    packed, seconds, moved = split_times(packed)
    head = packed[:RESULT_HEADER].tolist()
    tail = len(packed) - head[FAULT_WORDS]
    faults, packed = packed[tail:], packed[:tail]
    layout = ResultLayout(*head[1:7])
    end = RESULT_HEADER + layout.rows * layout.row_words
    table = packed[RESULT_HEADER:end].reshape(layout.rows, layout.row_words)
    new, offers = _ROW_INTS, _ROW_INTS + layout.width  # where they begin
    rows = [RowResult(row[0], row[1], row[2], row[3], row[4], row[5], (row[6] & 1) == 1, row[new : new + row[7]],
                      row[offers : offers + row[8]]) for row in table.tolist()]
    wants = table[:, ROW_FLAGS] >> 1
    for i in (wants & NOTHING_LEFT).nonzero()[0].tolist():
        rows[i].fault = "it left nothing that can be sampled: every logit is -inf, or one is NaN or +inf"
    for row, message in unpack_processors(faults).items():  # the same layout
        rows[row].fault = message.decode()
    scored = layout.words - layout.rows * layout.pooled
    if layout.alternatives >= 0:
        _unpack_scores(packed[end:scored], layout, rows, ((wants & (NOTHING_LEFT - 1)) - 1).tolist())
    if layout.pooled:
        vectors = np.ascontiguousarray(packed[scored:]).view(np.float32).reshape(layout.rows, layout.pooled)
        for result, vector in zip(rows, vectors):
            result.pooled = vector
    return StepResult(head[0], rows, seconds, moved, table[:, :_ROW_INTS])


def _unpack_scores(words: np.ndarray, layout: ResultLayout, rows: list[RowResult], wants: list[int]) -> None:
    size, top = layout.score_words, layout.alternatives
    cells = words[: layout.rows * layout.width * size].reshape(layout.rows, layout.width, size)
    for row, want, of_row in zip(rows, wants, cells):
        if want >= 0:
            row.new_scores = [_score(of_row[i], want, top) for i in range(len(row.new))]
    tail = words[layout.rows * layout.width * size :].reshape(layout.prompt_scores, 2 + size)
    for cell in tail:
        index, position = int(cell[0]), int(cell[1])
        if index >= 0:
            rows[index].prompt_scores[position] = _score(cell[2:], wants[index], top)
