"""What a model's config.json says, in one frozen record. No torch in this module.

Defaults are those of the architecture's configuration class in transformers, since config.json may leave them out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.model.errors import FETCH_LFS, ConfigError, is_pointer
from stretto.model.quantization import METHODS, Quantization, parse_quantization
from stretto.wire import STATE

__all__ = ["ConfigError", "ModelConfig", "RopeConfig"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. Fields below `dim` belong to some kinds only; 0 and () mean: not given."""

    kind: str = "default"  # "none": nothing is rotated
    theta: float = 10000.0
    dim: int = 0  # rotated features of a head
    factor: float = 1.0
    original_max_position: int = 0  # positions before scaling
    attention_factor: float | None = None  # cos and sin are multiplied by it
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope, one per frequency
    long_factor: tuple[float, ...] = ()  # longrope, one per frequency


ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_ROPE_NEEDS = {"linear": ("factor",), "dynamic": ("factor",), "yarn": (), "default": (),
               "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "longrope": ("short_factor", "long_factor")}

_GEMMA: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
                          "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
                          "query_pre_attn_scalar": 256}
_GLM: dict[str, Any] = {"max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128,
                        "rms_norm_eps": 1.5625e-7, "attention_bias": True, "partial_rotary_factor": 0.5}
_QWEN3_NEXT: dict[str, Any] = {
    "max_position_embeddings": 32768, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
    "full_attention_interval": 4, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
_GRANITE: dict[str, Any] = {
    "max_position_embeddings": 2048, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0}
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096,
                         "max_window_layers": 28},
    "Qwen3ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096,
                         "max_window_layers": 28, "head_dim": 128},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "MiMoForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "use_sliding_window": False},
    "Gemma2ForCausalLM": _GEMMA | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
                                   "final_logit_softcapping": 30.0},
    "Gemma3ForCausalLM": _GEMMA | {"vocab_size": 262208, "num_attention_heads": 8, "max_position_embeddings": 131072,
                                   "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "Olmo2ForCausalLM": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    "Phi3ForCausalLM": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "GlmForCausalLM": _GLM, "Glm4ForCausalLM": _GLM,
    "MixtralForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                           "rope_theta": 1e6, "num_experts_per_tok": 2, "num_local_experts": 8},
    "Qwen3MoeForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 4, "sliding_window": 4096,
                            "max_window_layers": 28, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
                            "norm_topk_prob": False, "decoder_sparse_step": 1},
    "Qwen3NextForCausalLM": _QWEN3_NEXT | {"intermediate_size": 5632, "num_experts": 512, "num_experts_per_tok": 10},
    "Qwen3_5ForCausalLM": _QWEN3_NEXT | {"num_key_value_heads": 4},
    "Qwen3_5MoeForCausalLM": _QWEN3_NEXT | {"intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8},
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeHybridForCausalLM": _GRANITE | {
        "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024,
        "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_conv_bias": True},
    "Llama4ForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128,
                          "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "intermediate_size_mlp": 16384,
                          "num_experts_per_tok": 1, "num_local_experts": 16, "interleave_moe_layer_step": 1,
                          "use_qk_norm": True, "no_rope_layer_interval": 4, "attention_chunk_size": 8192,
                          "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1},
    "GptOssForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64,
                          "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "attention_bias": True,
                          "num_experts_per_tok": 4, "num_local_experts": 128, "swiglu_alpha": 1.702,
                          "swiglu_limit": 7.0},
}
_BY_MODEL_TYPE = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
                  "mistral": "MistralForCausalLM", "mimo": "MiMoForCausalLM", "gemma2": "Gemma2ForCausalLM",
                  "gemma3_text": "Gemma3ForCausalLM", "olmo2": "Olmo2ForCausalLM", "phi3": "Phi3ForCausalLM",
                  "glm": "GlmForCausalLM", "glm4": "Glm4ForCausalLM", "mixtral": "MixtralForCausalLM",
                  "qwen3_moe": "Qwen3MoeForCausalLM", "gpt_oss": "GptOssForCausalLM",
                  "qwen3_next": "Qwen3NextForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM",
                  "granite": "GraniteForCausalLM", "granitemoehybrid": "GraniteMoeHybridForCausalLM",
                  "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
                  "llama4_text": "Llama4ForCausalLM"}

_TEXT_PARTS = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
               "Mistral3ForConditionalGeneration": "MistralForCausalLM",
               "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
               "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
               "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM"}

_WITHOUT_WINDOWS = ("LlamaForCausalLM", "GraniteForCausalLM", "Olmo2ForCausalLM", "GlmForCausalLM", "Glm4ForCausalLM")
_WITH_STATES = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "GraniteMoeHybridForCausalLM")
_MAY_STAND_STILL = ("GraniteMoeHybridForCausalLM",)
_WINDOWS_EVERYWHERE = ("MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM")
_FULL_EVERY = {"Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6, "GptOssForCausalLM": 2}  # every n-th layer has no window


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model with grouped-query attention and rotary positions."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    hidden_act: str
    rope: RopeConfig
    windows: tuple[int | None, ...]  # of each layer; None: full attention; wire.STATE: it keeps a state instead
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    max_position: int  # rope scaling included
    local_rope: RopeConfig | None = None  # of the layers with a window, where they rotate in a way of their own
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None  # what the checkpoint was saved in, by name
    quantization: Quantization | None = None  # how the checkpoint stores its weights
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)  # config.json as it is

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """From the objects in config.json and generation_config.json. Raises ConfigError."""
        name = architecture_of(config)
        _refuse_unserved(name, config)
        given = {"rms_norm_eps": 1e-6, "hidden_act": "silu", **_FAMILY_DEFAULTS.get(name, {}), **config}
        get = given.get
        sizes = {key: _positive(name, key, get(key)) for key in
                 ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                  "max_position_embeddings")}
        n_layers, n_heads = sizes["num_hidden_layers"], sizes["num_attention_heads"]
        n_kv_heads = _positive(name, "num_key_value_heads", get("num_key_value_heads") or n_heads)
        head_dim = _positive(name, "head_dim", get("head_dim") or sizes["hidden_size"] // n_heads)
        if n_heads % n_kv_heads:
            raise ConfigError(f"{name}: num_attention_heads {n_heads} is not a multiple of num_key_value_heads "
                              f"{n_kv_heads}")
        rope, local_rope = _ropes(given, head_dim, sizes["max_position_embeddings"])
        most = sizes["max_position_embeddings"] if local_rope else _max_position(rope, sizes["max_position_embeddings"])
        most = min(most, _first_chunk(name, get) or most)
        return cls(
            architecture=name, vocab_size=sizes["vocab_size"], hidden_size=sizes["hidden_size"],
            intermediate_size=sizes["intermediate_size"], n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads,
            head_dim=head_dim, norm_eps=_epsilon(name, get("rms_norm_eps") or 1e-6),
            hidden_act=str(get("hidden_activation") or get("hidden_act")),
            rope=rope, windows=_windows(name, get, n_layers), tie_embeddings=_is_tied(config, get),
            attention_bias=bool(get("attention_bias", False)), mlp_bias=bool(get("mlp_bias", False)),
            max_position=most, local_rope=local_rope,
            bos_token_ids=token_ids("bos_token_id", config, generation_config),
            eos_token_ids=token_ids("eos_token_id", config, generation_config),
            dtype=get("dtype") or get("torch_dtype"), quantization=parse_quantization(config), raw=config)

    def value(self, key: str) -> Any:
        """What config.json gives under `key`, else the family's default, else None."""
        return self.raw[key] if key in self.raw else _FAMILY_DEFAULTS.get(self.architecture, {}).get(key)

    def size(self, key: str) -> int:
        """`value`, which must be a positive whole number. Raises ConfigError."""
        return _positive(self.architecture, key, self.value(key))


# Keys of any family that would change its text, and the only value that is served.
_ONLY = {"is_causal": (True, "tokens would see later ones"), "lm_head_bias": (False, "no head here has a bias"),
         "rope_interleaved": (False, "this family's pairs of features are half a head apart")}


def _refuse_unserved(name: str, config: Mapping[str, Any]) -> None:
    for key, (served, why) in _ONLY.items():
        if config.get(key, served) not in (served, None):
            raise ConfigError(f"{name}: {key} is {config[key]!r}, which is not supported: {why}")


def _first_chunk(name: str, get) -> int | None:
    """Positions up to which attention in chunks is ordinary attention: so many are served. Llama 4's layers attend
    within chunks; Qwen2.5-1M's shorten distances beyond one, less what is always near (Dual Chunk Attention,
    https://arxiv.org/abs/2402.17463)."""
    if chunk := get("attention_chunk_size"):
        return _positive(name, "attention_chunk_size", chunk)
    if dual := get("dual_chunk_attention_config"):
        return _positive(name, "dual_chunk_attention_config", dual.get("chunk_size", 0) - dual.get("local_size", 0))
    return None


def _is_tied(config: Mapping[str, Any], get) -> bool:
    """Whether the embedding is the head. A checkpoint without a head has nothing else."""
    listed = config.get("architectures") or [""]
    return bool(get("tie_word_embeddings", False)) or is_bare(str(listed if isinstance(listed, str) else listed[0]))


def read_config(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """config.json (its text part, where a native family runs it) and, if there is one, generation_config.json of an HF
    folder. Raises ConfigError."""
    config = _read_json(Path(folder) / "config.json", "point to a folder that holds a model in Hugging Face format")
    config = text_config(config)
    generation = Path(folder) / "generation_config.json"
    return config, _read_json(generation, "") if generation.is_file() else None


def _read_json(path: Path, hint: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        data = json.loads(text)
    except OSError as e:
        raise ConfigError(f"{path} cannot be read ({e.strerror}): {hint}") from e
    except ValueError as e:
        if is_pointer(path):
            raise ConfigError(f"{path} is the pointer of Git LFS to a file: {FETCH_LFS}") from e
        raise ConfigError(f"{path} is not JSON ({e}): fetch it again") from e
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}, not an object: fetch it again")
    return data


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a multimodal model whose text part is a native family: the configuration of that part. Others as they are."""
    family = _TEXT_PARTS.get(str((config.get("architectures") or [None])[0]))
    if family is None:
        return dict(config)
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype", "quantization_config")
    outer = {key: config[key] for key in kept if config.get(key) is not None}
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**tied, **config.get("text_config", {}), **outer, "architectures": [family]}


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first architecture that the config lists, else the one that its model_type stands for."""
    listed = config.get("architectures") or ()
    model_type = config.get("model_type")
    if listed:
        name = str(listed if isinstance(listed, str) else listed[0])
        whole = f"{name.removesuffix('Model')}ForCausalLM"
        return whole if is_bare(name) and whole in _FAMILY_DEFAULTS else name
    if not model_type:
        raise ConfigError("the config names neither architectures nor model_type: it is no model's config.json")
    return _BY_MODEL_TYPE.get(model_type, model_type)


def is_bare(architecture: str) -> bool:
    """Whether a checkpoint of it is a decoder without a head, as those of models for embeddings are."""
    return architecture.endswith("Model")


def token_ids(key: str, *configs: Mapping[str, Any] | None) -> tuple[int, ...]:
    """The ids under `key` in any of the configs, each once: HF writes one id or a list, and generation_config may
    name more than config.json. Raises ConfigError for what is no id."""
    found: list[int] = []
    for config in configs:
        value = (config or {}).get(key)
        found += [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    wrong = [i for i in found if isinstance(i, bool) or not isinstance(i, int)]
    if wrong:
        raise ConfigError(f"{key} is {wrong[0]!r}; it must be the id of a token, or a list of ids")
    return tuple(dict.fromkeys(i for i in found if i >= 0))  # -1 stands for none


def refuse_quantization(name: str, config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a checkpoint with a `quantization_config`, where none is read."""
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise ConfigError(f"quantization_config: the weights of {name} are quantised by {method!r}; quantised "
                          f"checkpoints ({', '.join(METHODS)}) are read for native families alone: take the "
                          "unquantised one")


def served_positions(name: str, max_position: int, context: int | None) -> int:
    """How many positions a model serves: `context`, or all it has. Raises ConfigError where it has fewer."""
    if context is not None and not 1 <= context <= max_position:
        raise ConfigError(f"{name}: a context of {context} positions was asked for; the model has {max_position}: ask "
                          "for at most that")
    return max_position if context is None else context


def _positive(name: str, key: str, value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: {key} is {value!r}; the config must give a positive whole number")
    return value


def _epsilon(name: str, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not 0 < found < 1:
        raise ConfigError(f"{name}: rms_norm_eps is {value!r}; a small positive number is needed")
    return found


def parse_rope(config: Mapping[str, Any], head_dim: int, max_position: int) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` (earlier). Raises ConfigError for an
    unknown kind, and for values that the kind needs and does not find."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"the scaling of positions (rope_parameters or rope_scaling) is {found!r}; an object with a "
                          "rope_type is needed")
    given = dict(found)
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # its name in the first Phi-3 checkpoints
    if kind not in ROPE_KINDS:
        raise ConfigError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    missing = [key for key in _ROPE_NEEDS[kind] if given.get(key) is None]
    if missing:
        raise ConfigError(f"rope type {kind!r} needs {', '.join(missing)}; the config gives {sorted(given)}")
    theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
    partial = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    original = (config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
                or max_position)
    factor = given.get("factor") or max_position / original
    dim = int(head_dim * partial)
    for key in ("short_factor", "long_factor"):
        if kind == "longrope" and len(given[key]) != dim // 2:
            raise ConfigError(f"rope type 'longrope': {key} has {len(given[key])} values; {dim} rotated features need "
                              f"{dim // 2}")
    defaults = RopeConfig()
    return RopeConfig(
        kind=kind, theta=float(theta), dim=dim, factor=float(factor), original_max_position=int(original),
        attention_factor=given.get("attention_factor"),
        low_freq_factor=given.get("low_freq_factor") or defaults.low_freq_factor,
        high_freq_factor=given.get("high_freq_factor") or defaults.high_freq_factor,
        beta_fast=given.get("beta_fast") or defaults.beta_fast, beta_slow=given.get("beta_slow") or defaults.beta_slow,
        mscale=given.get("mscale") or 0.0, mscale_all_dim=given.get("mscale_all_dim") or 0.0,
        truncate=given.get("truncate", True), short_factor=tuple(given.get("short_factor") or ()),
        long_factor=tuple(given.get("long_factor") or ()))


def _ropes(config: Mapping[str, Any], head_dim: int, max_position: int) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotation of layers without a window, and that of layers with one where it is another."""
    if architecture_of(config) in _MAY_STAND_STILL and config.get("position_embedding_type") != "rope":
        return RopeConfig(kind="none", dim=head_dim), None
    by_type = config.get("rope_parameters") or {}
    if "full_attention" in by_type:
        both = ({**config, "rope_parameters": by_type[kind], "rope_theta": config.get(theta)} for kind, theta in
                (("full_attention", "rope_theta"), ("sliding_attention", "rope_local_base_freq")))
        full, local = (parse_rope(one, head_dim, max_position) for one in both)
        return full, local
    full = parse_rope(config, head_dim, max_position)
    local_theta = config.get("rope_local_base_freq")
    return full, None if local_theta is None else RopeConfig(theta=float(local_theta), dim=head_dim)


def _max_position(rope: RopeConfig, max_position: int) -> int:
    """Positions that the scaled embedding serves. By the convention of HF configs, `max_position_embeddings` stays at
    its unscaled value for linear, dynamic and (in most checkpoints) yarn; llama3 and longrope give the scaled one."""
    if rope.kind in ("linear", "dynamic"):
        return int(max_position * rope.factor)
    if rope.kind == "yarn":
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position


def _windows(name: str, get, n_layers: int) -> tuple[int | None, ...]:
    """The window of each layer. Qwen gives a window that `use_sliding_window` switches on for the layers from
    `max_window_layers` on; others have it in every layer, or in all but every n-th; or the config names each layer's
    type."""
    if name in _WITH_STATES:
        return _states(name, get, n_layers)
    window = get("sliding_window")
    if not get("use_sliding_window", not name.startswith("Qwen")):
        window = None
    if window is None or name in _WITHOUT_WINDOWS:
        return (None,) * n_layers
    window = _positive(name, "sliding_window", window)
    if name in _WINDOWS_EVERYWHERE:
        return (window,) * n_layers
    types = get("layer_types")
    if types is None and name in _FULL_EVERY:
        every = int(get("sliding_window_pattern") or _FULL_EVERY[name])
        return tuple(window if (i + 1) % every else None for i in range(n_layers))
    if types is None:
        first = int(get("max_window_layers", 0) or 0)
        return tuple(window if i >= first else None for i in range(n_layers))
    return _by_type(name, types, n_layers, {"full_attention": None, "sliding_attention": window})


def _states(name: str, get, n_layers: int) -> tuple[int | None, ...]:
    """Of layers that keep states, between those of full attention: as the config names each, else all but every n-th,
    or (Granite) all."""
    every = int(get("full_attention_interval") or n_layers + 1)
    types = get("layer_types") or get("layers_block_type") or [
        "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(n_layers)]
    known = {"full_attention": None, "linear_attention": STATE}
    if name.startswith("Granite"):
        known |= {"attention": None, "mamba": STATE}
    return _by_type(name, types, n_layers, known)


def _by_type(name: str, types: Sequence[str], n_layers: int, known: Mapping[str, int | None]) -> tuple[int | None, ...]:
    unknown = sorted({t for t in types if t not in known})
    if unknown or len(types) != n_layers:
        raise ConfigError(f"{name}: layer_types has {len(types)} entries for {n_layers} layers"
                          + (f" and the unknown types {', '.join(unknown)}" if unknown else "")
                          + f"; supported: {', '.join(known)}")
    return tuple(known[t] for t in types)
