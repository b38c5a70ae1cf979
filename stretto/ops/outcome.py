"""What a step proved of each row: made by `ops.commit.judge`, written by `SlotTable.commit`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Commit:
    """Per row, after the step. Shapes: R rows, W the widest window."""

    live: torch.Tensor  # [R] bool: the row fed something
    ids: torch.Tensor  # [R, W] int64: emitted ids, then undefined
    n_new: torch.Tensor  # [R] int32
    accepted: torch.Tensor  # [R] int32: ids beyond the one that any step emits, so emitted = accepted + steps, exactly
    known: torch.Tensor  # [R] int32
    length: torch.Tensor  # [R] int32
    ndraft: torch.Tensor  # [R] int32
    done: torch.Tensor  # [R] bool
