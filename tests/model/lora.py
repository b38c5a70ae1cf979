"""Random LoRA adapters in PEFT's layout, and models into which they were merged."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def save_adapter(folder: Path, model: transformers.PreTrainedModel, targets: tuple[str, ...], rank: int = 4,
                 seed: int = 0, size: float = 0.3, **config) -> Path:
    """Random matrices for every linear layer whose name ends with a target."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.split(".")[-1] in targets:
            a = torch.randn(rank, module.in_features, generator=generator) * module.in_features**-0.5
            b = torch.randn(module.out_features, rank, generator=generator) * size
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none",
         **config}))
    return folder


@torch.no_grad()
def merged(model: transformers.PreTrainedModel, adapter: Path, scale: float = 2.0) -> transformers.PreTrainedModel:
    """A copy of the model with the adapter merged into its weights: W + scale * B A."""
    from copy import deepcopy

    from safetensors.torch import load_file

    copy, tensors = deepcopy(model), load_file(adapter / "adapter_model.safetensors")
    modules = dict(copy.named_modules())
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = modules[name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")]
            module.weight += scale * tensors[name.replace("lora_A", "lora_B")] @ a
    return copy
