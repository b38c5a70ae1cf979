"""Attention on CPUs in which a token's result depends on its position and on the ids before it alone, bit for bit.

torch's kernels sum in an order that follows from the sizes they get. Here all sizes of a call follow from the
positions of its tile: the queries at TILE * t .. TILE * t + TILE - 1, whichever of them this step has, against the
cells up to the tile's end. Where a query stands in its tile follows from its position, too.

    tile t of a row     | queries: position 8t ... 8t+7, those of other steps filled up and thrown away |
    against             | cells first .. 8t+7; masked, and zeros, where nothing is written yet          |
"""

from __future__ import annotations

import torch

from stretto.attn.api import LayerSpec
from stretto.attn.torch_ragged import Batch, TorchRagged
from stretto.ragged import RaggedStep

TILE = 8  # few enough that one decoded token pays little for the others, many enough for prompts


class TorchFixed(TorchRagged):
    """`AttentionBackend`. One call for each tile of each row."""

    def metadata(self, step: RaggedStep, group: int, layer: LayerSpec) -> list[Batch]:
        slots, q_len = step.slots.tolist(), step.q_len.tolist()
        base, starts = step.base.tolist(), step.cu_q.tolist()
        return [self._tile(step.page_tables[group][slots[r]], step.page_size, layer.window, tile, base[r], q_len[r],
                           starts[r])
                for r in range(len(q_len)) if q_len[r]
                for tile in range(base[r] // TILE, (base[r] + q_len[r] - 1) // TILE + 1)]

    @staticmethod
    def _tile(table: torch.Tensor, size: int, window: int | None, tile: int, base: int, q_len: int,
              start: int) -> Batch:
        """`table` [pages] of the row, whose tokens stand at `start` of the packed ones and at `base` of the row."""
        device = table.device
        first = max(0, tile * TILE - window + 1) if window else 0
        end = (tile + 1) * TILE
        columns = torch.arange(first // size, -(-end // size), device=device).clamp_(max=len(table) - 1)
        position = torch.arange(tile * TILE, end, device=device)
        token = (position - base).clamp(0, q_len - 1) + start
        real = (position >= base) & (position < base + q_len)
        cell = torch.arange(first, end, device=device)
        mask = cell <= position[:, None]
        if window is not None:
            mask &= cell > position[:, None] - window
        oldest = max(0, base - window + 1 - first) if window else 0  # pages before it may be another's by now
        return Batch(token[None], table[columns].long()[None], mask[None, None], causal=False, cells=end - first,
                     skipped=first % size, where=real[None], held=(oldest, base + q_len - first))
