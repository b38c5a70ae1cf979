"""The native kernels between the products of a layer equal their references, row by row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from stretto.model.packed_matrix import MOST_JOINED, NativeMatrix
from stretto.ops import layer as seam
from stretto.ops.fp8 import KV_FP8, KVScales
from stretto.ops.gates import GATES
from stretto.ops.layer import HeadWeights, Rope, rotate_and_write_reference
from stretto.ops.native import library, packed
from stretto.ops.native.layer import launch_gate, launch_rms_norm, launch_rotate, launch_rotate_and_write, there
from stretto.ops.packed import Layout, Packed

pytestmark = pytest.mark.skipif(not there(), reason="no C++ compiler")

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got, want, dtype):
    assert got.dtype == dtype and got.shape == want.shape
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < (3e-3 if dtype is torch.bfloat16 else 3e-7), error


@TYPES
@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (5, 96), (3, 1000), (2, 3, 48), (4, 7)])
def test_rms_norm(shape, dtype):
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    got = launch_rms_norm(x, weight, 1e-5)
    if len(x):
        close(got, F.rms_norm(x.double(), weight.shape, weight.double(), 1e-5), dtype)
    assert got.shape == x.shape


def test_rms_norm_by_weights_of_another_type():
    x, weight = randn(3, 200, dtype=torch.bfloat16), 1 + randn(200, seed=1)
    close(launch_rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), weight.shape, weight.double(), 1e-5), torch.bfloat16)


def test_rms_norm_of_strided_rows():
    x, weight = randn(4, 100)[:, 20:84], randn(64, seed=1)
    close(launch_rms_norm(x, weight, 1e-6), F.rms_norm(x.double(), (64,), weight.double(), 1e-6), torch.float32)


@TYPES
@pytest.mark.parametrize("act", GATES)
def test_gate(act, dtype):
    x = (randn(3, 2 * 1101) * torch.tensor([0.01, 3.0, 60.0])[:, None]).to(dtype)
    first, second = x.double().chunk(2, -1)
    close(launch_gate(x, act), GATES[act](first) * second, dtype)


def test_the_gate_of_numbers_far_off():
    x = torch.tensor([[-1e4, -88.0, 88.0, 1e4, 0.0] * 2])
    first, second = x.chunk(2, -1)
    assert torch.allclose(launch_gate(x, "silu"), F.silu(first) * second)


@TYPES
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("heads", "kv", "dim", "page"), [(4, 2, 64, 16), (6, 1, 80, 1), (9, 3, 16, 5), (2, 1, 6, 3)])
def test_rotate_and_write(heads, kv, dim, page, normed, dtype):
    wide = randn(20, heads + 2 * kv + 1, dim, dtype=dtype)
    qkv = wide[:, 1:]  # tokens with gaps between them
    norm = HeadWeights(randn(dim, dtype=dtype, seed=1), randn(dim, dtype=dtype, seed=2), 1e-6) if normed else None
    rope = Rope(randn(40, dim, seed=3), torch.arange(20) * 7 % 40)
    cells = torch.randperm(21 * page, generator=torch.Generator().manual_seed(0))[:20] + page
    both = randn(22, 2, page, kv, dim, dtype=dtype, seed=4)
    wanted = both.clone()
    q = rotate_and_write_reference(qkv, heads, rope, norm, wanted[:, 0], wanted[:, 1], cells)
    if not normed:
        close(launch_rotate(qkv[:, :heads], rope), q, dtype)
    got = launch_rotate_and_write(qkv, heads, rope, norm, both[:, 0], both[:, 1], cells)
    close(got, q, dtype)
    close(both, wanted, dtype)
    untouched = torch.ones(22 * page, dtype=torch.bool)
    untouched[cells] = False
    assert torch.equal(both[:, 0].flatten(0, 1)[untouched], wanted[:, 0].flatten(0, 1)[untouched])
    assert torch.equal(wide[:, 0], randn(20, heads + 2 * kv + 1, dim, dtype=dtype)[:, 0])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_know_the_others(threads):
    """Bit for bit, whatever the rows and the threads."""
    x, gate_up = randn(40, 577, dtype=torch.float32), randn(40, 2 * 577)
    qkv, rope = randn(40, 6, 64), Rope(randn(40, 64, seed=3), torch.arange(40))
    weight, wide = randn(577, seed=1), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for i in (0, 13, 39):
            one = Rope(rope.table, rope.positions[i : i + 1])
            assert torch.equal(launch_rms_norm(x, weight, 1e-5)[i], launch_rms_norm(x[i : i + 1], weight, 1e-5)[0])
            assert torch.equal(launch_gate(gate_up, "silu")[i], launch_gate(gate_up[i : i + 1], "silu")[0])
            assert torch.equal(launch_rotate(qkv, rope)[i], launch_rotate(qkv[i : i + 1], one)[0])
    finally:
        torch.set_num_threads(wide)


def test_what_the_kernels_do_not_take_goes_to_torch(monkeypatch):
    """Types without kernels, and machines without a compiler."""
    x, weight = randn(3, 64), randn(64, seed=1)
    rope = Rope(randn(40, 16, seed=3), torch.arange(3))
    calls = (lambda x: seam.rms_norm(x, weight.to(x.dtype), 1e-5), lambda x: seam.gate(x, "silu"),
             lambda x: seam.rotate(x.view(3, 4, 16), rope))
    native = [call(x) for call in calls]
    assert [call(x.half()).dtype for call in calls] == [torch.float16] * 3 and not seam.fused(x.half())
    monkeypatch.setattr("stretto.ops.native.layer.there", lambda: False)
    assert not seam.fused(x)
    for call, made in zip(calls, native):
        close(made, call(x), torch.float32)


needs_products = pytest.mark.skipif(library.library(packed.NAME) is None, reason="no C++ compiler")


@needs_products
@TYPES
@pytest.mark.parametrize("rows", [0, 1, 5, 70])
@pytest.mark.parametrize("biased", [False, True])
def test_products_and_what_stands_around_them_in_one_call(rows, dtype, biased):
    """Bit for bit what the calls one after another make, for few rows and for more than are joined."""
    first, second = (matrix(*shape, dtype, biased) for shape in ((2 * 128, 64), (64, 128)))
    x, weight = randn(rows, 64, dtype=dtype), randn(64, dtype=dtype, seed=1)
    assert first.joins(x) == (rows <= MOST_JOINED)
    norm = launch_rms_norm(x, weight, 1e-5)
    assert torch.equal(first.normed(x, weight, 1e-5), first(norm))
    gated = launch_gate(first(norm), "silu")
    assert torch.equal(first.normed(x, weight, 1e-5, "silu"), gated)
    if first.joins(x):
        made = first.add_mlp(x.clone(), weight, 1e-5, "silu", second)
        assert torch.equal(made, second.add_to(x.clone(), gated))


def matrix(outputs: int, inputs: int, dtype: torch.dtype, biased: bool) -> NativeMatrix:
    codes = torch.randint(0, 256, (outputs, inputs // 2), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    scales = randn(outputs, inputs // 32, seed=3)
    weight = Packed(Layout("int4", 32), codes, scales, None)
    return NativeMatrix(weight, randn(outputs, dtype=dtype, seed=4) if biased else None)


@needs_products
def test_what_a_kernel_would_misread_goes_to_none():
    """Addresses say neither a type nor a size."""
    x, multiply = randn(3, 64), matrix(32, 64, torch.float32, False)
    for weight in (randn(64).bfloat16(), randn(64).half(), randn(63), randn(128)[::2]):
        with pytest.raises(AssertionError):
            launch_rms_norm(x, weight, 1e-6)
    for rows in (x.half(), randn(3, 63), randn(64, 3).T):
        with pytest.raises(AssertionError):
            multiply._arranged.multiply(rows, torch.empty(len(rows), 32))
    with pytest.raises(AssertionError):
        multiply._arranged.multiply(x, torch.empty(3, 31))
    with pytest.raises(AssertionError):
        matrix(64, 96, torch.float32, False)


@TYPES
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 5, 23])
def test_numbers_that_are_none_are_not_hidden(dtype, bad, at):
    """What is damaged has to show in the end: as in the references, from gates and in cells of 8 bits."""
    x = randn(2, 2 * 24, dtype=dtype)
    x[0, at] = bad
    for act in ("relu", "gelu", "gelu_pytorch_tanh", "silu"):
        made, want = launch_gate(x, act), GATES[act](x[:, :24]) * x[:, 24:]
        assert torch.equal(made.isfinite(), want.isfinite()) or bad < 0, act
    qkv, cells = randn(2, 3, 24, dtype=dtype), torch.arange(2)
    qkv[0, 1:, at] = bad
    rope = Rope(torch.cat([torch.ones(40, 12), torch.zeros(40, 12)], 1), torch.arange(2))
    made = []
    for write in (launch_rotate_and_write, rotate_and_write_reference):
        k, v = (torch.zeros(1, 4, 1, 24, dtype=KV_FP8) for _ in range(2))
        scales = KVScales(*(torch.zeros(1, 4, 1, dtype=torch.uint8) for _ in range(2)))
        write(qkv.clone(), 1, rope, None, k, v, cells, scales)
        made.append([t.float().nan_to_num(nan=-1) for t in (k, v, scales.k, scales.v)])
    for got, want in zip(*made, strict=True):
        assert torch.equal(got, want)
