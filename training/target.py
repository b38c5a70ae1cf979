"""The target while drafters are trained: frozen, in transformers' implementation; its hidden states are computed once.

Of every position of the data the states after some layers are kept on the device (2 bytes a number: 10 million tokens
with five states of 576 numbers are 58 GB), and the state that its head reads, from which its probabilities follow.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from stretto.bench.engines import from_gguf
from stretto.model.hub import resolve_model
from training.answers import Dataset


class Teacher:
    """`taps`: after which layers hidden states are kept, 0-based."""

    def __init__(self, model: str | None, taps: tuple[int, ...], device: torch.device, dtype: torch.dtype):
        path = resolve_model(model)
        network = from_gguf(path, dtype) if path.suffix == ".gguf" else load_folder(path, dtype)
        self.network = network.to(device).eval().requires_grad_(False)
        self.config, self.taps = network.config, taps
        self.name = path.stem.partition(".")[0] if path.suffix == ".gguf" else path.name
        self.embedding: torch.Tensor = network.get_input_embeddings().weight  # [V, E]
        self.head: torch.Tensor = network.get_output_embeddings().weight  # [V, E]
        self.norm: torch.Tensor = network.model.norm.weight

    @torch.no_grad()
    def states(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [B, T] -> taps side by side [B, T, taps * E], and the head's input [B, T, E]."""
        kept: dict[int, torch.Tensor] = {}

        def keep(i: int):
            return lambda _module, _inputs, out: kept.__setitem__(i, out[0] if isinstance(out, tuple) else out)

        hooks = [self.network.model.layers[i].register_forward_hook(keep(i)) for i in set(self.taps)]
        try:
            last = self.network.model(input_ids=ids, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([kept[i] for i in self.taps], -1), last

    @torch.no_grad()
    def remember(self, data: Dataset, tokens: int = 65_536) -> tuple[torch.Tensor, torch.Tensor]:
        """States of all positions of the data: [N, taps * E] and [N, E]."""
        width, dtype = self.config.hidden_size, self.embedding.dtype
        taps = torch.zeros(len(data.ids), len(self.taps) * width, dtype=dtype, device=data.device)
        last = torch.zeros(len(data.ids), width, dtype=dtype, device=data.device)
        for chosen in data.groups(data.lengths.argsort(), tokens):
            most = int(data.lengths[chosen].max())
            sequences = chosen.to(data.device)
            rows = data.start[sequences][:, None] + torch.arange(most, device=data.device)
            real = rows < data.stop[sequences][:, None]
            rows = rows.clamp(max=len(data.ids) - 1)
            found = self.states(data.ids[rows])
            taps[rows[real]], last[rows[real]] = found[0][real], found[1][real]
        return taps, last


def load_folder(path: Path, dtype: torch.dtype):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
