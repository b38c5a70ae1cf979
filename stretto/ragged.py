"""One step as tensors. Built by `ops.bind` from the slot table at forward entry; read by everything after it.

A ragged step packs the tokens of all rows one after another. Rows of every situation (a prompt's chunk, one decoded
token, a verify window) look the same. Sizes are those of a bucket; what a bucket leaves over is padding: padded rows
have q 0 and slot 0, padded tokens id 0, position 0 and the null page's cell.

    row 0 (q 3)   row 1 (q 1)  row 2 (q 0)  row 3 (q 2)   padding
    |t0 t1 t2    |t3          |            |t4 t5        |0 0
    cu_q = 0, 3, 4, 4, 6, 6 ...
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RaggedStep:
    """Shapes: R rows, T packed tokens, L logit rows (sampled positions), G KV groups, S slots. int32 unless said."""

    slots: torch.Tensor  # [R]
    q_len: torch.Tensor  # [R] tokens of each row
    cu_q: torch.Tensor  # [R + 1] exclusive scan of q_len
    base: torch.Tensor  # [R] KV cells committed before the step; query i of a row stands at position base + i
    kv_len: torch.Tensor  # [R] base + q_len: cells that the row's last query reads
    n_out: torch.Tensor  # [R] sampled positions of each row: its last n_out tokens
    cu_out: torch.Tensor  # [R + 1] exclusive scan of n_out
    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    rows: torch.Tensor  # [T] int64, the row of each token
    cells: tuple[torch.Tensor, ...]  # per group [T] int64: page * page_size + offset where the token's KV is written
    out_tokens: torch.Tensor  # [L] int64, index into T of each logit row
    out_rows: torch.Tensor  # [L] int64, the row of each logit row
    page_tables: tuple[torch.Tensor, ...]  # per group [S, pages of the context]; row `slots[r]` belongs to row r
    page_size: int
    most_tokens: int | None = None  # bound on q_len, of the bucket; None: T
