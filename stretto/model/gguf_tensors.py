"""Which tensors of a GGUF file make which tensors of a Hugging Face checkpoint, family by family.

Most are the same under another name. The rest is what llama.cpp's converter did to them, undone: rows of q and k that
stand interleaved, norms that hold 1 + weight, experts in one tensor, fused or parted matrices, parameters of layers
with states. Nearly all of it moves rows, so that quantised ones stay as they are stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from stretto.text.gguf_file import TensorInfo

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Rows:
    """Some rows of a stored tensor, as a matrix: those of an expert stand below those of the one before. `count` None:
    all. A vector has a row for each number."""

    tensor: str
    start: int = 0
    count: int | None = None


@dataclass(frozen=True)
class Stored:
    """A tensor by its Hugging Face name: rows one below the other, then in `order`, seen as `shape`."""

    rows: tuple[Rows, ...]
    shape: tuple[int, ...]
    order: torch.Tensor | None = None
    transposed: bool = False  # `shape` is [experts, inputs, rows]
    change: Change | None = None  # of the numbers of all rows, before they are seen as `shape`: they cannot stay packed


@dataclass
class Layer:
    """The tensors of a layer by their names behind "blk.N."; those that no rule has taken are left."""

    index: int
    parts: dict[str, TensorInfo]
    config: Mapping[str, Any]

    def take(self, part: str) -> TensorInfo | None:
        return self.parts.pop(part, None)

    def take_all(self, *parts: str) -> list[TensorInfo]:
        """All of these, or none where one is missing: then it is missed by the model, by its other name."""
        if not all(part in self.parts for part in parts):
            return []
        return [self.parts.pop(part) for part in parts]


Rule = Callable[[Layer], dict[str, Stored]]  # takes tensors of a layer and gives others, by names behind "layers.N."


@dataclass(frozen=True)
class Tensors:
    """Those of a family."""

    names: Mapping[str, str]
    rules: tuple[Rule, ...] = ()
    offset_norms: bool = False  # norms hold 1 + weight


TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
COMPUTED = re.compile(r"(rope_freqs|rope_factors_long|rope_factors_short|blk\.\d+\.(attn_rot_embd|rope_freqs))\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_HALF_NORM = re.compile(r"norm\.weight$")


def names_of(tensors: Tensors, infos: Mapping[str, TensorInfo], config: Mapping[str, Any], n_layers: int
             ) -> tuple[dict[str, Stored], list[str]]:
    """What the file holds by Hugging Face names, and the tensors that no name is known for. Layers from `n_layers` on
    predict further tokens, for drafters, and are left out."""
    found: dict[str, Stored] = {}
    unknown: list[str] = []
    layers: dict[int, Layer] = {}
    for name, info in infos.items():
        if COMPUTED.fullmatch(name):
            continue
        if match := _LAYER.fullmatch(name):
            index = int(match[1])
            layers.setdefault(index, Layer(index, {}, config)).parts[match[2]] = info
            continue
        part, _, end = name.rpartition(".")
        if part in TOP and end in ("weight", "bias"):
            found[f"{TOP[part]}.{end}"] = same(info)
        else:
            unknown.append(name)
    for layer in (layers[index] for index in sorted(layers) if index < n_layers):
        made = {key: value for rule in tensors.rules for key, value in rule(layer).items()}
        made |= _renamed(layer, tensors.names)
        found |= {f"model.layers.{layer.index}.{key}": value for key, value in made.items()}
        unknown += [f"blk.{layer.index}.{part}" for part in layer.parts]
    if tensors.offset_norms:
        found = {name: replace(value, change=_less_one) if _has_offset(name) else value
                 for name, value in found.items()}
    return found, unknown


def _renamed(layer: Layer, names: Mapping[str, str]) -> dict[str, Stored]:
    made: dict[str, Stored] = {}
    for part in list(layer.parts):
        stem, _, end = part.rpartition(".")
        if stem in names and end in ("weight", "bias"):
            made[f"{names[stem]}.{end}"] = same(layer.parts.pop(part))
    return made


def same(info: TensorInfo) -> Stored:
    return Stored((Rows(info.name),), info.shape)


def _less_one(weight: torch.Tensor) -> torch.Tensor:
    return weight.float() - 1


def _has_offset(name: str) -> bool:
    return bool(_HALF_NORM.search(name)) and not name.endswith("linear_attn.norm.weight")


def unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """rows [heads * head_dim, ...] with the two halves of each head interleaved -> the halves one after the other.

        file        0 h 1 h+1 2 h+2 ...          h = head_dim / 2
        here        0 1 2 ... h h+1 h+2 ..."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


# --------------------------------------------------------------------------------------------------------------- rules
def interleaved(layer: Layer) -> dict[str, Stored]:
    """q and k, for a rotation of neighbours: back to one of halves."""
    made: dict[str, Stored] = {}
    heads = {"q": layer.config["num_attention_heads"], "k": layer.config["num_key_value_heads"]}
    for part, count in heads.items():
        for end in ("weight", "bias"):
            if info := layer.take(f"attn_{part}.{end}"):
                order = unpermute(torch.arange(info.shape[0]), count)
                made[f"self_attn.{part}_proj.{end}"] = replace(same(info), order=order)
    return made


def apart(layer: Layer) -> dict[str, Stored]:
    """q, k and v from one matrix."""
    c = layer.config
    made: dict[str, Stored] = {}
    counts = [n * c["head_dim"] for n in (c["num_attention_heads"], *[c["num_key_value_heads"]] * 2)]
    for end in ("weight", "bias"):
        if info := layer.take(f"attn_qkv.{end}"):
            start = 0
            for part, count in zip("qkv", counts, strict=True):
                made[f"self_attn.{part}_proj.{end}"] = Stored((Rows(info.name, start, count),),
                                                              (count, *info.shape[1:]))
                start += count
    return made


def each_expert(name: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Rule:
    """Every expert by itself, "NAME.experts.0.gate_proj", of all of them in one tensor [E, rows, inputs]."""
    def rule(layer: Layer) -> dict[str, Stored]:
        made: dict[str, Stored] = {}
        for part, theirs in (("gate", [gate]), ("up", [up]), ("down", [down]), ("gate_up", [gate, up])):
            if info := layer.take(f"ffn_{part}_exps.weight"):
                experts, rows, inputs = info.shape
                count = rows // len(theirs)
                made |= {f"{name}.experts.{e}.{one}.weight": Stored((Rows(info.name, e * rows + i * count, count),),
                                                                    (count, inputs))
                         for e in range(experts) for i, one in enumerate(theirs)}
        return made
    return rule


def experts_of_gpt_oss(layer: Layer) -> dict[str, Stored]:
    """Rows of gate and up in turn, biases likewise; the checkpoint's tensors are [E, inputs, rows]."""
    made: dict[str, Stored] = {}
    if infos := layer.take_all("ffn_gate_exps.weight", "ffn_up_exps.weight"):
        experts, rows, inputs = infos[0].shape
        made["mlp.experts.gate_up_proj"] = Stored(tuple(Rows(info.name) for info in infos),
                                                  (experts, inputs, 2 * rows), in_turn(experts * rows), True)
    if infos := layer.take_all("ffn_gate_exps.bias", "ffn_up_exps.bias"):
        experts, rows = infos[0].shape
        made["mlp.experts.gate_up_proj_bias"] = Stored(
            tuple(Rows(info.name) for info in infos), (experts, 2 * rows),
            change=partial(_biases_in_turn, experts))
    if info := layer.take("ffn_down_exps.weight"):
        experts, rows, inputs = info.shape
        made["mlp.experts.down_proj"] = Stored((Rows(info.name),), (experts, inputs, rows), transposed=True)
    if info := layer.take("ffn_down_exps.bias"):
        made["mlp.experts.down_proj_bias"] = same(info)
    if info := layer.take("attn_sinks.weight"):
        made["self_attn.sinks"] = same(info)
    return made


def _biases_in_turn(experts: int, both: torch.Tensor) -> torch.Tensor:
    """[2 E, F], all of gate and then all of up -> [E, F, 2]."""
    return both.unflatten(0, (2, experts)).permute(1, 2, 0)


def in_turn(count: int) -> torch.Tensor:
    """Of two matrices of `count` rows, one below the other: a row of each in turn."""
    return torch.arange(2 * count).view(2, count).t().flatten()


def beside(experts: int, rows: int) -> torch.Tensor:
    """Of all experts' gate rows and all their up rows, one below the other: both of each expert."""
    return torch.arange(2 * experts * rows).view(2, experts, rows).transpose(0, 1).flatten()


def experts_of_llama4(layer: Layer) -> dict[str, Stored]:
    made: dict[str, Stored] = {}
    if infos := layer.take_all("ffn_gate_exps.weight", "ffn_up_exps.weight"):
        experts, rows, inputs = infos[0].shape
        made["feed_forward.experts.gate_up_proj"] = Stored(tuple(Rows(info.name) for info in infos),
                                                           (experts, inputs, 2 * rows), beside(experts, rows), True)
    if info := layer.take("ffn_down_exps.weight"):
        experts, rows, inputs = info.shape
        made["feed_forward.experts.down_proj"] = Stored((Rows(info.name),), (experts, inputs, rows), transposed=True)
    return made


def mlps_of_granite_hybrid(layer: Layer) -> dict[str, Stored]:
    """Gate and up in one matrix, of the experts and of the MLP for all tokens; without experts that is the only one."""
    made: dict[str, Stored] = {}
    if infos := layer.take_all("ffn_gate_exps.weight", "ffn_up_exps.weight"):
        experts, rows, inputs = infos[0].shape
        made["block_sparse_moe.input_linear.weight"] = Stored(tuple(Rows(info.name) for info in infos),
                                                              (experts, 2 * rows, inputs), beside(experts, rows))
    for end in ("_shexp.weight", ".weight"):
        if infos := layer.take_all(f"ffn_gate{end}", f"ffn_up{end}"):
            rows, inputs = infos[0].shape
            made["shared_mlp.input_linear.weight"] = Stored(tuple(Rows(info.name) for info in infos),
                                                            (2 * rows, inputs))
        if info := layer.take(f"ffn_down{end}"):
            made["shared_mlp.output_linear.weight"] = same(info)
    return made


def _state(layer: Layer, name: str, order: torch.Tensor | None = None, channels: torch.Tensor | None = None
           ) -> dict[str, Stored]:
    """What layers with states have in common. `order`: of the heads; `channels`: of those that are convolved."""
    made: dict[str, Stored] = {}
    if info := layer.take("ssm_a"):
        made[f"{name}.A_log"] = Stored((Rows(info.name),), (info.shape[0],), order, change=lambda a: (-a.float()).log())
    if info := layer.take("ssm_dt.bias"):
        made[f"{name}.dt_bias"] = replace(same(info), order=order)
    if info := layer.take("ssm_conv1d.weight"):
        made[f"{name}.conv1d.weight"] = Stored((Rows(info.name),), (info.shape[0], 1, info.shape[1]), channels)
    return made


def mamba2(layer: Layer) -> dict[str, Stored]:
    made = _state(layer, "mamba")
    for part, shape in (("ssm_d", "D"), ("ssm_norm.weight", "norm.weight")):
        if info := layer.take(part):
            made[f"mamba.{shape}"] = Stored((Rows(info.name),), (info.shape[0] * info.shape[-1],))
    return made


def delta_net(layer: Layer) -> dict[str, Stored]:
    """Of Qwen3-Next, whose checkpoints hold q k v z of one key head after another; files hold all q, then k, v, z."""
    c, made = layer.config, _state(layer, "linear_attn")
    heads, each = c["linear_num_key_heads"], c["linear_num_value_heads"] // c["linear_num_key_heads"]
    widths = (c["linear_key_head_dim"], c["linear_key_head_dim"], *[each * c["linear_value_head_dim"]] * 2)
    if infos := layer.take_all("attn_qkv.weight", "attn_gate.weight"):
        rows = torch.arange(heads * sum(widths)).split([heads * width for width in widths])
        order = torch.cat([part.view(heads, -1) for part in rows], 1).flatten()
        made["linear_attn.in_proj_qkvz.weight"] = Stored(tuple(Rows(info.name) for info in infos),
                                                         (len(order), infos[0].shape[1]), order)
    return made | _shared_gate(layer)


def separate_delta_net(layer: Layer) -> dict[str, Stored]:
    """Of Qwen3.5. Files hold the first value head of every key head, then all second ones, and so on."""
    c = layer.config
    k_heads, v_heads, width = (c[f"linear_{key}"] for key in ("num_key_heads", "num_value_heads", "value_head_dim"))
    heads = torch.arange(v_heads).view(-1, k_heads).t().flatten()
    values = (heads[:, None] * width + torch.arange(width)).flatten()
    keys = 2 * k_heads * c["linear_key_head_dim"]
    channels = torch.cat((torch.arange(keys), keys + values))
    made = _state(layer, "linear_attn", heads, channels)
    for part, name, order in (("attn_qkv", "qkv", channels), ("attn_gate", "z", values), ("ssm_beta", "b", heads),
                              ("ssm_alpha", "a", heads)):
        if info := layer.take(f"{part}.weight"):
            made[f"linear_attn.in_proj_{name}.weight"] = replace(same(info), order=order)
    if info := layer.take("ssm_out.weight"):
        moved = v_heads != k_heads
        made["linear_attn.out_proj.weight"] = replace(same(info), change=(lambda w: w[:, values]) if moved else None)
    return made | _shared_gate(layer)


def _shared_gate(layer: Layer) -> dict[str, Stored]:
    if info := layer.take("ffn_gate_inp_shexp.weight"):
        return {"mlp.shared_expert_gate.weight": Stored((Rows(info.name),), (1, info.shape[-1]))}
    return {}


# ------------------------------------------------------------------------------------------------------------ families
_ATTENTION = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NAMES = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj"}  # gate above up
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
_DELTA = {**_NAMES, **_SHARED, "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate",
          "ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz", "ssm_norm": "linear_attn.norm",
          "ssm_out": "linear_attn.out_proj"}
_GEMMA = {**_NAMES, **_FOUR_NORMS, "ffn_norm": "pre_feedforward_layernorm"}

LLAMA = Tensors(_NAMES, (interleaved,))
PLAIN = Tensors(_NAMES)
MIXTRAL = Tensors({**_NAMES, "ffn_gate_inp": "block_sparse_moe.gate"},
                  (interleaved, each_expert("block_sparse_moe", "w1", "w3", "w2")))
QWEN3_MOE = Tensors({**_NAMES, "ffn_gate_inp": "mlp.gate"}, (each_expert("mlp"),))
GEMMA = Tensors(_GEMMA, offset_norms=True)
PHI3 = Tensors({**_NAMES, **_FUSED_MLP, "attn_qkv": "self_attn.qkv_proj"})
OLMO2 = Tensors({**_NAMES, **_FOUR_NORMS})
GLM = Tensors({**_NAMES, **_FUSED_MLP}, (apart,))
GLM4 = Tensors({**_NAMES, **_FUSED_MLP, "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm"}, (apart,))
GPT_OSS = Tensors({**_NAMES, "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
                  (experts_of_gpt_oss,))
GRANITE_HYBRID = Tensors({
    **_ATTENTION, "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_down_exps": "block_sparse_moe.output_linear", "ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d",
    "ssm_out": "mamba.out_proj"}, (interleaved, mamba2, mlps_of_granite_hybrid))
QWEN3_NEXT = Tensors(_DELTA, (delta_net, each_expert("mlp")), offset_norms=True)
QWEN3_5 = Tensors(_DELTA, (separate_delta_net, each_expert("mlp")), offset_norms=True)
LLAMA4 = Tensors({
    **_ATTENTION, "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "feed_forward.router",
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")}},
    (experts_of_llama4,))
