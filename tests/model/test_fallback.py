"""Models of transformers with our attention: those that work equal transformers, those that cannot say why."""

from __future__ import annotations

import copy
import gc
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.llama import modeling_llama
from transformers.utils import logging as hf_logging

from stretto.facts import model_facts
from stretto.model.config import ConfigError, read_config
from stretto.model.fallback import FallbackModel, UnsupportedModel, check_fallback, load_fallback
from stretto.model.load import load_model
from stretto.model.probe import UnknownMask, window_of
from stretto.model.source import WeightError
from tests.model.dense import DenseAttend, greedy, run
from tests.model.tiny import SIZES, ids_of, oracle_greedy, oracle_logits, save

CPU = torch.device("cpu")
GPT2_SIZES = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
LONGROPE = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "original_max_position_embeddings": 16}
PHI3 = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}

WORKS = {
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 32}, (4, None, 4)),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 32, "layer_types": [
        "sliding_attention", "sliding_attention", "full_attention"]}, (4, 4, None)),
    "gpt2": ("GPT2", GPT2_SIZES, (None,) * 3),
    "gpt2-scaled-by-layer": ("GPT2", GPT2_SIZES | {"scale_attn_by_inverse_layer_idx": True}, (None,) * 3),
    "gpt_neox": ("GPTNeoX", {}, (None,) * 3),
    "phi3": ("Phi3", PHI3 | {"sliding_window": 5}, (5, 5, 5)),
    "olmo2": ("Olmo2", {}, (None,) * 3),
    "starcoder2": ("Starcoder2", {"sliding_window": 5}, (5, 5, 5)),
    "gpt_oss": ("GptOss", MOE | {"head_dim": 16, "sliding_window": 6}, (6, None, 6)),
    "opt": ("OPT", {"ffn_dim": 80, "word_embed_proj_dim": 48}, (None,) * 3),
    "granite": ("Granite", {"logits_scaling": 3.0, "attention_multiplier": 0.3}, (None,) * 3),
}
MORE = {
    "mixtral": ("Mixtral", MOE, (None,) * 3),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
                  (None,) * 3),
    "phi": ("Phi", {}, (None,) * 3),
    "cohere": ("Cohere", {}, (None,) * 3),
    "cohere2": ("Cohere2", {"sliding_window": 4}, (4, 4, 4)),
    "stablelm": ("StableLm", {"hidden_size": 64}, (None,) * 3),
    "smollm3": ("SmolLM3", {"pad_token_id": 0}, (None,) * 3),
    "glm4": ("Glm4", {"head_dim": 12, "pad_token_id": 0}, (None,) * 3),
    "gptj": ("GPTJ", GPT2_SIZES | {"rotary_dim": 8}, (None,) * 3),
    "gpt_bigcode": ("GPTBigCode", GPT2_SIZES, (None,) * 3),
    "olmo": ("Olmo", {}, (None,) * 3),
    "olmo3": ("Olmo3", {"sliding_window": 4}, (4, 4, 4)),
    "nemotron": ("Nemotron", {}, (None,) * 3),
    "exaone4": ("Exaone4", {"sliding_window": 4}, (4, 4, 4)),
    "ministral": ("Ministral", {"sliding_window": 4, "head_dim": 16}, (4, 4, 4)),
    "biogpt": ("BioGpt", {}, (None,) * 3),
    "persimmon": ("Persimmon", {}, (None,) * 3),
    "codegen": ("CodeGen", GPT2_SIZES | {"rotary_dim": 8}, (None,) * 3),
    "helium": ("Helium", {"head_dim": 12, "pad_token_id": 0}, (None,) * 3),
}


def save_works(folder, name):
    family, config, _ = WORKS[name]
    return save(folder, family, **config)


def load(folder, **options):
    """Through transformers, even where there is a native model."""
    raw, generation = read_config(folder)
    return load_fallback(folder, raw, generation, dtype=torch.float32, device=CPU, **options)


@pytest.mark.parametrize("family, config, windows", [
    *(pytest.param(*case, id=name) for name, case in WORKS.items()),
    *(pytest.param(*case, id=name, marks=pytest.mark.full) for name, case in MORE.items())])
def test_equals_transformers(family, config, windows, tmp_path):
    oracle = save(tmp_path, family, **config)
    model, ids = load(tmp_path), ids_of(21)
    assert isinstance(model, FallbackModel)
    assert tuple(layer.window for layer in model.layers) == windows
    right = oracle_logits(oracle, ids)
    torch.testing.assert_close(run(model, ids), right, atol=1e-4, rtol=1e-4)
    attend = DenseAttend(model.layers)
    steps = torch.cat([run(model, ids[a:b], attend, a) for a, b in ((0, 5), (5, 6), (6, 21))])
    torch.testing.assert_close(steps, right, atol=1e-4, rtol=1e-4)
    assert greedy(model, ids, 6) == oracle_greedy(oracle, ids, 6)


def test_caps_sinks_and_scales_are_found(tmp_path):
    save_works(tmp_path, "gemma2")
    assert {(x.softcap, x.scale) for x in load(tmp_path).layers} == {(50.0, 32**-0.5)}
    save_works(tmp_path, "gpt_oss")
    assert all(x.has_sinks and x.n_kv_heads == 2 and x.head_dim == 16 for x in load(tmp_path).layers)
    save_works(tmp_path, "gpt2-scaled-by-layer")
    assert [round(x.scale * 12**0.5, 6) for x in load(tmp_path).layers] == [1, 0.5, round(1 / 3, 6)]


def test_packed_sequences_equal_each_alone(tmp_path):
    save_works(tmp_path, "gemma2")
    model, a, b = load(tmp_path), ids_of(9, seed=1), ids_of(13, seed=2)
    attend = DenseAttend(model.layers, sequences=2)
    packed = model.logits(model.forward(torch.tensor(a + b), torch.cat((torch.arange(9), torch.arange(13))),
                                        attend.step(9, 13)))
    torch.testing.assert_close(packed, torch.cat((run(model, a), run(model, b))), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gpt_oss"])
def test_taps_are_the_residual_stream(name, tmp_path):
    oracle = save_works(tmp_path, name)
    model, ids = load(tmp_path), ids_of(8)
    taps = dict.fromkeys(("hidden.0", "hidden.1", "hidden.last"))
    run(model, ids, taps=taps)
    states = oracle(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for tap, state in (("hidden.0", states[1]), ("hidden.1", states[2]), ("hidden.last", states[-1])):
        torch.testing.assert_close(taps[tap], state[0], atol=1e-4, rtol=1e-4)


def test_a_text_model_beside_a_vision_tower_of_equal_depth(tmp_path):
    text = transformers.Gemma3TextConfig(**{**SIZES, **WORKS["gemma3"][1]})
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}
    oracle = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4, image_token_index=319,
        boi_token_index=318, eoi_token_index=317)).eval()
    oracle.save_pretrained(tmp_path)
    model, ids, taps = load(tmp_path), ids_of(12, vocab=300), {"hidden.0": None}
    torch.testing.assert_close(run(model, ids, taps=taps), oracle_logits(oracle, ids), atol=1e-4, rtol=1e-4)
    states = oracle(torch.tensor([ids]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(taps["hidden.0"], states[1][0], atol=1e-4, rtol=1e-4)


def test_bfloat16(tmp_path):
    save_works(tmp_path, "olmo2")
    raw, generation = read_config(tmp_path)
    model = load_fallback(tmp_path, raw, generation, dtype=torch.bfloat16, device=CPU)
    assert model.dtype is torch.bfloat16 and run(model, ids_of(5)).dtype is torch.float32


def test_longrope_is_chosen_by_the_served_context_not_by_the_batch(tmp_path):
    """transformers switches all positions to the long factors once any sequence of a batch is longer than 16."""
    oracle = save(tmp_path, "Phi3", **PHI3, rope_parameters=LONGROPE, original_max_position_embeddings=16)
    ids = ids_of(40)
    long, short = load(tmp_path), load(tmp_path, context=16)
    torch.testing.assert_close(run(long, ids), oracle_logits(oracle, ids), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(run(long, ids[:9]), run(long, ids)[:9], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(run(short, ids[:9]), oracle_logits(oracle, ids[:9]), atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------ refused
TINY_MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}
REFUSED = {
    "falcon": ("Falcon", {}, "does not go through transformers' attention interface"),
    "falcon-alibi": ("Falcon", {"alibi": True}, "adds ALiBi position biases"),
    "bloom": ("Bloom", {}, "adds ALiBi position biases"),
    "bert": ("Bert", {}, "its mask is not causal"),
    "mamba": ("Mamba", {}, "has layers of type linear_attention"),
    "deepseek_v3": ("DeepseekV3", TINY_MLA, r"multi-head latent attention \(kv_lora_rank 16\)"),
    "gpt_neo": ("GPTNeo", {"num_layers": 3, "num_heads": 4, "attention_types": [[["global", "local", "global"], 1]],
                           "window_size": 4}, "does not go through transformers' attention interface"),
}


@pytest.mark.parametrize("family, config, says", REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_the_reason(family, config, says, tmp_path):
    save(tmp_path, family, **config)
    with pytest.raises(UnsupportedModel, match=says):
        load(tmp_path)


@pytest.mark.parametrize("name", ["falcon-alibi", "bloom", "mamba", "deepseek_v3"])
def test_what_a_config_shows_is_refused_without_weights(name, tmp_path):
    """`stretto explain` and `doctor` say it, too: they load nothing."""
    family, config, says = REFUSED[name]
    save(tmp_path, family, **config)
    for path in tmp_path.glob("*.safetensors"):
        save_file({"nothing": torch.zeros(1)}, path)
    raw, _ = read_config(tmp_path)
    with pytest.raises(UnsupportedModel, match=says):
        check_fallback(tmp_path, raw)
    with pytest.raises(UnsupportedModel, match=says):
        model_facts(tmp_path)


@pytest.mark.parametrize("config, says", [
    ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "is an encoder-decoder model"),
    ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "no causal language model of type 'vit'"),
    ({"model_type": "novel", "architectures": ["NovelForCausalLM"]}, "transformers cannot read the config"),
    ({"model_type": "novel", "architectures": ["NovelForCausalLM"], "auto_map": {"AutoConfig": "novel.Config"}},
     "needs Python code from its own folder"),
])
def test_configs_are_refused_before_weights_are_read(config, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=says):
        load(tmp_path)


def test_quantised_checkpoints_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(
        {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"],
         "quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ConfigError, match=r"of GptOssForCausalLM are quantised by 'mxfp4'; .* native families alone"):
        load(tmp_path)


def test_wrong_weights_are_named_together(tmp_path):
    save(tmp_path, "Olmo2")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(3, 4)
    tensors["model.layers.9.mlp.down_proj.weight"] = torch.zeros(3, 4)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightError) as e:
        load(tmp_path)
    for part in ("1 missing: model.norm.weight", "down_proj.weight is [3, 4], the config wants [48, 80]",
                 "1 not part of this model: model.layers.9.mlp.down_proj.weight"):
        assert part in str(e.value)


# ----------------------------------------------------------------------------- the trial catches what no config says
def test_weights_that_are_no_numbers_are_named(tmp_path):
    save_works(tmp_path, "gemma2")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"layers\.1\.mlp\.up_proj\.weight would be infinite .* it is damaged"):
        load(tmp_path)


def test_a_layer_that_skips_attention_is_refused(tmp_path, monkeypatch):
    attention = modeling_llama.LlamaAttention.forward

    def forward(self, hidden_states, **kwargs):
        return (hidden_states, None) if self.layer_idx == 1 else attention(self, hidden_states, **kwargs)

    save(tmp_path, "Llama")
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    with pytest.raises(UnsupportedModel, match="has 3 layers but made 2 attention calls"):
        load(tmp_path)


def test_attention_with_something_more_is_refused(tmp_path, monkeypatch):
    eager = modeling_llama.eager_attention_forward

    def with_bias(module, query, key, value, attention_mask, **kwargs):
        distance = torch.arange(key.shape[2])[None] - torch.arange(query.shape[2])[:, None]
        return eager(module, query, key, value, attention_mask + 0.5 * distance, **kwargs)

    save(tmp_path, "Llama")
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", with_bias)
    with pytest.raises(UnsupportedModel, match="its logits differ from transformers' own"):
        load(tmp_path)


def test_a_second_path_to_earlier_tokens_is_refused(tmp_path, monkeypatch):
    mlp = modeling_llama.LlamaMLP.forward

    def shifted(self, x):
        return mlp(self, x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])

    save(tmp_path, "Llama")
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", shifted)
    with pytest.raises(UnsupportedModel, match="something other than attention reads earlier"):
        load(tmp_path)


@pytest.mark.parametrize("mask, window", [
    (lambda b, h, q, k: k <= q, None),
    (lambda b, h, q, k: (k <= q) & (k > q - 7), 7),
    (lambda b, h, q, k: (k <= q) & (k > q - 5000), None),  # wider than the context
])
def test_windows_are_read_off_masks(mask, window):
    assert window_of(mask, 1000) == window


@pytest.mark.parametrize("mask, says", [
    (lambda b, h, q, k: k >= 0, "not causal"),
    (lambda b, h, q, k: (k <= q) & (k // 64 == q // 64), "no sliding window"),
    (lambda b, h, q, k: (k <= q) & ((k > q - 7) | (k == 0)), "not causal: the query .* sees other keys"),
])
def test_other_masks_are_refused(mask, says):
    with pytest.raises(UnknownMask, match=says):
        window_of(mask, 1000)


# -------------------------------------------------------------------------------------------- nothing left behind
def global_state():
    return (dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping),
            torch.get_rng_state().tolist(), torch.get_default_dtype(), hf_logging.get_verbosity(),
            hf_logging.is_progress_bar_enabled())


def test_case_18_13_two_models_at_once_and_nothing_left_behind(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = save(tmp_path / "a", "Olmo2"), save_works(tmp_path / "b", "gemma2")
    before, ids = global_state(), ids_of(12)
    a, b = load(tmp_path / "a"), load(tmp_path / "b")
    for _ in range(2):
        torch.testing.assert_close(run(a, ids), oracle_logits(one, ids), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(run(b, ids), oracle_logits(two, ids), atol=1e-4, rtol=1e-4)
    a.close()
    torch.testing.assert_close(run(b, ids), oracle_logits(two, ids), atol=1e-4, rtol=1e-4)
    b.close()
    assert global_state() == before


def test_case_18_13_a_collected_model_leaves_nothing_behind(tmp_path):
    save(tmp_path, "Olmo2")
    before = global_state()
    model = load(tmp_path)
    run(model, ids_of(5))
    assert global_state() != before
    del model
    gc.collect()
    assert global_state() == before


def test_case_18_13_a_refused_model_leaves_nothing_behind(tmp_path):
    save(tmp_path, "Falcon")
    before = global_state()
    with pytest.raises(UnsupportedModel):
        load(tmp_path)
    assert global_state() == before


def test_a_model_without_a_native_family_is_loaded_through_transformers(tmp_path):
    save_works(tmp_path, "opt")
    assert isinstance(load_model(tmp_path, dtype=torch.float32, device=CPU), FallbackModel)


def test_the_read_config_is_left_alone(tmp_path):
    save(tmp_path, "Olmo2")
    raw, generation = read_config(tmp_path)
    kept = copy.deepcopy(raw)
    load_fallback(tmp_path, raw, generation, dtype=torch.float32, device=CPU)
    assert raw == kept and SIZES["vocab_size"] == raw["vocab_size"]
