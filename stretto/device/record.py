"""Packs what a step did into one int32 tensor (layout: `stretto.wire.unpack_result`), one copy to the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stretto.ops.commit import Commit
from stretto.ragged import RaggedStep
from stretto.wire import FAULT_WORDS, pack_faults


@dataclass(frozen=True)
class StepOutput:
    """What a step did: the header is known on the host, the body is on the device until somebody copies it."""

    header: list[int]
    body: torch.Tensor  # int32, flat
    faults: tuple[tuple[int, str], ...] = ()  # (row, what its logit processor did wrong)

    def packed(self, body: np.ndarray) -> np.ndarray:
        """The packed result, once the body has come to the host."""
        tail = pack_faults(self.faults)
        header = np.asarray(self.header, dtype=np.int32)
        header[FAULT_WORDS] = len(tail)
        return np.concatenate([header, body, tail])


def pack_rows(step: RaggedStep, rows: torch.Tensor, outcome: Commit, offered: torch.Tensor, offer_width: torch.Tensor,
              wants: torch.Tensor) -> torch.Tensor:
    """[R, row words]. rows [R, 3] as planned; offered [R, K] int64; offer_width [R]; wants [R]: LOGPROBS + 1."""
    if rows.is_cuda:
        from stretto.ops.triton_step import launch_pack

        return launch_pack(step, rows, outcome, offered, offer_width, wants)
    return pack_rows_reference(step, rows, outcome, offered, offer_width, wants)


def pack_rows_reference(step: RaggedStep, rows: torch.Tensor, outcome: Commit, offered: torch.Tensor,
                        offer_width: torch.Tensor, wants: torch.Tensor) -> torch.Tensor:
    """`pack_rows` in torch's operations."""
    epoch = torch.where(outcome.live, rows[:, 1], -1)
    verified = (step.n_out - 1).clamp(min=0)
    flags = outcome.done.to(torch.int32) | (wants << 1)
    heads = [rows[:, 0], epoch, step.q_len, verified, outcome.length, outcome.known, flags, outcome.n_new, offer_width]
    table = torch.stack([h.to(torch.int32) for h in heads], 1)
    return torch.cat([table, outcome.ids.to(torch.int32), offered.to(torch.int32)], 1)


def pack_body(table: torch.Tensor, new_scores: torch.Tensor | None, prompt_scores: torch.Tensor | None,
              pooled: torch.Tensor | None = None) -> torch.Tensor:
    """table [R, row words]; new_scores [R, W, score words]; prompt_scores [N, 2 + score words]; pooled [R, hidden_size]
    float32. Flat int32."""
    bits = pooled.contiguous().view(torch.int32) if pooled is not None else None
    return torch.cat([part.flatten() for part in (table, new_scores, prompt_scores, bits) if part is not None])
