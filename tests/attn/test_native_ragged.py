"""The native kernels of attention against dense attention and against torch's: row shapes, options, pages, spans."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.attn.api import LayerSpec
from stretto.attn.native_ragged import NativeRagged
from stretto.attn.select import choose_backend
from stretto.attn.torch_ragged import TorchRagged
from stretto.ops.fp8 import KV_FP8, KVScales, quantize_heads
from stretto.ops.layer import HeadWeights, Rope, rotate_and_write_reference
from stretto.ops.native import attention, layer, library
from tests.attn.oracle import Case, expected, make_case, make_step, relative_error

pytestmark = pytest.mark.skipif(library.library(attention.NAME) is None or not layer.there(),
                                reason="no C++ compiler")

SPEC = LayerSpec(n_heads=2, n_kv_heads=1, head_dim=64, scale=0.125)
KIT_Q = [1, 0, 5, 70, 1]  # decode, empty, verify, chunk, decode
KIT_KV = [513, 0, 260, 300, 1]  # in and at the edges of spans
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


def spec(**changes) -> LayerSpec:
    return dataclasses.replace(SPEC, **changes)


def run(case: Case, scales: KVScales | None = None) -> torch.Tensor:
    backend = NativeRagged()
    return backend.attend(case.layer, case.q, case.k_cache, case.v_cache, case.step, 0,
                          backend.metadata(case.step, 0, case.layer), case.sinks, scales)


def check(case: Case) -> torch.Tensor:
    out, n = run(case), int(case.step.cu_q[-1])
    assert relative_error(out[:n], expected(case)) < LIMITS[case.q.dtype]
    assert out.dtype == case.q.dtype and not out[n:].any(), "tokens of the padding are not 0"
    return out


@pytest.mark.parametrize("layer", [
    pytest.param(spec(n_heads=9, n_kv_heads=3), id="three KV heads"),
    pytest.param(spec(window=18), id="window"),
    pytest.param(spec(window=50, has_sinks=True), id="window and sinks"),
    pytest.param(spec(softcap=5.0), id="softcap"),
    pytest.param(spec(softcap=5.0, window=270, has_sinks=True), id="softcap, window and sinks"),
    pytest.param(spec(n_heads=2, n_kv_heads=2), id="no grouping"),
    pytest.param(spec(n_heads=71, n_kv_heads=1), id="71 heads to a KV head"),
])
def test_row_shapes_in_one_call(layer):
    """q in {0, 1, K + 1, chunk}, padding rows and tokens; whatever a row does not own is NaN."""
    check(make_case(layer, KIT_Q, KIT_KV, pad_rows=2, pad_tokens=5))


@pytest.mark.parametrize("page_size", [1, 3, 64, 256])
def test_page_sizes(page_size):
    check(make_case(spec(window=90), KIT_Q, KIT_KV, page_size=page_size))


@pytest.mark.parametrize("head_dim", [8, 20, 48, 80, 96, 128, 256])
def test_head_sizes(head_dim):
    check(make_case(spec(head_dim=head_dim, scale=head_dim**-0.5), [1, 5, 20], [70, 33, 290]))


def test_bfloat16():
    check(make_case(spec(has_sinks=True), KIT_Q, KIT_KV, dtype=torch.bfloat16))


def test_cells_of_another_type_than_the_queries():
    case = make_case(spec(), KIT_Q, KIT_KV, dtype=torch.bfloat16)
    check(dataclasses.replace(case, q=case.q.float()))


def test_cells_in_eight_bits():
    """As if their numbers stood there in float32."""
    case = make_case(spec(n_heads=6, n_kv_heads=2, head_dim=24), KIT_Q, KIT_KV)
    (k, k_scales), (v, v_scales) = (quantize_heads(cache.nan_to_num()) for cache in (case.k_cache, case.v_cache))
    scales, step = KVScales(k_scales, v_scales), case.step
    got = run(dataclasses.replace(case, k_cache=k, v_cache=v), scales)
    backend = TorchRagged()
    q = case.q.nan_to_num()
    want = backend.attend(case.layer, q, k, v, step, 0, backend.metadata(step, 0, case.layer), None, scales)
    assert k.dtype is KV_FP8 and relative_error(got, want) < 1e-6


def test_case_9_01_a_token_sees_exactly_the_window():
    kv = [15, 16, 17, 18, 32, 33]
    case = make_case(spec(window=16), [1] * 6, kv, page_size=4)
    wide = dataclasses.replace(case, layer=spec(window=17), k_cache=torch.nan_to_num(case.k_cache, 1.0),
                               v_cache=torch.nan_to_num(case.v_cache, 1.0))
    moved = (run(wide) - check(case)).abs().amax((1, 2)) > 1e-4
    assert moved.tolist() == [n > 16 for n in kv], "a window one wider must change rows longer than the window alone"


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 18, 300])
def test_a_token_knows_neither_its_row_nor_the_others(window, threads):
    """Bit for bit: inside a chunk, decoded alone, in a verify window, in a larger bucket, whatever the threads."""
    case = make_case(spec(n_heads=6, n_kv_heads=2, window=window), [140, 1, 3, 0, 9], [700, 640, 50, 0, 1131])
    wide = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        whole = run(case)
        for row, back, count in ((0, 1, 1), (0, 17, 1), (0, 20, 6), (0, 139, 1), (2, 1, 1), (4, 3, 2), (4, 1, 1)):
            end, kv = int(case.step.cu_q[row + 1]) - back + 1, int(case.step.kv_len[row]) - back + 1
            step = make_step([count], [kv], case.step.page_tables[0], [int(case.step.slots[row])], 16)
            torch.set_num_threads(threads)
            assert torch.equal(run(dataclasses.replace(case, step=step, q=case.q[end - count : end])),
                               whole[end - count : end]), (row, back)
        torch.set_num_threads(1)
        assert torch.equal(run(case), whole)
    finally:
        torch.set_num_threads(wide)


@pytest.mark.parametrize("window", [None, 5000])
def test_more_spans_than_are_kept_at_a_time(window):
    """Bit for bit as one thread folds them, where a piece begins, goes on and ends among those of a turn."""
    case = make_case(spec(n_heads=2, n_kv_heads=1, head_dim=16, window=window), [3, 1, 80], [9000, 700, 12_000])
    wide = torch.get_num_threads()
    try:
        made = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            made.append(run(case))
    finally:
        torch.set_num_threads(wide)
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


ROWS = st.lists(st.tuples(st.sampled_from([0, 1, 5, 33]), st.integers(0, 600)), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(rows=ROWS, window=st.sampled_from([None, 1, 40, 256]), heads=st.sampled_from([(4, 4), (9, 3), (20, 1)]),
       page_size=st.sampled_from([1, 5, 16]), sinks=st.booleans(), dim=st.sampled_from([16, 40, 64]))
def test_any_rows(rows, window, heads, page_size, sinks, dim):
    q_lens = [q for q, _ in rows]
    kv_lens = [q + more if q else 0 for q, more in rows]
    if any(q_lens):
        check(make_case(LayerSpec(*heads, dim, dim**-0.5, window, has_sinks=sinks), q_lens, kv_lens, page_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cells", ["as they are", "bfloat16", "e4m3"])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_as_projected(dtype, cells, normed):
    """Norm, rotation, write and attention in one call are those one after the other; no other cell is touched."""
    layer = spec(n_heads=6, n_kv_heads=2, head_dim=40)
    case = make_case(layer, KIT_Q, KIT_KV, pad_rows=1)
    n, dim, g = len(case.step.ids), 40, torch.Generator().manual_seed(1)
    qkv = torch.randn(n, 10, dim, generator=g).to(dtype)
    angles = torch.rand(600, dim // 2, generator=g) * 6.0
    rope = Rope(torch.cat((angles.cos(), angles.sin()), -1), case.step.positions)
    norm = HeadWeights(*torch.rand(2, dim, generator=g).to(dtype), 1e-5) if normed else None
    kind = {"as they are": dtype, "bfloat16": torch.bfloat16, "e4m3": KV_FP8}[cells]
    got, want = (kept(case, kind), kept(case, kind))
    q = rotate_and_write_reference(qkv, 6, rope, norm, *want[:2], case.step.cells[0], want[2])
    backend, plain = NativeRagged(), TorchRagged()
    meta = backend.metadata(case.step, 0, layer)
    out = backend.projected(layer, qkv.clone(), rope, norm, *got[:2], case.step, 0, lambda: meta, got[2], False)
    wanted = plain.attend(layer, q, *want[:2], case.step, 0, plain.metadata(case.step, 0, layer), None, want[2])
    assert relative_error(out, wanted.double()) < (2e-2 if torch.bfloat16 in (dtype, kind) or want[2] else 1e-6)
    others = torch.ones(got[0].shape[0] * 16, dtype=torch.bool)
    others[case.step.cells[0]] = False
    for mine, theirs in zip((cache.float().flatten(0, 1) for cache in got[:2]),
                            (cache.float().flatten(0, 1) for cache in want[:2])):
        assert torch.equal(mine[others], theirs[others]) and (mine - theirs).norm() < 2e-3 * theirs.norm()
    if want[2] is not None:
        assert (got[2].k != want[2].k).float().mean() < 0.01 and torch.equal(got[2].v, want[2].v)


def kept(case: Case, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, KVScales | None]:
    """The caches of a case in a type, and the scales of e4m3."""
    caches = [cache.nan_to_num(7.0) for cache in (case.k_cache, case.v_cache)]
    if kind is not KV_FP8:
        return caches[0].to(kind), caches[1].to(kind), None
    (k, k_scales), (v, v_scales) = map(quantize_heads, caches)
    return k, v, KVScales(k_scales, v_scales)


def test_caches_of_two_layouts_are_refused():
    case = make_case(spec(), [1], [20])
    with pytest.raises(ValueError, match="one layout"):
        run(dataclasses.replace(case, v_cache=case.v_cache.transpose(0, 1)))


@pytest.mark.parametrize("fixed", [False, True])
def test_a_cpu_has_them(fixed):
    backend = choose_backend([SPEC], 16, torch.device("cpu"), torch.float32, fixed)
    assert isinstance(backend, NativeRagged) and not backend.caps.lack


@pytest.mark.parametrize("fixed", [False, True])
def test_without_a_compiler_torch_attends_and_that_is_said(monkeypatch, fixed):
    monkeypatch.setattr("stretto.attn.select.trouble", lambda name: "there is no C++ compiler (c++)")
    backend = choose_backend([SPEC], 16, torch.device("cpu"), torch.float32, fixed)
    assert isinstance(backend, TorchRagged) and "there is no C++ compiler" in backend.caps.lack


def test_types_without_kernels_are_said():
    backend = choose_backend([SPEC], 16, torch.device("cpu"), torch.float16)
    assert isinstance(backend, TorchRagged) and "float16" in backend.caps.lack
