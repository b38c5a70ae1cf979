"""A trained head as a checkpoint in its public layout, weights in 4 bits with a scale for each 64 numbers of a row.

The format of the stored weights is that of compressed-tensors, "pack-quantized": X.weight_packed int32 [O, I / 8], the
first number in the lowest bits, offset by 8; X.weight_scale bfloat16 [O, I / 64], of either sign; X.weight_shape [2].
The largest number of a group is -8 times its scale, so that all 16 codes are used. Vectors and
matrices of other sizes stay as they are. A head is trained with its weights as they will be stored. Matrices that a
head names in `eight` have 8 bits: X.weight int8 [O, I], X.weight_scale float32 [O, 1].
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrize

from stretto.model.dequantize import dequantized
from stretto.model.quantization import parse_quantization
from stretto.model.source import SafetensorsSource
from training.heads import DFlash, DSpark, Eagle3, Shape
from training.target import Teacher

Tensors, Config = dict[str, torch.Tensor], dict[str, Any]
OF_IDS = ("lm_head.weight", "markov_head.markov_w2.weight")  # they have a row for each id that can be drafted
GROUP = 64  # numbers of a row that share a scale
LEAST, MOST = -8, 7  # of a code
COMMON = {"type": "int", "symmetric": True, "dynamic": False}
FOUR = {"format": "pack-quantized", "weights": {"num_bits": 4, "strategy": "group", "group_size": GROUP, **COMMON}}
EIGHT = {"format": "int-quantized", "weights": {"num_bits": 8, "strategy": "channel", **COMMON}}


def is_rounded(weight: torch.Tensor) -> bool:
    """Whether a weight of this shape is stored in few bits."""
    return weight.ndim == 2 and weight.shape[0] > 1 and weight.shape[1] % GROUP == 0


def has_eight_bits(head: nn.Module, name: str) -> bool:
    """Whether the weight of this name, if it is stored in few bits, has 8."""
    return name.startswith(getattr(head, "eight", ()))


def eight_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[O, I] -> int8 [O, I] and scales [O, 1] float32, with which weight = int8 * scale nearly; of a weight that is so
    already, the same again."""
    weight = weight.float()
    scale = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=1e-8)
    return (weight / scale).round().to(torch.int8), scale


def four_bits(weight: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """[O, I] -> codes -8 .. 7 float32 [O, I] and scales [O, I / GROUP] bfloat16, whose product is nearly the weight; of
    a weight that is so already, the same again. `scale`: the scales, where they are known."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = largest_scale(groups) if scale is None else scale
    return (groups / scale.float()[..., None]).round().clamp(LEAST, MOST).flatten(1), scale


def largest_scale(groups: torch.Tensor) -> torch.Tensor:
    """[..., GROUP] -> [...] bfloat16: of which the number farthest from 0 is LEAST times."""
    farthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    return torch.where(farthest == 0, 1e-8, farthest / LEAST).bfloat16()


def rounded(weight: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """What a checkpoint will hold of it."""
    codes, scale = four_bits(weight, scale)
    return codes * scale.float().repeat_interleave(GROUP, 1)


class Rounded(nn.Module):
    """A weight is multiplied by as it will be stored; its gradient is that of the stored one (straight through)."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + (rounded(weight) - weight).detach()


def train_rounded(head: nn.Module) -> None:
    """From now on the head multiplies by rounded weights."""
    for name, part in list(head.named_modules()):
        weight = getattr(part, "weight", None)
        if isinstance(weight, nn.Parameter) and is_rounded(weight) and not has_eight_bits(head, name):
            parametrize.register_parametrization(part, "weight", Rounded())


@torch.no_grad()
def round_weights(head: nn.Module) -> None:
    """Puts into the head what the checkpoint will hold."""
    for part in list(head.modules()):
        if parametrize.is_parametrized(part, "weight"):
            parametrize.remove_parametrizations(part, "weight", leave_parametrized=True)
    for name, weight in head.named_parameters():
        if is_rounded(weight) and has_eight_bits(head, name):
            codes, scale = eight_bits(weight)
            weight.copy_(codes.float() * scale)
        elif is_rounded(weight):
            weight.copy_(rounded(weight))


@torch.no_grad()
def load(head: nn.Module, folder: Path) -> None:
    """Continues from a checkpoint that `save` wrote, of a head of the same shape; the vocabulary may have grown, and
    what it gained starts as in a new head. Raises ValueError."""
    raw, own = json.loads((folder / "config.json").read_text(encoding="utf-8")), head.state_dict()
    stored, rows = dequantized(SafetensorsSource(folder), parse_quantization(raw)), _rows_of(head, folder)
    names = set(stored.names())
    wrong = [name for name, weight in own.items() if name not in names or tuple(stored.shape(name)) != (
        (len(rows), *weight.shape[1:]) if name in OF_IDS else weight.shape)]
    if wrong:
        raise ValueError(f"{folder} holds a head of another shape: {', '.join(wrong)}")
    for name, weight in own.items():
        value = stored.tensor(name).float()
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


def tensors_of(head: nn.Module, scales: Tensors) -> Tensors:
    """`scales`: of weights that have been rounded by them, by name."""
    found: Tensors = {}
    for name, weight in head.state_dict().items():
        if is_rounded(weight) and has_eight_bits(head, name):
            found[name], found[f"{name}_scale"] = eight_bits(weight.cpu())
        elif is_rounded(weight):
            codes, found[f"{name}_scale"] = four_bits(weight.cpu(), scales.get(name))
            found[f"{name}_packed"] = words(codes.int() + 8)
            found[f"{name}_shape"] = torch.tensor(weight.shape)
        else:
            found[name] = weight.cpu().float()
    return found


def words(codes: torch.Tensor) -> torch.Tensor:
    """Numbers 0 .. 15, int32 [O, I] -> int32 [O, I / 8], the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (codes.unflatten(1, (-1, 8)) << shifts).sum(2, dtype=torch.int32)


def fingerprint(norm: torch.Tensor) -> str:
    """Tells models apart by their final norm, which quantised files hold unrounded."""
    return hashlib.sha256(norm.detach().cpu().bfloat16().view(torch.int16).numpy().tobytes()).hexdigest()[:16]


def save(folder: Path, config: Config, tensors: Tensors) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**config, **quantization(tensors)}, indent=1)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder}: {size / 1e6:.2f} MB", flush=True)


def quantization(tensors: Tensors) -> Config:
    """What config.json says of the stored weights."""
    matrices = {name: t for name, t in tensors.items() if t.ndim == 2 and not name.endswith("_scale")}
    four = [name.removesuffix(".weight_packed") for name in matrices if name.endswith(".weight_packed")]
    eight = [name.removesuffix(".weight") for name, t in matrices.items() if t.dtype is torch.int8]
    groups = [{"targets": names, **how} for names, how in ((four, FOUR), (eight, EIGHT)) if names]
    if not groups:
        return {}
    ignored = [name.removesuffix(".weight") for name, t in matrices.items() if t.is_floating_point()]
    return {"quantization_config": {
        "quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ignored,
        "format": groups[0]["format"] if len(groups) == 1 else "mixed-precision",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)}}}


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
    maps = {"d2t": (ids - torch.arange(len(ids))).int(), "t2d": torch.isin(torch.arange(vocab), ids)}
    return {"draft_vocab_size": len(ids)}, maps


def eagle3(folder: Path, head: Eagle3, teacher: Teacher, shape: Shape, scales: Tensors) -> None:
    """The original layout."""
    config = layer_config(teacher, shape, "llama") | {
        "architectures": ["LlamaForCausalLMEagle3"], "target_hidden_size": shape.hidden,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers_of(teacher, shape), "use_aux_hidden_state": True}}
    more, maps = vocabulary(head, config["vocab_size"])
    save(folder, config | more, tensors_of(head, scales) | maps)


def dflash(folder: Path, head: DFlash, teacher: Teacher, shape: Shape, scales: Tensors, mask: int) -> None:
    """z-lab's layout, but for the reduced vocabulary, whose head is made of rows of the target's. `mask`: the id whose
    embedding stands for what is not known yet."""
    config = layer_config(teacher, shape, "qwen3") | {
        "architectures": ["DFlashDraftModel"], "block_size": head.size,
        "layer_types": ["full_attention"] * shape.layers,
        "dflash_config": {"target_layer_ids": layers_of(teacher, shape), "mask_token_id": mask}}
    more, maps = vocabulary(head, config["vocab_size"])
    save(folder, config | more, tensors_of(head, scales) | maps)


def dspark(folder: Path, head: DSpark, teacher: Teacher, shape: Shape, scales: Tensors, mask: int) -> None:
    """DeepSpec's layout, with a recurrent Markov head; a reduced vocabulary as in `dflash`."""
    config = layer_config(teacher, shape, "qwen3") | {
        "architectures": ["Qwen3DSparkModel"], "block_size": head.size, "mask_token_id": mask,
        "target_layer_ids": layers_of(teacher, shape), "layer_types": ["full_attention"] * shape.layers,
        "markov_rank": head.markov_head.markov_w1.embedding_dim, "markov_head_type": "rnn",
        "enable_confidence_head": True, "confidence_head_with_markov": True}
    more, maps = vocabulary(head, config["vocab_size"])
    save(folder, config | more, tensors_of(head, scales) | maps)
