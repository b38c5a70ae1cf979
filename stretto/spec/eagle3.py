"""EAGLE3: a decoder layer over several of the target's hidden states (Li et al. 2025, arXiv 2503.01840).

    f = fc([hidden of three layers at p-1])                              or the layer's own output, for later drafts
    x = [input_layernorm(embedding of token p) | hidden_norm(f)];  h = f + attention(x) ...;  logits = lm_head(norm(h))

Two layouts. The original one (`LlamaForCausalLMEagle3`): `midlayer` or `layers.0`, `fc`, `norm`, `lm_head` over a
reduced vocabulary, `d2t` (target id = draft id + d2t[draft id]); layers of the target in
`eagle_config.eagle_aux_hidden_state_layer_ids`, counted as "after layer i". And that of vLLM's speculators: the layer's
config nested in `transformer_layer_config`, layer ids counted as "before layer i", flags `norm_before_residual` and
`norm_before_fc`. Without ids both read what comes before layers 2, L/2 and L-3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stretto.attn.api import Attend
from stretto.model.config import ModelConfig
from stretto.model.layers import Embedding, Linear, RMSNorm
from stretto.spec.api import Drafter, DrafterCaps
from stretto.spec.chain import ChainDrafter
from stretto.spec.context import DrafterContext, DrafterError, DrafterSizes, Target
from stretto.spec.eagle import chain_caps, plain_name
from stretto.spec.layers import DraftLayer, kv_groups, layer_specs, rotary_of, style_of
from stretto.spec.repos import (
    DraftRepo,
    check_equal,
    check_made_for,
    check_vocabulary,
    open_repo,
    tap_names,
)
from stretto.spec.sources import draft_weights, parse_config, renamed
from stretto.spec.vocabulary import DraftHead, count_head_drafter


@dataclass(frozen=True)
class Layout:
    """What a config.json says, in either layout."""

    config: ModelConfig
    taps: tuple[str, ...]  # of the target, in the order in which `fc` takes them
    draft_vocab: int | None
    norm_before_residual: bool
    norm_before_fc: bool  # one norm over all taps side by side
    fc_norm: bool  # one norm a tap
    norm_output: bool  # later drafts continue from the normed output


def tensor_name(name: str) -> str | None:
    """The layer's names are `layers.0`; the first checkpoints call it `midlayer`. Copies of the target's own weights
    that training left in the file are not the drafter's."""
    name = plain_name(name)
    if name.startswith("verifier_"):
        return None
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def default_layers(n: int) -> list[int]:
    """After which layers the hidden states are taken where the config does not say: before layers 2, n/2 and n-3."""
    return [1, n // 2 - 1, n - 4]


def read_layout(repo: DraftRepo, target: Target) -> Layout:
    check_made_for(repo, target)
    raw = repo.raw
    nested: Mapping[str, Any] | None = raw.get("transformer_layer_config")
    eagle = raw.get("eagle_config") or {}
    before, after = raw.get("eagle_aux_hidden_state_layer_ids"), eagle.get("eagle_aux_hidden_state_layer_ids")
    if not eagle.get("use_aux_hidden_state", True):
        raise DrafterError(f"{repo.name}: use_aux_hidden_state is false: it reads no layers of the target, which makes"
                           " it no EAGLE3 head; try it as eagle")
    layers = [i - 1 for i in before] if before else list(after) if after else default_layers(target.n_layers)
    count = raw.get("num_aux_hidden_states")
    if count is not None and count != len(layers):
        raise DrafterError(f"{repo.name}: num_aux_hidden_states is {count}, and {len(layers)} layers are named")
    config = parse_config(nested if nested is not None else raw)
    check_equal("hidden size", repo, int(raw.get("target_hidden_size") or config.hidden_size), target,
                target.hidden_size)
    check_vocabulary(repo, config.vocab_size, target)
    return Layout(
        config=config, taps=tap_names(repo, layers, target), draft_vocab=raw.get("draft_vocab_size"),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_before_fc=bool(raw.get("norm_before_fc", eagle.get("norm_before_fc", False))),
        fc_norm=bool(raw.get("fc_norm") or raw.get("use_aux_norm")), norm_output=bool(raw.get("norm_output", False)))


class Eagle3Model:
    """`spec.chain.ChainModel`."""

    shift = 1

    def __init__(self, repo: DraftRepo, layout: Layout, context: DrafterContext):
        c, self.layout = layout.config, layout
        source = renamed(repo.source(), tensor_name, context.device)
        w, names = draft_weights(source, context), set(source.names())
        assert context.target is not None
        eps, width = c.norm_eps, context.target.hidden_size
        self.layers, self.max_position = layer_specs(c), c.max_position
        self.fc = Linear(w, [("fc", c.hidden_size)], len(layout.taps) * width, bias="fc.bias" in names)
        self.input_norm = RMSNorm(w, "input_norm", len(layout.taps) * width, eps) if layout.norm_before_fc else None
        self.tap_norms = [RMSNorm(w, f"fc_norm.{i}", width, eps) for i in range(len(layout.taps))] \
            if layout.fc_norm else []
        self.embed = Embedding(w, "embed_tokens", c.vocab_size, c.hidden_size) if "embed_tokens.weight" in names \
            else context.lent_embedding()
        self.hidden_norm = RMSNorm(w, "layers.0.hidden_norm", c.hidden_size, eps)
        self.norms = [RMSNorm(w, f"layers.{i}.input_layernorm", c.hidden_size, eps) for i in range(c.n_layers)]
        style = style_of(c)
        self.decoder = [DraftLayer(c, w, f"layers.{i}", i, style, None if i else 2 * c.hidden_size)
                        for i in range(c.n_layers)]
        self.norm = RMSNorm(w, "norm", c.hidden_size, eps)
        self.head = DraftHead(repo, source, w, context, layout.draft_vocab, c.hidden_size)
        self.ids = self.head.ids
        self.rotary = rotary_of(c, context, context.width)
        w.fill()

    def features(self, taps: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [taps[name] for name in self.layout.taps]
        if self.tap_norms:
            parts = [norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)]
        joined = torch.cat(parts, 1)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def forward(self, ids: torch.Tensor, features: torch.Tensor | None, positions: torch.Tensor,
                attend: Attend) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert features is not None
        rope = self.rotary.at(positions)
        normed = self.hidden_norm(features)
        residual = (normed if self.layout.norm_before_residual else features).clone()
        hidden = self.decoder[0](torch.cat([self.norms[0](self.embed(ids)), normed], 1), residual, rope, attend)
        for norm, layer in zip(self.norms[1:], self.decoder[1:], strict=True):
            hidden = layer(norm(hidden), hidden, rope, attend)
        out = self.norm(hidden)
        return out, out if self.layout.norm_output else hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


class Eagle3:
    """`spec.context.DrafterKind`. Settings: the draft checkpoint's folder or hub id."""

    def caps(self, settings: str) -> DrafterCaps:
        return chain_caps(frozenset({"hidden.*"}))  # which layers depends on the target: see `sizes`

    def sizes(self, settings: str, target: Target) -> DrafterSizes:
        repo = open_repo("eagle3", settings)
        layout = read_layout(repo, target)
        parameters = count_head_drafter(repo.source(), tensor_name, layout.config.hidden_size)
        return DrafterSizes(chain_caps(frozenset(layout.taps)), parameters, kv_groups(layout.config),
                            len(set(layout.taps)) * target.hidden_size)

    def make(self, settings: str, context: DrafterContext) -> Drafter:
        assert context.target is not None
        repo = open_repo("eagle3", settings)
        layout = read_layout(repo, context.target)
        return ChainDrafter(Eagle3Model(repo, layout, context), chain_caps(frozenset(layout.taps)), context)
