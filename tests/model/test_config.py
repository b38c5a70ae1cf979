"""What config.json says and leaves out: windows, defaults of the configuration classes, ids."""

from __future__ import annotations

import pytest

from stretto.model.config import ConfigError, ModelConfig, architecture_of, token_ids
from tests.model.tiny import SIZES


def parse(architecture: str, **config) -> ModelConfig:
    return ModelConfig.from_hf({**SIZES, "architectures": [architecture], **config})


@pytest.mark.parametrize("architecture, config, windows", [
    ("LlamaForCausalLM", {"sliding_window": 9}, (None, None, None)),
    ("MistralForCausalLM", {"sliding_window": 9}, (9, 9, 9)),
    ("MistralForCausalLM", {"sliding_window": None}, (None, None, None)),
    ("MistralForCausalLM", {}, (4096, 4096, 4096)),
    ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 1}, (None,) * 3),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}, (None, None, 9)),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 28}, (None,) * 3),
    ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 9, "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention"]}, (9, None, 9)),
    ("Qwen3ForCausalLM", {"use_sliding_window": False, "sliding_window": 9, "layer_types": ["full_attention"] * 3},
     (None,) * 3),
])
def test_windows(architecture, config, windows):
    assert parse(architecture, **config).windows == windows


def test_defaults_are_those_of_the_configuration_classes():
    import transformers

    for family in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        theirs = getattr(transformers, f"{family}Config")()
        sizes = {k: SIZES[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
        ours = ModelConfig.from_hf({**sizes, "architectures": [f"{family}ForCausalLM"],
                                    "num_attention_heads": theirs.num_key_value_heads or 32})
        assert ours.max_position == theirs.max_position_embeddings, family
        assert ours.n_kv_heads == theirs.num_key_value_heads, family
        assert ours.norm_eps == theirs.rms_norm_eps and ours.tie_embeddings is theirs.tie_word_embeddings
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert parse("Qwen3ForCausalLM").head_dim == transformers.Qwen3Config().head_dim


@pytest.mark.parametrize("types, says", [
    (["full_attention"] * 2, "2 entries for 3 layers"),
    (["full_attention", "linear_attention", "full_attention"], "unknown types linear_attention"),
])
def test_layer_types_are_checked(types, says):
    with pytest.raises(ConfigError, match=says):
        parse("Qwen3ForCausalLM", use_sliding_window=True, sliding_window=4, layer_types=types)


def test_architecture_by_model_type():
    assert architecture_of({"model_type": "qwen2"}) == "Qwen2ForCausalLM"
    assert architecture_of({"model_type": "gpt2"}) == "gpt2"
    assert architecture_of({"model_type": "llama", "architectures": ["OtherForCausalLM"]}) == "OtherForCausalLM"


def test_ids_of_several_configs():
    assert token_ids("eos_token_id", {"eos_token_id": 2}, {"eos_token_id": [2, 7]}) == (2, 7)
    assert token_ids("eos_token_id", {"eos_token_id": None}, None) == ()


def test_what_the_config_says_beyond_the_fields_is_kept():
    assert parse("LlamaForCausalLM", novelty=3).raw["novelty"] == 3
