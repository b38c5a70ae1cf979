"""Products by weights of four bits at the sizes of real models, against those by the numbers that they stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from stretto.ops.gates import Gate
from stretto.ops.grouped import group_by_expert
from stretto.ops.packed import Layout, Packed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


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
    weight = packed(Layout("int4", group, True), outputs, inputs)
    out, arrivals = x.new_empty(rows, outputs), torch.zeros(outputs // 16, dtype=torch.int32, device="cuda")
    for _ in range(2):  # the counters are left as they were found
        launch_few_rows(x, weight.by_groups(), out, arrivals=arrivals)
        assert (out.float() - F.linear(x, weight.dequantized(torch.bfloat16)).float()).norm() < 1e-2 * out.norm()


@pytest.mark.parametrize("tokens", [1, 32, 1024])
def test_experts(tokens: int) -> None:
    """Of gpt-oss's sizes, half as many."""
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
