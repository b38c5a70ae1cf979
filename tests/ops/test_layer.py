"""The fused pieces of a layer equal their references: in Triton's interpreter, or on CUDA where there is one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from stretto.ops.gates import GATES
from stretto.ops.layer import HeadWeights, Rope, rotate_and_write_reference
from stretto.ops.triton_layer import launch_gate, launch_rms_norm, launch_rotate, launch_rotate_and_write

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def close(got, want, dtype):
    assert got.dtype == dtype
    want = want.double()
    error = (got.double() - want).norm() / want.norm()
    assert error < (5e-3 if dtype is torch.bfloat16 else 1e-6), error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (5, 96), (3, 1000), (2, 3, 48)])
def test_rms_norm(shape, dtype):
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    close(launch_rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), weight.shape, weight.double(), 1e-5), dtype)


def test_rms_norm_by_weights_of_another_type():
    """Gemma's, 1 + weight in float32: rounded once, as if all had been float32."""
    x, weight = randn(3, 200, dtype=torch.bfloat16), 1 + randn(200, seed=1)
    close(launch_rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), weight.shape, weight.double(), 1e-5), torch.bfloat16)


def test_rms_norm_of_strided_rows():
    x, weight = randn(4, 100)[:, 20:84], randn(64, seed=1)
    close(launch_rms_norm(x, weight, 1e-6), F.rms_norm(x.double(), (64,), weight.double(), 1e-6), torch.float32)


@pytest.mark.parametrize("act", GATES)
def test_gate(act):
    x = randn(3, 2 * 1100) * 3
    first, second = x.double().chunk(2, -1)
    close(launch_gate(x, act), GATES[act](first) * second, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("heads", "kv", "dim", "page"), [(4, 2, 64, 16), (6, 1, 80, 1), (9, 3, 16, 5)])
def test_rotate_and_write(heads, kv, dim, page, normed, dtype):
    qkv = randn(5, heads + 2 * kv, dim, dtype=dtype)
    norm = HeadWeights(randn(dim, dtype=dtype, seed=1), randn(dim, dtype=dtype, seed=2), 1e-6) if normed else None
    rope = Rope(randn(40, dim, seed=3), torch.tensor([0, 39, 7, 7, 12], device=DEVICE))
    cells = (torch.randperm(6 * page, generator=torch.Generator().manual_seed(0))[:5] + page).to(DEVICE)
    both = randn(8, 2, page, kv, dim, dtype=dtype, seed=4)
    wanted = both.clone()
    q = rotate_and_write_reference(qkv, heads, rope, norm, wanted[:, 0], wanted[:, 1], cells)
    plain = launch_rotate(qkv[:, :heads], rope)
    got = launch_rotate_and_write(qkv.clone(), heads, rope, norm, both[:, 0], both[:, 1], cells)
    close(got, q, dtype)
    close(both, wanted, dtype)
    if not normed:
        close(plain, q, dtype)
    untouched = torch.ones(8 * page, dtype=torch.bool, device=DEVICE)
    untouched[cells] = False
    flat = both[:, 0].flatten(0, 1)[untouched], wanted[:, 0].flatten(0, 1)[untouched]
    assert torch.equal(*flat)


def test_caches_of_two_layouts_are_refused():
    qkv, cells = randn(2, 6, 8), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    k, v = randn(3, 4, 2, 8), randn(4, 3, 2, 8).transpose(0, 1)
    with pytest.raises(ValueError, match="one layout"):
        launch_rotate_and_write(qkv, 2, Rope(randn(4, 8), cells), None, k, v, cells)
