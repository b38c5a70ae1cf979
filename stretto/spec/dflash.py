"""DFLASH: a block in one pass, every position by itself (arXiv 2602.06036). See `spec.block`.

Checkpoints of z-lab (`dflash_config` with `target_layer_ids` and `mask_token_id`, `block_size`) and of vLLM's
speculators (`transformer_layer_config`, `aux_hidden_state_layer_ids`, `d2t` for a reduced vocabulary).
"""

from __future__ import annotations

from stretto.spec.api import Drafter, DrafterCaps
from stretto.spec.block import Backbone, BlockDrafter, block_caps, read_layout, tensor_name
from stretto.spec.context import DrafterContext, DrafterSizes, Target
from stretto.spec.layers import kv_groups
from stretto.spec.repos import open_repo
from stretto.spec.vocabulary import count_head_drafter


class DFlash:
    """`spec.context.DrafterKind`. Settings: the draft checkpoint's folder or hub id."""

    def caps(self, settings: str) -> DrafterCaps:
        repo = open_repo("dflash", settings)
        size = int(repo.raw.get("block_size") or (repo.raw.get("dflash_config") or {}).get("block_size") or 16)
        return DrafterCaps(shape="block", max_width=size - 1, taps=frozenset({"hidden.*"}), ingest="same_step",
                           kv="own", lookahead=size, q="full")

    def sizes(self, settings: str, target: Target) -> DrafterSizes:
        repo = open_repo("dflash", settings)
        layout = read_layout(repo, target, "dflash_config", from_anchor=False)
        parameters = count_head_drafter(repo.source(), tensor_name, layout.config.hidden_size)
        return DrafterSizes(block_caps(layout), parameters, kv_groups(layout.config))

    def make(self, settings: str, context: DrafterContext) -> Drafter:
        assert context.target is not None
        repo = open_repo("dflash", settings)
        layout = read_layout(repo, context.target, "dflash_config", from_anchor=False)
        return BlockDrafter(Backbone(repo, layout, context), block_caps(layout), context)
