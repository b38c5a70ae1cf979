"""Caches of e4m3 numbers: what is stored, who stores it, and attention over it, beside what it stands for."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.attn.api import GroupSpec, LayerSpec
from stretto.attn.tiles import INTERPRETER
from stretto.attn.torch_ragged import TorchRagged
from stretto.attn.triton_ragged import TritonRagged
from stretto.device.kv import KVCache, bytes_per_token
from stretto.ops.fp8 import KV_FP8, KVScales, dequantize_heads, quantize_heads
from stretto.ops.kv_write import write_kv_reference
from stretto.ops.layer import HeadWeights, Rope, rotate_and_write_reference
from stretto.ops.triton_kv_write import launch_write_kv
from stretto.ops.triton_layer import launch_rotate_and_write
from tests.attn.oracle import expected, make_case, relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def numbers(*shape: int, spread: float = 4.0) -> torch.Tensor:
    """Heads of very different sizes."""
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=g) * torch.exp(spread * torch.randn(*shape[:-1], 1, generator=g))


# ------------------------------------------------------------------------------------------------------ what is stored
def test_a_number_is_off_by_a_sixteenth_at_most():
    x = numbers(500, 64)
    codes, exponents = quantize_heads(x)
    assert codes.dtype is KV_FP8 and exponents.dtype is torch.uint8 and exponents.shape == (500,)
    largest = x.abs().amax(-1, keepdim=True)
    off = (dequantize_heads(codes, exponents, torch.float32) - x).abs()
    assert (off <= torch.maximum(x.abs() / 16, largest * 2.0**-17)).all()
    assert ((codes.float().abs().amax(-1) >= 128) & (codes.float().abs().amax(-1) <= 256)).all(), "nothing saturates"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_stored_is_exact_in_the_types_of_activations(dtype):
    codes, exponents = quantize_heads(numbers(100, 32))
    assert torch.equal(dequantize_heads(codes, exponents, dtype).double(),
                       codes.double() * torch.exp2(exponents.double() - 127)[:, None])


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.floats(-2.0**127, 2.0**127, width=32), min_size=4, max_size=4))
def test_any_finite_head_comes_back_finite_and_the_same_when_stored_again(head):
    x = torch.tensor([head])
    once = dequantize_heads(*quantize_heads(x), torch.float32)
    assert once.isfinite().all()
    assert torch.equal(dequantize_heads(*quantize_heads(once), torch.float32), once)


def test_memory_is_counted():
    layers = (LayerSpec(4, 2, 64, 0.125), LayerSpec(4, 2, 64, 0.125))
    group = GroupSpec(None, (0, 1))
    assert bytes_per_token(layers, group, KV_FP8) == 2 * 2 * 2 * 65
    kv = KVCache(layers, (group,), (7,), 16, KV_FP8, DEVICE)
    assert kv.nbytes == 8 * 16 * bytes_per_token(layers, group, KV_FP8) == sum(
        t.numel() * t.element_size() for t in kv.page_tensors(0))


def test_pages_are_copied_and_poisoned_with_their_scales():
    layer = LayerSpec(2, 2, 8, 1.0)
    kv = KVCache((layer,), (GroupSpec(None, (0,)),), (3,), 4, KV_FP8, DEVICE)
    x = numbers(4, 2, 8).to(DEVICE)
    kv.write(0, torch.arange(4, 8, device=DEVICE), x, x)
    kv.copy_page(0, 1, 2)
    for cache, exponents in zip((kv.k[0], kv.v[0]), kv.scales[0], strict=True):
        assert torch.equal(dequantize_heads(cache[2], exponents[2], torch.float32),
                           dequantize_heads(*quantize_heads(x), torch.float32))
    kv.poison_page(0, 2)
    poisoned = dequantize_heads(kv.k[0][2], kv.scales[0].k[2], torch.float32)
    assert poisoned.isfinite().all() and (poisoned > 2e4).all()


# --------------------------------------------------------------------------------------------------------- who stores
def caches(page: int, heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, KVScales]:
    k, v = (torch.zeros(5, page, heads, dim, dtype=torch.uint8, device=DEVICE).view(KV_FP8) for _ in "kv")
    return k, v, KVScales(*(torch.zeros(5, page, heads, dtype=torch.uint8, device=DEVICE) for _ in "kv"))


def same(one, other) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8))
               for a, b in zip((*one[:2], *one[2]), (*other[:2], *other[2]), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 64, 80])
def test_the_kernel_writes_the_same_bits(dtype, dim):
    k, v = (numbers(7, 3, dim, spread=1.0).to(DEVICE, dtype) for _ in "kv")
    cells = torch.tensor([5, 9, 17, 16, 4, 19, 7], device=DEVICE)
    want, got = caches(4, 3, dim), caches(4, 3, dim)
    write_kv_reference(k, v, *want[:2], cells, want[2])
    launch_write_kv(k, v, *got[:2], cells, got[2])
    assert same(want, got) and want[2].k.any()


@pytest.mark.parametrize("normed", [False, True])
def test_the_rotation_writes_what_stands_beside_its_reference(normed):
    """Norm and rotation may round differently, by less than one step of a code."""
    heads, kv, dim = 4, 2, 32
    qkv = numbers(6, heads + 2 * kv, dim, spread=0.5).to(DEVICE)
    cells, positions = torch.arange(4, 10, device=DEVICE), torch.arange(6, device=DEVICE)
    angle = torch.outer(torch.arange(8.0), torch.rand(dim // 2, generator=torch.Generator().manual_seed(1)))
    table = torch.cat((angle.cos(), angle.sin()), -1).to(DEVICE)
    rope = Rope(table, positions)
    norm = HeadWeights(torch.rand(dim, device=DEVICE), torch.rand(dim, device=DEVICE), 1e-6) if normed else None
    want, got = caches(4, kv, dim), caches(4, kv, dim)
    q = rotate_and_write_reference(qkv, heads, rope, norm, *want[:2], cells, want[2])
    mine = launch_rotate_and_write(qkv.clone(), heads, rope, norm, *got[:2], cells, got[2])
    torch.testing.assert_close(mine, q, atol=1e-5, rtol=1e-5)
    for i in range(2):
        a, b = (dequantize_heads(c[i], c[2][i], torch.float32) for c in (want, got))
        assert ((a - b).abs() <= a.abs() / 8 + 1e-6).all() and (a != b).float().mean() < 0.01
    assert torch.equal(want[2].v, got[2].v)


# ---------------------------------------------------------------------------------------------------------- attention
LAYERS = {"plain": {}, "window": {"window": 50}, "all": {"window": 50, "softcap": 5.0, "has_sinks": True}}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype, options", [(torch.float32, "plain"), (torch.float32, "window"),
                                            (torch.bfloat16, "all"), (torch.float16, "all")])
def test_attention_is_that_over_what_is_meant(backend, options, dtype):
    layer = LayerSpec(4, 2, 64, 0.125, **LAYERS[options])
    case = make_case(layer, [1, 0, 5, 37, 1], [70, 0, 100, 75, 1], pad_rows=2, pad_tokens=5, dtype=dtype, device=DEVICE)
    case = dataclasses.replace(case, q=case.q.nan_to_num(), k_cache=case.k_cache.nan_to_num(0.5),
                               v_cache=case.v_cache.nan_to_num(0.5))
    (k, k_scales), (v, v_scales) = quantize_heads(case.k_cache), quantize_heads(case.v_cache)
    meant = dataclasses.replace(case, k_cache=dequantize_heads(k, k_scales, torch.float32),
                                v_cache=dequantize_heads(v, v_scales, torch.float32))
    made = TorchRagged() if backend == "torch" else TritonRagged(DEVICE, dtype, INTERPRETER, 4 << 20)
    assert "fp8_e4m3" in made.caps.kv_dtypes
    out = made.attend(layer, case.q, k, v, case.step, 0, made.metadata(case.step, 0, layer), case.sinks,
                      scales=KVScales(k_scales, v_scales))
    n = int(case.step.cu_q[-1])
    assert relative_error(out[:n], expected(meant)) < LIMITS[dtype] and not out[n:].any()


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_caches_of_other_types(backend, cache):
    """Cells are converted to the activations' type when they are read."""
    layer = LayerSpec(2, 1, 64, 0.125)
    case = make_case(layer, [1, 5, 37], [70, 100, 75], dtype=torch.float32, device=DEVICE)
    case = dataclasses.replace(case, k_cache=case.k_cache.nan_to_num(0.5).to(cache),
                               v_cache=case.v_cache.nan_to_num(0.5).to(cache))
    made = TorchRagged() if backend == "torch" else TritonRagged(DEVICE, torch.float32, INTERPRETER, 4 << 20)
    out = made.attend(layer, case.q, case.k_cache, case.v_cache, case.step, 0, made.metadata(case.step, 0, layer))
    assert relative_error(out, expected(case)) < 2e-6
