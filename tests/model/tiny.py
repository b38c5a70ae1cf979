"""Tiny random models, saved by transformers: the oracle of this folder's tests."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

SIZES = {"vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}

# Where a model's configuration is called otherwise than the model.
CONFIGS = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig", "Qwen3_5": "Qwen3_5TextConfig",
           "Qwen3_5Moe": "Qwen3_5MoeTextConfig"}


def save(folder: Path, family: str, *, seed: int = 0, shard: str = "5GB", **config) -> transformers.PreTrainedModel:
    """A random model `family`ForCausalLM in `folder`, with every parameter (norms and biases too) random."""
    config_class = getattr(transformers, CONFIGS.get(family, f"{family}Config"))
    model_class = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**{**SIZES, **config})).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def ids_of(n: int, vocab: int = 320, seed: int = 1) -> list[int]:
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def oracle_logits(model, ids: list[int]) -> torch.Tensor:
    """[T, V] of transformers."""
    return model(torch.tensor([ids])).logits[0].float()


def oracle_greedy(model, ids: list[int], n: int) -> list[int]:
    """The next n ids, each from a forward pass over everything before it."""
    out: list[int] = []
    for _ in range(n):
        out.append(int(model(torch.tensor([ids + out])).logits[0, -1].argmax()))
    return out
