"""Qwen3.5: Qwen3-Next whose checkpoints hold the projections one by one, with experts or with an MLP in every layer."""

from __future__ import annotations

from itertools import pairwise

from stretto.model.config import ModelConfig
from stretto.model.decoder import Decoder
from stretto.model.families.qwen3_next import GatedDeltaNet, Sizes, some_experts, with_states
from stretto.model.layers import Linear
from stretto.model.shard import rows_of
from stretto.model.weights import Weights


def qwen3_5(config: ModelConfig, w: Weights, context: int) -> Decoder:
    mlp = some_experts if config.value("num_experts") else None
    return with_states(config, w, context, SeparateGatedDeltaNet, mlp)


class SeparateGatedDeltaNet(GatedDeltaNet):
    """The checkpoint holds a matrix for q k v and one each for z, b and a."""

    def projections(self, w: Weights, name: str, whole: Sizes, hidden: int) -> Linear:
        edges, heads = (0, whole.keys, 2 * whole.keys, whole.channels), whole.v_heads
        qkv = [rows_of(w.shard, f"{name}.in_proj_qkv", whole.channels, first, last - first)
               for first, last in pairwise(edges)]
        return Linear(w, [*qkv, rows_of(w.shard, f"{name}.in_proj_z", whole.values),
                          *(rows_of(w.shard, f"{name}.in_proj_{part}", heads) for part in "ba")], hidden)
