"""MTP (NEXTN): the multi-token prediction layer that ships in a target's checkpoint (DeepSeek-V3, arXiv 2412.19437).

    x = projection of the normed embedding of token p and the normed hidden of p-1;  h = norm(layer(x));  target's head

Three namings. DeepSeek and GLM append it as one more layer: `model.layers.L.{enorm, hnorm, eh_proj, shared_head.norm}`,
embedding first. MiMo: `model.mtp_layers.0.{token_layernorm, hidden_layernorm, input_proj, final_layernorm}`, hidden
first. Qwen3-Next and Qwen3.5, under `mtp.`: one more layer of their own kind (`own_layer.py`). Embedding and head are
the target's. Of several such layers the first is used, again and again, as one predictor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from stretto.attn.api import Attend
from stretto.model.config import ModelConfig, read_config
from stretto.model.dequantize import dequantized
from stretto.model.layers import Linear, RMSNorm
from stretto.model.quantization import parse_quantization
from stretto.model.source import SafetensorsSource, WeightSource
from stretto.spec.api import Drafter, DrafterCaps
from stretto.spec.chain import ChainDrafter, ChainModel, last_hidden
from stretto.spec.context import DrafterContext, DrafterError, DrafterSizes, Target
from stretto.spec.eagle import chain_caps
from stretto.spec.layers import DraftLayer, kv_groups, layer_specs, rotary_of, style_of
from stretto.spec.own_layer import PREFIX, OwnLayerModel, layer_config
from stretto.spec.repos import count_parameters, split_settings
from stretto.spec.sources import draft_weights, parse_config, renamed


@dataclass(frozen=True)
class Naming:
    """Where a checkpoint keeps the layer, and how it calls its parts."""

    prefix: str
    token_norm: str
    hidden_norm: str
    projection: str
    output_norm: str
    token_first: bool
    own_layer: bool = False  # a layer of the target's kind


def namings(n_layers: int) -> tuple[Naming, ...]:
    return (Naming(f"model.layers.{n_layers}.", "enorm", "hnorm", "eh_proj", "shared_head.norm", True),
            Naming("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm",
                   False),
            Naming(PREFIX, "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", True, own_layer=True))


class MTPModel:
    """`spec.chain.ChainModel`."""

    shift = 1
    features = staticmethod(last_hidden)

    def __init__(self, naming: Naming, source: WeightSource, config: ModelConfig, context: DrafterContext):
        assert context.model is not None
        c, self.naming = config, naming
        own = renamed(source, lambda n: "mtp." + n.removeprefix(naming.prefix) if n.startswith(naming.prefix) else None,
                      context.device)
        w = draft_weights(own, context)
        w.ignore("mtp.embed_tokens.weight", "mtp.shared_head.head.weight")
        self.layers, self.max_position = layer_specs(c)[-1:], c.max_position
        self.token_norm = RMSNorm(w, f"mtp.{naming.token_norm}", c.hidden_size, c.norm_eps)
        self.hidden_norm = RMSNorm(w, f"mtp.{naming.hidden_norm}", c.hidden_size, c.norm_eps)
        self.projection = Linear(w, [(f"mtp.{naming.projection}", c.hidden_size)], 2 * c.hidden_size)
        self.input_norm = RMSNorm(w, "mtp.input_layernorm", c.hidden_size, c.norm_eps)
        self.decoder = DraftLayer(c, w, "mtp", 0, style_of(c))
        self.output_norm = RMSNorm(w, f"mtp.{naming.output_norm}", c.hidden_size, c.norm_eps)
        self.rotary = rotary_of(c, context, context.width)
        w.fill()
        self.embed, self.logits = context.lent_embedding(), context.model.logits

    def forward(self, ids: torch.Tensor, features: torch.Tensor | None, positions: torch.Tensor,
                attend: Attend) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert features is not None
        token, hidden = self.token_norm(self.embed(ids)), self.hidden_norm(features)
        pair = (token, hidden) if self.naming.token_first else (hidden, token)
        residual = self.projection(torch.cat(pair, 1))
        out = self.output_norm(self.decoder(self.input_norm(residual), residual, self.rotary.at(positions), attend))
        return out, out


class MTP:
    """`spec.context.DrafterKind`. No settings: the weights lie in the target's own checkpoint."""

    def caps(self, settings: str) -> DrafterCaps:
        return chain_caps(frozenset({"hidden.last"}))

    def sizes(self, settings: str, target: Target) -> DrafterSizes:
        naming, source, config = self._open(settings, target)
        one = layer_config(config, source) if naming.own_layer else replace(config, windows=config.windows[-1:])
        count = count_parameters(source, lambda n: n.startswith(naming.prefix))
        return DrafterSizes(self.caps(settings), count, kv_groups(one), target.hidden_size)

    def make(self, settings: str, context: DrafterContext) -> Drafter:
        assert context.target is not None
        naming, source, config = self._open(settings, context.target)
        model: ChainModel = (OwnLayerModel(source, config, context) if naming.own_layer else
                             MTPModel(naming, source, config, context))
        return ChainDrafter(model, self.caps(settings), context)

    @staticmethod
    def _open(settings: str, target: Target) -> tuple[Naming, WeightSource, ModelConfig]:
        path, _ = split_settings("mtp", settings, ())
        if path:
            raise DrafterError(f"drafter mtp reads the target's own checkpoint; {path!r} is one too many: leave it out")
        if target.path.suffix == ".gguf":
            raise DrafterError(f"drafter mtp: {target.path.name} is a GGUF file, whose MTP layers are not read; serve"
                               " the folder in Hugging Face layout")
        raw = read_config(target.path)[0]
        source = dequantized(SafetensorsSource(target.path), parse_quantization(raw))
        names = set(source.names())
        for naming in namings(target.n_layers):
            if f"{naming.prefix}{naming.projection}.weight" in names:
                return naming, source, (ModelConfig.from_hf(raw) if naming.own_layer else
                                        parse_config({**raw, "model_type": _family(raw)}))
        raise DrafterError(f"target {target.name} ships no MTP layer: its checkpoint holds neither "
                           + " nor ".join(f"{n.prefix}{n.projection}.weight" for n in namings(target.n_layers)))


def _family(raw: Mapping[str, Any]) -> str:
    """MiMo is Qwen2 with one more layer; others name their own family."""
    kind = str(raw.get("model_type"))
    return {"mimo": "qwen2"}.get(kind, kind)
