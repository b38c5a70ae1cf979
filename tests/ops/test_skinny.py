"""The product of a matrix and few rows equals torch's: in Triton's interpreter, or on CUDA where there is one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from stretto.ops.blocks import MOST_ROWS, Blocks, OneRow, SomeRows
from stretto.ops.launch import overlaps
from stretto.ops.skinny import blocks_for
from stretto.ops.triton_skinny import launch_few_rows, launch_one_row
from stretto.ops.triton_some_rows import launch_some_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PDL = overlaps(DEVICE)
COPY_ENGINE = pytest.mark.skipif(DEVICE.type == "cuda" and not PDL, reason="needs the copy engine of sm_90")


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def expected(x, w, bias, gated, out):
    y = F.linear(x.double(), w.double(), None if bias is None else bias.double())
    if gated:
        first, second = y.chunk(2, -1)
        y = F.silu(first) * second
    return y if out is None else y + out.double()


def close(got, want, bfloat16=5e-3):
    error = (got.double() - want).norm() / want.norm()
    assert error < (bfloat16 if got.dtype is torch.bfloat16 else 1e-5), error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bias", "gated", "add"), [(0, 0, 0), (1, 0, 1), (1, 1, 0), (0, 1, 0)])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_one_row(dtype, bias, gated, add, normed):
    x, w = randn(1, 256, dtype=dtype), randn(32 * (1 + gated), 256, dtype=dtype, seed=1) * 0.1
    b = randn(len(w), dtype=dtype, seed=2) if bias else None
    norm = randn(256, dtype=dtype, seed=3) if normed else None
    start = randn(1, 32, dtype=dtype, seed=4)
    out = start.clone()
    launch_one_row(x, w, out, Blocks(8, 128, 2, 4, ahead=128), PDL, norm, 1e-5, b, bool(gated), bool(add))
    given = x if norm is None else F.rms_norm(x.double(), (256,), norm.double(), 1e-5)
    close(out, expected(given, w, b, gated, start if add else None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bias", "gated", "add", "split"), [(0, 0, 0, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 0, 1, 2)])
@pytest.mark.parametrize(("m", "copies"), [(2, False), (19, False), pytest.param(19, True, marks=COPY_ENGINE)])
def test_few_rows(dtype, bias, gated, add, split, m, copies):
    x, w = randn(m, 256, dtype=dtype), randn(64 * (1 + gated), 256, dtype=dtype, seed=1) * 0.1
    b = randn(len(w), dtype=dtype, seed=2) if bias else None
    start = randn(m, 64, dtype=dtype, seed=4)
    out, arrivals = start.clone(), torch.zeros(4, dtype=torch.int32, device=DEVICE)
    for _ in range(1 if add else 2):  # the counters are left as they were found
        launch_few_rows(x, w, out, Blocks(16, 64, 2, 2, split, 64, copies), PDL, arrivals, bias=b, gated=bool(gated),
                        add=bool(add))
    close(out, expected(x, w, b, gated, start if add else None))
    assert not arrivals.any()


@COPY_ENGINE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("m", [70, 130])
def test_some_rows_gated(dtype, bias, m):
    """Rows that no tile is full of. What lies behind them is not touched."""
    x, w = randn(m, 256, dtype=dtype), randn(128, 256, dtype=dtype, seed=1) * 0.1
    b = randn(128, dtype=dtype, seed=2) if bias else None
    start = randn(m + 1, 64, dtype=dtype, seed=4)
    whole = start.clone()
    launch_some_rows(x, w, whole[:m], SomeRows(32, 64, 2, 4, ahead=64), PDL, b)
    close(whole[:m], expected(x, w, b, True, None))
    assert torch.equal(whole[m], start[m])


def test_results_in_float32():
    x, w = randn(3, 128, dtype=torch.bfloat16), randn(16, 128, dtype=torch.bfloat16, seed=1)
    out = torch.empty(3, 16, device=DEVICE)
    launch_few_rows(x, w, out, Blocks(16, 64, 2, 2, ahead=64), PDL, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    close(out, expected(x, w, None, False, None))


SHARED = 227 * 1024  # of an H200
LAYERS = [(6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False), (128256, 4096, False),
          (4096, 1024, False), (1024, 2048, False), (3072, 1024, True), (1024, 3072, False), (1152, 896, False),
          (4864, 896, True), (100, 60, False)]


@pytest.mark.parametrize(("outputs", "inputs", "gated"), LAYERS)
@pytest.mark.parametrize("rows", [1, 2, 16, 33, 64, 65, 256])
def test_chosen_blocks_fit_the_sizes(outputs, inputs, gated, rows):
    blocks = blocks_for(rows, outputs, inputs, gated, SHARED, copies=True)
    if blocks is None:  # torch's product
        assert inputs % 256 or outputs % 64 or rows > MOST_ROWS
        return
    assert isinstance(blocks, SomeRows) == (rows > MOST_ROWS)
    assert rows == 1 or not isinstance(blocks, OneRow)
    assert outputs % blocks.outputs == 0 and inputs % (blocks.columns * blocks.split) == 0
    assert blocks.ahead <= inputs and (not gated or blocks.split == 1)


def test_rows_above_the_bound_and_small_devices_get_torchs_product():
    assert blocks_for(0, 4096, 4096, False, SHARED) is None
    assert blocks_for(65, 4096, 4096, False, SHARED) is None
    assert blocks_for(257, 4096, 4096, False, SHARED, copies=True) is None
    assert blocks_for(64, 4096, 4096, False, 99 * 1024) is None
    assert blocks_for(100, 14336, 4096, True, SHARED, copies=True) is not None
    assert blocks_for(100, 14336, 4096, True, 99 * 1024, copies=True) is None
    assert blocks_for(8, 1024, 2048, False, SHARED, copies=True).copies
    assert not blocks_for(8, 1024, 2048, False, 99 * 1024, copies=True).copies
    assert not blocks_for(8, 1024, 2048, False, SHARED).copies
