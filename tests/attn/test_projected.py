"""Attention to heads as projected equals norm, rotation and write in a launch of their own, then attention: queries,
caches and what is left alone. In Triton's interpreter, or on CUDA where there is one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from stretto.attn.api import LayerSpec, TakesProjected
from stretto.attn.triton_ragged import TritonRagged
from stretto.ops.fp8 import KV_FP8, KVScales, dequantize_heads, quantize_heads
from stretto.ops.layer import HeadWeights, rotate_and_write_reference
from tests.attn.oracle import Case, expected, make_case, relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEC = LayerSpec(n_heads=4, n_kv_heads=2, head_dim=64, scale=0.125)
Q, KV = [1, 0, 5, 8], [35, 0, 66, 1 + 8]  # the third row's tokens stand on both sides of a split, at cell 64
LIMITS = {torch.float32: 3e-6, torch.bfloat16: 1e-2}


def inputs(layer: LayerSpec, dtype: torch.dtype, normed: bool, page_size: int = 16) -> tuple[Case, torch.Tensor, tuple,
                                                                                            HeadWeights | None]:
    """A case of at most 8 tokens a row, its heads as projected (NaN in the padding), where to rotate to, weights."""
    case = make_case(layer, Q, KV, page_size=page_size, dtype=dtype, pad_rows=2, pad_tokens=3, device=DEVICE)
    case.step = dataclasses.replace(case.step, most_tokens=8)
    g, heads = torch.Generator().manual_seed(7), layer.n_heads + 2 * layer.n_kv_heads
    qkv = torch.full((len(case.q), heads, layer.head_dim), torch.nan)
    qkv[: sum(Q)] = torch.randn(sum(Q), heads, layer.head_dim, generator=g)
    table = torch.randn(max(KV) + 1, layer.head_dim, generator=g).to(DEVICE)
    weights = torch.randn(2, layer.head_dim, generator=g).to(DEVICE, dtype)
    norm = HeadWeights(weights[0], weights[1], 1e-5) if normed else None
    return case, qkv.to(DEVICE, dtype), (table, case.step.positions), norm


def attended(case: Case, qkv: torch.Tensor, rope: tuple, norm: HeadWeights | None,
             scales: KVScales | None = None) -> torch.Tensor:
    backend = TritonRagged(DEVICE, qkv.dtype, None, 4 << 20)
    plan = backend.metadata(case.step, 0, case.layer)
    assert backend.takes_projected(case.layer, case.step, plan)
    return backend.attend_projected(case.layer, qkv, rope, norm, case.k_cache, case.v_cache, case.step, 0, plan,
                                    case.sinks, scales)


def reference(case: Case, qkv: torch.Tensor, rope: tuple, norm: HeadWeights | None) -> None:
    """Queries and the new cells of the case become what they must be."""
    n = sum(Q)
    case.k_cache, case.v_cache = case.k_cache.clone(), case.v_cache.clone()
    case.q = rotate_and_write_reference(qkv[:n], case.layer.n_heads, (rope[0], rope[1][:n]), norm, case.k_cache,
                                        case.v_cache, case.step.cells[0][:n])


@pytest.mark.parametrize(("layer", "normed", "dtype"), [
    pytest.param({"window": 40, "has_sinks": True, "softcap": 5.0}, True, torch.bfloat16, id="all options"),
    pytest.param({"window": 3, "n_heads": 2}, False, torch.float32, id="a window shorter than the row, no grouping"),
    pytest.param({"head_dim": 80}, True, torch.float32, id="head size 80"),
    pytest.param({"head_dim": 12}, False, torch.float32, id="head size 12"),
])
def test_equals_the_launch_of_its_own(layer: dict, normed: bool, dtype: torch.dtype) -> None:
    spec = dataclasses.replace(SPEC, **layer)
    case, qkv, rope, norm = inputs(spec, dtype, normed)
    kept, before = qkv.clone(), case.k_cache.clone()
    want = dataclasses.replace(case)
    reference(want, qkv, rope, norm)
    out = attended(case, qkv, rope, norm)
    assert relative_error(out[: sum(Q)], expected(want)) < LIMITS[dtype]
    assert not out[sum(Q) :].any(), "tokens of the padding are not 0"
    assert torch.equal(qkv.nan_to_num(), kept.nan_to_num()), "the projected heads were changed"
    new = torch.zeros(case.k_cache.shape[:2], dtype=torch.bool, device=DEVICE).flatten()
    new[case.step.cells[0][: sum(Q)]] = True
    for got, wanted in ((case.k_cache, want.k_cache), (case.v_cache, want.v_cache)):
        got, wanted = got.flatten(0, 1), wanted.flatten(0, 1)
        assert relative_error(got[new], wanted[new].double()) < LIMITS[dtype]
        assert torch.equal(got[~new].nan_to_num(), wanted[~new].nan_to_num()), "a cell was written that is not new"
    assert not torch.equal(case.k_cache.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("page_size", [1, 3])
def test_page_sizes(page_size: int) -> None:
    case, qkv, rope, norm = inputs(SPEC, torch.float32, True, page_size)
    want = dataclasses.replace(case)
    reference(want, qkv, rope, norm)
    assert relative_error(attended(case, qkv, rope, norm)[: sum(Q)], expected(want)) < LIMITS[torch.float32]


def test_caches_of_8_bits() -> None:
    """New cells hold what `quantize_heads` makes of them, and are read as that."""
    case, qkv, rope, norm = inputs(SPEC, torch.float32, True)
    want = dataclasses.replace(case)
    reference(want, qkv, rope, norm)
    codes = [quantize_heads(cache.nan_to_num()) for cache in (want.k_cache, want.v_cache)]
    want.k_cache, want.v_cache = (dequantize_heads(*c, torch.float32) for c in codes)
    old = [quantize_heads(cache.nan_to_num()) for cache in (case.k_cache, case.v_cache)]
    case.k_cache, case.v_cache = (c[0] for c in old)
    scales = KVScales(old[0][1], old[1][1])
    out = attended(case, qkv, rope, norm, scales)
    assert case.k_cache.dtype is KV_FP8
    assert relative_error(out[: sum(Q)], expected(want)) < 1e-3  # a number or two that lie on the edge of a rounding
    cells = case.step.cells[0][: sum(Q)]
    for got, scale, (wanted, exponent) in ((case.k_cache, scales.k, codes[0]), (case.v_cache, scales.v, codes[1])):
        assert torch.equal(scale.flatten(0, 1)[cells], exponent.flatten(0, 1)[cells])
        same = got.flatten(0, 1)[cells].view(torch.uint8) == wanted.flatten(0, 1)[cells].view(torch.uint8)
        assert same.float().mean() > 0.99


def test_a_token_that_must_not_be_written_is_not() -> None:
    """Its cell is the null page's."""
    case, qkv, rope, norm = inputs(SPEC, torch.float32, False)
    old = case.step.cells[0][0].item()
    case.step.cells[0][0] = 0
    page, offset = old // 16, old % 16
    case.k_cache[page, offset], case.v_cache[page, offset] = 1.0, 2.0
    attended(case, qkv, rope, norm)
    assert (case.k_cache[page, offset] == 1.0).all() and (case.v_cache[page, offset] == 2.0).all()


def test_steps_that_may_hold_chunks_are_not_taken() -> None:
    case, *_ = inputs(SPEC, torch.float32, False)
    backend = TritonRagged(DEVICE, torch.float32, None, 4 << 20)
    assert isinstance(backend, TakesProjected)
    plan = backend.metadata(case.step, 0, SPEC)
    assert backend.takes_projected(SPEC, case.step, plan)
    assert not backend.takes_projected(SPEC, dataclasses.replace(case.step, most_tokens=None), plan)
    many = torch.zeros(2000, dtype=torch.int32, device=DEVICE)
    assert not backend.takes_projected(SPEC, dataclasses.replace(case.step, q_len=many), plan)
    fixed = TritonRagged(DEVICE, torch.float32, None, 4 << 20, fixed=True)
    assert not fixed.takes_projected(SPEC, case.step, fixed.metadata(case.step, 0, SPEC))
