"""GGUF files written for a test: tiny models in llama.cpp's layout, and vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

F32 = gguf.GGMLQuantizationType.F32
_LAYER = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
          "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
          "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
          "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    part, _, end = name.rpartition(".")
    if part in _TOP:
        return f"{_TOP[part]}.{end}"
    _, _, layer, rest = part.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}.{end}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of the llama architecture."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


class Writer:
    """Metadata by full key; tensors as float arrays that are quantised on the way."""

    def __init__(self, path: Path, architecture: str, metadata: dict[str, Any] | None = None):
        self.path, self.architecture = path, architecture
        self._writer = gguf.GGUFWriter(path, architecture)
        for key, value in (metadata or {}).items():
            self.key(key, value)

    def key(self, key: str, value: Any) -> None:
        writer, kind = self._writer, type(value)
        if kind is bool:
            writer.add_bool(key, value)
        elif kind is int:
            writer.add_uint32(key, value)
        elif kind is float:
            writer.add_float32(key, value)
        elif kind is str:
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)

    def tensor(self, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType = F32) -> None:
        if kind in (F32, gguf.GGMLQuantizationType.F16):
            self._writer.add_tensor(name, gguf.quants.quantize(values, kind))
        else:
            self._writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def raw(self, name: str, blocks: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
        """blocks [rows, bytes] uint8, as the file stores them."""
        self._writer.add_tensor(name, blocks, raw_dtype=kind)

    def align(self, size: int) -> None:
        self._writer.add_custom_alignment(size)

    def close(self) -> Path:
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()
        return self.path


def model_metadata(config) -> dict[str, Any]:
    """What llama.cpp's converter writes of a transformers configuration."""
    a = "llama" if config.model_type in ("llama", "mistral") else config.model_type
    return {
        f"{a}.block_count": config.num_hidden_layers, f"{a}.context_length": config.max_position_embeddings,
        f"{a}.embedding_length": config.hidden_size, f"{a}.feed_forward_length": config.intermediate_size,
        f"{a}.attention.head_count": config.num_attention_heads,
        f"{a}.attention.head_count_kv": config.num_key_value_heads,
        f"{a}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{a}.attention.key_length": config.head_dim, f"{a}.attention.value_length": config.head_dim,
        f"{a}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{a}.rope.dimension_count": config.head_dim, f"{a}.vocab_size": config.vocab_size,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }


def write_model(path: Path, model, kind: gguf.GGMLQuantizationType = F32, metadata: dict[str, Any] | None = None,
                extra: dict[str, np.ndarray] | None = None, without: tuple[str, ...] = ()) -> Path:
    """A transformers model as a GGUF file. Metadata given here replaces what the configuration says (None: left out);
    matrices are stored as `kind`."""
    config = model.config
    architecture = "llama" if config.model_type in ("llama", "mistral") else config.model_type
    given = {k: v for k, v in (model_metadata(config) | (metadata or {})).items() if v is not None}
    writer = Writer(path, architecture, given)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in model.state_dict().items():
        if (name == "lm_head.weight" and config.tie_word_embeddings) or name in without:
            continue
        rows, part = value.float().numpy(), name.split(".")[-2]
        rows = permute(rows, heads[part]) if architecture == "llama" and part in heads else rows
        writer.tensor(gguf_name(name), rows, kind if rows.ndim > 1 else F32)
    for name, rows in (extra or {}).items():
        writer.tensor(name, rows)
    return writer.close()


def tiny_model(family: str = "Llama", **changes) -> Any:
    """A random transformers model in float32 with a head that tells its tokens well apart."""
    transformers = __import__("transformers")
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
             "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "initializer_range": 0.3}
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**sizes | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                p.add_(torch.randn_like(p) * 0.3)
    return model


def vocabulary_metadata(tokenizer, pre: str | None) -> dict[str, Any]:
    """The metadata of a `tokenizers` BPE tokenizer: byte-level where `pre` names its way of cutting text, else
    SentencePiece's, whose merges become scores."""
    state = json.loads(tokenizer.to_str())
    vocab, merges = state["model"]["vocab"], [tuple(m) for m in state["model"]["merges"]]
    tokens = [t for t, _ in sorted(vocab.items(), key=lambda item: item[1])]
    kinds = [6 if pre is None and t.startswith("<0x") else 1 for t in tokens]
    for added in state["added_tokens"]:
        kinds[added["id"]] = 3 if added["special"] else 4
    shared = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 1,
              "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0}
    if pre is not None:
        return shared | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
                         "tokenizer.ggml.merges": [" ".join(m) for m in merges]}
    scores = [-1e6] * len(tokens)
    for rank, (left, right) in enumerate(merges):
        scores[vocab[left + right]] = max(scores[vocab[left + right]], -float(rank))
    return shared | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
