"""The compiled kernels with the tiles of the table: precision, CUDA graphs, no synchronisation with the host."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from stretto.attn.api import LayerSpec
from stretto.attn.triton_ragged import TritonRagged
from stretto.ragged import RaggedStep
from tests.attn.oracle import Case, expected, make_case, make_step, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")
SPEC = LayerSpec(n_heads=32, n_kv_heads=8, head_dim=128, scale=128**-0.5)
Q = [1, 0, 5, 300, 1, 9, 1, 40, 1, 1]
KV = [2070, 0, 1033, 1500, 1, 2000, 64, 40, 1024, 1025]
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def attend(backend: TritonRagged, case: Case) -> torch.Tensor:
    plan = backend.metadata(case.step, 0, case.layer)
    return backend.attend(case.layer, case.q, case.k_cache, case.v_cache, case.step, 0, plan, case.sinks)


OPTIONS = {"plain": {}, "window": {"window": 700}, "softcap": {"softcap": 20.0},
           "all": {"window": 700, "softcap": 20.0, "has_sinks": True}}
CASES = [(torch.bfloat16, 128, name) for name in OPTIONS]
CASES += [(torch.bfloat16, d, "all") for d in (64, 80, 96, 256)]
CASES += [(torch.float16, 128, "all"), (torch.float32, 64, "all"), (torch.float32, 128, "plain"),
          (torch.float32, 256, "all"), (torch.bfloat16, 8, "plain")]


@pytest.mark.parametrize(("dtype", "head_dim", "options"), CASES)
def test_row_shapes_in_one_launch(dtype, head_dim, options):
    layer = dataclasses.replace(SPEC, head_dim=head_dim, scale=head_dim**-0.5, **OPTIONS[options])
    case = make_case(layer, Q, KV, dtype=dtype, pad_rows=3, pad_tokens=30, device="cuda")
    out = attend(TritonRagged(DEVICE, dtype), case)
    assert relative_error(out[: sum(Q)], expected(case)) < LIMITS[dtype]
    assert not out[sum(Q) :].any()


@pytest.mark.parametrize(("heads", "kv_heads"), [(14, 2), (8, 8), (64, 8), (71, 1)])
def test_head_groups(heads, kv_heads):
    layer = dataclasses.replace(SPEC, n_heads=heads, n_kv_heads=kv_heads, head_dim=64, scale=0.125)
    case = make_case(layer, Q, KV, dtype=torch.bfloat16, device="cuda")
    assert relative_error(attend(TritonRagged(DEVICE, torch.bfloat16), case), expected(case)) < 8e-3


def test_a_token_does_not_depend_on_the_batch():
    """Bit for bit in one bucket: a decoded token alone, beside others, and as the last token of a verify window."""
    case = make_case(SPEC, Q, KV, dtype=torch.bfloat16, pad_rows=3, device="cuda")
    backend = TritonRagged(DEVICE, torch.bfloat16)
    out = attend(backend, case)
    for row in (0, 2, 5, 8, 9):
        last = int(case.step.cu_q[row + 1]) - 1
        step = make_step([1], [KV[row]], case.step.page_tables[0].cpu(), [int(case.step.slots[row])], 16, pad_rows=12,
                         device="cuda")
        single = dataclasses.replace(case, step=step, q=case.q[last : last + 1])
        assert torch.equal(attend(backend, single)[0], out[last])


def test_layers_of_a_short_step_in_a_graph():
    """Launches that start early and read the plan before they wait: layer after layer, replay after replay."""
    case = make_case(SPEC, [1, 5, 1, 8, 0, 1], [2070, 1033, 1, 8, 0, 1500], dtype=torch.bfloat16, pad_rows=2,
                     pad_tokens=8, device="cuda")
    case.step = dataclasses.replace(case.step, most_tokens=8)
    backend = TritonRagged(DEVICE, torch.bfloat16)

    def layers() -> torch.Tensor:
        q, plan = case.q.nan_to_num(), backend.metadata(case.step, 0, case.layer)
        for _ in range(8):  # each reads what the one before wrote
            q = backend.attend(case.layer, q, case.k_cache, case.v_cache, case.step, 0, plan, case.sinks)
        return q
    want = layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layers()
    for _ in range(30):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, want)


def clone(case: Case) -> Case:
    step = {f.name: getattr(case.step, f.name) for f in dataclasses.fields(RaggedStep)}
    step = {k: v.clone() if isinstance(v, torch.Tensor) else tuple(t.clone() for t in v) if isinstance(v, tuple) else v
            for k, v in step.items()}
    return dataclasses.replace(case, step=RaggedStep(**step), q=case.q.clone(), k_cache=case.k_cache.clone(),
                               v_cache=case.v_cache.clone())


def copy_step(target: RaggedStep, source: RaggedStep) -> None:
    for f in dataclasses.fields(RaggedStep):
        new, old = getattr(source, f.name), getattr(target, f.name)
        if isinstance(new, torch.Tensor):
            old.copy_(new)
        elif isinstance(new, tuple):
            for o, n in zip(old, new, strict=True):
                o.copy_(n)


def test_one_graph_serves_every_split_of_its_bucket():
    """Rows of other lengths and kinds in the buffers of a captured step: the replay equals an eager run bit for bit."""
    steps = [(Q, KV), ([1] * 10, [3000, 1, 2, 999, 1024, 70, 700, 5, 1023, 2048]),
             ([359, *[0] * 9], [3000, *[0] * 9]), ([0] * 10, [0] * 10), ([8] * 10, [3000, 8, 9, *[1500] * 7])]
    layer = dataclasses.replace(SPEC, window=1300)
    cases = [make_case(layer, q, kv, dtype=torch.bfloat16, pad_tokens=359 - sum(q), seed=i, device="cuda")
             for i, (q, kv) in enumerate(steps)]
    pages = max(c.k_cache.shape[0] for c in cases)
    width = max(c.step.page_tables[0].shape[1] for c in cases)
    for c in cases:
        tables = torch.nn.functional.pad(c.step.page_tables[0], (0, width - c.step.page_tables[0].shape[1]))
        c.step = dataclasses.replace(c.step, page_tables=(tables,))
        c.k_cache, c.v_cache = (torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 0, 0, pages - t.shape[0]))
                                for t in (c.k_cache, c.v_cache))
    backend = TritonRagged(DEVICE, torch.bfloat16)
    static = clone(cases[0])
    attend(backend, static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(backend, static)
    for c in [*cases, cases[0]]:
        want = attend(backend, c)
        copy_step(static.step, c.step)
        for name in ("q", "k_cache", "v_cache"):
            getattr(static, name).copy_(getattr(c, name))
        graph.replay()
        assert torch.equal(out, want)
        n = int(c.step.cu_q[-1])
        if n:
            assert relative_error(out[:n], expected(c)) < 8e-3


def test_no_synchronisation_with_the_host():
    case = make_case(SPEC, Q, KV, dtype=torch.bfloat16, device="cuda")
    backend = TritonRagged(DEVICE, torch.bfloat16)
    attend(backend, case)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(backend, case)
    finally:
        torch.cuda.set_sync_debug_mode("default")
