"""Attention of short steps in one launch equals rotation, write and dense attention one after another: in Triton's
interpreter, or on CUDA where there is one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from stretto.attn.api import LayerSpec, ProjectedBackend
from stretto.attn.tiles import INTERPRETER
from stretto.attn.triton_ragged import TritonRagged
from stretto.attn.triton_short import launch_short, short_launch
from stretto.ops.fp8 import KVScales
from stretto.ops.launch import overlaps
from stretto.ops.layer import HeadWeights, Rope, rotate_and_write_reference
from tests.attn.oracle import expected, make_case, relative_error, scan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
CONTEXT = 700


def layer_of(group: int, head_dim: int = 64, n_kv_heads: int = 2) -> LayerSpec:
    return LayerSpec(group * n_kv_heads, n_kv_heads, head_dim, head_dim**-0.5)


def check(layer, q_lens, kv_lens, dtype=torch.float32, normed=False, early=False, **options):
    case = make_case(layer, q_lens, kv_lens, dtype=dtype, device=str(DEVICE), **options)
    step, n = dataclasses.replace(case.step, most_tokens=max(q_lens)), sum(q_lens)
    g = torch.Generator().manual_seed(1)
    heads, d = layer.n_heads + 2 * layer.n_kv_heads, layer.head_dim
    qkv = torch.randn(len(step.ids), heads, d, generator=g).to(dtype)
    qkv[n:] = torch.nan
    angles = torch.rand(CONTEXT, d // 2, generator=g) * 6.0
    rope = Rope(torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE), step.positions)
    norm = HeadWeights(*(torch.randn(2, d, generator=g).to(dtype).to(DEVICE)), 1e-5) if normed else None
    qkv = qkv.to(DEVICE)
    own = step.cells[0][:n]
    for cache in (case.k_cache, case.v_cache):
        cache.view(-1, layer.n_kv_heads, d)[own] = torch.nan  # what the launch itself writes
    want_k, want_v = case.k_cache.clone(), case.v_cache.clone()
    fed = Rope(rope.table, step.positions[:n])
    q = rotate_and_write_reference(qkv[:n], layer.n_heads, fed, norm, want_k, want_v, own)
    want = expected(dataclasses.replace(case, q=q, k_cache=want_k, v_cache=want_v))
    sizes = short_launch(layer, step)
    assert sizes is not None
    partials = torch.full((sizes.partials * layer.n_heads * (d + 1),), torch.nan, device=DEVICE)
    arrivals = torch.zeros(sizes.rows * layer.n_kv_heads, dtype=torch.int32, device=DEVICE)
    out = launch_short(sizes, layer, qkv, rope, norm, case.k_cache, case.v_cache, step, 0, partials, arrivals, early,
                       overlaps(DEVICE))
    assert relative_error(out[:n], want) < LIMITS[dtype]
    assert not out[n:].any() and not arrivals.any()
    for got, wanted in ((case.k_cache, want_k), (case.v_cache, want_v)):
        assert torch.equal(got.isnan(), wanted.isnan()), "another cell than the step's own was written"
        assert torch.allclose(got.nan_to_num(), wanted.nan_to_num(), rtol=1e-2 if dtype is torch.bfloat16 else 1e-5,
                              atol=1e-5)
    return out


@pytest.mark.parametrize(("group", "q_lens", "kv_lens", "normed"), [
    (1, [1, 0, 16, 1, 3], [1, 40, 70, 260, 64], False), (2, [1, 0, 8, 1, 3], [1, 40, 70, 260, 64], True),
    (4, [4, 0, 1], [130, 40, 65], True), (7, [2], [130], False)])
def test_rows_of_every_kind(group, q_lens, kv_lens, normed):
    """New cells alone, across the edge of a block, behind many splits; rows and tokens of padding."""
    check(layer_of(group), q_lens, kv_lens, normed=normed, pad_rows=1, pad_tokens=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_row(dtype):
    check(layer_of(4, 128), [1], [300], dtype=dtype)


def test_splits_of_several_blocks():
    check(layer_of(2, n_kv_heads=1), [5, 1], [390, 257], page_size=1)


def attended(case, layer, qkv, q_lens, kv_lens):
    """Of rows of these lengths with the cells of `case`; their tokens are the last of those that `qkv` holds, a row."""
    q, kv = (torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in (q_lens, kv_lens))
    step = dataclasses.replace(case.step, q_len=q, kv_len=kv, base=kv - q, cu_q=scan(q), most_tokens=8)
    tokens = torch.cat([mine[len(mine) - n :] for mine, n in zip(qkv, q_lens)])
    tokens = torch.cat((tokens, torch.zeros(len(step.ids) - len(tokens), *tokens.shape[1:], device=DEVICE).to(tokens)))
    sizes = short_launch(layer, step)
    angles = torch.arange(CONTEXT, device=DEVICE)[:, None] * 0.1 ** torch.arange(layer.head_dim // 2, device=DEVICE)
    rope = Rope(torch.cat((angles.cos(), angles.sin()), -1), step.positions)
    return launch_short(sizes, layer, tokens, rope, None, case.k_cache.clone(), case.v_cache.clone(), step, 0,
                        torch.empty(sizes.partials * layer.n_heads * (layer.head_dim + 1), device=DEVICE),
                        torch.zeros(64, dtype=torch.int32, device=DEVICE), False, overlaps(DEVICE))


def test_a_row_does_not_depend_on_the_batch():
    """Alone, or beside others, in one bucket."""
    layer, lengths = layer_of(2), [300, 200, 20, 64]
    case = make_case(layer, [4] * 4, lengths, dtype=torch.bfloat16, device=str(DEVICE))
    qkv = list(torch.randn(4, 4, layer.n_heads + 2 * layer.n_kv_heads, 64).bfloat16().to(DEVICE))
    beside = attended(case, layer, qkv, [1, 4, 1, 2], lengths)
    alone = attended(case, layer, qkv, [1, 0, 0, 0], lengths)
    assert torch.equal(alone[0], beside[0])
    assert torch.equal(attended(case, layer, qkv, [0, 4, 0, 0], lengths)[:4], beside[1:5])


def test_the_backend_takes_what_it_serves():
    """And nothing else: 8-bit cells, deterministic steps."""
    layer = layer_of(4)
    case = make_case(layer, [1, 2], [70, 9], dtype=torch.bfloat16, device=str(DEVICE))
    step = dataclasses.replace(case.step, most_tokens=2)
    qkv = torch.randn(3, layer.n_heads + 2 * layer.n_kv_heads, 64).bfloat16().to(DEVICE)
    rope = Rope(torch.rand(CONTEXT, 64, device=DEVICE), step.positions)
    given = layer, qkv, rope, None, case.k_cache, case.v_cache, step, 0, lambda: pytest.fail("it needs no plan")
    backend = TritonRagged(DEVICE, torch.bfloat16, INTERPRETER, 1 << 20)
    assert isinstance(backend, ProjectedBackend)
    first, again = backend.projected(*given, None, False), backend.projected(*given, None, True)
    assert torch.equal(first, again) and first.isfinite().all() and first.any()
    scales = KVScales(case.k_cache, case.v_cache)
    assert backend.projected(*given, scales, False) is None
    assert TritonRagged(DEVICE, torch.bfloat16, INTERPRETER, 1 << 20, fixed=True).projected(*given, None, False) is None
    assert TritonRagged(DEVICE, torch.bfloat16, INTERPRETER, 1 << 12).projected(*given, None, False) is None


@pytest.mark.parametrize("change", [dict(window=64), dict(softcap=5.0), dict(has_sinks=True), dict(head_dim=96)])
def test_layers_that_others_serve(change):
    case = make_case(layer_of(2), [1], [20])
    assert short_launch(dataclasses.replace(layer_of(2), **change), case.step) is None


def test_steps_that_others_serve():
    case = make_case(layer_of(2), [1] * 9, [20] * 9)
    assert short_launch(layer_of(2), case.step) is None
    case = make_case(layer_of(2), [9], [40])
    assert short_launch(layer_of(2), case.step) is None
    assert short_launch(layer_of(2), dataclasses.replace(case.step, most_tokens=8)) is not None
