"""States of a step: references and kernels (interpreted where there is no GPU) against one token after another."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from stretto.ops.delta_net import EPS, delta_inputs_reference, gated_norm_reference
from stretto.ops.recurrent import (
    PartMemory,
    StateStep,
    causal_conv_reference,
    recurrence_reference,
)
from stretto.ops.triton_delta import SHORT, Chunking, launch_delta_rule
from stretto.ops.triton_delta_net import launch_delta_inputs, launch_gated_norm
from stretto.ops.triton_recurrent import launch_conv
from stretto.ragged import RaggedStep
from tests.ops.bounds import within_bounds

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


@pytest.mark.parametrize("width, padding, biased", [(2, 0, False), (4, 9, True)])
def test_convolution(width, padding, biased):
    step = ragged(padding)
    where = StateStep.of(step, 0, CELLS)
    assert where.pages.count_nonzero() > 20, "no token ends a page"
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 70, generator=generator).to(DEVICE) for n in (len(step.ids), width))
    x, weight, bias = x[:, :66], weight.t()[:66].contiguous(), weight[0, :66].clone() if biased else None
    kept = of_slots((66, width - 1))

    def one(state, token):
        window = torch.cat((state, x[token].double()[:, None]), 1)
        total = (window * weight.double()).sum(1) + (0 if bias is None else bias.double())
        return torch.nn.functional.silu(total), window[:, 1:]

    right, after = plainly(step, where, kept, one)
    for run in (causal_conv_reference, launch_conv):
        check(lambda own: run(x, weight, own, where, bias), right, kept, after, 1e-5)  # noqa: B023


def delta_inputs(n: int, heads: int, each: int, k_dim: int, v_dim: int,
                 alike: bool = False) -> tuple[torch.Tensor, ...]:
    """q, k, v, decay, beta. `alike`: keys nearly equal, hardly any decay, every change nearly whole."""
    generator = torch.Generator().manual_seed(2)
    shapes = ((heads // each, k_dim), (heads // each, k_dim), (heads, v_dim), (heads,), (heads,))
    q, k, v, decay, beta = (torch.randn(n, *shape, generator=generator) for shape in shapes)
    if alike:
        k, decay, beta = 1 + 0.02 * k, 1e-3 * decay, beta + 4
    k = torch.nn.functional.normalize(k, dim=-1)
    return tuple(x.to(DEVICE) for x in (q, k, v, -decay.abs(), beta.sigmoid()))


def delta_plainly(step: RaggedStep, where: StateStep, kept: PartMemory, q, k, v, decay,
                  beta) -> tuple[list, PartMemory]:
    each = v.shape[1] // q.shape[1]

    def one(state, token):
        q_t, k_t = (x[token].double().repeat_interleave(each, 0)[:, :, None] for x in (q, k))
        state = state * decay[token].double().exp()[:, None, None]
        change = v[token].double()
        if beta is not None:
            change = (change - (state * k_t).sum(1)) * beta[token].double()[:, None]
        state = state + k_t * change[:, None]
        return (state * q_t).sum(1), state

    return plainly(step, where, kept, one)


@pytest.mark.parametrize("padding, fixed, delta", [(0, True, True), (9, False, True), (9, False, False)])
def test_recurrence(padding, fixed, delta):
    """Rows are fed token by token, short ones together, long ones in segments between the states that are kept."""
    step, heads, k_dim, v_dim = ragged(padding), 2, 6, 40
    where = StateStep.of(step, 0, CELLS, fixed)
    inputs = delta_inputs(len(step.ids), heads, 2, k_dim, v_dim)
    inputs = inputs if delta else (*inputs[:4], None)
    kept = of_slots((heads, k_dim, v_dim))
    right, after = delta_plainly(step, where, kept, *inputs)
    for run in (recurrence_reference, launch_delta_rule, partial(launch_delta_rule, short=SHORT)):
        check(lambda own: run(*inputs, own, where), right, kept, after, 1e-4)  # noqa: B023


@pytest.mark.parametrize("dtype, chunk, short, delta, alike, tolerance", [
    (torch.float32, Chunking(16, 16), 2, True, False, 1e-4),
    (torch.bfloat16, Chunking(64, 16), 11, True, False, 0.1),
    (torch.float32, Chunking(32, 32), 2, False, False, 1e-4),
    pytest.param(torch.float32, Chunking(16, 32), 11, True, True, 3e-4, marks=pytest.mark.full),
    pytest.param(torch.bfloat16, Chunking(16, 32), 2, True, True, 0.1, marks=pytest.mark.full),
    pytest.param(torch.bfloat16, Chunking(32, 16), 9, False, True, 0.2, marks=pytest.mark.full)])
def test_recurrence_in_chunks(dtype, chunk, short, delta, alike, tolerance):
    """Chunks that end with the row or before it, states kept inside of them and at their ends, one row or several."""
    step, heads, k_dim, v_dim = ragged(9), 2, 6, 40
    where, kept = StateStep.of(step, 0, CELLS), of_slots((heads, k_dim, v_dim))
    inputs = delta_inputs(len(step.ids), heads, 2, k_dim, v_dim, alike)
    inputs = inputs if delta else (*inputs[:4], None)
    right, after = delta_plainly(step, where, kept, *inputs)
    check(lambda own: launch_delta_rule(*inputs, own, where, dtype, short, chunk), right, kept, after, tolerance)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a device tells by itself")
@pytest.mark.parametrize("dtype, delta", [
    (torch.bfloat16, True), pytest.param(torch.float32, True, marks=pytest.mark.full),
    pytest.param(torch.bfloat16, False, marks=pytest.mark.full)])
def test_chunks_touch_nothing_beyond_their_tensors(dtype, delta, monkeypatch):
    """With the tiles of real models: keys of 128 features, rows that do not fill their last chunk."""
    step = ragged(9)
    where, kept = StateStep.of(step, 0, CELLS), of_slots((1, 128, 32))
    inputs = delta_inputs(len(step.ids), 1, 1, 128, 32)
    inputs = inputs if delta else (*inputs[:4], None)
    with within_bounds(monkeypatch) as seen:
        launch_delta_rule(*inputs, kept, where, dtype, short=11)
    assert min(seen.values()) > 10**4


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a device tells by itself")
def test_addresses_beyond_a_tensor_are_found(monkeypatch):
    """Else the test above could not fail: a row says that it is longer than the tensors are."""
    step = ragged()
    step.q_len[-1] += 8
    where, kept = StateStep.of(step, 0, CELLS), of_slots((2, 6, 40))
    inputs = delta_inputs(len(step.ids), 2, 2, 6, 40)
    with within_bounds(monkeypatch), pytest.raises(Exception, match="beyond all tensors of the kernel"):
        launch_delta_rule(*inputs, kept, where, torch.float32, short=2, how=Chunking(16, 16))


@pytest.mark.parametrize("tokens, heads, values, size", [(1, 2, 4, 8), (5, 3, 3, 12), (0, 2, 2, 8)])
def test_what_stands_around_the_delta_rule(tokens, heads, values, size):
    """Kernels and references, on slices of wider tensors."""
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(tokens, 2 * heads * size + 3, generator=generator).to(DEVICE)
    q, k = (part.unflatten(1, (heads, size)) for part in wide[:, 3:].chunk(2, 1))
    a, b, gate = (30 * torch.randn(tokens, 2 * values + values * size, generator=generator).to(DEVICE)).split(
        [values, values, values * size], 1)
    rate, bias = torch.randn(2, values, generator=generator).to(DEVICE)
    for one, other in zip(launch_delta_inputs(q, k, a, b, rate, bias, EPS),
                          delta_inputs_reference(q, k, a, b, rate, bias), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    x, weight = torch.randn(tokens, values, size, generator=generator).to(DEVICE), rate.new_ones(size) * 1.3
    torch.testing.assert_close(launch_gated_norm(x, gate, weight, 1e-5, torch.float32),
                               gated_norm_reference(x, gate, weight, 1e-5, torch.float32), atol=1e-4, rtol=1e-5)
