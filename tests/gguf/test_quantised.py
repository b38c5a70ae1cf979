"""Each block format, against a reading of its bytes that is written out here, value by value."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from stretto.model.gguf import GGUFSource
from stretto.model.gguf_blocks import QUANTISED, layout, numbers, packed
from stretto.model.load import load_model
from stretto.ops.packed import Packed
from tests.gguf.files import Writer, model_metadata, permute, tiny_model, write_model
from tests.model.dense import run

Kind = gguf.GGMLQuantizationType
ROWS = 6


def half(raw: bytes) -> float:
    return float(np.frombuffer(raw, np.float16)[0])


def nibbles(raw: bytes) -> list[int]:
    """Low halves of all bytes, then the high ones."""
    return [b & 15 for b in raw] + [b >> 4 for b in raw]


def q4_0(b: bytes) -> list[float]:
    return [half(b[:2]) * (q - 8) for q in nibbles(b[2:])]


def q4_1(b: bytes) -> list[float]:
    return [half(b[:2]) * q + half(b[2:4]) for q in nibbles(b[4:])]


def q8_0(b: bytes) -> list[float]:
    return [half(b[:2]) * (q - 256 if q > 127 else q) for q in b[2:]]


def scale_and_min(raw: bytes, j: int) -> tuple[int, int]:
    """The six-bit scale and minimum of sub-block j, packed into 12 bytes."""
    if j < 4:
        return raw[j] & 63, raw[j + 4] & 63
    return (raw[j + 4] & 15) | (raw[j - 4] >> 6) << 4, (raw[j + 4] >> 4) | (raw[j] >> 6) << 4


def q4_k(b: bytes, high: bytes = bytes(32), at: int = 16) -> list[float]:
    """256 values in 8 sub-blocks of 32; Q5_K has a fifth bit for each, in `high`."""
    d, dmin, out = half(b[:2]), half(b[2:4]), []
    for j in range(8):
        scale, minimum = scale_and_min(b[4:16], j)
        for i in range(32):
            byte = b[at + 32 * (j // 2) + i]
            q = (byte >> 4 if j % 2 else byte & 15) + ((high[i] >> j) & 1) * 16
            out.append(d * scale * q - dmin * minimum)
    return out


def q5_k(b: bytes) -> list[float]:
    return q4_k(b, high=b[16:48], at=48)


def q6_k(b: bytes) -> list[float]:
    """ql[128] low nibbles, qh[64] two high bits, 16 signed scales, d; two halves of 128 values."""
    ql, qh, scales, d, out = b[:128], b[128:192], np.frombuffer(b[192:208], np.int8), half(b[208:]), []
    for h in range(2):
        for quarter in range(4):
            for i in range(32):
                low = ql[64 * h + 32 * (quarter % 2) + i]
                low = low >> 4 if quarter >= 2 else low & 15
                q = low | ((qh[32 * h + i] >> (2 * quarter)) & 3) << 4
                out.append(d * int(scales[8 * h + 2 * quarter + i // 16]) * (q - 32))
    return out


FORMATS = {Kind.Q4_0: q4_0, Kind.Q4_1: q4_1, Kind.Q8_0: q8_0, Kind.Q4_K: q4_k, Kind.Q5_K: q5_k, Kind.Q6_K: q6_k}
HALVES = {Kind.Q4_0: [0], Kind.Q4_1: [0, 2], Kind.Q8_0: [0], Kind.Q4_K: [0, 2], Kind.Q5_K: [0, 2], Kind.Q6_K: [208]}


def random_blocks(kind: Kind, columns: int) -> np.ndarray:
    """[ROWS, bytes] of random bytes with sane scales."""
    rng = np.random.default_rng(5)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (ROWS, columns // block, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scale = rng.normal(0, 0.1, raw.shape[:2]).astype(np.float16)
        raw[:, :, at : at + 2] = scale.view(np.uint8).reshape(*raw.shape[:2], 2)
    return raw.reshape(ROWS, -1)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda k: k.name)
def test_values_of_a_format(tmp_path, kind):
    columns = 512
    blocks = random_blocks(kind, columns)
    writer = Writer(tmp_path / "m.gguf", "llama", model_metadata(tiny_model().config))
    writer.raw("token_embd.weight", blocks, kind)
    source = GGUFSource(writer.close())
    assert source.shape("model.embed_tokens.weight") == (ROWS, columns)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    expected = [[value for i in range(0, len(row), size) for value in FORMATS[kind](row[i : i + size].tobytes())]
                for row in blocks]
    tensor = source.tensor("model.embed_tokens.weight")
    assert tensor.dtype == torch.float32
    torch.testing.assert_close(tensor, torch.tensor(expected), atol=1e-5, rtol=1e-5)
    layout = source.layout("model.embed_tokens.weight")
    assert (layout is None) == (kind is Kind.Q6_K)
    if layout is not None:
        packed = source.packed("model.embed_tokens.weight")
        assert packed.layout == layout and packed.codes.dtype == (torch.int8 if layout.bits == 8 else torch.uint8)
        torch.testing.assert_close(packed.dequantized(torch.float32), tensor, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16")
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0], ids=lambda k: k.name)
def test_in_bfloat16_a_file_stays_packed(tmp_path, kind, monkeypatch):
    """Embedding and tied head included; rows of q and k are put back in order."""
    path = write_model(tmp_path / "m.gguf", tiny_model("Llama", vocab_size=320, hidden_size=64, intermediate_size=128,
                                                       tie_word_embeddings=True), kind)
    ids, cpu = list(range(3, 40)), torch.device("cpu")
    exact = run(load_model(path, dtype=torch.float32, device=cpu), ids)
    model = load_model(path, dtype=torch.bfloat16, device=cpu)
    assert isinstance(model.embedding.weight, Packed)
    assert type(model.head._matrix).__name__ in ("NativeMatrix", "Int4CpuMatrix")
    monkeypatch.setattr("stretto.model.weights.stays_packed", lambda *_: False)
    usual = run(load_model(path, dtype=torch.bfloat16, device=cpu), ids)
    assert (run(model, ids) - exact).norm() < 1.3 * (usual - exact).norm()


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1], ids=lambda k: k.name)
def test_rows_are_put_back_after_dequantising(tmp_path, kind):
    model = tiny_model("Llama")
    source = GGUFSource(write_model(tmp_path / "m.gguf", model, kind))
    heads = {"q_proj": 4, "k_proj": 2}
    for name in source.names():
        rows, part = model.state_dict()[name].numpy(), name.split(".")[-2]
        if rows.ndim == 2:
            rows = gguf.dequantize(gguf.quantize(permute(rows, heads[part]) if part in heads else rows, kind), kind)
        stored = source.tensor(name)
        if part in heads:  # written in the file's order: put the tensor into it as well
            stored = torch.from_numpy(permute(stored.numpy(), heads[part]))
        assert torch.equal(stored, torch.from_numpy(rows)), name


@pytest.mark.parametrize("kind", sorted(QUANTISED, key=lambda kind: kind.name), ids=lambda kind: kind.name)
def test_what_is_packed_is_what_the_library_reads(kind):
    """Of every kind that is read; the scales of most lie at the beginning or the end of a block."""
    rng = np.random.default_rng(5)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (ROWS, 512 // block, size), dtype=np.uint8)
    for at in (0, 2, size - 2, size - 4):
        half = rng.normal(0, 0.1, raw.shape[:2]).astype(np.float16)
        raw[:, :, at : at + 2] = half.view(np.uint8).reshape(*raw.shape[:2], 2)
    if kind is Kind.MXFP4:
        raw[:, :, 0] = rng.integers(110, 140, raw.shape[:2])
    rows = raw.reshape(ROWS, -1)
    expected = torch.from_numpy(gguf.dequantize(rows, kind))
    assert torch.equal(numbers(kind, rows), expected) and expected.isfinite().all()
    if layout(kind) is not None:
        torch.testing.assert_close(packed(kind, rows).dequantized(torch.float32), expected, atol=1e-5, rtol=1e-5)
