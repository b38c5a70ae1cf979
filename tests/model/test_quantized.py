"""Quantised checkpoints equal transformers' model with the numbers that are meant; what cannot be read is refused."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from stretto.facts import model_facts
from stretto.model.config import ConfigError
from stretto.model.dequantize import DequantizedSource
from stretto.model.experts import ExpertWeights, PackedExperts
from stretto.model.load import load_model
from stretto.model.matrix import PlainMatrix
from stretto.model.quantization import parse_quantization
from stretto.model.shard import Shard, rows_of, whole
from stretto.model.source import WeightError
from stretto.model.weights import Weights
from stretto.ops.native.library import library
from stretto.ops.packed import Packed
from tests.model import quantized
from tests.model.dense import greedy, run
from tests.model.tiny import ids_of, oracle_greedy, oracle_logits, save

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def compressed(layout: str, **weights) -> dict:
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": {"weights": weights}}}


def int_of(bits: int) -> dict:
    return compressed("pack-quantized", num_bits=bits, type="int", strategy="group", group_size=quantized.GROUP)


def blocks(o: int, i: int) -> tuple[int, int]:
    return -(-o // 48), -(-i // 48)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": quantized.GROUP, "checkpoint_format": "gptq"}
FLOAT8 = {"num_bits": 8, "type": "float"}
UP = "model.layers.1.mlp.up_proj"
LAYOUTS = {
    "gptq-4": (quantized.gptq(4), GPTQ, "4 bits"),
    "gptq-2": (quantized.gptq(2), GPTQ | {"bits": 2}, "2 bits"),
    "gptq-8-shuffled": (quantized.gptq(8, shuffled=True), GPTQ | {"bits": 8, "desc_act": True}, "8 bits"),
    "gptq-v2": (quantized.gptq(4, version=2), GPTQ | {"checkpoint_format": "gptq_v2"}, "4 bits"),
    "awq": (quantized.awq, {"quant_method": "awq", "bits": 4, "group_size": quantized.GROUP}, "4 bits"),
    "packed-4": (quantized.packed(4), int_of(4), "4 bits"),
    "packed-8": (quantized.packed(8), int_of(8), "8 bits"),
    "packed-4-zero-points": (quantized.packed(4, zero_points=True), int_of(4), "4 bits"),
    "packed-4-shuffled": (quantized.packed(4, shuffled=True), int_of(4), "4 bits"),
    "packed-4-per-channel": (quantized.packed(4, per_channel=True), int_of(4), "4 bits"),
    "int8": (quantized.int8, compressed("int-quantized", num_bits=8, type="int", strategy="channel"), "8 bits"),
    "fp8-per-tensor": (quantized.fp8("weight_scale", lambda o, i: (), extra=True), {"quant_method": "fp8"}, "8 bits"),
    "fp8-per-channel": (quantized.fp8("weight_scale", lambda o, i: (o, 1)),
                        compressed("float-quantized", strategy="channel", **FLOAT8), "8 bits"),
    "fp8-per-row": (quantized.fp8("weight_scale", lambda o, i: (o,)), {"quant_method": "fbgemm_fp8"}, "8 bits"),
}


def save_quantized(folder, layout: str):
    pack, config, _ = LAYOUTS[layout]
    oracle = save(folder, "Llama", **SHAPE)
    quantized.rewrite(folder, pack, config, oracle)
    return oracle


def load(folder):
    return load_model(folder, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_transformers_with_the_numbers_that_are_meant(layout, tmp_path, caplog, monkeypatch):
    """Dequantised at load; for what native kernels keep packed, see below."""
    without_native(monkeypatch)
    oracle = save_quantized(tmp_path, layout)
    with caplog.at_level(logging.WARNING):
        model, ids = load(tmp_path), ids_of(15)
    torch.testing.assert_close(run(model, ids), oracle_logits(oracle, ids), atol=1e-4, rtol=1e-4)
    assert greedy(model, ids, 8) == oracle_greedy(oracle, ids, 8)
    assert f"stored in {LAYOUTS[layout][2]}" in caplog.text and "GB of float32 instead of" in caplog.text
    assert model_facts(tmp_path).parameters == sum(p.numel() for p in oracle.parameters())


def test_blocks_that_do_not_divide_a_matrix(tmp_path):
    """The last block of a row or column is narrower."""
    oracle = save(tmp_path, "Qwen3", **SHAPE)
    pack = quantized.fp8("weight_scale_inv", blocks)

    def by_blocks(base, weight, generator):
        stored, _ = pack(base, weight, generator)
        scale = stored[f"{base}.weight_scale_inv"]
        rows, columns = (torch.arange(n) // 48 for n in weight.shape)
        return stored, stored[f"{base}.weight"].float() * scale[rows][:, columns]
    quantized.rewrite(tmp_path, by_blocks, {"quant_method": "fp8", "weight_block_size": [48, 48]}, oracle)
    model, ids = load(tmp_path), ids_of(15)
    torch.testing.assert_close(run(model, ids), oracle_logits(oracle, ids), atol=1e-4, rtol=1e-4)


def save_mxfp4(folder):
    """A gpt-oss whose experts are stored so; transformers' model with the numbers that are meant."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    oracle = save(folder, "GptOss", hidden_size=64, intermediate_size=128, head_dim=16, num_local_experts=4,
                  num_experts_per_tok=2)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, rows = tensors.pop(name).shape
        stored = torch.randint(256, (experts, rows, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, (experts, rows, inputs // 32), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": stored, f"{name}_scales": scales}
        oracle.get_parameter(name).copy_(convert_moe_packed_tensors(stored, scales, dtype=torch.float32))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return oracle


@pytest.mark.parametrize("packed", [False, True], ids=["as numbers", "packed"])
def test_mxfp4_experts_equal_transformers(packed, tmp_path, monkeypatch):
    """Packed, as on GPUs, but with numbers instead of their kernel: what it would be given is exact."""
    oracle = save_mxfp4(tmp_path)
    if packed:
        monkeypatch.setattr("stretto.model.weights.stays_packed", lambda layout, *_: layout.kind == "fp4")
        monkeypatch.setattr("stretto.model.experts.packed_matrix", lambda weight, bias: PlainMatrix(
            weight.dequantized(torch.float32), bias))
    model, ids = load(tmp_path), ids_of(15)
    kind = PackedExperts if packed else ExpertWeights
    assert all(isinstance(part, kind) for layer in model.decoder for part in (layer.mlp._gate_up, layer.mlp._down))
    torch.testing.assert_close(run(model, ids), oracle_logits(oracle, ids), atol=2e-4, rtol=1e-4)


def test_on_a_gpu_mxfp4_experts_take_few_bits(tmp_path):
    save_mxfp4(tmp_path)
    on = dict(model_facts(tmp_path).packed_bytes)
    numbers = 3 * 4 * 3 * 64 * 128  # layers, experts, matrices
    assert on["cpu"] - on["cuda"] == numbers * 2 - numbers * (0.5 + 4 / 32)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16")
def test_experts_stay_packed_on_a_cpu(tmp_path):
    oracle = save(tmp_path, "Qwen3Moe", **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    generator, pack = torch.Generator().manual_seed(3), quantized.packed(4)
    tensors, meant = load_file(tmp_path / "model.safetensors"), {}
    for name in [n for n in tensors if ".experts." in n]:
        stored, meant[name] = pack(name.removesuffix(".weight"), tensors.pop(name), generator)
        tensors |= stored
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors")
    for layer, block in enumerate(oracle.model.layers):
        for e in range(4):
            gate, up, down = (meant[f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight"]
                              for part in ("gate", "up", "down"))
            block.mlp.experts.gate_up_proj[e], block.mlp.experts.down_proj[e] = torch.cat((gate, up)), down
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": int_of(4)}))
    model, ids = load_model(tmp_path, dtype=torch.bfloat16, device=CPU), ids_of(30)
    assert all(isinstance(part, PackedExperts) for layer in model.decoder for part in (layer.mlp._gate_up,
                                                                                       layer.mlp._down))
    want = oracle_logits(oracle, ids)
    off = (run(model, ids) - want).norm(dim=-1) / want.norm(dim=-1)
    assert off.median() < 0.03, "single tokens may choose another expert where two are nearly as good"


def test_experts_that_are_stored_one_by_one(tmp_path):
    oracle = save(tmp_path, "Qwen3Moe", **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    pack = quantized.gptq(4)
    tensors, generator = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(3)
    name = "model.layers.1.mlp.experts.2.gate_proj"
    stored, meant = pack(name, tensors.pop(f"{name}.weight"), generator)
    save_file({k: v.contiguous() for k, v in (tensors | stored).items()}, tmp_path / "model.safetensors")
    oracle.model.layers[1].mlp.experts.gate_up_proj[2, :32] = meant
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": GPTQ}))
    model, ids = load(tmp_path), ids_of(15)
    torch.testing.assert_close(run(model, ids), oracle_logits(oracle, ids), atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------ kept packed
# What the matrices of the projections become on a CPU, and in how many bytes a number of them is kept: by our kernels,
# and in bfloat16 by torch's where there is no compiler.
NATIVE = {"gptq-4": 0.5 + 8 / 32, "gptq-v2": 0.5 + 8 / 32, "awq": 0.5 + 8 / 32, "packed-4": 0.5 + 4 / 32,
          "packed-4-zero-points": 0.5 + 8 / 32, "packed-8": 1 + 4 / 32, "int8": None, "packed-4-per-channel": None}
PACKED = {"gptq-4": ("Int4CpuMatrix", 0.5 + 4 / 32), "gptq-v2": ("Int4CpuMatrix", 0.5 + 4 / 32),
          "awq": ("Int4CpuMatrix", 0.5 + 4 / 32), "packed-4": ("Int4CpuMatrix", 0.5 + 4 / 32),
          "packed-4-zero-points": ("Int4CpuMatrix", 0.5 + 4 / 32), "packed-8": ("Int4CpuMatrix", 1 + 8 / 32),
          "int8": ("Int8CpuMatrix", None), "packed-4-per-channel": ("Int4CpuMatrix", None)}
if library("packed") is None:
    NATIVE = {}


def without_native(monkeypatch) -> None:
    """As where there is no compiler."""
    monkeypatch.setattr("stretto.ops.native.packed.available", lambda: False)


def matrices(model) -> set[str]:
    """The kinds of matrices in the layers."""
    parts = [part for layer in model.decoder for part in (layer.attn.qkv, layer.attn.out, layer.mlp.gate_up,
                                                          layer.mlp.down)]
    return {type(part._matrix).__name__ for part in parts}


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_bfloat16_weights_stay_packed(layout, tmp_path, monkeypatch, caplog):
    """By torch's kernels. No further from the numbers that are meant than the same model dequantised to bfloat16 is;
    nearly all of what differs is rounding of activations."""
    without_native(monkeypatch)
    oracle, ids = save_quantized(tmp_path, layout), ids_of(40)
    want = oracle_logits(oracle, ids)
    with caplog.at_level(logging.WARNING):
        model = load_model(tmp_path, dtype=torch.bfloat16, device=CPU)
    expected, bytes_each = PACKED.get(layout, ("PackedMatrix", None))
    assert matrices(model) == {expected} and ("were dequantised" in caplog.text) == (layout not in PACKED)
    got = run(model, ids)
    monkeypatch.setattr("stretto.model.weights.stays_packed", lambda *_: False)
    numbers = run(load_model(tmp_path, dtype=torch.bfloat16, device=CPU), ids)
    off, usual = ((logits - want).norm() / want.norm() for logits in (got, numbers))
    assert off < 1.3 * usual and off < 0.04
    if bytes_each is not None:
        monkeypatch.undo()
        without_native(monkeypatch)
        projections = sum(p.numel() for name, p in oracle.named_parameters() if "_proj" in name)
        rest = sum(p.numel() for p in oracle.parameters()) - projections
        facts = model_facts(tmp_path)
        assert dict(facts.packed_bytes)["cpu"] == round(projections * bytes_each) + 2 * rest
        by_groups = (0.5 if "8" not in layout else 1) + 4 / 32
        arrivals = sum(p.shape[0] // 4 for name, p in oracle.named_parameters() if "_proj" in name and p.ndim > 1)
        assert dict(facts.packed_bytes)["cuda"] == round(projections * by_groups) + arrivals + 2 * rest
        assert facts.exact_packed_bytes is None
        assert facts.unpacked_bytes == 2 * 2 * SHAPE["hidden_size"] * SHAPE["intermediate_size"], "gate and up"


@pytest.mark.parametrize("layout", NATIVE)
def test_native_kernels_keep_weights_packed_in_every_type(layout, tmp_path, caplog):
    """In float32 the sums are those of the numbers that are meant; bfloat16 rounds activations alone."""
    oracle, ids = save_quantized(tmp_path, layout), ids_of(40)
    want = oracle_logits(oracle, ids)
    with caplog.at_level(logging.WARNING):
        exact, rounded = (load_model(tmp_path, dtype=dtype, device=CPU) for dtype in (torch.float32, torch.bfloat16))
    assert matrices(exact) == matrices(rounded) == {"NativeMatrix"} and "were dequantised" not in caplog.text
    torch.testing.assert_close(run(exact, ids), want, atol=1e-4, rtol=1e-4)
    assert greedy(exact, ids, 8) == oracle_greedy(oracle, ids, 8)
    assert (run(rounded, ids) - want).norm() / want.norm() < 0.04
    if (bytes_each := NATIVE[layout]) is not None:
        projections = sum(p.numel() for name, p in oracle.named_parameters() if "_proj" in name)
        rest = sum(p.numel() for p in oracle.parameters()) - projections
        facts = model_facts(tmp_path)
        assert facts.exact_packed_bytes == round(projections * bytes_each) + 4 * rest
        assert dict(facts.packed_bytes)["cpu"] == round(projections * bytes_each) + 2 * rest


class Tensors:
    """A source over a dict."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors = tensors

    def names(self):
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


@pytest.mark.parametrize("layout", ["gptq-4", "packed-8", "int8"])
def test_a_rank_takes_its_rows_and_columns_of_packed_weights(layout, monkeypatch):
    pack, config, _ = LAYOUTS[layout]
    stored, meant = pack("x", torch.randn(64, 256), torch.Generator().manual_seed(1))
    source = DequantizedSource(Tensors(stored), parse_quantization({"quantization_config": config}))
    monkeypatch.setattr("stretto.model.weights.stays_packed", lambda *_: True)
    for cut_columns in (False, True):
        weights = Weights(source, torch.bfloat16, CPU, shard=Shard(1, 2))
        piece = whole("x.weight", 64) if cut_columns else rows_of(weights.shard, "x.weight", 64)
        (part,) = weights.matrices([piece], 256, cut_columns)
        weights.fill()
        assert isinstance(part, Packed)
        want = meant[:, 128:] if cut_columns else meant[32:]
        torch.testing.assert_close(part.dequantized(torch.float32), want, atol=2e-3, rtol=1e-2)


def test_rows_of_heads_that_are_put_in_another_order(tmp_path):
    """GLM rotates neighbours, so the rows of its projections are reordered, packed or not."""
    oracle, ids = save(tmp_path, "Glm4", **SHAPE, pad_token_id=0), ids_of(20)
    pack, config, _ = LAYOUTS["gptq-4"]
    quantized.rewrite(tmp_path, pack, config, oracle)
    model = load_model(tmp_path, dtype=torch.bfloat16, device=CPU)
    assert matrices(model) & {"Int4CpuMatrix", "NativeMatrix"}
    want = oracle_logits(oracle, ids)
    assert (run(model, ids) - want).norm() / want.norm() < 0.05


def test_a_trivial_order_of_columns_is_none(tmp_path):
    """Files of gptq hold g_idx even where no column was moved."""
    oracle = save_quantized(tmp_path, "gptq-4")
    edit(tmp_path, lambda t: t.update({name.replace("qweight", "g_idx"): torch.arange(words.shape[0] * 8) // 32
                                       for name, words in list(t.items()) if name.endswith(".qweight")}))
    model, ids = load_model(tmp_path, dtype=torch.bfloat16, device=CPU), ids_of(9)
    assert matrices(model) == {"NativeMatrix" if NATIVE else "Int4CpuMatrix"}
    want = oracle_logits(oracle, ids)
    assert (run(model, ids) - want).norm() / want.norm() < 0.04


# --------------------------------------------------------------------------------------------------------- refused
@pytest.mark.parametrize("config, says", [
    ({"quant_method": "bitsandbytes"}, r"'bitsandbytes', which is not supported; supported: fp8, .*gptq, awq"),
    ({}, None),
    (GPTQ | {"bits": 3}, "gptq with bits 3"),
    (GPTQ | {"checkpoint_format": "marlin"}, "gptq with checkpoint_format 'marlin'"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq with version 'gemv'"),
    (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "format 'nvfp4-pack-quantized'"),
    (compressed("pack-quantized", num_bits=3, type="int"), "weights 'int of 3 bits'"),
    (compressed("pack-quantized", num_bits=4, type="int") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
     "sparsity_config.format 'sparse-24-bitmask'"),
    ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
])
def test_methods_are_refused_by_name(config, says):
    if says is None:
        assert parse_quantization({"quantization_config": config}) is None
    else:
        with pytest.raises(ConfigError, match=says):
            parse_quantization({"quantization_config": config})


def edit(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("layout, change, says", [
    ("gptq-4", lambda t: t.pop(f"{UP}.qzeros"), r"up_proj.qweight is quantised, but .*qzeros is missing"),
    ("packed-4", lambda t: t.pop(f"{UP}.weight_scale"), r"weight_packed is quantised, but .*_scale is missing"),
    ("gptq-4", lambda t: t.update({f"{UP}.scales": torch.ones(3, 128)}), "64 columns do not make 3 groups"),
    ("fp8-per-row", lambda t: t.update({f"{UP}.weight_scale": torch.ones(7)}),
     r"weight_scale is \[7\], which fits no weight of \[128, 64\]"),
    ("int8", lambda t: t.pop(f"{UP}.weight_scale"), r"up_proj.weight holds torch.int8"),
    ("fp8-per-row", lambda t: t.pop(f"{UP}.weight_scale"), r"up_proj.weight holds torch.float8_e4m3fn"),
])
def test_damaged_checkpoints_are_named(layout, change, says, tmp_path):
    save_quantized(tmp_path, layout)
    edit(tmp_path, change)
    with pytest.raises(WeightError, match=says):
        load(tmp_path)


def test_a_config_that_quantises_nothing_is_refused(tmp_path):
    save(tmp_path, "Llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": GPTQ}))
    with pytest.raises(WeightError, match=r"weights are stored in 4 bits \(gptq\), but no tensor is"):
        load(tmp_path)
