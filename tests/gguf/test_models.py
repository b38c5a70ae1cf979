"""Models from GGUF files give the logits of the transformers model they were written from."""

from __future__ import annotations

import logging

import gguf
import numpy as np
import pytest
import torch

from stretto.model.config import ConfigError, ModelConfig
from stretto.model.gguf import GGUFSource
from stretto.model.gguf_config import gguf_config
from stretto.model.gguf_tensors import unpermute
from stretto.model.load import load_model
from stretto.model.source import WeightError
from tests.gguf.files import Writer, model_metadata, permute, tiny_model, write_model
from tests.model.dense import run

Kind = gguf.GGMLQuantizationType
IDS = [1, 5, 90, 33, 7, 7, 61, 2, 44, 18, 3, 80, 12, 95, 0, 27] * 3
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}


def logits(path):
    model = load_model(path, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        return run(model, IDS)


def expected(model):
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0]


FAMILIES = {
    "llama": ("Llama", {}), "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_head_dim": ("Llama", {"head_dim": 32}), "llama_no_groups": ("Llama", {"num_key_value_heads": 4}),
    "llama_theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama_attention_bias": ("Llama", {"attention_bias": True}), "llama_mlp_bias": ("Llama", {"mlp_bias": True}),
    "qwen2": ("Qwen2", {}), "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}), "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(tmp_path, name):
    family, changes = FAMILIES[name]
    model = tiny_model(family, **changes)
    torch.testing.assert_close(logits(write_model(tmp_path / "m.gguf", model)), expected(model), atol=1e-4, rtol=1e-4)


def test_sliding_window_is_mistral(tmp_path):
    model = tiny_model("Mistral", sliding_window=8)
    path = write_model(tmp_path / "m.gguf", model, metadata={"llama.attention.sliding_window": 8})
    assert gguf_config(path)["architectures"] == ["MistralForCausalLM"]
    torch.testing.assert_close(logits(path), expected(model), atol=1e-4, rtol=1e-4)


# -------------------------------------------------------------------------------------------------------- rope scaling
def llama3_divisors(head_dim: int) -> np.ndarray:
    """What llama.cpp's converter writes into rope_freqs for LLAMA3."""
    out = []
    low = LLAMA3["original_max_position_embeddings"] / LLAMA3["low_freq_factor"]
    high = LLAMA3["original_max_position_embeddings"] / LLAMA3["high_freq_factor"]
    for frequency in 1.0 / LLAMA3["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim):
        wave = 2 * np.pi / frequency
        smooth = (LLAMA3["original_max_position_embeddings"] / wave - LLAMA3["low_freq_factor"]) / (
            LLAMA3["high_freq_factor"] - LLAMA3["low_freq_factor"])
        out.append(1.0 if wave < high else LLAMA3["factor"] if wave > low
                   else 1.0 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    return np.array(out, dtype=np.float32)


@pytest.mark.parametrize("tied", [False, True])
def test_case_18_11_rope_freqs_are_applied(tmp_path, tied):
    model = tiny_model("Llama", rope_parameters=LLAMA3, tie_word_embeddings=tied)
    divisors = llama3_divisors(16)
    assert len(set(divisors.tolist())) == 3  # unscaled, scaled and in between
    path = write_model(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": divisors})
    torch.testing.assert_close(logits(path), expected(model), atol=1e-4, rtol=1e-4)
    plain = write_model(tmp_path / "plain.gguf", model)
    assert (logits(plain) - expected(model)).abs().max() > 0.1  # the scaling does matter here


def test_case_18_11_head_absent(tmp_path):
    """No output.weight: the embedding is the head."""
    model = tiny_model("Llama", tie_word_embeddings=True)
    path = write_model(tmp_path / "m.gguf", model)
    assert "lm_head.weight" not in set(GGUFSource(path).names()) and gguf_config(path)["tie_word_embeddings"]
    untied = write_model(tmp_path / "u.gguf", tiny_model("Llama"))
    assert "lm_head.weight" in set(GGUFSource(untied).names()) and not gguf_config(untied)["tie_word_embeddings"]


@pytest.mark.parametrize(("scaling", "keys"), [
    ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
     {"type": "yarn", "factor": 4.0, "original_context_length": 32}),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0,
      "attention_factor": 0.9 * (1 + 0.1 * np.log(4.0))},
     {"type": "yarn", "factor": 4.0, "original_context_length": 32, "attn_factor": 0.9, "yarn_beta_fast": 16.0,
      "yarn_beta_slow": 2.0}),
], ids=["linear", "yarn", "yarn_attention_factor"])
def test_rope_scaling_equals_transformers(tmp_path, scaling, keys):
    model = tiny_model("Llama", rope_parameters={"rope_theta": 1000.0, **scaling})
    metadata = {f"llama.rope.scaling.{k}": v for k, v in keys.items()}
    path = write_model(tmp_path / "m.gguf", model, metadata=metadata)
    torch.testing.assert_close(logits(path), expected(model), atol=1e-4, rtol=1e-4)


def test_long_and_short_factors(tmp_path):
    short, long = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(1, 4, 8, dtype=np.float32)
    path = write_model(tmp_path / "m.gguf", tiny_model(), extra={
        "rope_factors_long.weight": long, "rope_factors_short.weight": short},
        metadata={"llama.rope.scaling.original_context_length": 32, "llama.rope.scaling.attn_factor": 1.5})
    rope = ModelConfig.from_hf(gguf_config(path)).rope
    assert (rope.kind, rope.short_factor, rope.long_factor) == ("longrope", tuple(short.tolist()), tuple(long.tolist()))
    assert (rope.original_max_position, rope.attention_factor) == (32, 1.5)


# ---------------------------------------------------------------------------------------------------------------- names
def test_order_of_rows():
    rows = torch.randn(24, 5)
    assert torch.equal(unpermute(torch.from_numpy(permute(rows.numpy(), 3)), 3), rows)
    assert not torch.equal(torch.from_numpy(permute(rows.numpy(), 3)), rows)


def test_configuration_of_a_model(tmp_path):
    model = tiny_model("Llama")
    config = ModelConfig.from_hf(gguf_config(write_model(tmp_path / "m.gguf", model)))
    theirs = ModelConfig.from_hf(model.config.to_dict() | {"bos_token_id": 1, "eos_token_id": 2})
    for field in theirs.__dataclass_fields__:
        if field not in ("raw", "dtype"):
            assert getattr(config, field) == getattr(theirs, field), field
    assert config.norm_eps == 1e-5  # and not the nearest float32


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F32, "float32"), (Kind.F16, "float16"), (Kind.BF16, "bfloat16"),
                                             (Kind.Q8_0, "float32")])
def test_dtype_of_a_file(tmp_path, kind, dtype):
    model = tiny_model("Llama")
    path = write_model(tmp_path / "m.gguf", model, kind)
    assert gguf_config(path)["dtype"] == dtype
    source, name = GGUFSource(path), "model.layers.1.self_attn.q_proj.weight"
    tensor, original = source.tensor(name), model.state_dict()[name]
    assert str(tensor.dtype) == f"torch.{dtype}" and tuple(tensor.shape) == source.shape(name)
    torch.testing.assert_close(tensor.float(), original, atol=0.02, rtol=0.01)
    if kind in (Kind.F16, Kind.BF16):
        assert torch.equal(tensor, original.to(tensor.dtype))


# ------------------------------------------------------------------------------------------------------------- refusals
REFUSED = {
    "architecture": ({}, "mamba", "GGUF architecture 'mamba' is not supported; supported: llama, mistral3, qwen2"),
    "experts": ({"qwen2.expert_count": 8}, "qwen2", "qwen2.expert_count is 8, which is not supported"),
    "logit_scale": ({"llama.logit_scale": 4.0}, "llama", "llama.logit_scale is 4.0"),
    "bidirectional": ({"llama.attention.causal": False}, "llama", "llama.attention.causal is False"),
    "heads_differ": ({"llama.attention.head_count": [4, 2]}, "llama", "head_count differs between layers"),
    "no_layers": ({"llama.block_count": None}, "llama", "metadata block_count is None; a positive whole number"),
    "partial_rotary": ({"llama.rope.dimension_count": 8}, "llama", "rope.dimension_count is 8 and the heads have 16"),
    "value_length": ({"llama.attention.value_length": 8}, "llama", "attention.value_length is 8"),
    "rope_type": ({"llama.rope.scaling.type": "spiral"}, "llama", "rope.scaling.type 'spiral' is not supported"),
    "attn_factor": ({"llama.rope.scaling.attn_factor": 2.0}, "llama", "attn_factor is 2.0, which goes with yarn only"),
    "qwen_window": ({"qwen2.attention.sliding_window": 8}, "qwen2", r"sliding_window is 8, which is not"),
    "no_embedding": ({"llama.vocab_size": 96}, "llama", "holds no token_embd.weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_output_is_refused(tmp_path, name):
    changes, architecture, message = REFUSED[name]
    model = tiny_model("Qwen2" if architecture == "qwen2" else "Llama")
    metadata = {k: v for k, v in (model_metadata(model.config) | changes).items() if v is not None}
    writer = Writer(tmp_path / "m.gguf", architecture, metadata)
    if name != "no_embedding":
        writer.tensor("token_embd.weight", np.ones((96, 64), np.float32))
    with pytest.raises(ConfigError, match=message):
        gguf_config(writer.close())


def test_rope_freqs_of_a_wrong_size(tmp_path):
    path = write_model(tmp_path / "m.gguf", tiny_model(), extra={"rope_freqs.weight": np.ones(5, np.float32)})
    with pytest.raises(ConfigError, match=r"rope_freqs.weight is F32 of shape \[5\]"):
        gguf_config(path)


def test_unknown_keys_are_logged(tmp_path, caplog):
    path = write_model(tmp_path / "m.gguf", tiny_model(), metadata={"llama.attention.surprise": 7})
    with caplog.at_level(logging.WARNING):
        gguf_config(path)
    assert "llama.attention.surprise (7) is not known here" in caplog.text


def test_unknown_tensors_are_refused_by_name(tmp_path):
    path = write_model(tmp_path / "m.gguf", tiny_model(), extra={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(WeightError, match=r"LlamaForCausalLM does not have: blk\.0\.attn_sinks\.weight"):
        GGUFSource(path)


def test_unknown_quantisation_is_refused_by_name(tmp_path):
    writer = Writer(tmp_path / "m.gguf", "llama", model_metadata(tiny_model().config))
    writer.raw("token_embd.weight", np.zeros((96, 36), np.uint8), Kind.NVFP4)
    with pytest.raises(WeightError, match=r"quantisation not supported: token_embd.weight \(NVFP4\); supported: BF16"):
        GGUFSource(writer.close())


def test_missing_tensor_is_named_at_load(tmp_path):
    path = write_model(tmp_path / "m.gguf", tiny_model(), without=("model.layers.1.mlp.up_proj.weight",))
    with pytest.raises(WeightError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        logits(path)
