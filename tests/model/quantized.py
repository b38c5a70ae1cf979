"""Writes quantised checkpoints of a tiny model, each layout by its own description: what a tool would store for given
integers, scales and zero points. The numbers that they stand for are computed here in the plainest way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Stored = dict[str, torch.Tensor]
Pack = Callable[[str, torch.Tensor, torch.Generator], tuple[Stored, torch.Tensor]]  # (stored, what that stands for)

GROUP = 32


def rewrite(folder: Path, pack: Pack, quantization: dict, oracle: torch.nn.Module) -> None:
    """Quantises every projection of the checkpoint in `folder`, and gives `oracle` the numbers that are meant."""
    generator = torch.Generator().manual_seed(7)
    tensors: Stored = {}
    meant = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            stored, meant[name] = pack(name.removesuffix(".weight"), weight, generator)
            tensors |= stored
        else:
            tensors[name] = weight
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    missing, extra = oracle.load_state_dict(meant, strict=False)
    assert meant and not extra and not any(name.endswith("_proj.weight") for name in missing)


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[R, C] of unsigned values -> int32 [R, C * bits / 32], the first in the lowest bits."""
    n = 32 // bits
    total = torch.zeros(values.shape[0], values.shape[1] // n, dtype=torch.int64)
    for i in range(n):
        total |= values[:, i::n].long() << (bits * i)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def drawn(weight: torch.Tensor, bits: int, generator: torch.Generator, groups: int) -> tuple[torch.Tensor, ...]:
    """Unsigned values [O, I], zero points [O, groups] and scales [O, groups], at random."""
    o, i = weight.shape
    values = torch.randint(1 << bits, (o, i), generator=generator)
    zeros = torch.randint(1, 1 << bits, (o, groups), generator=generator)
    return values, zeros, (torch.rand(o, groups, generator=generator) + 0.5) * 0.4 / (1 << bits)


def gptq(bits: int, shuffled: bool = False, version: int = 1) -> Pack:
    def pack(base, weight, generator):
        groups = weight.shape[1] // GROUP
        values, zeros, scales = drawn(weight, bits, generator, groups)
        index = torch.arange(weight.shape[1]) // GROUP
        if shuffled:
            index = index[torch.randperm(len(index), generator=generator)]
        stored = {f"{base}.qweight": words(values, bits).t(), f"{base}.scales": scales.t().half(),
                  f"{base}.qzeros": words((zeros - int(version == 1)).t(), bits)}
        if shuffled:
            stored[f"{base}.g_idx"] = index.to(torch.int32)
        return stored, (values - zeros[:, index]) * scales.half().float()[:, index]

    return pack


def awq(base, weight, generator):
    """Column 8 c + AWQ[j] of a row stands in bits 4 j .. 4 j + 3 of word c."""
    values, zeros, scales = drawn(weight, 4, generator, weight.shape[1] // GROUP)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def interleaved(columns: torch.Tensor) -> torch.Tensor:
        return words(columns.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4)
    index = torch.arange(weight.shape[1]) // GROUP
    stored = {f"{base}.qweight": interleaved(values.t()), f"{base}.qzeros": interleaved(zeros.t()),
              f"{base}.scales": scales.t().half()}
    return stored, (values - zeros[:, index]) * scales.half().float()[:, index]


def packed(bits: int, *, zero_points: bool = False, shuffled: bool = False, per_channel: bool = False) -> Pack:
    """compressed-tensors, pack-quantized."""
    def pack(base, weight, generator):
        groups = 1 if per_channel else weight.shape[1] // GROUP
        values, zeros, scales = drawn(weight, bits, generator, groups)
        half = 1 << (bits - 1)
        index = torch.arange(weight.shape[1]) // (weight.shape[1] if per_channel else GROUP)
        if shuffled:
            index = index[torch.randperm(len(index), generator=generator)]
        stored = {f"{base}.weight_packed": words(values, bits), f"{base}.weight_scale": scales.bfloat16(),
                  f"{base}.weight_shape": torch.tensor(weight.shape)}
        if zero_points:
            stored[f"{base}.weight_zero_point"] = words(zeros.t(), bits).t()
        if shuffled:
            stored[f"{base}.weight_g_idx"] = index.to(torch.int32)
        zero = zeros if zero_points else torch.full_like(zeros, half)
        return stored, (values - zero[:, index]) * scales.bfloat16().float()[:, index]

    return pack


def int8(base, weight, generator):
    """compressed-tensors, int-quantized, one scale a row."""
    values, _, scales = drawn(weight, 8, generator, 1)
    stored = {f"{base}.weight": (values - 128).to(torch.int8), f"{base}.weight_scale": scales}
    return stored, (values - 128) * scales


def fp8(scale: str, shape: Callable[[int, int], tuple[int, ...]], extra: bool = False) -> Pack:
    """float8 with scales of the shape that is given; `scale` is the name of their tensor."""
    def pack(base, weight, generator):
        scales = torch.rand(shape(*weight.shape), generator=generator) + 0.5
        spread = scales
        if scales.ndim == 2:
            for dim in (0, 1):
                spread = spread.repeat_interleave(-(-weight.shape[dim] // scales.shape[dim]), dim)
            spread = spread[: weight.shape[0], : weight.shape[1]]
        elif scales.ndim == 1 and len(scales) > 1:
            spread = scales[:, None]
        stored = {f"{base}.weight": weight.to(torch.float8_e4m3fn), f"{base}.{scale}": scales}
        if extra:
            stored[f"{base}.input_scale"] = torch.tensor(0.5)
        return stored, weight.to(torch.float8_e4m3fn).float() * spread

    return pack
