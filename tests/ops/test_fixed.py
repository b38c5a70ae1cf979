"""Rounding that does not depend on the batch: the pieces, each against itself in other company."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from stretto.model.matrix import FixedMatrix
from stretto.ops.fixed import by_rows, elementwise
from stretto.ops.grouped import FIXED_ROWS
from stretto.ops.triton_fixed import launch_fixed
from stretto.ops.triton_grouped import launch_grouped, tile_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PARTS = [(0, 1), (3, 4), (0, 7), (17, 40), (63, 66), (1, 90)]


def randn(*shape, dtype=torch.float32, seed=0, device=DEVICE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (70, 96), (130, 57), (136, 1024)])
def test_the_kernels_rows_stand_alone(dtype, outputs: int, inputs: int) -> None:
    x, w, bias = randn(90, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype, seed=1), randn(outputs, seed=2)
    whole = launch_fixed(x, w, bias.to(dtype), torch.float32)
    want = F.linear(x.double(), w.double(), bias.to(dtype).double())
    assert (whole.double() - want).norm() / want.norm() < 1e-5
    for start, end in PARTS[: 4 if DEVICE.type == "cpu" else None]:
        assert torch.equal(launch_fixed(x[start:end], w, bias.to(dtype), torch.float32), whole[start:end])
    assert launch_fixed(x[:0], w, None, dtype).shape == (0, outputs)


def test_the_experts_kernel_has_blocks_of_one_size() -> None:
    """The same slots beside few and beside many others of their expert."""
    x, w = randn(40, 32), randn(2, 16, 32, seed=1)

    def product(rows: int) -> torch.Tensor:
        places = torch.arange(rows, device=DEVICE)
        bounds = torch.tensor([0, rows // 2, rows], device=DEVICE)
        return launch_grouped(x[:rows], w, None, bounds, places, places, torch.zeros(rows, 16, device=DEVICE),
                              tile=tile_for(2 * FIXED_ROWS, 2, 4))
    many, few = product(40), product(10)
    assert torch.equal(many[:5], few[:5])
    assert torch.allclose(few[:5], x[:5] @ w[0].T, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (300, 57), (1000, 1000)])
def test_matrices_on_cpus(dtype, outputs: int, inputs: int) -> None:
    x, w = (randn(*shape, dtype=dtype, device="cpu") for shape in ((90, inputs), (outputs, inputs)))
    matrix = FixedMatrix(w, w[:, 0].clone())
    whole = matrix(x)
    want = F.linear(x.double(), w.double(), w[:, 0].double())
    assert (whole.double() - want).norm() / want.norm() < (1e-5 if dtype is torch.float32 else 1e-2)
    for start, end in PARTS:
        assert torch.equal(matrix(x[start:end]), whole[start:end])
    matrix.rows = 1  # as where places matter
    assert torch.equal(matrix(x[:5]), torch.cat([matrix(x[i : i + 1]) for i in range(5)]))
    assert matrix(x[:0]).shape == (0, outputs)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("columns", [60, 64, 100, 40_000])
@pytest.mark.parametrize("fn", [F.silu, F.gelu, torch.sigmoid, torch.exp], ids=lambda fn: fn.__name__)
def test_elements_do_not_see_their_neighbours(threads: int, columns: int, fn) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = randn(7 if columns > 1000 else 333, columns, device="cpu")
        whole = elementwise(fn, x)
        assert torch.allclose(whole, fn(x), atol=1e-6)
        for start, end in ((0, 1), (1, 4), (2, 7)):
            assert torch.equal(elementwise(fn, x[start:end]), whole[start:end])
    finally:
        torch.set_num_threads(before)


def test_by_rows() -> None:
    x, y = randn(37, 5), torch.arange(37, device=DEVICE)
    calls = []

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append(len(a))
        return a * b[:, None]
    assert torch.equal(by_rows(fn, x, y), x * y[:, None]) and len(set(calls)) == 1
    assert by_rows(fn, x[:0], y[:0]).shape == (0, 5)
