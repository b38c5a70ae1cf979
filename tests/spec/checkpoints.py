"""Random draft checkpoints in every public layout, for a tiny target, and the target itself."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from stretto.model.api import CausalModel
from stretto.model.config import ModelConfig, read_config
from stretto.model.load import build_model, load_model
from stretto.model.source import SafetensorsSource
from stretto.spec.context import Target
from stretto.spec.sources import Renamed
from stretto.testing import target_of

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, CONTEXT = 300, 64, 96, 4, 2, 16, 6, 256
SHAPE = dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
             num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
             max_position_embeddings=CONTEXT, tie_word_embeddings=False, rms_norm_eps=1e-5)
LAYER = dict(hidden_size=HIDDEN, intermediate_size=INNER, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
             head_dim=HEAD_DIM, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, hidden_act="silu",
             rope_theta=10000.0, vocab_size=VOCAB, num_hidden_layers=1, attention_bias=False, dtype="float32")
Tensors = dict[str, torch.Tensor]


@dataclass
class TinyTarget:
    """A random target in both forms; `mtp` are the tensors of a predictor that its checkpoint holds besides."""

    model: CausalModel
    reference: transformers.PreTrainedModel
    target: Target


def is_predictor(name: str, n_layers: int) -> bool:
    """Whether a tensor of a target's checkpoint belongs to its MTP layers, not to the target."""
    appended = re.match(r"model\.layers\.(\d+)\.", name)
    return name.startswith("model.mtp_layers.") or (appended is not None and int(appended[1]) >= n_layers)


def make_target(folder: Path, mtp: Tensors | None = None, window: int | None = None) -> TinyTarget:
    torch.manual_seed(5)
    kind, config = (transformers.MistralForCausalLM, transformers.MistralConfig(**SHAPE, sliding_window=window)) \
        if window else (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SHAPE))
    oracle = kind(config).eval().requires_grad_(False)
    for p in oracle.parameters():
        p.mul_(4 if p.ndim > 1 else 1)
    oracle.lm_head.weight.mul_(20)
    oracle.save_pretrained(folder)
    if mtp:
        tensors = {name: oracle.state_dict()[name] for name in oracle.state_dict()} | mtp
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
        config, source = ModelConfig.from_hf(read_config(folder)[0]), SafetensorsSource(folder)
        own = Renamed(source, lambda n: None if is_predictor(n, LAYERS) else n)
        model = build_model(config, own, torch.float32, torch.device("cpu"))
    else:
        model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    return TinyTarget(model, oracle, target_of(model, folder, "tiny"))


def make_hybrid(folder: Path, experts: bool) -> tuple[TinyTarget, torch.nn.Module]:
    """A target whose layers keep states, with a predictor under "mtp."; and the predictor's parts, by transformers."""
    torch.manual_seed(7)
    shape = SHAPE | dict(num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"],
                         linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
                         linear_value_head_dim=8)
    if experts:
        kind, layer_kind = transformers.Qwen3NextForCausalLM, modeling_qwen3_next.Qwen3NextDecoderLayer
        config = transformers.Qwen3NextConfig(**shape, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                                              shared_expert_intermediate_size=32)
    else:
        kind, layer_kind = transformers.Qwen3_5ForCausalLM, modeling_qwen3_5.Qwen3_5DecoderLayer
        config = transformers.Qwen3_5TextConfig(**shape)
    oracle = kind(config)
    norm_kind = type(oracle.model.norm)
    parts = torch.nn.ModuleDict({"fc": torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False),
                                 "layers": torch.nn.ModuleList([layer_kind(config, 1)]),
                                 **{name: norm_kind(HIDDEN, eps=1e-5) for name in
                                    ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}})
    for p in (*oracle.parameters(), *parts.parameters()):
        p.requires_grad_(False)
        p.mul_(4) if p.ndim > 1 else p.add_(0.2 * torch.randn_like(p))
    for p in parts.parameters():  # experts come uninitialised
        p.normal_(0.0, 0.1)
    oracle.eval().lm_head.weight.mul_(20)
    oracle.save_pretrained(folder)
    together = transformers_names({f"mtp.{name}": t for name, t in parts.state_dict().items()})
    save_file(load_file(folder / "model.safetensors") | together, folder / "model.safetensors")
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    return TinyTarget(model, oracle, target_of(model, folder, "tiny")), parts.eval()


def transformers_names(tensors: Tensors) -> Tensors:
    """Experts one by one, as checkpoints hold them."""
    made: Tensors = {}
    for name, t in tensors.items():
        stem, _, part = name.rpartition(".experts.")
        if not stem:
            made[name] = t
        for e in range(len(t) if stem else 0):
            if part == "down_proj":
                made[f"{stem}.experts.{e}.down_proj.weight"] = t[e].contiguous()
            else:
                first, second = t[e].chunk(2)
                made |= {f"{stem}.experts.{e}.{half}.weight": x.contiguous()
                         for half, x in (("gate_proj", first), ("up_proj", second))}
    return made


def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator) * 0.25


def norm(generator: torch.Generator, size: int) -> torch.Tensor:
    return 1 + 0.3 * torch.randn(size, generator=generator)


def layer(g: torch.Generator, prefix: str, inputs: int = HIDDEN, *, input_norm: bool = True, head_norm: bool = False,
          bias: bool = False) -> Tensors:
    """One decoder layer as HF checkpoints name it."""
    q, kv, attn = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, f"{prefix}.self_attn"
    out = {f"{attn}.q_proj.weight": draw(g, q, inputs), f"{attn}.k_proj.weight": draw(g, kv, inputs),
           f"{attn}.v_proj.weight": draw(g, kv, inputs), f"{attn}.o_proj.weight": draw(g, HIDDEN, q),
           f"{prefix}.post_attention_layernorm.weight": norm(g, HIDDEN),
           f"{prefix}.mlp.gate_proj.weight": draw(g, INNER, HIDDEN),
           f"{prefix}.mlp.up_proj.weight": draw(g, INNER, HIDDEN),
           f"{prefix}.mlp.down_proj.weight": draw(g, HIDDEN, INNER)}
    if bias:
        out |= {f"{attn}.{p}_proj.bias": draw(g, n) for p, n in (("q", q), ("k", kv), ("v", kv))}
    if input_norm:
        out[f"{prefix}.input_layernorm.weight"] = norm(g, HIDDEN)
    if head_norm:
        out |= {f"{attn}.q_norm.weight": norm(g, HEAD_DIM), f"{attn}.k_norm.weight": norm(g, HEAD_DIM)}
    return out


def save(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def reduced(g: torch.Generator, size: int) -> torch.Tensor:
    """d2t of `size` different target ids, in order."""
    return torch.randperm(VOCAB, generator=g)[:size].sort().values - torch.arange(size)


# ------------------------------------------------------------------------------------------------------------- layouts
def eagle(folder: Path, prefix: str = "") -> tuple[Path, Tensors]:
    g = torch.Generator().manual_seed(1)
    tensors = {"fc.weight": draw(g, HIDDEN, 2 * HIDDEN), "fc.bias": draw(g, HIDDEN)}
    tensors |= layer(g, "layers.0", input_norm=False) | layer(g, "layers.1")
    config = {**LAYER, "num_hidden_layers": 2, "architectures": ["LlamaForCausalLMEagle"], "model_type": "llama"}
    return save(folder, config, {prefix + n: t for n, t in tensors.items()}), tensors


def eagle3(folder: Path, *, vocab: int | None = 120, ids: list[int] | None = None) -> tuple[Path, Tensors]:
    """The original layout: `midlayer`, a reduced vocabulary with d2t and t2d."""
    g = torch.Generator().manual_seed(2)
    tensors = {"fc.weight": draw(g, HIDDEN, 3 * HIDDEN), "norm.weight": norm(g, HIDDEN),
               "midlayer.hidden_norm.weight": norm(g, HIDDEN), "lm_head.weight": draw(g, vocab or VOCAB, HIDDEN)}
    tensors |= layer(g, "midlayer", 2 * HIDDEN)
    config = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": vocab}
    if vocab:
        tensors["d2t"] = reduced(g, vocab)
        tensors["t2d"] = torch.isin(torch.arange(VOCAB), tensors["d2t"] + torch.arange(vocab))
    if ids:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    return save(folder, config, tensors), tensors


def speculators(kind: str, folder: Path, tensors: Tensors, layer_config: dict[str, Any], **more) -> Path:
    config = {"architectures": [f"{kind.capitalize()}Speculator"], "speculators_model_type": kind,
              "transformer_layer_config": {**LAYER, **layer_config},
              "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "owner/target"}}, **more}
    return save(folder, config, tensors)


def eagle3_speculators(folder: Path) -> tuple[Path, Tensors]:
    g = torch.Generator().manual_seed(3)
    tensors = {"fc.weight": draw(g, HIDDEN, 3 * HIDDEN), "norm.weight": norm(g, HIDDEN),
               "input_norm.weight": norm(g, 3 * HIDDEN), "layers.0.hidden_norm.weight": norm(g, HIDDEN),
               "lm_head.weight": draw(g, 90, HIDDEN), "d2t": reduced(g, 90),
               "embed_tokens.weight": draw(g, VOCAB, HIDDEN)}
    tensors |= layer(g, "layers.0", 2 * HIDDEN)
    path = speculators("eagle3", folder, tensors, {"model_type": "llama"}, draft_vocab_size=90,
                       norm_before_residual=True, norm_before_fc=True, eagle_aux_hidden_state_layer_ids=[2, 3, 5])
    return path, tensors


def mimo(folder: Path) -> Path:
    """A target that ships its predictor: Qwen2's tensors, and one layer more."""
    torch.manual_seed(6)
    target = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE)).eval().requires_grad_(False)
    for p in target.parameters():
        p.mul_(4 if p.ndim > 1 else 1)
    config = target.config.to_dict() | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo",
                                        "num_nextn_predict_layers": 1, "dtype": "float32"}
    return save(folder, config, target.state_dict() | mtp("mimo", bias=True))


def mtp(naming: str, bias: bool = False) -> Tensors:
    """The predictor's tensors inside a target's checkpoint."""
    g = torch.Generator().manual_seed(4)
    prefix = {"mimo": "model.mtp_layers.0", "deepseek": f"model.layers.{LAYERS}"}[naming]
    names = {"mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
             "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm")}[naming]
    tensors = {f"{prefix}.{name}.weight": norm(g, HIDDEN) for name in (names[0], names[1], names[3])}
    tensors[f"{prefix}.{names[2]}.weight"] = draw(g, HIDDEN, 2 * HIDDEN)
    if naming == "deepseek":
        tensors |= {f"{prefix}.embed_tokens.weight": draw(g, VOCAB, HIDDEN),
                    f"{prefix}.shared_head.head.weight": draw(g, VOCAB, HIDDEN)}
    return tensors | layer(g, prefix, bias=bias)


def block_tensors(g: torch.Generator, n_layers: int, taps: int) -> Tensors:
    tensors = {"fc.weight": draw(g, HIDDEN, taps * HIDDEN), "norm.weight": norm(g, HIDDEN),
               "hidden_norm.weight": norm(g, HIDDEN)}
    for i in range(n_layers):
        tensors |= layer(g, f"layers.{i}", head_norm=True)
    return tensors


def dflash(folder: Path, size: int = 8, sliding: int | None = None, vocab: int | None = None) -> tuple[Path, Tensors]:
    """z-lab's layout. `vocab`: of that many ids, and with no head of its own."""
    g = torch.Generator().manual_seed(6)
    tensors = block_tensors(g, 2, 3) | ({"d2t": reduced(g, vocab)} if vocab else {})
    kinds = ["sliding_attention" if sliding else "full_attention", "full_attention"]
    config = {**LAYER, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2,
              "block_size": size, "num_target_layers": LAYERS, "layer_types": kinds, "sliding_window": sliding,
              "dflash_config": {"target_layer_ids": [1, 3, 4], "mask_token_id": 299}, "draft_vocab_size": vocab}
    return save(folder, config, tensors), tensors


def dflash_speculators(folder: Path) -> tuple[Path, Tensors]:
    g = torch.Generator().manual_seed(7)
    tensors = block_tensors(g, 1, 2) | {"lm_head.weight": draw(g, 80, HIDDEN), "d2t": reduced(g, 80)}
    path = speculators("dflash", folder, tensors, {"model_type": "qwen3", "layer_types": ["full_attention"]},
                       draft_vocab_size=80, block_size=5, aux_hidden_state_layer_ids=[2, 4], mask_token_id=298)
    return path, tensors


def dflash_open_spec(folder: Path, start: int) -> tuple[Path, Tensors]:
    """The same, as speculators writes it since its Open Spec Config; layers counted from `start`."""
    _, tensors = dflash_speculators(folder)
    config = {**LAYER, "architectures": ["DflashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 1,
              "layer_types": ["full_attention"], "open_spec_config_version": "0.0.0", "speculative_config": {
                  "method": "dflash", "speculative_tokens": 4, "verifier": "owner/target", "mask_token_id": 298,
                  "target_layer_ids": [1 + start, 3 + start], "target_layer_start_idx": start, "draft_vocab_size": 80,
                  "sample_from_anchor": False, "sliding_window_non_causal": False}}
    return save(folder, config, tensors), tensors


def dspark(folder: Path, head: str = "vanilla", *, rank: int = 12, size: int = 6) -> tuple[Path, Tensors]:
    """DeepSpec's layout, with embedding and head of its own."""
    g = torch.Generator().manual_seed(8)
    tensors = block_tensors(g, 2, 2) | {"embed_tokens.weight": draw(g, VOCAB, HIDDEN),
                                        "lm_head.weight": draw(g, VOCAB, HIDDEN)}
    tensors |= markov(g, head, rank, VOCAB)
    config = {**LAYER, "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 2,
              "block_size": size, "layer_types": ["full_attention"] * 2, "target_layer_ids": [2, 5],
              "mask_token_id": 297, "num_anchors": 4, "markov_rank": rank, "markov_head_type": head,
              "enable_confidence_head": True, "confidence_head_with_markov": True}
    return save(folder, config, tensors), tensors


def markov(g: torch.Generator, head: str, rank: int, draft_vocab: int) -> Tensors:
    tensors = {"markov_head.markov_w1.weight": draw(g, VOCAB, rank) * 4,
               "markov_head.markov_w2.weight": draw(g, draft_vocab, rank) * 4,
               "confidence_head.proj.weight": draw(g, 1, HIDDEN + rank), "confidence_head.proj.bias": draw(g, 1)}
    if head == "gated":
        tensors |= {"markov_head.gate_proj.weight": draw(g, rank, HIDDEN + rank),
                    "markov_head.gate_proj.bias": draw(g, rank)}
    if head == "rnn":
        tensors |= {"markov_head.joint_proj.weight": draw(g, 3 * rank, 2 * rank + HIDDEN),
                    "markov_head.joint_proj.bias": draw(g, 3 * rank)}
    return tensors


def dspark_speculators(folder: Path, **said: Any) -> tuple[Path, Tensors]:
    """`said`: sample_from_anchor, or nothing of it."""
    g = torch.Generator().manual_seed(9)
    tensors = block_tensors(g, 1, 2) | {"lm_head.weight": draw(g, 70, HIDDEN), "d2t": reduced(g, 70)}
    tensors |= markov(g, "gated", 10, 70)
    path = speculators("dspark", folder, tensors, {"model_type": "qwen3", "layer_types": ["full_attention"]},
                       draft_vocab_size=70, block_size=4, aux_hidden_state_layer_ids=[3, 6], mask_token_id=296,
                       markov_rank=10, markov_head_type="gated", enable_confidence_head=True,
                       confidence_head_with_markov=True, **said)
    return path, tensors
