"""Rotary tables against transformers, for each kind of scaling and on both sides of the original context."""

from __future__ import annotations

import pytest
import torch

from stretto.model.config import ConfigError, ModelConfig, parse_rope
from stretto.model.layers import Rotary, rope_table
from stretto.model.load import load_model
from tests.model.dense import greedy, run
from tests.model.tiny import SIZES, ids_of, oracle_greedy, oracle_logits, save

CPU = torch.device("cpu")
HALF = 6  # frequencies of the tiny models: heads of 12 features
ORIGINAL = 16  # original context of longrope and dynamic; 64 where frequencies of all three ranges must occur
KINDS = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 64},
    "yarn-set-by-hand": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "beta_fast": 8.0, "beta_slow": 1.5,
                         "attention_factor": 0.7, "original_max_position_embeddings": 64},
    "yarn-mscale-untruncated": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "mscale": 0.7,
                                "mscale_all_dim": 0.4, "truncate": False, "original_max_position_embeddings": 64},
    "longrope": {"rope_type": "longrope", "rope_theta": 500.0, "factor": 8.0,
                 "original_max_position_embeddings": ORIGINAL, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                 "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]},
    "longrope-attention-factor": {"rope_type": "longrope", "rope_theta": 500.0, "attention_factor": 1.3, "factor": 8.0,
                                  "original_max_position_embeddings": ORIGINAL, "short_factor": [1.0] * HALF,
                                  "long_factor": [4.0] * HALF},
}


@pytest.mark.parametrize("rope", KINDS.values(), ids=KINDS.keys())
def test_scaled_models_equal_transformers(rope, tmp_path):
    """Past the original context where the kind has one: transformers takes longrope's long factors there, too."""
    oracle = save(tmp_path, "Llama", rope_parameters=dict(rope))
    model, ids = load_model(tmp_path, dtype=torch.float32, device=CPU), ids_of(90)
    torch.testing.assert_close(run(model, ids), oracle_logits(oracle, ids), atol=1e-4, rtol=1e-4)
    assert greedy(model, ids, 8) == oracle_greedy(oracle, ids, 8)


def test_longrope_is_short_where_the_served_context_is(tmp_path):
    oracle = save(tmp_path, "Llama", rope_parameters=dict(KINDS["longrope"]))
    model = load_model(tmp_path, dtype=torch.float32, device=CPU, context=ORIGINAL)
    ids = ids_of(ORIGINAL)
    torch.testing.assert_close(run(model, ids), oracle_logits(oracle, ids), atol=1e-4, rtol=1e-4)
    assert model.max_position == ORIGINAL


def test_dynamic_equals_token_by_token_generation(tmp_path):
    """transformers rotates by the length that a sequence has when a key is computed; token by token, so do we. Its
    cached generation is the oracle, past the original context of 16."""
    oracle = save(tmp_path, "Llama", max_position_embeddings=ORIGINAL,
                  rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0})
    model, ids = load_model(tmp_path, dtype=torch.float32, device=CPU), ids_of(ORIGINAL - 2)
    assert model.max_position == 2 * ORIGINAL
    generated = oracle.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None,
                                pad_token_id=0)
    assert greedy(model, ids, 12) == generated[0, len(ids):].tolist()


def test_a_rotary_row_depends_on_its_position_alone():
    for name, rope in KINDS.items():
        if not name.startswith("longrope"):
            config = parse_rope({"rope_parameters": rope}, 2 * HALF, 128)
            assert torch.equal(rope_table(config, 64), rope_table(config, 128)[:64]), name


def test_old_and_new_spelling_are_one():
    new = parse_rope({"rope_parameters": KINDS["yarn"]}, 12, 64)
    old = {k: v for k, v in KINDS["yarn"].items() if k not in ("rope_type", "rope_theta")}
    assert parse_rope({"rope_theta": 500.0, "rope_scaling": {"type": "yarn", **old}}, 12, 64) == new
    su = {"type": "su", "short_factor": [1] * 6, "long_factor": [2] * 6}
    assert parse_rope({"rope_scaling": su}, 12, 64).kind == "longrope"


def test_positions_that_scaling_adds():
    def most(rope):
        return ModelConfig.from_hf({**SIZES, "architectures": ["LlamaForCausalLM"], "rope_scaling": rope}).max_position

    assert most(None) == 128
    assert most({"type": "linear", "factor": 2.0}) == 256
    assert most({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}) == 512
    assert most({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}) == 128
    assert most(KINDS["llama3"]) == 128


@pytest.mark.parametrize("rope, says", [
    ({"rope_type": "spiral"}, "rope type 'spiral' is not supported"),
    ({"rope_type": "llama3", "factor": 8.0}, "needs low_freq_factor, high_freq_factor"),
    ({"rope_type": "linear"}, "needs factor"),
    ({"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 6}, "short_factor has 3 values"),
])
def test_refused_with_the_reason(rope, says):
    with pytest.raises(ConfigError, match=says):
        parse_rope({"rope_parameters": rope}, 12, 64)


def test_partial_rotation_is_refused_by_families_that_rotate_all():
    with pytest.raises(ConfigError, match="rotates 6 of 12 features"):
        Rotary(parse_rope({"partial_rotary_factor": 0.5}, 12, 64), 12, 64, CPU)
