"""What `quantization_config` says, in one frozen record; `dequantize.py` acts on it. No torch in this module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stretto.model.errors import ConfigError


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint stores its weights."""

    method: str  # as the config calls it
    bits: tuple[int, ...]  # of a stored weight; several where groups of layers differ
    block: tuple[int, int] | None = None  # rows and columns that share a scale
    zero_offset: int = 0  # what gptq adds to stored zero points
    kinds: tuple[str, ...] = ("int",)  # of stored numbers: "int", "float"
    eight_bit_inputs: bool = False  # its layers are meant to round their inputs to e4m3, row by row

    def __str__(self) -> str:
        return f"{' and '.join(map(str, self.bits))} bits ({self.method})"


def parse_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """From config.json; None where weights are not quantised. Raises ConfigError for a method or a variant of it that
    cannot be read."""
    given = config.get("quantization_config")
    if not given:
        return None
    method = str(given.get("quant_method") or "unknown") if isinstance(given, Mapping) else str(given)
    if method not in _PARSERS:
        raise ConfigError(f"quantization_config: the weights are quantised by {method!r}, which is not supported; "
                          f"supported: {', '.join(_PARSERS)}. Take such a checkpoint of the model, its unquantised one "
                          "or a GGUF file")
    return _PARSERS[method](method, given)


def _refused(method: str, key: str, value: Any, supported: str) -> ConfigError:
    return ConfigError(f"quantization_config: {method} with {key} {value!r} is not supported; supported: {supported}")


def _fp8(method: str, given: Mapping[str, Any]) -> Quantization:
    block = given.get("weight_block_size")
    return Quantization(method, (8,), None if block is None else (int(block[0]), int(block[1])), kinds=("float",),
                        eight_bit_inputs=block is None)


def _gptq(method: str, given: Mapping[str, Any]) -> Quantization:
    bits, layout = given.get("bits"), given.get("checkpoint_format") or "gptq"
    if bits not in (2, 4, 8):
        raise _refused(method, "bits", bits, "2, 4, 8")
    if layout not in ("gptq", "gptq_v2") or given.get("is_marlin_format"):
        raise _refused(method, "checkpoint_format", layout if layout not in ("gptq", "gptq_v2") else "marlin",
                       "gptq, gptq_v2")
    return Quantization(method, (bits,), zero_offset=int(layout == "gptq"))


def _awq(method: str, given: Mapping[str, Any]) -> Quantization:
    bits, layout = given.get("bits", given.get("w_bit")), str(given.get("version") or "gemm").lower()
    if bits != 4:
        raise _refused(method, "bits", bits, "4")
    if layout != "gemm":
        raise _refused(method, "version", layout, "gemm")
    return Quantization(method, (4,))


def _mxfp4(method: str, _given: Mapping[str, Any]) -> Quantization:
    return Quantization(method, (4,), (1, 32))


_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision", "dense")


def _compressed(method: str, given: Mapping[str, Any]) -> Quantization:
    groups = [g for g in (given.get("config_groups") or {}).values() if g.get("weights")]
    for layout in (given.get("format") or "dense", *(g.get("format") or "dense" for g in groups)):
        if layout not in _FORMATS:
            raise _refused(method, "format", layout, ", ".join(_FORMATS))
    sparsity = (given.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _refused(method, "sparsity_config.format", sparsity, "dense")
    if (given.get("transform_config") or {}).get("config_groups"):
        raise _refused(method, "transform_config", "of its own", "none")
    if not groups:
        raise _refused(method, "config_groups", given.get("config_groups"), "groups that quantise weights")
    weights = [group["weights"] for group in groups]
    for one in weights:
        kinds = {"float": (8,), "int": (2, 4, 8)}
        if one.get("num_bits") not in kinds.get(one.get("type", "int"), ()):
            raise _refused(method, "weights", f"{one.get('type')} of {one.get('num_bits')} bits",
                           "float of 8 bits, int of 2, 4 or 8")
    blocks = {tuple(one["block_structure"]) for one in weights if isinstance(one.get("block_structure"), list)}
    if len(blocks) > 1:
        raise _refused(method, "block_structure", sorted(blocks), "one size for all layers")
    inputs = [group.get("input_activations") or {} for group in groups]
    return Quantization(
        method, tuple(sorted({one["num_bits"] for one in weights})), blocks.pop() if blocks else None,
        kinds=tuple(sorted({one.get("type", "int") for one in weights})),
        eight_bit_inputs=all(one.get("num_bits") == 8 and one.get("type") == "float" for one in inputs))


_PARSERS = {"fp8": _fp8, "fbgemm_fp8": _fp8, "gptq": _gptq, "awq": _awq, "mxfp4": _mxfp4,
            "compressed-tensors": _compressed}
METHODS = tuple(_PARSERS)
