"""Which attention backend serves a model on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from stretto.attn.api import AttentionBackend, LayerSpec
from stretto.attn.native_ragged import NativeRagged
from stretto.attn.torch_fixed import TorchFixed
from stretto.attn.torch_ragged import TorchRagged
from stretto.compat import ConfigError, attention_component, attention_features, check
from stretto.ops.native import attention, layer
from stretto.ops.native.library import trouble


def choose_backend(layers: Sequence[LayerSpec], page_size: int, device: torch.device, dtype: torch.dtype,
                   fixed: bool = False, kv_dtype: str | None = None) -> AttentionBackend:
    """Triton on CUDA; on a CPU our native kernels, or torch where this machine cannot have them. `fixed`: what a token
    sees is summed in one order, whatever the batch. `kv_dtype`: of the cache, as the configuration names it; None:
    `dtype`.

    Raises compat.ConfigError, naming both sides, where the layers, the page size or the device need what the backend
    does not have."""
    backend: AttentionBackend
    if device.type == "cuda":
        from stretto.attn.triton_ragged import TritonRagged  # imports triton, which CPU installations may lack

        name, backend = "triton", TritonRagged(device, dtype, fixed=fixed)
    else:
        name, backend = _of_cpu(dtype, fixed, kv_dtype)
    other = None if kv_dtype == str(dtype).removeprefix("torch.") else kv_dtype
    refusals = check(attention_features(layers, page_size, device.type, graphs=False, kv_dtype=other),
                     [attention_component(name, backend.caps)])
    if refusals:
        raise ConfigError(refusals)
    return backend


def _of_cpu(dtype: torch.dtype, fixed: bool, kv_dtype: str | None) -> tuple[str, AttentionBackend]:
    """The backend, under the name that refusals give it."""
    kinds = {str(dtype).removeprefix("torch."), kv_dtype or "float32"}
    reason = trouble(attention.NAME) or trouble(layer.NAME)
    if dtype not in layer.TYPES or kinds - NativeRagged.caps.kv_dtypes:
        reason = f"{' and '.join(sorted(kinds - NativeRagged.caps.kv_dtypes))} has no native kernels of attention"
    if reason is None:
        return "native", NativeRagged()
    backend = TorchFixed() if fixed else TorchRagged()
    backend.caps = replace(backend.caps, lack=f"torch attends, which takes longer: {reason}")
    return "torch", backend
