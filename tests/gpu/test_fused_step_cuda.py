"""A whole step of a bfloat16 model with the products of `ops.skinny` equals the same step by torch's products: norms,
gates and residuals inside the products, tiles by the copy engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.engine_gpu import LLAMA, QWEN, SHAPES
from benchmarks.step_gpu import Lab, Rows, decode, make_lab, verify
from stretto.attn import triton_ragged
from stretto.attn.api import LayerSpec
from stretto.attn.triton_short import ShortLaunch, short_launch
from stretto.device.graphs import bucketed
from stretto.model import matrix
from stretto.model.matrix import CudaMatrix
from stretto.ops.blocks import Blocks, OneRow, SomeRows
from stretto.ops.skinny import blocks_for
from stretto.ragged import RaggedStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SMALL = dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=3, num_attention_heads=16,
             num_key_value_heads=4, vocab_size=32768, tie_word_embeddings=False)
CASES = [[decode(1, 300)], [decode(7, 300)], [decode(5, 40), verify(20, 131, 3)], [decode(64, 129)], [decode(130, 33)],
         [verify(24, 70, 7)], [decode(9, 100), Rows(1, 100, 100)]]


@pytest.fixture(scope="module", params=[LLAMA, QWEN], ids=["llama", "qwen3"])
def lab(request) -> Lab:
    torch.manual_seed(0)
    SHAPES["small"] = request.param | SMALL
    try:
        return make_lab("small", 200, 200 * 320, 512)
    finally:
        del SHAPES["small"]


def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product by torch, with norms and gates of their own."""
    monkeypatch.setattr(CudaMatrix, "_blocks", lambda *_: None)


@torch.inference_mode()
def result(lab: Lab, rows: list[Rows]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of the step, and the cells that its tokens were written to in each layer."""
    torch.manual_seed(1)
    plan, shape = lab.prepare(rows)
    bucket = bucketed(shape)
    padded = torch.zeros(bucket.rows, 3, dtype=torch.int32, device="cuda")
    padded[: len(plan)] = plan
    forward = lab.runner.first(padded, bucket)
    out, tokens = int(forward.step.cu_out[-1]), int(forward.step.cu_q[-1])
    cells = forward.step.cells[0][:tokens]
    kept = [cache.flatten(0, 1)[cells].float() for cache in (*lab.runner.kv.k, *lab.runner.kv.v)]
    return forward.logits[:out].float(), kept


def close(got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    error = ((got - want).norm() / want.norm()).item()
    assert error < limit, error


@pytest.mark.parametrize("rows", CASES, ids=str)
def test_fused_equals_plain(lab: Lab, rows: list[Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    got, cells = result(lab, rows)
    again, _ = result(lab, rows)
    assert torch.equal(got, again)
    with monkeypatch.context() as context:
        plain(context)
        want, wanted = result(lab, rows)
    close(got, want, 2e-2)
    assert F.cosine_similarity(got, want, dim=-1).min() > 0.999
    for mine, its in zip(cells, wanted, strict=True):
        close(mine, its, 2e-2)


def test_all_kernels_are_used(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above compares what it says."""
    seen: set[str] = set()

    def noted(*sizes: Any, **options: Any) -> Blocks | None:
        found = blocks_for(*sizes, **options)
        seen.add(type(found).__name__)
        return found
    monkeypatch.setattr(matrix, "blocks_for", noted)
    for rows, kind in (([decode(1, 100)], OneRow), ([decode(8, 100)], Blocks), ([decode(100, 33)], SomeRows)):
        seen.clear()
        result(lab, rows)
        assert kind.__name__ in seen


@pytest.mark.parametrize("rows", [[decode(1, 300)], [decode(1, 1)], [decode(4, 300)], [decode(1, 500), decode(2, 64)],
                                  [verify(1, 131, 3)]], ids=str)
def test_attention_in_one_launch_equals_one_after_another(lab: Lab, rows: list[Rows],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []

    def noted(layer: LayerSpec, step: RaggedStep) -> ShortLaunch | None:
        found = short_launch(layer, step)
        used.append(found is not None)
        return found
    monkeypatch.setattr(triton_ragged, "short_launch", noted)
    got, cells = result(lab, rows)
    assert used and all(used)
    monkeypatch.setattr(triton_ragged, "short_launch", lambda *_: None)
    want, wanted = result(lab, rows)
    close(got, want, 2e-2)
    for mine, its in zip(cells, wanted, strict=True):
        close(mine, its, 2e-2)
