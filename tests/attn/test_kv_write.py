"""Keys and values reach their cells and no others: the reference, and the kernel in Triton's interpreter or on CUDA."""

from __future__ import annotations

import pytest
import torch

from stretto.ops.kv_write import write_kv, write_kv_reference
from stretto.ops.triton_kv_write import launch_write_kv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("writer", [write_kv_reference, launch_write_kv, write_kv])
@pytest.mark.parametrize(("page_size", "heads", "dim", "dtype"), [
    (16, 2, 64, torch.float32), (1, 3, 80, torch.float16), (5, 1, 8, torch.float32), (4, 40, 64, torch.float16)])
def test_cells_are_written_and_their_neighbours_kept(writer, page_size, heads, dim, dtype):
    g = torch.Generator().manual_seed(0)
    fused = torch.randn(7, 3 * heads, dim, generator=g).to(dtype).to(DEVICE)  # a slice of it is strided by token
    k, v = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
    both = torch.randn(9, 2, page_size, heads, dim, generator=g).to(dtype).to(DEVICE)
    before = both.clone()
    cells = (torch.randperm(8 * page_size, generator=g)[:7] + page_size).to(DEVICE)
    writer(k, v, both[:, 0], both[:, 1], cells)
    for cache, old, new in ((both[:, 0], before[:, 0], k), (both[:, 1], before[:, 1], v)):
        want = old.clone()
        for token, cell in enumerate(cells.tolist()):
            want[cell // page_size, cell % page_size] = new[token]
        assert torch.equal(cache, want)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a CUDA device")
def test_shapes_that_do_not_fit_are_refused():
    k, cache = torch.zeros(3, 2, 8, device=DEVICE), torch.zeros(4, 16, 2, 8, device=DEVICE)
    cells = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="do not fit"):
        write_kv(k, k, cache, cache, cells[:2])
    with pytest.raises(ValueError, match="not contiguous"):
        write_kv(k, k.mT.contiguous().mT, cache, cache, cells)
    with pytest.raises(ValueError, match="strides of the caches"):
        write_kv(k, k, cache, cache.transpose(0, 1).contiguous().transpose(0, 1), cells)
