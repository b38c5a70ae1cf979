"""The Triton kernels of a step's ends: bind, the greedy choice, judge, commit, pack. References: `bind.py`,
`commit.py`, `device/slots.py`, `device/record.py`. Imported only where they are going to run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stretto.ops.launch import dependent, overlaps
from stretto.ops.outcome import Commit
from stretto.ops.triton_launch import begin
from stretto.ragged import RaggedStep
from stretto.wire import Goal, Int, Real

LEN, KNOWN, NDRAFT = tl.constexpr(int(Int.LEN)), tl.constexpr(int(Int.KNOWN)), tl.constexpr(int(Int.NDRAFT))
LIMIT, GOAL, DONE = tl.constexpr(int(Int.LIMIT)), tl.constexpr(int(Int.GOAL)), tl.constexpr(int(Int.DONE))
SEED_LOW, SEED_HIGH = tl.constexpr(int(Int.SEED_LOW)), tl.constexpr(int(Int.SEED_HIGH))
CHOICE, TEMPERATURE = tl.constexpr(int(Int.CHOICE)), tl.constexpr(int(Real.TEMPERATURE))
EPOCH, GENERATE = tl.constexpr(int(Int.EPOCH)), tl.constexpr(int(Goal.GENERATE))
ITEMS = 128  # packed items of one program of `spread_kernel`
VOCAB = 4096  # logits of one program of `best_kernel`


# ------------------------------------------------------------------------------------------------------------- bind
@triton.jit(do_not_specialize=["n_rows", "n_slots", "n_tokens", "n_logits"])
def lengths_kernel(rows, ints, slots, base, q_len, kv_len, n_out, cu_q, cu_out, n_rows, n_slots, n_tokens, n_logits,
                   ROWS: tl.constexpr, PDL: tl.constexpr):
    """The row formula of `bind.py` and its `fit` for all rows in one program, and the two exclusive scans."""
    r = tl.arange(0, ROWS)
    ok = r < n_rows
    begin(PDL)
    slot = tl.load(rows + r * 3, mask=ok, other=0)
    epoch = tl.load(rows + r * 3 + 1, mask=ok, other=0)
    cap = tl.load(rows + r * 3 + 2, mask=ok, other=0)
    column = ints + slot
    length = tl.load(column + LEN * n_slots, mask=ok, other=0)
    known = tl.load(column + KNOWN * n_slots, mask=ok, other=0)
    drafts = tl.load(column + NDRAFT * n_slots, mask=ok, other=0)
    limit = tl.load(column + LIMIT * n_slots, mask=ok, other=0)
    live = ok & (tl.load(column + EPOCH * n_slots, mask=ok, other=0) == epoch)
    live = live & (tl.load(column + DONE * n_slots, mask=ok, other=1) == 0)
    generates = tl.load(column + GOAL * n_slots, mask=ok, other=0) == GENERATE
    q = tl.minimum(tl.minimum(cap, known - length + drafts), limit - 1 - length)
    q = tl.where(live, tl.maximum(q, 0), 0)
    out = tl.where(live & generates, tl.maximum(length + q - known + 1, 0), 0)
    needed = tl.minimum(q, tl.maximum(known - length, 0))
    drafts = q - needed
    room = tl.minimum(n_tokens - tl.sum(needed, 0), n_logits - tl.sum((out > 0).to(tl.int32), 0))
    kept = tl.minimum(tl.maximum(room - (tl.cumsum(drafts, 0) - drafts), 0), drafts)
    q = needed + kept
    out = tl.maximum(out - drafts + kept, 0)
    tl.store(slots + r, slot.to(tl.int64), mask=ok)
    tl.store(base + r, length, mask=ok)
    tl.store(q_len + r, q, mask=ok)
    tl.store(kv_len + r, length + q, mask=ok)
    tl.store(n_out + r, out, mask=ok)
    tl.store(cu_q + r, tl.cumsum(q, 0) - q, mask=ok)
    tl.store(cu_out + r, tl.cumsum(out, 0) - out, mask=ok)
    tl.store(cu_q + n_rows, tl.sum(q, 0))
    tl.store(cu_out + n_rows, tl.sum(out, 0))


@triton.jit
def _row_of(scan, i, n_rows, STEPS: tl.constexpr):
    """The row whose span holds item i: how many of scan[1 .. n_rows] are at most i; the last row for padding."""
    low = tl.zeros_like(i)
    high = tl.zeros_like(i) + n_rows
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        searching = low < high
        passed = searching & (tl.load(scan + 1 + middle, mask=searching, other=0) <= i)
        high = tl.where(searching & (passed == 0), middle, high)
        low = tl.where(passed, middle + 1, low)
    return tl.minimum(low, n_rows - 1)


@triton.jit(do_not_specialize=["n_rows", "n_tokens", "n_logits"])
def spread_kernel(slots, base, q_len, n_out, cu_q, cu_out, log, table, ids, positions, token_rows, cells, out_tokens,
                  out_rows, n_rows, n_tokens, n_logits, log_stride, table_stride, PAGE: tl.constexpr,
                  STEPS: tl.constexpr, CELLS_ONLY: tl.constexpr, ITEMS: tl.constexpr, PDL: tl.constexpr):
    """For each packed token its row, position, id and cell; for each logit row its row and token."""
    i = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    begin(PDL)
    row = _row_of(cu_q, i, n_rows, STEPS)
    real = (i < n_tokens) & (i < tl.load(cu_q + n_rows))
    slot = tl.load(slots + row, mask=real, other=0)
    position = tl.load(base + row, mask=real, other=0) + i - tl.load(cu_q + row)
    position = tl.where(real, position, 0)
    page = tl.load(table + slot * table_stride + position // PAGE, mask=real, other=0).to(tl.int64)
    keep = i < n_tokens
    tl.store(cells + i, page * PAGE + tl.where(real, position % PAGE, 0), mask=keep)
    if CELLS_ONLY:
        return
    token = tl.load(log + slot * log_stride + position, mask=real, other=0)
    tl.store(ids + i, token.to(tl.int64), mask=keep)
    tl.store(positions + i, position.to(tl.int64), mask=keep)
    tl.store(token_rows + i, row.to(tl.int64), mask=keep)
    row = _row_of(cu_out, i, n_rows, STEPS)
    start = tl.load(cu_out + row)
    at = tl.load(cu_q + row) + tl.load(q_len + row) - tl.load(n_out + row) + i - start
    keep = i < n_logits
    tl.store(out_tokens + i, tl.where(i < tl.load(cu_out + n_rows), at, 0).to(tl.int64), mask=keep)
    tl.store(out_rows + i, row.to(tl.int64), mask=keep)


def launch_bind(rows: torch.Tensor, ints: torch.Tensor, log: torch.Tensor, page_tables: tuple[torch.Tensor, ...],
                page_size: int, n_tokens: int, n_logits: int) -> RaggedStep:
    """As `bind.bind`: two launches, and one more for each further KV group."""
    n, device = len(rows), rows.device
    base, q_len, kv_len, n_out = torch.empty(4, n, dtype=torch.int32, device=device).unbind(0)
    cu_q, cu_out = torch.empty(2, n + 1, dtype=torch.int32, device=device).unbind(0)
    slots = torch.empty(n, dtype=torch.int64, device=device)
    ids, positions, token_rows, *cells = torch.empty(3 + len(page_tables), n_tokens, dtype=torch.int64,
                                                     device=device).unbind(0)
    out_tokens, out_rows = torch.empty(2, n_logits, dtype=torch.int64, device=device).unbind(0)
    pdl, options = overlaps(device), dependent(device)
    rows = rows.contiguous()
    lengths_kernel[(1,)](rows, ints, slots, base, q_len, kv_len, n_out, cu_q, cu_out, n, ints.stride(0),
                         n_tokens, n_logits, ROWS=triton.next_power_of_2(n), PDL=pdl, num_warps=4, **options)
    for group, table in enumerate(page_tables):
        spread_kernel[(triton.cdiv(max(n_tokens, n_logits, 1), ITEMS),)](
            slots, base, q_len, n_out, cu_q, cu_out, log, table, ids, positions, token_rows, cells[group], out_tokens,
            out_rows, n, n_tokens, n_logits, log.stride(0), table.stride(0), PAGE=page_size, STEPS=n.bit_length(),
            CELLS_ONLY=group > 0, ITEMS=ITEMS, PDL=pdl, num_warps=4, **options)
    return RaggedStep(slots=slots, q_len=q_len, cu_q=cu_q, base=base, kv_len=kv_len, n_out=n_out, cu_out=cu_out,
                      ids=ids, positions=positions, rows=token_rows, cells=tuple(cells), out_tokens=out_tokens,
                      out_rows=out_rows, page_tables=page_tables, page_size=page_size)


# ----------------------------------------------------------------------------------------------------------- choose
@triton.jit
def _lowest_best(values, ids, NONE: tl.constexpr):
    """The largest value, and the lowest id that has it."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, ids, NONE), 0)


@triton.jit
def _mix(x):
    """SplitMix64's output function, on uint64 (`sample.noise.mix`)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _golden(x):
    """x times SplitMix64's step, wrapping."""
    return x.to(tl.uint64) * 0x9E3779B97F4A7C15


@triton.jit
def _gumbel(ints, slot, position, ids, n_slots, STREAM: tl.constexpr):
    """`sample.noise.gumbel` of one position for `ids`. log1p by its series where u is small, in float64 elsewhere."""
    high = tl.load(ints + SEED_HIGH * n_slots + slot).to(tl.int64)
    low = tl.load(ints + SEED_LOW * n_slots + slot).to(tl.int64)
    seed = ((high << 32) | (low & 0xFFFFFFFF)).to(tl.uint64)
    key = _mix(seed + 0x9E3779B97F4A7C15)
    key = _mix(key ^ (_golden(tl.load(ints + CHOICE * n_slots + slot).to(tl.int64)) + STREAM))
    key = _mix(key + _golden(position.to(tl.int64)))
    bits = (_mix(key + _golden(ids.to(tl.int64) + 1)) >> 11).to(tl.int64)
    u = tl.minimum(((bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16).to(tl.float32), 0.9999999403953552)
    d = u.to(tl.float64)
    series = d + d * d * (0.5 + d * (0.3333333333333333 + d * 0.25))
    exponential = tl.where(d < 1e-3, series, -tl.log(1.0 - d)).to(tl.float32)
    return -tl.log(exponential)


@triton.jit(do_not_specialize=["parts", "n_slots"])
def best_kernel(logits, values, ids, ints, reals, slots, positions, vocab, parts, n_slots, VOCAB: tl.constexpr,
                DRAW: tl.constexpr, STREAM: tl.constexpr, PDL: tl.constexpr):
    """One program for a part of a row of logits. DRAW: rows with a temperature add their noise first."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = part * VOCAB + tl.arange(0, VOCAB)
    begin(PDL)
    x = tl.load(logits + row * vocab + i, mask=i < vocab, other=-float("inf")).to(tl.float32)
    if DRAW:
        slot = tl.load(slots + row)
        temperature = tl.load(reals + TEMPERATURE * n_slots + slot)
        if temperature > 0:
            x = tl.div_rn(x, tl.zeros_like(x) + temperature)
            x += _gumbel(ints, slot, tl.load(positions + row), i, n_slots, STREAM)
    x = tl.where(x != x, float("inf"), x)  # torch's argmax also puts NaN first
    best, at = _lowest_best(x, i, 2147483647)
    tl.store(values + row * parts + part, best)
    tl.store(ids + row * parts + part, at)


@triton.jit(do_not_specialize=["parts"])
def best_of_parts_kernel(values, ids, out, parts, PARTS: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, PARTS)
    begin(PDL)
    x = tl.load(values + row * parts + p, mask=p < parts, other=-float("inf"))
    _, at = _lowest_best(x, tl.load(ids + row * parts + p, mask=p < parts, other=2147483647), 2147483647)
    tl.store(out + row, at.to(tl.int64))


def launch_argmax(logits: torch.Tensor) -> torch.Tensor:
    """[L, V] -> [L] int64: the lowest id among equal maxima, in two launches."""
    return _launch_best(logits, None)


def launch_draw(logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, ints: torch.Tensor,
                reals: torch.Tensor, stream: int) -> torch.Tensor:
    """[L, V] -> [L] int64: a draw from softmax(logits / temperature) where the slot has one, else the greedy choice.
    slots and positions [L], the table's `ints` and `reals`. Nothing as large as the logits is written."""
    return _launch_best(logits, (slots, positions, ints, reals), stream)


def _launch_best(logits: torch.Tensor, draw: tuple[torch.Tensor, ...] | None, stream: int = 0) -> torch.Tensor:
    logits = logits.contiguous()
    n, vocab = logits.shape
    parts = triton.cdiv(vocab, VOCAB)
    values = torch.empty(n, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(n, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(n, dtype=torch.int64, device=logits.device)
    pdl, options = overlaps(logits.device), dependent(logits.device)
    if n:
        slots, positions, ints, reals = draw if draw is not None else (ids, ids, ids, values)
        best_kernel[(n, parts)](logits, values, ids, ints, reals, slots, positions, vocab, parts, ints.stride(0),
                                VOCAB=VOCAB, DRAW=draw is not None, STREAM=stream, PDL=pdl, num_warps=8, **options)
        best_of_parts_kernel[(n,)](values, ids, out, parts, PARTS=triton.next_power_of_2(parts), PDL=pdl, num_warps=1,
                                   **options)
    return out


# ----------------------------------------------------------------------------------------------------------- commit
@triton.jit(do_not_specialize=["n_sampled", "n_slots", "context"])
def judge_kernel(slots, q_len, base, step_n_out, cu_out, sampled, ints, log, stops, live, ids, n_new, accepted, known,
                 length, ndraft, done, n_sampled, n_slots, context, log_stride, width, WIDTH: tl.constexpr,
                 STOPS: tl.constexpr, PDL: tl.constexpr):
    """`commit.judge`, one program a row."""
    row = tl.program_id(0)
    o = tl.arange(0, WIDTH)
    begin(PDL)
    slot = tl.load(slots + row)
    n_out = tl.load(step_n_out + row)
    fed = tl.load(q_len + row)
    old_known = tl.load(ints + KNOWN * n_slots + slot)
    at = tl.minimum(tl.load(cu_out + row) + o, n_sampled - 1)
    inside = (o < n_out) & (o < width)
    choice = tl.load(sampled + at, mask=inside, other=-1)
    draft = tl.load(log + slot * log_stride + tl.minimum(old_known + o, context - 1), mask=inside, other=-1)
    agree = (choice == draft.to(tl.int64)) & (o < n_out - 1)
    run = tl.min(tl.where(agree, WIDTH, o), 0)
    new = tl.where(n_out > 0, tl.minimum(run, width) + 1, 0)
    ends = tl.load(stops + slot * STOPS + tl.arange(0, STOPS))
    is_stop = tl.max((choice[:, None] == ends.to(tl.int64)[None, :]).to(tl.int32), 1)
    first = tl.min(tl.where((is_stop > 0) & (o < new), o, WIDTH), 0)
    stopped = first < WIDTH
    new = tl.where(stopped, first + 1, new)
    new_known = old_known + new
    new_length = tl.where(n_out > 0, new_known - 1, tl.load(base + row) + fed)
    scored = (tl.load(ints + GOAL * n_slots + slot) != GENERATE) & (new_length == old_known)
    ended = tl.where(n_out > 0, stopped | (new_known >= tl.load(ints + LIMIT * n_slots + slot)), scored)
    tl.store(live + row, fed > 0)
    tl.store(ids + row * width + o, choice, mask=o < width)
    tl.store(n_new + row, new)
    tl.store(accepted + row, tl.maximum(new - 1, 0))
    tl.store(known + row, new_known)
    tl.store(length + row, new_length)
    tl.store(ndraft + row, tl.where(n_out > 0, 0, tl.load(ints + NDRAFT * n_slots + slot)))
    tl.store(done + row, ended)


def launch_judge(step: RaggedStep, sampled: torch.Tensor, ints: torch.Tensor, log: torch.Tensor, stops: torch.Tensor,
                 width: int) -> Commit:
    """As `commit.judge`, in one launch; `sampled` holds at least one id."""
    n, device = len(step.slots), sampled.device
    n_new, accepted, known, length, ndraft = torch.empty(5, n, dtype=torch.int32, device=device).unbind(0)
    live, done = torch.empty(2, n, dtype=torch.bool, device=device).unbind(0)
    ids = torch.empty(n, width, dtype=torch.int64, device=device)
    judge_kernel[(n,)](step.slots, step.q_len, step.base, step.n_out, step.cu_out, sampled, ints, log, stops, live,
                       ids, n_new, accepted, known, length, ndraft, done, len(sampled), ints.stride(0), log.shape[1],
                       log.stride(0), width, WIDTH=triton.next_power_of_2(width), STOPS=stops.shape[1],
                       PDL=overlaps(device), num_warps=1, **dependent(device))
    return Commit(live=live, ids=ids, n_new=n_new, accepted=accepted, known=known, length=length, ndraft=ndraft,
                  done=done)


@triton.jit(do_not_specialize=["n_slots"])
def commit_kernel(slots, live, ids, n_new, known, length, ndraft, done, ints, log, n_slots, log_stride, width,
                  WIDTH: tl.constexpr, PDL: tl.constexpr):
    """`SlotTable.commit`, one program a row; rows that fed nothing write nothing."""
    row = tl.program_id(0)
    o = tl.arange(0, WIDTH)
    begin(PDL)
    slot = tl.load(slots + row)
    new = tl.load(n_new + row)
    new_known = tl.load(known + row)
    alive = tl.load(live + row)
    chosen = tl.load(ids + row * width + o, mask=o < width, other=0)
    tl.store(log + slot * log_stride + new_known - new + o, chosen.to(tl.int32), mask=(o < new) & alive)
    tl.store(ints + KNOWN * n_slots + slot, new_known, mask=alive)
    tl.store(ints + LEN * n_slots + slot, tl.load(length + row), mask=alive)
    tl.store(ints + NDRAFT * n_slots + slot, tl.load(ndraft + row), mask=alive)
    tl.store(ints + DONE * n_slots + slot, tl.load(done + row).to(tl.int32), mask=alive)


def launch_commit(slots: torch.Tensor, outcome: Commit, ints: torch.Tensor, log: torch.Tensor) -> None:
    """As `SlotTable.commit`, in one launch. slots [R] int64."""
    width = outcome.ids.shape[1]
    commit_kernel[(len(slots),)](slots, outcome.live, outcome.ids, outcome.n_new, outcome.known, outcome.length,
                                 outcome.ndraft, outcome.done, ints, log, ints.stride(0), log.stride(0), width,
                                 WIDTH=triton.next_power_of_2(width), PDL=overlaps(ints.device), num_warps=1,
                                 **dependent(ints.device))


@triton.jit
def pack_kernel(rows, q_len, n_out, live, ids, n_new, known, length, done, offered, offer_width, wants, out, width,
                offers, WIDTH: tl.constexpr, OFFERS: tl.constexpr, PDL: tl.constexpr):
    """`record.pack_rows`, one program a row."""
    row = tl.program_id(0)
    begin(PDL)
    to = out + row * (9 + width + offers)
    tl.store(to, tl.load(rows + row * 3))
    tl.store(to + 1, tl.where(tl.load(live + row), tl.load(rows + row * 3 + 1), -1))
    tl.store(to + 2, tl.load(q_len + row))
    tl.store(to + 3, tl.maximum(tl.load(n_out + row) - 1, 0))
    tl.store(to + 4, tl.load(length + row))
    tl.store(to + 5, tl.load(known + row))
    tl.store(to + 6, tl.load(done + row).to(tl.int32) | (tl.load(wants + row) << 1))
    tl.store(to + 7, tl.load(n_new + row))
    tl.store(to + 8, tl.load(offer_width + row))
    o = tl.arange(0, WIDTH)
    tl.store(to + 9 + o, tl.load(ids + row * width + o, mask=o < width, other=0).to(tl.int32), mask=o < width)
    if OFFERS > 0:
        k = tl.arange(0, OFFERS)
        draft = tl.load(offered + row * offers + k, mask=k < offers, other=0)
        tl.store(to + 9 + width + k, draft.to(tl.int32), mask=k < offers)


def launch_pack(step: RaggedStep, rows: torch.Tensor, outcome: Commit, offered: torch.Tensor,
                offer_width: torch.Tensor, wants: torch.Tensor) -> torch.Tensor:
    """As `record.pack_rows`, in one launch."""
    n, width, offers = len(rows), outcome.ids.shape[1], offered.shape[1]
    out = torch.empty(n, 9 + width + offers, dtype=torch.int32, device=rows.device)
    pack_kernel[(n,)](rows.contiguous(), step.q_len, step.n_out, outcome.live, outcome.ids, outcome.n_new,
                      outcome.known, outcome.length, outcome.done, offered.contiguous(), offer_width, wants, out,
                      width, offers, WIDTH=triton.next_power_of_2(width),
                      OFFERS=triton.next_power_of_2(offers) if offers else 0, PDL=overlaps(out.device), num_warps=1,
                      **dependent(out.device))
    return out
