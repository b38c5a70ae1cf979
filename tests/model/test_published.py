"""Configurations as they were published (published.json), with fewer and smaller layers, against transformers, which
reads the same file; and every field that changes what transformers computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from stretto.model.config import ConfigError, ModelConfig
from stretto.model.load import load_model
from stretto.model.registry import NATIVE
from tests.model import tiny
from tests.model.dense import greedy, run
from tests.model.test_families import FAMILIES
from tests.model.tiny import CONFIGS, SIZES, ids_of, oracle_greedy, oracle_logits

CPU = torch.device("cpu")
PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published.json").read_text())
HEAD, POSITIONS = 16, 64  # features of a head, and positions
LAYERS = {"gemma3_text": 7, "qwen3_next": 4, "llama4_text": 4}
WIDTHS = {"intermediate_size": 64, "shared_intermediate_size": 64, "moe_intermediate_size": 32,
          "shared_expert_intermediate_size": 64, "intermediate_size_mlp": 64}
STATES = {"linear_key_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 8}


def shrunk(published: dict[str, Any]) -> dict[str, Any]:
    """The same behaviour with few heads, layers, experts and positions. What is not a size stays as it is."""
    c = dict(published)
    wide = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    kv = min(c["num_key_value_heads"], 2)
    heads = kv * min(c["num_attention_heads"] // c["num_key_value_heads"], 4)
    layers, longest = LAYERS.get(c["model_type"], 3), c["max_position_embeddings"]
    c |= {"num_attention_heads": heads, "num_key_value_heads": kv, "num_hidden_layers": layers, "vocab_size": 320,
          "hidden_size": 48 if "head_dim" in c else heads * HEAD, "max_position_embeddings": POSITIONS,
          "eos_token_id": [1, 2] if isinstance(c["eos_token_id"], list) else 1}
    c |= {key: 0 for key in ("bos_token_id", "pad_token_id") if key in c}
    c |= {key: size for key, size in WIDTHS.items() if key in c}
    c |= {key: c[key][:layers] for key in ("layer_types", "no_rope_layers", "moe_layers") if key in c}
    c |= {key: max(5, c[key] * POSITIONS // longest) for key in ("sliding_window",) if c.get(key)}
    c |= {"head_dim": HEAD} if "head_dim" in c else {}
    c |= {"query_pre_attn_scalar": c["query_pre_attn_scalar"] * HEAD // wide} if "query_pre_attn_scalar" in c else {}
    c |= {key: n for key, n in (("num_local_experts", 4), ("num_experts", 6)) if c.get(key)}
    c |= {"num_experts_per_tok": min(2, c["num_experts_per_tok"])} if "num_experts_per_tok" in c else {}
    if c["model_type"] == "granitemoehybrid":
        c |= {"mamba_n_heads": 2 * c["hidden_size"] // 16, "mamba_d_head": 16, "mamba_d_state": 16}
    return c | (STATES if c["model_type"] == "qwen3_next" else {}) | _positions(c, longest)


def _positions(c: dict[str, Any], longest: int) -> dict[str, Any]:
    made = {}
    if original := c.get("original_max_position_embeddings"):
        made["original_max_position_embeddings"] = original * POSITIONS // longest
    if scaling := dict(c.get("rope_scaling") or {}):
        if "original_max_position_embeddings" in scaling:
            scaling["original_max_position_embeddings"] = 16
        dim = int((c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])
                  * c.get("partial_rotary_factor", 1.0)) // 2
        made["rope_scaling"] = scaling | {key: scaling[key][:dim] for key in ("long_factor", "short_factor")
                                          if key in scaling}
    return made


def checkpoint(folder: Path, config: dict[str, Any]) -> transformers.PreTrainedModel:
    """A random one of this config.json, which stays as it was written."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model_class = getattr(transformers, config["architectures"][0])
        model = model_class(transformers.AutoConfig.from_pretrained(folder)).float().eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder, max_shard_size="5GB")
    path.write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration(name, tmp_path):
    oracle = checkpoint(tmp_path, shrunk(PUBLISHED[name]))
    model, ids = load_model(tmp_path, dtype=torch.float32, device=CPU), ids_of(40)
    right = oracle_logits(oracle, ids)
    torch.testing.assert_close(run(model, ids), right, atol=1e-3, rtol=1e-3)
    assert greedy(model, ids, 3) == oracle_greedy(oracle, ids, 3)


def test_every_native_family_but_some_is_among_them():
    """MiMo and Qwen3.5 have configurations that transformers does not read, or of images as well."""
    missing = set(NATIVE) - {c["architectures"][0] for c in PUBLISHED.values()}
    assert missing == {"MiMoForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "GlmForCausalLM"}


def test_attention_in_two_kinds_of_chunks_is_served_as_far_as_it_is_ordinary():
    assert ModelConfig.from_hf(PUBLISHED["qwen2.5-1m"]).max_position == 262144 - 8192


@pytest.mark.parametrize(("key", "value", "why"), [
    ("is_causal", False, "tokens would see later ones"), ("lm_head_bias", True, "no head here has a bias"),
    ("rope_interleaved", True, "half a head apart")])
def test_what_no_family_does_is_refused(key, value, why):
    with pytest.raises(ConfigError, match=rf"{key} is {value}, which is not supported: .*{why}"):
        ModelConfig.from_hf(PUBLISHED["qwen2.5-7b"] | {key: value})
    ModelConfig.from_hf(PUBLISHED["qwen2.5-7b"] | {key: not value})


# ------------------------------------------------------------------------------------------------------- field by field
SIZED = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "layer_types",
         "intermediate_size", "architectures", "model_type"}  # tried by all other tests
VARIANTS = ["llama", "mistral-window", "qwen2-window-from-layer-1", "qwen3-layer-types", "gemma2", "gemma3", "olmo2",
            "phi3-window", "glm", "glm4", "mixtral", "qwen3-moe", "qwen3-next", "qwen3.5", "qwen3.5-moe", "granite3",
            "granite4", "llama4", "gpt-oss"]


def changed(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value]
    return [value * 1.7 + 0.1] if isinstance(value, float) else [True, 3, 0.7] if value is None else []


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_a_field_that_changes_transformers_is_read_or_refused(name, tmp_path):
    """Every field of the family's configuration, changed by itself: where transformers computes something, this engine
    computes the same or says that it does not. At least some fields change something."""
    family, config = FAMILIES[name]
    kind = getattr(transformers, CONFIGS.get(family, f"{family}Config"))
    fields, ids, differing = kind(**{**SIZES, **config}).to_dict(), ids_of(23), 0
    base = oracle_logits(tiny.save(tmp_path, family, **config), ids)
    for field, value in ((f, v) for f, given in fields.items() if f not in SIZED for v in changed(given)):
        try:
            right = oracle_logits(tiny.save(tmp_path, family, **{**config, field: value}), ids)
        except Exception:  # transformers has no such model
            continue
        differing += right.shape == base.shape and not torch.equal(right, base)
        try:
            found = run(load_model(tmp_path, dtype=torch.float32, device=CPU), ids)
        except ConfigError:
            continue
        torch.testing.assert_close(found, right, atol=2e-4, rtol=2e-4, msg=f"{field} = {value!r}")
    assert differing >= 2
