"""A predictor made of one more of the target's own layers, as Qwen3-Next and Qwen3.5 ship it under "mtp.": a layer that
attends, its heads gated, with experts or an MLP, whatever the target's other layers are.

    x = fc(norm of the embedding of token p | norm of the hidden state of p-1);  h = norm(layer(x));  target's head
"""

from __future__ import annotations

from dataclasses import replace

import torch

from stretto.attn.api import Attend
from stretto.model.config import ModelConfig
from stretto.model.decoder import Decoder, DecoderLayer, reorders
from stretto.model.layers import Linear
from stretto.model.source import WeightSource
from stretto.spec.chain import last_hidden
from stretto.spec.context import DrafterContext, DrafterError
from stretto.spec.layers import layer_specs, rotary_of
from stretto.spec.sources import draft_weights, renamed

PREFIX = "mtp."


def layer_config(config: ModelConfig, source: WeightSource) -> ModelConfig:
    """The target's, of a model that has this one layer alone: of experts, or (as the checkpoint has it) an MLP."""
    dense = f"{PREFIX}layers.0.mlp.gate_proj.weight" in set(source.names())
    kind = {"mlp_only_layers": [0] if dense else [], "decoder_sparse_step": 1}
    return replace(config, n_layers=1, windows=(None,), raw={**config.raw, **kind})


class OwnLayerModel:
    """`spec.chain.ChainModel`."""

    shift = 1
    features = staticmethod(last_hidden)

    def __init__(self, source: WeightSource, config: ModelConfig, context: DrafterContext):
        """`config`: the target's. Raises DrafterError for a target that is none of our decoders."""
        if not isinstance(context.model, Decoder):
            raise DrafterError(f"drafter mtp: a predictor under {PREFIX!r} is one more layer of the target's kind, and"
                               f" {config.architecture} is not built natively here: serve it without")
        c, style = layer_config(config, source), context.model.style
        w = draft_weights(renamed(source, _alone, context.device), context)
        self.layers, self.max_position = layer_specs(c), c.max_position
        self.token_norm, self.hidden_norm, self.output_norm = (
            style.norm(w, f"{PREFIX}{name}", c.hidden_size, c.norm_eps)
            for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"))
        self.projection = Linear(w, [(f"{PREFIX}fc", c.hidden_size)], 2 * c.hidden_size)
        self.decoder = DecoderLayer(c, w, 0, style)
        self.rotary = rotary_of(c, context, context.width, reorders(c, style))
        w.fill()
        self.embed, self.logits = context.lent_embedding(), context.model.logits

    def forward(self, ids: torch.Tensor, features: torch.Tensor | None, positions: torch.Tensor,
                attend: Attend) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert features is not None
        pair = (self.token_norm(self.embed(ids)), self.hidden_norm(features))
        out = self.decoder(self.projection(torch.cat(pair, 1)), self.rotary.at(positions), attend)
        out = self.output_norm(out)
        return out, out


def _alone(name: str) -> str | None:
    """The layer's tensors as a model of this one layer names them; other parts as they are; None: the target's."""
    layer = f"{PREFIX}layers.0."
    if name.startswith(layer):
        return "model.layers.0." + name.removeprefix(layer)
    return name if name.startswith(PREFIX) else None
