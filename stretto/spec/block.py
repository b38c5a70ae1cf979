"""Drafters that propose a whole block in one pass (DFlash, arXiv 2602.06036).

    context   cell p: keys and values of hidden_norm(fc(some of the target's hidden states at p)), made when p is fed
    block     [last token | mask mask ...] at cells len .. len+B-1: each sees the context and, in full layers, all of
              the block; hidden state i says what stands at len + i (DFLASH) or len + i + 1 (DSPARK)

    cells     | context of the target's states | block (scratch) |
              0                                len               len + B

No cell of the context depends on the block, and the block is written anew every step. In layers that see the whole
block, all queries of a row see the same cells, those up to the last one of the block; so a row is shown to the backend
as one query whose heads are the block's queries: the KV is read once, and no backend needs to know of blocks.

    q [B, H, D]  ->  one query at len+B-1 with Hkv groups of (H / Hkv) * B heads
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from stretto.attn.api import LayerSpec
from stretto.model.config import ModelConfig
from stretto.model.layers import Embedding, GatedMLP, HeadNorm, Linear, RMSNorm
from stretto.model.source import WeightSource
from stretto.model.weights import Weights
from stretto.ops.layer import Rope, rotate
from stretto.ragged import RaggedStep
from stretto.spec.api import DrafterCaps, Offer, SlotView
from stretto.spec.context import DrafterContext, DrafterError, DraftKV, Target
from stretto.spec.layers import layer_specs, rotary_of
from stretto.spec.repos import DraftRepo, check_equal, check_made_for, check_vocabulary, tap_names
from stretto.spec.sources import draft_weights, parse_config, renamed
from stretto.spec.steps import StreamKV, blocks, stream_of
from stretto.spec.vocabulary import DraftHead

MAX_FOLD = 16  # query heads of one KV head that every tile of the kernels holds; a larger block is several queries
_REFUSED = {"projector_type": "dflash", "shift_label": False, "attention_sink_bias": None,
            "attention_value_scale": None, "conv_kernel_size": None, "selector_rank": None}


@dataclass(frozen=True)
class Layout:
    """What the config.json of a block drafter says, in the layouts of z-lab, DeepSpec and vLLM's speculators."""

    config: ModelConfig
    taps: tuple[str, ...]
    size: int  # positions of a block, the last token included
    mask_id: int
    from_anchor: bool  # hidden state i speaks of the position after its own
    causal: tuple[bool, ...]  # per layer: within the block, a position sees only those before it
    draft_vocab: int | None
    multiplier: float = 1.0  # of the logits
    softcap: float = 0.0
    embedding_scale: float = 1.0

    @property
    def widest(self) -> int:
        return self.size if self.from_anchor else self.size - 1


def read_layout(repo: DraftRepo, target: Target, section: str, from_anchor: bool) -> Layout:
    """`section`: the key under which options may be nested. `from_anchor`: what holds where a config does not say so,
    but for the layout of speculators. Raises DrafterError."""
    check_made_for(repo, target)
    raw = repo.raw
    nested = raw.get("transformer_layer_config")
    layer_raw = nested if nested is not None else raw

    def option(key: str, default: Any = None) -> Any:
        return (raw.get(section) or {}).get(key, raw.get(key, default))

    for key, fine in _REFUSED.items():
        if option(key, fine) not in (fine, None, False):
            raise DrafterError(f"{repo.name}: {key} is {option(key)!r}, a variant of the drafter that is not run here")
    before = raw.get("aux_hidden_state_layer_ids")
    layers = [i - 1 for i in before] if before else option("target_layer_ids")
    config = parse_config({**layer_raw, "model_type": layer_raw.get("model_type", "qwen3")}, use_sliding_window=True)
    if layers is None:
        layers = default_layers(target.n_layers, config.n_layers)
    mask = option("mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < target.vocab_size:
        raise DrafterError(f"{repo.name}: mask_token_id is {mask!r}; it must be an id of the target's"
                           f" 0..{target.vocab_size - 1}")
    size = option("block_size", 0)
    size = size if isinstance(size, int) and not isinstance(size, bool) else 0
    from_anchor = bool(raw.get("sample_from_anchor", from_anchor and nested is None))  # speculators: no, if not said
    if size < (1 if from_anchor else 2):
        raise DrafterError(f"{repo.name}: block_size is {option('block_size')!r}; the config must give a block's size")
    check_equal("hidden size", repo, config.hidden_size, target, target.hidden_size)
    check_equal("number of layers", repo, int(option("num_target_layers") or target.n_layers), target, target.n_layers)
    check_vocabulary(repo, config.vocab_size, target)
    return Layout(
        config=replace(config, windows=_windows(repo, layer_raw, config.n_layers)),
        taps=tap_names(repo, list(layers), target), size=size, mask_id=mask,
        from_anchor=from_anchor,
        causal=_causal(repo, raw, layer_raw, config.n_layers),
        draft_vocab=raw.get("draft_vocab_size"), multiplier=float(option("output_multiplier", 1.0)),
        softcap=float(option("final_logit_softcapping") or 0.0),
        embedding_scale=float(option("input_embedding_scale", 1.0)))


def default_layers(n_target: int, n_draft: int) -> list[int]:
    """Evenly from layer 1 to layer L-3; the middle one for a drafter of one layer."""
    if n_draft == 1:
        return [n_target // 2]
    span = n_target - 4
    return [1 + round(i * span / (n_draft - 1)) for i in range(n_draft)]


def _sliding(raw: Mapping[str, Any], n: int) -> list[bool]:
    types = raw.get("layer_types") or ["full_attention"] * n
    return [kind == "sliding_attention" for kind in types[:n]]


def _windows(repo: DraftRepo, raw: Mapping[str, Any], n: int) -> tuple[int | None, ...]:
    """Only `layer_types` says which layers have the window."""
    window = raw.get("sliding_window")
    sliding = _sliding(raw, n)
    if any(sliding) and not window:
        raise DrafterError(f"{repo.name}: layer_types names sliding layers, and sliding_window is {window!r}")
    return tuple(window if slides else None for slides in sliding)


def _causal(repo: DraftRepo, raw: Mapping[str, Any], layer_raw: Mapping[str, Any], n: int) -> tuple[bool, ...]:
    """Sliding layers are causal, full ones see the whole block, unless the config says otherwise."""
    sliding, said = _sliding(layer_raw, n), layer_raw.get("is_causal")
    causal = [slides if said is None else bool(said) for slides in sliding]
    if raw.get("sliding_window_non_causal"):
        causal = [False] * n
    if any(slides and not c for slides, c in zip(sliding, causal, strict=True)):
        raise DrafterError(f"{repo.name} has sliding layers that see the whole block: queries of one block would start"
                           " at different cells, which is not run here")
    return tuple(causal)


class BlockLayer:
    """Attention over context and block, then the MLP. Names are those under `layers.i`."""

    def __init__(self, config: ModelConfig, w: Weights, index: int):
        c, name = config, f"layers.{index}"
        attn, q_size, kv_size = f"{name}.self_attn", c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        self.n_heads, self.n_kv_heads, self.head_dim = c.n_heads, c.n_kv_heads, c.head_dim
        self.norm = RMSNorm(w, f"{name}.input_layernorm", c.hidden_size, c.norm_eps)
        self.qkv = Linear(w, [(f"{attn}.q_proj", q_size), (f"{attn}.k_proj", kv_size), (f"{attn}.v_proj", kv_size)],
                          c.hidden_size, c.attention_bias)
        self.head_norm = HeadNorm(w, attn, c.n_heads, c.n_kv_heads, c.head_dim, c.norm_eps)
        self.out = Linear(w, [(f"{attn}.o_proj", c.hidden_size)], q_size, c.attention_bias)
        self.mlp_norm = RMSNorm(w, f"{name}.post_attention_layernorm", c.hidden_size, c.norm_eps)
        self.mlp = GatedMLP(w, f"{name}.mlp", c.hidden_size, c.intermediate_size, c.hidden_act, c.mlp_bias)

    def project(self, x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, ...]:
        """x [T, E] -> q [T, H, D], k and v [T, Hkv, D], normed and rotated."""
        rotated = self.n_heads + self.n_kv_heads
        qkv = self.qkv(x).view(len(x), rotated + self.n_kv_heads, self.head_dim)
        qk = rotate(self.head_norm(qkv[:, :rotated]), rope)
        return qk[:, : self.n_heads], qk[:, self.n_heads :], qkv[:, rotated:]


class Backbone:
    """Weights and passes of a block drafter. `extra` declares what a relative has besides."""

    def __init__(self, repo: DraftRepo, layout: Layout, context: DrafterContext,
                 extra: Callable[[Weights, WeightSource], None] | None = None):
        assert context.own_kv is not None and context.attention is not None
        c, self.layout, self.context = layout.config, layout, context
        source = renamed(repo.source(), tensor_name, context.device)
        w, names = draft_weights(source, context), set(source.names())
        self.specs, self.backend = layer_specs(c), context.attention
        self.fc = Linear(w, [("fc", c.hidden_size)], len(layout.taps) * c.hidden_size)
        self.hidden_norm = RMSNorm(w, "hidden_norm", c.hidden_size, c.norm_eps)
        self.layers = [BlockLayer(c, w, i) for i in range(c.n_layers)]
        self.norm = RMSNorm(w, "norm", c.hidden_size, c.norm_eps)
        self.embed: Callable[[torch.Tensor], torch.Tensor] = (
            Embedding(w, "embed_tokens", c.vocab_size, c.hidden_size) if "embed_tokens.weight" in names
            else context.lent_embedding())
        self.head = DraftHead(repo, source, w, context, layout.draft_vocab, c.hidden_size)
        if extra is not None:
            extra(w, source)
        self.rotary = rotary_of(c, context, layout.size)
        w.fill()
        self.kv = context.own_kv(self.specs)
        most = layout.size if context.device.type == "cpu" else max(1, MAX_FOLD // (c.n_heads // c.n_kv_heads))
        self.fold = max(f for f in range(1, layout.size + 1) if layout.size % f == 0 and f <= most)

    def remember(self, step: RaggedStep, taps: dict[str, torch.Tensor]) -> None:
        """Writes the context's keys and values of every token that was fed."""
        most = len(self.rotary.table)
        context = self.hidden_norm(self.fc(torch.cat([taps[name] for name in self.layout.taps], 1)))
        rope = self.rotary.at(step.positions.clamp(max=most - 1))
        for i, layer in enumerate(self.layers):
            _, k, v = layer.project(context, rope)
            self.kv.write(i, step.cells[self.kv.group_of[i]], k, v)

    def run(self, step: RaggedStep, rows: torch.Tensor | None, log: torch.Tensor,
            length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The block after the last known id, which stands at `length` [N]: hidden states after the norm, [N, B, E], and
        that id, [N]. `rows` [N]: of the step's; None: all. `log`: the slot table's."""
        layout, most = self.layout, len(self.rotary.table)
        stream = stream_of(step, 0, 0).take(rows)
        n, size = len(length), layout.size
        made = blocks(stream, length, log, size, size // self.fold, most, layout.mask_id)
        hidden = self.embed(made.ids)
        if layout.embedding_scale != 1.0:
            hidden = hidden * layout.embedding_scale
        rope = self.rotary.at(made.causal.positions)
        attend = _BlockAttention(self, made.causal, made.whole, StreamKV(self.kv, step.page_size))
        for i, layer in enumerate(self.layers):
            attended = attend(i, *layer.project(layer.norm(hidden), rope))
            hidden = layer.out.add_to(hidden, attended.reshape(n * size, -1))
            hidden = layer.mlp.add_to(hidden, layer.mlp_norm(hidden))
        return self.norm(hidden).view(n, size, -1), made.ids.view(n, size)[:, 0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, E] -> [N, D] float32 over `head.ids`; without, over all of the target's."""
        logits = self.head(hidden)
        if self.layout.multiplier != 1.0:
            logits = logits * self.layout.multiplier
        cap = self.layout.softcap
        return cap * torch.tanh(logits / cap) if cap > 0 else logits


class _BlockAttention:
    """Attention of one block pass; metadata once for each (group, kind of layer)."""

    def __init__(self, owner: Backbone, causal: RaggedStep, whole: RaggedStep, kv: DraftKV):
        self.owner, self.kv, self.causal, self.whole = owner, kv, causal, whole
        self.meta: dict[tuple[int, bool], object] = {}

    def __call__(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        owner, group, causal = self.owner, self.kv.group_of[index], self.owner.layout.causal[index]
        spec, fold = owner.specs[index], owner.fold
        self.kv.write(index, self.causal.cells[group], k, v)
        if causal:
            return self._attend(index, spec, q, self.causal, group, causal)
        n, ratio = len(q) // fold, spec.n_heads // spec.n_kv_heads
        heads = q.view(n, fold, spec.n_kv_heads, ratio, spec.head_dim).transpose(1, 2)
        folded = replace(spec, n_heads=spec.n_heads * fold)
        out = self._attend(index, folded, heads.reshape(n, -1, spec.head_dim), self.whole, group, causal)
        out = out.view(n, spec.n_kv_heads, fold, ratio, spec.head_dim).transpose(1, 2)
        return out.reshape(len(q), spec.n_heads, spec.head_dim)

    def _attend(self, index: int, spec: LayerSpec, q: torch.Tensor, step: RaggedStep, group: int,
                causal: bool) -> torch.Tensor:
        if (group, causal) not in self.meta:
            self.meta[group, causal] = self.owner.backend.metadata(step, group, spec)
        return self.owner.backend.attend(spec, q, self.kv.k[index], self.kv.v[index], step, group,
                                         self.meta[group, causal], scales=self.kv.scales[index])


def tensor_name(name: str) -> str | None:
    """Drops the prefix of some exports, and copies of the target's own weights that training left behind."""
    name = name.removeprefix("model.")
    aliases = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    return None if name.startswith("verifier_") else aliases.get(name, name)


def block_caps(layout: Layout, variable: bool = False) -> DrafterCaps:
    """`variable`: it knows how likely its ids are, and offers those that are likely enough."""
    return DrafterCaps(shape="block", max_width=layout.widest, variable=variable, confidence=variable,
                       taps=frozenset(layout.taps), ingest="same_step", kv="own", lookahead=layout.size, q="full")


class BlockDrafter:
    """`spec.api.Drafter`: what DFLASH does, and what its relatives share."""

    def __init__(self, backbone: Backbone, caps: DrafterCaps, context: DrafterContext):
        assert context.slots is not None and context.choose is not None
        self.backbone, self.caps, self.slots, self.choose = backbone, caps, context.slots, context.choose
        self.exact, self.device = context.device.type == "cpu", context.device
        most = backbone.layout.config.max_position
        self.fits = 0 < context.positions <= most - backbone.layout.size  # every block that can be asked for

    def ingest(self, step: RaggedStep, taps: dict[str, torch.Tensor]) -> None:
        """Writes the context cells of every token of the step; those of rejected drafts are written again."""
        if len(step.ids):
            self.backbone.remember(step, taps)

    def propose(self, step: RaggedStep, view: SlotView, width: int) -> Offer:
        """The first `width` ids of a block, for every row that may be offered some and whose block fits the context."""
        layout, slots = self.backbone.layout, step.slots.long()
        n, width = len(slots), min(width, self.caps.max_width)
        length = view.length[slots]
        counts = torch.full((n,), width, dtype=torch.int32, device=self.device)
        if not self.fits:
            counts.masked_fill_(length + layout.size > layout.config.max_position, 0)
        if not self.exact:  # rows that may not be offered any are cut by `SlotTable.offer`
            ids, wanted = self._block(step, None, length, view, width)
            return Offer(ids, counts if wanted is None else torch.minimum(counts, wanted))
        counts *= view.may_offer(step.slots, step.n_out)
        rows, out = counts.nonzero().flatten(), torch.zeros(n, width, dtype=torch.int64, device=self.device)
        if len(rows):
            out[rows], wanted = self._block(step, rows, length[rows], view, width)
            if wanted is not None:
                counts[rows] = torch.minimum(counts[rows], wanted)
        return Offer(out, counts)

    def _block(self, step: RaggedStep, rows: torch.Tensor | None, length: torch.Tensor, view: SlotView,
               width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of some of the step's rows: as `chosen`."""
        hidden, last = self.backbone.run(step, rows, view.log, length)
        first = 0 if self.backbone.layout.from_anchor else 1
        return self.chosen(hidden[:, first : first + width], rows, last)

    def chosen(self, hidden: torch.Tensor, rows: torch.Tensor | None,
               last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden [N, K, E] -> ids [N, K], and how many of them to offer, [N] int32 (None: all)."""
        n, width, size = hidden.shape
        logits = self.backbone.logits(hidden.reshape(n * width, size)).view(n, width, -1)
        return self.choose.block(logits, rows, self.backbone.head.ids), None
