"""Weights of four bits are there to be read in less time than sixteen: for a token, at the sizes of real models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from stretto.ops.grouped import Gate, group_by_expert
from stretto.ops.packed import Layout, Packed
from tests.gpu.timing import seconds

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MATRICES = 4  # more than the second-level cache holds


def packed(layout: Layout, outputs: int, inputs: int) -> Packed:
    made = Packed.empty(layout, outputs, inputs, torch.bfloat16, torch.device("cuda"))
    made.codes.random_(0, 256)
    made.scales.fill_(2.0**-6)
    if made.offsets is not None:
        made.offsets.fill_(2.0**-8)
    return made


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("rows", [1, 16])
def test_a_product_of_few_rows(rows: int, group: int) -> None:
    from stretto.ops.triton_packed import launch_few_rows

    outputs, inputs = 14336, 4096
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    numbers = [packed(Layout("int4", group, True), outputs, inputs) for _ in range(MATRICES)]
    codes, whole = [w.by_groups() for w in numbers], [w.dequantized(torch.bfloat16) for w in numbers]
    out, arrivals = x.new_empty(rows, outputs), torch.zeros(outputs // 16, dtype=torch.int32, device="cuda")
    launch_few_rows(x, codes[0], out, arrivals=arrivals)
    assert (out.float() - F.linear(x, whole[0]).float()).norm() < 1e-2 * out.float().norm()
    four = seconds(lambda: [launch_few_rows(x, w, out, arrivals=arrivals) for w in codes])
    sixteen = seconds(lambda: [F.linear(x, w) for w in whole])
    assert four < sixteen, f"{1e6 * four / MATRICES:.1f} us against {1e6 * sixteen / MATRICES:.1f} us"


@pytest.mark.parametrize("tokens, factor", [(1, 1.0), (32, 1.0), (1024, 1.5)])
def test_experts(tokens: int, factor: float) -> None:
    """Of gpt-oss's sizes, half as many. Many rows wait for products, which four bits do not make faster."""
    from stretto.ops import triton_grouped, triton_packed

    experts, inputs, inner, k = 16, 2880, 2880, 4
    x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
    torch.manual_seed(2)
    groups = group_by_expert(torch.rand(tokens, experts, device="cuda").topk(k).indices, experts)
    out = x.new_empty(tokens * k, inner)
    weight = packed(Layout("fp4", 32), experts * 2 * inner, inputs)
    codes, numbers = weight.by_groups(), weight.dequantized(torch.bfloat16).view(experts, 2 * inner, inputs)
    where, gate = (groups.bounds, groups.slots, groups.places), Gate("clamped", 1.7, 7.0)
    want = triton_grouped.launch_grouped(x, numbers, None, *where, torch.empty_like(out), k, gate).float()
    got = triton_packed.launch_grouped(x, codes, None, *where, out, k, gate).float()
    assert (got - want).norm() < 1e-2 * want.norm()
    four = seconds(lambda: triton_packed.launch_grouped(x, codes, None, *where, out, k, gate))
    sixteen = seconds(lambda: triton_grouped.launch_grouped(x, numbers, None, *where, out, k, gate))
    assert four < factor * sixteen, f"{1e6 * four:.1f} us against {1e6 * sixteen:.1f} us"
