"""The matrix of a GPU equals torch's product at every number of rows that has a kernel of its own, and in a graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from stretto.model.matrix import CudaMatrix, best_matrix

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHAPES = [(6144, 4096), (4096, 4096), (4096, 14336), (40960, 2048), (4096, 1024), (1024, 3072), (1536, 896), (100, 60)]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    error = (got.double() - want).norm() / want.norm()
    assert error < 6e-3, error


@pytest.mark.parametrize("rows", [1, 2, 8, 17, 64, 65, 128, 129])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape: tuple[int, int], rows: int) -> None:
    torch.manual_seed(rows)
    w = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[1] ** -0.5
    bias, norm = torch.randn(shape[0], device="cuda").bfloat16(), torch.randn(shape[1], device="cuda").bfloat16()
    x = torch.randn(rows, shape[1], device="cuda").bfloat16()
    residual = torch.randn(rows, shape[0], device="cuda").bfloat16()
    for b in (None, bias):
        matrix = best_matrix(w, b)
        assert isinstance(matrix, CudaMatrix)
        want = F.linear(x.double(), w.double(), None if b is None else b.double())
        close(matrix(x), want)
        assert matrix.logits(x).dtype == torch.float32
        close(matrix.logits(x), want)
        close(matrix.add_to(residual.clone(), x), want + residual.double())
        normed = F.linear(F.rms_norm(x.double(), norm.shape, norm.double(), 1e-5), w.double(),
                          None if b is None else b.double())
        close(matrix.normed(x, norm, 1e-5), normed)
        for act, function in (("silu", F.silu), ("gelu", F.gelu)):
            first, second = normed.chunk(2, -1)
            close(matrix.normed(x, norm, 1e-5, act), function(first) * second)


@pytest.mark.parametrize("rows", [1, 8, 64, 100])
def test_a_chain_in_a_graph_equals_the_same_chain_launched(rows: int) -> None:
    """Launches that overlap (programmatic dependent launch) keep their order, replay after replay."""
    torch.manual_seed(0)
    up = best_matrix(torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16) * 0.02)
    down = best_matrix(torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16) * 0.02)
    assert isinstance(up, CudaMatrix) and isinstance(down, CudaMatrix)
    norm, start = torch.ones(2048, device="cuda").bfloat16(), torch.randn(rows, 2048, device="cuda").bfloat16()

    def chain() -> torch.Tensor:
        hidden = start.clone()
        for _ in range(12):
            down.add_to(hidden, up.normed(hidden, norm, 1e-5, "silu"))
        return hidden
    want = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for _ in range(20):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, want)
