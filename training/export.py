"""A trained head as a checkpoint in its public layout, weights in 8 bits with a scale for each row.

The format of the stored weights is that of compressed-tensors, "int-quantized": X.weight int8 [O, I], X.weight_scale
[O, 1]; vectors stay as they are.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from training.heads import DFlash, DSpark, Eagle3, Shape
from training.target import Teacher

Tensors, Config = dict[str, torch.Tensor], dict[str, Any]
OF_IDS = ("lm_head.weight", "markov_head.markov_w2.weight")  # they have a row for each id that can be drafted
QUANTIZATION = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
                "ignore": [], "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                    "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}}}}


def eight_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[O, I] -> int8 [O, I] and scales [O, 1] float32, with which weight = int8 * scale nearly; of a weight that is so
    already, the same again."""
    weight = weight.float()
    scale = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=1e-8)
    return (weight / scale).round().to(torch.int8), scale


@torch.no_grad()
def round_weights(head: nn.Module) -> None:
    """Puts into the head what the checkpoint will hold."""
    for weight in head.parameters():
        if weight.ndim == 2:
            stored, scale = eight_bits(weight)
            weight.copy_(stored.float() * scale.float())


@torch.no_grad()
def load(head: nn.Module, folder: Path) -> None:
    """Continues from a checkpoint that `save` wrote, of a head of the same shape; the vocabulary may have grown, and
    what it gained starts as in a new head. Raises ValueError."""
    stored, own = load_file(folder / "model.safetensors"), head.state_dict()
    rows = _rows_of(head, folder)
    wrong = [name for name, weight in own.items() if name not in stored or stored[name].shape != (
        (len(rows), *weight.shape[1:]) if name in OF_IDS else weight.shape)]
    if wrong:
        raise ValueError(f"{folder} holds a head of another shape: {', '.join(wrong)}")
    for name, weight in own.items():
        value = stored[name].float() * stored.get(f"{name}_scale", torch.ones(())).float()
        if name in OF_IDS:
            weight[rows] = value.to(weight.device)
        else:
            weight.copy_(value)


def _rows_of(head: Any, folder: Path) -> torch.Tensor:
    """Where the ids of the checkpoint's vocabulary are in the head's, [D] int64."""
    ids = getattr(head, "ids", None)
    if ids is None:
        return torch.empty(0, dtype=torch.int64)
    before = vocabulary_of(folder).to(ids.device)
    if not bool(torch.isin(before, ids).all()):
        raise ValueError(f"{folder} drafts ids that the head does not")
    return torch.searchsorted(ids, before)


def vocabulary_of(folder: Path) -> torch.Tensor:
    """Target ids of a reduced vocabulary, [D] int64."""
    mapping = load_file(folder / "model.safetensors")["d2t"]
    return mapping + torch.arange(len(mapping))


def tensors_of(head: nn.Module) -> Tensors:
    found: Tensors = {}
    for name, weight in head.state_dict().items():
        if weight.ndim == 2:
            found[name], found[f"{name}_scale"] = eight_bits(weight.cpu())
        else:
            found[name] = weight.cpu().float()
    return found


def fingerprint(norm: torch.Tensor) -> str:
    """Tells models apart by their final norm, which quantised files hold unrounded."""
    return hashlib.sha256(norm.detach().cpu().bfloat16().view(torch.int16).numpy().tobytes()).hexdigest()[:16]


def save(folder: Path, config: Config, tensors: Tensors) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**config, "quantization_config": QUANTIZATION}, indent=1)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder}: {size / 1e6:.2f} MB", flush=True)


def layer_config(teacher: Teacher, shape: Shape, model_type: str) -> Config:
    """What all heads' configurations say: of their layers, and of the model that they were trained for."""
    target = teacher.config
    return {"model_type": model_type, "hidden_size": shape.hidden, "intermediate_size": shape.inner,
            "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "hidden_act": "silu",
            "rms_norm_eps": shape.eps, "attention_bias": False, "mlp_bias": False, "rope_theta": shape.theta,
            "vocab_size": target.vocab_size,
            "max_position_embeddings": target.max_position_embeddings, "tie_word_embeddings": False,
            "num_target_layers": target.num_hidden_layers, "target_model": teacher.name,
            "target_fingerprint": fingerprint(teacher.norm)}


def layers_of(teacher: Teacher, shape: Shape) -> list[int]:
    """After which of the target's layers the states are that the head reads."""
    return [teacher.taps[i] for i in shape.columns]


def vocabulary(head: Any, vocab: int) -> tuple[Config, Tensors]:
    """A reduced vocabulary and the maps between it and the target's; nothing where all ids are drafted."""
    ids = head.ids.cpu()
    if len(ids) == vocab:
        return {}, {}
    maps = {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(vocab), ids)}
    return {"draft_vocab_size": len(ids)}, maps


def eagle3(folder: Path, head: Eagle3, teacher: Teacher, shape: Shape) -> None:
    """The original layout."""
    config = layer_config(teacher, shape, "llama") | {
        "architectures": ["LlamaForCausalLMEagle3"], "target_hidden_size": shape.hidden,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers_of(teacher, shape), "use_aux_hidden_state": True}}
    more, maps = vocabulary(head, config["vocab_size"])
    save(folder, config | more, tensors_of(head) | maps)


def dflash(folder: Path, head: DFlash, teacher: Teacher, shape: Shape, mask: int) -> None:
    """z-lab's layout, but for the reduced vocabulary, whose head is made of rows of the target's. `mask`: the id whose
    embedding stands for what is not known yet."""
    config = layer_config(teacher, shape, "qwen3") | {
        "architectures": ["DFlashDraftModel"], "block_size": head.size,
        "layer_types": ["full_attention"] * shape.layers,
        "dflash_config": {"target_layer_ids": layers_of(teacher, shape), "mask_token_id": mask}}
    more, maps = vocabulary(head, config["vocab_size"])
    save(folder, config | more, tensors_of(head) | maps)


def dspark(folder: Path, head: DSpark, teacher: Teacher, shape: Shape, mask: int) -> None:
    """DeepSpec's layout, with a recurrent Markov head; a reduced vocabulary as in `dflash`."""
    config = layer_config(teacher, shape, "qwen3") | {
        "architectures": ["Qwen3DSparkModel"], "block_size": head.size, "mask_token_id": mask,
        "target_layer_ids": layers_of(teacher, shape), "layer_types": ["full_attention"] * shape.layers,
        "markov_rank": head.markov_head.markov_w1.embedding_dim, "markov_head_type": "rnn",
        "enable_confidence_head": True, "confidence_head_with_markov": True}
    more, maps = vocabulary(head, config["vocab_size"])
    save(folder, config | more, tensors_of(head) | maps)
