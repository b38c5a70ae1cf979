"""A model without weights whose answers are written down: any behaviour of the engine and its APIs can be provoked.

A prompt holds one *cue*, a token id that starts a script; from the cue on, the model says the script, id by id, then
the end id for ever. It still is a real citizen of the engine: which script runs, and how far it has come, is read from
the KV memory through attention (uniform weights over all earlier tokens give the cue's position back, exactly), so a
stale, misplaced or unmapped cell changes the answer. Prompts without a cue continue by `id + 1`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from stretto.attn.api import Attend, LayerSpec

CERTAIN = 30.0  # logit of the scripted id; all others are 0, so sampling at ordinary temperatures follows the script


class ScriptedModel:
    """`model.api.CausalModel`. scripts: cue id -> the ids said after the prompt's last token."""

    def __init__(self, vocab_size: int, scripts: Mapping[int, Sequence[int]], end_id: int, max_position: int = 4096,
                 certainty: float = CERTAIN, device: torch.device | None = None):
        self.vocab_size, self.hidden_size, self.max_position = vocab_size, 3, max_position
        self.device, self.dtype = device or torch.device("cpu"), torch.float32
        self.layers = (LayerSpec(n_heads=1, n_kv_heads=1, head_dim=8, scale=1.0),)
        self.end_id, self.certainty = end_id, certainty
        longest = max((len(s) for s in scripts.values()), default=0)
        self.scripts = torch.full((len(scripts) + 1, longest + 1), end_id, device=self.device)
        self.script_of = torch.zeros(vocab_size, dtype=torch.int64, device=self.device)  # 0: no cue
        for number, (cue, ids) in enumerate(scripts.items(), 1):
            self.script_of[cue] = number
            self.scripts[number, : len(ids)] = torch.tensor(list(ids), dtype=torch.int64)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend,
                taps: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Returns [T, 3]: the token's id, the script's number, and how many tokens ago its cue stood."""
        script = self.script_of[ids].float()
        is_cue = (script > 0).float()
        v = torch.zeros(len(ids), 1, 8, device=ids.device)
        v[:, 0, 0], v[:, 0, 1], v[:, 0, 2] = is_cue, script, is_cue * positions
        nothing = torch.zeros_like(v)
        seen = attend(0, nothing, nothing, v)[:, 0]  # the mean of v over positions 0..p
        total = (seen * (positions + 1)[:, None]).round()
        since = torch.where(total[:, 0] == 1, positions - total[:, 2], -1.0)
        hidden = torch.stack([ids.float(), total[:, 1], since], 1)
        if taps is not None:
            taps.update(dict.fromkeys(taps, hidden))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, 3] -> [L, V]: `certainty` at the next id of the script, 0 elsewhere."""
        ids, script, since = hidden.long().unbind(1)
        step = since.clamp(0, self.scripts.shape[1] - 1)
        scripted = self.scripts[script.clamp(0, len(self.scripts) - 1), step]
        following = torch.where(since >= 0, scripted, (ids + 1) % self.vocab_size)
        out = torch.zeros(len(hidden), self.vocab_size, device=hidden.device)
        return out.scatter_(1, following[:, None], self.certainty)
