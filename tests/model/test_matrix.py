"""The packed matrices of CPUs: right, and the same for a row whoever comes with it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from stretto.model.matrix import PackedMatrix, PlainMatrix, best_matrix
from tests.model.tiny import ids_of

SHAPES = [(64, 48), (33, 64), (576, 1536), (96, 4096), (960, 576)]


def matrix(rows, inputs, dtype, seed=0):
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def packed(request):
    def make(weight, bias=None):
        made = best_matrix(weight, bias)
        if not isinstance(made, PackedMatrix):
            pytest.skip(f"oneDNN does not pack {request.param} on this machine")
        return made

    return request.param, make


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_equals_plain(packed, shape):
    dtype, make = packed
    weight, bias, x = matrix(*shape, dtype), matrix(shape[0], 1, dtype)[:, 0], matrix(19, shape[1], dtype, 1)
    right = F.linear(x.double(), weight.double(), bias.double())
    for made in (make(weight, bias), PlainMatrix(weight, bias)):
        assert (made(x).double() - right).abs().max() < right.abs().max() * (1e-2 if dtype is torch.bfloat16 else 1e-5)
        residual = matrix(19, shape[0], dtype, 2)
        expected = residual.double() + right
        assert made.add_to(residual, x) is residual
        assert (residual.double() - expected).abs().max() < expected.abs().max() * (
            2e-2 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_the_same_in_any_company(packed, shape):
    dtype, make = packed
    made, x = make(matrix(*shape, dtype)), matrix(70, shape[1], dtype, 1)
    most = made(x)
    for rows in (1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 64):
        assert torch.equal(made(x[:rows]), most[:rows]), rows
    assert torch.equal(made(x[50:51]), most[50:51])


def test_strided_rows(packed):
    dtype, make = packed
    weight, wide = matrix(40, 24, dtype), matrix(6, 60, dtype, 1)
    assert torch.equal(make(weight)(wide[:, 10:34]), make(weight)(wide[:, 10:34].contiguous()))


def test_a_model_says_the_same_in_any_batch(tmp_path):
    """End to end but for attention: hidden states of a token fed alone and among others, bit for bit."""
    from stretto.model.load import load_model
    from tests.model.tiny import save

    save(tmp_path, "Qwen3", head_dim=16, hidden_size=96, intermediate_size=1600)
    model = load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    ids = torch.tensor(ids_of(20))
    positions = torch.arange(20) * 3 % 17

    def itself(_layer, q, k, v, sinks=None):
        return q + k.repeat_interleave(2, 1) * v.repeat_interleave(2, 1)

    together = model.logits(model.forward(ids, positions, itself))
    for span in (slice(0, 1), slice(3, 5), slice(7, 15), slice(19, 20)):
        assert torch.equal(model.logits(model.forward(ids[span], positions[span], itself)), together[span])
