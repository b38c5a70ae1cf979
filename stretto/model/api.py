"""What a model is to the engine."""

from __future__ import annotations

from typing import Protocol

import torch

from stretto.attn.api import Attend, LayerSpec, StateSpec


class CausalModel(Protocol):
    """A decoder-only language model over packed tokens. Weights are loaded, on one device, ready to run.

    Tap names: "hidden.N" is the residual stream after layer N (0-based), "hidden.last" the hidden states after the
    final norm, that is the input of the head."""

    vocab_size: int
    hidden_size: int
    max_position: int  # positions the model was trained for, rope scaling included
    layers: tuple[LayerSpec, ...]  # those that attend, in the order of the numbers that they give to `attend`
    states: tuple[StateSpec, ...]  # those that keep a state, in the order of `StepStates.parts`; may be missing
    dtype: torch.dtype
    device: torch.device
    graphs: bool  # forward and logits may be captured in a CUDA graph; a model without the attribute may not
    fixed: bool  # rounding does not depend on the batch; a model without the attribute promises nothing

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend,
                taps: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """ids [T] int64, positions [T] int64. Returns the hidden states after the final norm, [T, hidden_size].
        `taps`, if given, holds the wanted names as keys; their values are filled in, each [T, hidden_size]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [L, hidden_size] -> [L, vocab_size], float32."""
        ...
