"""Grouped multiplications: the kernel, interpreted where there is no GPU, and the references against plain loops."""

from __future__ import annotations

import pytest
import torch

from stretto.ops.grouped import combine_reference, group_by_expert, grouped_linear_reference
from stretto.ops.triton_grouped import INTERPRETED, launch_combine, launch_group, launch_grouped

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def choices(tokens: int, k: int, n_experts: int, seed: int = 0) -> torch.Tensor:
    """k different experts for each token, unevenly liked."""
    generator = torch.Generator().manual_seed(seed)
    liking = torch.arange(n_experts).flip(0).float() * 0.3
    return (torch.rand(tokens, n_experts, generator=generator) + liking).topk(k, -1).indices.to(DEVICE)


def plainly(x, weight, bias, experts, tokens: int):
    """[T, K, outputs] by a loop; zeros for padding."""
    out = torch.zeros(*experts.shape, weight.shape[1], dtype=torch.float64)
    x, weight = x.double().cpu(), weight.double().cpu()
    for t in range(tokens):
        for j, e in enumerate(experts[t].tolist()):
            out[t, j] = weight[e] @ x[t] + (bias[e].double().cpu() if bias is not None else 0)
    return out


def test_groups_keep_the_order_of_tokens():
    groups = group_by_expert(torch.tensor([[1, 0], [2, 1], [0, 1], [2, 2]]), 4, torch.tensor(3))
    assert groups.bounds.tolist() == [0, 2, 5, 6, 6]
    assert groups.slots.tolist() == [1, 4, 0, 3, 5, 2, 6, 7]


@pytest.mark.parametrize("tokens, k, n_experts, real", [(1, 2, 4, None), (7, 2, 4, 5), (33, 8, 128, 20), (5, 1, 3, 0),
                                                        (64, 4, 32, None), (16, 2, 16, 16)])
def test_few_slots_are_put_in_order_by_one_launch(tokens, k, n_experts, real):
    """As a stable sort does, padding behind all."""
    experts = choices(tokens, k, n_experts, seed=tokens)
    count = None if real is None else torch.tensor(real, device=DEVICE)
    slots, bounds = launch_group(experts, n_experts, count)
    want = group_by_expert(experts.cpu(), n_experts, None if count is None else count.cpu())
    assert torch.equal(slots.cpu(), want.slots) and torch.equal(bounds.cpu(), want.bounds)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens, real, k, n_experts, inputs, outputs, biased", [
    (1, 1, 2, 4, 48, 96, False),
    (7, 5, 2, 4, 48, 80, True),
    (40, 33, 3, 6, 72, 130, True),
    (9, 9, 1, 16, 33, 17, False),
    (70, 70, 2, 2, 64, 64, False),
    (3, 0, 2, 4, 32, 32, True),
])
def test_kernel_and_reference_equal_a_loop(tokens, real, k, n_experts, inputs, outputs, biased, dtype):
    assert INTERPRETED or DEVICE.type == "cuda"
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(DEVICE, dtype) for shape in
                       ((tokens, inputs), (n_experts, outputs, inputs), (n_experts, outputs)))
    experts = choices(tokens, k, n_experts)
    groups = group_by_expert(experts, n_experts, torch.tensor(real, device=DEVICE))
    right = plainly(x, weight, bias if biased else None, experts, real)
    for run in (launch_grouped, grouped_linear_reference):
        out = torch.zeros(tokens * k, outputs, dtype=dtype, device=DEVICE)
        made = run(x, weight, bias if biased else None, groups.bounds, groups.slots // k, groups.slots, out)
        error = (made.view(tokens, k, outputs).double().cpu() - right).abs().max()
        assert error <= TOLERANCE[dtype] * max(float(right.abs().max()), 1.0), run.__name__
        assert not made.view(tokens, -1)[real:].any(), "padding is left alone"


def test_a_row_is_the_same_in_any_batch():
    """Bit for bit: with what shape of blocks a row is computed depends on the sizes known on the host alone."""
    generator = torch.Generator().manual_seed(4)
    x, weight = (torch.randn(*shape, generator=generator).to(DEVICE) for shape in ((12, 40), (4, 24, 40)))
    experts = choices(12, 2, 4)

    def run(real: int) -> torch.Tensor:
        groups = group_by_expert(experts, 4, torch.tensor(real, device=DEVICE))
        out = torch.zeros(24, 24, device=DEVICE)
        return launch_grouped(x, weight, None, groups.bounds, groups.slots // 2, groups.slots, out)

    whole = run(12)
    for real in (1, 4, 9):
        assert torch.equal(run(real)[: 2 * real], whole[: 2 * real])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens, k, n", [(5, 2, 48), (1, 8, 1030), (0, 2, 16), (3, 1, 1024)])
def test_the_sum_over_choices(tokens, k, n, dtype):
    generator = torch.Generator().manual_seed(5)
    made = torch.randn(tokens, k, n, generator=generator).to(DEVICE, dtype)
    weights = torch.rand(tokens, k, generator=generator).to(DEVICE)
    right = (made.double() * weights.double()[..., None]).sum(1)
    for run in (launch_combine, combine_reference):
        torch.testing.assert_close(run(made, weights).double(), right, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_layouts_that_the_kernel_cannot_read_are_refused():
    x, weight = torch.randn(4, 8, device=DEVICE), torch.randn(2, 8, 6, device=DEVICE).transpose(1, 2)
    groups = group_by_expert(choices(4, 1, 2), 2)
    with pytest.raises(ValueError, match="weights and output must be contiguous"):
        launch_grouped(x, weight, None, groups.bounds, groups.slots, groups.slots, torch.zeros(4, 6, device=DEVICE))
