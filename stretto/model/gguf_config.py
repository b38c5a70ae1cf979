"""The metadata of a GGUF file as a Hugging Face style configuration.

Each architecture of llama.cpp that a native family runs has an entry in FAMILIES. Keys that would change the model's
output and are not understood are refused by name; unknown ones are told in a warning. What llama.cpp decides for a
family by itself, and its files therefore do not say, stands in the family's function.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind

from stretto.model import gguf_tensors as tensors
from stretto.model.errors import ConfigError
from stretto.model.gguf_tensors import Tensors
from stretto.model.source import WeightError
from stretto.text.gguf_file import GGUFError, GGUFFile
from stretto.text.gguf_vocab import special_ids

log = logging.getLogger(__name__)

Own = Mapping[str, Any]  # metadata below "<architecture>."
Base = dict[str, Any]  # the configuration as far as all families have it in common
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def open_file(path: str | Path) -> GGUFFile:
    """Raises WeightError."""
    try:
        return GGUFFile(path)
    except (GGUFError, OSError) as e:
        raise WeightError(str(e)) from e


def gguf_config(path: str | Path) -> dict[str, Any]:
    """The model's config.json, as `ModelConfig.from_hf` takes it, from a GGUF file's metadata and tensor shapes.

    `dtype` is what the weights are stored in; "float32" for quantised ones, which are dequantised to it. Raises
    WeightError for a damaged file, and ConfigError for one that cannot be served as it was meant."""
    file = open_file(path)
    try:
        return config_of(file)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None


def family_of(file: GGUFFile) -> Family:
    """Raises ConfigError."""
    name = file.architecture
    if name not in FAMILIES:
        raise ConfigError(f"GGUF architecture {name!r} is not supported; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    return MIXTRAL if name == "llama" and file.metadata.get("llama.expert_count") else family


# Keys that are understood of every family, and those that say nothing about the computation.
_UNDERSTOOD = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scale_linear", "vocab_size",
}
_NEUTRAL = {  # harmless with these values; anything else changes the output in a way that is not implemented
    "expert_count": 0, "expert_used_count": 0, "attention.causal": True, "use_parallel_residual": False,
    "logit_scale": 1.0, "embedding_scale": 1.0, "residual_scale": 1.0, "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0, "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0,
    "rope.scaling.finetuned": None, "rope.scaling.yarn_ext_factor": 1.0, "tensor_data_layout": None, "pooling_type": 0,
    "expert_shared_count": 0, "expert_group_count": 0, "expert_group_used_count": 0, "expert_weights_scale": 1.0,
    "expert_gating_func": 1, "attention.sliding_window": 0, "attention.temperature_scale": 0.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "expert_weights_norm": True, "leading_dense_block_count": 0,
}


@dataclass(frozen=True)
class Family:
    """An architecture of llama.cpp."""

    architecture: str  # as Hugging Face calls it
    model_type: str
    tensors: Tensors
    more: Callable[[GGUFFile, Own, Base], Base] = lambda file, own, base: {}
    understood: tuple[str, ...] = ()  # keys beside the usual ones
    partial: bool = False  # may rotate a part of each head


def config_of(file: GGUFFile) -> dict[str, Any]:
    """As `gguf_config`, of an opened file."""
    family, name = family_of(file), file.architecture
    own = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    _refuse_unsupported(name, own, family)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError("the file holds no token_embd.weight: it is no language model")
    hidden, heads = _whole(own, "embedding_length"), _whole(own, "attention.head_count")
    head_dim, rotated = _head_dim(own, hidden, heads, family.partial)
    config = {
        "architectures": [family.architecture], "model_type": family.model_type, "hidden_act": "silu",
        "vocab_size": embedding.shape[0], "hidden_size": hidden,
        "num_hidden_layers": _whole(own, "block_count") - int(own.get("nextn_predict_layers") or 0),
        "num_attention_heads": heads, "head_dim": head_dim, "max_position_embeddings": _whole(own, "context_length"),
        "rms_norm_eps": _shortest(own.get("attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_theta": _shortest(own.get("rope.freq_base", 10000.0)), "rope_scaling": _rope_scaling(file, own, rotated),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "dtype": _dtype(file), **special_ids(file.metadata),
    }
    if family.partial:
        config["partial_rotary_factor"] = rotated / head_dim
    config |= family.more(file, own, config)
    for ours, theirs, default in (("num_key_value_heads", "attention.head_count_kv", heads),
                                  ("intermediate_size", "feed_forward_length", None)):
        if ours not in config:
            config[ours] = _whole(own, theirs, default)
    return config


def _refuse_unsupported(name: str, own: Own, family: Family) -> None:
    for key, value in own.items():
        if key in family.understood or key in _UNDERSTOOD:
            continue
        if key not in _NEUTRAL:
            log.warning("GGUF key %s.%s (%.60r) is not known here and has no effect", name, key, value)
        elif (neutral := _NEUTRAL[key]) is not None and value != neutral:
            raise ConfigError(f"{name}.{key} is {value!r}, which is not supported (only {neutral!r} is)")
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        value = own.get(key)
        if isinstance(value, list) and len(set(value)) > 1 and key not in family.understood:
            raise ConfigError(f"{name}.{key} differs between layers ({value}), which is not supported")


def _head_dim(own: Own, hidden: int, heads: int, partial: bool) -> tuple[int, int]:
    """Features of a head, and how many of them are rotated."""
    head_dim = _whole(own, "attention.key_length", hidden // heads)
    rotated = _whole(own, "rope.dimension_count", head_dim)
    for key, value, wrong in (("attention.value_length", _whole(own, "attention.value_length", head_dim), False),
                              ("rope.dimension_count", rotated, partial)):
        if value != head_dim and not wrong:
            raise ConfigError(f"{key} is {value} and the heads have {head_dim} features; only equal sizes work")
    return head_dim, rotated


def _rope_scaling(file: GGUFFile, own: Own, rotated: int) -> dict[str, Any] | None:
    """How positions are scaled, in the words of Hugging Face.

    Llama 3.1 and later store what their scaling comes to, one divisor per frequency, in the tensor rope_freqs. That is
    what "longrope" takes, so it is applied under this name, with the same divisors for short and long contexts and
    without the attention factor that longrope computes by itself. Phi's long and short divisors likewise."""
    kind = own.get("rope.scaling.type", "none")
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0))
    context = _whole(own, "context_length")
    original = own.get("rope.scaling.original_context_length", context)
    attention_factor = own.get("rope.scaling.attn_factor", 1.0)
    found = [name for name in ROPE_TENSORS if name in file.tensors]
    if found:
        if kind not in ("none", "longrope") and factor != 1.0:
            raise ConfigError(f"the file holds {found[0]} and asks for rope scaling {kind!r} too; one of them only")
        short = _divisors(file, found[-1], rotated)
        return {"rope_type": "longrope", "short_factor": short, "long_factor": _divisors(file, found[0], rotated),
                "attention_factor": attention_factor, "original_max_position_embeddings": original}
    if kind in ("none", "linear"):
        if attention_factor != 1.0:
            raise ConfigError(f"rope.scaling.attn_factor is {attention_factor}, which goes with yarn only")
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind != "yarn":
        raise ConfigError(f"rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn")
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
               "beta_fast": own.get("rope.scaling.yarn_beta_fast", 32.0),
               "beta_slow": own.get("rope.scaling.yarn_beta_slow", 1.0)}
    if attention_factor != 1.0:  # the file's factor multiplies YaRN's own, the configuration's replaces it
        scaling["attention_factor"] = attention_factor * (1.0 + 0.1 * math.log(factor))
    return scaling


def _divisors(file: GGUFFile, name: str, rotated: int) -> list[float]:
    info = file.tensors[name]
    if info.kind is not Kind.F32 or info.shape != (rotated // 2,):
        raise ConfigError(f"{name} is {info.kind.name} of shape {list(info.shape)}; not F32 of [{rotated // 2}]")
    return file.data(name).view(np.float32).tolist()


def _dtype(file: GGUFFile) -> str:
    kinds = {info.kind for info in file.tensors.values() if len(info.shape) > 1}
    if kinds <= {Kind.BF16}:
        return "bfloat16"
    return "float16" if kinds <= {Kind.F16} else "float32"


def _whole(values: Own, key: str, default: int | None = None) -> int:
    """A positive whole number; a list of equal ones counts as one."""
    value = values.get(key, default)
    if isinstance(value, list) and value and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"metadata {key} is {value!r}; a positive whole number is needed")
    return value


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


# ------------------------------------------------------------------------------------------------------------ families
_WINDOW = "attention.sliding_window"
_EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length")
_SCALES = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
           "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
_STATES = ("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size")


def _llama(file: GGUFFile, own: Own, base: Base) -> Base:
    """Hugging Face's Llama has no window; Mistral is a Llama with one."""
    if not own.get(_WINDOW):
        return {}
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": own[_WINDOW]}


def _mistral3(file: GGUFFile, own: Own, base: Base) -> Base:
    """Mistral Small 3; those whose scores are widened with the position are refused by that key."""
    return {"sliding_window": None}


def _experts(own: Own, count: str = "num_experts") -> Base:
    return {count: _whole(own, "expert_count"), "num_experts_per_tok": _whole(own, "expert_used_count")}


def _mixtral(file: GGUFFile, own: Own, base: Base) -> Base:
    return _experts(own, "num_local_experts") | {"sliding_window": own.get(_WINDOW) or None}


def _qwen3_moe(file: GGUFFile, own: Own, base: Base) -> Base:
    """The weights of a token's experts sum to 1, in llama.cpp and in all models that were published."""
    dense = [i for i in range(base["num_hidden_layers"]) if f"blk.{i}.ffn_gate_inp.weight" not in file.tensors]
    return _experts(own) | {"moe_intermediate_size": _whole(own, "expert_feed_forward_length"), "norm_topk_prob": True,
                            "mlp_only_layers": dense, "decoder_sparse_step": 1}


def _gemma(file: GGUFFile, own: Own, base: Base, largest: int) -> Base:
    """In the largest model, of so many layers, scores are scaled as if heads shared the hidden size."""
    per_head = base["hidden_size"] // base["num_attention_heads"]
    return {"hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": per_head if base["num_hidden_layers"] == largest else base["head_dim"],
            "final_logit_softcapping": own.get("final_logit_softcapping") or None}


def _gemma2(file: GGUFFile, own: Own, base: Base) -> Base:
    return _gemma(file, own, base, 46) | {
        "sliding_window": own.get(_WINDOW, 4096), "attn_logit_softcapping": own.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": own.get("final_logit_softcapping", 30.0)}


def _gemma3(file: GGUFFile, own: Own, base: Base) -> Base:
    """Every sixth layer sees all positions."""
    return _gemma(file, own, base, 62) | {
        "sliding_window": own.get(_WINDOW) or None, "attn_logit_softcapping": None, "sliding_window_pattern": 6,
        "rope_local_base_freq": _shortest(own.get("rope.freq_base_swa", 10000.0))}


def _phi3(file: GGUFFile, own: Own, base: Base) -> Base:
    return {"sliding_window": own.get(_WINDOW) or None}


def _chatglm(file: GGUFFile, own: Own, base: Base) -> Base:
    return {"attention_bias": any(f"blk.0.attn_{part}.bias" in file.tensors for part in ("qkv", "q"))}


def _granite(file: GGUFFile, own: Own, base: Base) -> Base:
    plain = {"attention.scale": base["head_dim"] ** -0.5}
    return {ours: _shortest(own.get(key) or plain.get(key, 1.0)) for ours, key in _SCALES.items()}


def _gpt_oss(file: GGUFFile, own: Own, base: Base) -> Base:
    scaling = base["rope_scaling"]
    return _experts(own, "num_local_experts") | {
        "intermediate_size": _whole(own, "expert_feed_forward_length", own.get("feed_forward_length")),
        "sliding_window": _whole(own, _WINDOW), "attention_bias": True,
        "rope_scaling": scaling and scaling | {"truncate": False}}


def _granite_hybrid(file: GGUFFile, own: Own, base: Base) -> Base:
    """A layer without KV heads keeps a state."""
    kv, heads = own.get("attention.head_count_kv"), _whole(own, "ssm.time_step_rank")
    if not isinstance(kv, list):
        raise ConfigError(f"granitehybrid.attention.head_count_kv is {kv!r}; a number for each layer is needed")
    shared = file.tensors.get("blk.0.ffn_up_shexp.weight") or file.tensors.get("blk.0.ffn_up.weight")
    found = _granite(file, own, base) | {
        "num_key_value_heads": max(kv), "layer_types": ["attention" if n else "mamba" for n in kv],
        "position_embedding_type": "rope" if own.get("rope.scaling.finetuned", True) else "nope",
        "attention_bias": any(name.endswith("attn_q.bias") for name in file.tensors),
        "mamba_n_heads": heads, "mamba_d_head": _whole(own, "ssm.inner_size") // heads,
        "mamba_n_groups": _whole(own, "ssm.group_count"), "mamba_d_state": _whole(own, "ssm.state_size"),
        "mamba_d_conv": _whole(own, "ssm.conv_kernel"),
        "mamba_expand": _whole(own, "ssm.inner_size") // base["hidden_size"],
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in file.tensors),
        "shared_intermediate_size": shared.shape[0] if shared else 1, "num_local_experts": 0}
    return found | (_experts(own, "num_local_experts") if own.get("expert_count") else {"num_experts_per_tok": 1})


def _delta_net(file: GGUFFile, own: Own, base: Base) -> Base:
    """Qwen3-Next and Qwen3.5."""
    heads = _whole(own, "ssm.time_step_rank")
    found = {"linear_num_value_heads": heads, "linear_value_head_dim": _whole(own, "ssm.inner_size") // heads,
             "linear_num_key_heads": _whole(own, "ssm.group_count"), "linear_conv_kernel_dim":
             _whole(own, "ssm.conv_kernel"), "linear_key_head_dim": _whole(own, "ssm.state_size"),
             "full_attention_interval": own.get("full_attention_interval", 4),
             "attention_bias": any(name.endswith("attn_q.bias") for name in file.tensors)}
    if not own.get("expert_count"):
        return found
    inner = _whole(own, "expert_feed_forward_length")
    return found | _experts(own) | {
        "moe_intermediate_size": inner, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "intermediate_size": own.get("feed_forward_length") or inner,
        "shared_expert_intermediate_size": _whole(own, "expert_shared_feed_forward_length", inner)}


def _llama4(file: GGUFFile, own: Own, base: Base) -> Base:
    """The model of 128 experts alone does not norm its heads."""
    return _experts(own, "num_local_experts") | {
        "intermediate_size": _whole(own, "expert_feed_forward_length"),
        "intermediate_size_mlp": _whole(own, "feed_forward_length"), "use_qk_norm": own["expert_count"] != 128,
        "interleave_moe_layer_step": _whole(own, "interleave_moe_layer_step")}


# Text stands at the same place in all sections of a rotation; what is added to early layers is made of images alone.
_OF_IMAGES = ("rope.dimension_sections", "n_deepstack_layers")
_OF_STATES = (*_EXPERTS, *_STATES, "full_attention_interval", "rope.dimension_sections", "nextn_predict_layers")
MIXTRAL = Family("MixtralForCausalLM", "mixtral", tensors.MIXTRAL, _mixtral, (*_EXPERTS, _WINDOW))
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "llama", tensors.LLAMA, _llama, (_WINDOW,)),
    "mistral3": Family("MistralForCausalLM", "mistral", tensors.LLAMA, _mistral3),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", tensors.PLAIN),
    "qwen2vl": Family("Qwen2ForCausalLM", "qwen2", tensors.PLAIN, understood=_OF_IMAGES),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", tensors.PLAIN),
    "qwen3vl": Family("Qwen3ForCausalLM", "qwen3", tensors.PLAIN, understood=_OF_IMAGES),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", tensors.QWEN3_MOE, _qwen3_moe, _EXPERTS),
    "qwen3vlmoe": Family("Qwen3MoeForCausalLM", "qwen3_moe", tensors.QWEN3_MOE, _qwen3_moe, (*_EXPERTS, *_OF_IMAGES)),
    "qwen3next": Family("Qwen3NextForCausalLM", "qwen3_next", tensors.QWEN3_NEXT, _delta_net, _OF_STATES, partial=True),
    "qwen35": Family("Qwen3_5ForCausalLM", "qwen3_5_text", tensors.QWEN3_5, _delta_net, _OF_STATES, partial=True),
    "qwen35moe": Family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", tensors.QWEN3_5, _delta_net, _OF_STATES,
                        partial=True),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", tensors.GEMMA, _gemma2,
                     (_WINDOW, "attn_logit_softcapping", "final_logit_softcapping")),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", tensors.GEMMA, _gemma3,
                     (_WINDOW, "final_logit_softcapping", "rope.freq_base_swa")),
    "phi3": Family("Phi3ForCausalLM", "phi3", tensors.PHI3, _phi3, (_WINDOW,), partial=True),
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", tensors.OLMO2),
    "glm4": Family("Glm4ForCausalLM", "glm4", tensors.GLM4, partial=True),
    "chatglm": Family("GlmForCausalLM", "glm", tensors.GLM, _chatglm, partial=True),
    "granite": Family("GraniteForCausalLM", "granite", tensors.LLAMA, _granite, tuple(_SCALES.values())),
    "granitehybrid": Family("GraniteMoeHybridForCausalLM", "granitemoehybrid", tensors.GRANITE_HYBRID, _granite_hybrid,
                            (*_EXPERTS, *_STATES, *_SCALES.values(), "attention.head_count_kv")),
    "gpt-oss": Family("GptOssForCausalLM", "gpt_oss", tensors.GPT_OSS, _gpt_oss, (*_EXPERTS, _WINDOW)),
    "llama4": Family("Llama4ForCausalLM", "llama4_text", tensors.LLAMA4, _llama4,
                     (*_EXPERTS, "interleave_moe_layer_step")),
}
