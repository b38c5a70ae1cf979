"""The Triton kernels against dense attention: row shapes, options, pages, windows, splits. On the CPU the kernels run
in Triton's interpreter with tiles so small that a few dozen keys cross every boundary."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.attn import triton_ragged
from stretto.attn.api import LayerSpec
from stretto.attn.tiles import INTERPRETER, FewTokens, KernelConfig, Tile, kernel_config
from stretto.attn.triton_kernels import ITEM_WORDS
from stretto.attn.triton_ragged import INTERPRETED, RaggedPlan, TritonRagged
from stretto.wire import NEVER
from tests.attn.oracle import Case, expected, make_case, make_step, relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEC = LayerSpec(n_heads=2, n_kv_heads=1, head_dim=64, scale=0.125)
KIT_Q = [1, 0, 5, 37, 1]  # decode, empty, verify, chunk, decode
KIT_KV = [70, 0, 100, 75, 1]
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def spec(**changes) -> LayerSpec:
    return dataclasses.replace(SPEC, **changes)


def run(case: Case, config: KernelConfig | None = INTERPRETER, workspace_bytes: int = 4 << 20,
        backend: TritonRagged | None = None) -> torch.Tensor:
    backend = backend or TritonRagged(DEVICE, case.q.dtype, config, workspace_bytes)
    plan = backend.metadata(case.step, 0, case.layer)
    return backend.attend(case.layer, case.q, case.k_cache, case.v_cache, case.step, 0, plan, case.sinks)


def check(case: Case, config: KernelConfig | None = INTERPRETER, workspace_bytes: int = 4 << 20) -> torch.Tensor:
    out, n = run(case, config, workspace_bytes), int(case.step.cu_q[-1])
    assert relative_error(out[:n], expected(case)) < LIMITS[case.q.dtype]
    assert not out[n:].any(), "tokens of the padding are not 0"
    return out


def test_the_kernels_run_here():
    assert INTERPRETED or DEVICE.type == "cuda", "TRITON_INTERPRET=1 must be set before Triton is imported"


@pytest.mark.parametrize("layer", [
    pytest.param(spec(n_heads=4, n_kv_heads=2), id="two KV heads"),
    pytest.param(spec(window=18), id="window"),
    pytest.param(spec(window=50, has_sinks=True), id="window and sinks"),
    pytest.param(spec(softcap=5.0), id="softcap"),
    pytest.param(spec(softcap=5.0, window=33, has_sinks=True), id="softcap, window and sinks"),
    pytest.param(spec(n_heads=2, n_kv_heads=2), id="no grouping"),
    pytest.param(spec(n_heads=7, n_kv_heads=1), id="7 heads to a KV head"),
    pytest.param(spec(n_heads=20, n_kv_heads=1), id="20 heads to a KV head"),
])
def test_row_shapes_in_one_launch(layer):
    """q in {0, 1, K + 1, chunk}, padding rows and tokens; whatever a row does not own is NaN."""
    check(make_case(layer, KIT_Q, KIT_KV, pad_rows=2, pad_tokens=5, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    check(make_case(spec(has_sinks=True), KIT_Q, KIT_KV, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("page_size", [1, 3, 64, 256])
def test_page_sizes(page_size):
    check(make_case(spec(window=90), KIT_Q, KIT_KV, page_size=page_size, device=DEVICE))


@pytest.mark.parametrize("head_dim", [8, 80, 96, 128, 256])
def test_head_sizes(head_dim):
    check(make_case(spec(head_dim=head_dim, scale=head_dim**-0.5), [1, 5, 20], [70, 33, 90], device=DEVICE))


ROUTES = [pytest.param(lambda n: n, id="whole prompt"), pytest.param(lambda n: min(n, 7), id="chunk"),
          pytest.param(lambda n: 1, id="decode"), pytest.param(lambda n: min(n, 4), id="verify")]


@pytest.mark.parametrize("route", ROUTES)
def test_case_9_01_a_token_sees_exactly_the_window(route):
    kv = [15, 16, 17, 18, 32, 33]
    case = make_case(spec(window=16), [route(n) for n in kv], kv, page_size=4, device=DEVICE)
    last = check(case)[case.step.cu_q[1:].long() - 1]
    wide = dataclasses.replace(case, layer=spec(window=17), k_cache=torch.nan_to_num(case.k_cache, 1.0),
                               v_cache=torch.nan_to_num(case.v_cache, 1.0))
    moved = (run(wide)[case.step.cu_q[1:].long() - 1] - last).abs().amax((1, 2)) > 1e-4
    assert moved.tolist() == [n > 16 for n in kv], "a window one wider must change rows longer than the window alone"


def test_case_9_03_windows_of_a_batch_are_those_of_each_row_alone():
    kv = [3, 15, 16, 17, 31, 40, 80, 130]
    together = make_case(spec(window=16), [1] * 8, kv, device=DEVICE)
    out = run(together)
    for row in range(8):
        assert torch.equal(out[row], run(alone(together, row))[0])


def alone(case: Case, row: int) -> Case:
    """One row of a step of one-token rows, as a step of its own."""
    step = make_step([1], [int(case.step.kv_len[row])], case.step.page_tables[0].cpu(), [int(case.step.slots[row])],
                     case.step.page_size, device=DEVICE)
    return dataclasses.replace(case, step=step, q=case.q[row : row + 1])


def test_case_9_07_a_window_that_is_no_multiple_of_the_page():
    """Cells before the window are NaN, also those that share a page with the window."""
    check(make_case(spec(window=18), [1, 3, 30, 1], [19, 64, 50, 5], page_size=4, device=DEVICE))


def test_a_token_does_not_depend_on_the_batch():
    """Bit for bit: alone, beside other rows, in a larger bucket, and as the last token of a verify window."""
    case = make_case(spec(), KIT_Q, KIT_KV, pad_rows=3, pad_tokens=4, device=DEVICE)
    out = run(case)
    for row in (0, 2, 4):
        last = int(case.step.cu_q[row + 1]) - 1
        step = make_step([1], [KIT_KV[row]], case.step.page_tables[0].cpu(), [int(case.step.slots[row])], 16,
                         device=DEVICE)
        single = run(dataclasses.replace(case, step=step, q=case.q[last : last + 1]))
        assert torch.equal(single[0], out[last])


@pytest.mark.parametrize("window", [None, 18])
def test_with_fixed_sums_a_token_does_not_know_its_row(window):
    """Bit for bit: inside a chunk, decoded alone, in a larger bucket, as the last of a verify window."""
    case = make_case(spec(window=window), [40, 1, 3, 0, 9], [70, 64, 50, 0, 131], device=DEVICE)
    backend = TritonRagged(DEVICE, torch.float32, INTERPRETER, fixed=True)

    def attend(step, q):
        plan = backend.metadata(step, 0, case.layer)
        return backend.attend(case.layer, q, case.k_cache, case.v_cache, step, 0, plan)

    whole = attend(case.step, case.q)
    assert torch.allclose(whole, run(case), atol=1e-5)
    for row, back, count in ((0, 1, 1), (0, 17, 1), (0, 20, 6), (0, 39, 1), (2, 1, 1), (4, 3, 2), (4, 1, 1)):
        end = int(case.step.cu_q[row + 1]) - back + 1
        kv = int(case.step.kv_len[row]) - back + 1
        step = make_step([count], [kv], case.step.page_tables[0].cpu(), [int(case.step.slots[row])], 16, device=DEVICE)
        assert torch.equal(attend(step, case.q[end - count : end]), whole[end - count : end]), (row, back)


def test_layers_use_one_plan_in_turn():
    """The counters of a launch are set back: the second layer finds the plan as the first did."""
    case = make_case(spec(), KIT_Q, KIT_KV, device=DEVICE)
    backend = TritonRagged(DEVICE, torch.float32, INTERPRETER)
    plan = backend.metadata(case.step, 0, case.layer)
    args = (case.layer, case.q, case.k_cache, case.v_cache, case.step, 0, plan)
    first = backend.attend(*args)
    assert torch.equal(first, backend.attend(*args))
    assert plan.counts[2:4].tolist() == [0, 0]


@pytest.mark.parametrize(("q", "kv", "window", "programs"), [
    ([4000], [4000], None, 100),  # chunks alone: all
    ([4000, *[1] * 20], [4000, *[4000] * 20], None, 77),  # 8e6 pairs beside 80,000 cells worth 33.5 pairs each
    ([4000, *[1] * 40], [4000, *[4000] * 40], 100, 77),  # 4e5 pairs beside 4,000 cells
    ([4000, *[1] * 20], [4000, *[1000] * 20], None, 91),  # beside 20,000 cells
    ([300, *[1] * 20], [4000, *[1000] * 20], None, 100),  # 80 items, which cannot be shared out evenly over fewer
    ([1300, *[1] * 20], [1300, *[30000] * 20], None, 26)])  # about a quarter, at least
def test_chunks_leave_multiprocessors_to_rows_of_few_tokens(q, kv, window, programs):
    layer = spec(n_heads=16, n_kv_heads=8, window=window)
    tables = torch.ones(len(q), -(-max(kv) // 16), dtype=torch.int32)
    step = make_step(q, kv, tables, range(len(q)), 16)
    backend = TritonRagged(DEVICE, torch.float32, INTERPRETER)
    backend.n_sm = 100
    assert backend.metadata(step, 0, layer).counts[4] == programs


def test_a_small_workspace_makes_longer_splits():
    case = make_case(spec(window=100), KIT_Q, KIT_KV, device=DEVICE)
    room = 4 * SPEC.n_heads * (SPEC.head_dim + 1) * 6  # 6 token-splits
    backend = TritonRagged(DEVICE, torch.float32, INTERPRETER, room)
    plan = backend.metadata(case.step, 0, case.layer)
    assert items_of(plan, 1)[:, 6].max() < 6
    check(case, workspace_bytes=room)


def test_buckets_choose_tiles():
    few = (FewTokens(6, Tile(16, 16, 1), 32), FewTokens(NEVER, Tile(32, 32, 1), 64))
    config = dataclasses.replace(INTERPRETER, few=few)
    assert [config.few_for(n) for n in (1, 6, 7, 999)] == [few[0], few[0], few[1], few[1]]
    for pad_rows in (0, 4):  # buckets of 5 and of 9 rows
        check(make_case(spec(window=60), KIT_Q, KIT_KV, pad_rows=pad_rows, device=DEVICE), config)


def test_packed_projections_and_interleaved_caches():
    """Queries that are a slice of a fused projection; keys and values of a page side by side."""
    case = make_case(spec(), KIT_Q, KIT_KV, device=DEVICE)
    fused = torch.full((case.q.shape[0], 3 * SPEC.n_heads, SPEC.head_dim), torch.nan, device=DEVICE)
    fused[:, : SPEC.n_heads] = case.q
    both = torch.stack([case.k_cache, case.v_cache], 1)
    check(dataclasses.replace(case, q=fused[:, : SPEC.n_heads], k_cache=both[:, 0], v_cache=both[:, 1]))


# ------------------------------------------------------------------------------------------------------------- plan
def items_of(plan: RaggedPlan, kind: int) -> torch.Tensor:
    """Records of one kind, in the order in which they are claimed."""
    start = kind * plan.offset_few
    return plan.items[start : start + int(plan.counts[kind])]


@settings(max_examples=15, deadline=None)
@given(rows=st.lists(st.tuples(st.sampled_from([0, 1, 2, 5, 8, 9, 33, 70]), st.integers(0, 300)), min_size=1,
                     max_size=6),
       window=st.sampled_from([None, 1, 20, 64, 130]), capacity=st.sampled_from([0, 20, 10_000]))
def test_items_cover_each_query_and_cell_once(rows, window, capacity):
    q, kv = [n for n, _ in rows], [n + base for n, base in rows]
    layer = spec(window=window)
    step = make_step(q, kv, torch.zeros(len(q), 32, dtype=torch.int32), range(len(q)), 16, device=DEVICE)
    backend = TritonRagged(DEVICE, torch.float32, INTERPRETER, 4 * capacity * 2 * 65)
    plan = backend.metadata(step, 0, layer)
    assert plan.items.shape[1] == ITEM_WORDS
    seen: dict[int, set[int]] = {}
    partials = []
    for kind, room in enumerate((plan.offset_few, len(plan.items) - plan.offset_few)):
        assert int(plan.counts[kind]) <= room
        for token, tokens, first_pos, low, high, slot, partial, *_ in items_of(plan, kind).tolist():
            row = int(torch.searchsorted(step.cu_q, token, right=True)) - 1
            assert slot == row and first_pos == kv[row] - q[row] + token - int(step.cu_q[row])
            for j in range(tokens):
                cells = set(range(low, min(high, first_pos + j + 1)))
                assert not cells & seen.setdefault(token + j, set())
                seen[token + j] |= cells
                if partial >= 0:
                    partials.append(partial + j)
    assert len(set(partials)) == len(partials) and max(partials, default=-1) < max(capacity, 1)
    for row, n in enumerate(q):
        for j in range(n):
            pos = kv[row] - n + j
            inside = set(range(0 if window is None else max(0, pos - window + 1), pos + 1))
            assert inside <= seen[int(step.cu_q[row]) + j]


@settings(max_examples=5, deadline=None)
@given(rows=st.lists(st.tuples(st.sampled_from([0, 1, 5, 17, 40]), st.integers(0, 150)), min_size=1, max_size=4),
       window=st.sampled_from([None, 1, 20, 64]), sinks=st.booleans(), page_size=st.sampled_from([1, 4, 16]))
def test_any_rows(rows, window, sinks, page_size):
    q, kv = [n for n, _ in rows], [n + base for n, base in rows]
    if sum(q):
        check(make_case(spec(window=window, has_sinks=sinks), q, kv, page_size, device=DEVICE))


# --------------------------------------------------------------------------------------------------------- refusals
def test_refusals_name_both_sides():
    case = make_case(spec(), [1], [5], device=DEVICE)
    backend = TritonRagged(DEVICE, torch.float32, INTERPRETER)
    plan = backend.metadata(case.step, 0, case.layer)
    rest = (case.k_cache, case.v_cache, case.step, 0, plan)
    with pytest.raises(ValueError, match=r"float32; q is torch.float16"):
        backend.attend(case.layer, case.q.half(), *rest)
    with pytest.raises(ValueError, match="window None, this layer has 5"):
        backend.attend(spec(window=5), case.q, *rest)
    with pytest.raises(ValueError, match="contiguous"):
        backend.attend(case.layer, case.q.transpose(1, 2).contiguous().transpose(1, 2), *rest)
    with pytest.raises(ValueError, match="the layer has sinks, but the call brings none"):
        backend.attend(spec(has_sinks=True), case.q, *rest)
    with pytest.raises(TypeError, match="not a list"):
        backend.attend(case.layer, case.q, case.k_cache, case.v_cache, case.step, 0, [])
    with pytest.raises(ValueError, match="65 query heads share a KV head"):
        backend.metadata(case.step, 0, spec(n_heads=65, n_kv_heads=1))
    with pytest.raises(ValueError, match=r"7\.5"):
        kernel_config(128, 2, 75)
    with pytest.raises(ValueError, match="96 cells are no multiple of the key block 64"):
        KernelConfig((FewTokens(NEVER, Tile(16, 64, 2), 96),), Tile(64, 64, 2))
    with pytest.raises(ValueError, match="up to 8 rows"):
        KernelConfig((FewTokens(8, Tile(16, 64, 2), 128),), Tile(64, 64, 2))


@pytest.mark.parametrize("bound", [None, 8])
def test_a_short_step_launches_no_chunks(monkeypatch, bound: int | None):
    """Where no row feeds more than the bound, which one tile of few tokens holds, all layers launch one kernel."""
    case = make_case(spec(window=50), [1, 0, 5, 1, 8, 1], [70, 0, 100, 1, 33, 64], pad_rows=2, pad_tokens=24,
                     device=DEVICE)
    case.step = dataclasses.replace(case.step, most_tokens=bound)
    backend, launch, kinds = TritonRagged(DEVICE, case.q.dtype, INTERPRETER), TritonRagged._launch, []

    def watched(self, kind, *given):
        kinds.append((kind, given[0]))
        launch(self, kind, *given)
    monkeypatch.setattr(TritonRagged, "_launch", watched)
    plan, n = backend.metadata(case.step, 0, case.layer), int(case.step.cu_q[-1])
    for _ in range(2):  # layers of one plan
        out = backend.attend(case.layer, case.q, case.k_cache, case.v_cache, case.step, 0, plan, case.sinks)
        assert relative_error(out[:n], expected(case)) < LIMITS[case.q.dtype] and not out[n:].any()
    assert kinds == [(1, True)] * 2 if bound else [(0, True), (1, False)] * 2


@pytest.mark.skipif(not INTERPRETED, reason="takes this device for one of sm_90")
@pytest.mark.parametrize("fault", ["import", "compile"])
def test_chunks_do_without_the_kernel_for_sm_90_where_triton_does_not_make_it(monkeypatch, caplog, fault: str):
    """Gluon is experimental: another Triton may lack it, or refuse the kernel. Nothing fails, and it is said."""
    def refuse(*given):
        launched.append(given)
        raise RuntimeError("PassManager::run failed")
    launched: list = []
    other = types.ModuleType("gluon_chunks")
    other.serves, other.launch_chunks = lambda *of: True, refuse
    monkeypatch.setattr(triton_ragged, "HOPPER", 80)
    monkeypatch.setitem(sys.modules, "stretto.attn.gluon_chunks", None if fault == "import" else other)
    case = make_case(spec(), [40, 1], [70, 33], device=DEVICE)
    backend = TritonRagged(DEVICE, case.q.dtype, INTERPRETER)
    plan = backend.metadata(case.step, 0, case.layer)
    for _ in range(2):  # layers of one plan
        out = backend.attend(case.layer, case.q, case.k_cache, case.v_cache, case.step, 0, plan, case.sinks)
        assert relative_error(out, expected(case)) < LIMITS[case.q.dtype]
    assert len(launched) == (fault == "compile")
    reason = "ModuleNotFoundError" if fault == "import" else "RuntimeError: PassManager::run failed"
    assert "kernel of all devices" in backend.caps.lack and reason in backend.caps.lack
    assert [record.message for record in caplog.records] == [backend.caps.lack]
