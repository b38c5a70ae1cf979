"""The native families against transformers: logits, greedy text, taps, several sequences in one step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stretto.model.families.llama import Llama
from stretto.model.load import load_model
from tests.model.dense import DenseAttend, greedy, run
from tests.model.tiny import ids_of, oracle_greedy, oracle_logits, save

CPU = torch.device("cpu")
STORIES = Path(__file__).resolve().parents[2] / "../shared/data/models/stories260k"

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("Llama", {"head_dim": 20}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-no-gqa": ("Llama", {"num_key_value_heads": 4}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu"}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "mistral-wide-heads-window": ("Mistral", {"sliding_window": 3, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window-from-layer-1": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen2-window-unused": ("Qwen2", {"use_sliding_window": False, "sliding_window": 4}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3-wide-heads-tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-biases": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-layer-types": ("Qwen3", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 4, "layer_types":
                                    ["sliding_attention", "full_attention", "sliding_attention"]}),
}


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def pair(request, tmp_path):
    """(our model, transformers' model) of one checkpoint."""
    family, config = request.param
    oracle = save(tmp_path, family, **config)
    return load_model(tmp_path, dtype=torch.float32, device=CPU), oracle


def test_equals_transformers(pair):
    model, oracle = pair
    assert isinstance(model, Llama)
    ids = ids_of(23)
    torch.testing.assert_close(run(model, ids), oracle_logits(oracle, ids), atol=1e-4, rtol=1e-4)
    assert greedy(model, ids, 12) == oracle_greedy(oracle, ids, 12)


def test_windows_are_those_of_the_config(tmp_path):
    for name, windows in (("mistral-window", (5, 5, 5)), ("qwen2-window-from-layer-1", (None, 4, 4)),
                          ("qwen2-window-unused", (None,) * 3), ("qwen3-layer-types", (4, None, 4))):
        family, config = FAMILIES[name]
        save(tmp_path, family, **config)
        model = load_model(tmp_path, dtype=torch.float32, device=CPU)
        assert tuple(layer.window for layer in model.layers) == windows, name


def test_packed_sequences_equal_each_alone(tmp_path):
    save(tmp_path, "Qwen3", head_dim=16, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    model = load_model(tmp_path, dtype=torch.float32, device=CPU)
    a, b, c = ids_of(9, seed=1), ids_of(1, seed=2), ids_of(14, seed=3)
    attend = DenseAttend(model.layers, sequences=3)
    positions = torch.cat([torch.arange(len(x)) for x in (a, b, c)])
    packed = model.logits(model.forward(torch.tensor(a + b + c), positions, attend.step(9, 1, 14)))
    alone = torch.cat([run(model, x) for x in (a, b, c)])
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


def test_chunks_equal_one_step(tmp_path):
    save(tmp_path, "Mistral", sliding_window=6)
    model, ids = load_model(tmp_path, dtype=torch.float32, device=CPU), ids_of(30)
    attend = DenseAttend(model.layers)
    chunks = [run(model, ids[a:b], attend, a) for a, b in ((0, 7), (7, 8), (8, 29), (29, 30))]
    torch.testing.assert_close(torch.cat(chunks), run(model, ids), atol=1e-5, rtol=1e-5)


def test_taps_are_the_residual_stream(tmp_path):
    oracle = save(tmp_path, "Llama")
    model, ids = load_model(tmp_path, dtype=torch.float32, device=CPU), ids_of(8)
    taps = dict.fromkeys(("hidden.0", "hidden.1", "hidden.last"))
    run(model, ids, taps=taps)
    states = oracle(torch.tensor([ids]), output_hidden_states=True).hidden_states  # embeddings first, normed last
    for name, state in (("hidden.0", states[1]), ("hidden.1", states[2]), ("hidden.last", states[-1])):
        torch.testing.assert_close(taps[name], state[0], atol=1e-5, rtol=1e-5)
    assert set(taps) == {"hidden.0", "hidden.1", "hidden.last"}


def test_taps_leave_the_logits_alone(tmp_path):
    save(tmp_path, "Llama")
    model, ids = load_model(tmp_path, dtype=torch.float32, device=CPU), ids_of(8)
    assert torch.equal(run(model, ids), run(model, ids, taps={"hidden.0": None, "hidden.2": None}))


def test_bfloat16_stays_near_float32(tmp_path):
    oracle = save(tmp_path, "Llama")
    model, ids = load_model(tmp_path, dtype=torch.bfloat16, device=CPU), ids_of(16)
    ours, right = run(model, ids), oracle_logits(oracle, ids)
    theirs = oracle.to(torch.bfloat16)(torch.tensor([ids])).logits[0].float()
    assert ours.dtype is torch.float32
    assert (ours - right).norm() < 1.5 * (theirs - right).norm()  # no worse than transformers' own bfloat16


@pytest.mark.skipif(not STORIES.exists(), reason="shared/data/models/stories260k is absent")
def test_stories260k_equals_transformers():
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32)
    model, ids = load_model(STORIES, dtype=torch.float32, device=CPU), [1, 403, 407, 261, 378]
    torch.testing.assert_close(run(model, ids), oracle_logits(oracle, ids), atol=1e-4, rtol=1e-4)
    assert greedy(model, ids, 60) == oracle_greedy(oracle, ids, 60)
    assert model.config.eos_token_ids == (2,)
