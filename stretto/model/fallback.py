"""Any other decoder of transformers, its attention replaced by ours.

transformers lets a model's attention be a function registered under a name. Each model loaded here registers a function
of its own (two engines never share one) that hands q, k and v to the step's Attend, and takes the name away again when
it is closed or collected. Nothing else of transformers is changed: its configuration objects are copies.

A model is not trusted to fit; it is tried. At load, a few tokens run four times:

    1  with transformers' own attention                       -> the logits that are right
    2  observed: each call's heads, scale, cap and sinks, and the mask that the model asks for -> a LayerSpec a layer
    3  with dense attention by these specs                    -> attention does no more than they say
    4  the same in two steps                                  -> nothing but attention looks at earlier tokens

Where the logits of 3 or 4 differ from 1, or a layer made no call, the model is refused with the reason, before it
serves anything. The cost is a forward pass over a dozen tokens, four times.
"""

from __future__ import annotations

import contextlib
import copy
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as hf_logging

from stretto.attn.api import Attend, LayerSpec, StateSpec
from stretto.model.config import (
    ConfigError,
    architecture_of,
    parse_rope,
    refuse_quantization,
    served_positions,
    token_ids,
)
from stretto.model.layers import rope_frequencies
from stretto.model.probe import SPLIT, MaskProbe, ProbeAttend, UnknownMask, close_enough, probe_ids
from stretto.model.source import SafetensorsSource, WeightError
from stretto.model.weights import COMPUTED, DAMAGED, NOT_FINITE, Progress, is_finite

_ALIBI = ("bloom", "mpt")  # always, or by a field of a section of its own


class UnsupportedModel(ConfigError):
    """An architecture that cannot be served through transformers; the message gives the reason."""


@dataclass
class Call:
    """One attention call of a forward pass, as the model made it."""

    module: nn.Module
    spec: LayerSpec
    mask: torch.Tensor | None


@dataclass
class Router:
    """Where the attention calls of one model go. The n-th call of a forward pass is layer n: a layer used twice with
    the same weights has two caches."""

    attend: Attend | None = None
    layer: int = 0
    calls: list[Call] | None = None  # filled while the model is observed

    @contextlib.contextmanager
    def to(self, attend: Attend) -> Iterator[None]:
        self.attend, self.layer = attend, 0
        try:
            yield
        finally:
            self.attend = None

    def attention(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                  attention_mask: torch.Tensor | None, scaling: float | None = None, softcap: float | None = None,
                  s_aux: torch.Tensor | None = None, **ignored: Any) -> tuple[torch.Tensor, None]:
        """The signature of transformers' attention functions: query [1, H, T, D], key and value [1, Hkv, T, D]; returns
        [1, T, H, D]. What it ignores (masks, windows, dropout, positions) is in the Attend or was compared at load."""
        if self.attend is None:
            raise RuntimeError(f"{type(module).__name__} was called outside CausalModel.forward")
        if self.calls is not None:
            if value.shape != key.shape:
                raise UnsupportedModel(f"keys have {key.shape[-1]} features and values {value.shape[-1]} (multi-head "
                                       "latent attention): the KV cache holds equal ones")
            scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
            spec = LayerSpec(query.shape[1], key.shape[1], query.shape[-1], scale, None, softcap, s_aux is not None)
            self.calls.append(Call(module, spec, attention_mask))
        layer, self.layer = self.layer, self.layer + 1
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return self.attend(layer, q, k, v, s_aux).unsqueeze(0), None


class _Hidden(nn.Module):
    """Stands in for the base model, so that a model's own code turns given hidden states into logits."""

    def __init__(self, like: nn.Module):
        super().__init__()
        self.config = getattr(like, "config", None)

    @property
    def decoder(self) -> _Hidden:
        """Some causal models call their base's decoder rather than their base."""
        return self

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _HiddenOutput:
        return _HiddenOutput(inputs_embeds)


@dataclass
class _HiddenOutput:
    last_hidden_state: torch.Tensor

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None  # past_key_values, router_logits and the like


class FallbackModel:
    """A CausalModel around a transformers model. Slower than a native one, and not captured in CUDA graphs."""

    graphs = False
    fixed = False
    states: tuple[StateSpec, ...] = ()

    def __init__(self, causal: PreTrainedModel, router: Router, name: str, max_position: int,
                 eos_token_ids: tuple[int, ...]):
        text = causal.config.get_text_config()
        self.vocab_size, self.hidden_size = text.vocab_size, text.hidden_size
        self.max_position, self.eos_token_ids = max_position, eos_token_ids
        self.layers: tuple[LayerSpec, ...] = ()  # found by trying, see `try_out`
        self.dtype: torch.dtype = causal.dtype
        self.device: torch.device = causal.device
        self._base, self._head, self._router = causal.base_model, _head_of(causal), router
        self._taps: dict[str, torch.Tensor] = {}
        self.close = weakref.finalize(self, _unregister, name)

    def tap(self, attentions: list[nn.Module]) -> None:
        """Watches the decoder layers, which are found by the attention modules inside them, in order."""
        for index, layer in enumerate(_decoder_layers(self._base, attentions)):
            layer.register_forward_hook(_tap(weakref.ref(self), f"hidden.{index}"))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend,
                taps: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """See CausalModel."""
        self._taps = taps if taps is not None else {}
        with self._router.to(attend):
            output = self._base(input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        hidden = output.last_hidden_state[0]
        if "hidden.last" in self._taps:
            self._taps["hidden.last"] = hidden
        self._taps = {}
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, E] -> [L, V] float32."""
        return self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0].float()


# ------------------------------------------------------------------------------------------------------------- loading
def load_fallback(folder: Path, raw: Mapping[str, Any], generation: Mapping[str, Any] | None, *, dtype: torch.dtype,
                  device: torch.device, progress: Progress | None = None, context: int | None = None) -> FallbackModel:
    """Loads a model through transformers. Raises UnsupportedModel with the reason, ConfigError, WeightError."""
    name, config = architecture_of(raw), check_fallback(folder, raw)
    positions = served_positions(name, _max_position(name, config.get_text_config()), context)
    causal = _load_weights(folder, name, config, dtype, progress).to(device)
    text = causal.config.get_text_config()  # its own copy
    _freeze_rotary(causal, text, positions)
    right = _right_logits(causal, name, probe_ids(text.vocab_size, device))
    router, key = Router(), f"stretto_{uuid.uuid4().hex}"
    AttentionInterface.register(key, router.attention)
    model = FallbackModel(causal, router, key, positions, token_ids("eos_token_id", raw, generation))
    try:
        with _quiet():
            causal.set_attn_implementation(key)
        if text._attn_implementation != key:
            raise UnsupportedModel(f"{name}: its attention does not go through transformers' attention interface")
        try_out(model, router, key, name, right, text.num_hidden_layers)
    except Exception as e:
        model.close()
        if isinstance(e, ConfigError):
            raise
        raise UnsupportedModel(f"{name} does not run with the engine's attention: {type(e).__name__}: {e}") from e
    return model


def check_fallback(folder: Path, raw: Mapping[str, Any]) -> Any:
    """transformers' configuration of a model, if it may be served by what its config.json says; whether it can be, only
    a trial shows. Reads no weights. Raises UnsupportedModel, ConfigError."""
    name = architecture_of(raw)
    refuse_quantization(name, raw)
    config = _read_hf_config(folder, name, raw)
    text = config.get_text_config()
    _refuse_by_config(name, config, text)
    _max_position(name, text)
    return config


def _read_hf_config(folder: Path, name: str, raw: Mapping[str, Any]) -> Any:
    if "auto_map" in raw and raw.get("model_type") not in {c.model_type for c in MODEL_FOR_CAUSAL_LM_MAPPING}:
        raise UnsupportedModel(f"{name} needs Python code from its own folder (auto_map), which is never run; take a "
                               "checkpoint that transformers supports itself")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, TypeError) as e:
        raise UnsupportedModel(f"transformers cannot read the config of {name}: {e}") from e


def _refuse_by_config(name: str, config: Any, text: Any) -> None:
    """The reasons that a configuration states by itself; the others show when the model is tried."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder model; only decoder-only models are served")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"{name}: transformers has no causal language model of type {config.model_type!r}")
    if getattr(text, "kv_lora_rank", None):
        raise UnsupportedModel(f"{name} uses multi-head latent attention (kv_lora_rank {text.kv_lora_rank}), for which "
                               "the KV cache has no layout")
    if getattr(text, "alibi", False) or config.model_type in _ALIBI:
        raise UnsupportedModel(f"{name} adds ALiBi position biases to its attention, which no backend here does")
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if kinds:
        raise UnsupportedModel(f"{name} has layers of type {', '.join(kinds)}; full_attention and sliding_attention "
                               "are supported")


def _max_position(name: str, text: Any) -> int:
    most = getattr(text, "max_position_embeddings", None)
    if not isinstance(most, int):
        raise UnsupportedModel(f"{name}: its config gives no max_position_embeddings")
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn":
        most = max(most, int(rope["original_max_position_embeddings"] * (rope.get("factor") or 1)))
    return most


def _load_weights(folder: Path, name: str, config: Any, dtype: torch.dtype, progress: Progress | None) -> Any:
    """The transformers model with the folder's weights, on the CPU, with transformers' plain attention."""
    source = SafetensorsSource(folder)
    with _quiet(), torch.random.fork_rng(devices=[]):
        try:
            loader: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            causal, found = loader.from_pretrained(
                None, config=config, state_dict=source.slices(), dtype=dtype, attn_implementation="eager",
                ignore_mismatched_sizes=True, output_loading_info=True)
        except (ImportError, ValueError) as e:
            raise UnsupportedModel(f"transformers cannot load {name}: {e}") from e
    extra = sorted(n for n in found["unexpected_keys"] if not COMPUTED.search(n))
    shapes = [f"{n} is {list(has)}, the config wants {list(wants)}" for n, has, wants in found["mismatched_keys"]]
    parts = [f"{len(names)} {what}: {', '.join(names)}" for what, names in
             (("missing", sorted(found["missing_keys"])), ("misshapen", sorted(shapes)),
              ("not part of this model", extra), ("unreadable", list(found["error_msgs"]))) if names]
    if parts:
        raise WeightError("the checkpoint does not fit its config: " + "; ".join(parts))
    for parameter, tensor in causal.named_parameters():
        if not is_finite(tensor):
            raise WeightError(NOT_FINITE.format(parameter, DAMAGED))
    total = sum(p.numel() for p in causal.parameters())
    if progress is not None:
        progress(total, total)
    return causal.requires_grad_(False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and warnings of transformers inside: what they would say is raised or reported by us."""
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def _freeze_rotary(causal: Any, text: Any, positions: int) -> None:
    """Rotary embeddings that look at the batch's longest sequence would make a cell of the KV cache depend on its
    neighbours. Dynamic ones keep their base frequencies, which are right up to max_position_embeddings; longrope's are
    chosen by the context that is served."""
    for module in causal.modules():
        kind = getattr(module, "rope_type", None)
        if kind == "longrope":
            rotated = 2 * module.inv_freq.shape[0]
            rope = parse_rope(text.to_dict() | {"partial_rotary_factor": 1.0, "head_dim": rotated}, rotated,
                              text.max_position_embeddings)
            module.inv_freq.copy_(rope_frequencies(rope, positions))
        if kind in ("longrope", "dynamic"):
            module.rope_type = "default"
        elif isinstance(kind, dict) and {"longrope", "dynamic"} & set(kind.values()):
            raise UnsupportedModel(f"rope types {sorted(set(kind.values()))} by layer depend on the batch's lengths")


# -------------------------------------------------------------------------------------------------------- trying it out
def try_out(model: FallbackModel, router: Router, key: str, name: str, right: torch.Tensor, n_layers: int) -> None:
    """Runs the trial described at the top of this module and tells the model its layers. Raises UnsupportedModel."""
    ids = probe_ids(model.vocab_size, model.device)
    positions = torch.arange(len(ids), device=model.device)
    calls = _observe(model, router, key, name, ids, positions)
    layers = tuple(call.spec for call in calls)
    if len(layers) != n_layers:
        raise UnsupportedModel(f"{name} has {n_layers} layers but made {len(layers)} attention calls: some layers keep "
                               "state of another kind, or none")
    whole = ProbeAttend(layers.__getitem__)
    if not close_enough(model.logits(model.forward(ids, positions, whole)), right, model.dtype):
        raise UnsupportedModel(f"{name}: with the engine's attention its logits differ from transformers' own; its "
                               "attention does more than scores, windows, caps and sinks say")
    steps = ProbeAttend(layers.__getitem__)
    parts = [model.logits(model.forward(ids[span], positions[span], steps)) for span in
             (slice(0, SPLIT), slice(SPLIT, None))]
    if not close_enough(torch.cat(parts), right, model.dtype):
        raise UnsupportedModel(f"{name}: fed in two steps its logits differ; something other than attention reads "
                               "earlier tokens, or positions are not taken from the step")
    model.layers = layers
    model.tap([call.module for call in calls])


def _right_logits(causal: Any, name: str, ids: torch.Tensor) -> torch.Tensor:
    """What transformers' own attention makes of the trial tokens, [T, V]."""
    try:
        return causal(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float()
    except Exception as e:
        raise UnsupportedModel(f"{name} does not run in transformers itself: {type(e).__name__}: {e}") from e


def _observe(model: FallbackModel, router: Router, key: str, name: str, ids: torch.Tensor,
             positions: torch.Tensor) -> list[Call]:
    """The attention calls of one forward pass, with the windows that their masks stand for."""
    masks = MaskProbe(model.max_position)
    calls: list[Call] = []
    router.calls = calls
    AttentionMaskInterface.register(key, masks)
    try:
        model.forward(ids, positions, ProbeAttend(lambda layer: calls[layer].spec))
        return [replace(call, spec=replace(call.spec, window=masks.window(call.mask))) for call in calls]
    except UnknownMask as e:
        raise UnsupportedModel(f"{name}: {e}") from e
    finally:
        router.calls = None
        AttentionMaskInterface._global_mapping.pop(key, None)


def _unregister(key: str) -> None:
    AttentionInterface._global_mapping.pop(key, None)


def _head_of(causal: Any) -> Any:
    """The model without its base: called with hidden states as `inputs_embeds`, it returns their logits by its own code
    (scales and caps included). It shares every weight."""
    head = copy.copy(causal)
    base = causal.base_model
    head._modules = {name: _Hidden(module) if module is base else module for name, module in causal._modules.items()}
    return head


def _decoder_layers(base: nn.Module, attentions: list[nn.Module]) -> nn.ModuleList:
    """The list of modules of which the n-th holds the n-th attention. Raises UnsupportedModel if there is none."""
    for layers in base.modules():
        if isinstance(layers, nn.ModuleList) and len(layers) == len(attentions) and all(
                any(module is attention for module in layer.modules())
                for layer, attention in zip(layers, attentions, strict=True)):
            return layers
    raise UnsupportedModel(f"{type(base).__name__} has no list of {len(attentions)} decoder layers")


def _tap(model: weakref.ref[FallbackModel], name: str) -> Callable:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        owner = model()
        if owner is not None and name in owner._taps:
            owner._taps[name] = (output[0] if isinstance(output, tuple) else output)[0]

    return hook
