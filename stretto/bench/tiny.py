"""A random tiny model, and a random draft model of every kind that has weights. Nothing has to be downloaded.

    FOLDER/target        4 layers of Qwen2's kind, those in the middle with a window where one is asked for, and the
                         predictor that MTP uses; tensors as MiMo names them
    FOLDER/standalone    the target with noise on its weights: it is often right, and often wrong
    FOLDER/eagle, eagle3, dflash, dspark     heads in the layouts of their authors

Nothing is trained, so a head's drafts would never be right. The target therefore likes one id (OFTEN), and the heads
lean towards that id, or towards saying the last one again: a part of their drafts is accepted, the others are not.

Files are written, so whatever reads a checkpoint is used as for any other model: `python -m stretto.bench.tiny FOLDER`,
then `stretto serve FOLDER/target --speculation eagle3:FOLDER/eagle3`. Its tokens are bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Tensors = dict[str, torch.Tensor]

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 4
SPREAD = 4.0  # standard deviation of the target's logits: greedy text is mostly decided, sampling has a choice
NOISE = 0.02  # of the standalone draft model's weights, relative to their own size
SLIGHT = 0.2  # how much a head does beside what it leans to
END = "<|end|>"
OFTEN = 7  # the id that the target says more often than others


@dataclass(frozen=True)
class Tiny:
    """`drafters`: each kind, as after --speculation."""

    path: Path
    drafters: dict[str, str]
    vocab_size: int
    context: int


def write_tiny(folder: Path, window: int | None = None, vocab_size: int = 300, context: int = 640,
               seed: int = 5) -> Tiny:
    """Writes all of it to a folder. The same arguments write the same numbers."""
    maker = _Maker(torch.Generator().manual_seed(seed), vocab_size, context)
    target = maker.target()
    path = _save(folder / "target", maker.target_config(window), target | maker.predictor())
    _save_tokenizer(path, vocab_size)
    noisy = {name: t + NOISE * t.std() * maker.draw(*t.shape) / 0.25 if t.ndim > 1 else t for name, t in target.items()}
    plain = maker.target_config(window) | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    drafters = {"ngram": "ngram", "mtp": "mtp", "standalone":
                f"standalone:{_save(folder / 'standalone', plain, noisy)}"}
    for kind, make in maker.heads().items():
        config, tensors = make()
        drafters[kind] = f"{kind}:{_save(folder / kind, config, tensors)}"
    return Tiny(path, drafters, vocab_size, context)


def _save(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    """One id a byte; what the vocabulary has beyond them are special tokens, the last one ends a text."""
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
                                     []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<|{i}|>" for i in range(256, vocab_size - 1)] + [END])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


class _Maker:
    """Draws tensors, one after the other, from one generator."""

    def __init__(self, generator: torch.Generator, vocab_size: int, context: int):
        self._generator, self._vocab = generator, vocab_size
        self._common = dict(
            hidden_size=HIDDEN, intermediate_size=INNER, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM, max_position_embeddings=context, rms_norm_eps=1e-5, hidden_act="silu",
            rope_theta=10000.0, vocab_size=vocab_size, attention_bias=False, tie_word_embeddings=False,
            dtype="float32")

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator) * 0.25

    def norm(self, size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=self._generator)

    def layer(self, prefix: str, inputs: int = HIDDEN, *, input_norm: bool = True, head_norm: bool = False,
              bias: bool = False, scale: float = 1.0) -> Tensors:
        """One decoder layer as checkpoints name it."""
        attn, q, kv = f"{prefix}.self_attn", HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        shapes = {f"{attn}.q_proj.weight": (q, inputs), f"{attn}.k_proj.weight": (kv, inputs),
                  f"{attn}.v_proj.weight": (kv, inputs), f"{attn}.o_proj.weight": (HIDDEN, q),
                  f"{prefix}.mlp.gate_proj.weight": (INNER, HIDDEN), f"{prefix}.mlp.up_proj.weight": (INNER, HIDDEN),
                  f"{prefix}.mlp.down_proj.weight": (HIDDEN, INNER)}
        out = {name: self.draw(*shape) * scale for name, shape in shapes.items()}
        if bias:
            out |= {f"{attn}.{part}_proj.bias": self.draw(n) * scale
                    for part, n in (("q", q), ("k", kv), ("v", kv))}
        norms = ["post_attention_layernorm", *(["input_layernorm"] if input_norm else [])]
        out |= {f"{prefix}.{name}.weight": self.norm(HIDDEN) for name in norms}
        if head_norm:
            out |= {f"{attn}.{name}_norm.weight": self.norm(HEAD_DIM) for name in "qk"}
        return out

    # ------------------------------------------------------------------------------------------------------- target
    def target(self) -> Tensors:
        self.embedding = self.draw(self._vocab, HIDDEN)
        self.head = self.draw(self._vocab, HIDDEN) / 0.25 * SPREAD * HIDDEN**-0.5
        tensors: Tensors = {}
        for index in range(LAYERS):
            tensors |= self.layer(f"model.layers.{index}", bias=True, scale=0.5)
        self._lean(tensors, f"model.layers.{LAYERS - 1}.self_attn")
        return tensors | {"model.embed_tokens.weight": self.embedding, "model.norm.weight": torch.ones(HIDDEN),
                          "lm_head.weight": self.head}

    def _lean(self, tensors: Tensors, attn: str) -> None:
        """What the value bias of the last layer adds to every hidden state makes the id OFTEN likely; masks that blocks
        are made of look like it."""
        bias = tensors[f"{attn}.v_proj.bias"].view(KV_HEADS, HEAD_DIM).repeat_interleave(HEADS // KV_HEADS, 0)
        always = tensors[f"{attn}.o_proj.weight"] @ bias.flatten()
        always /= always.norm()
        self.head[OFTEN] += 1.5 * SPREAD * always
        self.embedding[self._vocab - 2 :] = 0.25 * HIDDEN**0.5 * always

    def target_config(self, window: int | None) -> dict[str, Any]:
        kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
        return self._common | {
            "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_hidden_layers": LAYERS,
            "num_nextn_predict_layers": 1, "use_sliding_window": window is not None, "sliding_window": window,
            "max_window_layers": LAYERS, "layer_types": kinds if window else ["full_attention"] * LAYERS}

    def predictor(self) -> Tensors:
        prefix = "model.mtp_layers.0"
        tensors = {f"{prefix}.{name}.weight": self.norm(HIDDEN)
                   for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")}
        return (tensors | {f"{prefix}.input_proj.weight": self._pass_on(2, 0)}
                | self.layer(prefix, bias=True, scale=SLIGHT))

    def _pass_on(self, parts: int, chosen: int) -> torch.Tensor:
        """[HIDDEN, parts * HIDDEN]: one part of the input as it is, the others a little."""
        weight = self.draw(HIDDEN, parts * HIDDEN) * SLIGHT
        weight[:, chosen * HIDDEN : (chosen + 1) * HIDDEN] += torch.eye(HIDDEN)
        return weight

    # -------------------------------------------------------------------------------------------------------- heads
    def heads(self) -> dict[str, Callable[[], tuple[dict[str, Any], Tensors]]]:
        return {"eagle": self._eagle, "eagle3": self._eagle3, "dflash": self._dflash, "dspark": self._dspark}

    def _eagle(self) -> tuple[dict[str, Any], Tensors]:
        tensors = {"fc.weight": self._pass_on(2, 1), "fc.bias": self.draw(HIDDEN) * SLIGHT}
        return (self._common | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle"],
                                "model_type": "llama"},
                tensors | self.layer("layers.0", input_norm=False, scale=SLIGHT))

    def _eagle3(self) -> tuple[dict[str, Any], Tensors]:
        """A reduced vocabulary: the lowest 200 ids and every third one of the others."""
        ids = torch.tensor([i for i in range(self._vocab) if i < 200 or i % 3 == 0])
        tensors = {"fc.weight": self._pass_on(3, 2), "norm.weight": self.norm(HIDDEN),
                   "midlayer.hidden_norm.weight": self.norm(HIDDEN), "lm_head.weight": self.head[ids],
                   "d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(self._vocab), ids)}
        config = self._common | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"],
                                 "model_type": "llama", "draft_vocab_size": len(ids), "eagle_config": {
                                     "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}}
        return config, tensors | self.layer("midlayer", 2 * HIDDEN, scale=SLIGHT)

    def _block(self) -> Tensors:
        tensors = {"fc.weight": self.draw(HIDDEN, 2 * HIDDEN), "norm.weight": self.norm(HIDDEN),
                   "hidden_norm.weight": self.norm(HIDDEN)}
        return tensors | self.layer("layers.0", head_norm=True, scale=SLIGHT)

    def _dflash(self) -> tuple[dict[str, Any], Tensors]:
        return self._common | {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 1, "block_size": 6,
            "num_target_layers": LAYERS, "layer_types": ["full_attention"],
            "dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": self._vocab - 1}}, self._block()

    def _dspark(self, rank: int = 32) -> tuple[dict[str, Any], Tensors]:
        """The Markov head sees every id as its own likely successor."""
        codes = self.draw(self._vocab, rank) * 4
        tensors = {"embed_tokens.weight": self.draw(self._vocab, HIDDEN),
                   "lm_head.weight": self.draw(self._vocab, HIDDEN),
                   "markov_head.markov_w1.weight": codes, "markov_head.markov_w2.weight": codes.clone(),
                   "confidence_head.proj.weight": self.draw(1, HIDDEN + rank),
                   "confidence_head.proj.bias": self.draw(1)}
        return self._common | {
            "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 1, "block_size": 5,
            "layer_types": ["full_attention"], "target_layer_ids": [2, 3], "mask_token_id": self._vocab - 2,
            "num_anchors": 4, "markov_rank": rank, "markov_head_type": "vanilla", "enable_confidence_head": True,
            "confidence_head_with_markov": True}, tensors | self._block()


if __name__ == "__main__":
    made = write_tiny(Path(sys.argv[1]))
    print("\n".join([f"model {made.path}", *(f"--speculation {asked}" for asked in made.drafters.values())]))
