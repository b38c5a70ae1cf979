"""facts: what is read off a model's files must be what the loaded model turns out to be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from stretto.config import KVGroupFacts
from stretto.device.kv import group_layers
from stretto.facts import device_facts, kv_groups, model_facts, model_name, sampling_defaults
from stretto.model.config import ConfigError
from stretto.model.load import load_model
from tests.gguf.files import tiny_model, write_model

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8, "pad_token_id": 0}
MODELS = {
    "Llama": transformers.LlamaConfig(**SIZES),
    "Qwen2, some layers with a window": transformers.Qwen2Config(
        **SIZES, sliding_window=16, use_sliding_window=True, max_window_layers=2),
    "Mistral, all layers with a window": transformers.MistralConfig(**SIZES, sliding_window=16),
    "GPT-2, through transformers": transformers.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0),
    "Gemma 2, every other layer with a window": transformers.Gemma2Config(
        **SIZES, sliding_window=16, query_pre_attn_scalar=8),
    "gpt-oss, sinks and experts": transformers.GptOssConfig(
        **SIZES, sliding_window=16, num_local_experts=4, num_experts_per_tok=2, rope_parameters={
            "rope_type": "default", "rope_theta": 500.0}),
    "Mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "GPT-NeoX, through transformers": transformers.GPTNeoXConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64),
}


@pytest.mark.parametrize("name", MODELS)
def test_facts_are_what_the_loaded_model_is(tmp_path: Path, name: str):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name])
    model.save_pretrained(tmp_path)
    facts = model_facts(tmp_path)
    loaded = load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    assert facts.kv_groups == kv_groups(loaded.layers)
    assert tuple(group.window for group in facts.kv_groups) == tuple(g.window for g in group_layers(loaded.layers))
    assert facts.n_layers == len(loaded.layers) and facts.context == loaded.max_position
    assert (facts.vocab_size, facts.hidden_size) == (loaded.vocab_size, loaded.hidden_size)
    assert facts.parameters == sum(p.numel() for p in model.parameters()), "tied weights are stored once"
    assert facts.dtype == "float32" and facts.architecture == MODELS[name].architectures[0]


def test_experts_need_room_for_every_row_that_a_token_has(tmp_path: Path):
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert model_facts(tmp_path).intermediate_size == 3 * SIZES["intermediate_size"]


def test_a_gguf_file(tmp_path: Path):
    model = tiny_model()
    facts = model_facts(write_model(tmp_path / "tiny-1.5.gguf", model))
    assert facts.name == "tiny-1.5" and facts.dtype == "gguf"
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    assert facts.kv_groups == (KVGroupFacts(None, 2 * 2 * 2 * 16, 2 * 2 * 2),)


def test_a_model_that_states_no_sizes_is_refused(tmp_path: Path):
    rwkv = transformers.RwkvConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    transformers.AutoModelForCausalLM.from_config(rwkv).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a model of type 'rwkv' has no num_attention_heads"):
        model_facts(tmp_path)


def test_an_unknown_type_is_refused(tmp_path: Path):
    transformers.AutoModelForCausalLM.from_config(MODELS["Llama"]).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NovelForCausalLM"], "model_type": "novel"}))
    with pytest.raises(ConfigError, match="transformers cannot read the config"):
        model_facts(tmp_path)


def test_case_18_01_sampling_defaults_are_found():
    generation = {"temperature": 0.1, "top_k": 1, "eos_token_id": [5, 9], "max_new_tokens": 3, "do_sample": True,
                  "top_p": None}
    assert dict(sampling_defaults(generation)) == {"temperature": 0.1, "top_k": 1, "max_tokens": 3}
    assert sampling_defaults(None) == ()


def test_names(tmp_path: Path):
    hub = tmp_path / "models--owner--model" / "snapshots" / "0123abc"
    hub.mkdir(parents=True)
    assert model_name(hub) == "owner/model" and model_name(tmp_path / "a.b.gguf") == "a.b"
    assert model_name(tmp_path) == tmp_path.name


def test_devices():
    cpu = device_facts()[-1]
    assert cpu.kind == "cpu" and cpu.cores >= 1 and 0 < cpu.memory_free <= cpu.memory_total
