"""The target while drafters are trained: frozen, in transformers' implementation; its hidden states are computed once.

Of every position of the data the states after some layers are kept on the device (2 bytes a number: 10 million tokens
with four states of 576 numbers are 46 GB), and the likeliest ids with their probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from stretto.bench.engines import from_gguf
from stretto.model.hub import resolve_model
from training.answers import Dataset

LIKELY = 8  # ids whose probabilities are kept


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
        """ids [B, T] -> taps [B, T, n, E], and the head's input [B, T, E]."""
        kept: dict[int, torch.Tensor] = {}

        def keep(i: int):
            return lambda _module, _inputs, out: kept.__setitem__(i, out[0] if isinstance(out, tuple) else out)

        hooks = [self.network.model.layers[i].register_forward_hook(keep(i)) for i in set(self.taps)]
        try:
            last = self.network.model(input_ids=ids, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack([kept[i] for i in self.taps], 2), last

    @torch.no_grad()
    def remember(self, data: Dataset, tokens: int = 32_768) -> Memory:
        """Of all positions of the data."""
        width, n = self.config.hidden_size, len(data.ids)
        memory = Memory(torch.zeros(n, len(self.taps), width, dtype=self.embedding.dtype, device=data.device),
                        torch.zeros(n, LIKELY, dtype=torch.int32, device=data.device),
                        torch.zeros(n, LIKELY, dtype=torch.float32, device=data.device))
        for chosen in data.groups(data.lengths.argsort(), tokens):
            most = int(data.lengths[chosen].max())
            sequences = chosen.to(data.device)
            rows = data.start[sequences][:, None] + torch.arange(most, device=data.device)
            real = rows < data.stop[sequences][:, None]
            taps, last = self.states(data.ids[rows.clamp(max=n - 1)])
            memory.taps[rows[real]] = taps[real]
            real &= data.position[rows.clamp(max=n - 1)] + 1 >= data.prompt[sequences][:, None]  # before an answer's id
            rows, last = rows[real], last[real]
            for some, hidden in zip(rows.split(8192), last.split(8192), strict=True):
                found = (hidden @ self.head.t()).float().softmax(-1).topk(LIKELY)
                memory.ids[some], memory.probabilities[some] = found.indices.int(), found.values
        return memory


@dataclass(frozen=True)
class Memory:
    """What the target makes of N positions: states, and, for those before an id of an answer, the likeliest next ids
    and their probabilities."""

    taps: torch.Tensor  # [N, n, E]
    ids: torch.Tensor  # [N, LIKELY] int32
    probabilities: torch.Tensor  # [N, LIKELY] float32


def load_folder(path: Path, dtype: torch.dtype):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
