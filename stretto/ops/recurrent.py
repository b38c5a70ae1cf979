"""Layers that keep a state of fixed size in place of cells: where a step finds each row's state and where it leaves it,
a short causal convolution, the gated delta rule, and state spaces. Torch references, which run on CPUs, and Triton
kernels on CUDA.

The state of the first n tokens of a slot stands in cell n % cells of the slot (`wire.state_cells`). A step reads the
cell of `base`, and leaves the state behind each position that the row may end at, so that whatever is accepted of a
verify window, nothing is computed again. A token at the end of a page leaves it beside the page as well:

    row (q 6, n_out 3)      base | t0   t1   t2   t3   t4   t5
    read                     S
    written to cells                               S    S    S        (n_out 0: behind the last token)
    written to pages                  S                   S           where the pages of the `state` group end
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stretto.ops.fixed import elementwise
from stretto.ops.state_step import PartMemory, StateStep

SHORT = 8  # rows of up to so many tokens are computed token by token, all of them at once
SEGMENT = 64  # most tokens that the chunked form takes at a time


# --------------------------------------------------------------------------------------------------------- convolution
def causal_conv(x: torch.Tensor, weight: torch.Tensor, memory: PartMemory, where: StateStep,
                bias: torch.Tensor | None = None) -> torch.Tensor:
    """silu of bias [C] and the sum over the last W inputs of each channel times weight [C, W]. x [T, C] -> [T, C]
    float32. The state is the last W - 1 inputs, [C, W - 1]. Two launches on CUDA."""
    if x.is_cuda:
        from stretto.ops.triton_recurrent import launch_conv

        return launch_conv(x, weight, memory, where, bias)
    return causal_conv_reference(x, weight, memory, where, bias)


def causal_conv_reference(x: torch.Tensor, weight: torch.Tensor, memory: PartMemory, where: StateStep,
                          bias: torch.Tensor | None = None) -> torch.Tensor:
    """`causal_conv` in torch's operations."""
    width, rows, x, weight = weight.shape[1], where.step.rows, x.float(), weight.float()
    before = memory.slots[where.step.slots.long(), where.first]  # [R, C, W - 1]

    def input_before(tokens: torch.Tensor, back: int) -> torch.Tensor:
        """[N, C]: the input so many tokens before each."""
        offset = where.offsets[tokens]
        old = before[rows[tokens], :, (width - 1 + offset - back).clamp(0, width - 2)]
        return torch.where((offset >= back)[:, None], x[(tokens - back).clamp(min=0)], old)

    every = torch.arange(len(x), device=x.device)
    made = x * weight[:, -1] + (0 if bias is None else bias.float())
    for back in range(1, width):
        made = made + input_before(every, back) * weight[:, width - 1 - back]
    kept, slots, cells = where.kept
    paged, pages = where.paged
    for tokens, target, at in ((kept, memory.slots, (slots, cells)), (paged, memory.pages, (pages,))):
        if len(tokens):
            last = [input_before(tokens, back) for back in range(width - 2, -1, -1)]
            target[at] = torch.stack(last, 2)
    return elementwise(F.silu, made) if where.fixed else F.silu(made)


# ---------------------------------------------------------------------------------------------------- gated delta rule
def gated_delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor,
                     memory: PartMemory, where: StateStep, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Gated delta networks (Yang et al. 2024, https://arxiv.org/abs/2412.06464): for each head and token

        S = exp(decay) S;    S = S + k (beta (v - k S));    out = q S            S [K, V], the state

    q, k [T, Hk, K], normed, q scaled; v [T, Hv, V], Hv a multiple of Hk; decay, beta [T, Hv]. All float32. Returns
    [T, Hv, V]. On CUDA one launch, two more where a row is long; `dtype`, the model's own, is what its chunks are
    multiplied in there."""
    if q.is_cuda:
        from stretto.ops.triton_delta import launch_delta_rule

        return launch_delta_rule(q, k, v, decay, beta, memory, where, dtype)
    return recurrence_reference(q, k, v, decay, beta, memory, where)


def state_space(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, memory: PartMemory,
                where: StateStep, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Mamba-2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060), whose C, B and dt * x are q, k and v here:

        S = exp(decay) S + k v;    out = q S

    Otherwise as `gated_delta_rule`."""
    if q.is_cuda:
        from stretto.ops.triton_delta import launch_delta_rule

        return launch_delta_rule(q, k, v, decay, None, memory, where, dtype)
    return recurrence_reference(q, k, v, decay, None, memory, where)


def recurrence_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor,
                         beta: torch.Tensor | None, memory: PartMemory, where: StateStep) -> torch.Tensor:
    """`gated_delta_rule` in torch's operations; without beta `state_space`."""
    each = v.shape[1] // q.shape[1]
    tokens = _Tokens(q.repeat_interleave(each, 1), k.repeat_interleave(each, 1), v, decay, beta, torch.zeros_like(v))
    lengths = where.step.q_len.tolist()
    long = [] if where.fixed else [row for row, n in enumerate(lengths) if n > SHORT]
    short = [row for row, n in enumerate(lengths) if n and row not in set(long)]
    leave = _leave(memory, where)
    for together in ([row] for row in short) if where.fixed else [short] if short else []:
        rows = torch.tensor(together, device=q.device)
        slots, first = where.step.slots[rows].long(), where.first[rows]
        tokens.one_by_one(memory.slots[slots, first], where.step.cu_q[rows].long(), where.step.q_len[rows], leave)
    edges = sorted({*where.kept[0].tolist(), *where.paged[0].tolist()}) if long else []
    starts = where.step.cu_q.tolist()
    for row in long:
        state = memory.slots[int(where.step.slots[row]), int(where.first[row])].clone()
        tokens.in_segments(state, starts[row], starts[row + 1], edges, leave)
    return tokens.out


Leave = Callable[[torch.Tensor, torch.Tensor], None]
"""(tokens [N], the states behind them [N, Hv, K, V]): keeps those that are to stay."""


def _leave(memory: PartMemory, where: StateStep) -> Leave:
    n = len(where.step.ids)
    kept, slots, cells = where.kept
    slot_of, cell_of = kept.new_zeros(n), kept.new_zeros(n)
    slot_of[kept], cell_of[kept] = slots, cells

    def leave(tokens: torch.Tensor, states: torch.Tensor) -> None:
        for numbers, target, at in ((slot_of, memory.slots, (slot_of, cell_of)), (where.pages, memory.pages,
                                                                                  (where.pages,))):
            chosen = numbers[tokens].nonzero().flatten()  # slot 0 and page 0 belong to nobody
            if len(chosen):
                target[tuple(index[tokens[chosen]] for index in at)] = states[chosen]
    return leave


@dataclass(frozen=True)
class _Tokens:
    """Packed tokens with a q and k for each value head."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor | None
    out: torch.Tensor

    def one_by_one(self, state: torch.Tensor, start: torch.Tensor, lengths: torch.Tensor, leave: Leave) -> None:
        """state [B, H, K, V] of rows that begin at tokens `start` [B]; changed in place."""
        for offset in range(int(lengths.max())):
            rows = (lengths > offset).nonzero().flatten()
            at = start[rows] + offset
            q, k, v = self.q[at].unsqueeze(2), self.k[at].unsqueeze(2), self.v[at]
            now = state[rows] * self.decay[at].exp()[..., None, None]
            change = v if self.beta is None else (v - torch.matmul(k, now).squeeze(2)) * self.beta[at].unsqueeze(2)
            now = now + k.transpose(2, 3) * change.unsqueeze(2)
            self.out[at] = torch.matmul(q, now).squeeze(2)
            state[rows] = now
            leave(at, now)

    def in_segments(self, state: torch.Tensor, start: int, end: int, edges: list[int], leave: Leave) -> None:
        """state [H, K, V]; tokens `start` to `end` of one row. `edges`: tokens behind which states are kept."""
        stops = [e + 1 for e in edges if start <= e < end - 1] + [end]
        for stop in stops:
            while start < stop:
                until = min(start + SEGMENT, stop)
                state = self._segment(state, slice(start, until))
                start = until
            leave(torch.tensor([stop - 1], device=state.device), state[None])

    def _segment(self, state: torch.Tensor, at: slice) -> torch.Tensor:
        """The chunked form (section 3.3 there): all tokens at once. Returns the state behind the last one."""
        q, k, v = (x[at].transpose(0, 1) for x in (self.q, self.k, self.v))  # [H, N, D]
        total = self.decay[at].t().cumsum(1)  # [H, N]
        between = (total.unsqueeze(2) - total.unsqueeze(1)).tril().exp().tril()  # decay from token j to token i >= j
        from_start = total.exp().unsqueeze(2)
        changes = v
        if self.beta is not None:
            changes = _changes(k, v, self.beta[at].t().unsqueeze(2), between, from_start, state)
        self.out[at] = ((q * from_start) @ state + (q @ k.transpose(1, 2) * between) @ changes).transpose(0, 1)
        to_end = (total[:, -1:] - total).exp().unsqueeze(2)
        return state * from_start[:, -1:] + (k * to_end).transpose(1, 2) @ changes


def _changes(k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, between: torch.Tensor, from_start: torch.Tensor,
             state: torch.Tensor) -> torch.Tensor:
    """What each token of a segment adds to a state, [H, N, V]: from one triangular system."""
    system = (k * beta) @ k.transpose(1, 2) * between
    wanted = torch.cat((v * beta, k * beta * from_start), 2)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    own, read = solved.split((v.shape[2], k.shape[2]), 2)
    return own - read @ state
