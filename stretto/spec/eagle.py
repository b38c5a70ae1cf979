"""EAGLE: one decoder layer that continues the target's last hidden states (Li et al. 2024, arXiv 2401.15077).

    x = fc([embedding of token p | hidden of p-1]);  h = layer(x);  logits = the target's head of h;  next hidden: h

Checkpoints in the Llama layout: `fc`, `layers.i.*`, with or without the prefix `model.`. The first layer has no input
norm, and there is no final norm. Embedding and head are the target's; copies of them in the checkpoint are left alone.
"""

from __future__ import annotations

import torch

from stretto.attn.api import Attend
from stretto.model.config import ModelConfig
from stretto.model.layers import Linear, RMSNorm
from stretto.spec.api import Drafter, DrafterCaps
from stretto.spec.chain import ChainDrafter, last_hidden
from stretto.spec.context import DrafterContext, DrafterSizes, Target
from stretto.spec.layers import DraftLayer, kv_groups, layer_specs, rotary_of, style_of
from stretto.spec.repos import DraftRepo, check_equal, check_vocabulary, count_parameters, open_repo
from stretto.spec.sources import draft_weights, parse_config, renamed

WIDEST = 16  # drafts a row; each costs a pass of the head, so more than a few seldom pay


def chain_caps(taps: frozenset[str]) -> DrafterCaps:
    """Of every head that continues hidden states: own KV, ingest of every row, one cell a draft."""
    return DrafterCaps(shape="chain", max_width=WIDEST, taps=taps, ingest="same_step", kv="own", lookahead=WIDEST,
                       q="full", seam=True)


def plain_name(name: str) -> str:
    return name.removeprefix("model.")


class EagleModel:
    """`spec.chain.ChainModel`."""

    shift = 1
    features = staticmethod(last_hidden)

    def __init__(self, repo: DraftRepo, config: ModelConfig, context: DrafterContext):
        assert context.model is not None
        source = renamed(repo.source(), plain_name, context.device)
        w = draft_weights(source, context)
        hidden = config.hidden_size
        self.layers, self.max_position = layer_specs(config), config.max_position
        self.fc = Linear(w, [("fc", hidden)], 2 * hidden, bias="fc.bias" in set(source.names()))
        style = style_of(config)
        self.decoder = [DraftLayer(config, w, f"layers.{i}", i, style) for i in range(config.n_layers)]
        self.norms = [RMSNorm(w, f"layers.{i}.input_layernorm", hidden, config.norm_eps)
                      for i in range(1, config.n_layers)]
        self.rotary = rotary_of(config, context, context.width)
        w.ignore("embed_tokens.weight", "lm_head.weight")
        w.fill()
        self.embed, self.logits = context.lent_embedding(), context.model.logits

    def forward(self, ids: torch.Tensor, features: torch.Tensor | None, positions: torch.Tensor,
                attend: Attend) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert features is not None
        rope = self.rotary.at(positions)
        hidden = self.fc(torch.cat([self.embed(ids), features], 1))
        hidden = self.decoder[0](hidden, hidden, rope, attend)
        for norm, layer in zip(self.norms, self.decoder[1:], strict=True):
            hidden = layer(norm(hidden), hidden, rope, attend)
        return hidden, hidden


class Eagle:
    """`spec.context.DrafterKind`. Settings: the draft checkpoint's folder or hub id."""

    def caps(self, settings: str) -> DrafterCaps:
        return chain_caps(frozenset({"hidden.last"}))

    def sizes(self, settings: str, target: Target) -> DrafterSizes:
        repo, config = self._open(settings, target)
        parameters = count_parameters(repo.source(), lambda n: "embed_tokens" not in n and "lm_head" not in n)
        return DrafterSizes(self.caps(settings), parameters, kv_groups(config), target.hidden_size)

    def make(self, settings: str, context: DrafterContext) -> Drafter:
        assert context.target is not None
        repo, config = self._open(settings, context.target)
        return ChainDrafter(EagleModel(repo, config, context), self.caps(settings), context)

    @staticmethod
    def _open(settings: str, target: Target) -> tuple[DraftRepo, ModelConfig]:
        repo = open_repo("eagle", settings)
        config = parse_config(repo.raw)
        check_equal("hidden size", repo, config.hidden_size, target, target.hidden_size)
        check_vocabulary(repo, config.vocab_size, target)
        return repo, config
