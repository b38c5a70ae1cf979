"""The chunk kernel for sm_90 on a device: against dense attention and the kernel of all devices, many times over."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from stretto.attn.api import LayerSpec
from stretto.attn.triton_ragged import TritonRagged
from tests.attn.oracle import Case, expected, make_case, relative_error

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of compute capability 9.0")]

DEVICE = torch.device("cuda")
SPEC = LayerSpec(n_heads=32, n_kv_heads=8, head_dim=128, scale=128**-0.5)
OPTIONS = {"plain": {}, "window": {"window": 200}, "softcap": {"softcap": 20.0}, "sinks": {"has_sinks": True},
           "all": {"window": 100, "softcap": 20.0, "has_sinks": True}}
#   tiles are 32 tokens of 4 heads, blocks 128 cells, pages 16: rows around every edge, and one whose tiles are split
Q = [33, 1, 0, 128, 31, 300, 5, 64, 17, 129, 40]
KV = [33, 2000, 0, 128, 1055, 1500, 1033, 4096, 2065, 300, 6000]


def attend(case: Case, hopper: bool = True) -> torch.Tensor:
    backend = TritonRagged(DEVICE, case.q.dtype, hopper=hopper)
    plan = backend.metadata(case.step, 0, case.layer)
    assert backend._on_hopper(case.layer, plan.tiles[0], case.q, case.k_cache) == hopper
    return backend.attend(case.layer, case.q, case.k_cache, case.v_cache, case.step, 0, plan, case.sinks)


@pytest.mark.parametrize("page", [8, 16, 64, 256])
@pytest.mark.parametrize("options", OPTIONS)
def test_chunks_beside_rows_of_few_tokens(options, page):
    case = make_case(dataclasses.replace(SPEC, **OPTIONS[options]), Q, KV, page, torch.bfloat16, pad_rows=3,
                     pad_tokens=30, device="cuda")
    out = attend(case)
    assert relative_error(out[: sum(Q)], expected(case)) < 8e-3
    assert not out[sum(Q) :].any()


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "dtype"), [
    (14, 2, 64, torch.bfloat16), (8, 8, 128, torch.float16), (64, 8, 64, torch.float16), (40, 8, 128, torch.bfloat16)])
def test_groups_of_heads(heads, kv_heads, dim, dtype):
    layer = LayerSpec(n_heads=heads, n_kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5)
    case = make_case(layer, Q, KV, dtype=dtype, device="cuda")
    assert relative_error(attend(case), expected(case)) < 8e-3


@pytest.mark.parametrize("seed", range(6))
def test_any_lengths(seed):
    """Lengths around the edges of pages, blocks and tiles, in some windows; as near as the kernel of all devices."""
    rng = random.Random(seed)
    q = [max(1, rng.choice([32, 64, 128, 256, 512]) + rng.randint(-2, 2)) for _ in range(6)]
    kv = [n + max(0, rng.choice([0, 16, 128, 1024, 3000]) + rng.randint(-2, 2)) for n in q]
    layer = dataclasses.replace(SPEC, window=rng.choice([None, 1, 64, 128, 1000]))
    case = make_case(layer, q, kv, dtype=torch.bfloat16, seed=seed, device="cuda")
    reference = expected(case)
    error = relative_error(attend(case), reference)
    assert error < 8e-3 and error <= 1.2 * relative_error(attend(case, hopper=False), reference)


def test_the_same_bits_every_time():
    """Two launches that share a multiprocessor in some order, partial sums joined by whoever comes last: a race between
    copies and products would show."""
    case = make_case(SPEC, Q, KV, dtype=torch.bfloat16, device="cuda")
    want = attend(case)
    for _ in range(100):
        assert torch.equal(attend(case), want)


def test_a_long_prompt():
    case = make_case(SPEC, [3000, 1, 1], [5000, 700, 1], dtype=torch.bfloat16, device="cuda")
    assert relative_error(attend(case), expected(case)) < 8e-3
