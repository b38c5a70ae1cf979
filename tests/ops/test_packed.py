"""Weights that stay packed: the container, its kernels (in Triton's interpreter, or on CUDA), and the matrices of each
device, beside what they stand for."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from stretto.model.packed_matrix import (
    EightBitMatrix,
    Int4CpuMatrix,
    Int8CpuMatrix,
    JoinedMatrix,
    NativeMatrix,
    PackedCudaMatrix,
    is_native,
    matrix_bytes,
    packed_matrix,
    stays_packed,
)
from stretto.ops.gates import Gate
from stretto.ops.grouped import group_by_expert, grouped_linear_reference
from stretto.ops.native import build
from stretto.ops.native import packed as native
from stretto.ops.native.library import library, load
from stretto.ops.packed import MOST_ROWS, Layout, Packed, pack4, unpack4
from stretto.ops.triton_packed import (
    INTERPRETED,
    Blocks,
    blocks_for,
    launch_dequantize,
    launch_few_rows,
    launch_grouped,
    round_rows,
    round_rows_reference,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
LAYOUTS = [Layout("int4", 32), Layout("fp4", 32), Layout("int4", 32, True), Layout("int4", 64, True),
           Layout("int4", 128, True), Layout("int4", 384), Layout("int8", 384), Layout("int8", 32),
           Layout("int8", 128, True), Layout("fp8", 384), Layout("fp8", 128)]
LIMITS = {torch.float16: 1e-3, torch.bfloat16: 1e-2 if INTERPRETED else 6e-3}
ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the last bit; the interpreter cuts bfloat16 off


def name(layout: Layout) -> str:
    return f"{layout.kind}-{layout.group}{'-offsets' * layout.offsets}"


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(layout: Layout, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device = DEVICE) -> Packed:
    weight = Packed.empty(layout, outputs, inputs, torch.float32 if layout.kind == "fp8" else dtype, device)
    codes = torch.randint(0, 256, weight.codes.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    if layout.kind == "fp8":
        codes = randn(outputs, inputs, seed=1).to(torch.float8_e4m3fn).view(torch.uint8)
    weight.codes.view(torch.uint8).copy_(codes)
    weight.scales.copy_(randn(*weight.scales.shape, seed=2).abs() * 0.02 + 0.01)
    if weight.offsets is not None:
        weight.offsets.copy_(randn(*weight.offsets.shape, seed=3) * 0.05)
    return weight


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


# ------------------------------------------------------------------------------------------------------ the container
def test_four_bits_come_back():
    values = torch.randint(0, 16, (5, 192), dtype=torch.uint8)
    assert torch.equal(unpack4(pack4(values)), values) and pack4(values).shape == (5, 96)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_parts_of_a_matrix_stand_for_parts_of_its_numbers(layout):
    weight = made(layout, 32, 384, torch.bfloat16, CPU)
    whole = weight.dequantized(torch.float32)
    by_hand = weight.numbers().double() * weight.scales.double().repeat_interleave(layout.group, 1)
    if weight.offsets is not None:
        by_hand += weight.offsets.double().repeat_interleave(layout.group, 1)
    torch.testing.assert_close(whole.double(), by_hand, rtol=1e-6, atol=1e-6)
    assert torch.equal(weight.rows(4, 8).dequantized(torch.float32), whole[4:12])
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(weight.take(order).dequantized(torch.float32), whole[order])
    if layout.group < 384:
        part = weight.columns(128, 256)
        assert part.inputs == 256 and torch.equal(part.dequantized(torch.float32), whole[:, 128:])


# ---------------------------------------------------------------------------------------------------------- kernels
# Every layout in one type; in the other those whose numbers are made in another way.
BOTH = [(layout, torch.bfloat16) for layout in LAYOUTS] + [(layout, torch.float16) for layout in LAYOUTS[1:3]]
IDS = [f"{name(layout)}-{str(dtype)[6:]}" for layout, dtype in BOTH]


@pytest.mark.parametrize("layout, dtype", [pair for pair in BOTH if pair[0].kind != "fp4"],
                         ids=[i for i in IDS if not i.startswith("fp4")])
def test_few_rows(layout, dtype):
    weight, x = made(layout, 32, 384, dtype), randn(5, 384).to(DEVICE, dtype)
    whole, bias = weight.dequantized(torch.float32), randn(32, seed=4).to(DEVICE, dtype)
    out = randn(5, 32, seed=5).to(DEVICE, dtype)
    want = x.float() @ whole.t() + bias.float() + out.float()
    launch_few_rows(x, weight.by_groups(), out, bias, add=True)
    assert error(out, want) < LIMITS[dtype]


@pytest.mark.parametrize("layout, dtype", BOTH, ids=IDS)
def test_numbers_are_made_anew(layout, dtype):
    weight = made(layout, 32, 384, dtype)
    torch.testing.assert_close(launch_dequantize(weight.by_groups(), dtype), weight.dequantized(dtype), atol=0,
                               rtol=ROUNDING[dtype] if INTERPRETED else 0)


def test_fp4_is_for_experts():
    weight, x = made(Layout("fp4", 32), 32, 384, torch.float16), randn(1, 384).to(DEVICE).half()
    with pytest.raises(ValueError, match="experts only"):
        launch_few_rows(x, weight.by_groups(), torch.empty(1, 32, dtype=torch.float16, device=DEVICE))


@pytest.mark.parametrize("rows", [1, 16, 19])
def test_rows_and_blocks(rows):
    """A row of more columns than inputs is one of several; each comes out alike alone."""
    weight, x = made(Layout("int4", 128, True), 64, 256, torch.float16), randn(rows, 512)[:, :256].to(DEVICE).half()
    arrivals = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    for blocks in (Blocks(16, 64, 1, 2, 1), Blocks(64, 64, 4, 4, 4), Blocks(32, 64, 1, 2, 2, 4),
                   Blocks(16, 64, 2, 2, 1, 2)):
        out = torch.empty(rows, 64, dtype=torch.float16, device=DEVICE)
        launch_few_rows(x, weight.by_groups(), out, blocks=blocks, arrivals=arrivals)
        assert error(out, x.float() @ weight.dequantized(torch.float32).t()) < 1e-3
        assert not arrivals.any(), "the counters are left as they were found"


@pytest.mark.parametrize("outputs, inputs, rows", [(4096, 4096, 16), (28672, 4096, 16), (576, 1536, 32), (48, 192, 64)])
def test_blocks_cover_a_matrix(outputs, inputs, rows):
    weight = Packed.empty(Layout("int4", 32), outputs, inputs, torch.bfloat16, torch.device("meta"))
    blocks = blocks_for(weight, rows, 2, 227 * 1024)
    assert outputs % blocks.outputs == 0 and inputs % (64 * blocks.parts * blocks.split) == 0
    assert blocks.outputs == 16 * blocks.warps


def test_rows_are_rounded_by_themselves():
    x = (randn(6, 320) * torch.tensor([1, 0, 1e4, 1e-4, 3, 100.0])[:, None]).to(DEVICE, torch.bfloat16)
    (codes, scales), (want, want_scales) = round_rows(x), round_rows_reference(x)
    torch.testing.assert_close(scales, want_scales, rtol=1e-6, atol=0)
    assert (codes.float() - want.float()).abs().max() <= 32 and error(codes, want) < 1e-2
    alone, scale = round_rows(x[2:3])
    assert torch.equal(alone.view(torch.uint8), codes[2:3].view(torch.uint8)) and torch.equal(scale, scales[2:3])
    assert error(codes.float() * scales[:, None], x) < 0.04


# ---------------------------------------------------------------------------------------------------------- matrices
INTEGERS = [layout for layout in LAYOUTS if layout.kind[:2] != "fp"]
NATIVE = [*INTEGERS, Layout("int8", 16), Layout("int8", 48, True), Layout("int4", 32, half_scales=True),
          Layout("int4", 32, True, half_scales=True), Layout("int8", 32, half_scales=True)]
needs_native = pytest.mark.skipif(library("packed") is None, reason="no C++ compiler")


def native_name(layout: Layout) -> str:
    return name(layout) + "-halves" * layout.half_scales


def made_native(layout: Layout, outputs: int = 48, inputs: int = 384) -> Packed:
    weight = made(layout, outputs, inputs, torch.float32, CPU)
    if layout.half_scales:
        weight.scales.copy_(weight.scales.half())
        if weight.offsets is not None:
            weight.offsets.copy_(weight.offsets.half().float() + 8 * weight.scales)
    return weight


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", NATIVE, ids=native_name)
def test_native_products_are_float32_sums(layout, dtype):
    """As exact as a float32 product of the numbers that are meant; rows do not know each other, bit for bit."""
    weight, x = made_native(layout), randn(37, 384).to(dtype)
    matrix, numbers = packed_matrix(weight), weight.dequantized(torch.float32)
    assert isinstance(matrix, NativeMatrix) and is_native(layout, 48, 384, dtype)
    assert stays_packed(layout, 48, 384, dtype, "cpu", True)
    sums = matrix.logits(x)
    want = x.double() @ numbers.double().t()
    usual = float((x.float() @ numbers.t() - want).norm() / want.norm())
    assert float((sums - want).norm() / want.norm()) < 3 * usual + 1e-7
    assert torch.equal(matrix(x), sums.to(dtype))
    for start, end in ((0, 1), (3, 20), (36, 37), (5, 21), *((0, n) for n in range(1, 18))):
        assert torch.equal(matrix.logits(x[start:end]), sums[start:end])


@needs_native
@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="no AVX2")
@pytest.mark.parametrize("layout", [LAYOUTS[2], LAYOUTS[7], NATIVE[-2]], ids=native_name)
def test_registers_of_another_width_give_the_same_bits(layout, monkeypatch):
    weight, x = made_native(layout), randn(11, 384)
    want = packed_matrix(weight)(x)
    monkeypatch.setattr(build, "FLAGS", tuple(f.replace("native", "x86-64-v3") for f in build.FLAGS))
    narrow = load(build.HEADERS / "packed.cpp")
    multiply = ctypes.CFUNCTYPE(None, *native.MULTIPLY)(("multiply_rows", narrow))
    monkeypatch.setattr(native, "_multiply", lambda: multiply)
    for start, end in ((0, 11), (2, 3), (3, 9)):
        assert torch.equal(packed_matrix(weight)(x[start:end]), want[start:end])


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_native_products_do_not_depend_on_threads(threads, monkeypatch):
    """Nor does a row on those that are multiplied in another turn."""
    weight, x = made_native(LAYOUTS[2], 16 * 23, 128), randn(300, 128)
    want = torch.cat([packed_matrix(weight)(x[i : i + 100]) for i in range(0, 300, 100)])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert torch.equal(packed_matrix(weight)(x), want)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_native_biases_sums_and_strides(dtype):
    weight, bias = made_native(LAYOUTS[2]), randn(48, seed=4).to(dtype)
    wide = randn(9, 800).to(dtype)
    x = wide[:, 100:484]
    plain, matrix = packed_matrix(weight), packed_matrix(weight, bias)
    out = plain(x.contiguous())
    assert torch.equal(plain(x), out) and torch.equal(plain(x.t().contiguous().t()), out)
    assert torch.equal(matrix(x), (plain.logits(x) + bias.float()).to(dtype))
    assert torch.equal(matrix.logits(x), plain.logits(x) + bias.float())
    beside = randn(9, 100, seed=5).to(dtype)
    around = beside.clone()
    want = beside[:, 20:68] + matrix(x)
    assert torch.equal(matrix.add_to(beside[:, 20:68], x), want)
    assert torch.equal(beside[:, :20], around[:, :20]) and torch.equal(beside[:, 68:], around[:, 68:])
    turned = randn(48, 9, seed=6).to(dtype).t()
    assert torch.equal(matrix.add_to(turned.clone(), x), turned + matrix(x))
    assert plain(x[:0]).shape == (0, 48)


@needs_native
def test_native_numbers_that_are_none():
    x = randn(3, 384)
    x[1, 5] = float("nan")
    out = packed_matrix(made_native(LAYOUTS[0]))(x)
    assert out[1].isnan().all() and not out[0].isnan().any() and not out[2].isnan().any()


@needs_native
def test_half_scales_that_are_none_stay_whole():
    """An m so small beside d that float32 has rounded m + 8 d."""
    layout = Layout("int4", 32, True, half_scales=True)
    weight = made_native(layout)
    weight.offsets[0, 0] += 1e-6
    x = randn(3, 384)
    plain = replace(weight, layout=replace(layout, half_scales=False))
    assert torch.equal(packed_matrix(weight)(x), packed_matrix(plain)(x))


@needs_native
@pytest.mark.parametrize("layout", NATIVE, ids=native_name)
def test_what_a_native_matrix_keeps(layout):
    weight = made_native(layout)
    assert sum(held(packed_matrix(weight)).values()) == matrix_bytes(weight, "cpu")[0]


def test_without_a_compiler_torch_multiplies(monkeypatch):
    monkeypatch.setattr("stretto.ops.native.packed.available", lambda: False)
    assert not stays_packed(Layout("int4", 32), 32, 128, torch.float32, "cpu", True)
    assert not is_native(Layout("int4", 32), 32, 128, torch.bfloat16)


@pytest.mark.parametrize("layout", INTEGERS, ids=name)
def test_on_a_cpu_a_row_does_not_know_the_others(layout, monkeypatch):
    """By torch's kernels."""
    monkeypatch.setattr("stretto.ops.native.packed.available", lambda: False)
    if not stays_packed(layout, 48, 384, torch.bfloat16, "cpu", True):
        pytest.skip(f"{name(layout)} is dequantised on this CPU")
    weight, x = made(layout, 48, 384, torch.bfloat16, CPU), randn(37, 384).bfloat16()
    matrix, bias = packed_matrix(weight, None), randn(48, seed=4).bfloat16()
    assert isinstance(matrix, Int8CpuMatrix if layout == Layout("int8", 384) else Int4CpuMatrix)
    out = matrix(x)
    assert error(out, x.float() @ weight.dequantized(torch.float32).t()) < 6e-3
    for start, end in ((0, 1), (3, 20), (36, 37), (5, 21)):
        assert torch.equal(matrix(x[start:end]), out[start:end])
    assert torch.equal(packed_matrix(weight, bias)(x), out + bias)
    start = randn(37, 48, seed=6).bfloat16()
    assert torch.equal(matrix.add_to(start.clone(), x), start + out) and matrix.logits(x).dtype is torch.float32


@pytest.mark.parametrize("rows", [0, 1, MOST_ROWS + 3])
@pytest.mark.parametrize("layout", [LAYOUTS[2], LAYOUTS[7], LAYOUTS[10]], ids=name)
def test_many_rows_are_those_of_few(layout, rows):
    weight, x = made(layout, 32, 384, torch.float16), randn(rows, 384).to(DEVICE).half()
    bias = randn(32, seed=4).to(DEVICE).half()
    matrix = PackedCudaMatrix(weight, bias)
    want = x.float() @ weight.dequantized(torch.float32).t() + bias.float()
    if not rows:
        assert matrix(x).shape == (0, 32)
        return
    assert error(matrix(x), want) < 1e-3
    start = randn(rows, 32, seed=6).to(DEVICE).half()
    assert error(matrix.add_to(start.clone(), x), want + start.float()) < 1e-3
    if rows <= MOST_ROWS or DEVICE.type == "cuda":
        assert matrix.logits(x).dtype is torch.float32 and error(matrix.logits(x), want) < 1e-3


@pytest.mark.parametrize("rows", [5, pytest.param(MOST_ROWS + 3, marks=pytest.mark.skipif(
    DEVICE.type == "cpu", reason="torch's product of rounded rows is CUDA's"))])
def test_rounded_inputs(rows):
    weight, x = made(Layout("fp8", 384), 32, 384, torch.bfloat16), randn(rows, 384).to(DEVICE, torch.bfloat16)
    codes, scales = round_rows(x)
    want = codes.float() * scales[:, None] @ weight.dequantized(torch.float32).t()
    matrix = EightBitMatrix(weight, None)
    assert error(matrix(x), want) < 6e-3
    exact = x.float() @ weight.dequantized(torch.float32).t()
    assert 1e-2 < error(matrix(x), exact) < 6e-2, "what rounding the inputs costs"


def test_many_logits_of_rounded_inputs_are_the_float32_sums():
    weight, x = made(Layout("fp8", 384), 32, 384, torch.bfloat16), randn(MOST_ROWS + 3, 384).to(DEVICE, torch.bfloat16)
    codes, scales = round_rows(x)
    logits = EightBitMatrix(weight, None).logits(x)
    assert logits.dtype is torch.float32
    assert error(logits, codes.float() * scales[:, None] @ weight.dequantized(torch.float32).t()) < 1e-5


def held(value: object) -> dict[int, int]:
    """Bytes of the tensors that an object refers to, by where they are."""
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()}
    parts = value if isinstance(value, (list, tuple)) else vars(value).values() if hasattr(value, "__dict__") else ()
    return {at: size for part in parts for at, size in held(part).items()}


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.kind != "fp4"], ids=name)
def test_what_a_matrix_keeps_is_what_the_plan_counts(layout, monkeypatch):
    """Nothing of the weight stays beside the form that is multiplied."""
    monkeypatch.setattr("stretto.ops.native.packed.available", lambda: False)
    weight = made(layout, 48, 384, torch.bfloat16)
    assert sum(held(PackedCudaMatrix(weight)).values()) == matrix_bytes(weight, "cuda")[0]
    assert matrix_bytes(weight, "cuda")[1] == 48 * 384 * 2
    if stays_packed(layout, 48, 384, torch.bfloat16, "cpu", True):
        on_cpu = made(layout, 48, 384, torch.bfloat16, CPU)
        assert sum(held(packed_matrix(on_cpu)).values()) == matrix_bytes(on_cpu, "cpu")[0]


def test_matrices_below_each_other():
    first, second = (made(Layout("int4", 32), 16, 384, torch.float16) for _ in range(2))
    x = randn(3, 384).to(DEVICE).half()
    joined = JoinedMatrix([PackedCudaMatrix(first), PackedCudaMatrix(second)])
    assert torch.equal(joined(x), torch.cat([PackedCudaMatrix(first)(x), PackedCudaMatrix(second)(x)], 1))


@pytest.mark.parametrize("layout, sizes, device, fixed, packed", [
    (Layout("int4", 32), (32, 128), "cuda", False, True), (Layout("int4", 32), (32, 128), "cuda", True, False),
    (Layout("int4", 32), (32, 96), "cuda", False, False), (Layout("int4", 32), (40, 128), "cpu", False, False),
    (Layout("fp8", 128), (32, 128), "cpu", False, False), (Layout("fp8", 48), (32, 192), "cuda", False, False),
    (Layout("int8", 96), (32, 96), "cuda", False, False), (Layout("int4", 128), (32, 192), "cuda", False, False),
])
def test_what_stays_packed(layout, sizes, device, fixed, packed, monkeypatch):
    monkeypatch.setattr("stretto.ops.native.packed.available", lambda: False)
    assert stays_packed(layout, *sizes, torch.bfloat16, device, fixed) == packed
    assert not stays_packed(layout, *sizes, torch.float32, device, fixed)


# ------------------------------------------------------------------------------------------------------------ experts
@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("layout", [Layout("fp4", 32), Layout("int4", 32, True), Layout("int4", 128, True),
                                    Layout("int8", 32), Layout("int8", 256), Layout("fp8", 256), Layout("fp8", 128)],
                         ids=name)
def test_experts_that_stay_packed(layout, dtype):
    experts_stay_packed(layout, 256, dtype)


@pytest.mark.parametrize("inputs", [192, 2880])
@pytest.mark.parametrize("layout", [Layout("int8", 192, True), Layout("int8", 64), Layout("fp8", 192)], ids=name)
def test_packed_experts_whose_inputs_no_large_block_divides(layout, inputs):
    """192 = 768 over 4 ranks; a group of 192 stands for a scale a row."""
    layout = replace(layout, group=inputs) if layout.group == 192 else layout
    assert stays_packed(layout, 80, inputs, torch.bfloat16, "cuda", False)
    experts_stay_packed(layout, inputs, torch.bfloat16, rows=32)


def experts_stay_packed(layout, inputs, dtype, rows=80):
    """As the same weights dequantised give; padding, unevenly many tokens, an expert that nobody asks for, biases."""
    n, tokens, k = 5, 9, 2
    weight = made(layout, n * rows, inputs, dtype)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, inputs, generator=generator).to(DEVICE, dtype)
    bias = torch.randn(n, rows, generator=generator).to(DEVICE, dtype)
    experts = torch.rand(tokens, n - 1, generator=generator).topk(k, -1).indices.to(DEVICE)
    groups = group_by_expert(experts, n, torch.tensor(7, device=DEVICE))
    numbers = weight.dequantized(torch.float32).view(n, rows, inputs)
    want = torch.zeros(tokens * k, rows, device=DEVICE)
    grouped_linear_reference(x.float(), numbers, bias.float(), groups.bounds, groups.slots, groups.slots, want, k)
    out = torch.zeros(tokens * k, rows, dtype=dtype, device=DEVICE)
    launch_grouped(x, weight.by_groups(), bias, groups.bounds, groups.slots, groups.slots, out, k)
    assert error(out, want) < (3e-3 if dtype is torch.float16 else 1e-2) and not out[7 * k :].any()
    gate, gated = Gate("clamped", 1.7, 7.0), torch.zeros(tokens * k, rows // 2, dtype=dtype, device=DEVICE)
    launch_grouped(x, weight.by_groups(), bias, groups.bounds, groups.slots, groups.slots, gated, k, gate)
    assert error(gated, torch.where(want.any(1, keepdim=True), gate(want), 0)) < 2e-2
