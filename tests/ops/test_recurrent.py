"""States of a step: references and kernels (interpreted where there is no GPU) against one token after another."""

from __future__ import annotations

import pytest
import torch

from stretto.ops.recurrent import (
    PartMemory,
    StateStep,
    causal_conv_reference,
    gated_delta_rule_reference,
)
from stretto.ops.triton_recurrent import launch_conv, launch_delta_rule
from stretto.ragged import RaggedStep

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE, CELLS, PAGES = 4, 5, 120
ROWS = [(1, 0, 1), (3, 7, 1), (0, 5, 1), (4, 9, 4), (23, 2, 0), (70, 3, 1), (12, 0, 3)]  # (q, base, n_out)


def ragged(padding: int = 0) -> RaggedStep:
    """Rows of every kind, one slot each, the last of them first; `padding` tokens and a row of padding."""
    q, base, n_out = (torch.tensor([*column, *([0] if padding else [])], dtype=torch.int32)
                      for column in zip(*ROWS, strict=True))
    slots = torch.tensor([*range(len(ROWS), 0, -1), *([0] if padding else [])])
    cu_q = torch.cat((q.new_zeros(1), q.cumsum(0, dtype=torch.int32)))
    rows = torch.arange(len(q)).repeat_interleave(q)
    positions = base[rows] + torch.arange(len(rows)) - cu_q[rows]
    page = 1 + torch.arange(len(rows))  # one for each token
    extra = torch.zeros(padding, dtype=torch.int64)
    rows = torch.cat((rows, extra + len(q) - 1))
    positions, cells = (torch.cat((x.long(), extra)) for x in (positions, page * PAGE))
    tensors = dict(slots=slots, q_len=q, cu_q=cu_q, base=base, kv_len=base + q, n_out=n_out, cu_out=cu_q, ids=positions,
                   positions=positions, rows=rows, out_tokens=extra, out_rows=extra)
    return RaggedStep(**{name: t.to(DEVICE) for name, t in tensors.items()}, cells=(cells.to(DEVICE),),
                      page_tables=(), page_size=PAGE)


def memory(*shape: int) -> PartMemory:
    generator = torch.Generator().manual_seed(4)
    return PartMemory(*(torch.randn(n, *shape, generator=generator).to(DEVICE) for n in (len(ROWS) + 1, PAGES)))


def of_slots(shape: tuple[int, ...]) -> PartMemory:
    made = memory(CELLS, *shape)
    return PartMemory(made.slots, made.pages[:, 0].contiguous())


def plainly(step: RaggedStep, where: StateStep, kept: PartMemory, one) -> tuple[list, PartMemory]:
    """Row by row, token by token: `one(state, token)` gives its output and the state behind it."""
    slots, pages, out = kept.slots.clone(), kept.pages.clone(), []
    for row, slot in enumerate(step.slots.tolist()):
        n, base, start = int(step.q_len[row]), int(step.base[row]), int(step.cu_q[row])
        state = kept.slots[slot, base % CELLS].double()
        for t in range(n):
            made, state = one(state, start + t)
            out.append(made)
            if t >= n - max(int(step.n_out[row]), 1):
                slots[slot, (base + t + 1) % CELLS] = state.float()
            if (page := int(where.pages[start + t])) > 0:
                pages[page] = state.float()
    return out, PartMemory(slots, pages)


def check(run, right: list, kept: PartMemory, after: PartMemory, tolerance: float) -> None:
    """`run(memory)` makes the outputs, and leaves what `after` says, in cells that belong to somebody."""
    own = PartMemory(kept.slots.clone(), kept.pages.clone())
    out = run(own)
    torch.testing.assert_close(out[: len(right)].double(), torch.stack(right), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(own.slots[1:], after.slots[1:], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(own.pages[1:], after.pages[1:], atol=tolerance, rtol=tolerance)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("width, padding", [(2, 0), (4, 9)])
def test_convolution(width, padding):
    step = ragged(padding)
    where = StateStep.of(step, 0, CELLS)
    assert where.pages.count_nonzero() > 20, "no token ends a page"
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 70, generator=generator).to(DEVICE) for n in (len(step.ids), width))
    x, weight = x[:, :66], weight.t()[:66].contiguous()
    kept = of_slots((66, width - 1))

    def one(state, token):
        window = torch.cat((state, x[token].double()[:, None]), 1)
        return torch.nn.functional.silu((window * weight.double()).sum(1)), window[:, 1:]

    right, after = plainly(step, where, kept, one)
    for run in (causal_conv_reference, launch_conv):
        check(lambda own: run(x, weight, own, where), right, kept, after, 1e-5)  # noqa: B023


@pytest.mark.parametrize("padding, fixed", [(0, True), (9, False)])
def test_delta_rule(padding, fixed):
    """Rows are fed token by token, short ones together, long ones in segments between the states that are kept."""
    step, heads, each, k_dim, v_dim = ragged(padding), 2, 2, 6, 40
    where = StateStep.of(step, 0, CELLS, fixed)
    generator = torch.Generator().manual_seed(2)
    n = len(step.ids)
    q, k, v, decay, beta = (torch.randn(n, *shape, generator=generator).to(DEVICE) for shape in
                            ((heads // each, k_dim), (heads // each, k_dim), (heads, v_dim), (heads,), (heads,)))
    k, decay, beta = torch.nn.functional.normalize(k, dim=-1), -decay.abs(), beta.sigmoid()
    kept = of_slots((heads, k_dim, v_dim))

    def one(state, token):
        q_t, k_t = (x[token].double().repeat_interleave(each, 0)[:, :, None] for x in (q, k))
        state = state * decay[token].double().exp()[:, None, None]
        change = (v[token].double() - (state * k_t).sum(1)) * beta[token].double()[:, None]
        state = state + k_t * change[:, None]
        return (state * q_t).sum(1), state

    right, after = plainly(step, where, kept, one)
    for run in (gated_delta_rule_reference, launch_delta_rule):
        check(lambda own: run(q, k, v, decay, beta, own, where), right, kept, after, 1e-4)  # noqa: B023
