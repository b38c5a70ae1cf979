"""Whole engines around tiny random models, with transformers as the oracle."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from stretto.attn.select import choose_backend
from stretto.device.kv import KVCache
from stretto.device.runner import Runner
from stretto.device.slots import SlotTable
from stretto.device.states import kv_groups
from stretto.device.streams import make_device
from stretto.engine.core import EngineCore
from stretto.host.grammar import Grammars
from stretto.host.half import HostHalf
from stretto.host.limits import HostDrafter, HostLimits
from stretto.model.api import CausalModel
from stretto.model.load import load_model
from stretto.params import SamplingParams
from stretto.protocol import EngineInfo, Output, Request
from stretto.spec.api import Drafter
from stretto.testing import AlwaysCopy

VOCAB, CONTEXT, MARGIN = 300, 256, 1e-3
DEVICE = torch.device(os.environ.get("STRETTO_TEST_DEVICE", "cpu"))
"""Where the engines run: `make test-gpu` runs these tests on CUDA too."""

SHAPE = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=False)


def family(name: str, window: int | None) -> tuple[type, transformers.PretrainedConfig]:
    """(model class, configuration) of a tiny model; `window`: a sliding window on all its layers, or on some."""
    t = transformers
    mixed = ["full_attention", "sliding_attention", "sliding_attention"] if window else ["full_attention"] * 3
    qwen_window = dict(use_sliding_window=bool(window), sliding_window=window, layer_types=mixed)
    no_ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    experts = dict(num_local_experts=4, num_experts_per_tok=2)
    made = {
        "llama": lambda: (t.LlamaForCausalLM, t.LlamaConfig(**SHAPE)),
        "mistral": lambda: (t.MistralForCausalLM, t.MistralConfig(**SHAPE, sliding_window=window)),
        "qwen2": lambda: (t.Qwen2ForCausalLM, t.Qwen2Config(**SHAPE, **qwen_window)),
        "qwen3": lambda: (t.Qwen3ForCausalLM, t.Qwen3Config(**SHAPE, head_dim=16, **qwen_window)),
        "olmo2": lambda: (t.Olmo2ForCausalLM, t.Olmo2Config(**SHAPE)),
        "gemma2": lambda: (t.Gemma2ForCausalLM, t.Gemma2Config(  # soft-cap, mixed windows
            **SHAPE, head_dim=16, sliding_window=window or CONTEXT, query_pre_attn_scalar=16)),
        "gemma3": lambda: (t.Gemma3ForCausalLM, t.Gemma3TextConfig(  # two rotations, mixed windows
            **SHAPE, head_dim=16, sliding_window=window or CONTEXT, query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
        "phi3": lambda: (t.Phi3ForCausalLM, t.Phi3Config(**SHAPE, **no_ids, sliding_window=window, rope_parameters={
            "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75})),
        "glm4": lambda: (t.Glm4ForCausalLM, t.Glm4Config(**SHAPE, **no_ids, head_dim=16)),
        "mixtral": lambda: (t.MixtralForCausalLM, t.MixtralConfig(**SHAPE, **experts, sliding_window=window)),
        "qwen3_moe": lambda: (t.Qwen3MoeForCausalLM, t.Qwen3MoeConfig(
            **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16,
            norm_topk_prob=True, decoder_sparse_step=2)),
        "gpt_oss": lambda: (t.GptOssForCausalLM, t.GptOssConfig(  # sinks, experts, mixed windows
            **SHAPE, **experts, head_dim=16, sliding_window=window or CONTEXT, rope_parameters={
                "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64,
                "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False})),
        "qwen3_next": lambda: (t.Qwen3NextForCausalLM, t.Qwen3NextConfig(  # states, gated heads, a shared expert
            **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16,
            shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["linear_attention", "full_attention",
                                                                          "linear_attention"])),
        "qwen3_5": lambda: (t.Qwen3_5ForCausalLM, t.Qwen3_5TextConfig(
            **SHAPE, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
            linear_value_head_dim=8, layer_types=["linear_attention", "full_attention", "linear_attention"])),
        "granite_hybrid": lambda: (t.GraniteMoeHybridForCausalLM, t.GraniteMoeHybridConfig(  # states, no rotation
            **SHAPE, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32, mamba_n_heads=8,
            mamba_d_state=8, mamba_n_groups=2, residual_multiplier=0.7, attention_multiplier=0.3, logits_scaling=2.0,
            layer_types=["linear_attention", "full_attention", "linear_attention"])),
        "llama4": lambda: (t.Llama4ForCausalLM, t.Llama4TextConfig(  # a layer that does not rotate, experts, an MLP
            **SHAPE, **experts, head_dim=16, intermediate_size_mlp=80, attention_chunk_size=CONTEXT, floor_scale=20,
            no_rope_layers=[1, 0, 1], moe_layers=[0, 1])),
        "granite": lambda: (t.GraniteForCausalLM, t.GraniteConfig(
            **SHAPE, logits_scaling=3.0, attention_multiplier=0.3, residual_multiplier=0.7)),
        "stablelm": lambda: (t.StableLmForCausalLM, t.StableLmConfig(**SHAPE)),  # through the fallback
        "olmo3": lambda: (t.Olmo3ForCausalLM, t.Olmo3Config(  # through the fallback
            **SHAPE, pad_token_id=0, sliding_window=window or CONTEXT, layer_types=[
                "sliding_attention", "full_attention", "sliding_attention"])),
    }
    return made[name]()


def save_tiny(folder: Path, name: str, window: int | None = None,
              sharpness: float = 20, **changes: object) -> transformers.PreTrainedModel:
    """Saves a random model and returns transformers' own, the oracle. At the usual sharpness the best logit leads
    clearly, so that greedy text is decided; at 1 the logits spread by about 4, so that sampling has a choice.
    `changes`: of its config."""
    torch.manual_seed(5)
    cls, config = family(name, window)
    config.update(changes)
    oracle = cls(config).eval()
    with torch.no_grad():
        for p in oracle.parameters():
            p.mul_(4 if p.ndim > 1 else 1)
        oracle.lm_head.weight.mul_(sharpness)
    oracle.save_pretrained(folder)
    if name == "granite_hybrid":  # what transformers goes on from after a prompt differs between its versions
        oracle.generation_config.use_cache = False
    return oracle


@dataclass
class Oracle:
    """A tiny model in both forms. `answers` are cached greedy sequences, with the margin rule checked."""

    model: CausalModel
    reference: transformers.PreTrainedModel

    @classmethod
    def make(cls, folder: Path, name: str, window: int | None = None, sharpness: float = 20) -> Oracle:
        reference = save_tiny(folder, name, window, sharpness)
        return cls(load_model(folder, dtype=torch.float32, device=DEVICE), reference)

    def answer(self, prompt: list[int], n: int) -> list[int]:
        """n greedy ids. Asserts that no two best logits are within the margin, so that rounding decides nothing."""
        ids = torch.tensor([prompt])
        made = self.reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False,
                                       eos_token_id=None, pad_token_id=0, output_logits=True,
                                       return_dict_in_generate=True)
        best = torch.stack(made.logits)[:, 0].topk(2, -1).values
        assert float((best[:, 0] - best[:, 1]).min()) > MARGIN, "the oracle itself is undecided: change the prompt"
        return made.sequences[0].tolist()[len(prompt):]


def make_core(model: CausalModel, *, page_size: int = 16, pool_tokens: int = 4096, overlap: bool = True,
              drafter: Drafter | None = None, slots: int = 9, text=None, grammars: Grammars | None = None,
              host_drafter: HostDrafter | None = None, host_width: int = 4,
              poison: bool = False,
              window_pages: int | None = None, host_tokens: int = 0, **limits) -> EngineCore:
    """An engine whose pool holds `pool_tokens` in every group. Freed pages are unreadable where `poison` is set. Host
    memory holds `host_tokens` of each group, and whatever it has is copied back."""
    groups = kv_groups(model)
    full = -(-pool_tokens // page_size)
    pages = tuple(full if g.window is None or window_pages is None else window_pages for g in groups)
    kv = KVCache(model.layers, groups, pages, page_size, model.dtype, model.device)
    context = min(CONTEXT, model.max_position)
    table = SlotTable(slots, context, page_size, len(groups), model.device)
    width = drafter.caps.max_width if drafter else host_width if host_drafter else 0
    runner = Runner(model, choose_backend(model.layers, page_size, model.device, model.dtype), kv, table, drafter,
                    width)
    if host_tokens:
        counts = tuple(-(-host_tokens // page_size) for _ in groups)
        limits = {"host_pages": counts, "page_bytes": runner.keep_on_host(counts).page_bytes,
                  "rates": AlwaysCopy()} | limits
    host = HostLimits(page_size=page_size, pages=pages, windows=tuple(g.window for g in groups), max_slots=slots,
                      max_model_len=context, width=width, depth=int(overlap), poison=poison, drafter=host_drafter,
                      lookahead=drafter.caps.lookahead if drafter else 0, **{"seeds": random.Random(0)} | limits)
    info = EngineInfo(model_name="tiny", vocab_size=model.vocab_size, max_model_len=context, max_num_seqs=slots - 1,
                      kv_tokens=host.kv_tokens, eos_token_ids=sorted(host.eos_token_ids), speculation_tokens=width)
    return EngineCore(HostHalf(host, text, grammars), make_device(runner, overlap), info, int(overlap))


def greedy(n: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n, **more)


@dataclass
class Run:
    """Feeds requests to a core and collects what comes back. Checks the books after every step."""

    core: EngineCore

    def __post_init__(self) -> None:
        self.outputs: dict[tuple[str, int], list[Output]] = {}

    def submit(self, rid: str, tokens: list[int], sampling: SamplingParams, **more) -> None:
        self.core.submit(Request(rid=rid, tokens=list(tokens), sampling=sampling, want_text=False, **more))

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.note(self.core.step())

    def note(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.outputs.setdefault((output.rid, output.index), []).append(output)

    def finish(self, most: int = 20_000) -> None:
        """Until idle; then every page must be free or evictable, page by page."""
        for _ in range(most):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, f"not idle after {most} steps"
        self.core.host.audit()
        _, gauges = self.core.host.stats()
        assert not any(v for k, v in gauges.items() if k.startswith("pages_used")), "an idle engine holds pages"

    def finish_sessions(self, most: int = 20_000) -> None:
        """Until idle; sessions keep their pages."""
        for _ in range(most):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, f"not idle after {most} steps"
        self.core.host.audit()

    def ids(self, rid: str, index: int = 0) -> list[int]:
        return [t for output in self.outputs[rid, index] for t in output.token_ids]

    def reason(self, rid: str, index: int = 0) -> str | None:
        return self.outputs[rid, index][-1].finish_reason

    @property
    def counters(self) -> dict[str, float]:
        return self.core.host.stats()[0]
