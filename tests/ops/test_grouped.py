"""Grouped multiplications: the kernel, interpreted where there is no GPU, and the references against plain loops."""

from __future__ import annotations

import pytest
import torch

from stretto.ops.gates import Gate
from stretto.ops.grouped import choose_reference, combine_reference, group_by_expert, grouped_linear_reference
from stretto.ops.triton_grouped import INTERPRETED, launch_choose, launch_combine, launch_group, launch_grouped

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


@pytest.mark.parametrize("tokens, k, n_experts, real, few", [
    (1, 2, 4, None, 512), (7, 2, 4, 5, 512), (33, 8, 128, 20, 512), (5, 1, 3, 0, 512), (64, 4, 32, None, 512),
    (16, 2, 16, 16, 512), (7, 2, 4, 5, 0), (301, 2, 4, 300, 512), (80, 8, 128, None, 0), (150, 4, 6, 70, 512)])
def test_slots_are_put_in_order_by_counting(tokens, k, n_experts, real, few):
    """As a stable sort does, padding behind all; few in one launch, more in three."""
    experts = choices(tokens, k, n_experts, seed=tokens)
    count = None if real is None else torch.tensor(real, device=DEVICE)
    slots, bounds, places = launch_group(experts, n_experts, count, few)
    want = group_by_expert(experts.cpu(), n_experts, None if count is None else count.cpu())
    assert torch.equal(slots.cpu(), want.slots) and torch.equal(bounds.cpu(), want.bounds)
    assert torch.equal(places.cpu(), want.places)


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
        made = run(x, weight, bias if biased else None, groups.bounds, groups.slots, groups.slots, out, k)
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
        return launch_grouped(x, weight, None, groups.bounds, groups.slots, groups.slots, out, 2)

    whole = run(12)
    for real in (1, 4, 9):
        assert torch.equal(run(real)[: 2 * real], whole[: 2 * real])


@pytest.mark.parametrize("gate", [Gate("silu"), Gate("gelu_pytorch_tanh"), Gate("clamped", 1.7, 1.5)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_products_are_gated_on_their_way_out(gate, dtype):
    """By place, as what comes after reads them; the last columns of a tile are none."""
    generator = torch.Generator().manual_seed(6)
    tokens, k, n, inner = 21, 2, 5, 70
    x, weight, bias = (torch.randn(*shape, generator=generator).to(DEVICE, dtype) * 0.3 for shape in
                       ((tokens, 40), (n, 2 * inner, 40), (n, 2 * inner)))
    experts = choices(tokens, k, n)
    groups = group_by_expert(experts, n, torch.tensor(19, device=DEVICE))
    sums = plainly(x, weight, bias, experts, 19).view(-1, 2 * inner)[groups.slots.cpu()]
    right = gate(sums[: 19 * k])
    for run in (launch_grouped, grouped_linear_reference):
        out = torch.full((tokens * k, inner), 7.0, dtype=dtype, device=DEVICE)
        made = run(x, weight, bias, groups.bounds, groups.slots, groups.places, out, k, gate)
        torch.testing.assert_close(made[: 19 * k].double().cpu(), right, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert (made[19 * k :] == 7).all(), "padding is left alone"


@pytest.mark.parametrize("of_all", [False, True])
@pytest.mark.parametrize("tokens, k, n", [(1, 1, 1), (5, 2, 4), (3, 8, 128), (2, 3, 60), (0, 2, 8)])
def test_choices_of_a_router(tokens, k, n, of_all):
    logits = torch.randn(tokens, n + 3, generator=torch.Generator().manual_seed(tokens)).to(DEVICE)[:, :n]
    want, had = choose_reference(logits, k, of_all), launch_choose(logits, k, of_all)
    assert torch.equal(had[1], want[1])
    torch.testing.assert_close(had[0], want[0], atol=1e-6, rtol=1e-6)


def test_of_equal_experts_the_first_is_chosen_and_none_twice():
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0], [0.0] * 4, [float("-inf")] * 3 + [0.0]], device=DEVICE)
    weights, experts = launch_choose(logits, 2, False)
    assert experts[:2].tolist() == [[1, 2], [0, 1]] and experts[2, 0] == 3
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5], [1.0, 0.0]]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens, k, n", [(5, 2, 48), (1, 8, 1030), (0, 2, 16), (3, 1, 1024)])
def test_the_sum_over_choices(tokens, k, n, dtype):
    generator = torch.Generator().manual_seed(5)
    made = torch.randn(tokens, k, n, generator=generator).to(DEVICE, dtype)
    weights = torch.rand(tokens, k, generator=generator).to(DEVICE)
    right = (made.double() * weights.double()[..., None]).sum(1)
    real = max(tokens - 1, 0)
    base = torch.randn(tokens, n, generator=generator).to(DEVICE, dtype)
    for run in (launch_combine, combine_reference):
        torch.testing.assert_close(run(made, weights).double(), right, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        own, padded = base.clone(), made.clone()
        padded[real:] = float("nan")
        assert run(padded, weights, torch.tensor(real, device=DEVICE), own) is own
        torch.testing.assert_close(own[:real].double(), base[:real].double() + right[:real], atol=TOLERANCE[dtype],
                                   rtol=TOLERANCE[dtype])
        assert torch.equal(own[real:], base[real:]), "padding brings nothing"


def test_layouts_that_the_kernel_cannot_read_are_refused():
    x, weight = torch.randn(4, 8, device=DEVICE), torch.randn(2, 8, 6, device=DEVICE).transpose(1, 2)
    groups = group_by_expert(choices(4, 1, 2), 2)
    with pytest.raises(ValueError, match="weights and output must be contiguous"):
        launch_grouped(x, weight, None, groups.bounds, groups.slots, groups.slots, torch.zeros(4, 6, device=DEVICE))
