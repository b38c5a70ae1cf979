"""GGUF files as a source of weights, and their metadata as a Hugging Face style configuration.

Architectures llama (Mistral models are written as llama), qwen2 and qwen3. Quantised tensors stay packed
(`ops.packed`) where the device multiplies by them; others are dequantised to float32 by the `gguf` package when they
are read, and the model casts them to its dtype. Whatever in the file would change the model's output and is not
supported here is refused by name.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, dequantize
from gguf import GGMLQuantizationType as Kind

from stretto.model.config import ConfigError
from stretto.model.source import WeightError
from stretto.ops.packed import Layout, Packed, pack4
from stretto.text.gguf_file import GGUFError, GGUFFile
from stretto.text.gguf_vocab import special_ids

log = logging.getLogger(__name__)

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
QUANTISED = {Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0,
             Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K}
_PACKED = {Kind.Q4_0: Layout("int4", 32), Kind.Q4_1: Layout("int4", 32, True), Kind.Q4_K: Layout("int4", 32, True),
           Kind.Q8_0: Layout("int8", 32)}
_PLAIN = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # read by gguf_config


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None where there is none.

    >>> hf_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    if match := _LAYER.fullmatch(name):
        layer, part, end = match.groups()
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{end}" if part in _LAYER_NAMES else None
    part, _, end = name.rpartition(".")
    return f"{_GLOBAL_NAMES[part]}.{end}" if part in _GLOBAL_NAMES and end in ("weight", "bias") else None


class GGUFSource:
    """A WeightSource over one GGUF file. Tensors come by their Hugging Face names, in float32 if they were quantised.

    The llama architecture stores the rows of q and k interleaved, for a rotary embedding that turns neighbouring
    features; they are put back into the order that Hugging Face uses (first and second half of a head):

        file        0 h 1 h+1 2 h+2 ...          h = head_dim / 2
        here        0 1 2 ... h h+1 h+2 ...
    """

    def __init__(self, path: str | Path):
        """Raises WeightError for a file that is damaged or holds tensors that cannot be served, ConfigError for an
        architecture that is not supported."""
        self._file = _open(path)
        self._names: dict[str, str] = {}
        self._unpacked: Counter[str] = Counter()  # numbers that were quantised and have been dequantised, by kind
        unknown, unreadable = [], []
        for name, info in self._file.tensors.items():
            mapped = hf_name(name)
            if mapped is not None:
                self._names[mapped] = name
            elif name not in _ROPE_TENSORS:
                unknown.append(name)
            if info.kind not in QUANTISED and info.kind not in _PLAIN:
                unreadable.append(f"{name} ({info.kind.name})")
        if unknown:
            raise WeightError(f"{self._file.path} holds tensors that no supported architecture has: {_some(unknown)}")
        if unreadable:
            kinds = ", ".join(sorted(kind.name for kind in (*_PLAIN, *QUANTISED)))
            raise WeightError(f"{self._file.path}: quantisation not supported: {_some(unreadable)}; supported: {kinds}")
        self._permuted = self._permuted_heads()

    def _permuted_heads(self) -> dict[str, int]:
        """Heads of each kind of tensor whose rows are interleaved, by the end of its name."""
        architecture, metadata = self._file.architecture, self._file.metadata
        if architecture not in ARCHITECTURES:
            raise ConfigError(f"{self._file.path}: {_unsupported(architecture)}")
        if architecture != "llama":
            return {}
        heads = _whole(metadata, "llama.attention.head_count")
        return {"q_proj": heads, "k_proj": _whole(metadata, "llama.attention.head_count_kv", heads)}

    def names(self) -> Iterable[str]:
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._names[name]].shape

    def tensor(self, name: str) -> torch.Tensor:
        info = self._file.tensors[self._names[name]]
        data = self._file.data(info.name)
        if info.kind in _PLAIN:
            tensor = torch.from_numpy(data.reshape(-1)).view(_PLAIN[info.kind]).reshape(info.shape)
        else:
            tensor = torch.from_numpy(dequantize(data, info.kind))
            self._unpacked[info.kind.name] += tensor.numel()
        heads = self._permuted.get(name.rsplit(".", 2)[-2])
        return tensor if heads is None else unpermute(tensor, heads)

    def layout(self, name: str) -> Layout | None:
        """See `source.PackedSource`."""
        return _PACKED.get(self._file.tensors[self._names[name]].kind)

    def packed(self, name: str) -> Packed:
        """See `source.PackedSource`."""
        info = self._file.tensors[self._names[name]]
        blocks = self._file.data(info.name).reshape(info.shape[0], -1, GGML_QUANT_SIZES[info.kind][1])
        found = Packed(_PACKED[info.kind], *_READERS[info.kind](blocks))
        heads = self._permuted.get(name.rsplit(".", 2)[-2])
        return found if heads is None else found.take(unpermute(torch.arange(found.outputs), heads))

    def told(self, dtype: torch.dtype) -> None:
        """See `source.PackedSource`. Exact types cost only what they cost, which is told by whoever plans memory."""
        if self._unpacked and dtype.itemsize == 2:
            log.warning("weights stored as %s were dequantised at load: %.2f GB of %s",
                        ", ".join(sorted(self._unpacked)), self._unpacked.total() * 2 / 1e9,
                        str(dtype).removeprefix("torch."))


# ---------------------------------------------------------------------------------------------------- packed weights
# Each takes the blocks of a tensor, uint8 [O, blocks of a row, bytes of a block], and gives codes, scales and offsets.
Parts = tuple[torch.Tensor, ...]


def _halves(blocks: np.ndarray, start: int) -> torch.Tensor:
    """The float16 at `start` of each block -> float32 [O, blocks]."""
    found = np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]
    return torch.from_numpy(found.astype(np.float32))


def _nibbles(blocks: np.ndarray, start: int) -> torch.Tensor:
    """32 values in 16 bytes: low halves of all bytes, then the high ones. -> int4 codes [O, I / 2]."""
    stored = torch.from_numpy(np.ascontiguousarray(blocks[..., start : start + 16]))
    return pack4(torch.cat((stored & 15, stored >> 4), -1).flatten(1))


def _q4_0(blocks: np.ndarray) -> Parts:
    return _nibbles(blocks, 2), _halves(blocks, 0)


def _q4_1(blocks: np.ndarray) -> Parts:
    """d q + m = d (q - 8) + (m + 8 d)."""
    d = _halves(blocks, 0)
    return _nibbles(blocks, 4), d, _halves(blocks, 2) + 8 * d


def _q8_0(blocks: np.ndarray) -> Parts:
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return torch.from_numpy(codes).flatten(1), _halves(blocks, 0)


def _q4_k(blocks: np.ndarray) -> Parts:
    """Super-blocks of 256: d, dmin, eight pairs of a 6-bit scale and minimum in 12 bytes, and 4 x 32 bytes of nibbles,
    which are already in the order of int4 codes. d s q - dmin m = d s (q - 8) + (8 d s - dmin m)."""
    stored = torch.from_numpy(np.ascontiguousarray(blocks[..., 4:16])).int()
    low, high, rest = stored[..., :4], stored[..., 4:8], stored[..., 8:]
    scales = torch.cat((low & 63, rest & 15 | low >> 6 << 4), -1)
    minima = torch.cat((high & 63, rest >> 4 | high >> 6 << 4), -1)
    scales, minima = ((part * _halves(blocks, start)[..., None]).flatten(1)
                      for part, start in ((scales, 0), (minima, 2)))
    return torch.from_numpy(np.ascontiguousarray(blocks[..., 16:])).flatten(1), scales, 8 * scales - minima


_READERS = {Kind.Q4_0: _q4_0, Kind.Q4_1: _q4_1, Kind.Q8_0: _q8_0, Kind.Q4_K: _q4_k}


def _open(path: str | Path) -> GGUFFile:
    try:
        return GGUFFile(path)
    except (GGUFError, OSError) as e:
        raise WeightError(str(e)) from e


def unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """rows [heads * head_dim, ...] with the two halves of each head interleaved -> the halves one after the other."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


# ----------------------------------------------------------------------------------------------------- configuration
# Keys below "<architecture>." that are understood, and those that say nothing about the computation.
_UNDERSTOOD = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "attention.sliding_window", "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scale_linear", "vocab_size",
}
_NEUTRAL = {  # harmless with these values; anything else changes the output in a way that is not implemented
    "expert_count": 0, "expert_used_count": 0, "attention.causal": True, "use_parallel_residual": False,
    "logit_scale": 1.0, "embedding_scale": 1.0, "residual_scale": 1.0, "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0, "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0,
    "rope.scaling.finetuned": None, "rope.scaling.yarn_ext_factor": 1.0, "tensor_data_layout": None, "pooling_type": 0,
}


def gguf_config(path: str | Path) -> dict[str, Any]:
    """The model's config.json, as `ModelConfig.from_hf` takes it, from a GGUF file's metadata and tensor shapes.

    `dtype` is what the weights are stored in; "float32" for quantised ones, which are dequantised to it. Raises
    WeightError for a damaged file, and ConfigError for one that cannot be served as it was meant."""
    file = _open(path)
    try:
        return _config(file)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None


def _config(file: GGUFFile) -> dict[str, Any]:
    architecture = file.architecture
    if architecture not in ARCHITECTURES:
        raise ConfigError(_unsupported(architecture))
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    _refuse_unsupported(architecture, own)
    hidden, heads = _whole(own, "embedding_length"), _whole(own, "attention.head_count")
    head_dim = _head_dim(own, hidden, heads)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError("the file holds no token_embd.weight: it is no language model")
    config = {
        "architectures": [ARCHITECTURES[architecture]], "model_type": architecture, "hidden_act": "silu",
        "vocab_size": embedding.shape[0], "hidden_size": hidden,
        "intermediate_size": _whole(own, "feed_forward_length"), "num_hidden_layers": _whole(own, "block_count"),
        "num_attention_heads": heads, "num_key_value_heads": _whole(own, "attention.head_count_kv", heads),
        "head_dim": head_dim, "max_position_embeddings": _whole(own, "context_length"),
        "rms_norm_eps": _shortest(own.get("attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_theta": _shortest(own.get("rope.freq_base", 10000.0)), "rope_scaling": _rope_scaling(file, own, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "dtype": _dtype(file), **special_ids(file.metadata),
    }
    if window := own.get("attention.sliding_window"):  # Hugging Face's Llama has none; Mistral is a Llama with a window
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return config


def _refuse_unsupported(architecture: str, own: Mapping[str, Any]) -> None:
    for key, value in own.items():
        if key in _NEUTRAL:
            neutral = _NEUTRAL[key]
            if neutral is not None and value != neutral:
                raise ConfigError(f"{architecture}.{key} is {value!r}, which is not supported (only {neutral!r} is)")
        elif key not in _UNDERSTOOD:
            log.warning("GGUF key %s.%s (%.60r) is not known here and has no effect", architecture, key, value)
    if own.get("attention.sliding_window") and architecture != "llama":
        raise ConfigError(f"{architecture}.attention.sliding_window is {own['attention.sliding_window']}; a window is"
                          " supported for the llama architecture only")
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        value = own.get(key)
        if isinstance(value, list) and len(set(value)) > 1:
            raise ConfigError(f"{architecture}.{key} differs between layers ({value}), which is not supported")


def _head_dim(own: Mapping[str, Any], hidden: int, heads: int) -> int:
    head_dim = _whole(own, "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := _whole(own, key, head_dim)) != head_dim:
            raise ConfigError(f"{key} is {value} and the heads have {head_dim} features; only equal sizes work")
    return head_dim


def _rope_scaling(file: GGUFFile, own: Mapping[str, Any], head_dim: int) -> dict[str, Any] | None:
    """How positions are scaled, in the words of Hugging Face.

    Llama 3.1 and later store what their scaling comes to, one divisor per frequency, in the tensor rope_freqs. That is
    what "longrope" takes, so it is applied under this name, with the same divisors for short and long contexts and
    without the attention factor that longrope computes by itself. Phi's long and short divisors likewise."""
    kind = own.get("rope.scaling.type", "none")
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0))
    context = _whole(own, "context_length")
    original = own.get("rope.scaling.original_context_length", context)
    attention_factor = own.get("rope.scaling.attn_factor", 1.0)
    tensors = [name for name in _ROPE_TENSORS if name in file.tensors]
    if tensors:
        if kind not in ("none", "longrope") and factor != 1.0:
            raise ConfigError(f"the file holds {tensors[0]} and asks for rope scaling {kind!r} too; one of them only")
        short = _divisors(file, tensors[-1], head_dim)
        return {"rope_type": "longrope", "short_factor": short, "long_factor": _divisors(file, tensors[0], head_dim),
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


def _divisors(file: GGUFFile, name: str, head_dim: int) -> list[float]:
    info = file.tensors[name]
    if info.kind is not Kind.F32 or info.shape != (head_dim // 2,):
        raise ConfigError(f"{name} is {info.kind.name} of shape {list(info.shape)}; not F32 of [{head_dim // 2}]")
    return file.data(name).view(np.float32).tolist()


def _dtype(file: GGUFFile) -> str:
    kinds = {info.kind for info in file.tensors.values() if len(info.shape) > 1}
    if kinds <= {Kind.BF16}:
        return "bfloat16"
    return "float16" if kinds <= {Kind.F16} else "float32"


def _whole(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
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


def _unsupported(architecture: str) -> str:
    return f"GGUF architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
