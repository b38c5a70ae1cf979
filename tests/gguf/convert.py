"""Checkpoints of Hugging Face written as GGUF files, by the conventions of llama.cpp's converter: the names of tensors
and keys, and what is done to numbers on the way."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from tests.gguf.files import F32, Writer, permute

Kind = gguf.GGMLQuantizationType
Tensors = dict[str, np.ndarray]

_USUAL = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
          "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
          "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv", "post_attention_layernorm": "ffn_norm",
          "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
          "mlp.gate_up_proj": "ffn_up"}
_AFTER = {"post_attention_layernorm": "post_attention_norm"}
_FOUR = {**_AFTER, "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_STATE = {"in_proj_ba": "ssm_ba", "in_proj_a": "ssm_alpha", "in_proj_b": "ssm_beta", "in_proj_z": "attn_gate",
          "in_proj_qkv": "attn_qkv", "norm": "ssm_norm", "out_proj": "ssm_out", "conv1d": "ssm_conv1d"}
_DELTA = {**_AFTER, **{f"linear_attn.{theirs}": ours for theirs, ours in _STATE.items()}, "mlp.gate": "ffn_gate_inp",
          "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
          **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}}
_MAMBA = {"mamba.in_proj": "ssm_in", "mamba.conv1d": "ssm_conv1d", "mamba.out_proj": "ssm_out",
          "block_sparse_moe.router.layer": "ffn_gate_inp"}
_LLAMA4 = {**{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
           **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
           "feed_forward.router": "ffn_gate_inp"}
_GLM4 = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}

# model_type: architecture of llama.cpp, names beside the usual ones
FAMILIES: dict[str, tuple[str, dict[str, str]]] = {
    "llama": ("llama", {}), "mistral": ("llama", {}), "qwen2": ("qwen2", {}), "qwen3": ("qwen3", {}),
    "mixtral": ("llama", {"block_sparse_moe.gate": "ffn_gate_inp"}),
    "qwen3_moe": ("qwen3moe", {"mlp.gate": "ffn_gate_inp"}),
    "gemma2": ("gemma2", _FOUR), "gemma3_text": ("gemma3", _FOUR), "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {**_AFTER, "post_feedforward_layernorm": "post_ffw_norm"}),
    "glm": ("chatglm", {}), "glm4": ("glm4", _GLM4), "granite": ("granite", {}),
    "granitemoehybrid": ("granitehybrid", _MAMBA), "gpt_oss": ("gpt-oss", {**_AFTER, "mlp.router": "ffn_gate_inp"}),
    "qwen3_next": ("qwen3next", _DELTA), "qwen3_5_text": ("qwen35", _DELTA), "qwen3_5_moe_text": ("qwen35moe", _DELTA),
    "llama4_text": ("llama4", _LLAMA4),
}
_INTERLEAVED = ("llama", "mistral", "mixtral", "granite", "granitemoehybrid")
_OFFSET_NORMS = ("gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def convert(folder: Path, path: Path, kind: Kind = F32, metadata: dict[str, Any] | None = None,
            extra: Tensors | None = None, parts: int = 1, architecture: str | None = None) -> Path:
    """The checkpoint in `folder` as the file `path`, matrices as `kind`. Metadata given here replaces what config.json
    says (None: left out). `parts`: in so many files; the first one's path is returned."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    made = converted(tensors, config) | (extra or {})
    usual = FAMILIES[config.model_type][0]
    name = architecture or usual
    keys = {re.sub(rf"^{usual}\.", f"{name}.", key): value for key, value in keys_of(config).items()} | (metadata or {})
    return write(path, name, {key: value for key, value in keys.items() if value is not None}, made, kind, parts)


def write(path: Path, architecture: str, keys: dict[str, Any], tensors: Tensors, kind: Kind = F32, parts: int = 1
          ) -> Path:
    """In several parts as llama.cpp splits files: the first has all metadata, each says which one it is."""
    names = sorted(tensors)
    paths = [path if parts == 1 else path.with_name(f"{path.stem}-{i + 1:05}-of-{parts:05}.gguf") for i in range(parts)]
    for i, one in enumerate(paths):
        split = {"split.no": i, "split.count": parts, "split.tensors.count": len(names)} if parts > 1 else {}
        writer = Writer(one, architecture, (keys if i == 0 else {}) | split)
        for name in names[i::parts]:
            value = np.ascontiguousarray(tensors[name])
            matrix = value.ndim > 1 and name.endswith(".weight") and "ssm_" not in name and "gate_inp" not in name
            writer.tensor(name, value, kind if matrix else F32)
        writer.close()
    return paths[0]


def converted(tensors: Tensors, config: Any) -> Tensors:
    family, (_, names) = config.model_type, FAMILIES[config.model_type]
    names = {**_USUAL, **names}
    if family in _OFFSET_NORMS:
        tensors = {name: value + 1 if name.endswith("norm.weight") and "linear_attn.norm" not in name else value
                   for name, value in tensors.items()}
    if family in _INTERLEAVED:
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        tensors = {name: permute(value, heads[name.split(".")[-2]]) if name.split(".")[-2] in heads else value
                   for name, value in tensors.items()}
    made: Tensors = {}
    layers: dict[int, Tensors] = {}
    for name, value in tensors.items():
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
            layers.setdefault(int(match[1]), {})[match[2]] = value
        else:
            part, _, end = name.rpartition(".")
            made[f"{_TOP[part]}.{end}"] = value
    for index, layer in layers.items():
        own = _SPECIAL[family](layer, config) if family in _SPECIAL else {}
        for name, value in layer.items():
            part, _, end = name.rpartition(".")
            own[f"{names[part]}.{end}"] = value.squeeze() if "conv1d.weight" in name or "expert_gate" in name else value
        made |= {f"blk.{index}.{name}": value for name, value in own.items()}
    return made


# ------------------------------------------------------------------------------------------- what is more than a name
def _merged(pattern: str, names: dict[str, str]) -> Callable[[Tensors, Any], Tensors]:
    """Experts that the checkpoint holds one by one, in one tensor."""
    def special(layer: Tensors, _config: Any) -> Tensors:
        made = {}
        for theirs, ours in names.items():
            found = [name for name in layer if re.fullmatch(pattern.format(theirs), name)]
            if found:
                found.sort(key=lambda name: int(name.split(".experts.")[1].split(".")[0]))
                made[f"ffn_{ours}_exps.weight"] = np.stack([layer.pop(name) for name in found])
        return made
    return special


_EACH = _merged(r"mlp\.experts\.\d+\.{}_proj\.weight", {part: part for part in ("gate", "up", "down")})


def _gpt_oss(layer: Tensors, _config: Any) -> Tensors:
    gate_up, bias = layer.pop("mlp.experts.gate_up_proj").swapaxes(1, 2), layer.pop("mlp.experts.gate_up_proj_bias")
    return {"attn_sinks.weight": layer.pop("self_attn.sinks"),
            "ffn_gate_exps.weight": gate_up[:, ::2], "ffn_up_exps.weight": gate_up[:, 1::2],
            "ffn_gate_exps.bias": bias[:, ::2], "ffn_up_exps.bias": bias[:, 1::2],
            "ffn_down_exps.weight": layer.pop("mlp.experts.down_proj").swapaxes(1, 2),
            "ffn_down_exps.bias": layer.pop("mlp.experts.down_proj_bias")}


def _llama4(layer: Tensors, _config: Any) -> Tensors:
    if "feed_forward.experts.gate_up_proj" not in layer:
        return {}
    gate, up = np.split(layer.pop("feed_forward.experts.gate_up_proj").swapaxes(1, 2), 2, axis=1)
    return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up,
            "ffn_down_exps.weight": layer.pop("feed_forward.experts.down_proj").swapaxes(1, 2)}


def _granite_hybrid(layer: Tensors, config: Any) -> Tensors:
    made = {}
    if "mamba.A_log" in layer:
        made |= {"ssm_a": -np.exp(layer.pop("mamba.A_log"))[:, None], "ssm_d": layer.pop("mamba.D")[:, None],
                 "ssm_dt.bias": layer.pop("mamba.dt_bias"),
                 "ssm_norm.weight": layer.pop("mamba.norm.weight").reshape(config.mamba_n_groups, -1)}
    end = "_shexp" if config.num_local_experts else ""
    gate, up = np.split(layer.pop("shared_mlp.input_linear.weight"), 2)
    made |= {f"ffn_gate{end}.weight": gate, f"ffn_up{end}.weight": up,
             f"ffn_down{end}.weight": layer.pop("shared_mlp.output_linear.weight")}
    if config.num_local_experts:
        gate, up = np.split(layer.pop("block_sparse_moe.input_linear.weight"), 2, axis=1)
        made |= {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up,
                 "ffn_down_exps.weight": layer.pop("block_sparse_moe.output_linear.weight")}
    return made


def _delta(layer: Tensors, config: Any) -> Tensors:
    made = _EACH(layer, config)
    if "linear_attn.A_log" not in layer:
        return made
    layer["linear_attn.A_log"] = -np.exp(layer["linear_attn.A_log"])
    k_heads, v_heads = config.linear_num_key_heads, config.linear_num_value_heads
    k_dim, v_dim, each = config.linear_key_head_dim, config.linear_value_head_dim, v_heads // k_heads
    if qkvz := [layer.pop(name) for name in ("linear_attn.in_proj_qkvz.weight",) if name in layer]:
        grouped = qkvz[0].reshape(k_heads, -1, qkvz[0].shape[1])
        parts = np.split(grouped, np.cumsum([k_dim, k_dim, each * v_dim]), axis=1)
        q, k, v, z = (part.reshape(-1, part.shape[2]) for part in parts)
        made |= {"attn_qkv.weight": np.concatenate((q, k, v)), "attn_gate.weight": z}
    else:
        _tile(layer, k_heads, each, k_dim, v_dim)
    return made | {"ssm_a": layer.pop("linear_attn.A_log"), "ssm_dt.bias": layer.pop("linear_attn.dt_bias")}


def _tile(layer: Tensors, k_heads: int, each: int, k_dim: int, v_dim: int) -> None:
    """The value heads of Qwen3.5: the first of every key head, then every second one."""
    def tiled(rows: np.ndarray, width: int) -> np.ndarray:
        return rows.reshape(k_heads, each, width, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    keys = 2 * k_heads * k_dim
    for name in ("in_proj_qkv", "conv1d"):
        value = layer[f"linear_attn.{name}.weight"]
        layer[f"linear_attn.{name}.weight"] = np.concatenate((value[:keys], tiled(value[keys:], v_dim)))
    for name, width in (("in_proj_z.weight", v_dim), ("in_proj_a.weight", 1), ("in_proj_b.weight", 1), ("A_log", 1),
                        ("dt_bias", 1)):
        layer[f"linear_attn.{name}"] = tiled(layer[f"linear_attn.{name}"], width)
    layer["linear_attn.out_proj.weight"] = tiled(layer["linear_attn.out_proj.weight"].T, v_dim).T


_SPECIAL: dict[str, Callable[[Tensors, Any], Tensors]] = {
    "mixtral": _merged(r"block_sparse_moe\.experts\.\d+\.{}\.weight", {"w1": "gate", "w3": "up", "w2": "down"}),
    "qwen3_moe": _EACH, "gpt_oss": _gpt_oss, "llama4_text": _llama4, "granitemoehybrid": _granite_hybrid,
    "qwen3_next": _delta, "qwen3_5_text": _delta, "qwen3_5_moe_text": _delta,
}


# ------------------------------------------------------------------------------------------------------------ metadata
def keys_of(c: Any) -> dict[str, Any]:
    a, rope = FAMILIES[c.model_type][0], dict(c.rope_parameters or {})
    rope = {**rope, **rope.get("full_attention", {})}
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    partial = rope.get("partial_rotary_factor") or getattr(c, "partial_rotary_factor", None) or 1.0
    own: dict[str, Any] = {
        "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size, "feed_forward_length": getattr(c, "intermediate_size", None),
        "attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps), "attention.key_length": head_dim,
        "attention.value_length": head_dim, "rope.freq_base": float(rope.get("rope_theta") or 10000.0),
        "rope.dimension_count": int(head_dim * partial)}
    if rope.get("rope_type") in ("linear", "yarn"):
        own |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"]),
                "rope.scaling.original_context_length": rope.get("original_max_position_embeddings")}
    own |= _KEYS[c.model_type](c) if c.model_type in _KEYS else {}
    return {f"{a}.{key}": value for key, value in own.items() if value is not None} | {
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}


def _experts(c: Any) -> dict[str, Any]:
    return {"expert_count": getattr(c, "num_local_experts", None) or c.num_experts,
            "expert_used_count": c.num_experts_per_tok}


def _moe(c: Any) -> dict[str, Any]:
    return _experts(c) | {"expert_feed_forward_length": c.moe_intermediate_size}


def _scales(c: Any) -> dict[str, Any]:
    return {"attention.scale": float(c.attention_multiplier), "embedding_scale": float(c.embedding_multiplier),
            "residual_scale": float(c.residual_multiplier), "logit_scale": float(c.logits_scaling)}


def _hybrid_keys(c: Any) -> dict[str, Any]:
    kinds = [kind in ("attention", "full_attention") for kind in c.layer_types]
    inner = c.mamba_expand * c.hidden_size
    return _scales(c) | (_experts(c) if c.num_local_experts else {}) | {
        "expert_shared_feed_forward_length": c.shared_intermediate_size,
        "attention.head_count_kv": [c.num_key_value_heads if kind else 0 for kind in kinds],
        "rope.scaling.finetuned": c.position_embedding_type == "rope", "ssm.conv_kernel": c.mamba_d_conv,
        "ssm.state_size": c.mamba_d_state, "ssm.group_count": c.mamba_n_groups, "ssm.inner_size": inner,
        "ssm.time_step_rank": c.mamba_n_heads}


def _delta_keys(c: Any) -> dict[str, Any]:
    interval = 1 + c.layer_types.index("full_attention")
    found = {"ssm.conv_kernel": c.linear_conv_kernel_dim, "ssm.state_size": c.linear_key_head_dim,
             "ssm.group_count": c.linear_num_key_heads, "ssm.time_step_rank": c.linear_num_value_heads,
             "ssm.inner_size": c.linear_value_head_dim * c.linear_num_value_heads,
             "full_attention_interval": interval}
    if getattr(c, "num_experts", None):
        found |= _moe(c) | {"expert_shared_feed_forward_length": c.shared_expert_intermediate_size}
    return found


_KEYS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "mistral": lambda c: {"attention.sliding_window": c.sliding_window},
    "mixtral": _experts, "qwen3_moe": _moe,
    "gemma2": lambda c: {"attention.sliding_window": c.sliding_window, "rope.freq_base": None,
                         "attn_logit_softcapping": c.attn_logit_softcapping,
                         "final_logit_softcapping": c.final_logit_softcapping},
    "gemma3_text": lambda c: {"attention.sliding_window": c.sliding_window,
                              "final_logit_softcapping": c.final_logit_softcapping},
    "phi3": lambda c: {"attention.sliding_window": c.sliding_window or 0},
    "granite": _scales, "granitemoehybrid": _hybrid_keys,
    "gpt_oss": lambda c: _experts(c) | {"attention.sliding_window": c.sliding_window,
                                        "expert_feed_forward_length": c.intermediate_size},
    "qwen3_next": _delta_keys, "qwen3_5_text": _delta_keys, "qwen3_5_moe_text": _delta_keys,
    "llama4_text": lambda c: _experts(c) | {"feed_forward_length": c.intermediate_size_mlp,
                                            "expert_feed_forward_length": c.intermediate_size,
                                            "interleave_moe_layer_step": c.interleave_moe_layer_step},
}


def llama3_divisors(theta: float, dim: int, scaling: dict[str, Any]) -> np.ndarray:
    """What the converter writes into rope_freqs, one divisor a frequency."""
    wave = 2 * np.pi * theta ** (np.arange(0, dim, 2) / dim)
    ratio = scaling["original_max_position_embeddings"] / wave
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    between = np.clip((ratio - low) / (high - low), 0, 1)
    return (1 / ((1 - between) / scaling["factor"] + between)).astype(np.float32)
