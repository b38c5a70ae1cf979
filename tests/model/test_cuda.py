"""On a CUDA device: the native families equal the CPU, and their forward pass replays from a graph."""

from __future__ import annotations

import pytest
import torch

from stretto.model.load import load_model
from tests.model.dense import DenseAttend, run
from tests.model.tiny import ids_of, save

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
FAMILIES = {"llama": ("Llama", {"attention_bias": True}), "mistral": ("Mistral", {"sliding_window": 5}),
            "qwen2": ("Qwen2", {"tie_word_embeddings": True}), "qwen3": ("Qwen3", {"head_dim": 16}),
            "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 4, "layer_types": [
                "sliding_attention", "full_attention", "sliding_attention"]}),
            "olmo2": ("Olmo2", {}), "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}),
            "mixtral": ("Mixtral", {"num_local_experts": 4}),
            "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16})}


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def models(request, tmp_path):
    """(on the CPU, on the device)."""
    family, config = request.param
    save(tmp_path, family, **config)
    return tuple(load_model(tmp_path, dtype=torch.float32, device=torch.device(d)) for d in ("cpu", "cuda"))


def within_the_step(layer, q, k, v, sinks=None):
    """Attention among the step's own tokens; nothing is kept between calls, so that a graph may replay it."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True,
                                                            enable_gqa=True)[0].transpose(0, 1)


def test_equals_the_cpu(models):
    cpu, cuda = models
    ids = ids_of(20)
    attend = DenseAttend(cuda.layers).step(20)
    positions = torch.arange(20)
    ours = cuda.logits(cuda.forward(torch.tensor(ids).cuda(), positions.cuda(), _on_cpu(attend)))
    torch.testing.assert_close(ours.cpu(), run(cpu, ids), atol=1e-3, rtol=1e-3)


def _on_cpu(attend):
    return lambda layer, q, k, v, sinks=None: attend(
        layer, q.cpu(), k.cpu(), v.cpu(), None if sinks is None else sinks.cpu()).cuda()


def test_a_graph_replays_the_forward_pass(models):
    _, model = models
    ids, positions = torch.zeros(8, dtype=torch.int64).cuda(), torch.zeros(8, dtype=torch.int64).cuda()
    taps = {"hidden.0": None, "hidden.last": None}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            model.logits(model.forward(ids, positions, within_the_step))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model.logits(model.forward(ids, positions, within_the_step, taps))
    for seed in (1, 2):
        ids.copy_(torch.tensor(ids_of(8, seed=seed)))
        positions.copy_(torch.arange(8) + seed)
        graph.replay()
        eager = dict.fromkeys(taps)
        right = model.logits(model.forward(ids.clone(), positions.clone(), within_the_step, eager))
        torch.testing.assert_close(logits, right, atol=1e-5, rtol=1e-5)
        for name, value in eager.items():
            torch.testing.assert_close(taps[name], value, atol=1e-5, rtol=1e-5)
