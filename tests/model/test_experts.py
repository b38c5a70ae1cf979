"""Layers of experts: padding asks for none, a row is the same in any batch; heads with a part of them rotated."""

from __future__ import annotations

import pytest
import torch

from stretto.model.config import ConfigError
from stretto.model.decoder import feature_order
from stretto.model.load import load_model
from tests.model.dense import DenseAttend, run
from tests.model.tiny import ids_of, save

CPU = torch.device("cpu")
SIZES = {"Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
         "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 6}}


def load(folder):
    return load_model(folder, dtype=torch.float32, device=CPU)


class Padded:
    """An Attend over one sequence and padding after it, which counts the tokens that are real."""

    def __init__(self, attend: DenseAttend, real: int):
        self.attend, self.tokens, self.real = attend.step(real), torch.tensor(real), real

    def __call__(self, layer, q, k, v, *sinks):
        real = self.attend(layer, q[: self.real], k[: self.real], v[: self.real], *sinks)
        return torch.cat((real, torch.zeros_like(q[self.real :])))


@pytest.mark.parametrize("family", SIZES)
def test_padding_asks_for_no_expert(family, tmp_path, monkeypatch):
    save(tmp_path, family, **SIZES[family])
    model, ids = load(tmp_path), ids_of(9)
    asked = []
    for layer in model.decoder:
        monkeypatch.setattr(layer.mlp, "_run", _recorded(layer.mlp._run, asked))
    positions = torch.cat((torch.arange(9), torch.zeros(5, dtype=torch.int64)))
    hidden = model.forward(torch.tensor(ids + [0] * 5), positions, Padded(DenseAttend(model.layers), 9))
    torch.testing.assert_close(model.logits(hidden[:9]), run(model, ids), atol=1e-5, rtol=1e-5)
    assert [int(groups.bounds[-1]) for groups in asked[:3]] == [18, 18, 18]


def _recorded(inner, asked):
    def outer(x, groups):
        asked.append(groups)
        return inner(x, groups)

    return outer


def test_a_row_is_the_same_in_any_batch(tmp_path):
    """Bit for bit, as for matrices without experts."""
    save(tmp_path, "Mixtral", **SIZES["Mixtral"], hidden_size=96, intermediate_size=160)
    mlp = load(tmp_path).decoder[1].mlp
    x = torch.randn(20, 96, generator=torch.Generator().manual_seed(0))
    together = mlp(x)
    for span in (slice(0, 1), slice(3, 5), slice(7, 15), slice(19, 20)):
        assert torch.equal(mlp(x[span]), together[span])


@pytest.mark.parametrize("wanted, says", [({"num_experts_per_tok": 5}, "it must be 1 to the number of experts, 4"),
                                          ({"num_local_experts": 0}, "num_experts is 0"),
                                          ({"hidden_act": "wobble"}, "hidden_act 'wobble' is not supported")])
def test_refused_with_the_reason(wanted, says, tmp_path):
    import json

    save(tmp_path, "Mixtral", **SIZES["Mixtral"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wanted))
    with pytest.raises(ConfigError, match=says):
        load(tmp_path)


def test_missing_experts_are_named(tmp_path):
    from safetensors.torch import load_file, save_file

    from stretto.model.source import WeightError

    save(tmp_path, "Mixtral", **SIZES["Mixtral"])
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"1 missing: model\.layers\.1\.block_sparse_moe\.experts\.2\.w3\.weight"):
        load(tmp_path)


def test_features_stand_so_that_pairs_are_half_a_head_apart():
    assert feature_order(8, 8, False) == list(range(8))
    assert feature_order(8, 8, True) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert feature_order(8, 4, False) == [0, 1, 4, 5, 2, 3, 6, 7]
    assert feature_order(8, 4, True) == [0, 2, 4, 5, 1, 3, 6, 7]
    with pytest.raises(ConfigError, match="3 of 8 features"):
        feature_order(8, 3, False)
